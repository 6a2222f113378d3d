"""How fast Synkro is, one question a module; see README.md and run.py."""
