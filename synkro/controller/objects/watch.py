"""``Watch``: what a function's calls compare, to see what the program has changed since the last one.

Compared at each call, by identity: the values of all globals, defaults and cells of the function and of
the functions that came with it, and what they hold: dicts, lists, instances, small arrays, up to some
hundred entries.  What is more is looked at in call number 2, 4, 8 …
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, zip_longest
from operator import attrgetter, itemgetter
from types import CellType, ModuleType
from typing import Any

import numpy as np

from ...packing.code import is_own, is_own_name, uses
from ...packing.kinds import (
    ARRAY,
    CLASS,
    DICT,
    FIXED,
    FUNCTION,
    FUNCTION_PARTS,
    GENERATOR,
    INSTANCE,
    NAME,
    OPAQUE,
    SEQUENCE,
    STATEFUL,
    TENSOR,
    WHOLE,
    Contents,
    attributes_of,
    has_slots,
    is_plain,
    same_contents,
)
from .glances import (
    DELETED,
    GONE,
    Assigned,
    Glance,
    QuickLook,
    differing,
    elements,
    is_assigned,
    lengths,
)
from .walk import GLOBALS, Known, Look

_BUDGET = 400
"""What may be compared at each call, in units of some 25 ns: the entry of a list."""

_LONG = 5000
"""If a function uses more objects, all of them are looked at in its second call only."""

_NEVER = 1 << 62

_OFTEN = 10
"""After so many calls with nothing new it is worth while to make the comparison quicker."""

_MANY = 256
"""Containers with more entries are not compared at each call."""

_parts = attrgetter(*FUNCTION_PARTS)
_contents = attrgetter("cell_contents")
_version = attrgetter("_version", "requires_grad")


class Watch:
    """What the calls of one function compare.

    Attributes:
        partial: whether the function uses more than is compared at each call.
    """

    def __init__(self, roots: Sequence[Known], calls: int = 1) -> None:
        """*calls* is the number of calls of the function so far."""
        self._roots = roots
        self._calls = calls
        self._next_look = 2
        while self._next_look <= calls:
            self._next_look *= 2
        self._names: list[tuple[dict[str, Any], Callable[..., Any], list[Known]]] = []
        self._missing: list[tuple[dict[str, Any], set[str]]] = []
        self._functions: list[Known] = []
        self._dicts: list[Known] = []  # and instances, with their attributes
        self._sequences: list[Known] = []
        self._others: list[Known] = []
        self._arrays: list[Known] = []
        self._tensors: list[Known] = []
        self._last: list[Glance] = []
        self._expired: list[Glance] = []  # what it was before the next call was told to look closer
        self._quick: Callable[[], bool] | None = None
        self._unchanged = 0  # how often in a row
        self._fits = True
        self._blind = False  # whether of some objects nobody knows here what the workers have
        self._count = 0  # of objects
        self.partial = self._build()
        self._compare_with(list(self._places()))

    def same(self) -> bool:
        """Whether all is as the workers have it."""
        if self.partial:
            self._calls += 1
            if self._calls >= self._next_look:
                return False
        try:
            if self._quick is not None:
                return self._quick()
            if not all(glance.same() for glance in self._last):
                return False
            if any(not names.keys().isdisjoint(missing) for names, missing in self._missing):
                return False
        except DELETED:
            return False
        self._unchanged += 1
        if self._unchanged == _OFTEN:
            self._quick = QuickLook(self._last, self._missing).same
        return True

    def assigned(self) -> list[Assigned] | None:
        """The numbers and strings that are others than the workers have; None if there is more to it."""
        if self.due or (self._expired and not self._catch_up()):
            return None
        if any(not names.keys().isdisjoint(missing) for names, missing in self._missing):
            return None
        try:
            found = [one for glance in self._last for one in differing(glance)]
        except DELETED:
            return None
        return found if all(map(is_assigned, found)) else None

    def moved(self) -> bool:
        """Whether there may be other objects than before: more has changed than numbers and strings."""
        try:
            found = [one for glance in self._last for one in differing(glance)]
        except DELETED:
            return True
        flat = all(_is_flat(one.value) and _is_flat(one.glance.last[one.at]) for one in found)
        return not flat or any(not names.keys().isdisjoint(missing) for names, missing in self._missing)

    def _catch_up(self) -> bool:
        """After other functions have sent what they use: compare with what the workers have now.

        Returns False if it takes a closer look to know that.
        """
        if self._blind or not self.refresh():
            return False
        now = chain.from_iterable(known.kind.look(known.obj) for known in self._dicts)
        there = chain.from_iterable(known.contents or () for known in self._dicts)
        return all(one is other for one, other in zip_longest(now, there, fillvalue=GONE))

    @property
    def due(self) -> bool:
        """Whether it is time to look at all that the function uses."""
        return self.partial and self._calls >= self._next_look

    def after_look(self) -> Watch:
        """A watch of what the function uses now, after all of it was looked at."""
        last = self._count > _LONG  # looking takes long: it was done once
        return Watch(self._roots, _NEVER if last else max(self._calls, self._next_look))

    def again(self) -> Watch:
        """A watch of what the function uses now."""
        return Watch(self._roots, self._calls)

    def look(self) -> Look:
        """All that is compared, as it is now."""
        arrays = [(known, known.kind.look(known.obj), _copied(known)) for known in self._arrays]
        return [*self._looked_at(), *arrays, *self._looked_at_tensors()]

    def _looked_at_tensors(self) -> Iterator[tuple[Known, Contents, Any]]:
        """Those that have changed, or had when a call was submitted before."""
        changed = {known for known, _, _ in self._changed_arrays()}
        for known in self._tensors:
            known.copied |= known in changed
            if known.copied:
                yield known, known.kind.look(known.obj), _copied(known)

    def _looked_at(self) -> Iterator[tuple[Known, Contents, None]]:
        knowns = chain(self._named(), self._functions, self._dicts, self._sequences, self._others)
        return ((known, known.kind.look(known.obj), None) for known in knowns)

    def changed(self) -> Look:
        """What is not as the workers have it, of what is compared."""
        found: Look = [
            (known, contents, None)
            for known, contents, _ in self._looked_at()
            if known.contents is None or not same_contents(known.kind, known.contents, contents)
        ]
        return found + list(self._changed_arrays())

    def _changed_arrays(self) -> Iterator[tuple[Known, Contents, None]]:
        versions = zip(self._tensors, self._versions, strict=True)
        tensors = (known for known, last in versions if _version(known.obj) != last)
        for known in chain(self._arrays, tensors):
            contents = known.kind.look(known.obj)
            if contents != known.contents:
                yield known, contents, None

    def defined(self, changed: Look) -> list[Known]:
        """Functions of whose globals one is new, or another module of the user's."""
        modules = (c.get(WHOLE) for known, c, _ in changed if known.kind is NAME)
        if any(isinstance(module, ModuleType) and is_own(module) for module in modules):
            return list(self._functions)
        spaces = [id(names) for names, missing in self._missing if not names.keys().isdisjoint(missing)]
        return [known for known in self._functions if id(known.obj.__globals__) in spaces]

    def covers(self, known: Known) -> bool:
        """Whether an object is compared at each call."""
        kinds = (self._functions, self._dicts, self._sequences, self._others, self._arrays)
        return known.kind is NAME or any(known in some for some in (*kinds, self._tensors))

    def expire(self) -> None:
        """The next call is to look closer."""
        self._expired = self._expired or self._last
        self._compare_with([Glance(iter, (None,), [GONE])])

    def refresh(self) -> bool:
        """Compare from now on with what the workers have now, at the same places.

        Returns False if objects are in other places than before: another watch has to be built.
        """
        places = list(self._places())
        before = [value for place in self._expired or self._last for value in place.last]
        now = [value for place in places for value in place.last]
        self._expired = []
        self._compare_with(places)
        self._fits &= len(before) == len(now) and all(
            one is other or (_is_flat(one) and _is_flat(other))
            for one, other in zip(before, now, strict=True)
        )
        return self._fits

    def _compare_with(self, glances: list[Glance]) -> None:
        self._last, self._quick, self._unchanged = glances, None, 0

    # ── built ────────────────────────────────────────────────────────────────────────────────────

    def _named(self) -> Iterator[Known]:
        return chain.from_iterable(knowns for _, _, knowns in self._names)

    def _build(self) -> bool:
        """Sort what the function uses; returns whether there is more than is compared."""
        by_space: dict[int, tuple[dict[str, Any], list[Known]]] = {}
        missing: dict[int, tuple[dict[str, Any], set[str]]] = {}
        chosen: tuple[list[tuple[int, Known]], ...] = ([], [], [], [])
        for known, foreign in self._reached():
            self._count += 1
            obj = known.obj
            if known.kind is NAME:
                by_space.setdefault(id(obj.names), (obj.names, []))[1].append(known)
            elif known.kind is FUNCTION:
                self._functions.append(known)
                if GLOBALS in known.inner:  # else it is of an installed module
                    names = {n for n in uses(obj.__code__).names if n not in obj.__globals__}
                    missing.setdefault(id(obj.__globals__), (obj.__globals__, set()))[1].update(names)
            elif known.kind not in (FIXED, GENERATOR):
                cost = _cost(known)
                chosen[_rank(known, foreign, cost)].append((cost, known))
        left, more = _BUDGET, bool(chosen[3])
        for cost, known in chain(*chosen[:3]):
            if cost > left:
                more = True
                continue
            left -= cost
            self._list_for(known).append(known)
            if known.kind is INSTANCE and _dict_of(known) is not None and has_slots(known.obj):
                self._others.append(known)  # for what is in its slots
        more |= bool(self._tensors)  # whose elements can change without a new version
        for namespace, knowns in by_space.values():
            keys = [known.obj.name for known in knowns]
            self._names.append((namespace, itemgetter(*keys, keys[0]), knowns))
        self._missing = [entry for entry in missing.values() if entry[1]]
        kinds = {known.kind for known in chain(self._dicts, self._others, self._tensors)}
        self._blind = not kinds.isdisjoint((STATEFUL, OPAQUE, TENSOR))
        return more

    def _list_for(self, known: Known) -> list[Known]:
        if known.kind is SEQUENCE:
            return self._sequences
        if known.kind is ARRAY:
            return self._arrays
        if known.kind is TENSOR:
            return self._tensors
        ordered = isinstance(known.obj, OrderedDict)  # in an order that dict.values does not see
        return self._others if ordered or _dict_of(known) is None else self._dicts

    def _reached(self) -> Iterator[tuple[Known, bool]]:
        """All objects, those first that fewest others lie in front of, and whether one of these is of an
        installed package."""
        seen = set(map(id, self._roots))
        level = [(known, False) for known in self._roots]
        while level:
            following = []
            for known, foreign in level:
                yield known, foreign
                inside = foreign or (
                    known.kind in (INSTANCE, STATEFUL, OPAQUE)
                    and not is_own_name(type(known.obj).__module__)
                )
                for inner in chain.from_iterable(known.inner.values()):
                    if id(inner) not in seen:
                        seen.add(id(inner))
                        following.append((inner, inside))
            level = following

    def _places(self) -> Iterator[Glance]:
        for names, look, knowns in self._names:
            yield _glance(look, names, [(known, WHOLE) for known in [*knowns, knowns[0]]])
        functions = [known.obj for known in self._functions]
        if len(functions) == 1:  # most often, and in half the time
            yield _glance(_parts, functions[0], [(self._functions[0], p) for p in FUNCTION_PARTS])
        elif functions:
            places = [(known, part) for known in self._functions for part in FUNCTION_PARTS]
            yield _glance(lambda fns: chain.from_iterable(map(_parts, fns)), functions, places)
        described = [known for known in self._functions if vars(known.obj)]
        if described:
            places = [(known, name) for known in described for name in vars(known.obj)]
            dicts = [vars(known.obj) for known in described]
            yield Glance(lengths, dicts, [len(each) for each in dicts])
            yield _glance(lambda given: chain.from_iterable(map(dict.values, given)), dicts, places)
        yield from self._cells()
        if self._dicts:
            dicts = [_dict_of(known) for known in self._dicts]
            entries = [_entries(known) for known in self._dicts]
            yield Glance(lengths, dicts, [len(each) for each in entries])
            yield Glance(elements, dicts, [key for each in entries for key, _ in each])
            last = [value for each in entries for _, value in each]
            pairs = zip(self._dicts, entries, strict=True)
            places = [(known, key) for known, each in pairs for key, _ in each]
            yield Glance(lambda given: chain.from_iterable(map(dict.values, given)), dicts, last, places)
        if self._sequences:
            sequences = [known.obj for known in self._sequences]
            held = [tuple(_entry(known, WHOLE, ())) for known in self._sequences]
            yield Glance(lengths, sequences, [len(each) for each in held])
            yield Glance(elements, sequences, [value for each in held for value in each])
        for known in self._others:
            keys = list(known.contents or ())
            if known.kind is DICT:
                last = [*keys, *(known.contents or {}).values(), GONE]
                yield Glance(lambda given: chain(given, given.values(), (GONE,)), known.obj, last)
            elif keys:
                look = itemgetter(*keys, keys[0]) if known.kind is CLASS else attrgetter(*keys, keys[0])
                holder = vars(known.obj) if known.kind is CLASS else known.obj
                yield _glance(look, holder, [(known, key) for key in (*keys, keys[0])])
        if self._arrays:
            arrays = [known.obj for known in self._arrays]
            bits = [
                known.obj.tobytes() if known.contents == known.kind.look(known.obj) else None
                for known in self._arrays
            ]
            yield Glance(lambda given: ([*map(np.ndarray.tobytes, given)] == bits,), arrays, [True])
        self._versions = [_version(known.obj) for known in self._tensors]
        if self._tensors:
            tensors = [known.obj for known in self._tensors]
            versions = self._versions
            yield Glance(lambda given: ([*map(_version, given)] == versions,), tensors, [True])

    def _cells(self) -> Iterator[Glance]:
        cells: list[CellType] = []
        contents: list[tuple[Known, int]] = []
        for known in self._functions:
            for index, cell in enumerate(known.obj.__closure__ or ()):
                if known.contents and index not in known.contents:  # it was empty
                    yield Glance(_count_filled, cell, [0])
                    continue
                cells.append(cell)
                contents.append((known, index))
        if cells:
            yield _glance(lambda given: map(_contents, given), cells, contents)


def _glance(
    look: Callable[[Any], Iterable[Any]], holder: Any, places: Sequence[tuple[Known, Any]]
) -> Glance:
    return Glance(look, holder, [_entry(known, key) for known, key in places], places)


def _dict_of(known: Known) -> dict[Any, Any] | None:
    """The dict whose entries are compared: the object itself, or its attributes."""
    if known.kind is DICT:
        return known.obj  # type: ignore[no-any-return]
    return attributes_of(known.obj) if known.kind in (INSTANCE, STATEFUL, OPAQUE) else None


def _entries(known: Known) -> list[tuple[Any, Any]]:
    """The entries of ``_dict_of``, as the workers have them; where that is not known, as they are."""
    found = _dict_of(known) or {}
    if known.kind in (STATEFUL, OPAQUE):
        return list(found.items())
    return [(key, _entry(known, key)) for key in found]


def _cost(known: Known) -> int:
    """What it costs to compare an object at each call; 0: it cannot be done."""
    if known.kind is ARRAY:
        return 8 + int(known.obj.nbytes) // 256
    if known.kind is TENSOR:
        return 8
    if known.kind is SEQUENCE:
        return 4 + len(known.obj) if len(known.obj) <= _MANY else 0
    found = _dict_of(known)
    if found is None:
        return 14 + len(known.contents or ()) if known.kind in (CLASS, INSTANCE) else 0
    return 5 + 2 * len(found) if len(found) <= _MANY else 0


def _rank(known: Known, foreign: bool, cost: int) -> int:
    """Whether an object is compared first (0), where there is room (1, 2), or not at each call (3).

    Objects inside of those of installed packages come later, those last that hold no numbers.
    """
    if not cost or (known.kind is OPAQUE and not _dict_of(known)):
        return 3
    if not foreign:
        return 0
    if known.kind in (TENSOR, ARRAY):
        return 1
    held = (known.contents or {}).values()
    return 1 if any(is_plain(value) and value is not None for value in held) else 2


def _copied(known: Known) -> Any:
    """A copy of an array or a tensor."""
    return known.obj.copy() if known.kind is ARRAY else known.obj.detach().clone()


def _is_flat(value: Any) -> bool:
    return is_plain(value) or (isinstance(value, tuple) and all(map(is_plain, value)))


def _entry(known: Known, key: Any, otherwise: Any = GONE) -> Any:
    """What the workers have as an entry."""
    return otherwise if known.contents is None else known.contents.get(key, otherwise)


def _count_filled(cell: CellType) -> Iterator[int]:
    try:
        return iter([len([cell.cell_contents])])
    except ValueError:
        return iter([0])
