"""What the main process asks the hosts, by the gateway."""

from __future__ import annotations

from typing import NamedTuple


class Hail(NamedTuple):
    """Who are you?  The main process stands in *folder*, and imports from *path*."""

    folder: str
    path: tuple[str, ...]


class Look(NamedTuple):
    """Which GPUs are there, if CUDA is told to show the same as in the main process?"""

    shown: dict[str, str]


class Clock(NamedTuple):
    """What time is it?"""


class Sees(NamedTuple):
    """Is there a file at *path*?"""

    path: str


class Echo(NamedTuple):
    """Send these *nbytes* back."""

    nbytes: int


class Reach(NamedTuple):
    """Does host *leader* reach host *other* by itself?"""

    leader: int
    other: int


class End(NamedTuple):
    """The session is over."""


class Leave(NamedTuple):
    """There will be no other session."""


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
