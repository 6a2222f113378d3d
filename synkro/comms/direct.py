"""Collectives from GPU to GPU: the ranks agree through shared memory, and NCCL moves the arrays.

    prepare    everything that may fail on this rank: memory, packing, casts
    agree      records on the board: every rank learns of a failure before any of them moves data
    move       NCCL, under a watchdog; a rank alone has nothing to move
    finish     divide, cast, cut

A method returns None, on all ranks, where its arrays have to go through host memory.

NCCL reduces int8, int32, int64, their unsigned kin, float16, float32 and float64, and nothing else.
Partials of other dtypes travel as one of those, so that the result is NumPy's:

    sum, prod of int16, uint16     as int32: what overflows is cut off when it comes back, as in NumPy
    sum, mean of complex           as pairs of reals
    max, min of bool               as uint8
    max, min of floats             as integers in the same order, nan the greatest or the least of all:
                                   NCCL drops nan, NumPy keeps it

Sums and means of float16 and bfloat16 need no entry: their partials are float32 (``ops``).  Products
and orders of complex numbers, and long doubles, go through host memory.

A *link* is an NCCL communicator.  The ranks of a call make it when they first need it, and keep it for
later calls of the same ranks.  After an error some ranks may have aborted theirs: each record carries
the number of the rank's link, and where the numbers differ all ranks make a new link.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ..devices.base import Device
from ..errors import CollectiveError
from ..plan.split import Span, split
from ..values.arrays import Array, code_of
from .base import Communicator
from .ops import OPERATIONS, Operation
from .records import Arrays, ArrayType, Record, given, layout_of, pack, unpack

if TYPE_CHECKING:
    from .nccl import Link

NATIVE = ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
"""The dtypes in which reductions travel."""

_WIDER = {"i2": "i4", "u2": "i4"}
_REALS = {"c8": "f4", "c16": "f8"}
_ORDERED = {"f2": "i4", "bfloat16": "i4", "f4": "i4", "f8": "i8"}
_BITS = {"i4": (31, 0x7FFFFFFF), "i8": (63, 0x7FFFFFFFFFFFFFFF)}

REDUCTIONS = {"mean": "SUM", "sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
"""NCCL's name of each operation; partials of a mean have been multiplied by their weights.  Operations
without a name go through host memory."""


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

    @property
    def serves(self) -> bool:
        """Whether arrays may go this way, or are this rank's alone."""
        return self._current()[0] != _IMPOSSIBLE

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
                link = Link(identity, self._host.place, self._host.count, self._meeting, self._gpu)
            except CollectiveError as error:
                problem = str(error)
        problem = self._host.first_problem(problem)
        if problem and link is not None:
            link.abort()
        self._made += 1
        self._made = int(self._host.all_reduce([np.array(self._made)], OPERATIONS["max"], 1)[0])
        known = (_IMPOSSIBLE, None) if problem else (self._made, link)
        self._known[self._meeting.members.ranks] = known
        return problem

    def close(self) -> None:
        """Abort all links, as the process ends."""
        for _, link in self._known.values():
            if link is not None:
                with contextlib.suppress(Exception):  # what cannot be given back goes with the process
                    link.abort()

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


class DirectCollectives(Communicator):
    """One rank's end of the collectives from GPU to GPU; a subclass goes through host memory else.

    Attributes:
        links: the links of NCCL to other ranks.
    """

    def __init__(self, host: Communicator, device: Device, gpu: int | None) -> None:
        """*host* is the communicator of arrays in host memory; *gpu* is the number of this rank's GPU,
        or None where NCCL cannot serve."""
        super().__init__(host.agreement)
        self._host = host
        self._device = device
        self.links: Final = Links(host, gpu)

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced_directly(self, record: Record, arrays: Arrays) -> list[Array] | None:
        """The reduction that *record* names, as one vector for each partial dtype."""
        operation = OPERATIONS[record.operation]
        if not _are_native(arrays, operation):
            return None
        record = record._replace(on_gpu=True)
        layout = layout_of(record)
        vectors = [self._device.empty(shape, dtype) for shape, dtype in layout.vectors]
        pack(record, arrays, vectors)
        encoded = [encode(operation, vector) for vector in vectors]
        records, link, linked = self.links.agree(record)
        self.agreement.check_alike(records)
        if record.kind == "reduce_scatter":
            self.agreement.check_rows(records)
        divisor = self.agreement.check_weights(records)
        if link is not None:
            self._reduce(record, link, encoded)
        self._meeting.pass_on()
        if not linked:
            return None
        for index, (_, dtype) in enumerate(layout.vectors):
            vectors[index] = decode(operation, encoded[index], dtype)
            operation.finish(vectors[index], divisor, out=vectors[index])
        results = unpack(record, arrays, vectors)
        if record.kind == "reduce_scatter":
            results = [self.part_of(result).copy() for result in results]
        return results

    def _reduce(self, record: Record, link: Link, encoded: Arrays) -> None:
        """Reduce vectors in place, on the ranks that want the results."""
        jobs = [(vector, record.root) for vector in encoded]
        if record.kind == "reduce_scatter":
            layout, jobs = layout_of(record), []
            for (shape, _), (vector, start, stop) in zip(record.given, layout.places, strict=True):
                (size,), _ = layout.vectors[vector]
                elements = encoded[vector].size // max(1, size)  # two if complex
                row = (stop - start) // max(1, shape[0])
                for root, (low, high) in enumerate(split(0, shape[0], self.count)):
                    part = slice((start + low * row) * elements, (start + high * row) * elements)
                    jobs.append((encoded[vector][part], root))
        link.reduce(jobs, REDUCTIONS[record.operation])

    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        """All-reduce *arrays*, each with weight 1, where they lie; whether that was possible."""
        if not all(_as_is(array, operation) for array in arrays):
            return False
        record = Record("all_reduce", operation.name, in_place=True, given=given(arrays), on_gpu=True)
        records, link, linked = self.links.agree(record)
        self.agreement.check_alike(records)
        if link is not None:
            link.reduce([(array, -1) for array in arrays], REDUCTIONS[operation.name])
        self._meeting.pass_on()
        for array in arrays if linked else ():
            operation.finish(array, self.count, out=array)
        return linked

    def reduce_out(self, jobs: Sequence[tuple[Operation, Any, Array]], divisor: float) -> None:
        """Reduce partials of all ranks, as one transfer, into arrays in host memory.

        Each rank copies its n-th part of the elements to the host, over its own bus.
        """
        sent, parts = [], []
        for operation, partial, _ in jobs:
            length = -(-partial.size // self.count)
            vector = self._device.empty((length * self.count,), partial.dtype)
            self._device.assign(vector[: partial.size].reshape(partial.shape), partial)
            sent.append(encode(operation, vector))
            parts.append(self._device.empty((sent[-1].size // self.count,), sent[-1].dtype))
        names = [operation.name for operation, _, _ in jobs]
        shapes = given([partial for _, partial, _ in jobs])
        record = Record("reduce_scatter", ",".join(names), in_place=True, given=shapes, on_gpu=True)
        _, link, linked = self.links.agree(record)
        if not linked:
            self.agreement.refuse("NCCL cannot connect the GPUs any more")
        if link is not None:
            pairs = list(zip(sent, parts, strict=True))
            link.reduce_scatter(pairs, [REDUCTIONS[name] for name in names])
        self._meeting.pass_on()
        results = []
        for (operation, partial, target), source in zip(
            jobs, sent if link is None else parts, strict=True
        ):
            reduced = decode(operation, source, partial.dtype)
            operation.finish(reduced, divisor, out=reduced)
            start = min(self.place * reduced.size, target.size)
            stop = min(start + reduced.size, target.size)
            results.append((target.reshape(-1)[start:stop], reduced[: stop - start]))
        self._device.copy_out(results)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def rooted_directly(
        self, kind: str, arrays: Arrays | None, root: int
    ) -> tuple[list[Array] | None, bool]:
        """What this rank gets of *root*'s arrays, if they lie on its GPU; also, whether they do."""
        own = arrays or ()
        record = Record(kind, root=root, given=given(own), on_gpu=on_gpu(own))
        records, link, linked = self.links.agree(record)
        origin = records[root]
        if not (linked and origin.on_gpu):
            self._meeting.pass_on()
            return None, origin.on_gpu
        if kind == "broadcast":
            return self._broadcast(link, arrays, origin), True
        self.agreement.check_rows([origin])
        nothing = [((0, *shape[1:]), dtype) for shape, dtype in origin.given]
        everyone = [origin.given if place == root else nothing for place in range(self.count)]
        mine = [self._contiguous(array) for array in own]
        return self._exchange(link, mine, everyone, self._rows_of), True

    def _broadcast(self, link: Link | None, arrays: Arrays | None, origin: Record) -> list[Array]:
        results = [self._device.empty(shape, dtype) for shape, dtype in origin.given]
        if arrays is not None:
            for result, array in zip(results, arrays, strict=True):
                result[...] = array
        self._meeting.step()
        if link is not None:
            link.broadcast(results, origin.root)
        self._meeting.pass_on()
        return results

    def exchanged_directly(self, kind: str, arrays: Arrays, root: int) -> list[Array] | None:
        """Rows of every rank's arrays, on *root* or, if it is -1, on all ranks."""

        def rows_for(rows: int, place: int) -> Span:
            return (0, rows) if root in (-1, place) else (0, 0)

        if not on_gpu(arrays):
            return None
        arrays, split_up = self.in_rows(kind, arrays), kind == "all_to_all"
        record = Record(kind, root=root, given=given(arrays), on_gpu=True)
        records, link, linked = self.links.agree(record)
        self.agreement.check_fit(records)
        if not linked:
            self._meeting.pass_on()
            return None
        shapes = [each.given for each in records]
        return self._exchange(link, arrays, shapes, self._rows_of if split_up else rows_for)

    def in_rows(self, kind: str, arrays: Arrays) -> list[Array]:
        """*arrays* on this rank's GPU, contiguous; to be gathered, one without dimensions is a row."""
        lone = kind != "all_to_all"
        return [self._contiguous(array[None] if lone and not array.ndim else array) for array in arrays]

    def _rows_of(self, rows: int, place: int) -> Span:
        """The part of so many rows that goes to rank *place* when they are split."""
        return split(0, rows, self.count)[place]

    def _exchange(
        self,
        link: Link | None,
        arrays: Arrays,
        shapes: Sequence[Sequence[ArrayType]],
        rows_for: Callable[[int, int], Span],
    ) -> list[Array]:
        """For each array, this rank's part of the rows of every rank, one behind the other.

        ``shapes[r]`` are the shapes and dtypes of rank r's arrays.  ``rows_for(rows, place)`` says which
        rows of an array go to a rank.  *arrays*, contiguous, are this rank's; empty if it has no rows.
        """
        place = self.place
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
        return self.to_device(array)

    def to_device(self, array: Array) -> Array:
        """A contiguous copy of *array* on this rank's GPU."""
        copy = self._device.empty(array.shape, array.dtype)
        self._device.assign(copy, array)
        return copy


def in_host_memory(array: Array) -> bool:
    return isinstance(array, np.ndarray)


def on_gpu(arrays: Arrays) -> bool:
    """Whether some of *arrays* lie on a GPU."""
    return not all(map(in_host_memory, arrays))


def _are_native(arrays: Arrays, operation: Operation) -> bool:
    """Whether NCCL can reduce *arrays*."""
    return all(
        not in_host_memory(array) and carrier(operation, operation.partial_dtype(array.dtype))
        for array in arrays
    ) and bool(arrays)


def _as_is(array: Array, operation: Operation) -> bool:
    """Whether NCCL can reduce *array* where it lies, as it is: without a cast or a view."""
    partial, code = operation.partial_dtype(array.dtype), _code(array.dtype)
    return (
        partial == array.dtype
        and carrier(operation, partial) == code
        and not _reordered(operation, code)
        and array.flags.c_contiguous
    )


# ── how partials travel; the functions take arrays of NumPy and of GPUs alike ────────────────────────


def carrier(operation: Operation, partial: np.dtype[Any]) -> str | None:
    """The dtype in which partials of dtype *partial* travel, or None if there is none."""
    if operation.name not in REDUCTIONS:
        return None
    code = _code(partial)
    if operation.name in ("max", "min"):
        code = {"b1": "u1", **_ORDERED}.get(code, "" if partial.kind in "fc" else code)
    elif operation.name != "prod":
        code = _REALS.get(code, code)
    code = _WIDER.get(code, code)
    return code if code in NATIVE else None


def encode(operation: Operation, vector: Array) -> Array:
    """*vector*, contiguous partials, in the dtype that travels; a view of it where possible."""
    code = _code(vector.dtype)
    wire = carrier(operation, vector.dtype)
    assert wire is not None
    if _reordered(operation, code):
        return _ordered(vector, wire, greatest=operation.name == "max")
    return vector.astype(wire) if code in _WIDER else vector.view(wire)


def decode(operation: Operation, encoded: Array, dtype: np.dtype[Any]) -> Array:
    """The inverse of ``encode``: the reduced vector, as *dtype*."""
    code = _code(dtype)
    if _reordered(operation, code):
        shift, mask = _BITS[encoded.dtype.str[1:]]
        bits = encoded ^ ((encoded >> shift) & mask)
        floats: Array = bits.view("f8" if code == "f8" else "f4")
        return floats.astype(dtype, copy=False)
    return encoded.astype(dtype) if code in _WIDER else encoded.view(dtype)


def _code(dtype: np.dtype[Any]) -> str:
    """A dtype's kind and size, without its byte order, which is the machine's."""
    return str(code_of(dtype)).lstrip("<>|=")


def _reordered(operation: Operation, code: str) -> bool:
    return operation.name in ("max", "min") and code in _ORDERED


def _ordered(vector: Array, wire: str, greatest: bool) -> Array:
    """Floats as signed integers in the same order; nan is the greatest or the least."""
    wide = vector.astype("f8" if wire == "i8" else "f4", copy=False)
    shift, mask = _BITS[wire]
    bits = wide.view(wire)
    keys: Array = bits ^ ((bits >> shift) & mask)
    keys[wide != wide] = mask if greatest else -mask - 1  # noqa: PLR0124  only nan is not itself
    return keys
