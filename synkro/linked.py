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


class Link:
    """A PyTensor shared variable, its worker variable, and what both were when they last agreed."""

    def __init__(self, theirs: Any, ours: Shared, value: Array) -> None:
        self.theirs = weakref.ref(theirs)
        self.ours = ours
        self.value = value


class Linked:
    """The PyTensor shared variables of a session."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._links: dict[int, Link] = {}  # by the id of theirs
        self._by_number: dict[int, Link] = {}
        self._pushing = False

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a PyTensor shared variable; the same one always."""
        link = self._links.get(id(theirs))
        if link is None or link.theirs() is not theirs:
            value = np.array(theirs.get_value(borrow=True))
            link = Link(theirs, self._home.shared(value, None), value)
            self._links[id(theirs)] = link
            self._by_number[link.ours.number] = link
            weakref.finalize(theirs, self._forget, id(theirs), link.ours.number)
        return link.ours

    def _forget(self, key: int, number: int) -> None:
        self._links.pop(key, None)
        self._by_number.pop(number, None)

    def push(self, variables: Iterable[Shared]) -> None:
        """Bring what the main process has changed to the workers."""
        for link, theirs in self._found(variables):
            value = np.asarray(theirs.get_value(borrow=True))
            if value.shape != link.value.shape or not _same(value, link.value):
                link.value = value.copy()
                self._pushing = True
                try:
                    self._home.broadcast(link.ours, value)
                finally:
                    self._pushing = False

    def pull(self, variables: Iterable[Shared]) -> None:
        """Bring the master rank's replicas to the main process."""
        for link, theirs in () if self._pushing else self._found(variables):
            link.value = np.asarray(self._home.get_value(self._home.master_rank, link.ours))
            theirs.set_value(link.value.copy(), borrow=True)

    def _found(self, variables: Iterable[Shared]) -> Iterable[tuple[Link, Any]]:
        for variable in variables:
            link = self._by_number.get(variable.number)
            theirs = None if link is None else link.theirs()
            if link is not None and theirs is not None:
                yield link, theirs


class Bridge:
    """The shared variables of a graph: brought to the workers before a call, and back after it."""

    def __init__(self, linked: Linked, used: Iterable[Shared], changed: Iterable[Shared]) -> None:
        self._linked = linked
        self._used = tuple(used)
        self._changed = tuple(changed)

    def before(self) -> None:
        self._linked.push(self._used)

    def after(self) -> None:
        self._linked.pull(self._changed)


def _same(one: Array, other: Array) -> bool:
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind in "fc"))
