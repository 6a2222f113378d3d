"""Many values that hold numbers and short strings, pickled as one.

::

    [ head: their classes, by a pickler of ours, and POP ][ values, by pickle itself ]

The memo of the second pickler begins with that of the first: so it takes the classes for written, and
needs no hook, which would cost more for each value than pickle does.  Both streams are one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Sequence
from itertools import chain
from types import GetSetDescriptorType
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from .kinds import own_slots
from .pickles import NUMBERS, OneByOne, are_small

W = TypeVar("W", bound=OneByOne)

_ENTRIES = 1 << 10  # that a value may hold
_CHARACTERS = 256  # of a string in it
_CLASSES = 16  # that a head may have

_SCALARS = NUMBERS | {np.dtype(code).type for code in "?bhilqBHILQefdgFDG"}
_TEXTS = frozenset({str, bytes})
_FIXED = _SCALARS | _TEXTS

_SAID_BY_CLASSES = (
    "__reduce_ex__",
    "__reduce__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
    "__getnewargs_ex__",
    "__new__",
    "__getattribute__",
    "__del__",
)
"""What a class may say of how its instances are pickled, made and watched."""


class _Head(NamedTuple):
    """The classes of values that are written behind, as a *stream* that leaves nothing, and where a
    pickler goes on.

    *by_us* says whether pickle itself cannot read them.
    """

    classes: tuple[type, ...]
    stream: bytes
    memo: dict[int, Any]
    by_us: bool


class _Behind(pickle.Pickler):
    """Pickles behind a stream that another pickler has written, whose *memo* that was."""

    def __init__(self, stream: io.BytesIO, memo: dict[int, Any]) -> None:
        super().__init__(stream, 5)
        self.memo = memo


class _Unfit(Exception):
    """A value has to be pickled apart."""


class Together(Generic[W]):
    """Pickles values together, of which each is a copy.

    They hold numbers and short strings, in dicts, lists, tuples, sets, and instances of classes that say
    nothing of how they are pickled.

    Attributes:
        writer: what pickles their classes, and each other value.
        count: how many entries the values have that were copied since the last look at classes.
        failed: whether a class could not be pickled: then another writer is needed.
    """

    def __init__(self, writer: W) -> None:
        self.writer = writer
        self.count: int = 0
        self.failed: bool = False
        self._head = _Head((), b"", {}, False)
        self._plain: dict[type, bool] = {}  # by class, whether instances can be copied
        self._seen: list[int] = []  # by id, what of the value has a copy
        self._left = 0  # entries that it may still have

    def look_again(self) -> None:
        """Classes may have changed."""
        self._plain.clear()
        self.count = 0

    def copied(self, *values: Any) -> list[Any] | None:
        """Copies of *values*, which can be pickled together with others; None if one cannot be, as it is
        too large, or as something is in two places in them."""
        if len(values) == 1 and (copy := self._flat_copy(values[0])) is not None:
            return [copy]
        self._seen, self._left = [], _ENTRIES
        try:
            copies = [self._copied(value) for value in values]
        except (_Unfit, RecursionError):
            return None
        if len(self._seen) > 1 and len({*self._seen}) < len(self._seen):
            return None
        self.count += _ENTRIES - self._left
        return copies

    def _flat_copy(self, value: Any) -> Any:
        """A copy of a dict or an instance that holds nothing but numbers and short strings, or None."""
        cls = type(value)
        entries = value if cls is dict else vars(value) if self._plain.get(cls) else None
        if entries is None or len(entries) > _ENTRIES or not _are_fixed(entries.values()):
            return None
        if not _FIXED.issuperset(map(type, entries)):
            return None
        self.count += len(entries)
        if cls is dict:
            return value.copy()
        copy = object.__new__(cls)
        vars(copy).update(entries)
        return copy

    def are_flat(self, columns: Sequence[Sequence[Any]]) -> bool:
        """Whether the values of *columns* need no copies.

        They are small; or those of a column are dicts, or instances of one class, that hold nothing but
        numbers and short strings, and each is there once, in all columns.
        """
        held = [column for column in columns if not are_small(column)]
        once = len({*map(id, chain.from_iterable(held))}) == sum(map(len, held))
        return once and all(map(self._is_flat, held))

    def _is_flat(self, values: Sequence[Any]) -> bool:
        if len({*map(type, values)}) > 1:
            return False
        if type(values[0]) is not dict and not self._is_plain(values[0]):
            return False
        entries = values if type(values[0]) is dict else [*map(vars, values)]
        self.count += sum(map(len, entries))
        keys, contents = chain.from_iterable(entries), [*chain.from_iterable(map(dict.values, entries))]
        return _FIXED.issuperset(map(type, keys)) and _are_fixed(contents)

    def pickled(self, values: list[Any]) -> tuple[bytes, bool]:
        """Copies that ``copied`` has made, pickled, and whether pickle itself cannot read that."""
        head, stream = self._head, io.BytesIO()
        _Behind(stream, head.memo).dump(values)
        return head.stream + stream.getvalue(), head.by_us

    def _copied(self, value: Any) -> Any:
        """A copy of a part of a value.  Raises: _Unfit."""
        cls = type(value)
        if cls in _FIXED:
            if cls in _TEXTS and len(value) > _CHARACTERS:
                raise _Unfit
            return value
        if cls is list or cls is tuple:
            return self._copied_sequence(cls, value)
        self._seen.append(id(value))
        if cls is dict:
            return self._filled({}, value)
        if cls is set:
            self._take(value)
            return value.copy()
        if not self._is_plain(value):
            raise _Unfit
        copy = object.__new__(cls)
        self._filled(vars(copy), vars(value))
        return copy

    def _copied_sequence(self, cls: type, value: Any) -> Any:
        self._left -= len(value)
        if self._left < 0:
            raise _Unfit
        plain = _SCALARS.issuperset(map(type, value))
        if cls is list or not plain:  # else nobody can tell a copy
            self._seen.append(id(value))
        if plain:
            return value[:]
        return cls([part if type(part) in _SCALARS else self._copied(part) for part in value])

    def _filled(self, copies: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
        """*copies*, with copies of *entries*.  Raises: _Unfit."""
        self._take(entries)
        for key, part in entries.items():
            copies[key] = part if type(part) in _SCALARS else self._copied(part)
        return copies

    def _take(self, keys: Collection[Any]) -> None:
        """Count *keys*, or what a set has.  Raises: _Unfit."""
        self._left -= len(keys)
        if self._left < 0 or not _FIXED.issuperset(map(type, keys)):
            raise _Unfit

    def _is_plain(self, value: Any) -> bool:
        """Whether pickle takes of *value* what its ``__dict__`` has, and the head has its class."""
        cls = type(value)
        plain = self._plain.get(cls)
        if plain is None:
            plain = _is_plain(cls) and self.writer.is_usual(value) and self._is_in_head(cls)
            self._plain[cls] = plain
        return plain

    def _is_in_head(self, cls: type) -> bool:
        classes = self._head.classes
        if cls not in classes and len(classes) < _CLASSES:
            classes += (cls,)
            try:
                stream, memo, by_us = self.writer.head(classes)
            except Exception:  # it is told where a value is pickled by itself
                self.failed = True
                return False
            self._head = _Head(classes, stream.removesuffix(pickle.STOP) + pickle.POP, memo, by_us)
        return cls in classes


def _are_fixed(parts: Collection[Any]) -> bool:
    """Whether *parts* are numbers and short strings."""
    kinds = {*map(type, parts)}
    if kinds <= _SCALARS:
        return True
    return kinds <= _FIXED and max([len(part) for part in parts if type(part) in _TEXTS]) <= _CHARACTERS


def _is_plain(cls: type) -> bool:
    homes = (vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
    return (
        all(getattr(cls, name, None) is getattr(object, name, None) for name in _SAID_BY_CLASSES)
        and isinstance(next(homes, None), GetSetDescriptorType)
        and not any(map(own_slots, cls.__mro__))
    )
