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

import pickle
import time
from collections.abc import Iterator
from typing import Any

from ...errors import OutputError, SynkroError, UsageError
from ...ipc.queue import Dispatcher
from ...messages import Failed
from ..calls.carried import Carried
from ..calls.distribution import Functions
from ..calls.planner import Planned
from ..engine.engine import Engine, State
from ..engine.failures import first_failure, worker_error
from ..progress import Progress
from .feed import Feed, shown


class Map:
    """One map."""

    def __init__(
        self,
        home: Functions,
        function: Carried,
        queue: Dispatcher,
        planned: Planned,
        payload: bytes,
        feed: Feed,
        ordered: bool,
        progress: Progress | None,
    ) -> None:
        """*payload* is the command for *planned*, a call of *function*.  If *ordered*, each result is
        wanted as soon as those before it are there, else all at the end."""
        self._engine: Engine = home.engine
        self._load = home.objects.load
        self._function = function  # which lives on the workers as long as this
        self._queue = queue
        self._planned = planned
        self._payload = payload
        self._feed = feed
        self._ordered = ordered
        self._progress = progress
        self._results: dict[int, Any] = {}
        self._nbytes: dict[int, int] = {}  # of results that wait in their order
        self._next = 0  # the number of the next result
        self._begun = False
        self._open = False  # whether the workers do the command
        self._ending = False  # whether they are to end it
        self._lost = False  # whether it was given up
        self._failure: SynkroError | None = None

    def results(self, limit: float | None) -> Iterator[Any]:
        """The results in order; *limit* is in seconds: for each if *ordered*, else for all.

        Raises: WorkerError for a task that failed, when the others have ended; what the iterables
        raise; CallTimeout; WorkerDied; UsageError after an interrupted call.
        """
        deadline = None if limit is None else time.monotonic() + limit
        try:
            while True:
                while self._is_next_there():
                    self._nbytes.pop(self._next, None)
                    value = self._results.pop(self._next)
                    self._next += 1
                    yield value
                    if self._ordered and limit is not None:
                        deadline = time.monotonic() + limit
                if self._failure is not None and not self._open:
                    raise self._failure
                if self._is_over():
                    break
                with self._engine.lock:
                    self._advance(deadline, limit)
            if self._feed.error is not None:
                raise self._feed.error
        except GeneratorExit:
            with self._engine.lock:
                self._leave()
            raise
        except BaseException:
            if self._open:
                self._engine.abandon()
            raise

    def _is_next_there(self) -> bool:
        """Whether the next result can be given: if they are not ordered, when all are there."""
        return self._next in self._results and (self._ordered or self._is_over())

    def _is_over(self) -> bool:
        return self._feed.exhausted and not self._feed.waiting and not self._open

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def _advance(self, deadline: float | None, limit: float | None) -> None:
        """Feed the workers, and collect results until there is something to do."""
        engine, feed = self._engine, self._feed
        engine.require_ready()
        if self._lost:
            raise UsageError(
                "this imap() was interrupted, and its items with it: call imap() again, with the items "
                "that are left."
            )
        held = self._bytes_held()
        if feed.due(held) and self._failure is None and not self._ending:
            feed.fill(held, self._is_next_there)  # which may call functions of the program's
        if self._is_over() or (self._failure is not None and not self._open):
            return
        if not self._open:
            self._begin()
        unanswered = len(engine.channel.unanswered())
        if not self._ending and (feed.exhausted or unanswered < engine.size):
            if unanswered < engine.size:  # a task has failed
                feed.withdraw()
            self._end(unanswered)
        self._collect()
        if not self._is_due():
            engine.channel.expect(
                self._next if self._ordered else None, feed.threshold(self._bytes_held())
            )
            engine.attend(self._is_due, deadline, self._show)
        self._show()
        if not engine.channel.unanswered():
            self._finish()
        elif deadline is not None and time.monotonic() >= deadline and not self._is_next_there():
            engine.abandon(limit)

    def _begin(self) -> None:
        engine = self._engine
        engine.rouse()
        engine.settle()
        if not self._begun:
            self._queue.clear()
            self._begun = True
        self._feed.offer_again()
        engine.open(self._payload, self._planned.segments, self)
        self._open, self._ending = True, False

    def _end(self, workers: int) -> None:
        """Have so many workers end their command."""
        self._ending = True
        self._queue.end(workers)

    def _is_due(self) -> bool:
        """Whether there is something to do, after new results were collected."""
        self._collect()
        unanswered = len(self._engine.channel.unanswered())
        if unanswered == 0 or (unanswered < self._engine.size and not self._ending):
            return True
        return self._is_next_there() or (not self._ending and self._feed.due(self._bytes_held()))

    def _bytes_held(self) -> int:
        return sum(self._nbytes.values()) if self._ordered else 0

    def _collect(self) -> None:
        """Take the results that have come."""
        for number, rank, (stream, buffers, own) in self._queue.collect():
            if rank >= 0:
                self._engine.channel.read_block(rank)
            nbytes = len(stream) + sum(map(len, buffers))
            if not self._feed.done(number, nbytes):
                continue
            try:
                value = (self._load if own else _load)(stream, buffers)
            except Exception as error:
                raise OutputError(
                    f"the result of item {number} of map() cannot be unpickled here: "
                    f"{type(error).__name__}: {error}"
                ) from error
            self._results[number] = value
            if self._ordered:
                self._nbytes[number] = nbytes

    def _finish(self) -> None:
        """All ranks have answered."""
        self._collect()
        self._open = False
        self._feed.withdraw()  # what those that failed have left
        replies = self._engine.finish()
        if any(isinstance(reply, Failed) for reply in replies):
            item = first_failure(replies)[1].item
            where = ""
            if item is not None:
                args = self._feed.waiting.get(item)
                where = f" at item {item}" + (f", {shown(args[0])}" if args else "")
            self._failure = worker_error(replies, where)

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.reach(self._feed.read - len(self._feed.waiting))

    # ── for the engine ───────────────────────────────────────────────────────────────────────────

    def pause(self, limit: float | None) -> None:
        deadline = None if limit is None else time.monotonic() + limit
        self._withdraw()
        while self._engine.channel.unanswered():
            self._engine.attend(self._is_paused, deadline, None)
            if (
                deadline is not None
                and time.monotonic() >= deadline
                and self._engine.channel.unanswered()
            ):
                self._engine.abandon(limit)
        self._finish()

    def lose(self) -> None:
        self._open, self._lost = False, True

    def _withdraw(self) -> None:
        if not self._ending:
            self._feed.withdraw()
            self._end(len(self._engine.channel.unanswered()))

    def _is_paused(self) -> bool:
        self._collect()
        return not self._engine.channel.unanswered()

    def _leave(self) -> None:
        """Nobody wants more results: let the tasks that run end, and no other begin."""
        self._feed.drop()
        if self._open and self._engine.state is State.READY:
            self._withdraw()


def _load(stream: bytes, buffers: Any) -> Any:
    return pickle.loads(stream, buffers=buffers)
