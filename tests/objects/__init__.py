"""Objects that functions bring along, and how they travel."""
