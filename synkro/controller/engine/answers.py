"""The replies of all ranks to a command, unpickled."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

from ...ipc.channel import Lane
from ...memory.segment import Segment
from ...messages import Deliver, Failed, TooLong
from ...plan.call import Access, Region
from ...values.cache import Cache
from .failures import worker_error

if TYPE_CHECKING:
    from .engine import Engine


class Answers:
    """The replies to one command after the other."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._known: Cache[bytes, Any] = Cache()
        self._last: dict[Lane, tuple[list[bytes], list[Any]]] = {}  # pickled, and as they are

    def read(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*: the same list as long as the same ones come.

        Raises: the error of the rank that failed.
        """
        payloads = lane.replies()
        last = self._last.get(lane)
        if last is not None and last[0] is payloads:
            return last[1]
        replies = self.loaded(lane)
        if any(isinstance(reply, Failed) for reply in replies):
            raise worker_error(replies, lane.ranks, self._engine.host_of)
        if not any(isinstance(self._loaded(payload), TooLong) for payload in payloads):
            self._last[lane] = payloads, replies
        return replies

    def loaded(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*, those that are too long for the block fetched."""
        replies = [self._loaded(payload) for payload in lane.replies()]
        return self._fetched(lane, replies) if any(isinstance(r, TooLong) for r in replies) else replies

    def _loaded(self, payload: bytes) -> Any:
        """The reply in *payload*: the same object as long as the same bytes keep coming."""
        reply = self._known.get(payload)
        if reply is None:
            reply = pickle.loads(payload)
            self._known[payload] = reply
        return reply

    def _fetched(self, lane: Lane, replies: list[Any]) -> list[Any]:
        """*replies*, with the long ones, through a segment with room for them."""
        engine = self._engine
        lengths = [reply.nbytes if isinstance(reply, TooLong) else 0 for reply in replies]
        shape = (engine.size, max(lengths))
        # not by ``allocate``: it may run a command, and the ranks keep their last reply only
        segment = engine.adopt(Segment.create(engine.directory.number(), shape[0] * shape[1]))
        region = Region(segment.number, 0, shape, "|u1")
        engine.run(Deliver(region), [(segment, Access.WRITE)], lane=lane)
        rows = segment.array(region)
        return [
            pickle.loads(rows[rank, :length].tobytes()) if length else reply
            for rank, length, reply in zip(lane.ranks, lengths, replies, strict=True)
        ]
