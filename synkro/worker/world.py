"""Worlds: some of the ranks of a call, with collectives of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, Protocol, TypeVar, cast, overload

import numpy as np
from numpy.typing import NDArray

from ..comms.members import Members
from ..errors import InvalidType
from .group import Group

F = TypeVar("F", bound=np.inexact[Any])
P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


class OverArrays(Protocol[P, Q]):
    """The type of a collective: arrays of floats make arrays of the same floats.

    *P* are its other parameters inside a function; *Q* are all that it takes elsewhere.
    """

    @overload
    def __call__(self, value: complex, *args: P.args, **kwargs: P.kwargs) -> Any: ...

    @overload
    def __call__(self, value: NDArray[F], *args: P.args, **kwargs: P.kwargs) -> NDArray[F]: ...

    @overload
    def __call__(self, value: Any, *args: P.args, **kwargs: P.kwargs) -> Any: ...

    @overload
    def __call__(self, *args: Q.args, **kwargs: Q.kwargs) -> Any: ...


def _of_its_ranks(method: Callable[Concatenate[Group, P], R]) -> Callable[Concatenate[World, P], R]:
    """What the group does, for the ranks of a world."""

    @functools.wraps(method)
    def collective(self: World, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._group.among(self._members):
            return method(self._group, *args, **kwargs)

    return collective


def _over_arrays(method: Callable[Concatenate[Group, Any, P], Any]) -> OverArrays[P, P]:
    return cast("OverArrays[P, P]", _of_its_ranks(method))


class World:
    """The ranks of one color, in the call that ``synkro.split()`` has parted.

    Its collectives are those of the module, for these ranks alone; roots, sources and destinations are
    ranks of this world.  The ranks of other worlds need not do the same.
    """

    def __init__(self, group: Group, members: Members) -> None:
        self._group = group
        self._members = members

    def rank(self) -> int:
        """This worker's number in this world."""
        return self._members.place

    def size(self) -> int:
        """How many ranks are in this world."""
        return len(self._members.ranks)

    def split(self, color: int | None) -> World | None:
        """The worlds of the ranks of this world that have the same *color*."""
        with self._group.among(self._members):
            return split(self._group, color)

    barrier: Final = _of_its_ranks(Group.barrier)
    all_reduce: Final = _over_arrays(Group.all_reduce)
    reduce: Final = _over_arrays(Group.reduce)
    broadcast: Final = _over_arrays(Group.broadcast)
    scatter: Final = _over_arrays(Group.scatter)
    gather: Final = _over_arrays(Group.gather)
    all_gather: Final = _over_arrays(Group.all_gather)
    reduce_scatter: Final = _over_arrays(Group.reduce_scatter)
    all_to_all: Final = _over_arrays(Group.all_to_all)
    send: Final = _of_its_ranks(Group.send)
    recv: Final = _of_its_ranks(Group.recv)
    exchange: Final = _over_arrays(Group.exchange)

    def __repr__(self) -> str:
        return f"<synkro.World: rank {self.rank()} of {self.size()}>"

    def __reduce__(self) -> NoReturn:
        raise InvalidType(
            "a world is for the function that has made it with split(), on its worker: return arrays "
            "and numbers, and call split() again in the next call."
        )


def split(group: Group, color: int | None) -> World | None:
    """This rank's world of the ranks with the same *color*; None for a rank whose color is None."""
    members = group.split(color)
    return None if members is None else World(group, members)
