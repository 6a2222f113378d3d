"""Shared variables, their updates, and generators."""
