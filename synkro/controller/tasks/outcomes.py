"""What becomes of tasks: their results are kept until the program takes them; failures are tried again,
or end the map.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ...errors import OutputError, UsageError, reason
from ...ipc.queue import ALONE, EACH, FAILED, TOGETHER, Dispatcher, Given
from ...packing.refused import advice_on_loading
from ...storage.checkpoint import Checkpoint
from ..engine.failures import worker_error
from .deaths import Fatal
from .feed import Feed, Item, shown
from .wishes import Wishes


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


@dataclass(eq=False, repr=False)
class Outcomes:
    """Results and failures of one map, as they come.

    A task that fails is tried again as often as is wished; then its exception ends the map, or is its
    result.

    *load* reads results that objects' pickler wrote; *read_block* notes that a block of a rank was read;
    *host_of* names its host; *remember* keeps with an error the item that it was of.

    Attributes:
        failure: what is to end the map, if something is.
        failed_at: the number of its item.
        came: how often workers have given something.
    """

    _queue: Dispatcher
    _feed: Feed
    _collected: Collected
    _wished: Wishes
    _load: Callable[..., Any]
    _read_block: Callable[[int], None]
    _host_of: Callable[[int], str]
    _remember: Callable[[BaseException, Any], None]
    failure: BaseException | None = None
    failed_at: int = 0
    came: int = 0
    _tries: dict[int, int] = field(default_factory=dict)
    """How often items that have no result yet were tried in vain, by number."""

    def tries(self, number: int) -> int:
        """How often an item that has no result was tried in vain."""
        return self._tries.get(number, 0)

    def called(self, number: int) -> str:
        """An item in a sentence: its number, and what it is, if it was not done."""
        args = self._feed.item(number)
        if args is not None and isinstance(args[0], Item):
            return repr(args[0])
        return f"item {number}" + ("" if args is None else f" ({shown(args)})")

    def forget(self) -> None:
        """The failure is told."""
        self.failure = None

    def take(self, told: bool = True) -> bool:
        """Take the results that have come; if *told*, those that workers have told of.  Returns whether
        there were some."""
        found = self._queue.collect(told)
        for run in found:
            if run.rank >= 0:
                self._read_block(run.rank)
            values, nbytes = self._unpickled(run), run.pickles.nbytes
            self.came += 1
            if values and self._feed.awaits(run.slot):
                self._keep(run.slot, run.first, values, nbytes, run.pickles.kind == FAILED)
        return bool(found)

    def _keep(self, slot: int, first: int, values: list[Any], nbytes: int, failed: bool) -> None:
        """Keep results of the batch in *slot*, from item number *first* on; or failures, which do not go
        to the checkpoint.  If that fails, it ends the map."""
        self._collected.add(first, values, nbytes)  # before all else: Ctrl-C may come
        self._feed.done(slot, first, len(values), nbytes)
        try:
            self._collected.write(first, values, failed)
        except Exception as error:
            self.fail(None, error)
        for number in self._tries and range(first, first + len(values)):
            self._tries.pop(number, None)

    def _failed(self, slot: int, number: int, made: Callable[[str], BaseException]) -> list[Any]:
        """What becomes of a task that has failed: its exception is the result, or there is none yet;
        *made* makes it from where that was."""
        tries = self._tries.pop(number, 0) + 1
        often = f", tried {tries} times" if tries > 1 else ""
        error = made(f" at {self.called(number)}{often}")
        if not hasattr(error, "item"):
            with contextlib.suppress(TypeError):  # its class has no room for it
                vars(error)["item"] = number
        if tries <= self._wished.retries and not isinstance(error, UsageError):
            self._tries[number] = tries
            self._feed.again(slot, number)
            return []
        if not self._wished.returned:
            self.fail(number, error)
            return []
        self._keep_item(number, error)
        return [error]

    def _keep_item(self, number: int, error: BaseException) -> None:
        args = self._feed.item(number)
        if args is not None:
            self._remember(error, args)

    def _unpickled(self, run: Given) -> list[Any]:
        """The results of a run: those before one that cannot be unpickled."""
        kind, parts, by_us = run.pickles
        if kind == FAILED:
            rank, failed = pickle.loads(parts[0])
            return self._failed(
                run.slot, run.first, lambda where: worker_error([failed], [rank], self._host_of, where)
            )
        found: list[Any] = []
        streams, buffers = (parts[:1], parts[1:]) if kind == ALONE else (parts, ())
        try:
            for stream in streams:
                found.append(
                    self._load(stream, buffers) if by_us else pickle.loads(stream, buffers=buffers)
                )
        except BaseException as error:
            if not isinstance(error, Exception) and threading.current_thread() is _MAIN:
                raise
            number = run.first + len(found)
            args = self._feed.item(number)
            task = args[0] if args and isinstance(args[0], Item) else f"item {number} of map()"
            what = f"the result of {task} cannot be unpickled here: {reason(error)}."
            refused = OutputError(f"{what} {advice_on_loading(error)}")
            vars(refused)["item"] = number
            if not self._wished.returned:
                self.fail(number, refused)
            elif kind != EACH:  # none of them can be
                return [refused] * run.length
            else:
                return [*found, refused, *self._unpickled(_after(run, len(found) + 1))]
        return found[0] if found and kind == TOGETHER else found

    def fail(self, number: int | None, error: BaseException) -> None:
        """Item *number* has failed, or all of the map; the first item that fails counts."""
        if self.failure is None or (number or 0) < self.failed_at:
            self.failure, self.failed_at = error, number or 0
            if number is not None:
                self._keep_item(number, error)

    def die(self, fatal: Fatal) -> None:
        """A worker has died of an item."""
        values = self._failed(fatal.slot, fatal.number, fatal.error)
        if values:
            self._keep(fatal.slot, fatal.number, values, 0, failed=True)


_MAIN = threading.main_thread()  # which Ctrl-C interrupts; in others only a result raises such


def _after(run: Given, count: int) -> Given:
    """A run of results without the first *count* of them, which are pickled each by itself."""
    pickles = run.pickles._replace(parts=run.pickles.parts[count:])
    return run._replace(first=run.first + count, length=run.length - count, pickles=pickles)
