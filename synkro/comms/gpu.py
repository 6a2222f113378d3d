"""The communicator of a rank on a GPU: it chooses the way of each collective's arrays.

Arrays on GPUs go from GPU to GPU (``direct``) where NCCL connects the ranks and can reduce them
(``wire``).  All others go through the host memory that the CPU workers use; those on GPUs are copied
there and back.  Messages from rank to rank always do, as they may have to wait there for their receiver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ..devices.base import Device
from ..values.arrays import Array
from .base import Communicator
from .direct import DirectCollectives, in_host_memory
from .links import Links
from .ops import Operation
from .records import KIND, Record
from .shm import ShmCommunicator

if TYPE_CHECKING:
    from .links import Connect


Results = TypeVar("Results", list[Array], list[Array] | None)


class GpuCommunicator(Communicator):
    """One rank's end.

    Attributes:
        reduce_out: the method of ``DirectCollectives``.
    """

    def __init__(self, host: ShmCommunicator, device: Device, connect: Connect | None) -> None:
        """*connect* makes this rank's end of a link; None where NCCL cannot serve."""
        self._host = host
        self._device = device
        self._links = Links(host, connect)
        self._direct = DirectCollectives(host, device, self._links)
        self.reduce_out = self._direct.reduce_out

    @property
    def place(self) -> int:  # type: ignore[override]
        return self._host.place

    @property
    def count(self) -> int:  # type: ignore[override]
        return self._host.count

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        self._host.begin(epoch, ranks)

    def end(self, failed: bool) -> None:
        self._host.end(failed)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._device.empty(shape, dtype)

    def tidy(self) -> None:
        self._host.tidy()

    def reduce_share(
        self, operation: Operation, divisor: int, sources: Sequence[Array], target: Array
    ) -> None:
        self._host.reduce_share(operation, divisor, sources, target)

    def connect(self) -> str:
        """Connect the GPUs of all ranks of this call; returns why NCCL cannot, or an empty text."""
        return self._links.connect()

    def close(self) -> None:
        """Give NCCL's memory and files back; no collective can follow."""
        self._links.close()

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def all_reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, names: str = ""
    ) -> list[Array]:
        hosted = [array for array in arrays if in_host_memory(array)]
        if hosted and len(hosted) < len(arrays):  # each kind by itself
            kinds = "".join("h" if in_host_memory(array) else "g" for array in arrays)
            names = f"{names}, on the host (h) or the GPU (g): {kinds}"
            first = iter(self._host.all_reduce(hosted, operation, weight, names))
            others = [array for array in arrays if not in_host_memory(array)]
            second = iter(self.all_reduce(others, operation, weight, names))
            return [next(first if in_host_memory(array) else second) for array in arrays]
        record = Record(KIND["all_reduce"], operation.name, -1, weight, on_gpu=True, names=names)
        results = self._direct.reduced(record, arrays, operation)
        if results is not None:
            return results
        return self._through_host(self._host.all_reduce, arrays, operation, weight, names)

    def all_reduce_in_place(self, arrays: Sequence[Array], operation: Operation) -> None:
        if not self._direct.reduced_in_place(arrays, operation):
            for array, result in zip(arrays, self.all_reduce(arrays, operation, 1), strict=True):
                array[...] = result

    def reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, root: int
    ) -> list[Array] | None:
        record = Record(KIND["reduce"], operation.name, root, weight, on_gpu=True)
        results = self._direct.reduced(record, arrays, operation)
        if results is not None:
            return results if self.place == root else None
        return self._through_host(self._host.reduce, arrays, operation, weight, root)

    def reduce_scatter(
        self, arrays: Sequence[Array], operation: Operation, weight: float
    ) -> list[Array]:
        record = Record(KIND["reduce_scatter"], operation.name, -1, weight, on_gpu=True)
        results = self._direct.reduced(record, arrays, operation)
        if results is not None:
            return results
        return self._through_host(self._host.reduce_scatter, arrays, operation, weight)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def barrier(self) -> None:
        self._host.barrier()

    def broadcast(self, arrays: Sequence[Array] | None, root: int, lasting: bool = False) -> list[Array]:
        results, on_gpu = self._direct.broadcast(arrays, root)
        if results is not None:
            return results
        return self._through_host(self._host.broadcast, arrays, root, back=on_gpu)

    def scatter(self, arrays: Sequence[Array] | None, root: int) -> list[Array]:
        results, on_gpu = self._direct.scatter(arrays, root)
        if results is not None:
            return results
        return self._through_host(self._host.scatter, arrays, root, back=on_gpu)

    def all_gather(self, arrays: Sequence[Array], lasting: bool = False) -> list[Array]:
        if not all(map(in_host_memory, arrays)):
            results = self._direct.gather("all_gather", arrays, -1)
            if results is not None:
                return results
        return self._through_host(self._host.all_gather, arrays)

    def gather(self, arrays: Sequence[Array], root: int) -> list[Array] | None:
        if not all(map(in_host_memory, arrays)):
            results = self._direct.gather("gather", arrays, root)
            if results is not None:
                return results if self.place == root else None
        return self._through_host(self._host.gather, arrays, root)

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        if not all(map(in_host_memory, arrays)):
            results = self._direct.all_to_all(arrays)
            if results is not None:
                return results
        return self._through_host(self._host.all_to_all, arrays)

    def send(self, array: Array, to: int) -> None:
        self._host.send(self._to_host(array), to, on_gpu=not in_host_memory(array))

    def recv(self, source: int) -> Array:
        array, on_gpu = self._host.receive(source)
        return self._to_device(array) if on_gpu else array

    # ── through host memory ──────────────────────────────────────────────────────────────────────

    def _through_host(
        self,
        collective: Callable[..., Results],
        arrays: Sequence[Array] | None,
        *args: Any,
        back: bool | None = None,
    ) -> Results:
        """A collective over copies of *arrays* in host memory.

        *back* says whether its results go to the GPU; by default they go where *arrays* lie.
        """
        results = collective(arrays and [self._to_host(array) for array in arrays], *args)
        if back is None:
            back = not all(map(in_host_memory, arrays or ()))
        return [self._to_device(array) for array in results] if back and results else results

    def _to_host(self, array: Array) -> Array:
        if in_host_memory(array):
            return array
        copy = self._host.empty(array.shape, array.dtype)  # memory that is used again
        self._device.copy_out([(copy, array)])
        return copy

    def _to_device(self, array: Array) -> Array:
        copy = self.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy
