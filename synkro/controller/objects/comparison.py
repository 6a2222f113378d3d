"""``Comparison``: the objects that a function's calls compare, and how each is looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextvars import ContextVar
from itertools import chain
from operator import attrgetter, itemgetter
from types import CellType, CodeType
from typing import Any

import numpy as np

from ...packing.kinds import (
    ARRAY,
    ATTRIBUTES,
    CLASS,
    CLASS_OF,
    CONTEXT,
    DICT,
    FUNCTION,
    FUNCTION_PARTS,
    INSTANCE,
    NAME,
    OPAQUE,
    SEQUENCE,
    STATEFUL,
    TENSOR,
    WHOLE,
    Contents,
    attributes_of,
    is_plain,
    is_scalar,
    same_contents,
    slots_of,
)
from .glances import GONE, Flags, Glance, elements, lengths
from .walk import Known, Look

_MANY = 256
"""Containers with more entries are not compared at each call."""

_parts = attrgetter(*FUNCTION_PARTS)
_contents = attrgetter("cell_contents")
_form = attrgetter("shape", "dtype")
_version = attrgetter("_version", "requires_grad")
_VERSION = attrgetter("_version"), attrgetter("requires_grad")


class Comparison:
    """The objects that a function's calls compare.

    Attributes:
        functions: those of the program's.
        tensors: PyTorch's.
    """

    def __init__(self) -> None:
        self._names: dict[int, tuple[dict[str, Any], list[Known]]] = {}
        self.functions: list[Known] = []
        self._dicts: list[Known] = []  # and instances, with their attributes
        self._sequences: list[Known] = []
        self._ordered: list[Known] = []
        self._classes: list[Known] = []
        self._contexts: list[Known] = []
        self._slotted: list[Known] = []
        self._own_arrays: list[Known] = []  # of classes of their own
        self._arrays: list[Known] = []
        self.tensors: list[Known] = []
        self._flagged: dict[Known, tuple[Any, ...]] = {}  # with the keys of numbers and strings

    def add_flags(self, known: Known) -> None:
        """Compare the numbers and strings among its attributes, too, and how many attributes it has."""
        held = _dict_of(known) or {}
        plain = (key for key, value in _entries(known) if type(key) is str and is_scalar(value))
        self._flagged[known] = tuple(key for key in plain if key in held)

    def add(self, known: Known) -> None:
        """Compare this, too."""
        obj = known.obj
        if known.kind is NAME:
            self._names.setdefault(id(obj.names), (obj.names, []))[1].append(known)
            return
        simple = {
            **{FUNCTION: self.functions, SEQUENCE: self._sequences, ARRAY: self._arrays},
            **{TENSOR: self.tensors, CLASS: self._classes, CONTEXT: self._contexts},
        }
        if known.kind in simple:
            simple[known.kind].append(known)
        elif known.kind is DICT and isinstance(obj, OrderedDict):  # dict.values sees no order
            self._ordered.append(known)
        elif _dict_of(known) is not None:
            self._dicts.append(known)
        if known.kind is INSTANCE and slots_of(obj):
            self._slotted.append(known)
        if known.kind is OPAQUE and isinstance(obj, np.ndarray):
            self._own_arrays.append(known)

    @property
    def blind(self) -> bool:
        """Whether of some of them nobody knows here what the workers have."""
        kinds = {known.kind for known in chain(self._dicts, self._own_arrays, self.tensors)}
        return not kinds.isdisjoint((STATEFUL, OPAQUE, TENSOR))

    @property
    def dicts(self) -> Sequence[Known]:
        """Those of which entries are compared one by one."""
        return self._dicts

    def covers(self, known: Known) -> bool:
        """Whether an object is compared at each call, with all that it holds."""
        if known.kind is OPAQUE:
            return known in self._own_arrays
        lists = (
            self.functions,
            self._dicts,
            self._sequences,
            self._ordered,
            self._classes,
            self._contexts,
            self.tensors,
        )
        return known.kind is NAME or any(known in some for some in (*lists, self._slotted, self._arrays))

    def notices(self, known: Known, changed: Container[Any]) -> bool:
        """Whether the next call would see that an object has *changed* in these entries: a tensor by its
        version alone."""
        if known.kind is TENSOR and known in self.tensors:
            return bool(_version(known.obj) != self._versions[self.tensors.index(known)])
        if known in self._flagged and any(key in changed for key in self._flagged[known]):
            return True
        return self.covers(known)

    # ── all that they hold ───────────────────────────────────────────────────────────────────────

    def look(self) -> Look:
        """What they hold now."""
        arrays = [(known, known.kind.look(known.obj), _copied(known)) for known in self._arrays]
        return [*self._looked_at(), *arrays, *self._looked_at_tensors()]

    def changed(self) -> Look:
        """What is not as the workers have it."""
        found: Look = []
        for known, contents, _ in self._looked_at():
            if known.contents is None or not same_contents(known.kind, known.contents, contents):
                found.append((known, contents, None))
            else:
                known.assign(contents)  # equal, but perhaps other objects
        return found + list(self._changed_arrays())

    def _changed_flags(self) -> Iterator[Known]:
        """Those of which a number or string is another one, or there are more attributes."""
        for known, keys in self._flagged.items():
            held, there = _dict_of(known) or {}, known.contents or {}
            as_many = len(held) == len(_entries(known))
            if not (as_many and all(held.get(key, GONE) is there.get(key) for key in keys)):
                yield known

    def _looked_at(self) -> Iterator[tuple[Known, Contents, None]]:
        named = chain.from_iterable(knowns for _, knowns in self._names.values())
        lists = (self.functions, self._dicts, self._sequences, self._ordered, self._classes)
        others = (self._contexts, self._slotted, self._own_arrays, self._changed_flags())
        knowns = dict.fromkeys(chain(named, *lists, *others))
        return ((known, known.kind.look(known.obj), None) for known in knowns)

    def _looked_at_tensors(self) -> Iterator[tuple[Known, Contents, Any]]:
        """Those that have changed, or had when a call was submitted before."""
        changed = {known for known, _, _ in self._changed_arrays()}
        for known in self.tensors:
            if known.was_copied(known in changed):
                yield known, known.kind.look(known.obj), _copied(known)

    def _changed_arrays(self) -> Iterator[tuple[Known, Contents, None]]:
        versions = zip(self.tensors, self._versions, strict=True)
        tensors = (known for known, last in versions if _version(known.obj) != last)
        for known in chain(self._arrays, tensors):
            contents = known.kind.look(known.obj)
            if contents != known.contents:
                yield known, contents, None

    # ── at a glance ──────────────────────────────────────────────────────────────────────────────

    def glances(self) -> list[Glance]:
        """How to compare them with what the workers have."""
        groups = (self._of_names(), self._of_functions(), self._of_instances(), self._of_containers())
        return [*chain(*groups, self._of_flags(), self._of_classes(), self._of_arrays())]

    def _of_names(self) -> Iterator[Glance]:
        for names, knowns in self._names.values():
            keys = [known.obj.name for known in knowns]
            places = [(known, WHOLE) for known in (*knowns, knowns[0])]
            yield _glance(itemgetter(*keys, keys[0]), names, places)

    def _of_functions(self) -> Iterator[Glance]:
        functions = [known.obj for known in self.functions]
        if len(functions) == 1:  # most often, and in half the time
            yield _glance(_parts, functions[0], [(self.functions[0], p) for p in FUNCTION_PARTS])
        elif functions:
            places = [(known, part) for known in self.functions for part in FUNCTION_PARTS]
            yield _glance(lambda fns: chain.from_iterable(map(_parts, fns)), functions, places)
        dicts = [vars(function) for function in functions]
        if dicts:
            yield Glance(lengths, dicts, [len(each) for each in dicts])
        places = [(known, name) for known in self.functions for name in vars(known.obj)]
        if places:
            yield Glance(elements, dicts, [name for _, name in places])
            yield _glance(_values, dicts, places)
        yield from self._of_cells()

    def _of_cells(self) -> Iterator[Glance]:
        cells: list[CellType] = []
        places: list[tuple[Known, int]] = []
        for known in self.functions:
            for index, cell in enumerate(known.obj.__closure__ or ()):
                if known.contents and index not in known.contents:  # it was empty
                    yield Glance(_count_filled, cell, [0])
                    continue
                cells.append(cell)
                places.append((known, index))
        if cells:
            yield _glance(lambda given: map(_contents, given), cells, places)

    def _of_instances(self) -> Iterator[Glance]:
        instances = [known for known in (*self._dicts, *self._slotted) if known.kind is INSTANCE]
        instances = list(dict.fromkeys(instances))
        if instances:
            objects = [known.obj for known in instances]
            yield _glance(_classes, objects, [(known, CLASS_OF) for known in instances])
            yield Glance(_dicts_of, objects, [attributes_of(obj) for obj in objects])
        for known in self._slotted:
            names = slots_of(known.obj)
            yield _glance(_slots_looker(names), known.obj, [(known, name) for name in names])

    def _of_containers(self) -> Iterator[Glance]:
        """And of the attributes of instances."""
        if self._dicts:
            dicts = [_dict_of(known) for known in self._dicts]
            held = [_entries(known) for known in self._dicts]
            pairs = zip(self._dicts, held, strict=True)
            places = [(known, key) for known, each in pairs for key, _ in each]
            yield Glance(lengths, dicts, [len(each) for each in held])
            yield Glance(elements, dicts, [key for each in held for key, _ in each])
            yield Glance(_values, dicts, [value for each in held for _, value in each], places)
        if self._sequences:
            sequences = [known.obj for known in self._sequences]
            values = [tuple(_entry(known, WHOLE, ())) for known in self._sequences]
            yield Glance(lengths, sequences, [len(each) for each in values])
            yield Glance(elements, sequences, [value for each in values for value in each])
        for known in self._ordered:
            entries = {k: v for k, v in (known.contents or {}).items() if k is not ATTRIBUTES}
            yield Glance(_items, known.obj, [*entries, *entries.values(), GONE])
        for known in (*self._dicts, *self._sequences, *self._ordered):
            own = attributes_of(known.obj)
            if known.kind in (DICT, SEQUENCE) and own is not None and own is not known.obj:
                given = dict(_entry(known, ATTRIBUTES, ()))
                yield Glance(_items, own, [*given, *given.values(), GONE])

    def _of_flags(self) -> Iterator[Glance]:
        groups: dict[tuple[Any, ...], list[Known]] = {}
        for known, keys in self._flagged.items():
            groups.setdefault(keys, []).append(known)
        for keys, knowns in groups.items():
            dicts = [_dict_of(known) for known in knowns]
            yield Glance(lengths, dicts, [len(_entries(known)) for known in knowns])
            if keys:
                twice = (*keys, keys[0])  # as itemgetter of one key makes no tuple
                places = [(known, key) for known in knowns for key in twice]
                yield Flags(_flags_looker(twice), dicts, [_entry(*place) for place in places], places)

    def _of_classes(self) -> Iterator[Glance]:
        for known in self._classes:
            own, keys = vars(known.obj), list(known.contents or ())
            yield Glance(lengths, [own], [len(own)])
            if keys:
                yield _glance(itemgetter(*keys, keys[0]), own, [(known, k) for k in (*keys, keys[0])])

        for known in self._contexts:
            yield Glance(_value_of, known.obj, [_entry(known, WHOLE)], [(known, WHOLE)])

    def _of_arrays(self) -> Iterator[Glance]:
        for known in self._own_arrays:
            if _is_agreed(known):
                yield Glance(_comparing(_bits(known.obj)), known.obj, [True])
            else:
                yield Glance(iter, (None,), [GONE])
        if self._arrays:
            arrays = [known.obj for known in self._arrays]
            bits = [known.obj.tobytes() if _is_agreed(known) else None for known in self._arrays]
            forms = [_form(array) for array in arrays]
            yield Glance(lambda given: ([*map(np.ndarray.tobytes, given)] == bits,), arrays, [True])
            yield Glance(lambda given: ([*map(_form, given)] == forms,), arrays, [True])
        self._versions = [_version(known.obj) for known in self.tensors]
        if self.tensors:
            tensors = [known.obj for known in self.tensors]
            for part, look in enumerate(_VERSION):
                now = [version[part] for version in self._versions]
                yield Glance(_comparing_all(look, now), tensors, [True])


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
    """The entries of ``_dict_of`` as the workers have them; where that is not known, a strange one."""
    unknown = [(GONE, GONE)]
    if known.kind in (STATEFUL, OPAQUE):
        return list((_dict_of(known) or {}).items()) if _is_agreed(known) else unknown
    if known.contents is None:
        return unknown
    others = (ATTRIBUTES,) if known.kind is DICT else (CLASS_OF, *slots_of(known.obj))
    return [(key, value) for key, value in known.contents.items() if key not in others]


def _is_agreed(known: Known) -> bool:
    """Whether the workers have an object as it is."""
    contents = known.contents
    return contents is not None and same_contents(known.kind, contents, known.kind.look(known.obj))


def _items(held: dict[Any, Any]) -> Iterator[Any]:
    """The keys and values of a dict, and an end."""
    return chain(held, held.values(), (GONE,))


def _value_of(variable: ContextVar[Any]) -> tuple[Any]:
    return (variable.get(GONE),)


def _values(dicts: Sequence[dict[Any, Any]]) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, dicts))


def _classes(objects: Sequence[Any]) -> Iterator[type]:
    return map(type, objects)


def _dicts_of(objects: Sequence[Any]) -> Iterator[Any]:
    return map(attributes_of, objects)


def _flags_looker(keys: Sequence[str]) -> Callable[[Any], Iterator[Any]]:
    entries = itemgetter(*keys)
    return lambda dicts: chain.from_iterable(map(entries, dicts))


def _comparing_all(look: Callable[[Any], Any], now: list[Any]) -> Callable[[Any], tuple[bool]]:
    return lambda given: ([*map(look, given)] == now,)


def _bits(array: Any) -> Any:
    """All that a small array of a class of its own has as elements."""
    mask = np.ma.getmaskarray(array).tobytes() if isinstance(array, np.ma.MaskedArray) else None
    return np.asarray(array).tobytes(), array.shape, array.dtype, mask


def _comparing(bits: Any) -> Callable[[Any], tuple[bool]]:
    return lambda array: (_bits(array) == bits,)


def _slots_looker(names: Sequence[str]) -> Callable[[Any], Iterator[Any]]:
    return lambda obj: (getattr(obj, name, GONE) for name in names)


def cost_of(known: Known) -> int:
    """What it costs to compare an object at each call; 0: it cannot be done."""
    if known.kind is ARRAY:
        return 8 + int(known.obj.nbytes) // 256
    if known.kind is TENSOR or known.kind is CONTEXT:
        return 8
    if known.kind is SEQUENCE:
        return 4 + len(known.obj) if len(known.obj) <= _MANY else 0
    found, obj = _dict_of(known), known.obj
    if found is None:
        own = 14 + len(known.contents or ()) if known.kind in (CLASS, INSTANCE) else 0
    else:
        own = 5 + 2 * len(found) if len(found) <= _MANY else 0
    if known.kind is OPAQUE and isinstance(obj, np.ndarray):
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
    if known.kind in (TENSOR, ARRAY):
        return 1
    held = (known.contents or {}).values()
    return 1 if any(is_plain(value) and value is not None for value in held) else 2


def _copied(known: Known) -> Any:
    """A copy of an array or a tensor."""
    return known.obj.copy() if known.kind is ARRAY else known.obj.detach().clone()


def is_flat(value: Any) -> bool:
    """Whether *value* holds no objects: it is a number, a string, or a tuple of these."""
    return (is_plain(value) and not isinstance(value, CodeType)) or (
        isinstance(value, tuple) and all(map(is_plain, value))
    )


def _entry(known: Known, key: Any, otherwise: Any = GONE) -> Any:
    """What the workers have as an entry."""
    return otherwise if known.contents is None else known.contents.get(key, otherwise)


def _count_filled(cell: CellType) -> Iterator[int]:
    try:
        return iter([len([cell.cell_contents])])
    except ValueError:
        return iter([0])
