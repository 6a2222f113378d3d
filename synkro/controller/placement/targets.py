"""What ``target=`` names: the rank, or the ranks, of a session."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InvalidType, InvalidValue, counted, nearest, shown
from .choice import Assignment


class Targets:
    """The names of a session's ranks."""

    def __init__(self, assignments: Sequence[Assignment], hosts: Sequence[range]) -> None:
        """*hosts* are the ranks of each host."""
        self._several = len(hosts) > 1
        self._size = len(assignments)
        self._names: dict[str, list[int]] = {}
        for rank, assignment in enumerate(assignments):
            for name in filter(None, dict.fromkeys((assignment.name, assignment.device))):
                self._names.setdefault(str(name), []).append(rank)
        contexts = [assignment.name for assignment in assignments if assignment.name is not None]
        self._own = {self._names[name][0]: name for name in contexts if len(self._names[name]) == 1}

    def ranks(self, target: Any) -> tuple[int, ...] | None:
        """The ranks that *target* names, in ascending order; None stands for all of them.

        Raises: InvalidType, InvalidValue.
        """
        if target is None:
            return None
        if not isinstance(target, list | tuple):
            return (self.rank(target),)
        found = [self.rank(each) for each in target]
        if not found:
            raise InvalidValue("target= names no rank: name at least one, or leave it out for all.")
        for rank in found:
            if found.count(rank) > 1:
                raise InvalidValue(
                    f"target={shown(target)} names rank {rank} twice: name each rank once."
                )
        return tuple(sorted(found))

    def names(self, ranks: Sequence[int]) -> str | int | list[str | int] | None:
        """What a user calls *ranks*: by context names where there are some; None for all."""
        return None if len(ranks) == self._size else self.each(ranks)

    def each(self, ranks: Sequence[int]) -> str | int | list[str | int]:
        """What a user calls *ranks*, one by one: a name, or a list of them.

        Where several hosts have the same names, these are no one's.
        """
        names = [self._own.get(rank, rank) for rank in ranks]
        return names[0] if len(names) == 1 else names

    def rank(self, target: Any) -> int:
        """The rank that *target* names: a context name, a device that one worker is on, or a number.

        Raises: InvalidType, InvalidValue.
        """
        if isinstance(target, np.integer):
            target = int(target)
        if isinstance(target, bool) or not isinstance(target, str | int):
            raise InvalidType(
                f"a target is a context name, a device or a rank (for function() and shared() also a "
                f"list of them); got {shown(target)}."
            )
        if isinstance(target, int):
            if not 0 <= target < self._size:
                raise InvalidValue(
                    f"target={target} is no rank: this session has {counted(self._size, 'rank')}, 0 to "
                    f"{self._size - 1}."
                )
            return target
        found = self._names.get(re.sub(r"^(cpu|cuda):", r"\1", target), [])
        if len(found) > 1:
            ranks = ", ".join(map(str, found))
            own = ', or give each a name of its own, by devices="dev0->cpu;dev1->cpu"'
            raise InvalidValue(
                f"target={shown(target)} is a name of the ranks {ranks}: give the number of one"
                f"{'' if self._several else own}."
            )
        if not found:
            names = [name for name, ranks in self._names.items() if len(ranks) == 1]
            listed = f", and the names {', '.join(names)}" if names else ""
            like = nearest(target, names, 0.6)
            hint = f" Did you mean {like!r}?" if like else ""
            raise InvalidValue(
                f"target={shown(target)} names no device of this session, which has the ranks 0 to "
                f"{self._size - 1}{listed}.{hint}"
            )
        return found[0]
