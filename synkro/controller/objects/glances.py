"""``Glance``: things that are compared in one go; and a quick way to compare all of a function's."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from operator import is_
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from ...packing.kinds import (
    CLASS_OF,
    DICT,
    FUNCTION,
    FUNCTION_PARTS,
    INSTANCE,
    NAME,
    OPAQUE,
    STATEFUL,
    WHOLE,
    attributes_of,
    is_scalar,
)
from .walk import Known

GONE = object()
"""Where there is nothing."""

DELETED = (KeyError, ValueError, AttributeError, RuntimeError)
"""What looking raises where something was deleted."""

_SHORT = 40  # of more entries a loop in C is as quick as code for each


class Glance(NamedTuple):
    """Things that are compared in one go: how to look at *holder*, and what was there.

    *places* says of what objects these are entries, where they are.
    """

    look: Callable[[Any], Iterable[Any]]
    holder: Any
    last: list[Any]
    places: Sequence[tuple[Known, Any]] = ()

    def same(self) -> bool:
        """Whether all is as it was; there may be more."""
        return all(map(is_, self.look(self.holder), self.last))


class Flags(Glance):
    """Numbers and strings of many things: equal ones count as the same, which takes half the time."""

    def same(self) -> bool:
        return [*self.look(self.holder)] == self.last


class Assigned(NamedTuple):
    """An entry to which the program has assigned another number or string."""

    glance: Glance
    at: int
    value: Any

    @property
    def place(self) -> tuple[Known, Any]:
        """The object, and the key of the entry."""
        return self.glance.places[self.at]


def differing(glance: Glance) -> Iterator[Assigned]:
    """What is not as it was.  Raises: ValueError for another number of things."""
    for at, (value, last) in enumerate(zip(glance.look(glance.holder), glance.last, strict=True)):
        if value is not last:
            yield Assigned(glance, at, value)


def is_assigned(one: Assigned) -> bool:
    """Whether it is a number or a string, as it was before, which can be changed by itself."""
    if not one.glance.places or one.place[0].kind in (STATEFUL, OPAQUE):
        return False
    if not (
        one.place[1] is WHOLE or type(one.place[1]) in (str, int)
    ):  # a key that holds objects, or NaN
        return False
    return is_scalar(one.value) and is_scalar(one.glance.last[one.at])


def lengths(given: Sequence[Any]) -> Iterator[int]:
    """How many entries each has."""
    return map(len, given)


elements: Callable[[Any], Iterable[Any]] = chain.from_iterable
"""The elements of sequences, and the keys of dicts."""


class QuickLook:
    """All glances at once, as code of their own: ``model["rate"] is last[2] and …``.

    This takes a fifth of the time, but a tenth of a millisecond to make.
    """

    def __init__(self, glances: Sequence[Glance], missing: Iterable[tuple[dict[str, Any], set[str]]]):
        self._names: dict[str, Any] = {}
        tests = [test for glance in glances for test in self._tests(glance)]
        tests += [f"{self._name(names)}.keys().isdisjoint({self._name(m)})" for names, m in missing]
        made = compile(f"lambda: {' and '.join(tests) or 'True'}", "<what a call compares>", "eval")
        (code,) = (const for const in made.co_consts if isinstance(const, CodeType))
        self._names["__builtins__"] = builtins
        # not by eval(): Python dies in the end of a Ctrl-C that came in one
        self.same: Callable[[], bool] = FunctionType(code, self._names)
        """Whether all is as it was."""

    def _name(self, obj: Any) -> str:
        """A name for *obj* in the code."""
        name = f"v{len(self._names)}"
        self._names[name] = obj
        return name

    def _tests(self, glance: Glance) -> Iterator[str]:
        last = self._name(glance.last)
        short = len(glance.last) <= _SHORT
        ways = [self._way(known, key) for known, key in glance.places] if short else [None]
        if glance.places and None not in ways:
            yield from (f"{way} is {last}[{at}]" for at, way in enumerate(ways))
        elif short and glance.look is lengths:
            yield from (
                f"len({self._name(one)}) == {length}"
                for one, length in zip(glance.holder, glance.last, strict=True)
            )
        elif short and glance.look is elements and len(glance.holder) == 1:
            yield f"all(map({self._name(is_)}, {self._name(glance.holder[0])}, {last}))"
        else:
            yield f"{self._name(glance.same)}()"

    def _way(self, known: Known, key: Any) -> str | None:
        """The expression for an entry; None if there is no simple one."""
        obj = known.obj
        if known.kind is NAME:
            return f"{self._name(obj.names)}[{obj.name!r}]"
        if known.kind is FUNCTION and type(key) is int:
            return f"{self._name(obj.__closure__[key])}.cell_contents"
        if known.kind is FUNCTION and key in FUNCTION_PARTS:
            return f"{self._name(obj)}.{key}"
        if key == CLASS_OF and known.kind is INSTANCE:
            return f"type({self._name(obj)})"
        held = obj if known.kind is DICT else attributes_of(obj) if known.kind is INSTANCE else None
        return f"{self._name(held)}[{key!r}]" if type(held) is dict and type(key) is str else None
