"""What the collectives of a call have given to this rank: a replay in the main program gets it again."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import ReplayEnded
from ..packing.scene import Result
from ..values.arrays import Array
from ..values.variable import Variable

_SMALL = 1 << 12  # bytes of a result that is kept
_MOST = 256  # results of a call that are kept


class _InVariable(NamedTuple):
    """Stands for a variable that has become this *array*."""

    array: Array


class Recorded:
    """The results of the collectives of one call, in their order.

    Attributes:
        results: those that were not given once more.
        gives: whether a replay gets them.
    """

    def __init__(self) -> None:
        self.results: deque[Result] = deque()
        self.gives: bool = False

    def clear(self) -> None:
        """A call begins."""
        self.results.clear()

    @contextlib.contextmanager
    def giving(self, results: Iterable[Result]) -> Iterator[None]:
        """A block in which collectives give these *results* once more."""
        self.results, self.gives = deque(results), True
        try:
            yield
        finally:
            self.results, self.gives = deque(), False

    def note(self, name: str, value: Any) -> None:
        """A collective has given a *value*."""
        if len(self.results) < _MOST:
            try:
                self.results.append(Result(name, True, _copied(value)))
            except TypeError:
                self.results.append(Result(name, False, None))

    def next(self, name: str, args: tuple[Any, ...]) -> Any:
        """What the collective has given that comes now, to *args*.

        Raises: ReplayEnded where that is not known.
        """
        if not self.results:
            raise ReplayEnded(
                f"the replay ends at {name}(): the run that failed came no further, or made more "
                f"collectives than are kept, and no other rank is here to do it."
            )
        found = self.results.popleft()
        if found.name != name:
            raise ReplayEnded(
                f"the replay ends at {name}(): the run that failed did {found.name}() here, so this one "
                f"has gone another way."
            )
        if not found.kept:
            raise ReplayEnded(
                f"the replay ends at {name}(): of its result, which other ranks had a part in, nothing "
                f"was kept, as it is no small array or number."
            )
        if isinstance(found.value, _InVariable):
            variable = args[0]
            variable.value = found.value.array
            return variable
        return found.value


def _copied(value: Any) -> Any:
    """A copy of a small *value*.  Raises: TypeError for others."""
    kind = type(value)
    if kind is np.ndarray and value.nbytes <= _SMALL and not value.dtype.hasobject:
        return value.copy()
    if value is None or kind in (bool, int, float, complex) or isinstance(value, np.generic):
        return value
    if kind in (tuple, list):
        return kind(map(_copied, value))
    if kind is dict:
        return {key: _copied(each) for key, each in value.items()}
    if isinstance(value, Variable):
        return _InVariable(_copied(value.value))
    raise TypeError(kind)
