"""How a session begins and ends, its random generators, and housekeeping alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from ..plan.call import Access, Region
from .base import Command, Reply


class Gpus(NamedTuple):
    """The GPU of each rank, by its index among the visible ones, and what to do with all of them.

    *linked* says whether NCCL should connect them, *preallocate* which fraction of a GPU's memory its
    rank takes at once, *near* whether they should open each other's memory.
    """

    indices: tuple[int, ...]
    linked: bool
    preallocate: float | None
    near: bool = False


class Start(Command):
    """Who runs where: for each rank the core to stay on (None: any), and its GPU, if they have any.

    *token* names the session in its pickled variables, *seed* is the entropy of all ranks' generators,
    *seeded* says whether the program gave it: then it seeds the generators of their processes, too;
    *profiles* are the files to which the ranks write profiles of themselves when they end, or None, and
    *verbose* says whether they print status lines; *versions* are those of all segments
    (``memory.segment``), where somebody asks for them.  The worker is number *life* of its rank: each
    has random numbers of its own.
    """

    token: str
    seed: Any
    seeded: bool
    master_rank: int
    outbox: Region
    cores: tuple[int | None, ...]
    gpus: Gpus | None
    profiles: tuple[str, ...] | None
    verbose: bool
    versions: Region | None
    life: int = 0

    def names(self) -> Iterator[tuple[int, Access]]:
        yield self.outbox.segment, Access.WRITE
        if self.versions is not None:
            yield self.versions.segment, Access.READ


class Started(Reply):
    """*problem* says why NCCL, if it should, does not connect the ranks, or is empty; *apart* why they
    do not open each other's device memory."""

    problem: str
    apart: str = ""


class Initialize(Command):
    """Call a function without arguments, by its number, which prepares the worker.

    *begins* are names that it assigns: the number of the module, the name, and the value to begin with.
    """

    changes = True
    function: int
    begins: list[tuple[int, str, Any]]


class Reseed(Command):
    """Seed all random generators anew; *seed* is the entropy of all ranks'."""

    changes = True
    seed: int


class Generator(Command):
    """New states of the ranks' generators, one a rank; None to leave them."""

    changes = True
    states: tuple[Any, ...] | None


class GeneratorState(Reply):
    generator: Any


class Release(Command):
    """Do the housekeeping, and nothing else."""


class Exit(Command):
    """End."""
