"""What a command reads and writes of the main process's memory, on the ranks of one host.

A host other than the main process's has a *mirror* of each segment: memory of the same size, in which
only those bytes count that its ranks read in the running command, or have written.  Before a command
what it ``reads`` goes there, after it what it ``writes`` comes back.  Bytes, not objects: nothing here
knows how they travel, or which a host has already.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..errors import InternalError
from ..memory.segment import aligned
from ..messages import Command, Done, Parcel, Reduction, Reply, TooLong
from ..plan import call as plans
from ..plan.batch import Strided
from ..plan.call import CallPlan, Region
from ..plan.split import Span
from ..values.arrays import Array

_COMPLETE = (
    messages.Start,
    messages.Fetch,
    messages.Preserve,
    messages.Keep,
    messages.Move,
    messages.Read,
    messages.Inspect,
    messages.Identify,
    messages.Exchange,
    messages.Reseed,
    messages.Generator,
    messages.Store,
    messages.Reduce,
    messages.Export,
    messages.Deliver,
    messages.Release,
    messages.Exit,
)
"""Commands that say all in themselves; what Reduce reads, the ranks of the host have stored there, and
Export reads something in the main process's host only."""


class Extent(NamedTuple):
    """The bytes from *start* to *stop* of a segment."""

    segment: int
    start: int
    stop: int


class PickedRows(NamedTuple):
    """Some *rows* of an array: row i is *nbytes* from ``start + i * stride`` on."""

    segment: int
    start: int
    stride: int
    nbytes: int
    rows: NDArray[np.int64]


class Partial(NamedTuple):
    """What the ranks of a host have reduced into *target* is a part: hosts merge theirs, in their order,
    with operation *op*, and then divide a mean by *divisor*.  All *owners* have a part."""

    op: str
    divisor: int
    target: Region
    owners: tuple[int, ...]


class Traffic:
    """What the commands of one session read and write; it has to hear of all of them."""

    def __init__(self, look: Callable[[Region], Array]) -> None:
        """*look* shows a region of the main process's memory."""
        self._look = look
        self._outbox = Region(0, 0, (0, 0), "|u1")
        self._versions: Region | None = None

    def begin(self, start: messages.Start) -> None:
        """The session has begun with this command."""
        self._outbox = start.outbox
        if start.gpus is not None:  # whose ranks compare them
            self._versions = start.versions

    def reads(self, command: Command, ranks: Sequence[int]) -> Iterator[Extent | PickedRows]:
        """What *ranks*, those of one host, read in *command*; on GPUs also the versions of that.

        These come last: who sees one sees contents that are not older.
        """
        pieces = list(self._read(command, ranks))
        yield from pieces
        if self._versions is not None:
            for segment in sorted({piece.segment for piece in pieces}):
                at = segment % self._versions.shape[0]
                yield from _rows_between(self._versions, at, at)

    def _read(self, command: Command, ranks: Sequence[int]) -> Iterator[Extent | PickedRows]:
        match command:
            case messages.Indirect() | messages.Assign():
                if isinstance(command, messages.Indirect):
                    yield from _whole(command.region)
                yield from self._read(self._inner(command), ranks)
            case messages.Distribute() | messages.Renew() | messages.Compare():
                yield from _buffers(command.parcel)
            case messages.Call() | messages.Work():
                yield from self._inputs(command.plan, ranks)
            case messages.Create():
                yield from _whole(command.value)
            case messages.Write():
                for fill in command.fills:
                    yield from self._filling(fill, ranks)
            case _ if not isinstance(command, _COMPLETE):
                raise InternalError(f"nobody knows what {command!r} reads.")

    def writes(self, command: Command, replies: Mapping[int, Reply]) -> Iterator[Extent | Partial]:
        """What the ranks of one host have written in *command*, with their *replies* by rank."""
        match command:
            case messages.Indirect() | messages.Assign():
                yield from self.writes(self._inner(command), replies)
            case messages.Call() | messages.Read():
                for rank, reply in replies.items():
                    yield from self._outputs(rank, reply)
            case messages.Store():
                for rank in replies:
                    for stored in command.placements[rank]:
                        if not stored.staged:
                            yield from _whole(stored.region)
            case messages.Reduce():
                for reduction in command.reductions:
                    yield from _reduced(reduction, command.ranks, replies)
            case messages.Deliver():
                for rank in replies:
                    yield from _rows_between(command.region, rank, rank)

    def innermost(self, command: Command) -> Command:
        """The command itself, if *command* is that or says where it is."""
        while isinstance(command, messages.Indirect):
            command = self._inner(command)
        return command

    def _inner(self, command: messages.Indirect | messages.Assign) -> Command:
        """The command that *command* stands before, or for."""
        if isinstance(command, messages.Assign):
            inner: Command = pickle.loads(command.then)
        else:
            inner = pickle.loads(self._look(command.region).tobytes())
        return inner

    # ── inputs ───────────────────────────────────────────────────────────────────────────────────

    def _inputs(self, plan: CallPlan, ranks: Sequence[int]) -> Iterator[Extent | PickedRows]:
        ranks = [rank for rank in ranks if plan.spans[rank][1] > plan.spans[rank][0]]
        if not ranks:
            return
        spans = [plan.spans[rank] for rank in ranks]
        yield from self._picks(plan.selection, spans)
        if plan.held is not None:
            for rank, (start, stop) in zip(ranks, spans, strict=True):
                yield from self._picks(plan.held[rank], [(0, stop - start)])
        for argument in plan.inputs:
            match argument:
                case plans.Scattered():
                    selection = None if argument.of_batch else plan.selection
                    yield from self._rows(argument.region, selection, spans)
                    if isinstance(argument, plans.Items):
                        yield from self._items(argument, selection, spans)
                case plans.Broadcast() | plans.Number():
                    yield from _whole(argument.region)
                case plans.Pickled():
                    yield from self._pickled(argument.region)

    def _filling(self, fill: messages.Fill, ranks: Sequence[int]) -> Iterator[Extent | PickedRows]:
        """What *ranks* put into a variable."""
        spans = [rows for rank in ranks if (rows := fill.rows[rank]) is not None]
        if fill.selection is not None:
            yield from self._picks(fill.selection, spans)
            yield from self._rows(fill.source, fill.selection, spans)
        elif spans:
            yield from _whole(fill.source)

    def _rows(
        self, region: Region, selection: plans.Rows | None, spans: Iterable[Span]
    ) -> Iterator[Extent | PickedRows]:
        """The rows *spans* of a *selection* of an array, or of the array itself."""
        for start, stop in _joined(spans):
            if selection is None:
                yield from _rows_between(region, start, stop - 1)
            elif isinstance(selection, Strided) and abs(selection.step) == 1:
                ends = [selection.start + at * selection.step for at in (start, stop - 1)]
                yield from _rows_between(region, min(ends), max(ends))
            else:
                yield from _picked(region, self._indices(selection, start, stop))

    def _picks(self, selection: plans.Rows | None, spans: Iterable[Span]) -> Iterator[Extent]:
        """The indices of the rows *spans* of a selection, where it has some."""
        if isinstance(selection, plans.Picked):
            for start, stop in _joined(spans):
                yield from _rows_between(selection.indices, start, stop - 1)

    def _indices(self, selection: plans.Rows, start: int, stop: int) -> NDArray[np.int64]:
        if isinstance(selection, Strided):
            return selection.start + selection.step * np.arange(start, stop, dtype=np.int64)
        return np.asarray(self._look(selection.indices)[start:stop], np.int64)

    def _items(
        self, argument: plans.Items, selection: plans.Rows | None, spans: Iterable[Span]
    ) -> Iterator[Extent]:
        """The bytes of the items of these rows, and what lies between them."""
        places, base = self._look(argument.region), argument.items
        for start, stop in _joined(spans):
            rows = slice(start, stop) if selection is None else self._indices(selection, start, stop)
            first, last = int(places[rows].min()), int(places[rows].max())
            if last > first:
                yield Extent(base.segment, base.offset + first, base.offset + last)

    def _pickled(self, region: Region) -> Iterator[Extent]:
        """As much of *region* as its table of lengths says that it holds."""
        memory = self._look(region)
        count = 2 + int.from_bytes(memory[: plans.LENGTH].tobytes(), "little")
        table = count * plans.LENGTH
        _, *lengths = memory[:table].view("<u8").tolist()
        end = sum(map(aligned, (table, *lengths[:-1]))) + lengths[-1]
        yield Extent(region.segment, region.offset, region.offset + end)

    # ── outputs ──────────────────────────────────────────────────────────────────────────────────

    def _outputs(self, rank: int, reply: Reply) -> Iterator[Extent]:
        """What *rank* has left in its outbox; all of it if the reply that says so is on its way."""
        if isinstance(reply, TooLong):
            yield from _rows_between(self._outbox, rank, rank)
        if not isinstance(reply, Done) or reply.leaves is None:
            return
        share = self._outbox.shape[1]
        for leaf in reply.leaves:
            for piece in leaf.pieces:
                if piece.offset is not None:
                    at = self._outbox.offset + rank * share + piece.offset
                    yield from _whole(Region(self._outbox.segment, at, piece.shape, piece.dtype))


def _buffers(parcel: Parcel) -> Iterator[Extent]:
    if parcel.segment is not None:
        for start, stop in parcel.buffers:
            yield Extent(parcel.segment, start, stop)


def _reduced(
    reduction: Reduction, ranks: Sequence[int], replies: Iterable[int]
) -> Iterator[Extent | Partial]:
    """What the ranks that have replied, of one host, have written of the target."""
    target = reduction.target
    if reduction.sources:
        here = set(replies).intersection(reduction.owners)
        if here == set(reduction.owners):
            yield from _whole(target)
        elif here:
            yield Partial(reduction.op, reduction.divisor, target, reduction.owners)
        return
    flat = Region(target.segment, target.offset, (prod(target.shape),), target.dtype)
    length = -(-flat.shape[0] // len(ranks))
    for rank in set(replies).intersection(ranks):  # by their GPUs, each its part
        start = ranks.index(rank) * length
        stop = min(start + length, flat.shape[0])
        if start < stop:
            yield from _rows_between(flat, start, stop - 1)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """The same rows, in fewer spans; empty ones are left out."""
    edges = sorted(span for span in spans if span[1] > span[0])
    if not edges:
        return
    start, end = edges[0]
    for low, high in edges[1:]:
        if low > end:
            yield start, end
            start = low
        end = max(end, high)
    yield start, end


def _strides(region: Region) -> tuple[int, ...]:
    if region.strides is not None:
        return region.strides
    sizes = [np.dtype(region.dtype).itemsize]
    for length in reversed(region.shape[1:]):
        sizes.append(sizes[-1] * length)
    return tuple(reversed(sizes))[: len(region.shape)]


def _reach(region: Region, first: int) -> tuple[int, int]:
    """Where the bytes lie, from that of the first element on, over the dimensions from *first* on."""
    steps = [(n - 1) * s for n, s in zip(region.shape[first:], _strides(region)[first:], strict=True)]
    low = sum(step for step in steps if step < 0)
    return low, sum(step for step in steps if step > 0) + np.dtype(region.dtype).itemsize


def _whole(region: Region) -> Iterator[Extent]:
    if prod(region.shape):
        low, high = _reach(region, 0)
        yield Extent(region.segment, region.offset + low, region.offset + high)


def _rows_between(region: Region, first: int, last: int) -> Iterator[Extent]:
    """From row *first* to row *last*, both among them."""
    if prod(region.shape):
        low, high = _reach(region, 1)
        ends = [region.offset + row * _strides(region)[0] for row in (first, last)]
        yield Extent(region.segment, min(ends) + low, max(ends) + high)


def _picked(region: Region, rows: NDArray[np.int64]) -> Iterator[PickedRows]:
    if prod(region.shape):
        low, high = _reach(region, 1)
        yield PickedRows(region.segment, region.offset + low, _strides(region)[0], high - low, rows)
