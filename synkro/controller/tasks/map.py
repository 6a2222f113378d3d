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

import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...errors import CallTimeout, InternalError, UsageError, WorkerDied
from ...ipc.channel import OnTick
from ...ipc.queue import Dispatcher
from ...ipc.waiting import Condition, Deadline, clock
from ...messages import Failed, Phase, Work
from ...packing.pickles import dumped
from ..calls.distribution import SentFunction
from ..calls.planner import Planned
from ..engine.engine import Engine, State
from ..engine.failures import first_failure, worker_error
from ..engine.nesting import operation
from ..engine.turns import is_past
from ..objects.values import SharedByTasks
from ..progress import Progress
from .deaths import Deaths
from .feed import Feed
from .outcomes import Collected, Outcomes, ResultOrder
from .wishes import Wishes

_HELD = 1 << 26  # bytes of results that are kept for the program, beside the next one
_WHILE = 1e-3  # seconds between two looks whether the workers need items, while results are there


@dataclass(eq=False)
class Map:
    """One map.

    *work* is the command for *planned*, a call of the *function*; this and the *last* one live on the
    workers as long as the map.  *shared* is what its tasks share.

    *wished* has the limit, for each result, or for all if they are wanted at once.  A task that fails is
    tried again as often as it says; then its exception ends the map, or is its result.
    """

    _engine: Engine
    _function: SentFunction
    _last: SentFunction | None
    _queue: Dispatcher
    _planned: Planned
    _work: Work
    _shared: SharedByTasks
    _feed: Feed
    _collected: Collected
    _outcomes: Outcomes
    _wished: Wishes
    _deaths: Deaths
    _progress: Progress | None
    _pending: Sequence[int] = ()  # the numbers of items without a result, when one had failed
    _looked: float = 0.0  # when results were looked for last
    _until: float | None = None  # when a pause for items of its own has to be over
    _open: bool = False  # whether the workers do the command
    _ending: bool = False  # whether they are to end it
    _lost: bool = False  # whether it was given up
    _payload: bytes = b""  # the command that is open

    @property
    def is_over(self) -> bool:
        """Whether no task runs any more, and none will."""
        return self._feed.is_done and not self._open

    @property
    def taken(self) -> int:
        """The number of the item whose result ``next`` returned last."""
        return self._collected.taken

    def read_by(self, reader: object) -> None:
        """The results are wanted as long as there is *reader*."""
        self._feed.want(reader)

    def all(self) -> list[Any]:
        """All results.  Raises: as ``next``."""
        deadline = self._deadline()
        try:
            with self._engine.lock, self._engine.tracing(self._function.name, self._function.number):
                self._engine.turns.wait_for_all()
                while self._goes_on():
                    self._step(deadline)
            self._collected.end()
        except BaseException as error:
            self._tell(error)
            raise
        return self._collected.all(self._feed.count)

    def next(self) -> Any:
        """The next result.

        Raises: StopIteration if there are no more; WorkerError for a task that failed, when the others
        have ended; what the iterables raise; CallTimeout; WorkerDied; UsageError after an interrupt.
        """
        self._check_not_lost()
        deadline = self._deadline()
        try:
            while not self._collected.is_next_there:
                if not self._goes_on():
                    raise StopIteration
                self._step(deadline)
            if self._open and time.perf_counter() - self._looked > _WHILE:
                self._step(None)
        except StopIteration:
            self._collected.end()
            raise
        except BaseException as error:
            self._tell(error)
            raise
        return self._collected.take()

    def _tell(self, error: BaseException) -> None:
        self._deaths.tell(error)
        self._collected.tell(error, self._pending or self._feed.pending())

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
        return None if self._wished.limit is None else clock() + self._wished.limit

    def _goes_on(self) -> bool:
        """Whether there is something to wait for.  Raises: what has ended the map, once."""
        error = None if self._open or self._feed.waiting else self._outcomes.failure
        if error is None and self._feed.is_done and not self._open:
            error = self._feed.error
            self._show()
            if error is None:
                return False
        if error is not None:
            self._outcomes.forget()
            self._pending = self._pending or self._feed.pending()
            self._feed.drop()
            raise error
        return True

    def _step(self, deadline: Deadline) -> None:
        """Go on until there is something to do; if the next result is there, do not wait."""
        with self._engine.lock, self._engine.tracing(self._function.name, self._function.number):
            self._engine.turns.wait_for_all()
            try:
                if self._collected.is_next_there:
                    self._feed_them()
                else:
                    self._advance(deadline)
            except BaseException as error:
                if self._open:
                    self._engine.abandon()
                elif not isinstance(error, Exception):  # it came while items were read, in a pause
                    self._lost = True
                raise

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def _advance(self, deadline: Deadline) -> None:
        """Feed the workers, and collect results until there is something to do."""
        engine, feed = self._engine, self._feed
        engine.require_ready()
        self._check_not_lost()
        with engine.turns.limited(self._wished.limit):
            self._until = deadline
            try:
                if not self._open:
                    self._begin()
                self._feed_them()
            finally:
                self._until = None
        if not self._open:
            return
        if not self._collected.is_next_there:
            held, order = self._collected.held, self._collected.order
            enough = 0 if order is ResultOrder.ANY else feed.threshold(held)
            engine.channel.expect(self._collected.awaited, enough)
            self._attend(self._is_due, self._deaths.next_look(deadline), self._show)
            engine.channel.expect()
            self._deaths.end_late(self._outcomes.tries)
            self._replace_dead()
        self._show()
        if self._open and self._deaths.have_lost:
            self._pause(self._wished.limit)
        if not self._open:
            return
        if not engine.everyone.unanswered():
            self._finish()
        elif is_past(deadline) and not self._collected.is_next_there:
            engine.abandon(self._wished.limit)

    def _feed_them(self) -> None:
        """Publish items, if there are too few; or end the command, if there are no more."""
        self._engine.require_ready()
        if not self._open:  # another thread's call has paused it
            return
        self._collect_some()
        if self._is_wanting() and not self._ending:
            self._fill()
        if self._open and not self._ending:
            failed = len(self._engine.everyone.unanswered()) < self._engine.size
            failed = failed or self._outcomes.failure is not None
            if failed or self._feed.is_done:
                self._end(at_once=failed)

    def _begin(self) -> None:
        engine = self._engine
        if self._deaths.happened:
            self._feed.recover()
        self._deaths.prepare()
        if self._is_wanting():  # what the first items rely on is there when tasks begin
            self._fill()
        if self._feed.is_done:
            return
        if self._feed.is_lost:
            raise InternalError("items of a map were taken and have no result.")
        engine.wake_early()
        engine.settle()
        self._feed.open()
        self._payload = dumped(replace(self._work, objects=self._shared.paths()))
        engine.open(self._payload, self._planned.segments, self)
        self._open, self._ending = True, False

    def _fill(self) -> None:
        """Read items, which may call functions of the program's, and send what they rely on."""
        self._feed.read(self._collected.held, self._is_due)
        self._take_found()
        error = self._feed.error
        if isinstance(error, CallTimeout | WorkerDied) and (
            self._lost or self._engine.state is not State.READY
        ):
            raise error

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
        everyone = self._engine.everyone
        if everyone.has_answers() and not (self._ending and everyone.unanswered()):
            return True
        if self._deaths.have_lost:
            return True
        if not self._ending and (self._outcomes.failure is not None or self._feed.is_done):
            return True
        return self._collected.is_next_there or (not self._ending and self._is_wanting())

    def _is_wanting(self) -> bool:
        return self._feed.due(self._collected.held)

    def _collect_some(self) -> None:
        """Take the results that have come, unless the program has enough: the workers wait with more."""
        self._looked = time.perf_counter()
        self._engine.require_ready()  # a signal handler may have closed the session
        self._take_found()
        if not self._queue.has_news:
            return
        if self._collected.held <= _HELD or not self._collected.is_next_there:
            self._collect(told=True)

    def _collect(self, told: bool = False) -> None:
        """Take the results that have come; if *told*, those that workers have told of."""
        self._engine.require_ready()
        if self._outcomes.take(told):
            self._hear_logs()

    @operation(unbroken=True)
    def _hear_logs(self) -> None:
        self._engine.workers.hear_logs()

    def _take_found(self) -> None:
        """Take the results that the checkpoint has."""
        for number, value, nbytes in self._feed.take_found():
            self._collected.add(number, [value], nbytes)

    def _finish(self) -> None:
        """All ranks have answered."""
        self._feed.withdraw()  # what they have left, if they ended by themselves
        self._collect()
        self._open = False
        replies = self._engine.finish()
        if any(isinstance(reply, Failed) for reply in replies):
            ranks = self._engine.everyone.ranks
            item = first_failure(replies, ranks)[1].item
            where = "" if item is None else f" at {self._outcomes.called(item)}"
            host_of = self._engine.workers.pool.host_of
            self._outcomes.fail(item, worker_error(replies, ranks, host_of, where))
        if self._outcomes.failure is not None:  # what comes before it is wanted, if it is read in order
            self._pending = self._pending or self._feed.pending()
            in_order = self._collected.order is ResultOrder.KEPT
            self._feed.end_before(self._outcomes.failed_at if in_order else 0)

    def _show(self) -> None:
        if self._progress is not None:
            self._progress.reach(self._feed.count)

    # ── when workers die ─────────────────────────────────────────────────────────────────────────

    def _attend(self, condition: Condition, deadline: Deadline, on_tick: OnTick = None) -> None:
        """Sleep until *condition* holds, all ranks have answered, or the *deadline* is over; who dies is
        buried."""
        for ended in self._engine.attend(condition, deadline, on_tick):
            self._collect()
            fatal = self._deaths.bury(ended, self._outcomes.came)
            if fatal is not None:
                self._outcomes.die(fatal)

    def _replace_dead(self) -> None:
        """Put other workers in the places of the dead: they take items, too, unless the map ends."""
        while self._deaths.unreplaced:
            rest = functools.partial(self._rest, self._wished.limit) if self._open else None
            ranks = self._deaths.replace(rest)
            while self._open and not (self._ending or self._deaths.have_begun):
                self._attend(lambda: self._deaths.have_begun, clock() + _WHILE)
            for rank in ranks if self._open and not self._ending else ():
                self._engine.workers.join(rank, self._payload, self._planned.segments)

    # ── for the engine ───────────────────────────────────────────────────────────────────────────

    def pause(self, limit: float | None) -> None:
        try:
            self._pause(limit)
        except BaseException:
            if self._open:
                self._engine.abandon()
            raise

    def _pause(self, limit: float | None) -> None:
        self._rest(limit)
        self._replace_dead()

    def _rest(self, limit: float | None) -> None:
        """Have all workers end what they do, and take no more items."""
        deadline = None if limit is None else clock() + limit
        if self._until is not None:
            deadline, limit = self._until, self._wished.limit
        self._end(at_once=True)
        if self._feed.is_left:
            self._collected.end()
            self._feed.drop()
        while self._engine.everyone.unanswered():
            self._attend(self._is_paused, self._deaths.next_look(deadline))
            self._deaths.end_late(self._outcomes.tries)
            if is_past(deadline) and self._engine.everyone.unanswered():
                self._engine.abandon(limit)
        self._finish()

    @property
    def outlives(self) -> bool:
        return self._deaths.outlived

    def doing(self, ranks: Sequence[int]) -> str:
        places = map(self._engine.channel.whereabouts, ranks)
        items = [self._outcomes.called(at) for phase, at in places if phase == Phase.TASK]
        at = f" at {' and '.join(items)}" if items else ""
        return f"in {self._deaths.called}{at}, "

    def lose(self) -> None:
        self._open, self._lost = False, True
        self._queue.stop()
        if self._engine.state is not State.CLOSED:
            self._outcomes.take()

    def _is_paused(self) -> bool:
        self._collect()
        return not self._engine.everyone.unanswered()

    def leave(self) -> None:
        """Nobody wants more results: let the tasks that run end, and no other begin."""
        with self._engine.lock:
            self._collected.end()
            self._feed.drop()
            if self._open and self._engine.state is State.READY:
                self._end(at_once=True)
