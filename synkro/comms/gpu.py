"""The communicator of a rank on a GPU: it chooses the way of each collective's arrays.

Arrays on GPUs go from GPU to GPU (``direct``) where NCCL connects the ranks and can reduce them.  All
others go through the host memory that the CPU workers use; those on GPUs are copied there and back.
Messages from rank to rank always do, as they may have to wait there for their receiver.
"""

from __future__ import annotations

from typing import Any

from ..values.arrays import Array
from .base import MESSAGE, Communicator
from .direct import DirectCollectives, in_host_memory, on_gpu
from .ops import Operation
from .records import Arrays, Record


class GpuCommunicator(DirectCollectives):
    """The communicator of one rank on a GPU."""

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
        return self.to_device(array) if theirs.on_gpu else array

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
        return [self.to_device(array) for array in results] if to_gpu else results
