"""What gateway and leaders tell each other while a session lives, and what the main process tells both.

::

    Begin         main → gateway → leader   start your workers
    Begun         … → main                  they have started, or why not
    Wanted        gateway → leader          is this file there, too?
    Looked         leader → gateway          it is, or not
    Ordered       gateway → leader          a command, and what its ranks read of the main memory
    Answered      leader → gateway          replies to it, and what its ranks have written
    Offered       gateway → leader          items of a map, for whichever of its ranks is free
    Returned      leader → gateway          of these items
    Recall        gateway → leader          give back the items that have not begun
    Undone        leader → gateway          these are they
    Interrupt     main → gateway            as Ctrl-C would
    GiveUp        gateway → leader          the same, of one command
    Standing      leader → gateway          what ranks do
    Printed       leader → gateway → main   what a worker has written to stdout or stderr
    Died          leader → gateway → main   a worker has ended
    Traced        gateway → leader          have the workers leave marks
    Marks         leader → gateway          they have
    Tick, Tock    gateway → leader → …      what the clocks say
    Silent        gateway → main            nothing is heard of a host any more
    Missing       gateway → main            a host does not have a file
    Pushing       gateway → main            inputs are on their way to a host for long
    Shown         between all               what the ranks of a host have shown the others
    Ended         between all               which commands they have answered
"""

from __future__ import annotations

import pickle
from enum import IntEnum
from typing import NamedTuple

from ..ipc.process import ProcessEnd
from ..memory.files import Likeness
from ..messages import Failed
from ..packing.exceptions import kinds, packed
from .cargo import Cargo
from .freight import Freight
from .traffic import Partial


class Begin(NamedTuple):
    """Start the workers of your host.

    Attributes:
        size: the number of all ranks.
        hosts: the ranks of each process of MPI's.
        board: the bytes where ranks meet.
        environments: of the workers, by rank.
        host_timeout: seconds after which a host of which nothing is heard is lost.
    """

    size: int
    hosts: tuple[range, ...]
    board: int
    environments: tuple[dict[str, str], ...]
    host_timeout: float


class Begun(NamedTuple):
    """The process ids of the workers, in the order of their ranks; or a *problem*."""

    pids: tuple[int, ...]
    problem: str = ""


class Wanted(NamedTuple):
    """Have the workers map the file that looks so as *segment*, if it is there."""

    segment: int
    nbytes: int
    file: Likeness


class Looked(NamedTuple):
    """Whether they do."""

    segment: int
    there: bool


class Ordered(NamedTuple):
    """Command *number*, for *ranks* of the host; *command* is None if it is the one before."""

    number: int
    ranks: tuple[int, ...]
    command: bytes | None
    housekeeping: bytes
    cargo: Cargo | None


class Answered(NamedTuple):
    """Replies to command *number*, by rank, None where it is the one before; and what was written.

    *partials* come as bodies behind those of the *cargo*.
    """

    number: int
    replies: dict[int, bytes | None]
    cargo: Cargo | None
    partials: tuple[Partial, ...]


class Halt(IntEnum):
    """No more items come for the ranks of a host; each of these goes further than those before it."""

    NOT = 0
    END = 1  # they end when all that have come are done
    STOP = 2  # no other begins: nobody wants results
    WITHDRAW = 3  # no other begins, as they have other things to do


class Offered(NamedTuple):
    """Items of command *number*.

    Attributes:
        alone: each with its number.
        groups: pickles of several each, the numbers of those that come, and their places among them.
        read: bytes of large results that have been handed over.
    """

    number: int
    alone: tuple[Freight, ...]
    groups: tuple[tuple[bytes, tuple[int, ...], tuple[int, ...]], ...]
    read: int
    halt: Halt


class Returned(NamedTuple):
    """Results of command *number*, and the numbers of the items that each of them is for."""

    number: int
    freights: tuple[Freight, ...]
    items: tuple[tuple[int, ...], ...]


class Recall(NamedTuple):
    """Others may take the items of command *number* that have not begun."""

    number: int


class Undone(NamedTuple):
    """Items of command *number* have not begun, and will not here."""

    number: int
    items: tuple[int, ...]


class Interrupt(NamedTuple):
    """Have *ranks* give up what they do, if the main process no longer wants it."""

    ranks: tuple[int, ...]


class GiveUp(NamedTuple):
    """Have *ranks* give up command *number*."""

    number: int
    ranks: tuple[int, ...]


class Standing(NamedTuple):
    """What ranks do: (rank, phase, count)."""

    doing: tuple[tuple[int, int, int], ...]


class Printed(NamedTuple):
    """Bytes of a worker's *stream*, "stdout" or "stderr"; none at its end."""

    rank: int
    stream: str
    chunk: bytes


class Died(NamedTuple):
    """A worker has ended."""

    ended: ProcessEnd


class Silent(NamedTuple):
    """Nothing is heard of a host any more."""

    host: int


class Missing(NamedTuple):
    """The file that is *segment* is not on a host: what is read of it goes there."""

    host: int
    segment: int


class Pushing(NamedTuple):
    """*nbytes* are on their way to a host for long, most of them of *segment*."""

    host: int
    segment: int
    nbytes: int


class Traced(NamedTuple):
    """Have the workers leave marks from now on, or no longer."""

    on: bool


class Marks(NamedTuple):
    """Those that a rank has left: ns on the clock of its host, phase and count."""

    rank: int
    marks: tuple[tuple[int, int, int], ...]


class Tick(NamedTuple):
    """What does your clock say?  The gateway's says *sent*; ns."""

    sent: int


class Tock(NamedTuple):
    """The answer: the clock of the leader's host says *now*; ns."""

    sent: int
    now: int


class Shown(NamedTuple):
    """A batch of the journals of a host's ranks (``relay``)."""

    entries: bytes


class Ended(NamedTuple):
    """Which command each of some ranks has answered last."""

    numbers: dict[int, int]


def refusal(problem: Exception) -> bytes:
    """What a rank answers that has met this *problem*, or would have."""
    summary = f"{type(problem).__name__}: {problem}"
    return pickle.dumps(Failed(None, summary, b"", packed(problem), kinds(problem), True, False, None))
