"""Ctrl-C, deferred while steps belong together or a resource has no owner yet.

What is done when an object is gone is done by callbacks that are C functions.  Python prints and drops
an exception in a weak reference's callback, and would do so with Ctrl-C.  But SIGINT is delivered
between bytecodes only, and C functions have none.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import Any, Final, Generic, TypeVar


class Atomic:
    """Steps of a worker that belong together: an interrupt among them is deferred until after them.

    The worker's handler of SIGINT reads ``depth``, and calls ``interrupt``.

    Attributes:
        depth: how many blocks of such steps are under way, one within the other.
        due: whether an interrupt waits for the end of the steps.
    """

    def __init__(self) -> None:
        self.depth: int = 0
        self.due: bool = False

    def interrupt(self) -> None:
        """An interrupt has come among the steps: it is due after them."""
        self.due = True

    def forget(self) -> None:
        """No interrupt is due any more."""
        self.due = False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.due and not self.depth:
            self.due = False
            raise KeyboardInterrupt


atomic: Final = Atomic()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT to the end of the block; Python delivers it to the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            handler(*late[0])


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
