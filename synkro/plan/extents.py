"""Which bytes of the main process's memory a command reads and writes, on the ranks of one host.

A host other than the main process's has a *mirror* of each segment: memory of the same size, in which
only those bytes count that its ranks read in the running command, or have written.  Before a command
what it ``reads`` goes there, after it what it ``writes`` comes back.  Bytes, not objects: nothing here
knows how they travel, or which a host has already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..values.arrays import Array
from . import call as plans
from .batch import indices_of
from .call import CallPlan, Region, aligned
from .split import Span


class Extent(NamedTuple):
    """The bytes from *start* to *stop* of a segment; *bare* if they need no digest, as nobody takes them
    for anything but numbers, and the network is trusted."""

    segment: int
    start: int
    stop: int
    bare: bool = False


class PickedRows(NamedTuple):
    """Some *rows* of an array: row i is *nbytes* from ``start + i * stride`` on; *bare* if they need no
    digest."""

    segment: int
    start: int
    stride: int
    nbytes: int
    rows: NDArray[np.int64]
    bare: bool = False


class Partial(NamedTuple):
    """What the ranks of a host have reduced into *target* is a part: hosts merge theirs, in their order,
    with operation *op*, and then divide a mean by *divisor*.  All *owners* have one; *bare* if it needs
    no digest."""

    op: str
    divisor: int
    target: Region
    owners: tuple[int, ...]
    bare: bool = False


class View:
    """What commands see of the main process's memory.

    Attributes:
        array: returns the array that lies in a region.
        outbox: where the ranks' small outputs lie, a row for each.
    """

    def __init__(self, array: Callable[[Region], Array], trusted: bool = False) -> None:
        """Numbers are bare if the network is *trusted*."""
        self.array = array
        self.outbox: Region = Region(0, 0, (0, 0), "|u1")
        self._trusted = trusted
        self._versions: Region | None = None

    def begin(self, outbox: Region, versions: Region | None) -> None:
        """The session has begun; on GPUs, ranks compare the *versions* of segments."""
        self.outbox, self._versions = outbox, versions

    def reads(self, command: Footprint, ranks: Sequence[int]) -> list[Extent | PickedRows]:
        """What *ranks*, those of one host, read in *command*; on GPUs also the versions of that.

        The versions come last: who sees one sees contents that are not older.
        """
        found = [self._checked(piece) for piece in command.reads(ranks, self)]
        if self._versions is not None:
            for segment in sorted({piece.segment for piece in found}):
                at = segment % self._versions.shape[0]
                found += rows_between(self._versions, at, at)
        return found

    def writes(self, command: Footprint, replies: Mapping[int, Any]) -> list[Extent | Partial]:
        """What the ranks of one host have written in *command*, with their *replies* by rank."""
        return [self._checked(piece) for piece in command.writes(replies, self)]

    def _checked(self, piece: Any) -> Any:
        """*piece*, which is bare only if the network is trusted."""
        return piece if self._trusted or not piece.bare else piece._replace(bare=False)


class Footprint(Protocol):
    """A command that says what it reads and writes."""

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]: ...

    def writes(self, replies: Mapping[int, Any], view: View) -> Iterator[Extent | Partial]: ...


def inputs(plan: CallPlan, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
    """What *ranks* read of the inputs of a call."""
    ranks = [rank for rank in ranks if plan.spans[rank][1] > plan.spans[rank][0]]
    if not ranks:
        return
    spans = [plan.spans[rank] for rank in ranks]
    yield from picks(plan.selection, spans)
    if plan.held is not None:
        for rank, (start, stop) in zip(ranks, spans, strict=True):
            yield from picks(plan.held[rank], [(0, stop - start)])
    for argument in plan.inputs:
        match argument:
            case plans.Scattered(array=Region() as region):
                selection = None if argument.of_batch else plan.selection
                found = rows(region, selection, spans, view)
                if isinstance(argument, plans.Items):
                    yield from found  # which say where pickles lie
                    yield from _items(view.array(region), argument.items, selection, spans, view)
                else:
                    yield from numbers(found)
            case plans.Broadcast(Region() as region) | plans.Number(region):
                yield from numbers(whole(region))
            case plans.Pickled(region):
                yield from _pickled(region, view)


def numbers(pieces: Iterable[Any]) -> Iterator[Any]:
    """*pieces*, which hold numbers, and nothing that is unpickled."""
    return (piece._replace(bare=True) for piece in pieces)


def rows(
    region: Region, selection: plans.Rows | None, spans: Iterable[Span], view: View
) -> Iterator[Extent | PickedRows]:
    """The rows *spans* of a *selection* of an array, or of the array itself."""
    for start, stop in _joined(spans):
        if selection is None:
            yield from rows_between(region, start, stop - 1)
        elif isinstance(selection, range) and abs(selection.step) == 1:
            ends = selection[start], selection[stop - 1]
            yield from rows_between(region, min(ends), max(ends))
        else:
            yield from _picked(region, _indices(selection, start, stop, view))


def picks(selection: plans.Rows | None, spans: Iterable[Span]) -> Iterator[Extent]:
    """The indices of the rows *spans* of a selection, where it has some."""
    if isinstance(selection, plans.Picked):
        for start, stop in _joined(spans):
            yield from rows_between(selection.indices, start, stop - 1)


def _indices(selection: plans.Rows, start: int, stop: int, view: View) -> NDArray[np.int64]:
    if isinstance(selection, range):
        return indices_of(selection[start:stop])
    return np.asarray(view.array(selection.indices)[start:stop], np.int64)


def _items(
    places: Array, base: Region, selection: plans.Rows | None, spans: Iterable[Span], view: View
) -> Iterator[Extent]:
    """The bytes of the items of these rows, at *places* from *base* on, and what is between."""
    for start, stop in _joined(spans):
        chosen = slice(start, stop) if selection is None else _indices(selection, start, stop, view)
        first, last = int(places[chosen].min()), int(places[chosen].max())
        if last > first:
            yield Extent(base.segment, base.offset + first, base.offset + last)


def _pickled(region: Region, view: View) -> Iterator[Extent]:
    """The part of *region* that is filled, as its table of lengths says."""
    *before, last = plans.Pickled.lengths(view.array(region))
    yield Extent(region.segment, region.offset, region.offset + sum(map(aligned, before)) + last)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """*spans* of rows as fewer ones; empty ones are left out."""
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


def whole(region: Region) -> Iterator[Extent]:
    if prod(region.shape):
        low, high = _reach(region, 0)
        yield Extent(region.segment, region.offset + low, region.offset + high)


def rows_between(region: Region, first: int, last: int) -> Iterator[Extent]:
    """From row *first* to row *last*, both among them."""
    if prod(region.shape):
        low, high = _reach(region, 1)
        ends = [region.offset + row * _strides(region)[0] for row in (first, last)]
        yield Extent(region.segment, min(ends) + low, max(ends) + high)


def _picked(region: Region, rows: NDArray[np.int64]) -> Iterator[PickedRows]:
    if prod(region.shape):
        low, high = _reach(region, 1)
        yield PickedRows(region.segment, region.offset + low, _strides(region)[0], high - low, rows)
