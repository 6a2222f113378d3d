"""``Remembered``: what the workers have of an object that no function uses, but the program still has.

It goes with the program's object, which it does not hold: what that holds is remembered by weak
references.  Dicts, lists, sets, and others that nobody can refer to weakly, it does hold: as long as
what they were found in is there, if they do not lead back to it.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...packing.kinds import (
    ATTRIBUTES,
    WHOLE,
    Contents,
    Digest,
    Kind,
    alike,
    inside,
    is_plain,
    kind_of,
)
from ...packing.pickles import Space

if TYPE_CHECKING:
    from .walk import Known

UNKNOWN = "what a worker has, nobody knows"
"""Stands for what some ranks may have, and others not: it is sent again."""


class Remembered:
    """What is remembered of one object.

    Attributes:
        number, kind, path, space: as in ``Known``.
    """

    __slots__ = ("__weakref__", "_held", "_ref", "_remembered", "kind", "number", "path", "space")

    def __init__(self, number: int, obj: Any, kind: Kind, path: str, space: Space | None) -> None:
        self.number = number
        self.kind = kind
        self.path = path
        self.space = space
        self._held: Any = None
        self._remembered: dict[Any, Any] | None = None
        try:
            self._ref: weakref.ref[Any] | None = weakref.ref(obj)
        except TypeError:
            self._ref = None

    @property
    def is_weak(self) -> bool:
        """Whether it goes with its object, and holds none."""
        return self._ref is not None

    @property
    def obj(self) -> Any:
        """The object; None if it is gone, or not held."""
        return self._held if self._ref is None else self._ref()

    def hold(self, obj: Any) -> None:
        """Hold its object, a container that does not lead to what holds it."""
        self._held = obj

    def is_of(self, obj: Any) -> bool:
        """Whether it is of *obj*, and known what the workers have of it."""
        return self.obj is obj and self._remembered is not None

    def remember(self, contents: Contents | None, kept: Callable[[Any], Remembered | None]) -> None:
        """The workers have *contents* now; *kept* finds what is remembered of an object."""
        new = contents  # not in place of the old: what that refers to is found in it
        if contents is not None and not all(map(_is_flat, contents.values())):
            new = {key: _weak(value, kept) for key, value in contents.items()}
        self._remembered = new if all(map(_is_key, new or ())) else None

    def contents(
        self, now: Contents, kept: Callable[[Any], Remembered | None], has: Callable[[Any], bool]
    ) -> Contents:
        """What the workers have, where the object holds *now* what it does; UNKNOWN where nobody knows.

        *has* tells whether they have all objects that a value is made of.
        """
        found = {}
        for key, stands in (self._remembered or {}).items():
            same = key in now and _is_same(stands, now[key], kept, has)
            found[key] = now[key] if same else _made(stands, kept, has)
        return found


class _Parts(NamedTuple):
    """Stands for what never changes itself, such as a tuple: its type, what stands for its parts, each
    with its name, and for itself."""

    cls: type
    names: tuple[str, ...]
    parts: tuple[Any, ...]
    itself: Any


class _ById(NamedTuple):
    """Stands for what nobody can refer to weakly, and is in no place of its own."""

    ident: int


def _is_key(key: Any) -> bool:
    """Whether a key holds no object of the program's."""
    return is_plain(key) or key is WHOLE or key is ATTRIBUTES


def _is_flat(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(is_plain, value))
    return is_plain(value) or isinstance(value, Digest)


def _weak(value: Any, kept: Callable[[Any], Remembered | None]) -> Any:
    """What stands for a value, and does not hold it."""
    if _is_flat(value):
        return value
    if (found := kept(value)) is not None:
        return found
    try:
        itself: Any = weakref.ref(value)
    except TypeError:
        itself = _ById(id(value))
    parts = _parts_of(value)
    if parts is None:
        return itself
    names = tuple(name for name, _ in parts)
    return _Parts(type(value), names, tuple(_weak(part, kept) for _, part in parts), itself)


_EQUAL = {tuple, staticmethod, classmethod, property, functools.partial, types.MethodType}
"""Of these types one of the same parts is the same."""


def _parts_of(value: Any) -> list[tuple[str, Any]] | None:
    """The parts of what never changes itself, each with its name; None for what has none."""
    if type(value) is property:
        return [("get", value.fget), ("set", value.fset), ("del", value.fdel)]
    if kind_of(value) is not None:
        return None
    found = inside(value)
    return None if found is None else list(found)


def _is_same(
    stands: Any,
    value: Any,
    kept: Callable[[Any], Remembered | None],
    has: Callable[[Any], bool],
) -> bool:
    """Whether it *stands* for this value, which the workers have."""
    if isinstance(stands, _Parts):
        parts = _parts_of(value) if type(value) is stands.cls else None
        if parts is None or tuple(name for name, _ in parts) != stands.names:
            return False
        pairs = zip(stands.parts, parts, strict=True)
        same = stands.cls in _EQUAL or _is_same(stands.itself, value, kept, has)
        return same and all(_is_same(one, part, kept, has) for one, (_, part) in pairs)
    if isinstance(stands, Remembered):  # and not replaced by another one
        return stands.is_of(value) and kept(value) is stands
    if type(stands) is weakref.ReferenceType:
        return stands() is value and has(value)
    return stands.ident == id(value) if isinstance(stands, _ById) else alike(stands, value)


def _made(stands: Any, kept: Callable[[Any], Remembered | None], has: Callable[[Any], bool]) -> Any:
    """The value for which it *stands*, if the program still has what it is made of; else UNKNOWN."""
    if isinstance(stands, _Parts) and stands.cls is tuple:
        parts = tuple(_made(part, kept, has) for part in stands.parts)
        return UNKNOWN if any(part is UNKNOWN for part in parts) else parts
    value: Any = None
    itself = stands.itself if isinstance(stands, _Parts) else stands
    if isinstance(itself, Remembered):
        value = itself.obj
    elif type(itself) is weakref.ReferenceType:
        value = itself()
    elif not isinstance(itself, _ById):
        return stands
    there = value is not None and _is_same(stands, value, kept, has)
    return value if there else UNKNOWN


def in_cycles(knowns: Iterable[Known]) -> set[Known]:
    """Those that lead back to themselves (by Tarjan's algorithm for strongly connected components)."""
    found: set[Known] = set()
    places: dict[Known, int] = {}
    lowest: dict[Known, int] = {}
    above: list[Known] = []
    inside: set[Known] = set()
    for root in knowns:
        if root in places:
            continue
        todo: list[tuple[Known, Iterator[Known]]] = [(root, _inner(root))]
        places[root] = lowest[root] = len(places)
        above.append(root)
        inside.add(root)
        while todo:
            known, rest = todo[-1]
            for each in rest:
                if each not in places:
                    places[each] = lowest[each] = len(places)
                    above.append(each)
                    inside.add(each)
                    todo.append((each, _inner(each)))
                    break
                if each is known:
                    found.add(known)
                if each in inside:
                    lowest[known] = min(lowest[known], places[each])
            else:
                todo.pop()
                if todo:
                    lowest[todo[-1][0]] = min(lowest[todo[-1][0]], lowest[known])
                if lowest[known] == places[known]:
                    part = [above.pop()]
                    while part[-1] is not known:
                        part.append(above.pop())
                    inside.difference_update(part)
                    if len(part) > 1:
                        found.update(part)
    return found


def _inner(known: Known) -> Iterator[Known]:
    return chain.from_iterable(known.inner.values())
