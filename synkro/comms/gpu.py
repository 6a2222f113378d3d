"""The communicator of a rank on a GPU: it chooses the way of each collective's arrays.

Arrays on GPUs go from GPU to GPU: by NCCL (``direct``) where it connects the ranks and can reduce
them, else, where the ranks open each other's device memory, by that (``peers``), as messages do.  All
others go through the host memory that the CPU workers use; those on GPUs are copied there and back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.base import Device
from ..values.arrays import Array
from .base import MESSAGE, Communicator, Read
from .direct import DirectCollectives, in_host_memory, on_gpu
from .ops import OPERATIONS, Operation
from .records import Arrays, Record, given

if TYPE_CHECKING:
    from .peers import Peers

_MESSAGE_FROM = 1 << 16
"""Bytes of a message from which on it stays on the device: smaller ones go through host memory."""


class GpuCommunicator(DirectCollectives):
    """The communicator of one rank on a GPU."""

    def __init__(
        self, host: Communicator, device: Device, gpu: int | None, peers: Peers | None = None
    ) -> None:
        """*peers*: where the ranks open each other's device memory.  The others are as there."""
        super().__init__(host, device, gpu)
        self._peers = peers

    def end(self, failed: bool) -> None:
        self._host.end(failed)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._device.empty(shape, dtype)

    def by_host(self) -> Communicator:
        return GpuCommunicator(self._host, self._device, None)

    def tidy(self) -> None:
        self._host.tidy()
        if self._peers is not None:
            self._peers.tidy()

    def send(self, array: Array, to: int, record: Record = MESSAGE, keep: Any = None) -> None:
        if in_host_memory(array):
            self._host.send(array, to, record, keep)
            return
        record = record._replace(on_gpu=True)
        if self._peers is not None and array.nbytes >= _MESSAGE_FROM:
            array = self._contiguous(array)
            lease = self._peers.posted(array)
            if lease is not None:
                chunk = lease.chunk
                record = record._replace(given=given([array]), window=chunk.handle, at=(chunk.nbytes,))
                self._host.send(np.empty(0, np.uint8), to, record, lease)
                return
        self._host.send(self._to_host(array), to, record, keep)

    def recv(self, source: int, record: Record = MESSAGE, read: Read | None = None) -> Array:
        fetched = None if self._peers is None else self._peers.fetched
        array = self._host.recv(source, record, fetched)
        _, theirs = self.agreement.records
        return self.to_device(array) if theirs.on_gpu and in_host_memory(array) else array

    def all_reduce(self, arrays: Arrays, operation: Operation, weight: float, names: str = "") -> Arrays:
        hosted = [array for array in arrays if in_host_memory(array)]
        if not hosted or len(hosted) == len(arrays):
            return super().all_reduce(arrays, operation, weight, names)
        kinds = "".join("h" if in_host_memory(array) else "g" for array in arrays)
        names = f"{names}, on the host (h) or the GPU (g): {kinds}"
        first = iter(self._host.all_reduce(hosted, operation, weight, names))
        others = [array for array in arrays if not in_host_memory(array)]
        second = iter(super().all_reduce(others, operation, weight, names))
        return [next(first if in_host_memory(array) else second) for array in arrays]

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        super().begin(epoch, ranks)
        if self._peers is not None:  # what was sent in the calls before has been read, or never will be
            self._peers.tidy()

    @property
    def _by_nccl(self) -> bool:
        """Whether to try NCCL first: it may connect the ranks, or there is only the host beside it."""
        return self._peers is None or self.links.serves

    def reduced(self, record: Record, arrays: Arrays) -> list[Array]:
        results = self.reduced_directly(record, arrays) if self._by_nccl else None
        operation = OPERATIONS[record.operation]
        if results is None and self._peers is not None and _reduces(arrays, operation):
            results = self._peers.reduced(record, arrays)
        if results is None:
            hosted = [self._to_host(array) for array in arrays]
            results = self._back(self._host.reduced(record, hosted), on_gpu(arrays))
        return results

    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        if self._by_nccl and super().reduced_in_place(arrays, operation):
            return True
        if self._peers is None or not _reduces(arrays, operation):
            return False
        return self._peers.reduced_in_place(arrays, operation)

    def rooted(self, kind: str, arrays: Arrays | None, root: int, keep: bool = False) -> list[Array]:
        results, from_gpu = None, True
        if self._by_nccl:
            results, from_gpu = self.rooted_directly(kind, arrays, root)
        if results is None and from_gpu and self._peers is not None:
            there = arrays is not None and on_gpu(arrays)
            mine = [self._contiguous(array) for array in arrays or ()] if there else arrays
            results, from_gpu = self._peers.rooted(kind, mine, root, there)
        if results is None:
            hosted = None if arrays is None else [self._to_host(array) for array in arrays]
            results = self._back(self._host.rooted(kind, hosted, root), from_gpu)
        return results

    def exchanged(self, kind: str, arrays: Arrays, root: int = -1, keep: bool = False) -> list[Array]:
        results = self.exchanged_directly(kind, arrays, root) if self._by_nccl else None
        if results is None and self._peers is not None and on_gpu(arrays):
            results = self._peers.exchanged(kind, self.in_rows(kind, arrays), root)
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
        return [self.to_device(array) for array in results] if to_gpu else results


def _reduces(arrays: Arrays, operation: Operation) -> bool:
    """Whether all these arrays lie on a GPU, which computes *operation* of them."""
    return bool(arrays) and all(
        not in_host_memory(array) and operation.partial_dtype(array.dtype).kind in "biufc"
        for array in arrays
    )
