"""Sessions: workers that start, end, die, and are told apart from the program."""
