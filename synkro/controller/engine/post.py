"""How commands get to the workers, with what these are to know of memory."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass

from ...errors import CallTimeout, InternalError
from ...ipc.block import AREA
from ...ipc.channel import Controller, Lane
from ...ipc.pool import SOCKET_PATIENCE, WorkerPool
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment
from ...messages import Indirect
from ...plan.call import Access, Region
from .directory import Directory
from .failures import Late, call_timeout

Segments = Sequence[tuple[Segment, Access]]


@dataclass(eq=False)
class Post:
    """Sends commands: descriptors of new segments over the sockets, the rest through the block."""

    _pool: WorkerPool
    _channel: Controller
    _directory: Directory

    def send(self, payload: bytes, segments: Segments, lane: Lane) -> None:
        """Send a pickled command, and before it what the ranks are to know of memory.

        *segments* are those that it names.  A long command goes through a segment of its own.

        Raises: CallTimeout.
        """
        directory = self._directory
        if len(payload) > AREA // 2:
            segment = directory.allocate(len(payload))
            segment.base[:] = memoryview(payload)
            command = Indirect(Region(segment.number, 0, (len(payload),), "|u1"))
            payload, segments = pickle.dumps(command, 5), [*segments, *directory.segments(command)]
        news = directory.news(segments, lane.ranks) if segments or directory.gone else None
        if news is None:
            lane.send(payload, b"")
            return
        if len(payload) + len(news.housekeeping) > AREA:
            raise InternalError(f"{len(news.housekeeping)} bytes of housekeeping do not fit the block.")
        with uninterrupted():  # so that the directory says what the workers have
            for rank in lane.ranks if news.new else ():
                new = [
                    (s.number, s.fd) for s, _ in news.new.values() if not directory.has(rank, s.number)
                ]
                try:
                    self._pool.pass_descriptors(rank, new)
                except TimeoutError:
                    raise self.late([rank], SOCKET_PATIENCE) from None
            lane.send(payload, news.housekeeping)
            directory.heard(news, lane.ranks)

    def late(self, ranks: Sequence[int], limit: float) -> CallTimeout:
        """What to raise when *ranks* have not answered within *limit* seconds."""
        pids, host_of, whereabouts = self._pool.pids, self._pool.host_of, self._channel.whereabouts
        standing = [Late(rank, pids[rank], host_of(rank), *whereabouts(rank)) for rank in ranks]
        return call_timeout(standing, limit)
