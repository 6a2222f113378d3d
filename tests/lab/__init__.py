"""The benchmarks, and the program that verifies GPUs."""
