"""The command line: ``python -m synkro info``, ``doctor`` and ``bench``."""
