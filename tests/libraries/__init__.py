"""Functions and programs that use other libraries."""
