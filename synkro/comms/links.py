"""The links between GPUs, and how ranks agree on one.

A *link* is an NCCL communicator.  The ranks of a call make it when they first need it, and keep it for
later calls of the same ranks.  After an error some ranks may have aborted theirs: each record carries
the number of the rank's link, and where the numbers differ all ranks make a new link.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np

from ..errors import CollectiveError
from .base import Communicator
from .ops import OPERATIONS
from .records import Record

if TYPE_CHECKING:
    from .nccl import Link

_UNKNOWN, _IMPOSSIBLE, _ALONE = 0, -1, -2
"""Numbers instead of a link's: there is none yet; NCCL cannot connect; one rank needs none."""


class Links:
    """One rank's ends of the links of a session, by the ranks that they connect."""

    def __init__(self, host: Communicator, gpu: int | None) -> None:
        """*gpu* is the number of this rank's GPU; None where NCCL cannot serve."""
        self._host = host
        self._gpu = gpu
        self._meeting = host.agreement.meeting
        self._known: dict[tuple[int, ...], tuple[int, Link | None]] = {}
        self._made = 0

    def agree(self, record: Record) -> tuple[list[Record], Link | None, bool]:
        """Enter a collective; returns all records, the link if one is needed, and whether NCCL can."""
        while True:
            number, link = self._current()
            records = self._host.agreement.enter(record._replace(link=number))
            if number != _UNKNOWN and all(other.link == number for other in records):
                return records, link, number != _IMPOSSIBLE
            self._meeting.pass_on()
            if link is not None:
                link.abort()
            self.connect()

    def _current(self) -> tuple[int, Link | None]:
        if self._host.count == 1:
            return _ALONE, None
        if self._gpu is None:
            return _IMPOSSIBLE, None
        number, link = self._known.get(self._meeting.members.ranks, (_UNKNOWN, None))
        return (_UNKNOWN, None) if link is not None and not link.alive else (number, link)

    def connect(self) -> str:
        """Make a link, with all ranks of this call; returns why NCCL cannot, or an empty text."""
        if self._host.count == 1 or self._gpu is None:
            return ""
        from .nccl import Link  # noqa: PLC0415  where there is no GPU there is no CuPy

        identity, problem = self._identity()
        link = None
        if identity:
            try:
                place, count = self._host.place, self._host.count
                link = Link(identity, place, count, self._meeting, self._gpu)
            except CollectiveError as error:
                problem = str(error)
        problem = self._problem_of_any(problem)
        if problem and link is not None:
            link.abort()
        self._made += 1
        made = self._host.all_reduce([np.array(self._made)], OPERATIONS["max"], 1)
        self._made = int(made[0])
        known = (_IMPOSSIBLE, None) if problem else (self._made, link)
        self._known[self._meeting.members.ranks] = known
        return problem

    def close(self) -> None:
        """Abort all links, as the process ends."""
        for _, link in self._known.values():
            if link is not None:
                with contextlib.suppress(Exception):  # what cannot be given back goes with the process
                    link.abort()
        self._known.clear()

    def _identity(self) -> tuple[bytes, str]:
        """NCCL's unique id, which the first rank makes; empty if it cannot, with the problem."""
        told, problem = None, ""
        if self._host.place == 0:
            from .nccl import unique_id  # noqa: PLC0415  as in connect

            try:
                told = [np.frombuffer(unique_id(self._meeting), np.uint8)]
            except CollectiveError as error:
                told, problem = [np.empty(0, np.uint8)], str(error)
        return self._host.broadcast(told, 0)[0].tobytes(), problem

    def _problem_of_any(self, problem: str) -> str:
        """The problem of the first rank that has one, told to all ranks."""
        text = np.frombuffer(problem.encode() + b"\0", np.uint8)
        problems = self._host.all_gather([text])[0].tobytes().decode()
        return next(filter(None, problems.split("\0")), "")
