"""The communicator of a rank on a GPU: it chooses the way of each collective's arrays.

Arrays on GPUs go from GPU to GPU (``direct``) where NCCL connects the ranks and can reduce them.  All
others go through the host memory that the CPU workers use; those on GPUs are copied there and back.
Messages from rank to rank always do, as they may have to wait there for their receiver.

A *link* is an NCCL communicator.  The ranks of a call make it when they first need it, and keep it for
later calls of the same ranks.  After an error some ranks may have aborted theirs: each record carries
the number of the rank's link, and where the numbers differ all ranks make a new link.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.base import Device
from ..errors import CollectiveError
from ..values.arrays import Array
from .base import MESSAGE, Communicator
from .direct import DirectCollectives, in_host_memory, on_gpu
from .ops import OPERATIONS, Operation
from .records import Arrays, Record

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


class GpuCommunicator(DirectCollectives):
    """The communicator of one rank on a GPU.

    Attributes:
        links: the links of NCCL to other ranks.
    """

    def __init__(self, host: Communicator, device: Device, gpu: int | None) -> None:
        """*host* is the communicator of arrays in host memory; *gpu* is the number of this rank's GPU,
        or None where NCCL cannot serve."""
        self.links = Links(host, gpu)
        super().__init__(host.agreement, device, self.links.agree)
        self._host = host

    def end(self, failed: bool) -> None:
        self._host.end(failed)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._device.empty(shape, dtype)

    def by_host(self) -> Communicator:
        return GpuCommunicator(self._host, self._device, None)

    def tidy(self) -> None:
        self._host.tidy()

    def send(self, array: Array, to: int, record: Record = MESSAGE) -> None:
        if not in_host_memory(array):
            array, record = self._to_host(array), record._replace(on_gpu=True)
        self._host.send(array, to, record)

    def recv(self, source: int, record: Record = MESSAGE) -> Array:
        array = self._host.recv(source, record)
        _, theirs = self.agreement.records
        return self._to_device(array) if theirs.on_gpu else array

    def all_reduce(
        self, arrays: Arrays, operation: Operation, weight: float, names: str = ""
    ) -> list[Array]:
        hosted = [array for array in arrays if in_host_memory(array)]
        if not hosted or len(hosted) == len(arrays):
            return super().all_reduce(arrays, operation, weight, names)
        kinds = "".join("h" if in_host_memory(array) else "g" for array in arrays)
        names = f"{names}, on the host (h) or the GPU (g): {kinds}"
        first = iter(self._host.all_reduce(hosted, operation, weight, names))
        others = [array for array in arrays if not in_host_memory(array)]
        second = iter(super().all_reduce(others, operation, weight, names))
        return [next(first if in_host_memory(array) else second) for array in arrays]

    def reduced(self, record: Record, arrays: Arrays) -> list[Array]:
        results = self.reduced_directly(record, arrays)
        if results is None:
            hosted = [self._to_host(array) for array in arrays]
            results = self._back(self._host.reduced(record, hosted), on_gpu(arrays))
        return results

    def rooted(self, kind: str, arrays: Arrays | None, root: int, keep: bool = False) -> list[Array]:
        results, from_gpu = self.rooted_directly(kind, arrays, root)
        if results is None:
            hosted = None if arrays is None else [self._to_host(array) for array in arrays]
            results = self._back(self._host.rooted(kind, hosted, root), from_gpu)
        return results

    def exchanged(self, kind: str, arrays: Arrays, root: int = -1, keep: bool = False) -> list[Array]:
        results = self.exchanged_directly(kind, arrays, root)
        if results is None:
            hosted = [self._to_host(array) for array in arrays]
            results = self._back(self._host.exchanged(kind, hosted, root), on_gpu(arrays))
        return results

    # ── through host memory ──────────────────────────────────────────────────────────────────────

    def _to_host(self, array: Array) -> Array:
        if in_host_memory(array):
            return array
        copy = self._host.empty(array.shape, array.dtype)  # memory that is used again
        self._device.copy_out([(copy, array)])
        return copy

    def _back(self, results: list[Array], to_gpu: bool) -> list[Array]:
        return [self._to_device(array) for array in results] if to_gpu else results

    def _to_device(self, array: Array) -> Array:
        copy = self.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy
