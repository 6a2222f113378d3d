"""``Comparison``: the objects that a function's calls compare, and how each is looked at.

Entries of many objects are compared in one go, as an ``EntryGroup``; after some calls, by code that is
made for them.
"""

from __future__ import annotations

import builtins
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import attrgetter, is_, itemgetter
from types import CellType, CodeType, FunctionType
from typing import Any, Final, NamedTuple

import numpy as np

from ...packing import kinds
from ...packing.kinds import WHOLE, Contents, Digest, Kind, attributes_of, is_plain, is_scalar, slots_of
from ...values.foreign import is_table
from .known import Known, Snapshot

GONE = object()
"""Stands for an entry where there is none."""

DELETED = (KeyError, ValueError, AttributeError, RuntimeError)
"""What looking raises where something was deleted."""

_SHORT = 40  # of more entries a loop in C is as quick as code for each

_MANY = 256
"""Containers with more entries are not compared at each call."""

_TABLE_BYTES = 1 << 16
"""Larger tables are not compared at each call: pickle takes about 50 us for a small one."""

_parts = attrgetter(*kinds.FUNCTION_PARTS)
_contents = attrgetter("cell_contents")
_form = attrgetter("shape", "dtype")
_version = attrgetter("_version", "requires_grad")
_PARTS_OF_VERSION = attrgetter("_version"), attrgetter("requires_grad")  # quicker one by one


class EntryGroup(NamedTuple):
    """Things that are compared in one go: how to look at *holder*, and what was there.

    *places* says of what objects they are entries, where they are.
    """

    look: Callable[[Any], Iterable[Any]]
    holder: Any
    last: list[Any]
    places: Sequence[tuple[Known, Any]] = ()

    def same(self) -> bool:
        """Whether all is as it was; there may be more."""
        return all(map(is_, self.look(self.holder), self.last))


class Scalars(EntryGroup):
    """Numbers and strings of many things: equal ones count as the same, which takes half the time."""

    def same(self) -> bool:
        return [*self.look(self.holder)] == self.last


class Assigned(NamedTuple):
    """An entry to which the program has assigned another number or string."""

    group: EntryGroup
    at: int
    value: Any

    @property
    def place(self) -> tuple[Known, Any]:
        """The object, and the key of the entry."""
        return self.group.places[self.at]


def differing(group: EntryGroup) -> Iterator[Assigned]:
    """What is not as it was.  Raises: ValueError for another number of things."""
    for at, (value, last) in enumerate(zip(group.look(group.holder), group.last, strict=True)):
        if value is not last:
            yield Assigned(group, at, value)


def is_assigned(one: Assigned) -> bool:
    """Whether an entry is a number or a string, as it was before, which can be changed by itself."""
    if not one.group.places:
        return False
    known, key = one.place
    named = key is WHOLE or type(key) in (str, int)  # else it is a key that holds objects, or NaN
    if known.kind in (kinds.STATEFUL, kinds.OPAQUE) or not named:
        return False
    return is_scalar(one.value) and is_scalar(one.group.last[one.at])


lengths: Callable[[Any], Iterable[Any]] = partial(map, len)
"""How many entries each has."""


elements: Callable[[Any], Iterable[Any]] = chain.from_iterable
"""The elements of sequences, and the keys of dicts."""


class CompiledComparison:
    """All groups at once, as code of their own: ``model["rate"] is last[2] and …``.

    This takes a fifth of the time, but a tenth of a millisecond to make.
    """

    def __init__(self, groups: Sequence[EntryGroup], missing: Iterable[tuple[dict[str, Any], set[str]]]):
        self._names: dict[str, Any] = {}
        tests = [test for group in groups for test in self._tests(group)]
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

    def _tests(self, group: EntryGroup) -> Iterator[str]:
        last = self._name(group.last)
        short = len(group.last) <= _SHORT
        ways = [self._way(known, key) for known, key in group.places] if short else [None]
        if group.places and None not in ways:
            yield from (f"{way} is {last}[{at}]" for at, way in enumerate(ways))
        elif short and group.look is lengths:
            yield from (
                f"len({self._name(one)}) == {length}"
                for one, length in zip(group.holder, group.last, strict=True)
            )
        elif short and group.look is elements and len(group.holder) == 1:
            yield f"all(map({self._name(is_)}, {self._name(group.holder[0])}, {last}))"
        else:
            yield f"{self._name(group.same)}()"

    def _way(self, known: Known, key: Any) -> str | None:
        """The expression for an entry; None if there is no simple one."""
        obj = known.obj
        if known.kind is kinds.NAME:
            return f"{self._name(obj.names)}[{obj.name!r}]"
        if known.kind is kinds.FUNCTION and type(key) is int:
            return f"{self._name(obj.__closure__[key])}.cell_contents"
        if known.kind is kinds.FUNCTION and key in kinds.FUNCTION_PARTS:
            return f"{self._name(obj)}.{key}"
        if key == kinds.CLASS_OF and known.kind is kinds.INSTANCE:
            return f"type({self._name(obj)})"
        held = _dict_of(known) if known.kind in (kinds.DICT, kinds.INSTANCE) else None
        return f"{self._name(held)}[{key!r}]" if type(held) is dict and type(key) is str else None


_APART = (kinds.FUNCTION, kinds.SEQUENCE, kinds.CLASS, kinds.CONTEXT, kinds.ARRAY, kinds.TENSOR)
"""Kinds of which all objects are compared in one way."""


class Comparison:
    """The objects that a function's calls compare.

    Attributes:
        functions: those of the program's.
        dicts: and instances, with their attributes: of these, entries are compared one by one.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[dict[str, Any], list[Known]]] = {}
        self._of: dict[Kind, list[Known]] = {kind: [] for kind in _APART}
        self.functions: Final = self._of[kinds.FUNCTION]
        self._tensors = self._of[kinds.TENSOR]
        self.dicts: list[Known] = []
        self._ordered: list[Known] = []
        self._slotted: list[Known] = []
        self._wholes: list[Known] = []  # arrays of classes of their own, and small tables
        self._scalars: dict[Known, tuple[Any, ...]] = {}  # with the keys of numbers and strings

    def add_scalars(self, known: Known) -> None:
        """Compare the numbers and strings among an object's attributes, too, and how many attributes it
        has."""
        held = _dict_of(known) or {}
        plain = (key for key, value in _entries(known) if type(key) is str and is_scalar(value))
        self._scalars[known] = tuple(key for key in plain if key in held)

    def add(self, known: Known) -> None:
        """Compare an object, too."""
        obj = known.obj
        if known.kind is kinds.NAME:
            self._names.setdefault(id(obj.names), (obj.names, []))[1].append(known)
            return
        if known.kind in self._of:
            self._of[known.kind].append(known)
        elif known.kind is kinds.DICT and isinstance(obj, OrderedDict):  # dict.values sees no order
            self._ordered.append(known)
        elif _dict_of(known) is not None:
            self.dicts.append(known)
        if known.kind is kinds.INSTANCE and slots_of(obj):
            self._slotted.append(known)
        if (known.kind is kinds.OPAQUE and isinstance(obj, np.ndarray)) or is_small_table(known):
            self._wholes.append(known)

    @property
    def is_partly_unknown(self) -> bool:
        """Whether nobody knows here of some objects what the workers have."""
        found = {known.kind for known in chain(self.dicts, self._wholes, self._tensors)}
        return not found.isdisjoint((kinds.STATEFUL, kinds.OPAQUE, kinds.TENSOR))

    def covers(self, known: Known) -> bool:
        """Whether an object is compared at each call, with all that it holds."""
        if known.kind is kinds.OPAQUE:
            return known in self._wholes
        lists = (*self._of.values(), self.dicts, self._ordered, self._slotted)
        return known.kind is kinds.NAME or any(known in some for some in lists)

    def notices(self, known: Known, changed: Container[Any]) -> bool:
        """Whether the next call would see that an object has *changed* in these entries: a tensor by its
        version alone."""
        if known.kind is kinds.TENSOR and known in self._tensors:
            return bool(_version(known.obj) != self._versions[self._tensors.index(known)])
        if known in self._scalars and any(key in changed for key in self._scalars[known]):
            return True
        return self.covers(known)

    # ── all that they hold ───────────────────────────────────────────────────────────────────────

    def look(self) -> Snapshot:
        """What the objects hold now."""
        arrays = [(known, known.kind.look(known.obj), _copied(known)) for known in self._of[kinds.ARRAY]]
        return [*self._looked_at(), *arrays, *self._looked_at_tensors()]

    def changed(self) -> Snapshot:
        """What is not as the workers have it."""
        found: Snapshot = []
        for known, contents, _ in self._looked_at():
            if known.has(contents):
                known.assign(contents)  # equal, but perhaps other objects
            else:
                found.append((known, contents, None))
        return found + list(self._changed_arrays())

    def _changed_scalars(self) -> Iterator[Known]:
        """The objects of which a number or string is another one, or that have more or fewer
        attributes."""
        for known, keys in self._scalars.items():
            held, there = _dict_of(known) or {}, known.contents or {}
            as_many = len(held) == len(_entries(known))
            if not (as_many and all(held.get(key, GONE) is there.get(key) for key in keys)):
                yield known

    def _looked_at(self) -> Iterator[tuple[Known, Contents, None]]:
        named = chain.from_iterable(knowns for _, knowns in self._names.values())
        of = self._of
        lists = (self.functions, self.dicts, of[kinds.SEQUENCE], self._ordered, of[kinds.CLASS])
        others = (of[kinds.CONTEXT], self._slotted, self._wholes, self._changed_scalars())
        knowns = dict.fromkeys(chain(named, *lists, *others))
        return ((known, known.kind.look(known.obj), None) for known in knowns)

    def _looked_at_tensors(self) -> Iterator[tuple[Known, Contents, Any]]:
        """The tensors that have changed, or had when a call was submitted before."""
        changed = {known for known, _, _ in self._changed_arrays()}
        for known in self._tensors:
            if known.was_copied(known in changed):
                yield known, known.kind.look(known.obj), _copied(known)

    def _changed_arrays(self) -> Iterator[tuple[Known, Contents, None]]:
        versions = zip(self._tensors, self._versions, strict=True)
        tensors = (known for known, last in versions if _version(known.obj) != last)
        for known in chain(self._of[kinds.ARRAY], tensors):
            contents = known.kind.look(known.obj)
            if contents != known.contents:
                yield known, contents, None

    # ── in one go ──────────────────────────────────────────────────────────────────────────────

    def groups(self) -> list[EntryGroup]:
        """How to compare the objects with what the workers have."""
        groups = (self._of_names(), self._of_functions(), self._of_instances(), self._of_containers())
        return [*chain(*groups, self._of_scalars(), self._of_classes(), self._of_arrays())]

    def _of_names(self) -> Iterator[EntryGroup]:
        for names, knowns in self._names.values():
            keys = [known.obj.name for known in knowns]
            places = [(known, WHOLE) for known in (*knowns, knowns[0])]
            yield _group(itemgetter(*keys, keys[0]), names, places)

    def _of_functions(self) -> Iterator[EntryGroup]:
        functions = [known.obj for known in self.functions]
        if len(functions) == 1:  # most often, and in half the time
            yield _group(_parts, functions[0], [(self.functions[0], p) for p in kinds.FUNCTION_PARTS])
        elif functions:
            places = [(known, part) for known in self.functions for part in kinds.FUNCTION_PARTS]
            yield _group(lambda fns: chain.from_iterable(map(_parts, fns)), functions, places)
        dicts = [vars(function) for function in functions]
        if dicts:
            yield EntryGroup(lengths, dicts, [len(each) for each in dicts])
        places = [(known, name) for known in self.functions for name in vars(known.obj)]
        if places:
            yield EntryGroup(elements, dicts, [name for _, name in places])
            yield _group(_values, dicts, places)
        yield from self._of_cells()

    def _of_cells(self) -> Iterator[EntryGroup]:
        cells: list[CellType] = []
        places: list[tuple[Known, int]] = []
        for known in self.functions:
            for index, cell in enumerate(known.obj.__closure__ or ()):
                if known.contents and index not in known.contents:  # it was empty
                    yield EntryGroup(_is_empty, cell, [True])
                    continue
                cells.append(cell)
                places.append((known, index))
        if cells:
            yield _group(partial(map, _contents), cells, places)

    def _of_instances(self) -> Iterator[EntryGroup]:
        instances = [known for known in (*self.dicts, *self._slotted) if known.kind is kinds.INSTANCE]
        instances = list(dict.fromkeys(instances))
        if instances:
            objects = [known.obj for known in instances]
            yield _group(partial(map, type), objects, [(known, kinds.CLASS_OF) for known in instances])
            yield EntryGroup(
                partial(map, attributes_of), objects, [attributes_of(obj) for obj in objects]
            )
        for known in self._slotted:
            names = slots_of(known.obj)
            yield _group(_slots_looker(names), known.obj, [(known, name) for name in names])

    def _of_containers(self) -> Iterator[EntryGroup]:
        """How to compare containers, and the attributes of instances."""
        if self.dicts:
            dicts = [_dict_of(known) for known in self.dicts]
            held = [_entries(known) for known in self.dicts]
            pairs = zip(self.dicts, held, strict=True)
            places = [(known, key) for known, each in pairs for key, _ in each]
            yield EntryGroup(lengths, dicts, [len(each) for each in held])
            yield EntryGroup(elements, dicts, [key for each in held for key, _ in each])
            yield EntryGroup(_values, dicts, [value for each in held for _, value in each], places)
        if knowns := self._of[kinds.SEQUENCE]:
            sequences = [known.obj for known in knowns]
            values = [tuple(_entry(known, WHOLE, ())) for known in knowns]
            yield EntryGroup(lengths, sequences, [len(each) for each in values])
            yield EntryGroup(elements, sequences, [value for each in values for value in each])
        for known in self._ordered:
            entries = {k: v for k, v in (known.contents or {}).items() if k is not kinds.ATTRIBUTES}
            yield EntryGroup(_items, known.obj, [*entries, *entries.values(), GONE])
        for known in (*self.dicts, *self._of[kinds.SEQUENCE], *self._ordered):
            own = attributes_of(known.obj)
            if known.kind in (kinds.DICT, kinds.SEQUENCE) and own is not None and own is not known.obj:
                given = dict(_entry(known, kinds.ATTRIBUTES, ()))
                yield EntryGroup(_items, own, [*given, *given.values(), GONE])

    def _of_scalars(self) -> Iterator[EntryGroup]:
        groups: dict[tuple[Any, ...], list[Known]] = {}
        for known, keys in self._scalars.items():
            groups.setdefault(keys, []).append(known)
        for keys, knowns in groups.items():
            dicts = [_dict_of(known) for known in knowns]
            yield EntryGroup(lengths, dicts, [len(_entries(known)) for known in knowns])
            if keys:
                twice = (*keys, keys[0])  # as itemgetter of one key makes no tuple
                places = [(known, key) for known in knowns for key in twice]
                yield Scalars(_scalars_of(twice), dicts, [_entry(*place) for place in places], places)

    def _of_classes(self) -> Iterator[EntryGroup]:
        for known in self._of[kinds.CLASS]:
            own, keys = vars(known.obj), list(known.contents or ())
            yield EntryGroup(lengths, [own], [len(own)] if _is_agreed(known) else [GONE])
            if keys:
                yield _group(itemgetter(*keys, keys[0]), own, [(known, k) for k in (*keys, keys[0])])

        for known in self._of[kinds.CONTEXT]:
            yield EntryGroup(_value_of, known.obj, [_entry(known, WHOLE)], [(known, WHOLE)])

    def _of_arrays(self) -> Iterator[EntryGroup]:
        if not all(map(_is_agreed, self._wholes)):
            yield EntryGroup(iter, (None,), [GONE])
        elif self._wholes:
            wholes = [known.obj for known in self._wholes]
            yield _equals(_bits, wholes, [*map(_bits, wholes)])
        if knowns := self._of[kinds.ARRAY]:
            arrays = [known.obj for known in knowns]
            bits = [known.obj.tobytes() if _is_agreed(known) else None for known in knowns]
            yield _equals(np.ndarray.tobytes, arrays, bits)
            yield _equals(_form, arrays, [*map(_form, arrays)])
        self._versions = [_version(known.obj) for known in self._tensors]
        if self._tensors:
            tensors = [known.obj for known in self._tensors]
            for look, now in zip(_PARTS_OF_VERSION, zip(*self._versions, strict=True), strict=True):
                yield _equals(look, tensors, [*now])


def _group(
    look: Callable[[Any], Iterable[Any]], holder: Any, places: Sequence[tuple[Known, Any]]
) -> EntryGroup:
    return EntryGroup(look, holder, [_entry(known, key) for known, key in places], places)


def _dict_of(known: Known) -> dict[Any, Any] | None:
    """The dict whose entries are compared: the object itself, or its attributes."""
    if known.kind is kinds.DICT:
        return known.obj  # type: ignore[no-any-return]
    has_attributes = known.kind in (kinds.INSTANCE, kinds.STATEFUL, kinds.OPAQUE)
    return attributes_of(known.obj) if has_attributes else None


def _entries(known: Known) -> list[tuple[Any, Any]]:
    """The entries of ``_dict_of`` as the workers have them; where that is not known, a strange one."""
    unknown = [(GONE, GONE)]
    if known.kind in (kinds.STATEFUL, kinds.OPAQUE):
        return list((_dict_of(known) or {}).items()) if _is_agreed(known) else unknown
    if known.contents is None:
        return unknown
    others = (kinds.ATTRIBUTES,) if known.kind is kinds.DICT else (kinds.CLASS_OF, *slots_of(known.obj))
    return [(key, value) for key, value in known.contents.items() if key not in others]


def _is_agreed(known: Known) -> bool:
    """Whether the workers have an object as it is."""
    return known.contents is not None and known.has(known.kind.look(known.obj))


def _items(held: dict[Any, Any]) -> Iterator[Any]:
    """The keys and values of a dict, and an end."""
    return chain(held, held.values(), (GONE,))


def _value_of(variable: ContextVar[Any]) -> tuple[Any]:
    return (variable.get(GONE),)


def _values(dicts: Sequence[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _scalars_of(keys: Sequence[str]) -> Callable[[Any], Iterator[Any]]:
    entries = itemgetter(*keys)
    return lambda dicts: chain.from_iterable(map(entries, dicts))


def _equals(look: Callable[[Any], Any], objects: list[Any], now: list[Any]) -> EntryGroup:
    """How to see whether a *look* at each of some objects gives what is equal to that of *now*."""
    return EntryGroup(lambda given: ([*map(look, given)] == now,), objects, [True])


def is_small_table(known: Known) -> bool:
    """Whether *known* is a table or a column that is compared at each call, by what pickle takes of
    it."""
    if known.kind is not kinds.OPAQUE or not is_table(known.obj):
        return False
    return known.contents is not None and known.contents[WHOLE].nbytes <= _TABLE_BYTES


def _bits(array: Any) -> Any:
    """All that a small array of a class of its own has as elements, or a table."""
    if not isinstance(array, np.ndarray):
        return kinds.OPAQUE.look(array)[WHOLE]
    mask = np.ma.getmaskarray(array).tobytes() if isinstance(array, np.ma.MaskedArray) else None
    return np.asarray(array).tobytes(), array.shape, array.dtype, mask


def _slots_looker(names: Sequence[str]) -> Callable[[Any], Iterator[Any]]:
    return lambda obj: (getattr(obj, name, GONE) for name in names)


def cost_of(known: Known) -> int:
    """What a comparison of an object at each call costs; 0: it cannot be done."""
    if known.kind is kinds.ARRAY:
        return 8 + int(known.obj.nbytes) // 256
    if known.kind is kinds.TENSOR or known.kind is kinds.CONTEXT or is_small_table(known):
        return 8
    if known.kind is kinds.SEQUENCE:
        return 4 + len(known.obj) if len(known.obj) <= _MANY else 0
    found, obj = _dict_of(known), known.obj
    if found is None:
        own = 14 + len(known.contents or ()) if known.kind in (kinds.CLASS, kinds.INSTANCE) else 0
    else:
        own = 5 + 2 * len(found) if len(found) <= _MANY else 0
    if known.kind is kinds.OPAQUE and isinstance(obj, np.ndarray):
        return own + 20 + obj.nbytes // 256
    return own


def rank_of(known: Known, foreign: bool, cost: int) -> int:
    """Whether an object is compared first (0), where there is room (1, 2), or not at each call (3).

    Objects inside of those of installed packages come later, those last that hold no numbers.
    """
    if not cost:
        return 3
    if not foreign:
        return 0
    if known.kind in (kinds.TENSOR, kinds.ARRAY):
        return 1
    held = (known.contents or {}).values()
    return 1 if any(is_plain(value) and value is not None for value in held) else 2


def _copied(known: Known) -> Any:
    """A copy of an array or a tensor."""
    return known.obj.copy() if known.kind is kinds.ARRAY else known.obj.detach().clone()


def is_flat(value: Any) -> bool:
    """Whether *value* holds no objects: it is a number, a string, a digest, or a tuple of such."""
    if isinstance(value, tuple) and not isinstance(value, Digest):
        return all(map(is_plain, value))
    return isinstance(value, Digest) or (is_plain(value) and not isinstance(value, CodeType))


def _entry(known: Known, key: Any, otherwise: Any = GONE) -> Any:
    """What the workers have as an entry."""
    return otherwise if known.contents is None else known.contents.get(key, otherwise)


def _is_empty(cell: CellType) -> tuple[bool]:
    return (cell == CellType(),)
