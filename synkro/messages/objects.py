"""Functions, and the objects that they bring along."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..plan.call import Access
from ..plan.extents import Extent, Partial, PickedRows, View
from .base import Command, Reply


class Parcel(NamedTuple):
    """A stream of pickles, and its big buffers, which lie in a segment, as (start, stop)."""

    stream: bytes
    segment: int | None
    buffers: tuple[tuple[int, int], ...]

    def extents(self) -> Iterator[Extent]:
        """Where the buffers lie."""
        if self.segment is not None:
            for start, stop in self.buffers:
                yield Extent(self.segment, start, stop)


class Parcelled(Command):
    """A command with a parcel."""

    parcel: Parcel

    def names(self) -> Iterator[tuple[int, Access]]:
        if self.parcel.segment is not None:
            yield self.parcel.segment, Access.COPY

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return self.parcel.extents()


class Distribute(Parcelled):
    """Load the functions of a parcel, each with its number and a ``FunctionSpec``.

    *settings* are those of libraries, by library.
    """

    changes = True
    sys_path: tuple[str, ...]
    cwd: str
    settings: dict[str, dict[str, Any]]


class Renew(Parcelled):
    """Take over a parcel without functions."""

    changes = True


class Assign(Command):
    """Put numbers and strings into objects, and do the command *then*, which is pickled.

    *entries* are the new ones of each object, by its number.  *caching* are the numbers of objects that
    keep what they have computed of those.
    """

    entries: dict[int, dict[Any, Any]]
    caching: list[int]
    then: bytes

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        return self._following().reads(ranks, view)

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        return self._following().writes(replies, view)

    def _following(self) -> Command:
        command: Command = pickle.loads(self.then)
        return command


class Compare(Parcelled):
    """The parcel lists objects: their numbers, what they held when they came, what they are to hold."""


class Compared(Reply):
    """For each object, whether it is neither what it was nor what it is to be."""

    differs: tuple[bool, ...]


class Changes(Parcelled):
    """The parcel lists objects: their numbers, and what they held when they came."""


class Changed(Reply):
    """The numbers of the objects that hold something else."""

    numbers: tuple[int, ...]


class Copy(Command):
    """What the objects of these *numbers* hold, so that another rank can take it over."""

    numbers: tuple[int, ...]


class Copies(Reply):
    """What objects hold, pickled together; *lost* are the numbers of those that pickle does not take."""

    pickle: bytes
    lost: tuple[int, ...]


class Recover(Command):
    """Put into objects what they held: *pickles* as in ``Copies``."""

    pickles: tuple[bytes, ...]


class Fetch(Command):
    """Object *number*, from *rank*."""

    number: int
    rank: int


class Copied(Reply):
    """The object, pickled; of other ranks empty."""

    pickle: bytes


class Preserve(Command):
    """Put back what was kept, if *restore*; if *keep*, keep *objects*, all variables and generators.

    While they are kept, functions may not use collectives, and not draw from ``rng()``.
    """

    changes = True
    objects: tuple[int, ...]
    restore: bool
    keep: bool
