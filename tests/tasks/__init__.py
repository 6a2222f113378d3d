"""Maps and executors: whichever worker is free takes the next task."""
