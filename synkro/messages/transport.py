"""What brings memory, long commands and long replies to the workers."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ..plan import extents
from ..plan.call import Access, Region
from ..plan.extents import Extent, Partial, PickedRows, View
from .base import Command, Reply


class Attach(NamedTuple):
    """Map a segment, whose descriptor comes over the socket, under this number.

    *file* says whether it is a file of the user's, which others may write to.
    """

    segment: int
    nbytes: int
    access: Access
    file: bool


class Housekeeping(NamedTuple):
    """What a worker does before it handles the command itself.

    *drop* has the numbers of segments, functions and variables that are gone; no two have the same.
    """

    attach: tuple[Attach, ...] = ()
    drop: tuple[int, ...] = ()


class Deliver(Command):
    region: Region
    access = Access.WRITE

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        for rank in replies:
            yield from extents.rows_between(self.region, rank, rank)


class Indirect(Command):
    region: Region

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        yield from extents.whole(self.region)
        yield from self.inner(view).reads(ranks, view)

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        return self.inner(view).writes(replies, view)

    def inner(self, view: View) -> Command:
        command: Command = pickle.loads(view.array(self.region).tobytes())
        return command.inner(view)
