"""``Watch``: what a function's calls compare, to see what the program has changed since the last one.

Compared by identity, in a microsecond: the values of all globals, defaults and cells of the function and
of the functions that came with it, the entries of small dicts, lists and instances, and small arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CellType
from typing import Any

from ...packing.code import uses
from ...packing.kinds import (
    ARRAY,
    CLASS,
    DICT,
    FUNCTION,
    FUNCTION_PARTS,
    INSTANCE,
    NAME,
    SEQUENCE,
    STATEFUL,
    WHOLE,
    Contents,
    is_plain,
)
from .walk import GLOBALS, Known

_BUDGET = 80
"""What may be compared of dicts, lists, instances and arrays: an entry, or 128 bytes, counts 1, each
object 14 more.  80 take about 2 us."""

_parts = attrgetter(*FUNCTION_PARTS)
_contents = attrgetter("cell_contents")

_MANY = 24
"""Of objects with more entries, only numbers, strings and the like are compared."""

_NEAR = 2
"""Objects that a name or a cell holds are so near, and are compared even if they hold other objects."""

Look = list[tuple[Known, Contents]]
"""What is compared, as it was at some moment."""

Place = tuple[Callable[[Any], Any], Any, int, Sequence[Any]]
"""How to look, where, how many entries there are (-1: it does not matter), and what was there."""

_GONE = object()


class Watch:
    """What the calls of one function compare.

    Attributes:
        due: whether the next call is to look at all that the function uses, once.
    """

    def __init__(self, roots: Sequence[Known], due: bool) -> None:
        self.due = due
        self._roots = roots
        self._names: list[tuple[dict[str, Any], Callable[..., Any], list[Known]]] = []
        self._missing: list[tuple[dict[str, Any], set[str]]] = []
        self._functions: list[Known] = []
        self._small: list[Known] = []
        self._last: list[Place] = []
        self._build()

    def same(self) -> bool:
        """Whether all is as the workers have it."""
        try:
            for look, holder, length, last in self._last:
                if length >= 0 and len(holder) != length:
                    return False
                if not all(map(is_, look(holder), last)):
                    return False
            for names, missing in self._missing:
                if not names.keys().isdisjoint(missing):
                    return False
        except (KeyError, ValueError, AttributeError):  # something was deleted
            return False
        return True

    def look(self, arrays: bool = True) -> Look:
        """All that is compared, with or without *arrays*, as it is now."""
        found = (known for known in self.watched() if arrays or known.kind is not ARRAY)
        return [(known, known.kind.look(known.obj)) for known in found]

    def defined(self) -> bool:
        """Whether a global was defined that the code of a function names, and that was not there."""
        return any(not names.keys().isdisjoint(missing) for names, missing in self._missing)

    def watched(self) -> Iterator[Known]:
        """All that is compared."""
        yield from chain.from_iterable(knowns for _, _, knowns in self._names)
        yield from self._functions
        yield from self._small

    # ── built ────────────────────────────────────────────────────────────────────────────────────

    def _build(self) -> None:
        by_space: dict[int, tuple[dict[str, Any], list[Known]]] = {}
        missing: dict[int, tuple[dict[str, Any], set[str]]] = {}
        left = _BUDGET
        for known, depth in self._reached():
            obj = known.obj
            if known.kind is NAME:
                by_space.setdefault(id(obj.names), (obj.names, []))[1].append(known)
            elif known.kind is FUNCTION:
                self._functions.append(known)
                if GLOBALS not in known.inner:  # of an installed module
                    continue
                names = {n for n in uses(obj.__code__).names if n not in obj.__globals__}
                missing.setdefault(id(obj.__globals__), (obj.__globals__, set()))[1].update(names)
            else:
                cost = _cost(known, depth)
                if cost and cost <= left:
                    left -= cost
                    self._small.append(known)
        for namespace, knowns in by_space.values():
            keys = [known.obj.name for known in knowns]
            self._names.append((namespace, itemgetter(*keys, keys[0]), knowns))
        self._missing = [entry for entry in missing.values() if entry[1]]
        if self.due:
            self.expire()
        else:
            self.refresh()

    def _reached(self) -> Iterator[tuple[Known, int]]:
        """All objects, those first that fewest others lie in front of, and how many these are."""
        seen = set(map(id, self._roots))
        level, depth = list(self._roots), 0
        while level:
            following = []
            for known in level:
                yield known, depth
                for inner in chain.from_iterable(known.inner.values()):
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        following.append(inner)
            level, depth = following, depth + 1

    def refresh(self) -> bool:
        """Compare from now on with what the workers have now, at the same places.

        Returns False if objects are in other places than before: another watch has to be built.
        """
        places = list(self._places())
        before = [value for place in self._last for value in place[-1]]
        now = [value for place in places for value in place[-1]]
        self._last = places
        return len(before) == len(now) and all(
            one is other or (is_plain(one) and is_plain(other))
            for one, other in zip(before, now, strict=True)
        )

    def expire(self) -> None:
        """The next call is to look closer."""
        self._last = [(iter, (), 1, ())]

    def _places(self) -> Iterator[Place]:
        for names, look, knowns in self._names:
            values = [_entry(known, WHOLE) for known in knowns]
            yield look, names, -1, [*values, values[0]]
        functions = [known.obj for known in self._functions]
        if functions:
            yield (
                lambda fns: chain.from_iterable(map(_parts, fns)),
                functions,
                -1,
                [_entry(known, part) for known in self._functions for part in FUNCTION_PARTS],
            )
        cells: list[CellType] = []
        contents: list[Any] = []
        for known in self._functions:
            for index, cell in enumerate(known.obj.__closure__ or ()):
                if known.contents and index not in known.contents:  # it was empty, and is, perhaps
                    yield _count_filled, [cell], -1, [0]
                    continue
                cells.append(cell)
                contents.append(_entry(known, index))
        if cells:
            yield lambda given: map(_contents, given), cells, -1, contents
        for known in self._small:
            yield from _small_place(known)


def _small_place(known: Known) -> Iterator[Place]:
    obj = known.obj
    if known.kind is ARRAY:
        there = obj.tobytes() if known.contents == known.kind.look(obj) else None
        yield lambda array: (array.tobytes() == there,), obj, -1, [True]
        return
    if known.kind is SEQUENCE:
        values = _entry(known, WHOLE)
        yield iter, obj, len(obj), values if isinstance(values, tuple) else [_GONE]
        return
    keys = _keys(known)
    if known.kind is DICT:
        holder: Any = obj
    elif hasattr(obj, "__dict__"):
        holder = vars(obj)
    else:
        yield attrgetter(*keys, keys[0]), obj, -1, [_entry(known, key) for key in (*keys, keys[0])]
        return
    length = -1 if known.kind is CLASS or len(holder) > _MANY else len(holder)
    if known.kind is STATEFUL:
        values = [holder.get(key, _GONE) for key in (*keys, keys[0])] if keys else []
    else:
        values = [_entry(known, key) for key in (*keys, keys[0])] if keys else []
    yield (itemgetter(*keys, keys[0]) if keys else _nothing), holder, length, values


def _keys(known: Known) -> list[Any]:
    """The entries of a small object that are compared."""
    if known.kind is STATEFUL:
        entries = dict(getattr(known.obj, "__dict__", ()))
    else:
        entries = known.contents or {}
    if len(entries) <= _MANY and known.kind is not CLASS:
        return list(entries)
    return [key for key, value in entries.items() if is_plain(value)]


def _cost(known: Known, depth: int) -> int:
    """What it costs to compare an object, of the budget; 0: it is not to be compared."""
    if known.kind is ARRAY:
        return 14 + int(known.obj.nbytes) // 128
    if known.kind is SEQUENCE:
        held = (known.contents or {}).get(WHOLE, ())
        return 14 + len(held) if depth <= _NEAR or any(map(is_plain, held)) else 0
    if known.kind not in (DICT, INSTANCE, STATEFUL, CLASS):
        return 0
    keys = _keys(known)
    entries = known.contents or {}
    if known.kind is STATEFUL and not hasattr(known.obj, "__dict__"):
        return 0
    plain = any(is_plain(entries.get(key, _GONE)) for key in keys)
    if known.kind is CLASS or (depth > _NEAR and not plain):
        return 14 + len(keys) if plain else 0
    return 14 + len(keys) if keys or known.kind is DICT else 0


def _entry(known: Known, key: Any) -> Any:
    """What the workers have as an entry."""
    return _GONE if known.contents is None else known.contents.get(key, _GONE)


def _count_filled(cells: Sequence[CellType]) -> Iterator[int]:
    try:
        return iter([len([cells[0].cell_contents])])
    except ValueError:
        return iter([0])


def _nothing(holder: Any) -> Sequence[Any]:
    return ()
