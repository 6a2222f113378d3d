"""The replies of all ranks to a command, unpickled."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

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
        self._payloads: list[bytes] = []  # the last ones, pickled
        self._replies: list[Any] = []

    def read(self, payloads: list[bytes]) -> list[Any]:
        """The replies: the same list as long as the same one of *payloads* comes.

        Raises: the error of the rank that failed.
        """
        if payloads is self._payloads:
            return self._replies
        replies = self.loaded(payloads)
        if any(isinstance(reply, Failed) for reply in replies):
            raise worker_error(replies)
        long = any(isinstance(self._loaded(payload), TooLong) for payload in payloads)
        self._payloads, self._replies = [] if long else payloads, replies
        return replies

    def loaded(self, payloads: list[bytes]) -> list[Any]:
        """The replies, those that are too long for the block fetched."""
        replies = [self._loaded(payload) for payload in payloads]
        return self._fetched(replies) if any(isinstance(r, TooLong) for r in replies) else replies

    def _loaded(self, payload: bytes) -> Any:
        """The reply in *payload*: the same object as long as the same bytes keep coming."""
        reply = self._known.get(payload)
        if reply is None:
            reply = pickle.loads(payload)
            self._known[payload] = reply
        return reply

    def _fetched(self, replies: list[Any]) -> list[Any]:
        """*replies*, with the long ones, through a segment with room for them."""
        engine = self._engine
        lengths = [reply.nbytes if isinstance(reply, TooLong) else 0 for reply in replies]
        shape = (len(replies), max(lengths))
        # not by ``allocate``: it may run a command, and the ranks keep their last reply only
        segment = engine.adopt(Segment.create(engine.directory.number(), shape[0] * shape[1]))
        region = Region(segment.number, 0, shape, "|u1")
        engine.run(Deliver(region), [(segment, Access.WRITE)])
        rows = segment.array(region)
        return [
            pickle.loads(rows[rank, :length].tobytes()) if length else replies[rank]
            for rank, length in enumerate(lengths)
        ]
