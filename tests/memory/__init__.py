"""Segments of shared memory, and what is said where memory or descriptors run out."""
