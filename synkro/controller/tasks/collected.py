"""The results of a map that have come, until the program takes them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any

from ...errors import OutputError
from ...storage.checkpoint import Checkpoint


class ResultOrder(Enum):
    """In which order a program wants results."""

    AT_ONCE = "all together, at the end"
    KEPT = "each as soon as those before it are there"
    ANY = "each as soon as it is there"


class Collected:
    """Results in runs: of items that follow each other.

    Attributes:
        order: in which they are wanted.
        held: their bytes, if the program takes one after the other.
        taken: the number of the item whose result was taken last.
    """

    def __init__(self, order: ResultOrder, checkpoint: Checkpoint | None) -> None:
        """Begin with no result; each is written to the *checkpoint*, too, if there is one."""
        self.order = order
        self.held: int = 0
        self.taken: int = -1
        self._checkpoint = checkpoint
        self._runs: dict[int, tuple[list[Any], int]] = {}  # with their bytes, by the first item's number
        self._values: deque[Any] = deque()  # of the run that the program reads
        self._first = 0  # the number of the first of these
        self._next = 0  # how many the program has got

    def add(self, first: int, values: list[Any], nbytes: int) -> None:
        """Keep *values*, of so many bytes, the results of items from number *first* on."""
        self._runs[first] = values, nbytes
        if self.order is not ResultOrder.AT_ONCE:
            self.held += nbytes

    def write(self, first: int, values: list[Any], failed: bool) -> None:
        """Write *values* to the checkpoint, if there is one, and if they are no failure.

        Raises: as ``Checkpoint.add``.
        """
        if self._checkpoint is None:
            return
        there = (not failed and not isinstance(value, OutputError) for value in values)
        self._checkpoint.add(zip(range(first, first + len(values)), values, there, strict=True))

    @property
    def awaited(self) -> int | None:
        """The number of the next result; None if any will do."""
        return self._next if self.order is ResultOrder.KEPT else None

    @property
    def is_next_there(self) -> bool:
        """Whether the program can take a result."""
        if self.order is ResultOrder.AT_ONCE:
            return False
        there = self._next in self._runs if self.order is ResultOrder.KEPT else bool(self._runs)
        return there or bool(self._values)

    def take(self) -> Any:
        """The next result, which is there."""
        if not self._values:
            self._first = self._next if self.order is ResultOrder.KEPT else next(iter(self._runs))
            values, nbytes = self._runs.pop(self._first)
            self.held -= nbytes
            self._values.extend(values)
        self.taken = self._first
        self._next += 1
        self._first += 1
        return self._values.popleft()

    def all(self, count: int) -> list[Any]:
        """The results of *count* items, which are there."""
        found: list[Any] = []
        while len(found) < count:
            found += self._runs.pop(len(found))[0]
        return found

    def end(self) -> None:
        """No more will come."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None:
            checkpoint.close()

    def tell(self, error: BaseException, pending: Iterable[int]) -> None:
        """Give *error*, which ends the map, the results that the program has not got; *pending* are the
        numbers of all other items."""
        if self._values:
            self._runs[self._first] = [*self._values], 0
            self._values.clear()
        runs = sorted(self._runs.items())
        found = {first + i: value for first, (values, _) in runs for i, value in enumerate(values)}
        got = self._next if self.order is ResultOrder.KEPT else 0
        left = [number for number in pending if number not in found and number >= got]
        vars(error).update(results=[*found.values()], finished=[*found], pending=left)
        self.end()
