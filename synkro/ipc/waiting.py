"""Waiting for a word of shared memory that another process writes: poll for a while, then sleep.

The handshake of the process that waits and the one that writes; each has a fence between its steps::

    waiter                              writer
    ──────                              ──────
    store  "I sleep"                    store  the awaited word
    fence                               fence
    load   the awaited word             load   "I sleep"
    sleep, unless it is there           wake the waiter, if it sleeps

On both sides the store comes before the load, so at least one of the two sees the other's store: either
the waiter finds the word and stays awake, or the writer finds the waiter asleep.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Protocol, overload

_stood = 0.0  # seconds for which the clock has stood still
_stands_since: float | None = None


def clock() -> float:
    """The clock of all time limits, in seconds: it stands still while the user answers a worker."""
    now = time.monotonic() if _stands_since is None else _stands_since
    return now - _stood


@contextlib.contextmanager
def standing_still() -> Iterator[None]:
    """A block in which no time passes for time limits; one thread at a time is in one."""
    global _stood, _stands_since  # noqa: PLW0603
    _stands_since = start = time.monotonic()
    try:
        yield
    finally:
        _stands_since = None
        _stood += time.monotonic() - start


SPIN = 100e-6
"""Seconds to poll before sleeping: about what being woken costs."""


_GPU_SPIN = 1.5e-3  # about as long as many calls take


def polling(size: int, on_gpus: bool = False) -> float:
    """Seconds to poll: more where *size* workers take turns on the cores, or leave most of them free."""
    cores = len(os.sched_getaffinity(0))
    if on_gpus and cores > 2 * size:
        return _GPU_SPIN
    return SPIN if size <= cores else 2 * SPIN


Fence = Callable[[], None]
Condition = Callable[[], bool]
Deadline = float | None  # by the ``clock``
Nap = Callable[[list[int]], object]  # sleeps until one of these descriptors is readable, at most


class Words(Protocol):
    """Words of shared memory: a memoryview of them, or what is used like one."""

    @overload
    def __getitem__(self, index: int, /) -> int: ...

    @overload
    def __getitem__(self, index: slice, /) -> memoryview: ...

    def __setitem__(self, index: int, value: int, /) -> None: ...


def new_fence() -> Fence:
    """A ``fence()``, which makes earlier stores visible to all before any later load or store.

    Taking a free lock is an atomic read-modify-write, which is a full barrier on x86 and ARM.  Nobody
    waits for this lock: an interrupt may come between the two steps, or another thread.
    """
    lock = threading.Lock()
    acquire, release = lock.acquire, lock.release

    def fence() -> None:  # a closure is called faster than a method: every call needs six
        acquire(False)
        try:
            release()
        except RuntimeError:
            return  # another thread has released it

    return fence


def spin(condition: Condition, seconds: float = SPIN) -> bool:
    """Poll until *condition* holds, at most so many seconds; returns whether it does.

    Between two looks it yields its core, so that polling takes little from processes that compute.
    """
    if condition():
        return True
    give_up = time.perf_counter() + seconds
    while True:
        os.sched_yield()
        if condition():
            return True
        if time.perf_counter() > give_up:
            return False


def sleep_until(condition: Condition, words: Words, sleeps: int, fence: Fence, nap: Condition) -> None:
    """Sleep until *condition* holds, or *nap* says that the wait is over.

    *nap* sleeps once, until it is woken or for as long as it likes.  ``words[sleeps]`` says meanwhile
    that this process sleeps: how often it has gone to sleep in this wait.
    """
    try:
        while True:
            words[sleeps] += 1
            fence()  # "I sleep" is stored before the awaited word is loaded; see the handshake above
            if condition() or nap() or condition():
                return
    finally:
        words[sleeps] = 0


class Patience:
    """Whether to poll before sleeping: after a short wait always, else rarely.

    ``if not patience.poll(condition): with patience: …sleep…``

    A wait is judged by its total time, polling and sleep together; else two sides that put each other to
    sleep would never poll again.  Polling in vain in long waits takes at most 0.5 % of the time.
    """

    _SHARE = 0.005

    def __init__(self, seconds: float = SPIN) -> None:
        self._seconds = seconds
        self._short = True  # whether the last wait was short
        self._polled = False
        self._credit = 10 * seconds  # seconds of polling in vain that are allowed
        self._paid = self._start = time.perf_counter()  # until when credit has been given

    def poll(self, condition: Condition) -> bool:
        """Poll for *condition* if that is worth while; returns whether it holds."""
        self._polled = self._short or self._may_poll()
        if self._polled and spin(condition, self._seconds):
            self._short = True
            return True
        return False

    def _may_poll(self) -> bool:
        now = time.perf_counter()
        earned = self._SHARE * (now - self._paid)
        self._credit = min(10 * self._seconds, self._credit + earned)
        self._paid = now
        return self._credit >= self._seconds

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        polled = self._seconds if self._polled else 0
        self._short = time.perf_counter() - self._start + polled < 4 * self._seconds
        if self._polled and not self._short:
            self._credit -= self._seconds
