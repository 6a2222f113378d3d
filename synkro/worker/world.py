"""Worlds: some of the ranks of a call, with collectives of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from ..comms.members import Members
from ..errors import InvalidType
from .group import Group


def _of_its_ranks(method: Callable[..., Any]) -> Callable[..., Any]:
    """A collective of the group, for the ranks of a world."""

    @functools.wraps(method)
    def collective(self: World, *args: Any, **kwargs: Any) -> Any:
        with self._group.among(self._members):
            return method(self._group, *args, **kwargs)

    return collective


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

    barrier = _of_its_ranks(Group.barrier)
    all_reduce = _of_its_ranks(Group.all_reduce)
    reduce = _of_its_ranks(Group.reduce)
    broadcast = _of_its_ranks(Group.broadcast)
    scatter = _of_its_ranks(Group.scatter)
    gather = _of_its_ranks(Group.gather)
    all_gather = _of_its_ranks(Group.all_gather)
    reduce_scatter = _of_its_ranks(Group.reduce_scatter)
    all_to_all = _of_its_ranks(Group.all_to_all)
    send = _of_its_ranks(Group.send)
    recv = _of_its_ranks(Group.recv)
    exchange = _of_its_ranks(Group.exchange)

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
