"""``Map``: one map, from its items to its results in order.

::

    read items ─▶ offer them ─▶ attend: the workers compute ─▶ collect results ─▶ yield in order
        ▲                                                          │
        └──────────────── while half of them are taken ────────────┘

All of it is one command to the workers.  Where the program makes another call meanwhile (between two
results of ``imap``), the command is *paused*: items that nobody has taken are withdrawn, the workers
finish what they have begun, and the map goes on with a command of its own.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Sequence
from typing import Any

from ...errors import InternalError, OutputError, UsageError
from ...ipc.queue import SEVERAL, UNDONE, Dispatcher
from ...messages import Failed, Phase
from ...packing.refused import advice_on_loading
from ..calls.carried import Carried
from ..calls.distribution import Functions
from ..calls.planner import Planned
from ..engine.engine import Engine, State
from ..engine.failures import first_failure, worker_error
from ..progress import Progress
from .feed import Feed, shown

_SMALL = 16  # bytes of a small result
_HELD = 1 << 26  # bytes of results that are kept for the program, beside the next one
_WHILE = 1e-3  # seconds between two looks whether the workers need items, while results are there


class Map:
    """One map."""

    def __init__(
        self,
        home: Functions,
        functions: tuple[Carried, Carried | None],
        queue: Dispatcher,
        planned: Planned,
        payload: bytes,
        feed: Feed,
        ordered: bool,
        limit: float | None,
        progress: Progress | None,
    ) -> None:
        """*payload* is the command for *planned*, a call of the first of *functions*, which are kept.

        If *ordered*, each result is wanted as soon as those before it are there, else all at the end.
        *limit* is in seconds: for each, or for all."""
        self._engine: Engine = home.engine
        self._load = home.objects.load
        self._function = functions[0]
        self._functions = functions  # which live on the workers as long as this
        self._queue = queue
        self._planned = planned
        self._payload = payload
        self._feed = feed
        self._ordered = ordered
        self._limit = limit
        self._progress = progress
        self._results: dict[int, Any] = {}
        self._nbytes: dict[int, int] = {}  # of results that wait in their order
        self._held = 0  # all these bytes
        self._looked = 0.0  # when results were looked for last
        self._next = 0  # the number of the next result
        self._open = False  # whether the workers do the command
        self._ending = False  # whether they are to end it
        self._lost = False  # whether it was given up
        self._failure: Exception | None = None

    def read_by(self, reader: object) -> None:
        """The results are wanted as long as there is *reader*."""
        self._feed.want(reader)

    def all(self) -> list[Any]:
        """All results.  Raises: as ``next``."""
        deadline = self._deadline()
        with self._engine.lock, self._tracing():
            self._engine.turns.land()
            while self._goes_on():
                self._step(deadline)
        return [self._results.pop(number) for number in range(self._feed.count)]

    def next(self) -> Any:
        """The next result.

        Raises: StopIteration if there are no more; WorkerError for a task that failed, when the others
        have ended; what the iterables raise; CallTimeout; WorkerDied; UsageError after an interrupt.
        """
        self._check_not_lost()
        deadline = self._deadline()
        while not self._is_next_there():
            if not self._goes_on():
                raise StopIteration
            self._step(deadline)
        if self._open and time.perf_counter() - self._looked > _WHILE:
            self._step(None)
        self._held -= self._nbytes.pop(self._next, 0)
        self._next += 1
        return self._results.pop(self._next - 1)

    def _check_not_lost(self) -> None:
        if self._lost:
            self._engine.require_ready()
            raise UsageError(
                "this imap() was interrupted, and its items with it: call imap() again, with the items "
                "that are left."
            )

    def interrupt(self) -> None:
        """The program's reading was interrupted: it cannot know what it has."""
        self.leave()
        self._lost = True

    def _deadline(self) -> float | None:
        return None if self._limit is None else time.monotonic() + self._limit

    def _goes_on(self) -> bool:
        """Whether there is something to wait for.  Raises: what has ended the map, once."""
        error = None if self._open else self._failure
        if error is None and self._feed.is_done and not self._open:
            error = self._feed.error
            self._show()
            if error is None:
                return False
        if error is not None:
            self._failure = None
            self._feed.drop()
            raise error
        return True

    def _step(self, deadline: float | None) -> None:
        """Go on until there is something to do; if the next result is there, do not wait."""
        with self._engine.lock, self._tracing():
            self._engine.turns.land()
            try:
                if self._is_next_there():
                    self._feed_them()
                else:
                    self._advance(deadline)
            except BaseException as error:
                if self._open:
                    self._engine.abandon()
                elif not isinstance(error, Exception):  # it came while items were read, in a pause
                    self._lost = True
                raise

    def _is_next_there(self) -> bool:
        return self._ordered and self._next in self._results

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def _advance(self, deadline: float | None) -> None:
        """Feed the workers, and collect results until there is something to do."""
        engine, feed = self._engine, self._feed
        engine.require_ready()
        self._check_not_lost()
        if not self._open:
            self._begin()
        self._feed_them()
        if not self._open:
            return
        if not self._is_due():
            engine.channel.expect(self._next if self._ordered else None, feed.threshold(self._held))
            engine.attend(self._is_due, deadline, self._show)
            engine.channel.expect()
        self._show()
        if not engine.everyone.unanswered():
            self._finish()
        elif deadline is not None and time.monotonic() >= deadline and not self._is_next_there():
            engine.abandon(self._limit)

    def _feed_them(self) -> None:
        """Publish items, if there are too few; or end the command, if there are no more."""
        self._engine.require_ready()
        if not self._open:  # another thread's call has paused it
            return
        self._collect_some()
        if self._feed.due(self._held) and not self._ending:
            self._feed.fill(self._held, self._is_due)  # which may call functions of the program's
        if self._open and not self._ending:
            failed = len(self._engine.everyone.unanswered()) < self._engine.size
            failed = failed or self._failure is not None
            if failed or self._feed.is_over:
                self._end(at_once=failed)

    def _begin(self) -> None:
        engine = self._engine
        if self._feed.is_lost:
            raise InternalError("items of a map were taken and have no result.")
        engine.rouse()
        engine.settle()
        self._feed.open()
        engine.open(self._payload, self._planned.segments, self)
        self._open, self._ending = True, False

    def _end(self, at_once: bool) -> None:
        """Have the workers end their command: *at_once*, or when they have taken all items."""
        self._ending = True
        if at_once:
            self._feed.withdraw()
        else:
            self._feed.close()

    def _is_due(self) -> bool:
        """Whether there is something to do, after new results were collected."""
        if not self._open:
            return False
        self._collect_some()
        unanswered = len(self._engine.everyone.unanswered())
        if unanswered == 0 or (unanswered < self._engine.size and not self._ending):
            return True
        if not self._ending and (self._failure is not None or self._feed.is_over):
            return True
        return self._is_next_there() or (not self._ending and self._feed.due(self._held))

    def _collect_some(self) -> None:
        """Take the results that have come, unless the program has enough: the workers wait with more."""
        self._looked = time.perf_counter()
        if self._held <= _HELD or not self._is_next_there():
            self._collect()

    def _collect(self) -> None:
        """Take the results that have come."""
        self._engine.require_ready()  # a signal handler may have closed the session
        for number, rank, (stream, buffers, own) in self._queue.collect():
            if rank >= 0:
                self._engine.channel.read_block(rank)
            if number == UNDONE:
                self._feed.put_again(pickle.loads(stream))
                continue
            if number == SEVERAL:
                numbers, values = pickle.loads(stream)
                if self._ordered:
                    for each, value in zip(numbers, values, strict=True):
                        self._take(each, value, _SMALL)
                elif self._feed.all_done(numbers):
                    self._results.update(zip(numbers, values, strict=True))
                continue
            nbytes = len(stream) + sum(map(len, buffers)) if buffers else len(stream)
            try:
                value = self._load(stream, buffers) if own else pickle.loads(stream, buffers=buffers)
            except Exception as error:
                self._failure = self._failure or OutputError(
                    f"the result of item {number} of map() cannot be unpickled here: "
                    f"{type(error).__name__}: {str(error).rstrip('.')}. {advice_on_loading(error)}"
                )
                continue
            self._take(number, value, nbytes)

    def _take(self, number: int, value: Any, nbytes: int) -> None:
        """Take a result, unless nobody waits for it any more."""
        if self._feed.done(number, nbytes):
            self._results[number] = value
            if self._ordered:
                self._nbytes[number] = nbytes
                self._held += nbytes

    def _finish(self) -> None:
        """All ranks have answered."""
        self._feed.withdraw()  # what they have left, if they ended by themselves
        self._collect()
        self._open = False
        replies = self._engine.finish()
        if any(isinstance(reply, Failed) for reply in replies):
            ranks = self._engine.everyone.ranks
            item = first_failure(replies, ranks)[1].item
            where = "" if item is None else f" at {self._item(item)}"
            self._failure = worker_error(replies, ranks, self._engine.host_of, where)

    def _tracing(self) -> contextlib.AbstractContextManager[None]:
        """Record for a trace that this is a call, unless it is in one."""
        trace = self._engine.trace
        if trace is None or trace.within:
            return contextlib.nullcontext()
        return trace.call(self._function.name, self._function.number)

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.reach(self._feed.count)

    # ── for the engine ───────────────────────────────────────────────────────────────────────────

    def pause(self, limit: float | None) -> None:
        try:
            self._pause(limit)
        except BaseException:
            if self._open:
                self._engine.abandon()
            raise

    def _pause(self, limit: float | None) -> None:
        deadline = None if limit is None else time.monotonic() + limit
        self._end(at_once=True)
        if self._feed.is_left:
            self._feed.drop()
        while self._engine.everyone.unanswered():
            self._engine.attend(self._is_paused, deadline, None)
            if (
                deadline is not None
                and time.monotonic() >= deadline
                and self._engine.everyone.unanswered()
            ):
                self._engine.abandon(limit)
        self._finish()

    def doing(self, ranks: Sequence[int]) -> str:
        places = dict(zip(ranks, map(self._engine.channel.whereabouts, ranks), strict=True))
        items = [self._item(at) for phase, at in places.values() if phase == Phase.TASK]
        at = f", at {' and '.join(items)}" if items else ""
        return f"in a map of the function {self._function.name!r}{at}, "

    def _item(self, number: int) -> str:
        """An item in a sentence: its number, and what it is, if it was not done."""
        args = self._feed.waiting.get(number)
        return f"item {number}" + (f" ({shown(args[0])})" if args else "")

    def lose(self) -> None:
        self._open, self._lost = False, True
        self._queue.stop()

    def _is_paused(self) -> bool:
        self._collect()
        return not self._engine.everyone.unanswered()

    def leave(self) -> None:
        """Nobody wants more results: let the tasks that run end, and no other begin."""
        with self._engine.lock:
            self._feed.drop()
            if self._open and self._engine.state is State.READY:
                self._end(at_once=True)
