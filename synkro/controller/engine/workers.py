"""One worker at a time: buried when it has died, and another one begun in its place."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ...ipc.channel import Controller, Lane
from ...ipc.pool import WorkerPool
from ...ipc.process import ProcessEnd
from ...ipc.waiting import clock
from ...memory.interrupts import uninterrupted
from ...messages import Ack, Command, Release
from .directory import Directory
from .post import Post, Segments

_ACK = pickle.dumps(Ack(), 5)
_AGAIN = 1.0  # seconds after which a rank that does not answer is interrupted once more
_AT_ONCE = 500  # segments of which a worker hears at once


@dataclass(eq=False)
class Workers:
    """The workers of a session, one at a time, while others do what is open.

    Attributes:
        pool: their processes.
    """

    pool: WorkerPool
    _channel: Controller
    _directory: Directory
    _post: Post = field(init=False)
    _had: dict[int, Segments] = field(default_factory=dict)  # by buried rank
    _passed: list[tuple[int, int]] = field(default_factory=list)  # descriptors that all ranks have

    def __post_init__(self) -> None:
        self._post = Post(self.pool, self._channel, self._directory, self.each)

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers, by rank."""
        return self.pool.pids

    def hear_logs(self) -> None:
        """Hand over what the workers have logged until now, while a command goes on."""
        self._post.hear_logs()

    def bury(self, rank: int) -> None:
        """The worker of *rank* has died, or is killed now, and owes no answer any more."""
        with uninterrupted():
            self.pool.bury(rank)
            self._channel.begin_anew(rank)
            self._channel.write_reply(rank, _ACK)
            self._had[rank] = self._directory.forget(rank)

    def replace(self, rank: int) -> None:
        """Start another worker in the place of that of *rank*, which is buried; it knows the segments.

        Raises: SessionError; WorkerDied.
        """
        self.pool.replace(rank)
        self.pool.pass_descriptors(rank, self._passed)
        had = self._had.pop(rank)
        for first in range(0, len(had), _AT_ONCE):
            self._send(rank, Release(), had[first : first + _AT_ONCE], None)

    def ended(self, rank: int) -> ProcessEnd:
        """How the worker of *rank* has ended."""
        return self.pool.end_of(self.pool.sentinel_of(rank))

    def tell(self, rank: int, command: Command, limit: float | None) -> Any:
        """Have *rank* alone do *command*, while others do what is open; returns its reply.

        Raises: WorkerError …; WorkerDied; CallTimeout.
        """
        return self._send(rank, command, self._directory.segments(command), limit)

    def _send(self, rank: int, command: Command, segments: Segments, limit: float | None) -> Any:
        lane = self._channel.lane((rank,))
        self._post.send(pickle.dumps(command, 5), segments, lane)
        deadline = None if limit is None else clock() + limit
        sentinel = self.pool.sentinel_of(rank)
        if lane.wait(deadline, [sentinel]):
            raise self.pool.death(sentinel)
        if late := lane.unanswered():
            raise self._post.late(late, limit or 0.0)
        return self._post.read(lane)[0]

    def each(self, command: Command, lane: Lane | None = None) -> list[Any]:
        """Have each rank of *lane*, or each of all, do *command*, one after the other; returns their
        replies."""
        segments, ranks = self._directory.segments(command), (lane or self._channel.everyone).ranks
        return [self._send(rank, command, segments, None) for rank in ranks]

    def join(self, rank: int, payload: bytes, segments: Segments) -> None:
        """Have *rank* do what is open, too, the command *payload*, which all others have begun."""
        self._post.send(payload, segments, self._channel.everyone, rank)

    def pass_descriptors(self, numbered: Sequence[tuple[int, int]]) -> None:
        """Pass descriptors to all ranks, as pairs ``(number, fd)``, also to workers that come later."""
        self._passed += numbered
        with uninterrupted():
            for rank in self._channel.everyone.ranks:
                self.pool.pass_descriptors(rank, numbered)

    def calm(self, seconds: float) -> list[int]:
        """Interrupt all ranks that have not answered, and wait for them: who has not answered after so
        many seconds is killed.  Returns the ranks that died, which are buried."""
        lane, dead = self._channel.everyone, list[int]()
        deadline = clock() + seconds
        while waiting := lane.unanswered():
            for rank in waiting:
                self._channel.give_up(rank)
            self._channel.fence()
            self._channel.wake_all()
            if clock() < deadline:
                self.pool.interrupt(waiting)
            else:
                self.pool.kill(waiting)
            until = clock() + _AGAIN
            for sentinel in lane.wait_for(lambda: not lane.unanswered(), until, self.pool.sentinels):
                dead.append(self.pool.end_of(sentinel).rank)
                self.bury(dead[-1])
        return dead
