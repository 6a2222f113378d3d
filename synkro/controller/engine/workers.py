"""One worker at a time: buried when it has died, and another one begun in its place."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import WorkerDied
from ...ipc.channel import Controller
from ...ipc.pool import WorkerPool
from ...ipc.process import ProcessEnd
from ...memory.interrupts import uninterrupted
from ...messages import Ack, Command, Release
from .directory import Directory
from .post import Post, Segments

_ACK = pickle.dumps(Ack(), 5)
_AT_ONCE = 500  # segments of which a worker hears at once


@dataclass(eq=False)
class Workers:
    """The workers of a session, one at a time, while others do what is open."""

    _pool: WorkerPool
    _channel: Controller
    _directory: Directory
    _post: Post
    _had: dict[int, Segments] = field(default_factory=dict)  # by buried rank

    def bury(self, rank: int) -> None:
        """The worker of *rank* has died, and owes no answer any more."""
        with uninterrupted():
            self._pool.bury(rank)
            self._channel.begin_anew(rank)
            self._channel.write_reply(rank, _ACK)
            self._had[rank] = self._directory.forget(rank)

    def replace(self, rank: int) -> None:
        """Start another worker in the place of that of *rank*, which is buried; it knows the segments.

        Raises: SessionError; WorkerDied.
        """
        self._pool.replace(rank)
        had = self._had.pop(rank)
        for first in range(0, len(had), _AT_ONCE):
            self._send(rank, Release(), had[first : first + _AT_ONCE], None)

    def died(self, ended: ProcessEnd, at: str, cure: str) -> WorkerDied:
        """What to raise for a worker that has *ended*; *at* begins the sentence, *cure* is the next."""
        return self._pool.died(ended, at, cure)

    def tell(self, rank: int, command: Command, limit: float | None) -> Any:
        """Have *rank* alone do *command*, while others do what is open; returns its reply.

        Raises: WorkerError …; WorkerDied; CallTimeout.
        """
        return self._send(rank, command, self._directory.segments(command), limit)

    def _send(self, rank: int, command: Command, segments: Segments, limit: float | None) -> Any:
        lane = self._channel.lane((rank,))
        self._post.send(pickle.dumps(command, 5), segments, lane)
        deadline = None if limit is None else time.monotonic() + limit
        sentinel = self._pool.sentinel_of(rank)
        if lane.wait(deadline, [sentinel]):
            raise self._pool.death(sentinel)
        if late := lane.unanswered():
            raise self._post.late(late, limit or 0.0)
        return self._post.read(lane)[0]

    def join(self, rank: int, payload: bytes, segments: Segments) -> None:
        """Have *rank* do what is open, too, the command *payload*, which all others have begun."""
        self._post.send(payload, segments, self._channel.everyone, rank)

    def pass_descriptors(self, numbered: Sequence[tuple[int, int]], ranks: Sequence[int]) -> None:
        """Pass descriptors to *ranks*, as pairs ``(number, fd)``."""
        with uninterrupted():
            for rank in ranks:
                self._pool.pass_descriptors(rank, numbered)

    def kill(self, rank: int) -> None:
        """Kill the worker of *rank*."""
        self._pool.kill([rank])

    def read_arena(self, place: int, nbytes: int) -> Iterator[bytes]:
        """What a rank of this host, though its worker may have died, has in the arena."""
        return self._pool.read_arena(place, nbytes)
