"""Calls of functions: arguments in, rows scattered, results out."""
