"""What the main process, the gateway and the leaders tell each other.

Questions, which the main process asks the gateway, and that asks the leaders, come before a session::

    Hail          who are you?
    AskGpus       which GPUs are there?
    Distances     how far are the hosts?  For which the gateway asks Echo
    Reach         does one host reach another?
    End, Leave    the session is over; there will be no other

While a session lives::

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
    ProcessEnd    leader → gateway → main   a worker has ended (``ipc.process``)
    Traced        gateway → leader          have the workers leave marks
    Marks         leader → gateway          they have
    Tick, Tock    gateway → leader → …      what the clocks say
    LostError     leader → gateway → main   a host is lost (``seals``)
    Missing       gateway → main            a host does not have a file
    Pushing       gateway → main            inputs are on their way to a host for long
    Shown         between all               what the ranks of a host have shown the others
    Ended         between all               which commands they have answered
"""

from __future__ import annotations

import pickle
from enum import IntEnum
from typing import NamedTuple

from ..memory.files import Likeness
from ..messages import Failed
from ..packing.failures import kinds, pickled
from ..plan.extents import Partial
from .parcels import Parcel, ValueParcel

# ── questions ────────────────────────────────────────────────────────────────────────────────────────


class Hail(NamedTuple):
    """Who are you?  The main process stands in *folder*, imports from *path*, and has an *environment*,
    which is told here if it came by no other way."""

    folder: str
    path: tuple[str, ...]
    environment: dict[str, str] | None


class AskGpus(NamedTuple):
    """Which GPUs are there, if CUDA is told to show the same as in the main process?"""

    shown: dict[str, str]


class Echo(NamedTuple):
    """Send *nbytes* bytes back.  What time is it, and is there a file at *path*, if one is given?"""

    nbytes: int
    path: str = ""


class Reach(NamedTuple):
    """Does host *leader* reach host *other* by itself?"""

    leader: int
    other: int


class Distances(NamedTuple):
    """How far is each host?  A ``Distance`` each answers; *path* is a file of the main process's."""

    path: str


class Distance(NamedTuple):
    """What lies between the gateway and a host.

    Attributes:
        latency: seconds that a message takes, half of there and back.
        bandwidth: bytes a second, there and back.
        ahead: seconds that its clock is ahead of the gateway's.
        sees: whether it sees the file.
    """

    latency: float
    bandwidth: float
    ahead: float
    sees: bool


class End(NamedTuple):
    """The session is over."""


class Leave(NamedTuple):
    """There will be no other session."""


class Over(NamedTuple):
    """Nothing of this session follows."""


# ── a session ────────────────────────────────────────────────────────────────────────────────────────


class Begin(NamedTuple):
    """Start the workers of your host.

    Attributes:
        hosts: the ranks of each process of MPI's.
        board: the bytes where ranks meet.
        environments: of the workers, by rank: what they have beyond the main process's.
        host_timeout: seconds after which a host of which nothing is heard is lost.
        trusted: whether rows need no digests.
    """

    hosts: tuple[range, ...]
    board: int
    environments: tuple[dict[str, str], ...]
    host_timeout: float
    trusted: bool


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
    """The answer to ``Wanted``: whether the host has the file, so that the workers map it."""

    segment: int
    there: bool


class Ordered(NamedTuple):
    """Command *number*, for *ranks* of the host; *command* is None if it is the one before."""

    number: int
    ranks: tuple[int, ...]
    command: bytes | None
    housekeeping: bytes
    parcel: Parcel | None


class Answered(NamedTuple):
    """Replies to command *number*, by rank, None where it is the one before; and what was written.

    *partials* come as bodies behind those of the *parcel*.
    """

    number: int
    replies: dict[int, bytes | None]
    parcel: Parcel | None
    partials: tuple[Partial, ...]


class Halt(IntEnum):
    """No more items come for the ranks of a host; each of these goes further than those before it."""

    NOT = 0
    END = 1  # they end when all that have come are done
    STOP = 2  # no other begins: nobody wants results
    WITHDRAW = 3  # no other begins, as they have other things to do


class Offered(NamedTuple):
    """Items of command *number*; *read* bytes of results have been handed over."""

    number: int
    values: tuple[ValueParcel, ...]
    read: int
    halt: Halt


class Returned(NamedTuple):
    """Results of command *number*."""

    number: int
    values: tuple[ValueParcel, ...]


class Recall(NamedTuple):
    """Give back the items of command *number* that have not begun, for others."""

    number: int


class Undone(NamedTuple):
    """Items of command *number*, as (number, how many), have not begun, and will not here."""

    number: int
    items: tuple[tuple[int, int], ...]


class Interrupt(NamedTuple):
    """Have *ranks* give up what they do, if the main process no longer wants it."""

    ranks: tuple[int, ...]


class UserAnswer(NamedTuple):
    """What the user has answered to question *number* of a rank."""

    rank: int
    number: int
    line: str


class GiveUp(NamedTuple):
    """Have a rank give up command *number*, which nobody wants of its lane any more."""

    number: int
    rank: int


class Standing(NamedTuple):
    """What ranks do: (rank, phase, count)."""

    doing: tuple[tuple[int, int, int], ...]


class Printed(NamedTuple):
    """Bytes of a worker's *stream*, "stdout", "stderr" or "log"; none at its end."""

    rank: int
    stream: str
    chunk: bytes


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
    """The marks that a rank has left: ns on the clock of its host, phase and count."""

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
    return pickle.dumps(Failed(None, summary, b"", pickled(problem), kinds(problem), True, False, None))
