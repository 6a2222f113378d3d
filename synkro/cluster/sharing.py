"""What the ranks of this host show those of others, and the others these: a relay, and the wire.

Whether a rank has answered a command is not in the journals: it says so in the block of its host.  Ranks
that wait in a collective have to know.  So the hosts tell each other, when there is something in the
journals at all.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

from ..ipc.descriptors import Inherited
from .orders import Ended, Shown
from .relay import Relay
from .wire import Wire


def by_rank(hosts: Sequence[range]) -> list[int]:
    """The numbers of the *hosts* that have ranks, in the order of these."""
    return sorted((n for n, ranks in enumerate(hosts) if ranks), key=lambda n: hosts[n].start)


class Sharing:
    """One host's end."""

    def __init__(
        self,
        wire: Wire,
        hosts: Sequence[range],
        inherited: Inherited,
        answered: Callable[[int], int],
    ) -> None:
        """*hosts* are the ranks of each process of MPI's; *inherited* what the workers of this host
        inherit, which this object closes; *answered* tells the last command that a rank has answered."""
        self._wire = wire
        self._inherited = inherited
        self._numbers = by_rank(hosts)
        self._ranks = hosts[wire.number]
        self._answered = answered
        self._told: dict[int, int] = {}
        self._traffic = False
        self._relay: Relay | None = None
        if self._ranks:
            here = self._numbers.index(wire.number)
            ranges = [hosts[number] for number in self._numbers]
            size, end = sum(map(len, hosts)), inherited
            self._relay = Relay(end.arena, size, ranges, here, end.wakes, end.wake_relay)

    def called(self) -> bool:
        """Whether ranks of this host have shown something, while collectives go on."""
        return self._traffic and self._relay is not None and self._relay.has_news()

    def step(self, busy: Callable[[], bool]) -> bool:
        """Pass on what is new; *busy* says whether a command goes on.  Returns whether something was."""
        if self._relay is None or not (self._traffic or self._relay.has_news()):
            return False
        # read before the journals are: what a rank has written down comes before its answer
        answered = {rank: self._answered(rank) for rank in self._ranks} if self._traffic else {}
        passed = self._pass_on(self._relay)
        news = {rank: number for rank, number in answered.items() if self._told.get(rank) != number}
        if news:
            self._told |= news
            for number in self._numbers:
                if number != self._wire.number:
                    self._wire.send(number, Ended(news))
        if not (passed or news or busy()):
            self._traffic = False
        return passed or bool(news)

    def _pass_on(self, relay: Relay) -> bool:
        """Send what the ranks of this host have shown; returns whether there was something."""
        passed = relay.outgoing()
        for host, (entries, shown) in passed.items():
            self._wire.send(self._numbers[host], Shown(entries), shown)
            self._traffic = True
        return bool(passed)

    def take(self, source: int, shown: Shown) -> None:
        """What another host has passed on has come.  Raises: SharedMemoryError.

        While it comes, what is shown here goes: both ways at the same time.
        """
        self._traffic = True
        if (relay := self._relay) is not None:
            meanwhile = functools.partial(self._pass_on, relay)
            relay.apply(shown.entries, lambda views: self._wire.fill(source, views, meanwhile))

    def dozing(self, doze: Callable[[list[int]], object]) -> None:
        """Do *doze*, which ends when one of the descriptors that it gets is readable."""
        if self._relay is None:
            doze([])
        else:
            wake = self._relay.wake
            self._relay.dozing(lambda: doze([wake]))

    def close(self) -> None:
        """Give the descriptors back."""
        self._relay = None
        for fd in self._inherited.listed():
            os.close(fd)
