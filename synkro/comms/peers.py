"""Collectives and messages of ranks that open each other's device memory.

They are for ranks that share a GPU, which NCCL older than 2.30 refuses, and for messages, which NCCL has
none of that need not be received at once.  A rank copies what others are to see to its *stage*, a chunk
of its window; they read it there:

    stages hold the arrays     all ranks meet
    the root reduces them into its own, in the order of the ranks; others wait
    each copies its share      all ranks meet: stages may be written again

One rank reduces for all, as kernels of several processes take turns on a GPU, and to wait for a turn
takes longer than to add up a million numbers.  What does not fit a stage goes in several *fills*.

A method returns None, on all ranks, where one of them has no memory for a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..devices.base import Device
from ..devices.window import MESSAGE, SIZES, STAGE, CudaError, Lease, Window, copy, reaches, typed
from ..plan.call import aligned
from ..plan.split import Span, split
from ..values.arrays import Array
from .base import Communicator
from .ops import OPERATIONS, Operation
from .records import Arrays, ArrayType, Record, as_vector, given, layout_of, pack, unpack


class Portion(NamedTuple):
    """Bytes *low* to *high* of one of several arrays, which lie at byte *at* of a stage."""

    number: int
    low: int
    high: int
    at: int


Fill = Sequence[Portion]


def fills(sizes: Sequence[int], room: int) -> list[Fill]:
    """Arrays of these *sizes*, in bytes, as they go one behind the other through *room* bytes.

    *room* is a multiple of the size of any element.
    """
    found: list[Fill] = []
    fill: list[Portion] = []
    at = 0
    for index, size in enumerate(sizes):
        low = 0
        while low < size:
            if at >= room:
                found.append(fill)
                fill, at = [], 0
            high = min(size, low + room - at)
            fill.append(Portion(index, low, high, at))
            at, low = aligned(at + high - low), high
    return [*found, fill] if fill else found


class _Share(NamedTuple):
    """The bytes of an array that a rank takes, and where they go."""

    start: int
    stop: int
    target: Any


_Shares = Mapping[tuple[int, int], _Share]  # by the place of their source and their array's number


class Peers:
    """One rank's end of them."""

    def __init__(self, host: Communicator, device: Device, window: Window) -> None:
        """*host* is where the ranks meet; *window* is this rank's, on its *device*."""
        self._host = host
        self._agreement = host.agreement
        self._meeting = host.agreement.meeting
        self._empty = device.empty
        self._window = window
        self._stage: Lease | None = None

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced(self, record: Record, arrays: Arrays) -> list[Array] | None:
        """The reduction that *record* describes."""
        layout, alone = layout_of(record), as_vector(record, arrays)
        vectors = [alone] if alone is not None else [self._empty(*vector) for vector in layout.vectors]
        if alone is None:
            pack(record, arrays, vectors)
        results = [self._empty(*vector) for vector in layout.vectors]
        if not self._reduce(record, vectors, results):
            return None
        if record.root not in (-1, self._host.place):
            return []
        found = unpack(record, arrays, results)
        if record.kind == "reduce_scatter":
            found = [self._host.part_of(each).copy() for each in found]
        return found

    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        """All-reduce *arrays*, each with weight 1, where they lie; whether that was possible."""
        if not all(_as_is(array, operation) for array in arrays):
            return False
        record = Record("all_reduce", operation.name, in_place=True, given=given(arrays))
        vectors = [array.reshape(-1) for array in arrays]
        return self._reduce(record, vectors, vectors)

    def _reduce(self, record: Record, vectors: Sequence[Any], results: Sequence[Any]) -> bool:
        own = self._host.place
        plan = fills([vector.nbytes for vector in vectors], STAGE)
        records = self._enter(record, vectors, plan)
        self._agreement.check_alike(records)
        if record.kind == "reduce_scatter":
            self._agreement.check_rows(records)
        divisor = self._agreement.check_weights(records)
        if _any_lacks_memory(records):
            self._meeting.part()
            return False
        root = max(record.root, 0)
        for number, fill in enumerate(plan):
            self._show(number, fill, vectors)
            if own == root:
                for portion in fill:
                    self._merge(portion, records, results, divisor)
                self._window.wait()
            if record.root == -1:
                self._meeting.step()
                if own != root:
                    start = self._seen(root, records)
                    for index, low, high, at in fill:
                        copy(results[index].data + low, start + at, high - low)
                    self._window.wait()
        self._meeting.part()
        return True

    def _merge(
        self, portion: Portion, records: Sequence[Record], results: Sequence[Any], divisor: float
    ) -> None:
        """Reduce a portion of all ranks' vectors into the results, and for others into the stage."""
        index, low, high, at = portion
        operation, dtype = OPERATIONS[records[0].operation], results[index].dtype
        count = (high - low) // dtype.itemsize
        result = typed(results[index].data + low, dtype, count)
        sources = [typed(self._seen(place, records) + at, dtype, count) for place in range(len(records))]
        total = sources[0]
        for source in sources[1:]:
            total = operation.merge(total, source, out=result)
        if total is not result:
            result[...] = total
        operation.finish(result, divisor, out=result)
        if records[0].root == -1:
            copy(self._mine() + at, result.data, high - low)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def rooted(
        self, kind: str, arrays: Arrays | None, root: int, on_gpu: bool
    ) -> tuple[list[Array] | None, bool]:
        """What this rank gets of *root*'s contiguous arrays, if they lie on a GPU; and whether they do.

        *on_gpu* is what the root says of them.
        """
        mine = list(arrays or ())
        record = Record(kind, root=root, given=given(mine))
        records = self._enter(record, mine if on_gpu else [], _plan(record) if on_gpu else [], on_gpu)
        origin = records[root]
        if kind == "scatter":
            self._agreement.check_rows([origin])
        if not origin.on_gpu or _any_lacks_memory([origin]):
            self._meeting.part()
            return None, origin.on_gpu
        shares, results = {}, []
        for index, (shape, dtype) in enumerate(origin.given):
            start, stop, row, lengths = 0, 1, prod(shape), shape  # one row, which everybody gets
            if kind == "scatter":
                start, stop = split(0, shape[0], len(records))[self._host.place]
                row, lengths = prod(shape[1:]), (stop - start, *shape[1:])
            result: Any = self._empty(lengths, dtype)
            row *= result.itemsize
            shares[root, index] = _Share(start * row, stop * row, result.data)
            results.append(result)
        plans = [_plan(origin) if place == root else [] for place in range(len(records))]
        self._pass_around(plans, mine, records, shares)
        return results, True

    def exchanged(self, kind: str, arrays: Sequence[Any], root: int) -> list[Array] | None:
        """Rows of every rank's contiguous arrays, on *root* or, if it is -1, on all ranks."""
        record = Record(kind, root=root, given=given(arrays))
        records = self._enter(record, arrays, _plan(record))
        self._agreement.check_fit(records)
        if _any_lacks_memory(records):
            self._meeting.part()
            return None
        place, count = self._host.place, self._host.count

        def rows_for(theirs: ArrayType) -> Span:
            rows = theirs[0][0]
            if kind == "all_to_all":
                return split(0, rows, count)[place]
            return (0, rows) if root in (-1, place) else (0, 0)

        shares, results = {}, []
        for index, (shape, dtype) in enumerate(record.given):
            spans = [rows_for(each.given[index]) for each in records]
            rows = sum(stop - start for start, stop in spans)
            result: Any = self._empty((rows, *shape[1:]), dtype)
            row, at = prod(shape[1:]) * result.itemsize, 0
            for source, (start, stop) in enumerate(spans):
                shares[source, index] = _Share(start * row, stop * row, result.data + at)
                at += (stop - start) * row
            results.append(result)
        self._pass_around([_plan(each) for each in records], arrays, records, shares)
        return results

    def _pass_around(
        self, plans: Sequence[Sequence[Fill]], mine: Arrays, records: Sequence[Record], shares: _Shares
    ) -> None:
        """Copy this rank's shares."""
        own = plans[self._host.place]
        for number in range(max(map(len, plans), default=0)):
            self._show(number, own[number] if number < len(own) else (), mine)
            for place, plan in enumerate(plans):
                for index, low, high, at in plan[number] if number < len(plan) else ():
                    share = shares[place, index]
                    first, last = max(low, share.start), min(high, share.stop)
                    if first < last:
                        source = self._seen(place, records) + (at + first - low)
                        copy(share.target + (first - share.start), source, last - first)
            self._window.wait()
        self._meeting.part()

    # ── messages ─────────────────────────────────────────────────────────────────────────────────

    def posted(self, array: Array) -> Lease | None:
        """A chunk with a copy of a contiguous *array*; None if there is no memory for it."""
        lease = self._window.take(array.nbytes, once=array.nbytes > MESSAGE)
        if lease is not None:
            copy(lease.chunk.start, array.data, array.nbytes)
            self._window.wait()
        return lease

    def fetched(self, record: Record) -> Array:
        """A copy of the array that the sender has described by *record*."""
        ((shape, dtype),) = record.given
        result = self._empty(shape, dtype)
        self._window.copy(record.window, record.at[0], result)
        return result

    def tidy(self) -> None:
        """Give back what nobody needs any more."""
        self._window.tidy()

    # ── stages ───────────────────────────────────────────────────────────────────────────────────

    def _enter(
        self, record: Record, arrays: Arrays, plan: Sequence[Fill], on_gpu: bool = True
    ) -> list[Record]:
        """Enter a collective with the first fill of *arrays* on the stage; returns all records."""
        first = plan[0] if plan else ()
        needed = max((at + high - low for _, low, high, at in first), default=1)
        if self._stage is None or self._stage.chunk.nbytes < needed:
            self._stage = None  # a spare one from now on
            self._stage = self._window.take(needed)
        if self._stage is not None:
            self._write(first, arrays)
            chunk = self._stage.chunk
            record = record._replace(window=chunk.handle, at=(chunk.nbytes,))
        return self._agreement.enter(record._replace(on_gpu=on_gpu))

    def _write(self, fill: Fill, arrays: Sequence[Any]) -> None:
        for index, low, high, at in fill:
            copy(self._mine() + at, arrays[index].data + low, high - low)
        self._window.wait()

    def _show(self, number: int, fill: Fill, arrays: Arrays) -> None:
        """Have fill *number* on the stage of every rank; the first one is, since all have entered."""
        if number:
            self._meeting.step()  # nobody reads the one before any more
            self._write(fill, arrays)
            self._meeting.step()

    def _mine(self) -> Any:
        assert self._stage is not None
        return self._stage.chunk.start

    def _seen(self, place: int, records: Sequence[Record]) -> Any:
        """The beginning of a rank's stage."""
        if place == self._host.place:
            return self._mine()
        return self._window.seen(records[place].window, records[place].at[0])


def _plan(record: Record) -> list[Fill]:
    """How the arrays of a rank go through its stage."""
    return fills([prod(shape) * np.dtype(dtype).itemsize for shape, dtype in record.given], STAGE)


def _any_lacks_memory(records: Sequence[Record]) -> bool:
    return not all(record.at for record in records)


def _as_is(array: Array, operation: Operation) -> bool:
    """Whether *array* can be reduced where it lies."""
    return operation.partial_dtype(array.dtype) == array.dtype and array.flags.c_contiguous


def introduce(
    host: Communicator, device: Device, window: Window, gpus: Sequence[int]
) -> tuple[Peers | None, str]:
    """A collective: each rank reads what every other one has written to its window.

    *gpus* are the numbers of their GPUs, by place.  Returns None and why, if a rank cannot.
    """
    problem, handle = "", b""
    mine = device.empty((1,), np.int64)
    mine[...] = host.place
    peers = Peers(host, device, window)
    try:
        lease = peers.posted(mine)
        if lease is None:
            problem = "there is no device memory for it"
        else:
            handle = lease.chunk.handle
    except CudaError as error:
        problem = str(error)
    handles = host.all_gather([np.frombuffer(handle.ljust(64), np.uint8)[None]])[0]
    problem = host.first_problem(problem)
    if not problem:
        try:
            for place in range(host.count):
                handle, places = handles[place].tobytes(), (host.place, place)
                problem = problem or _why_not(device, window, handle, places, gpus)
        except CudaError as error:
            problem = str(error)
        problem = host.first_problem(problem)
    if not problem:
        return peers, ""
    window.close()
    host.barrier()  # before memory is freed that others had open
    return None, problem


def _why_not(
    device: Device, window: Window, handle: bytes, places: tuple[int, int], gpus: Sequence[int]
) -> str:
    """Why the first rank, this one, does not read what the second one has written; empty if it does."""
    own, place = places
    one, other = gpus[own], gpus[place]
    if place == own:
        return ""
    if one != other and not reaches(one, other):
        return f"cuda:{one} does not reach the memory of cuda:{other}"
    read = device.stow(typed(window.seen(handle, SIZES[0]), np.dtype(np.int64), 1))
    return "" if read[0] == place else f"rank {own} read {read[0]} where rank {place} wrote {place}"
