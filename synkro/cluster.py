"""``python -m synkro.cluster prog.py``, which is called ``python -m synkro.hosts prog.py`` now."""

from __future__ import annotations

import sys

from .hosts.__main__ import main

if __name__ == "__main__":
    if sys.argv[1:]:
        print(
            "Synkro: python -m synkro.cluster is called python -m synkro.hosts now, and goes on.",
            file=sys.stderr,
        )
    sys.exit(main(sys.argv[1:]))
