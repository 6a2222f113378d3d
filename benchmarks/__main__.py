"""``python -m benchmarks``: the same as ``python benchmarks/run.py``."""

import sys

from .run import command, ctrl_c

if __name__ == "__main__":
    sys.exit(ctrl_c.status_of(command))
