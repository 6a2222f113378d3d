"""The bases of commands and replies, and the replies that any command may get.

What brings memory, long commands and long replies to the workers is told, too.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..plan import extents
from ..plan.call import Access, Region
from ..plan.extents import Extent, Partial, PickedRows, View

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform  # Python 3.10 has none
else:

    def dataclass_transform(**_: Any) -> Any:
        """Tells type checkers alone that all subclasses are dataclasses."""
        return lambda base: base


@dataclass_transform(eq_default=False)
class Message:
    """A record that is equal to those of its class with equal contents; each class is a dataclass.

    Equality is written once: a frozen dataclass, which makes six methods, takes each process 0.4 ms.
    """

    def __init_subclass__(cls) -> None:
        dataclass(eq=False, repr=False)(cls)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__: ClassVar[None] = None  # type: ignore[assignment]


class Command(Message):
    """What the main process asks all ranks to do.

    It says which segments it names, so that ranks map them, and which bytes of the main process's memory
    it reads and writes, so that they can be brought to other hosts.  Most say all in themselves.

    Attributes:
        access: how ranks map its regions.
        changes: whether it alone changes what the ranks have.
    """

    access: ClassVar[Access] = Access.READ
    changes: ClassVar[bool] = False

    def names(self) -> Iterator[tuple[int, Access]]:
        """The segments that it names, and how ranks map each."""
        return ((part.segment, self.access) for part in vars(self).values() if isinstance(part, Region))

    def reads(self, ranks: Sequence[int], view: View) -> Iterator[Extent | PickedRows]:
        """What *ranks*, those of one host, read in it of what *view* shows."""
        yield from ()

    def writes(self, replies: Mapping[int, Reply], view: View) -> Iterator[Extent | Partial]:
        """What the ranks of one host have written in it, with their *replies* by rank."""
        yield from ()

    def inner(self, view: View) -> Command:
        """The command that it stands for, where that lies in what *view* shows; else itself."""
        return self


class Reply(Message):
    """What a rank answers."""


class Phase(IntEnum):
    """What a worker is doing, for errors of time-outs and for progress bars.

    Those from BEGINNING to COMMUNICATING appear in traces only.
    """

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    STORING = 3
    REDUCING = 4
    MERGING = 5
    BEGINNING = 6
    FEEDING = 7
    COMMUNICATING = 8
    TAKING = 9
    TASK = 10
    LEAVING = 11


class Ack(Reply):
    """The command is done."""


class TooLong(Reply):
    nbytes: int


class Failed(Reply):
    """An exception in a worker, as far as it can travel.

    ``usage`` says that it is one of our own errors of use, to be raised as it is; ``pickled`` is
    the exception itself, where it survives a round trip, and ``kinds`` are its classes.  ``strays``
    says that another rank's failure was the cause.  ``traceback`` is for ``packing.failures``.
    ``item`` is the number of the item on which a task failed.  ``began`` says how the run began, for a
    replay: see ``worker.scene``.
    """

    function: str | None
    summary: str
    traceback: bytes
    pickled: bytes | None
    kinds: tuple[bytes, ...]
    usage: bool
    strays: bool
    item: int | None
    began: bytes = b""


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
