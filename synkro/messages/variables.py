"""The variables on the workers, and collectives over their replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..plan import extents
from ..plan.call import Access, Picked, Region, Rows
from ..plan.extents import Extent, PickedRows, View
from ..plan.split import Span
from ..values.arrays import Code
from .base import Command, Reply
from .calls import outputs_of


class Create(Command):
    """Variable *number* with the contents of *value*, a copy on every rank."""

    changes = True
    number: int
    name: str | None
    value: Region

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return extents.numbers(extents.whole(self.value))


class Move(Command):
    """Variable *number* on rank *target* with the contents that *variable* has on rank *source*."""

    changes = True
    variable: int
    source: int
    number: int
    target: int


class Secure(Command):
    """Have all replicas, and what functions have made of objects, lie in the arena, where they outlive
    the worker.

    At a *time*, if that is given, copies of replicas are kept there, and what the objects of these
    *numbers* hold, and those that the program has sent, is kept, beside what was kept at the time
    *before*; all else that was kept goes, as that has not ended on all ranks.  Functions are known to
    have *changed* these objects.  Else nobody writes meanwhile; the objects of these *numbers* are kept,
    and those of the last time, unless calls have run since.
    """

    time: int | None
    before: int
    numbers: tuple[int, ...]
    changed: tuple[int, ...]


class SecuredReplica(NamedTuple):
    """Where in the arena the replica of variable *number* lies; *kept*: it has rows of its own."""

    number: int
    name: str | None
    kept: bool
    place: int
    shape: tuple[int, ...]
    dtype: Code


class Secured(Reply):
    """What outlives the worker, and where.

    *objects* are those that functions have changed: the numbers of those that are pickled together,
    where the pickle of what they hold lies, and how long that is; *unkept* those of which there is
    none.  *generator* is the state of its random generator, or None if it has not drawn.  *called* says
    whether a call has run since the last ``Secure``.
    """

    replicas: tuple[SecuredReplica, ...]
    objects: tuple[tuple[tuple[int, ...], int, int], ...]
    unkept: tuple[int, ...]
    generator: Any
    called: bool


class Revert(Command):
    """Be as at a *time* when copies were kept: the last one that has ended on all ranks."""

    time: int


class Restore(Command):
    """Variables that exist from now on, as they were on the worker before: each has the contents of a
    region.  *generator* is the state of its random generator."""

    replicas: tuple[tuple[SecuredReplica, Region], ...]
    generator: Any

    def names(self) -> Iterator[tuple[int, Access]]:
        return ((region.segment, Access.READ) for _, region in self.replicas)

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        for _, region in self.replicas:
            yield from extents.numbers(extents.whole(region))


class Fill(NamedTuple):
    """A variable's new contents: on rank r the rows ``rows[r]`` of *source*; None: they do not change.

    Without a *selection* the ranks that have rows take all of *source*, whatever its dimensions.
    """

    variable: int
    source: Region
    selection: Rows | None
    rows: tuple[Span | None, ...]

    def extents(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        """What *ranks* put into the variable."""
        spans = [rows for rank in ranks if (rows := self.rows[rank]) is not None]
        if self.selection is not None:
            yield from extents.picks(self.selection, spans)
            yield from extents.numbers(extents.rows(self.source, self.selection, spans, view))
        elif spans:
            yield from extents.numbers(extents.whole(self.source))


class Write(Command):
    changes = True
    fills: tuple[Fill, ...]

    def names(self) -> Iterator[tuple[int, Access]]:
        for fill in self.fills:
            yield fill.source.segment, Access.READ
            if isinstance(fill.selection, Picked):
                yield fill.selection.indices.segment, Access.READ

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        for fill in self.fills:
            yield from fill.extents(ranks, view)


class Read(Command):
    """The replicas on *ranks*, each with a new first dimension if *raised*, reduced by *mode*."""

    variables: tuple[int, ...]
    ranks: tuple[int, ...]
    mode: str | None
    raised: bool

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent]:
        return outputs_of(replies, view)


class Inspect(Command):
    variables: tuple[int, ...]


class Shapes(Reply):
    shapes: tuple[tuple[int, ...], ...]


class Identify(Command):
    variable: int


class Identity(Reply):
    digest: bytes


class Exchange(Command):
    """A collective over replicas, in place: all_reduce, reduce, broadcast or all_gather.

    Without *nccl*, replicas on GPUs go through host memory.
    """

    changes = True
    kind: str
    variables: tuple[int, ...]
    op: str
    root: int
    nccl: bool
