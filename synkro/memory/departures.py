"""What is done when an object is gone, by callbacks that are C functions.

Python prints and drops an exception in a weak reference's callback, and would do so with Ctrl-C.  But
SIGINT is delivered between bytecodes only, and C functions have none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_awaited: dict[int, tuple[weakref.ref[Any], ...]] = {}  # a reference that is dropped calls nothing


def call_with_last(owner: Any, function: Callable[..., Any], *args: Any) -> int:
    """Call the C function ``function(*args, reference)`` when *owner* is gone; returns a handle, which
    is one as long as *owner* lives.

    The *reference* is what is left of the owner.  Where *function* is a dict's ``__setitem__``, and its
    argument a key, the keys are what is gone, in the order in which it went.
    """
    action = weakref.ref(owner, partial(function, *args))
    handle = id(action)
    _awaited[handle] = (action, weakref.ref(owner, partial(_awaited.pop, handle)))
    return handle


def call_off(handle: int) -> bool:
    """Cancel the call; returns whether it was still to come."""
    return _awaited.pop(handle, None) is not None


class WhileThere(Generic[Key, Value]):
    """Values by objects that are there, kept up by C functions: an entry goes with its key."""

    def __init__(self) -> None:
        self._values: dict[weakref.ref[Key], Value] = {}

    def __setitem__(self, key: Key, value: Value) -> None:
        self._values[weakref.ref(key, self._values.pop)] = value

    def get(self, key: Key) -> Value | None:
        return self._values.get(weakref.ref(key))

    def __iter__(self) -> Iterator[Key]:
        for reference in list(self._values):
            key = reference()
            if key is not None:
                yield key
