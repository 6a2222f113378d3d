"""The replies of all ranks to a command, unpickled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...ipc.channel import Lane
from ...messages import Deliver, Failed, TooLong
from ...packing.pickles import loads
from ...plan.call import Region
from ...values.cache import Cache
from .directory import Directory
from .failures import worker_error


@dataclass(eq=False)
class Answers:
    """The replies to one command after the other.

    *run* does a command, which fetches long replies; *host_of* names the host of a rank.
    """

    _run: Callable[..., list[Any]]
    _directory: Directory
    _host_of: Callable[[int], str]
    _known: Cache[bytes, Any] = field(default_factory=Cache)
    _last: dict[Lane, tuple[list[bytes], list[Any]]] = field(default_factory=dict)  # as pickles, too

    def read(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*: the same list as long as the same ones come.

        Raises: the error of the rank that failed.
        """
        payloads = lane.replies()
        last = self._last.get(lane)
        if last is not None and last[0] is payloads:
            return last[1]
        replies = self.unpickled(lane)
        if any(isinstance(reply, Failed) for reply in replies):
            raise worker_error(replies, lane.ranks, self._host_of)
        if not any(isinstance(self._unpickled(payload), TooLong) for payload in payloads):
            self._last[lane] = payloads, replies
        return replies

    def unpickled(self, lane: Lane) -> list[Any]:
        """The replies of the ranks of *lane*, those that are too long for the block fetched."""
        replies = [self._unpickled(payload) for payload in lane.replies()]
        return self._fetched(lane, replies) if any(isinstance(r, TooLong) for r in replies) else replies

    def _unpickled(self, payload: bytes) -> Any:
        """The reply in *payload*: the same object as long as the same bytes keep coming."""
        reply = self._known.get(payload)
        if reply is None:
            reply = loads(payload)
            self._known[payload] = reply
        return reply

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
