"""How far the clocks of other hosts are ahead of this one's."""

from __future__ import annotations

import time
from collections import deque

_KEPT = 20  # looks that are compared: the quickest tells best, and clocks drift


class Clocks:
    """Those of all hosts, as the gateway sees them; all in ns."""

    def __init__(self) -> None:
        self._looks: dict[int, deque[tuple[int, int]]] = {}  # by host: how long it took, how far ahead

    def heard(self, host: int, sent: int, now: int) -> bool:
        """A host's clock said *now*, when it was asked at *sent* on this one's.

        Returns whether it should be asked again at once.
        """
        took = time.perf_counter_ns() - sent
        self._looks.setdefault(host, deque(maxlen=_KEPT)).append((took, now - sent - took // 2))
        return len(self._looks[host]) < _KEPT

    def ahead(self, host: int) -> int:
        """How far a host's clock is ahead: right to half of the quickest look; 0 without one."""
        return min(self._looks.get(host, [(0, 0)]))[1]
