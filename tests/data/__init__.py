"""Inputs: arrays in shared memory, in files, and tables."""
