"""The verification of GPU workers, on a machine that has a GPU."""
