"""Many values that hold nothing but numbers and short strings, pickled as one.

::

    [ head: their classes, by a pickler of ours, and POP ][ values, by pickle itself ]

The memo of the second pickler begins with that of the first: so it takes the classes for written, and
needs no hook, which would cost more for each value than pickle does.  Both streams are one.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterable, Sequence
from types import GetSetDescriptorType
from typing import Any, NamedTuple

import numpy as np

from .kinds import own_slots
from .pickles import NUMBERS, OneByOne, are_small

_ENTRIES = 64  # that a value may hold
_CHARACTERS = 512  # of a string in it
_CLASSES = 16  # that a head may have

_SCALARS = NUMBERS | {np.dtype(code).type for code in "?bhilqBHILQefdgFDG"}
_TEXTS = frozenset({str, bytes})
_FIXED = _SCALARS | _TEXTS | {tuple}
_COPIES: dict[type, Callable[[Any], Any]] = {
    dict: dict.copy,
    list: list.copy,
    set: set.copy,
}

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


class Together:
    """Pickles values together if none of them can have a part in common with another.

    These are dicts, lists, tuples and sets of numbers and short strings, and instances of classes that
    say nothing of how they are pickled, with attributes of these types.

    Attributes:
        writer: what pickles their classes, and each other value.
    """

    def __init__(self, writer: OneByOne) -> None:
        self.writer = writer
        self._head = _Head((), b"", {}, False)
        self._plain: dict[type, bool] = {}  # by class, whether its instances can be among the values

    def look_again(self) -> None:
        """Classes may have changed."""
        self._plain.clear()

    def takes(self, columns: Iterable[Sequence[Any]]) -> bool:
        """Whether all values of *columns* can be pickled together: none of them is in two places."""
        self.look_again()
        held: list[int] = []
        for column in columns:
            if not are_small(column):
                if not all(map(self._holds_little, column)):
                    return False
                held += [id(value) for value in column if type(value) not in _FIXED]
        return len({*held}) == len(held)

    def copied(self, value: Any) -> Any:
        """A copy of *value*, which can be pickled together with others; None if it cannot be."""
        if not self._holds_little(value):
            return None
        cls = type(value)
        if cls in _FIXED:
            return value
        if cls in _COPIES:
            return _COPIES[cls](value)
        copy = object.__new__(cls)
        vars(copy).update(vars(value))
        return copy

    def pickled(self, values: Sequence[Any]) -> tuple[bytes, bool]:
        """Values that were found to be fit, pickled, and whether pickle itself cannot read that."""
        head, stream = self._head, io.BytesIO()
        _Behind(stream, head.memo).dump(values)
        return head.stream + stream.getvalue(), head.by_us

    def _holds_little(self, value: Any) -> bool:
        cls = type(value)
        if cls in _TEXTS:
            return len(value) <= _CHARACTERS
        if cls in _SCALARS:
            return True
        if cls not in _COPIES and cls is not tuple:
            if not self._is_plain(value):
                return False
            value, cls = vars(value), dict
        if len(value) > _ENTRIES:
            return False
        parts = (*value, *value.values()) if cls is dict else value
        kinds = {*map(type, parts)}
        if kinds <= _SCALARS:
            return True
        fixed = kinds <= _SCALARS | _TEXTS
        return fixed and all(len(part) <= _CHARACTERS for part in parts if type(part) in _TEXTS)

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
            stream, memo, by_us = self.writer.head(classes)
            self._head = _Head(classes, stream.removesuffix(pickle.STOP) + pickle.POP, memo, by_us)
        return cls in classes


def _is_plain(cls: type) -> bool:
    homes = (vars(base)["__dict__"] for base in cls.__mro__ if "__dict__" in vars(base))
    return (
        all(getattr(cls, name, None) is getattr(object, name, None) for name in _SAID_BY_CLASSES)
        and isinstance(next(homes, None), GetSetDescriptorType)
        and not any(map(own_slots, cls.__mro__))
    )
