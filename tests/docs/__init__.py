"""Documents, demos, types, the command, and the house itself."""
