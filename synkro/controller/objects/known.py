"""What the workers have of an object: ``Known``, as long as something here uses it.

``Remembered`` stays where no function uses the object, but the program still has it.  It goes with the
program's object, which it does not hold: what that holds is remembered by weak references.  Dicts,
lists, sets, and others that nobody can refer to weakly, it does hold: as long as what they were found in
is there, if they do not lead back to it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from ...packing import kinds
from ...packing.kinds import Contents, Kind, alike, is_plain, parts_of
from ...packing.pickles import Space

T = TypeVar("T")

UNKNOWN = "what a worker has, nobody knows"
"""Stands for what some ranks may have, and others not: it is sent again."""


class Remembered:
    """What is remembered of one object.

    Attributes:
        number, kind, path, space: as in ``Known``.
    """

    def __init__(
        self, number: int, obj: Any, kind: Kind, path: str, space: Space | None, kept: Kept
    ) -> None:
        """*kept* finds what is remembered of an object."""
        self.number = number
        self.kind = kind
        self.path = path
        self.space = space
        self._kept = kept
        self._held: Any = None
        self._remembered: dict[Any, Any] | None = None
        try:
            self._ref: weakref.ref[Any] | None = weakref.ref(obj)
        except TypeError:
            self._ref = None

    @property
    def is_weak(self) -> bool:
        """Whether what is remembered goes with its object, and holds none."""
        return self._ref is not None

    @property
    def obj(self) -> Any:
        """The object; None if it is gone, or not held."""
        return self._held if self._ref is None else self._ref()

    def hold(self, obj: Any) -> None:
        """Hold the object, a container that does not lead to what holds it."""
        self._held = obj

    def is_of(self, obj: Any) -> bool:
        """Whether the object is *obj*, and known what the workers have of it."""
        return self.obj is obj and self._remembered is not None

    def remember(self, contents: Contents | None) -> None:
        """The workers have *contents* now."""
        new = contents  # not in place of the old: what that refers to is found in it
        if contents is not None and not all(map(_is_flat, contents.values())):
            new = {key: _weak(value, self._kept) for key, value in contents.items()}
        named = all(is_plain(key) or key is kinds.WHOLE or key is kinds.ATTRIBUTES for key in new or ())
        self._remembered = new if named else None  # not where a key holds an object of the program's

    def contents(self, now: Contents, has: Has) -> Contents:
        """What the workers have, where the object holds *now* what it does; UNKNOWN where nobody knows.

        *has* tells whether they have all objects that a value is made of.
        """
        found = {}
        for key, stands in (self._remembered or {}).items():
            same = key in now and _is_same(stands, now[key], self._kept, has)
            found[key] = now[key] if same else _made(stands, self._kept, has)
        return found


class _Parts(NamedTuple):
    """Stands for what never changes itself, such as a tuple: its type, what stands for its parts, each
    with its name, and for itself."""

    cls: type
    names: tuple[str, ...]
    parts: tuple[Any, ...]
    itself: Any


Kept = Callable[[Any], Remembered | None]
"""Finds what is remembered of an object."""

Has = Callable[[Any], bool]
"""Whether the workers have all objects that a value is made of."""


class _ById(NamedTuple):
    """Stands for what nobody can refer to weakly, and is in no place of its own."""

    ident: int


def _is_flat(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(is_plain, value))
    return is_plain(value) or isinstance(value, kinds.Digest)


def _weak(value: Any, kept: Kept) -> Any:
    """What stands for a value, and does not hold it."""
    if _is_flat(value):
        return value
    if (found := kept(value)) is not None:
        return found
    try:
        itself: Any = weakref.ref(value)
    except TypeError:
        itself = _ById(id(value))
    parts = parts_of(value)
    if parts is None:
        return itself
    names = tuple(name for name, _ in parts)
    return _Parts(type(value), names, tuple(_weak(part, kept) for _, part in parts), itself)


_EQUAL = {tuple, *kinds.OF_PARTS}
"""Types of which an object with the same parts is the same."""


def _is_same(stands: Any, value: Any, kept: Kept, has: Has) -> bool:
    """Whether *stands* is for this *value*, which the workers have."""
    if isinstance(stands, _Parts):
        parts = parts_of(value) if type(value) is stands.cls else None
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


def _made(stands: Any, kept: Kept, has: Has) -> Any:
    """The value that *stands* is for, if the program still has what it is made of; else UNKNOWN."""
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
    return value if value is not None and _is_same(stands, value, kept, has) else UNKNOWN


@dataclass(eq=False)
class Known:
    """An object that the workers have.

    Attributes:
        number: its number.
        obj: the object.
        kind: its kind.
        path: what it is called in errors: a name, and the way from there.
        space: of a function the space of its globals, which lives as long, too.
        kept: what remembers this as long as the program has the object; None for a name.
        contents: what the workers took over of it last; None if nobody knows.
        inner: the objects in each entry, which live on the workers as long as this.
        copied: whether a submitted call has brought a copy of what it was then.
        sample: of a large array some of its elements, when all were looked at last.
    """

    number: int
    obj: Any
    kind: Kind
    path: str
    space: Space | None
    kept: Remembered | None = None
    contents: Contents | None = None
    inner: dict[Any, list[Known]] = field(default_factory=dict)
    copied: bool = False
    sample: bytes | None = None

    def has(self, contents: Contents) -> bool:
        """Whether the workers have these contents."""
        return self.contents is not None and kinds.same_contents(self.kind, self.contents, contents)

    def _remember(self, contents: Contents | None) -> None:
        self.contents = contents
        if self.kept is not None:
            self.kept.remember(contents)

    def assign(self, entries: Contents) -> None:
        """The workers have these entries now, and the others as they were."""
        self._remember({**(self.contents or {}), **entries})

    def was_copied(self, now: bool) -> bool:
        """Whether a submitted call has ever brought a copy, which it does *now*, or not."""
        self.copied |= now
        return self.copied

    def forget_contents(self) -> None:
        """Some workers may have been changed: nobody knows what they have."""
        self._remember(None)

    def agree(
        self, contents: Contents, inner: dict[Any, list[Known]], sample: bytes | None = None
    ) -> None:
        """The workers have *contents* now; *inner* are the objects in entries that were looked at."""
        self._remember(contents)
        self.sample = self.sample if sample is None else sample
        both = {**self.inner, **inner}
        self.inner = {
            k: held
            for k, held in both.items()
            if k in contents or self.kind is kinds.OPAQUE or type(k) is object
        }


Snapshot = list[tuple[Known, Contents, Any]]
"""What objects hold, or held at some moment; of arrays with a copy of the elements, or None."""


def inner_first(roots: Iterable[T], inner: Callable[[T], Iterable[T]], seen: set[T]) -> Iterator[T]:
    """The *roots* and all that they lead to, each after what it leads to, but for what was *seen*."""
    for root in roots:
        todo = [(root, iter((root,)))]
        while todo:
            one, rest = todo[-1]
            for each in rest:
                if each not in seen:
                    seen.add(each)
                    todo.append((each, iter(inner(each))))
                    break
            else:
                todo.pop()
                if todo:
                    yield one


def in_cycles(knowns: Iterable[Known]) -> set[Known]:
    """The *knowns* that lead back to themselves (by Kosaraju's algorithm for strongly connected
    components)."""
    ordered = list(inner_first(knowns, _inner, set()))
    outer: dict[Known, list[Known]] = {known: [] for known in ordered}
    for known in ordered:
        for each in _inner(known):
            outer[each].append(known)
    found: set[Known] = set()
    seen: set[Known] = set()
    for known in reversed(ordered):
        part = list(inner_first([known], outer.__getitem__, seen))
        if len(part) > 1 or known in outer[known]:
            found.update(part)
    return found


def _inner(known: Known) -> Iterator[Known]:
    return chain.from_iterable(known.inner.values())


def reached(
    roots: Iterable[Known], changed: Mapping[Known, Contents] = MappingProxyType({})
) -> set[Known]:
    """All objects that *roots* hold, and these; of what is *changed* only the entries that stay."""
    found = set(roots)
    stack = list(found)
    while stack:
        known = stack.pop()
        now, before = changed.get(known), known.contents or {}
        held = known.inner
        if now is not None:
            held = {k: v for k, v in held.items() if k not in before or alike(before[k], now.get(k))}
        inner = set(chain.from_iterable(held.values())) - found
        found |= inner
        stack += inner
    return found
