"""Collectives from GPU to GPU: the ranks agree through shared memory, and NCCL moves the arrays.

    prepare    everything that may fail on this rank: memory, packing, casts
    agree      records on the board: every rank learns of a failure before any of them moves data
    move       NCCL, under a watchdog; a rank alone has nothing to move
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
from .base import Communicator
from .links import Links
from .ops import OPERATIONS, Operation
from .records import ArrayType, Record, given, layout_of, pack, unpack
from .wire import REDUCTIONS, carried_as_is, carrier, decode, encode

if TYPE_CHECKING:
    from .nccl import Link


class DirectCollectives:
    """One rank's end."""

    def __init__(self, host: Communicator, device: Device, links: Links) -> None:
        self._host = host
        self._device = device
        self._links = links
        self._agreement = host.agreement
        self._meeting = host.agreement.meeting

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced(self, record: Record, arrays: Sequence[Array]) -> list[Array] | None:
        """The reduction that *record* names, as one vector for each partial dtype."""
        operation = OPERATIONS[record.operation]
        if not _carried(arrays, operation):
            return None
        record = record._replace(on_gpu=True)
        layout = layout_of(record)
        vectors = [self._device.empty(shape, dtype) for shape, dtype in layout.vectors]
        pack(record, arrays, vectors)
        carried = [encode(operation, vector) for vector in vectors]
        records, link, linked = self._links.agree(record)
        self._agreement.check_alike(records)
        if record.kind == "reduce_scatter":
            self._agreement.check_rows(records)
        divisor = self._agreement.check_weights(records)
        if link is not None:
            self._reduce(record, link, carried)
        self._meeting.pass_on()
        if not linked:
            return None
        for index, (_, dtype) in enumerate(layout.vectors):
            vectors[index] = decode(operation, carried[index], dtype)
            operation.finish(vectors[index], divisor, out=vectors[index])
        results = unpack(record, arrays, vectors)
        if record.kind == "reduce_scatter":
            results = [self._host.part_of(result).copy() for result in results]
        return results

    def _reduce(self, record: Record, link: Link, carried: Sequence[Array]) -> None:
        """Reduce vectors in place, on the ranks that want the results."""
        name = REDUCTIONS[record.operation]
        if record.kind == "all_reduce":
            link.all_reduce(carried, name)
        elif record.kind == "reduce":
            link.reduce([(vector, record.root) for vector in carried], name)
        else:
            layout, jobs = layout_of(record), []
            for (shape, _), (vector, start, stop) in zip(record.given, layout.places, strict=True):
                (size,), _ = layout.vectors[vector]
                elements = carried[vector].size // max(1, size)  # two if complex
                row = (stop - start) // max(1, shape[0])
                for root, (low, high) in enumerate(split(0, shape[0], self._host.count)):
                    part = slice((start + low * row) * elements, (start + high * row) * elements)
                    jobs.append((carried[vector][part], root))
            link.reduce(jobs, name)

    def reduced_in_place(self, arrays: Sequence[Array], operation: Operation) -> bool:
        """All-reduce *arrays*, each with weight 1, where they lie; whether that was possible."""
        if not all(_as_is(array, operation) for array in arrays):
            return False
        record = Record("all_reduce", operation.name, in_place=True, given=given(arrays), on_gpu=True)
        records, link, linked = self._links.agree(record)
        self._agreement.check_alike(records)
        if link is not None:
            link.all_reduce(arrays, REDUCTIONS[operation.name])
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
        record = Record("reduce_scatter", names, in_place=True, given=given(partials), on_gpu=True)
        _, link, linked = self._links.agree(record)
        if not linked:
            self._agreement.refuse("NCCL cannot connect the GPUs any more")
        if link is not None:
            reductions = [REDUCTIONS[operation.name] for operation in operations]
            jobs = list(zip(sent, parts, strict=True))
            link.reduce_scatter(jobs, reductions)
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

    def rooted(
        self, kind: str, arrays: Sequence[Array] | None, root: int
    ) -> tuple[list[Array] | None, bool]:
        """What this rank gets of *root*'s arrays, if they lie on its GPU; also, whether they do."""
        record = Record(kind, root=root)
        if arrays is not None:
            record = record._replace(given=given(arrays), on_gpu=on_gpu(arrays))
        records, link, linked = self._links.agree(record)
        origin = records[root]
        if not (linked and origin.on_gpu):
            self._meeting.pass_on()
            return None, origin.on_gpu
        if kind == "broadcast":
            return self._broadcast(link, arrays, origin), True
        self._agreement.check_rows([origin])
        nothing = [((0, *shape[1:]), dtype) for shape, dtype in origin.given]
        everyone = [origin.given if place == root else nothing for place in range(self._host.count)]
        mine = [self._contiguous(array) for array in arrays or ()]
        return self._exchange(link, mine, everyone, self._rows_of), True

    def _broadcast(
        self, link: Link | None, arrays: Sequence[Array] | None, origin: Record
    ) -> list[Array]:
        results = [self._device.empty(shape, dtype) for shape, dtype in origin.given]
        if arrays is not None:
            for result, array in zip(results, arrays, strict=True):
                result[...] = array
        self._meeting.step()
        if link is not None:
            link.broadcast(results, origin.root)
        self._meeting.pass_on()
        return results

    def exchanged(self, kind: str, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """Rows of every rank's arrays, on *root* or, if it is -1, on all ranks."""

        def rows_for(rows: int, place: int) -> Span:
            return (0, rows) if root in (-1, place) else (0, 0)

        if not on_gpu(arrays):
            return None
        split_up = kind == "all_to_all"
        arrays = [self._contiguous(array if array.ndim or split_up else array[None]) for array in arrays]
        record = Record(kind, root=root, given=given(arrays), on_gpu=True)
        records, link, linked = self._links.agree(record)
        self._agreement.check_fit(records)
        if not linked:
            self._meeting.pass_on()
            return None
        shapes = [each.given for each in records]
        return self._exchange(link, arrays, shapes, self._rows_of if split_up else rows_for)

    def _rows_of(self, rows: int, place: int) -> Span:
        """The part of so many rows that goes to rank *place* when they are split."""
        return split(0, rows, self._host.count)[place]

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
            link.exchange(sent, received)
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


def on_gpu(arrays: Sequence[Array]) -> bool:
    """Whether some of *arrays* lie on a GPU."""
    return not all(map(in_host_memory, arrays))


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
