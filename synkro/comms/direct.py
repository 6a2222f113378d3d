"""Collectives from GPU to GPU: the ranks agree through shared memory, and NCCL moves the arrays.

    prepare    everything that may fail on this rank: memory, packing, casts
    agree      records on the board: every rank learns of a failure before any of them moves data
    move       NCCL, under a watchdog; a world of one has nothing to move
    finish     divide, cast, cut

A method returns None, on all ranks, where its arrays have to go through host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

from ..devices.base import Device
from ..plan.split import Span, split
from ..values.arrays import Array
from .agreement import Guard
from .links import Links
from .ops import Operation
from .records import KIND, ArrayType, Record, given, layout_of, pack, shapes_of
from .shm import ShmCommunicator
from .wire import REDUCTIONS, carried_as_is, carrier, decode, encode

if TYPE_CHECKING:
    from .nccl import Link


class DirectCollectives:
    """One rank's end."""

    def __init__(self, host: ShmCommunicator, device: Device, links: Links) -> None:
        self._host = host
        self._device = device
        self._links = links
        self._agreement = host.agreement
        self._meeting = host.agreement.meeting
        self._guard = Guard(self._meeting)

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced(
        self, record: Record, arrays: Sequence[Array], operation: Operation
    ) -> list[Array] | None:
        """The reduction that *record* names, as one vector for each partial dtype."""
        if not _carried(arrays, operation):
            return None
        record = record._replace(given=given(arrays))
        layout = layout_of(record)
        sizes = zip(layout.sizes, layout.dtypes, strict=True)
        vectors = [self._device.empty(size, dtype) for size, dtype in sizes]
        pack(record, arrays, vectors)
        carried = [encode(operation, vector) for vector in vectors]
        records, link, linked = self._links.agree(record)
        self._agreement.check_alike(records)
        if record.kind == KIND["reduce_scatter"]:
            self._agreement.check_rows(records)
        divisor = self._agreement.check_weights(records)
        if linked and link is not None:
            self._reduce(record, link, carried)
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
                result = result[slice(*self._rows_of(len(array), self._host.place))].copy()
            results.append(result.astype(operation.result_dtype(array.dtype), copy=False))
        return results

    def _reduce(self, record: Record, link: Link, carried: Sequence[Array]) -> None:
        """Reduce vectors in place, on the ranks that want the results."""
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
                for root, (low, high) in enumerate(split(0, shape[0], self._host.count)):
                    part = slice((start + low * row) * elements, (start + high * row) * elements)
                    jobs.append((carried[vector][part], root))
            link.reduce(jobs, name, self._guard)

    def reduced_in_place(self, arrays: Sequence[Array], operation: Operation) -> bool:
        """All-reduce *arrays*, each with weight 1, where they lie; whether that was possible."""
        if not all(_as_is(array, operation) for array in arrays):
            return False
        record = Record(
            KIND["all_reduce"], operation.name, in_place=True, given=given(arrays), on_gpu=True
        )
        records, link, linked = self._links.agree(record)
        self._agreement.check_alike(records)
        if linked and link is not None:
            link.all_reduce(arrays, REDUCTIONS[operation.name], self._guard)
        self._meeting.pass_on()
        for array in arrays if linked else ():
            operation.finish(array, self._host.count, out=array)
        return linked

    def reduce_out(
        self,
        operations: Sequence[Operation],
        divisor: float,
        partials: Sequence[Any],
        targets: Sequence[Array],
    ) -> None:
        """Reduce partials of all ranks, as one transfer, into arrays in host memory.

        Each rank copies its n-th part of the elements to the host, over its own bus.
        """
        sent, parts = [], []
        for operation, partial in zip(operations, partials, strict=True):
            length = -(-partial.size // self._host.count)
            vector = self._device.empty((length * self._host.count,), partial.dtype)
            self._device.assign(vector[: partial.size].reshape(partial.shape), partial)
            sent.append(encode(operation, vector))
            parts.append(self._device.empty((sent[-1].size // self._host.count,), sent[-1].dtype))
        names = ",".join(operation.name for operation in operations)
        record = Record(KIND["reduce_scatter"], names, in_place=True, given=given(partials), on_gpu=True)
        _, link, linked = self._links.agree(record)
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
            start = min(self._host.place * reduced.size, target.size)
            stop = min(start + reduced.size, target.size)
            pairs.append((target.reshape(-1)[start:stop], reduced[: stop - start]))
        self._device.copy_out(pairs)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def broadcast(self, arrays: Sequence[Array] | None, root: int) -> tuple[list[Array] | None, bool]:
        """Copies of *root*'s arrays, if they lie on its GPU; also, whether they lie there."""
        origin, link, direct = self._rooted("broadcast", arrays, root)
        if not direct:
            return None, origin.on_gpu
        results = [self._device.empty(shape, dtype) for shape, dtype in shapes_of(origin)]
        if arrays is not None and self._host.place == root:
            for result, array in zip(results, arrays, strict=True):
                result[...] = array
        self._meeting.step()
        if link is not None:
            link.broadcast([(result, root) for result in results], self._guard)
        self._meeting.pass_on()
        return results, True

    def scatter(self, arrays: Sequence[Array] | None, root: int) -> tuple[list[Array] | None, bool]:
        """This rank's rows of *root*'s arrays, if they lie on its GPU; also, whether they lie there."""
        origin, link, direct = self._rooted("scatter", arrays, root)
        if not direct:
            return None, origin.on_gpu
        self._agreement.check_rows([origin])
        shapes = shapes_of(origin)
        nothing = [((0, *shape[1:]), dtype) for shape, dtype in shapes]
        everyone = [shapes if place == root else nothing for place in range(self._host.count)]
        mine = map(self._contiguous, arrays or ()) if self._host.place == root else ()
        return self._exchange(link, list(mine), everyone, self._rows_of), True

    def gather(self, kind: str, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """The arrays of all ranks one behind the other, on *root* or, if it is -1, on all."""

        def rows_for(rows: int, place: int) -> Span:
            return (0, rows) if root in (-1, place) else (0, 0)

        arrays = [array if array.ndim else array.reshape(1) for array in arrays]
        return self._enter_exchange(kind, arrays, root, rows_for)

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array] | None:
        """This rank's part of the rows of every rank."""
        return self._enter_exchange("all_to_all", arrays, -1, self._rows_of)

    def _rows_of(self, rows: int, place: int) -> Span:
        """The part of so many rows that goes to rank *place* when they are split."""
        return split(0, rows, self._host.count)[place]

    def _rooted(
        self, kind: str, arrays: Sequence[Array] | None, root: int
    ) -> tuple[Record, Link | None, bool]:
        """Enter a collective of which only *root* has arrays.

        Returns the root's record, the link if one is needed, and whether NCCL can move the arrays.
        If not, this collective is over: the ranks enter another one, of host memory.
        """
        record = Record(KIND[kind], root=root)
        if arrays is not None and self._host.place == root:
            on_gpu = not all(map(in_host_memory, arrays))
            record = record._replace(given=given(arrays), on_gpu=on_gpu)
        records, link, linked = self._links.agree(record)
        direct = linked and records[root].on_gpu
        if not direct:
            self._meeting.pass_on()
        return records[root], link, direct

    def _enter_exchange(
        self, kind: str, arrays: Sequence[Array], root: int, rows_for: Callable[[int, int], Span]
    ) -> list[Array] | None:
        """Enter a collective in which all ranks exchange rows of their arrays, and do it."""
        arrays = [self._contiguous(array) for array in arrays]
        record = Record(KIND[kind], root=root, given=given(arrays), on_gpu=True)
        records, link, linked = self._links.agree(record)
        self._agreement.check_fit(records)
        if linked:
            return self._exchange(link, arrays, [shapes_of(each) for each in records], rows_for)
        self._meeting.pass_on()
        return None

    def _exchange(
        self,
        link: Link | None,
        arrays: Sequence[Array],
        shapes: Sequence[Sequence[ArrayType]],
        rows_for: Callable[[int, int], Span],
    ) -> list[Array]:
        """For each array, this rank's part of the rows of every rank, one behind the other.

        ``shapes[r]`` are the shapes and dtypes of rank r's arrays.  ``rows_for(rows, place)`` says which
        rows of an array go to a rank.  *arrays*, contiguous, are this rank's; empty if it has no rows.
        """
        place = self._host.place
        results, sent, received = [], [], []
        for index, (shape, dtype) in enumerate(shapes[place]):
            spans = [rows_for(theirs[index][0][0], place) for theirs in shapes]
            counts = [stop - start for start, stop in spans]
            result = self._device.empty((sum(counts), *shape[1:]), dtype)
            ends = accumulate(counts)
            parts = [result[end - count : end] for end, count in zip(ends, counts, strict=True)]
            for peer, part in enumerate(parts):
                mine = arrays[index][slice(*rows_for(shape[0], peer))] if arrays else part[:0]
                if peer == place:
                    part[...] = mine
                else:
                    sent.append((mine, peer))
                    received.append((part, peer))
            results.append(result)
        self._meeting.step()
        if link is not None:
            link.exchange(sent, received, self._guard)
        self._meeting.pass_on()
        return results

    def _contiguous(self, array: Array) -> Array:
        if array.flags.c_contiguous and not in_host_memory(array):
            return array
        copy = self._device.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy


def in_host_memory(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def _carried(arrays: Sequence[Array], operation: Operation) -> bool:
    """Whether NCCL can reduce *arrays*."""
    return all(
        not in_host_memory(array) and carrier(operation, operation.partial_dtype(array.dtype))
        for array in arrays
    ) and bool(arrays)


def _as_is(array: Array, operation: Operation) -> bool:
    """Whether NCCL can reduce *array* where it lies, as it is."""
    return (
        operation.partial_dtype(array.dtype) == array.dtype
        and carried_as_is(operation, array.dtype)
        and array.flags.c_contiguous
    )
