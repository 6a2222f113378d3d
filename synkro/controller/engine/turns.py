"""Turns: which operations of the program's threads use which ranks.

An operation is a call, a collective, a distribution …  Whoever does the main process's part of one
holds the lock of the engine.  Most operations use all ranks, and hold the lock to their end.  One on
*some* ranks has a turn, and lets go of the lock while it waits for its ranks::

    call on rank 0    plan, send │ wait for rank 0 ───────────│ collect │
    call on rank 1              plan, send │ wait for rank 1 ────│ collect │
    call on all                            │ waits until no turn is left ──│ plan, send, wait …

Turns stand in a line.  One begins when no earlier one has a rank of its own.  A turn lasts as long as
its thread holds the turn's lock, by ``with``: whatever interrupts the thread, the turn ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from operator import methodcaller
from typing import Any, TypeVar

from ...ipc.waiting import clock

T = TypeVar("T")

# Whose an RLock is, and letting go of one that is held several times, are private in CPython, made for
# ``threading.Condition``.  A count of our own would be wrong after an interrupt between the lock's step
# and ours: in these C functions there is no place for one.
_ACQUIRE = methodcaller("acquire", True, 0.05)
_IS_OWNED = methodcaller("_is_owned")
_RELEASE = methodcaller("_release_save")


def is_past(deadline: float | None) -> bool:
    """Whether a *deadline* is over, by the ``clock``; None never is."""
    return deadline is not None and clock() >= deadline


class NeedsAll(Exception):
    """An operation on some ranks has something to say to all of them."""


class Turn:
    """The turn of one thread, on some ranks.

    Attributes:
        ranks: those of the thread's operation; the others are not.
        lock: held as long as the turn lasts.
        lasts: whether the turn does, as far as is known: ``wait`` finds out.
    """

    def __init__(self, ranks: frozenset[int]) -> None:
        self.ranks: frozenset[int] = ranks
        self.lock: Any = threading.RLock()
        self.lasts: bool = True

    def end(self) -> None:
        """The turn has ended."""
        self.lasts = False

    def have(self, ranks: frozenset[int]) -> None:
        """Have *ranks* from now on, which nobody else has."""
        self.ranks = ranks

    def wait(self) -> None:
        """Wait until the turn has ended, or for a moment: it may have given up its ranks before."""
        held: list[bool] = []
        try:
            held.extend(map(_ACQUIRE, (self.lock,)))
        finally:
            if any(held):
                self.end()
                self.lock.release()


class Turns:
    """The turns of a session.

    Attributes:
        limit: seconds that a command of the operation that holds the lock may take, or None.
        line: the turns, in their order; also some that have ended.
    """

    def __init__(self, lock: Any, size: int, timeout: float | None) -> None:
        """*lock* is the engine's, an RLock, which whoever uses the turns holds; *timeout* is the usual
        limit."""
        self.limit = self._usual = timeout
        self.line: list[Turn] = []
        self._waited: int | None = None  # the thread that waited for all, if no turn has begun since
        self._lock = lock
        self._everyone = frozenset(range(size))

    @property
    def own(self) -> Turn | None:
        """This thread's turn; None in an operation on all ranks."""
        return next((turn for turn in self.line if _IS_OWNED(turn.lock)), None)

    @property
    def inside(self) -> bool:
        """Whether this thread is in the middle of an operation."""
        return bool(_IS_OWNED(self._lock))

    @property
    def go_on(self) -> bool:
        """Whether some turns go on."""
        return any(turn.lasts for turn in self.line)

    @property
    def alone(self) -> bool:
        """Whether no other thread's operation goes on."""
        return not any(turn.lasts and not _IS_OWNED(turn.lock) for turn in self.line)

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that this thread's operation may use."""
        own = self.own if self.line else None
        return self._everyone if own is None else own.ranks

    def owns_some(self, ranks: frozenset[int]) -> bool:
        """Whether this thread's operation is on some ranks, so that others may run beside it.

        Raises: NeedsAll if *ranks* are not among them.
        """
        own = self.own
        if own is not None and not ranks <= own.ranks:
            raise NeedsAll
        return own is not None

    def require_all(self) -> None:
        """Raises: NeedsAll in an operation on some ranks."""
        if self.ranks != self._everyone:
            raise NeedsAll

    def take(self, turn: Turn, deadline: float | None = None) -> None:
        """Wait until a turn, whose lock this thread holds, can begin, or until the *deadline*.

        The engine's lock is released meanwhile.
        """
        self._forget_ended()
        self.line.append(turn)
        while (other := self._before(turn)) is not None:
            self.released(other.wait)
            if is_past(deadline):
                return
        self._waited = None

    def wait_for_all(self, deadline: float | None = None) -> bool:
        """Wait until no turn is left, or until the *deadline*; in a turn do nothing.

        As long as the caller holds the engine's lock, none begins.  Returns whether none is left.
        """
        thread = threading.get_ident()
        if not self.line or self._waited == thread or self.own is not None:
            return True
        turn = Turn(self._everyone)
        with turn.lock:
            try:
                self.take(turn, deadline)
                if self._before(turn) is not None:
                    return False
                self._waited = thread
                return True
            finally:
                turn.end()
                self._forget_ended()

    def run(self, ranks: frozenset[int], action: Callable[[], T]) -> T:
        """Do *action* in a turn on *ranks*.

        In the middle of an operation of this thread *action* is a part of that.
        """
        if self.inside:
            return action()
        turn = Turn(ranks)
        with self._lock, turn.lock:
            try:
                self.take(turn)
                return action()
            finally:
                turn.end()

    def widening(self, action: Callable[[], T]) -> T:
        """Do *action*; if it needs all ranks, begin it anew with them.

        Before that others may run on the turn's ranks, after it not.
        """
        try:
            return action()
        except NeedsAll:
            own = self.own
            if own is None:
                raise
        ranks, turn = own.ranks, Turn(self._everyone)
        own.have(frozenset())
        with turn.lock:
            try:
                self.take(turn)
                own.have(self._everyone)
                return action()
            finally:
                own.have(ranks)
                turn.end()

    def released(self, action: Callable[[], T]) -> T:
        """Let other threads have the engine's lock while *action* runs."""
        limit = self.limit
        held: list[Any] = []
        try:
            self.limit = self._usual
            try:
                held.extend(map(_RELEASE, (self._lock,)))
                return action()
            finally:
                for state in held:
                    self._lock._acquire_restore(state)
        finally:
            self.limit = limit

    @contextmanager
    def limited(self, seconds: float | None) -> Iterator[None]:
        """In the block, which holds the lock, *seconds* are the limit, if given."""
        with self._lock:
            usual = self.limit
            try:
                self.limit = usual if seconds is None else seconds
                yield
            finally:
                self.limit = usual

    def _forget_ended(self) -> None:
        self.line = [turn for turn in self.line if turn.lasts]

    def _before(self, turn: Turn) -> Turn | None:
        """An earlier turn that this one has to wait for."""
        earlier = takewhile(lambda other: other is not turn, self.line)
        return next((o for o in earlier if o.lasts and not o.ranks.isdisjoint(turn.ranks)), None)
