"""Collectives between GPUs: the ranks agree through shared memory, and the arrays go over NCCL.

    prepare    everything that may fail here: memory, packing, casts
    agree      records on the board; whoever failed before is known now, and nobody goes on
    move       NCCL, under a watchdog; a world of one has nothing to move
    finish     divide, cast, cut

Arrays in host memory go the way of the CPU workers.  So do, copied there and back, arrays on GPUs
which NCCL does not connect, and what NCCL cannot reduce (``wire``).  What is sent from rank to rank goes
through host memory too: a message may wait there until it is received, which NCCL's cannot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..devices.base import Device
from ..plan.split import split
from ..values.arrays import Array
from .agreement import Guard
from .base import Communicator
from .links import Links
from .ops import Operation
from .records import KIND, Record, given, layout_of, pack, shapes_of
from .shm import ShmCommunicator
from .wire import REDUCTIONS, carried_as_is, carrier, decode, encode

if TYPE_CHECKING:
    from .links import Connect
    from .nccl import Link


Results = TypeVar("Results", list[Array], list[Array] | None)


class GpuCommunicator(Communicator):
    """One rank's end."""

    def __init__(self, host: ShmCommunicator, device: Device, connect: Connect | None) -> None:
        """*connect* makes a link of the rank's place among so many; None where NCCL cannot serve."""
        self._host = host
        self._device = device
        self._links = Links(host, connect)
        self._agreement = host.agreement
        self._meeting = host.agreement.meeting
        self._guard = Guard(self._meeting)

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
        """With all ranks of this call, connect their GPUs; returns why that cannot be, or nothing."""
        return self._links.connect()

    def close(self) -> None:
        """Give NCCL's memory and files back; no collective can follow."""
        self._links.close()

    def _agree(self, record: Record) -> tuple[list[Record], Link | None, bool]:
        """Enter a collective of arrays on GPUs; also, the link, and whether the arrays can use it."""
        return self._links.agree(record)

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def all_reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, names: str = ""
    ) -> list[Array]:
        hosted = [array for array in arrays if _in_host_memory(array)]
        if hosted and len(hosted) < len(arrays):  # each kind by itself
            kinds = "".join("h" if _in_host_memory(array) else "g" for array in arrays)
            names = f"{names}, on the host (h) or the GPU (g): {kinds}"
            first = iter(self._host.all_reduce(hosted, operation, weight, names))
            others = [array for array in arrays if not _in_host_memory(array)]
            second = iter(self.all_reduce(others, operation, weight, names))
            return [next(first if _in_host_memory(array) else second) for array in arrays]
        record = Record(KIND["all_reduce"], operation.name, -1, weight, None, on_gpu=True, names=names)
        results = self._reduced(record, arrays, operation)
        if results is not None:
            return results
        return self._through_host(
            lambda copies: self._host.all_reduce(copies, operation, weight, names), arrays
        )

    def reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, root: int
    ) -> list[Array] | None:
        record = Record(KIND["reduce"], operation.name, root, weight, None, on_gpu=True)
        results = self._reduced(record, arrays, operation)
        if results is not None:
            return results if self.place == root else None
        return self._through_host(
            lambda copies: self._host.reduce(copies, operation, weight, root), arrays
        )

    def reduce_scatter(
        self, arrays: Sequence[Array], operation: Operation, weight: float
    ) -> list[Array]:
        record = Record(KIND["reduce_scatter"], operation.name, -1, weight, None, on_gpu=True)
        results = self._reduced(record, arrays, operation)
        if results is not None:
            return results
        return self._through_host(
            lambda copies: self._host.reduce_scatter(copies, operation, weight), arrays
        )

    def _reduced(
        self, record: Record, arrays: Sequence[Array], operation: Operation
    ) -> list[Array] | None:
        """The reduction that *record* names; None if it has to go through host memory."""
        if not _carried(arrays, operation):
            return None
        record = record._replace(given=given(arrays))
        layout = layout_of(record)
        vectors = [self.empty(size, d) for size, d in zip(layout.sizes, layout.dtypes, strict=True)]
        pack(record, arrays, vectors)
        carried = [encode(operation, vector) for vector in vectors]
        records, link, linked = self._agree(record)
        self._agreement.check_alike(records)
        if record.kind == KIND["reduce_scatter"]:
            self._agreement.check_rows(records)
        divisor = self._agreement.check_weights(records)
        if linked and link is not None:
            self._move(record, link, carried)
        self._meeting.pass_on()
        if not linked:
            return None
        for index, dtype in enumerate(layout.dtypes):
            vectors[index] = decode(operation, carried[index], dtype)
            operation.finish(vectors[index], divisor, out=vectors[index])
        results = []
        for array, (vector, start, stop) in zip(arrays, layout.places, strict=True):
            result = vectors[vector][start:stop].reshape(array.shape)
            if record.kind == KIND["reduce_scatter"]:
                result = result[slice(*split(0, len(array), self.count)[self.place])].copy()
            results.append(result.astype(operation.result_dtype(array.dtype), copy=False))
        return results

    def _move(self, record: Record, link: Link, carried: Sequence[Array]) -> None:
        """Reduce the vectors of a reduction, in place, where their results are wanted."""
        name = REDUCTIONS[record.operation]
        if record.kind == KIND["all_reduce"]:
            link.all_reduce(carried, name, self._guard)
        elif record.kind == KIND["reduce"]:
            link.reduce([(vector, record.root) for vector in carried], name, self._guard)
        else:
            layout, jobs = layout_of(record), []
            for (shape, _), (vector, start, stop) in zip(record.given, layout.places, strict=True):
                elements = carried[vector].size // max(1, layout.sizes[vector][0])  # two if complex
                row = (stop - start) // max(1, shape[0])
                for root, (low, high) in enumerate(split(0, shape[0], self.count)):
                    part = slice((start + low * row) * elements, (start + high * row) * elements)
                    jobs.append((carried[vector][part], root))
            link.reduce(jobs, name, self._guard)

    def all_reduce_in_place(self, arrays: Sequence[Array], operation: Operation) -> None:
        direct = all(_directly(array, operation) for array in arrays)
        described, kind = given(arrays), KIND["all_reduce"]
        record = Record(kind, operation.name, -1, 1, None, True, described, on_gpu=True)
        if direct:
            records, link, linked = self._agree(record)
            self._agreement.check_alike(records)
            if linked and link is not None:
                link.all_reduce(arrays, REDUCTIONS[operation.name], self._guard)
            self._meeting.pass_on()
            if linked:
                for array in arrays:
                    operation.finish(array, self.count, out=array)
                return
        for array, result in zip(arrays, self.all_reduce(arrays, operation, 1), strict=True):
            array[...] = result

    def reduce_out(
        self,
        operations: Sequence[Operation],
        divisor: float,
        partials: Sequence[Any],
        targets: Sequence[Array],
    ) -> None:
        """Reduce partials of all ranks, as one transfer, into arrays in host memory.

        Every rank copies its n-th part of the elements, so that the way of each to the host is used.
        """
        sent, parts = [], []
        for operation, partial in zip(operations, partials, strict=True):
            length = -(-partial.size // self.count)
            vector = self.empty((length * self.count,), partial.dtype)
            self._device.assign(vector[: partial.size].reshape(partial.shape), partial)
            sent.append(encode(operation, vector))
            parts.append(self.empty((sent[-1].size // self.count,), sent[-1].dtype))
        names = ",".join(operation.name for operation in operations)
        described = given(partials)
        record = Record(KIND["reduce_scatter"], names, -1, 1, None, True, described, on_gpu=True)
        _, link, linked = self._agree(record)
        if not linked:
            self._agreement.refuse("NCCL cannot connect the GPUs any more")
        if link is not None:
            reductions = [REDUCTIONS[operation.name] for operation in operations]
            jobs = list(zip(sent, parts, strict=True))
            link.reduce_scatter(jobs, reductions, self._guard)
        self._meeting.pass_on()
        pairs = []
        for operation, partial, source, target in zip(
            operations, partials, sent if link is None else parts, targets, strict=True
        ):
            reduced = decode(operation, source, partial.dtype)
            operation.finish(reduced, divisor, out=reduced)
            start = min(self.place * reduced.size, target.size)
            stop = min(start + reduced.size, target.size)
            pairs.append((target.reshape(-1)[start:stop], reduced[: stop - start]))
        self._device.copy_out(pairs)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def barrier(self) -> None:
        self._host.barrier()

    def broadcast(self, arrays: Sequence[Array] | None, root: int, lasting: bool = False) -> list[Array]:
        shapes, records, link = self._rooted("broadcast", arrays, root)
        if shapes is None:
            return self._hosted_or_not(
                lambda copies: self._host.broadcast(copies, root), arrays, records[root]
            )
        mine = arrays if arrays is not None and self.place == root else None
        results = [self.empty(shape, dtype) for shape, dtype in shapes]
        for result, array in zip(results, mine or (), strict=False):
            result[...] = array
        self._meeting.step()
        if link is not None:
            link.broadcast([(result, root) for result in results], self._guard)
        self._meeting.pass_on()
        return results

    def scatter(self, arrays: Sequence[Array] | None, root: int) -> list[Array]:
        shapes, records, link = self._rooted("scatter", arrays, root)
        if shapes is None:
            return self._hosted_or_not(
                lambda copies: self._host.scatter(copies, root), arrays, records[root]
            )
        self._agreement.check_rows([records[root]])
        results, sent, received = [], [], []
        for index, (shape, dtype) in enumerate(shapes):
            spans = split(0, shape[0], self.count)
            low, high = spans[self.place]
            results.append(self.empty((high - low, *shape[1:]), dtype))
            if self.place != root:
                received.append((results[-1], root))
                continue
            assert arrays is not None
            whole = self._contiguous(arrays[index])
            results[-1][...] = whole[low:high]
            sent += [(whole[slice(*s)], peer) for peer, s in enumerate(spans) if peer != root]
        self._meeting.step()
        self._exchange(link, sent, received)
        return results

    def all_gather(self, arrays: Sequence[Array], lasting: bool = False) -> list[Array]:
        results = self._gathered("all_gather", arrays, -1)
        if results is None:
            return self._through_host(self._host.all_gather, arrays)
        return results

    def gather(self, arrays: Sequence[Array], root: int) -> list[Array] | None:
        if not all(map(_in_host_memory, arrays)):
            results = self._gathered("gather", arrays, root)
            if results is not None:
                return results if self.place == root else None
        return self._through_host(lambda copies: self._host.gather(copies, root), arrays)

    def _gathered(self, kind: str, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """The arrays of all ranks one behind the other, on *root* or, if it is -1, on all."""
        if all(map(_in_host_memory, arrays)):
            return None
        arrays = [self._contiguous(array if array.ndim else array.reshape(1)) for array in arrays]
        described = given(arrays)
        records, link, linked = self._agree(
            Record(KIND[kind], "", root, 1, None, False, described, True)
        )
        self._agreement.check_fit(records)
        if not linked:
            self._meeting.pass_on()
            return None
        results, sent, received = [], [], []
        for index, array in enumerate(arrays):
            peers = range(self.count) if root < 0 else [root]
            sent += [(array, peer) for peer in peers if peer != self.place]
            if root not in (-1, self.place):
                continue
            lengths = [shapes_of(record)[index][0][0] for record in records]
            result = self.empty((sum(lengths), *array.shape[1:]), array.dtype)
            start = 0
            for peer, length in enumerate(lengths):
                part = result[start : start + length]
                if peer == self.place:
                    part[...] = array
                else:
                    received.append((part, peer))
                start += length
            results.append(result)
        self._meeting.step()
        self._exchange(link, sent, received)
        return results

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        if all(map(_in_host_memory, arrays)):
            return self._host.all_to_all(arrays)
        arrays = [self._contiguous(array) for array in arrays]
        described = given(arrays)
        records, link, linked = self._agree(
            Record(KIND["all_to_all"], "", -1, 1, None, False, described, True)
        )
        self._agreement.check_fit(records)
        if not linked:
            self._meeting.pass_on()
            return self._through_host(self._host.all_to_all, arrays)
        results, sent, received = [], [], []
        for index, array in enumerate(arrays):
            theirs = [split(0, shapes_of(r)[index][0][0], self.count)[self.place] for r in records]
            spans = split(0, len(array), self.count)
            rows = sum(high - low for low, high in theirs)
            result = self.empty((rows, *array.shape[1:]), array.dtype)
            start = 0
            for peer, (low, high) in enumerate(theirs):
                part = result[start : start + high - low]
                start += high - low
                if peer == self.place:
                    part[...] = array[slice(*spans[peer])]
                    continue
                received.append((part, peer))
                sent.append((array[slice(*spans[peer])], peer))
            results.append(result)
        self._meeting.step()
        self._exchange(link, sent, received)
        return results

    def send(self, array: Array, to: int) -> None:
        self._host.send(self._to_host(array), to, on_gpu=not _in_host_memory(array))

    def recv(self, source: int) -> Array:
        array, on_gpu = self._host.receive(source)
        return self._to_device(array) if on_gpu else array

    def _rooted(
        self, kind: str, arrays: Sequence[Array] | None, root: int
    ) -> tuple[Sequence[tuple[tuple[int, ...], str]] | None, list[Record], Link | None]:
        """Enter a collective of which only the root has arrays: what they are, if they lie on a GPU.

        Otherwise the collective is over, and has to be entered anew as one of host memory.
        """
        record = Record(KIND[kind], "", root, 1, None)
        if arrays is not None and self.place == root:
            on_gpu = not all(map(_in_host_memory, arrays))
            record = record._replace(given=given(arrays), on_gpu=on_gpu)
        records, link, linked = self._agree(record)
        if records[root].on_gpu and linked:
            return shapes_of(records[root]), records, link
        self._meeting.pass_on()
        return None, records, None

    def _exchange(
        self, link: Link | None, sent: list[tuple[Array, int]], received: list[tuple[Array, int]]
    ) -> None:
        if link is not None:
            link.exchange(sent, received, self._guard)
        self._meeting.pass_on()

    # ── through host memory ──────────────────────────────────────────────────────────────────────

    def _hosted_or_not(
        self,
        collective: Callable[[list[Array] | None], list[Array]],
        arrays: Sequence[Array] | None,
        root: Record,
    ) -> list[Array]:
        """A rooted collective through host memory; its results lie where the root's arrays lie."""
        copies = None if arrays is None else [self._to_host(array) for array in arrays]
        results = collective(copies)
        return [self._to_device(array) for array in results] if root.on_gpu else results

    def _through_host(
        self, collective: Callable[[list[Array]], Results], arrays: Sequence[Array]
    ) -> Results:
        """A collective over copies in host memory, if that is not where *arrays* lie already."""
        results = collective([self._to_host(array) for array in arrays])
        if results is None or all(map(_in_host_memory, arrays)):
            return results
        return [self._to_device(array) for array in results]

    def _to_host(self, array: Array) -> Array:
        if _in_host_memory(array):
            return array
        copy = self._host.empty(array.shape, array.dtype)  # memory that is used again
        self._device.copy_out([(copy, array)])
        return copy

    def _to_device(self, array: Array) -> Array:
        copy = self.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy

    def _contiguous(self, array: Array) -> Array:
        if array.flags.c_contiguous and not _in_host_memory(array):
            return array
        copy = self.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy


def _in_host_memory(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def _carried(arrays: Sequence[Array], operation: Operation) -> bool:
    """Whether NCCL can reduce *arrays*."""
    return all(
        not _in_host_memory(array) and carrier(operation, operation.partial_dtype(array.dtype))
        for array in arrays
    ) and bool(arrays)


def _directly(array: Array, operation: Operation) -> bool:
    """Whether NCCL can reduce *array* where it lies, as it is."""
    return (
        operation.partial_dtype(array.dtype) == array.dtype
        and carried_as_is(operation, array.dtype)
        and array.flags.c_contiguous
    )
