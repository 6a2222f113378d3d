"""PyTensor's own shared variables, and the worker variables that stand for them.

What the main process puts into one (``set_value``, or a function of its own that updates it) reaches
the workers before the next call that uses it.  What a call, or a collective, makes of it is there after
it: the master rank's replica, as if the master had computed by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidValue, WorkerError
from ...values.arrays import Array
from .shared import Shared

if TYPE_CHECKING:
    from .registry import Variables


class Pair:
    """A PyTensor shared variable, its worker variable, and what both were when they last agreed.

    Attributes:
        theirs, ours: the two.
        value: a copy of their common value.
        held: what held that value in the main process: ``set_value`` puts another array there.
        doubtful: whether a call has begun, and perhaps failed, that changes the replicas.
    """

    def __init__(self, theirs: Any, ours: Shared, value: Array) -> None:
        self.theirs = weakref.ref(theirs)
        self.ours = ours
        self.value = value
        self.held = theirs.get_value(borrow=True)
        self.doubtful = False

    def was_set(self, held: Any) -> bool:
        """Whether the main process has put a new value there, *held* by this array now."""
        if self.doubtful and held is not self.held:
            return True
        return not _same(np.asarray(held), self.value)


class Linked:
    """The PyTensor shared variables of a session.  Its methods are called under the engine's lock."""

    def __init__(self, home: Variables) -> None:
        self._home = home
        self._pairs: dict[int, Pair] = {}  # by the id of theirs
        self._by_number: dict[int, Pair] = {}

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a PyTensor shared variable; the same one always."""
        pair = self._pairs.get(id(theirs))
        if pair is None or pair.theirs() is not theirs:
            value = np.array(theirs.get_value(borrow=True))
            pair = Pair(theirs, self._home.shared(value), value)
            self._pairs[id(theirs)] = pair
            self._by_number[pair.ours.number] = pair
            weakref.finalize(theirs, self._forget, id(theirs), pair.ours.number)
        return pair.ours

    def _forget(self, key: int, number: int) -> None:
        self._pairs.pop(key, None)
        self._by_number.pop(number, None)

    def push(self, variables: Iterable[Shared]) -> None:
        """Bring what the main process has changed to the workers.

        Where a call has failed that was to change the replicas, and nothing was set since, the master
        rank's replica comes here instead.
        """
        unsettled = []
        for pair, theirs in self._found(variables):
            held = theirs.get_value(borrow=True)
            if pair.was_set(held):
                pair.doubtful = True  # until the workers have it
                self._home.collectives.send([pair.ours], [np.asarray(held)])
                pair.value, pair.held, pair.doubtful = np.array(held), held, False
            elif pair.doubtful:
                unsettled.append(pair.ours)
        self.pull(unsettled)

    def doubt(self, variables: Iterable[Shared]) -> None:
        """A call begins that changes the replicas."""
        for pair, _ in self._found(variables):
            pair.doubtful = True

    @contextmanager
    def changing(self, variables: Sequence[Shared]) -> Iterator[None]:
        """The block changes the replicas; where it succeeds, they are in the main process after it."""
        self.doubt(variables)
        yield
        self.pull(variables)

    def pull(self, variables: Iterable[Shared]) -> None:
        """Bring the master rank's replicas to the main process."""
        found = list(self._found(variables))
        if not found:
            return
        collectives = self._home.collectives
        values = collectives.fetch([pair.ours for pair, _ in found], (collectives.master_rank,))
        for (pair, theirs), value in zip(found, values, strict=True):
            copy = np.array(value)
            try:
                theirs.set_value(copy, borrow=True)
            except TypeError as error:
                raise InvalidValue(
                    f"the shared variable {theirs} cannot hold what its replica on the master rank "
                    f"has become, of shape {copy.shape}: {str(error).splitlines()[-1]}"
                ) from None
            pair.value, pair.held, pair.doubtful = (
                np.asarray(value),
                theirs.get_value(borrow=True),
                False,
            )

    def _found(self, variables: Iterable[Shared]) -> Iterator[tuple[Pair, Any]]:
        """The pairs of *variables* that are PyTensor's."""
        for variable in variables:
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

    def __enter__(self) -> None:
        self._linked.push(self._used)
        self._linked.doubt(self._changed)

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is None or isinstance(error, WorkerError):  # what the ranks have done by then counts
            self._linked.pull(self._changed)


def _same(one: Array, other: Array) -> bool:
    """Whether they are equal to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return np.array_equal(_bits(one), _bits(other))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
