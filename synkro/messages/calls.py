"""Calls and maps, and what becomes of their outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

from ..plan import extents
from ..plan.call import Access, CallPlan, Region
from ..plan.extents import Extent, Partial, PickedRows, View
from ..plan.outputs import Tree
from ..plan.split import Span
from ..values.arrays import Code
from .base import Command, Message, Reply, TooLong


class FunctionSpec(Message):
    """What a worker knows of a function.

    *updates* are the variables whose new values it returns beside its outputs, each with its operation.
    *finish* is called on every rank after its last piece, with the weight of its rows; it may use
    collectives.
    """

    name: str
    fn: Any
    outputs: Any
    updates: tuple[tuple[Any, str], ...] = ()
    finish: Any = None


class OfPlan(Command):
    """A command that has the plan of a call."""

    plan: CallPlan

    def names(self) -> Iterator[tuple[int, Access]]:
        return ((region.segment, Access.READ) for region in self.plan.regions())

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return extents.inputs(self.plan, ranks, view)


class Call(OfPlan):
    """Run a function once on each rank, as its plan says."""

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        return outputs_of(replies, view)


class Work(Command):
    """Take items of a queue, and run a function on each.

    *plan* is that of a call with what all items have in common.  *queue* numbers the descriptors of the
    queue.  Item i's random generator is a stream of *seed*, of this map's *number*, and of i.  *objects*
    are those that the function uses: the paths, by number.  If it *goes_on*, a task that fails has its
    failure for a result; else the command fails.  After *most* tasks, if that is given, a worker ends.
    """

    plan: CallPlan
    queue: tuple[int, ...]
    seed: int
    number: int
    goes_on: bool
    most: int | None
    objects: dict[int, str]

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return extents.inputs(self.plan, ranks, view)


class Replay(OfPlan):
    """Copy what *rank* needs to run a function once more that has failed: in the call of the plan, or on
    the *item* of a map, a pickle; the plan is that of what items have in common then.

    *began* is as in ``Failed``.  If it *opens* a prompt, the function runs on the rank, and so does a
    debugger at the line that raises.
    """

    rank: int
    item: bytes | None
    began: bytes
    opens: bool

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return super().reads([self.rank], view) if self.rank in ranks else iter(())


class Piece(NamedTuple):
    """One array: in the rank's outbox at *offset*, or, if that is None, waiting in the worker."""

    shape: tuple[int, ...]
    dtype: Code
    offset: int | None


class Leaf(NamedTuple):
    """One output of one rank: its own dtype, and its pieces in the dtype of their reduction.

    A reduced leaf has one piece; a gathered one, or one without reduction, a piece a slice.
    """

    dtype: Code
    pieces: tuple[Piece, ...]


class Done(Reply):
    """The outputs of a call; ``leaves`` is None for a rank that had no rows."""

    tree: Tree
    leaves: tuple[Leaf, ...] | None


class KeptOutput(NamedTuple):
    """Leaf *leaf* of the last call's outputs becomes variable *number*.

    A rank that took no part has no rows of it: an array of *dtype*, of shape ``(0, *tail)``.
    """

    leaf: int
    number: int
    tail: tuple[int, ...]
    dtype: Code


class Keep(Command):
    changes = True
    outputs: tuple[KeptOutput, ...]


class StoredPiece(NamedTuple):
    """Piece *piece* of leaf *leaf* of the last call's outputs goes to *region*.

    If it is *staged*, a ``Reduce`` reads it there, on the ranks of its host, and nobody else.
    """

    leaf: int
    piece: int
    region: Region
    staged: bool


class Store(Command):
    """Put pieces of outputs where *placements* say, a tuple for each rank."""

    placements: tuple[tuple[StoredPiece, ...], ...]

    def names(self) -> Iterator[tuple[int, Access]]:
        return ((s.region.segment, Access.WRITE) for stored in self.placements for s in stored)

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        for rank in replies:
            for stored in self.placements[rank]:
                if not stored.staged:
                    yield from extents.whole(stored.region)


class Reduction(NamedTuple):
    """Reduce *sources*, in their order, with operation *op* into *target*; each rank does its share.

    ``owners[i]`` has stored source i.  A mean's sum is divided by *divisor*.  In place of sources in
    shared memory there may be a *leaf* of the last call's outputs, which waits on the ranks' GPUs.
    """

    op: str
    divisor: int
    owners: tuple[int, ...]
    sources: tuple[Region, ...]
    target: Region
    leaf: int = -1

    def written(self, ranks: Sequence[int], replies: Iterable[int]) -> Iterator[Extent | Partial]:
        """The bytes of the target that those of *ranks* have written which have replied, of one host."""
        target = self.target
        if self.sources:
            here = set(replies).intersection(self.owners)
            if here == set(self.owners):
                yield from extents.whole(target)
            elif here:
                yield Partial(self.op, self.divisor, target, self.owners)
            return
        flat = Region(target.segment, target.offset, (prod(target.shape),), target.dtype)
        length = -(-flat.shape[0] // len(ranks))
        for rank in set(replies).intersection(ranks):  # by their GPUs, each its part
            start = ranks.index(rank) * length
            stop = min(start + length, flat.shape[0])
            if start < stop:
                yield from extents.rows_between(flat, start, stop - 1)


class Reduce(Command):
    """Do *reductions*, *ranks* together: where they are of leaves, those that have them."""

    reductions: tuple[Reduction, ...]
    ranks: tuple[int, ...]

    def names(self) -> Iterator[tuple[int, Access]]:
        for reduction in self.reductions:
            for region in (*reduction.sources, reduction.target):
                yield region.segment, Access.WRITE

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        for reduction in self.reductions:
            yield from extents.numbers(reduction.written(self.ranks, replies))


class Export(Command):
    """Write rows of *source* to the zarr array *path* of a *store*: rank r those of ``spans[r]``.

    It has to have the *layout* that the main process has seen.
    """

    store: str
    path: str
    layout: str
    source: Region
    spans: tuple[Span, ...]
    access = Access.WRITE


class Exported(Reply):
    """Rows of the span are written up to *done*, and not touched from *reached* on.

    *errno* and *problem* say why not all are written, or are 0 and empty.
    """

    done: int
    reached: int
    errno: int = 0
    problem: str = ""


def outputs_of(replies: Mapping[int, Reply], view: View) -> Iterator[Extent]:
    """What ranks have left in their outboxes; all of one if the reply that says so is on its way."""
    outbox = view.outbox
    for rank, reply in replies.items():
        if isinstance(reply, TooLong):
            yield from extents.rows_between(outbox, rank, rank)
        leaves = reply.leaves if isinstance(reply, Done) else None
        for piece in (piece for leaf in leaves or () for piece in leaf.pieces):
            if piece.offset is not None:
                at = outbox.offset + rank * outbox.shape[1] + piece.offset
                yield from extents.whole(Region(outbox.segment, at, piece.shape, piece.dtype))
