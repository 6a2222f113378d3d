"""Outputs of all ranks, and the one result that they become."""
