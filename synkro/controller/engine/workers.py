"""One worker at a time: buried when it has died, and another one begun in its place."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import WorkerDied
from ...ipc.channel import Controller
from ...ipc.pool import WorkerPool
from ...ipc.process import ProcessEnd
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment
from ...messages import Ack, Command
from ...plan.call import Access
from .directory import Directory
from .post import Post

_ACK = pickle.dumps(Ack(), 5)


@dataclass(eq=False)
class Workers:
    """The workers of a session, one at a time, while others do what is open."""

    _pool: WorkerPool
    _channel: Controller
    _directory: Directory
    _post: Post

    def bury(self, rank: int) -> None:
        """The worker of *rank* has died, and owes no answer any more."""
        with uninterrupted():
            self._pool.bury(rank)
            self._channel.begin_anew(rank)
            self._channel.write_reply(rank, _ACK)
            self._directory.forget(rank)

    def replace(self, rank: int) -> None:
        """Start another worker in the place of that of *rank*, which is buried; it knows nothing.

        Raises: SessionError.
        """
        self._pool.replace(rank)

    def died(self, ended: ProcessEnd, at: str, cure: str) -> WorkerDied:
        """What to raise for a worker that has *ended*; *at* begins the sentence, *cure* is the next."""
        return self._pool.died(ended, at, cure)

    def tell(self, rank: int, command: Command, limit: float | None) -> Any:
        """Have *rank* alone do *command*, while others do what is open; returns its reply.

        Raises: WorkerError …; WorkerDied; CallTimeout.
        """
        lane = self._channel.lane((rank,))
        segments = self._directory.segments(command)
        self._post.send(pickle.dumps(command, 5), segments, lane)
        deadline = None if limit is None else time.monotonic() + limit
        sentinel = self._pool.sentinel_of(rank)
        if lane.wait(deadline, [sentinel]):
            raise self._pool.death(sentinel)
        if late := lane.unanswered():
            raise self._post.late(late, limit or 0.0)
        return self._post.read(lane)[0]

    def join(self, rank: int, payload: bytes, segments: Sequence[tuple[Segment, Access]]) -> None:
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
