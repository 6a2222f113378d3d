"""How commands get to the workers, with what these are to know of memory, and their replies back.

One worker at a time, too: buried when it has died, and another one begun in its place.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import CallTimeout, InternalError
from ...ipc.block import AREA, LOGGED
from ...ipc.channel import Controller, Lane
from ...ipc.pool import SOCKET_PATIENCE, WorkerPool
from ...ipc.process import ProcessEnd
from ...ipc.waiting import Words, clock
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment
from ...messages import Ack, Command, Deliver, Failed, Indirect, Release, TooLong
from ...packing.pickles import loads
from ...plan.call import Access, Region
from ...values.cache import Unpickled
from .directory import Directory
from .failures import Late, call_timeout, worker_error

Segments = Sequence[tuple[Segment, Access]]


@dataclass(eq=False)
class Post:
    """Sends commands: descriptors of new segments over the sockets, the rest through the block.

    Replies are read one command after the other; *run* does a command, which fetches long ones.
    """

    _pool: WorkerPool
    _channel: Controller
    _directory: Directory
    _run: Callable[..., list[Any]]
    _words: Words = field(init=False)
    _known: Unpickled[Any] = field(default_factory=lambda: Unpickled(loads))
    _last: dict[Lane, tuple[list[bytes], list[Any]]] = field(default_factory=dict)  # as pickles, too

    def __post_init__(self) -> None:
        self._words = self._channel.words

    def send(self, payload: bytes, segments: Segments, lane: Lane, late: int | None = None) -> None:
        """Send a pickled command, and before it what the ranks are to know of memory.

        *segments* are those that it names.  A long command goes through a segment of its own.  All but
        the rank *late*, if given, have begun it.

        Raises: CallTimeout.
        """
        directory = self._directory
        ranks = lane.ranks if late is None else (late,)
        hand_over = lane.send if late is None else functools.partial(lane.send_late, late)
        if len(payload) > AREA // 2:
            segment = directory.allocate(len(payload))
            segment.base[:] = memoryview(payload)
            command = Indirect(Region(segment.number, 0, (len(payload),), "|u1"))
            payload, segments = pickle.dumps(command, 5), [*segments, *directory.segments(command)]
        news = directory.news(segments, ranks) if segments or directory.gone else None
        if news is None:
            hand_over(payload, b"")
            return
        if len(payload) + len(news.housekeeping) > AREA:
            raise InternalError(f"{len(news.housekeeping)} bytes of housekeeping do not fit the block.")
        with uninterrupted():  # so that the directory says what the workers have
            for rank in ranks if news.new else ():
                lacking = [s for s, _ in news.new.values() if not directory.has(rank, s.number)]
                try:
                    self._pool.pass_descriptors(rank, [(s.number, s.fd) for s in lacking])
                except TimeoutError:
                    raise self.late([rank], SOCKET_PATIENCE) from None
            hand_over(payload, news.housekeeping)
            directory.heard(news, ranks)

    def late(self, ranks: Sequence[int], limit: float) -> CallTimeout:
        """What to raise when *ranks* have not answered within *limit* seconds."""
        pids, host_of, whereabouts = self._pool.pids, self._pool.host_of, self._channel.whereabouts
        standing = [Late(rank, pids[rank], host_of(rank), *whereabouts(rank)) for rank in ranks]
        return call_timeout(standing, limit)

    def read(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*: the same list as long as the same ones come.

        What they have logged by then is handed over first.

        Raises: the error of the rank that failed.
        """
        if self._words[LOGGED]:
            self.hear_logs()
        payloads = lane.replies()
        last = self._last.get(lane)
        if last is not None and last[0] is payloads:
            return last[1]
        replies = self.unpickled(lane)
        if any(isinstance(reply, Failed) for reply in replies):
            raise worker_error(replies, lane.ranks, self._pool.host_of)
        if not any(isinstance(self._known[payload], TooLong) for payload in payloads):
            self._last[lane] = payloads, replies
        return replies

    def hear_logs(self) -> None:
        """Hand over what the workers have logged until now."""
        if self._channel.take_logged():
            self._pool.hear_logs()

    def unpickled(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*, those that are too long for the block fetched."""
        replies = [self._known[payload] for payload in lane.replies()]
        return self._fetched(lane, replies) if any(isinstance(r, TooLong) for r in replies) else replies

    def _fetched(self, lane: Lane, replies: list[Any]) -> list[Any]:
        """*replies*, with the long ones, through a segment with room for them."""
        lengths = [reply.nbytes if isinstance(reply, TooLong) else 0 for reply in replies]
        shape = (max(lane.ranks) + 1, max(lengths))
        # of its own: to allocate one may run a command, and the ranks keep their last reply only
        segment = self._directory.allocate(shape[0] * shape[1])
        region = Region(segment.number, 0, shape, "|u1")
        self._run(Deliver(region), lane=lane)
        rows = segment.array(region)
        return [
            loads(rows[rank, :length].tobytes()) if length else reply
            for rank, length, reply in zip(lane.ranks, lengths, replies, strict=True)
        ]


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
