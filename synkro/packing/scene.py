"""What a function that has failed needs, to run once more in the main program."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

from ..values.arrays import Array
from .pickles import found_in

OF_WORKER = "__of_worker__"
"""A name among those of a module that say what a worker had there."""


class Result(NamedTuple):
    """What a collective of this *name* has given: a copy of the *value*, if it is *kept*."""

    name: str
    kept: bool
    value: Any


class Began(NamedTuple):
    """How a run began that has failed.

    *piece* is the number of the piece of its rows, *task* the seed, the number of the map and that of
    the item, *rng* the state of ``rng()``; *singles* are the states of the generators behind
    ``random.random`` and the like, by module and name, and *owned* those of objects, by number.
    *results* are those of its collectives.
    """

    piece: int
    task: tuple[int, int, int] | None
    rng: Any
    singles: dict[tuple[str, str], Any]
    owned: dict[int, Any]
    results: tuple[Result, ...]


class Scene(NamedTuple):
    """A function, and what it gets: *rows* are what ``rows()`` returns, *place* is its rank, and how
    many there are, *where* its host, its rank there, and how many are there.  *modules* are the user's
    own that it imports while it runs, by name, and *errors* what ``np.geterr`` says."""

    fn: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]
    rows: Array | None
    place: tuple[int, int]
    where: tuple[int, int, int]
    modules: dict[str, ModuleType]
    errors: dict[str, Any]


def singles_at(began: Began) -> list[tuple[Any, Any]]:
    """The generators of this process that every process has, each with the state of when a run began."""
    return [(found_in(*place), state) for place, state in began.singles.items()]
