"""PyTensor's own shared variables, and the worker variables that stand for them.

What the main process puts into one (``set_value``, or a function of its own that updates it) reaches
the workers before the next call that uses it.  What a call, or a collective, makes of it is there after
it: the master rank's replica, as if the master had computed by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from .arrays import Array
from .shared import Shared


class Home(Protocol):
    """What this needs of the ``Variables`` of the session."""

    master_rank: int

    def shared(self, value: Any, name: str | None) -> Shared: ...

    def get_value(self, rank: Any, variables: Any) -> Any: ...

    def broadcast(self, variables: Any, values: Any = None) -> None: ...


class Pair:
    """A PyTensor shared variable, its worker variable, and what both were when they last agreed."""

    def __init__(self, theirs: Any, ours: Shared, value: Array) -> None:
        self.theirs = weakref.ref(theirs)
        self.ours = ours
        self.value = value


class Linked:
    """The PyTensor shared variables of a session."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._pairs: dict[int, Pair] = {}  # by the id of theirs
        self._by_number: dict[int, Pair] = {}
        self._pushing = False

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a PyTensor shared variable; the same one always."""
        pair = self._pairs.get(id(theirs))
        if pair is None or pair.theirs() is not theirs:
            value = np.array(theirs.get_value(borrow=True))
            pair = Pair(theirs, self._home.shared(value, None), value)
            self._pairs[id(theirs)] = pair
            self._by_number[pair.ours.number] = pair
            weakref.finalize(theirs, self._forget, id(theirs), pair.ours.number)
        return pair.ours

    def _forget(self, key: int, number: int) -> None:
        self._pairs.pop(key, None)
        self._by_number.pop(number, None)

    def push(self, variables: Iterable[Shared]) -> None:
        """Bring what the main process has changed to the workers."""
        for pair, theirs in self._found(variables):
            value = np.asarray(theirs.get_value(borrow=True))
            if _same(value, pair.value):
                continue
            self._pushing = True
            try:
                self._home.broadcast(pair.ours, value)
            finally:
                self._pushing = False
            pair.value = value.copy()  # not before the workers have it

    def pull(self, variables: Iterable[Shared]) -> None:
        """Bring the master rank's replicas to the main process."""
        found = list(self._found(variables))
        if not found:
            return
        values = self._home.get_value(self._home.master_rank, [pair.ours for pair, _ in found])
        for (pair, theirs), value in zip(found, values, strict=True):
            pair.value = np.asarray(value)
            theirs.set_value(pair.value.copy(), borrow=True)

    def _found(self, variables: Iterable[Shared]) -> Iterable[tuple[Pair, Any]]:
        """The pairs of *variables*; none while a push uses the collectives itself."""
        for variable in () if self._pushing else variables:
            pair = self._by_number.get(variable.number)
            theirs = None if pair is None else pair.theirs()
            if pair is not None and theirs is not None:
                yield pair, theirs


class Bridge:
    """The shared variables of a graph: brought to the workers before a call, and back after it."""

    def __init__(self, linked: Linked, used: Iterable[Shared], changed: Iterable[Shared]) -> None:
        self._linked = linked
        self._used = tuple(used)
        self._changed = tuple(changed)

    def extend(self, used: Iterable[Any], changed: Iterable[Any]) -> None:
        """More variables that a call uses, or changes as well."""
        self._changed = (*self._changed, *changed)
        self._used = tuple(dict.fromkeys((*self._used, *used, *self._changed)))

    def before(self) -> None:
        self._linked.push(self._used)

    def after(self) -> None:
        self._linked.pull(self._changed)


def _same(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
