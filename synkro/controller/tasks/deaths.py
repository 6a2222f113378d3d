"""What becomes of a map when a worker dies: another one takes its place.

::

    bury      its results are taken; what it held waits for others, but for the item that it died of
    replace   another worker begins, with all that the dead one had
    join      it takes items, too, if the map still goes on

An item that takes too long is ended with its worker.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ...errors import CallTimeout, SynkroError, WorkerDied
from ...ipc.process import ProcessEnd
from ...ipc.queue import Dispatcher
from ...ipc.waiting import clock
from ...memory.interrupts import uninterrupted
from ...messages import Phase
from ..calls.replacement import CannotReplaceError, Replacement, failed
from ..engine.engine import Engine, State
from ..engine.nesting import operation
from ..objects.known import Known
from ..objects.values import SharedByTasks
from .feed import Feed
from .wishes import Wishes

_IN_A_ROW = 3  # deaths without a result between them, and of no item, after which the map ends
_SOONEST, _LATEST = 0.01, 0.5  # seconds between two looks how long items have taken

_REPLACED = "Another one has taken its place."


class Fatal(NamedTuple):
    """The item that a worker has died of: its number, the slot of its batch, and what makes the error
    from where it was."""

    slot: int
    number: int
    error: Callable[[str], SynkroError]


@dataclass(eq=False, repr=False)
class Deaths:
    """The deaths of workers in one map.

    *shared* is what the tasks share; *forget* has the map not have happened.

    Attributes:
        called: what errors call the map.
        happened: whether a worker has died: then items may be lost of which nobody knows.
    """

    _engine: Engine
    _replacement: Replacement
    _queue: Dispatcher
    _feed: Feed
    _shared: SharedByTasks
    _wished: Wishes
    called: str
    _forget: Callable[[], None]
    happened: bool = False
    _dead: dict[int, ProcessEnd] = field(default_factory=dict)  # by rank, those that were not replaced
    _in_a_row: int = 0
    _came: int = 0  # how often workers had given something, at the last of these
    _since: dict[int, tuple[tuple[int, int], float]] = field(default_factory=dict)
    """By rank the item that runs there, how often it was tried before, and since when."""
    _late: set[int] = field(default_factory=set)  # the ranks that were killed, as their items took long

    @property
    def unreplaced(self) -> bool:
        """Whether a worker has died, and none has taken its place yet."""
        return bool(self._dead)

    @property
    def outlived(self) -> bool:
        """Whether the map goes on after a death."""
        wanted = self._wished.outlives or self._replacement.always
        return wanted and self._replacement.refusal is None

    def tell(self, error: BaseException) -> None:
        """An *error* ends the map.  If that is a death that the session outlives, it can be done again,
        with the same random numbers."""
        if isinstance(error, WorkerDied) and self._engine.state is State.READY:
            self._forget()

    def prepare(self) -> None:
        """The workers are about to begin: see that what they have can outlive them."""
        if self.outlived:
            self._replacement.insist(self._replacement.prepare)

    # ── items that take too long ─────────────────────────────────────────────────────────────────

    def next_look(self, deadline: float | None) -> float | None:
        """Until when to wait at most, before ``end_late``."""
        longest = self._wished.item_timeout
        if longest is None:
            return deadline
        soon = clock() + min(max(longest / 10, _SOONEST), _LATEST)
        return soon if deadline is None else min(soon, deadline)

    def end_late(self, tries: Callable[[int], int]) -> None:
        """Kill the workers whose items have taken too long; *tries* tells how often one was tried."""
        longest, now = self._wished.item_timeout, clock()
        if longest is None:
            return
        for rank in self._engine.everyone.unanswered():
            phase, number = self._engine.channel.whereabouts(rank)
            runs = number, tries(number)
            if phase != Phase.TASK:
                self._since.pop(rank, None)
            elif rank not in self._since or self._since[rank][0] != runs:
                self._since[rank] = runs, now
            elif now - self._since[rank][1] > longest:
                self._late.add(rank)
                self._engine.workers.pool.kill([rank])

    # ── a death ──────────────────────────────────────────────────────────────────────────────────

    def bury(self, ended: ProcessEnd, came: int) -> Fatal | None:
        """A worker has died, whose results were collected: let others have what it held, but for the
        item that it died of, which is returned.  Workers have given something *came* times.

        Raises: WorkerDied if workers die again and again, and of no item.
        """
        engine, rank = self._engine, ended.rank
        phase, number = engine.channel.whereabouts(rank)
        engine.workers.bury(rank)
        self.happened = True
        self._dead[rank] = ended
        self._since.pop(rank, None)
        is_late = rank in self._late
        self._late.discard(rank)
        first, ticket = self._queue.left_by(rank)
        died_of_it = self._feed.take_back(first, ticket, number if phase == Phase.TASK else None)
        if phase == Phase.LEAVING:
            return None
        if self._wished.ends_by_death and not is_late:
            raise self._ended(ended, "")
        if not died_of_it:
            self._in_a_row = self._in_a_row + 1 if came == self._came else 1
            self._came = came
            if self._in_a_row > _IN_A_ROW:
                raise self._ended(ended, f"{self._in_a_row} workers in a row died, and of no item.")
            return None
        if is_late:
            return Fatal(ticket.slot, number, lambda where: self._too_late(ended, where))
        return Fatal(ticket.slot, number, lambda where: self._died(ended, where))

    def _died(self, ended: ProcessEnd, where: str) -> WorkerDied:
        died = self._engine.workers.pool.died(ended, f"in {self.called}{where}, ", _REPLACED)
        died.args = (str(died).partition(_REPLACED)[0] + _REPLACED,)  # its ``stderr`` has the rest
        return died

    def _too_late(self, ended: ProcessEnd, where: str) -> CallTimeout:
        return CallTimeout(
            f"in {self.called}{where}, the task took longer than item_timeout= "
            f"allows, {self._wished.item_timeout:g} s, and was ended with its worker, rank {ended.rank} "
            f"(pid {ended.pid}). {_REPLACED}",
            (ended.rank,),
        )

    @operation(unbroken=True)
    def replace(self, pause: Callable[[], None] | None) -> list[int]:
        """Put other workers in the places of the dead; returns their ranks.

        What has to be copied is copied when all others have nothing to do: *pause* sees to that, unless
        it is so.  Raises: WorkerDied if that cannot be done, and the session is over.
        """
        ended = next(iter(self._dead.values()))
        try:
            copied = self._replacement.copied(self._shared.known)
            if copied and pause is not None:
                pause()
            replaced: list[int] = []
            with uninterrupted():
                while self._dead:
                    replaced.append(self._replace(copied))
            return replaced
        except CannotReplaceError as error:
            raise self._ended(ended, str(error)) from None
        except Exception as error:
            self._engine.require_ready()  # a signal handler may have closed the session
            raise self._ended(ended, failed(error)) from error

    def _replace(self, copied: list[Known]) -> int:
        """Replace one of the dead; returns its rank."""
        while True:
            rank = next(iter(self._dead))
            living = [other for other in self._engine.everyone.ranks if other not in self._dead]
            try:
                self._replacement.replace(rank, copied, next(iter(living), None))
                del self._dead[rank]
                return rank
            except WorkerDied as another:  # of which objects were to be copied, so it had no item
                if another.rank in self._dead:
                    raise
                self.bury(self._engine.workers.ended(another.rank), self._came)

    def _ended(self, ended: ProcessEnd, why: str) -> WorkerDied:
        """What to raise as the session is over."""
        return self._replacement.ended(ended, f"in {self.called}, ", why)

    @property
    def have_begun(self) -> bool:
        """Whether all ranks that have not answered do what is open."""
        channel = self._engine.channel
        phases = (channel.whereabouts(rank)[0] for rank in self._engine.everyone.unanswered())
        return all(phase in (Phase.TAKING, Phase.TASK, Phase.LEAVING) for phase in phases)

    # ── what nobody knows of ─────────────────────────────────────────────────────────────────────

    @property
    def have_lost(self) -> bool:
        """Whether items seem to be lost: all workers wait for some, and there are none to take."""
        engine, feed = self._engine, self._feed
        if not self.happened or not feed.is_lost or not self._queue.is_dry:
            return False
        ranks = engine.everyone.unanswered()
        return all(engine.channel.whereabouts(rank)[0] == Phase.TAKING for rank in ranks)
