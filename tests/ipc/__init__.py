"""Commands and replies, from the main process to the ranks."""
