"""What gateway and leaders tell each other while a session lives, and what the main process tells both.

::

    Begin         main → gateway → leader   start your workers
    Begun         … → main                  they have started, or why not
    Ordered       gateway → leader          a command, and what its ranks read of the main memory
    Answered      leader → gateway          replies to it, and what its ranks have written
    Interrupt     main → gateway            as Ctrl-C would
    GiveUp        gateway → leader          the same, of one command
    Standing      leader → gateway          what ranks do
    Printed       leader → gateway → main   what a worker has written to stdout or stderr
    Died          leader → gateway → main   a worker has ended
    Traced        gateway → leader          have the workers leave marks
    Marks         leader → gateway          they have
    Tick, Tock    gateway → leader → …      what the clocks say
    Silent        gateway → main            nothing is heard of a host any more
    Shown         between all               what the ranks of a host have shown the others
    Ended         between all               which commands they have answered
"""

from __future__ import annotations

from typing import NamedTuple

from ..ipc.process import ProcessEnd
from .cargo import Cargo
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


class Ordered(NamedTuple):
    """Command *number*, for *ranks* of the host; *command* is None if it is the one before."""

    number: int
    ranks: tuple[int, ...]
    command: bytes | None
    housekeeping: bytes
    cargo: Cargo


class Answered(NamedTuple):
    """Replies to command *number*, by rank, None where it is the one before; and what was written.

    *partials* come as bodies behind those of the *cargo*.
    """

    number: int
    replies: dict[int, bytes | None]
    cargo: Cargo
    partials: tuple[Partial, ...]


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
