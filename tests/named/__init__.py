"""Memory with a name, and rings."""
