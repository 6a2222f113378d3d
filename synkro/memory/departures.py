"""What happens when an object is gone, without a line of Python.

An exception in a weak reference's callback is printed and dropped, and so would Ctrl-C be that arrives
while one runs.  Between two bytecodes only can it arrive: these callbacks have none.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar

Payload = TypeVar("Payload")

_awaited: dict[int, tuple[weakref.ref[Any], ...]] = {}  # references live as long as their objects


def call_with_last(owner: Any, function: Callable[..., Any], *args: Any) -> int:
    """Call the C function ``function(*args, reference)`` when *owner* is gone; returns a handle."""
    action = weakref.ref(owner, partial(function, *args))
    handle = id(action)
    _awaited[handle] = (action, weakref.ref(owner, partial(_awaited.pop, handle)))
    return handle


def call_off(handle: int) -> bool:
    """Do not call it any more; whether it would still have been called."""
    return _awaited.pop(handle, None) is not None


class Departures(Generic[Payload]):
    """The payloads of watched objects that are gone, in the order in which they went."""

    def __init__(self) -> None:
        self._watched: dict[int, tuple[weakref.ref[Any], Payload]] = {}
        self._gone: deque[weakref.ref[Any]] = deque()

    def watch(self, owner: Any, payload: Payload) -> None:
        reference = weakref.ref(owner, self._gone.append)
        self._watched[id(reference)] = (reference, payload)

    def __len__(self) -> int:
        return len(self._gone)

    def payloads(self) -> tuple[Payload, ...]:
        """Those of all that are gone and were not forgotten."""
        return tuple(self._watched[id(reference)][1] for reference in tuple(self._gone))

    def forget(self, count: int) -> None:
        """The first *count* of them have been dealt with."""
        for _ in range(count):
            del self._watched[id(self._gone.popleft())]
