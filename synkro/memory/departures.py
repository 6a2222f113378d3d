"""What is done when an object is gone, by callbacks that are C functions.

Python prints and drops an exception in a weak reference's callback, and would do so with Ctrl-C.  But
SIGINT is delivered between bytecodes only, and C functions have none.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

Payload = TypeVar("Payload")

_awaited: dict[int, tuple[weakref.ref[Any], ...]] = {}  # a reference that is dropped calls nothing


def call_with_last(owner: Any, function: Callable[..., Any], *args: Any) -> int:
    """Call the C function ``function(*args, reference)`` when *owner* is gone; returns a handle."""
    action = weakref.ref(owner, partial(function, *args))
    handle = id(action)
    _awaited[handle] = (action, weakref.ref(owner, partial(_awaited.pop, handle)))
    return handle


def call_off(handle: int) -> bool:
    """Cancel the call; returns whether it was still to come."""
    return _awaited.pop(handle, None) is not None


class Departures(Generic[Payload]):
    """The payloads of watched objects that are gone, in the order in which they went.

    Attributes:
        gone: the references of those objects, until they are forgotten; empty if there are none.
    """

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[Any], Payload]] = {}
        self.gone: deque[weakref.ref[Any]] = deque()

    def watch(self, owner: Any, payload: Payload) -> None:
        reference = weakref.ref(owner, self.gone.append)
        self._watched[id(reference)] = (reference, payload)

    def payloads(self) -> tuple[Payload, ...]:
        """The payloads of objects that are gone, but for those forgotten."""
        return tuple(self._watched[id(reference)][1] for reference in tuple(self.gone))

    def forget(self, count: int) -> None:
        """Drop the first *count* of them."""
        for _ in range(count):
            del self._watched[id(self.gone.popleft())]
