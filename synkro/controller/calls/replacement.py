"""``Replacement``: another worker in the place of one that has died, with all that it had.

::

    functions and objects   written anew from here, under the same numbers
    what functions have made of objects, and variables
                            read from the arena, where they outlive the worker
    segments                as all have them

In a map nobody changes variables and objects, so nothing is kept.  A session that replaces workers
(``fork(replace=True)``) keeps copies after each operation that may change them: by these all ranks are,
after a death, as when the last one had ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...errors import WorkerDied, WorkerError
from ...ipc.process import BROKEN, ProcessEnd
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment
from ...messages import Distribute, Initialize, Phase, Recover, Restore, Revert, Secure, Secured, Start
from ...plan.call import Region, aligned
from ..engine.engine import Engine, State
from ..objects.handover import Handover
from ..objects.known import Known, reached

T = TypeVar("T")

_PATIENCE = 60.0  # seconds that a worker may take to begin, and to load what functions bring along
_AGAIN = 5  # deaths of those that are to take the place of others, after which the session ends
_HEALED = "Another one has taken its place: all is as when the last call had ended."
_LOADING = "as it received a function, or what one uses, "

_CALM = 5.0  # seconds that ranks may take to end a call that was interrupted, before they are killed

Sent = tuple[tuple[str, ...], str, dict[str, dict[str, Any]]]


def failed(error: Exception) -> str:
    """What to say where no worker took the place of another because of an *error*."""
    why = str(error).partition(f" {BROKEN}")[0].rstrip(".")
    often = f", {_AGAIN} times" if isinstance(error, WorkerDied) else ""
    return f"Another one could not take its place{often}: {why}."


class UsesObjects(Protocol):
    """A function, and the objects that it has brought along."""

    roots: list[Known]


class CannotReplaceError(Exception):
    """Why no worker can take the place of another: a sentence."""


@dataclass(eq=False)
class Replacement:
    """Replaces workers of one session.

    *start* is the command by which workers began; *sent* returns what they got with the last functions:
    where to import from, the working directory, and settings.

    Attributes:
        always: whether the session replaces workers, whatever they die in.
    """

    _engine: Engine
    _handover: Handover
    _start: Start
    _sent: Callable[[], Sent | None]
    always: bool
    _initialize: Initialize | None = field(default=None, init=False)  # what prepares each worker
    _secured: list[Secured] = field(default_factory=list)  # by rank
    _taken: dict[int, _Taken] = field(default_factory=dict)
    """What ranks that are being replaced had, which is no longer where it was."""
    _lives: dict[int, int] = field(default_factory=dict)  # how many workers a rank has had, but for one
    _time: int = 0  # the number of the last time that all ranks have kept copies
    _tried: int = 0  # that of the last time that they were told to
    _owed: set[int] | None = None  # objects that may be others than what was kept; None: nothing is
    _apart: bool = False  # whether calls on some ranks have ended since then, beside others
    _inside: bool = False  # whether an operation of several commands goes on
    _insists: bool = False  # whether a map is about to begin that goes on after deaths

    def __post_init__(self) -> None:
        self._secured = [Secured((), (), (), None, False)] * self._engine.size

    @property
    def refusal(self) -> str | None:
        """Why workers of this session cannot be replaced at all, as a sentence; None if they can."""
        if self._engine.has_hosts:
            return "Workers of a session over several hosts are not replaced."
        if self._engine.on_gpus:
            return "Workers on GPUs are not replaced: NCCL connects them once."
        return None

    @property
    def heals(self) -> bool:
        """Whether workers that die now, while no map runs, are to be replaced."""
        return self.always or self._insists

    def initialize_by(self, command: Initialize) -> None:
        """From now on a worker that takes the place of another does *command*, which prepares it."""
        self._initialize = command

    # ── before a death ───────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """A map begins: see that what the workers have can outlive them."""
        if self.always:
            self._catch_up()
            return
        self._secured = self._engine.run(Secure(None, 0, (), ()))
        if any(secured.called for secured in self._secured):
            self._secured = self._engine.run(Secure(None, 0, self._handover.survey(), ()))
        self._owed = None

    def insist(self, action: Callable[[], T]) -> T:
        """Do *action*, which begins a map, also if workers die, others take their places, and nothing
        else was lost."""
        insisted, self._insists = self._insists, self.refusal is None
        try:
            for left in reversed(range(_AGAIN)):
                try:
                    return action()
                except WorkerDied as died:
                    if self._engine.state is not State.READY:
                        raise
                    if not left:
                        died.args = (f"this has happened {_AGAIN} times in a row: {died}",)
                        raise
            raise AssertionError
        finally:
            self._insists = insisted

    def call(self, function: UsesObjects, action: Callable[[], T]) -> T:
        """Do *action*, a call of *function*, in a session that replaces workers: copies are kept when it
        ends."""
        self._catch_up()
        self._inside = True
        try:
            result = action()
        except WorkerError:  # what they have done by then counts
            self._inside = False
            self._keep(function.roots)
            raise
        except BaseException:  # nothing has ended
            self._owe(function.roots)
            raise
        finally:
            self._inside = False
        self._keep(function.roots)
        return result

    def keep(self) -> None:
        """A command has ended that may have changed what workers have."""
        if self._inside or not self.always:
            self._owe(())
        else:
            self._keep(())

    def note_call(self) -> None:
        """A call begins in a session that does not keep copies."""
        self._owed = set()

    def _keep(self, roots: Iterable[Known]) -> None:
        self._owe(roots)
        self._apart |= not self._engine.turns.alone
        self._catch_up()

    def _owe(self, roots: Iterable[Known]) -> None:
        self._owed = (self._owed or set()) | {known.number for known in reached(roots)}

    def _catch_up(self) -> None:
        """Keep copies of what has changed since they were kept."""
        if self._owed is None or not self.always or not self._engine.turns.alone:
            return
        self._tried += 1
        secure = Secure(self._tried, self._time, tuple(self._owed), ())
        if self._engine.turns.own is None:
            self._secured = self._engine.run(secure)
        else:  # in an operation on some ranks, beside which there is none
            try:
                self._secured = self._engine.workers.each(secure)
            except WorkerDied as died:
                raise self.heal([self._engine.workers.ended(died.rank)]) from None
        self._time, self._owed, self._apart = self._tried, None, False

    def reseed(self, seed: int) -> None:
        """The generators of all ranks were seeded anew."""
        self._start = replace(self._start, seed=seed, seeded=True)

    # ── after a death ────────────────────────────────────────────────────────────────────────────

    def copied(self, used: Iterable[Known]) -> list[Known]:
        """The objects that have to be copied from a rank that lives, and has nothing else to do.

        What is *used* meanwhile is to be as the workers have it.  What else the program has changed, it
        sends to all before the next call that uses it.
        """
        self._handover.forget_dropped()
        stored = {number for numbers, _, _ in self._secured[0].objects for number in numbers}
        return [known for known in self._handover.changed(used) if known.number not in stored]

    def heal(self, ended: Sequence[ProcessEnd]) -> WorkerDied:
        """Workers have died in an operation, which nobody goes on with: all ranks become as they were
        when the last one had ended.  Returns what to raise.

        Ctrl-C is deferred until that is done.
        """
        workers, first = self._engine.workers, ended[0]
        dead = [each.rank for each in ended]
        try:
            with uninterrupted():
                at = _LOADING if self._engine.channel.whereabouts(first.rank)[0] == Phase.LOADING else ""
                for rank in dead:
                    workers.bury(rank)
                dead += workers.calm(_CALM)
                count = len(dead)
                died = workers.pool.died(
                    first, at, _HEALED if count == 1 else f"{count} workers died. {_HEALED}"
                )
                self._revive(dead)
        except CannotReplaceError as error:
            return self.ended(first, "", str(error))
        except Exception as error:
            self._engine.require_ready()  # a signal handler may have closed the session
            died = self.ended(first, "", failed(error))
            died.__cause__ = error
            return died
        return died

    def _revive(self, dead: list[int]) -> None:
        """Put all ranks back, those that live and others in the places of the *dead*; who dies meanwhile
        is one of these.

        Raises: CannotReplaceError; what the commands raise; WorkerDied as that happens again and again.
        """
        if self._apart or (self._owed is not None and not self.always):
            raise CannotReplaceError(
                "Calls had run of which no copies were kept, and what it had made of variables and "
                "objects is lost."
            )
        deaths = 0
        back: set[int] = set()
        self._handover.forget_dropped()
        while dead:
            living = [rank for rank in self._engine.everyone.ranks if rank not in dead]
            try:
                for rank in living if self.always else ():
                    if rank not in back:
                        self._engine.workers.tell(rank, Revert(self._time), _PATIENCE)
                    back.add(rank)
                self.replace(dead[-1], [], None)
                back.add(dead.pop())
            except WorkerDied as another:
                deaths += 1
                if deaths > _AGAIN or another.rank in dead:  # that one has died again and again
                    raise
                self._engine.workers.bury(another.rank)
                dead.append(another.rank)

    def ended(self, ended: ProcessEnd, at: str, why: str) -> WorkerDied:
        """What to raise as no worker takes the place of one that has *ended*: the session is over."""
        died = self._engine.workers.pool.died(ended, at, f"{why} {BROKEN}".lstrip())
        self._engine.break_by(died)
        return died

    def replace(self, rank: int, copied: list[Known], source: int | None) -> None:
        """Put another worker in the place of that of *rank*, which is buried; objects are *copied* from
        the rank *source*, if there is one that lives, and then it has nothing to do.

        Raises: CannotReplaceError; what the commands raise.
        """
        if self.refusal is not None:
            raise CannotReplaceError(self.refusal)
        if copied and source is None:
            raise CannotReplaceError(
                f"The program has changed {copied[0].path!r}, which the tasks use, since the map began, "
                f"and no worker has it as it was."
            )
        if rank not in self._taken:
            self._taken[rank] = self._take(self._secured[rank])
        for left in reversed(range(_AGAIN)):
            try:
                self._secured[rank] = self._begin(rank, copied, source)
                del self._taken[rank]
                break
            except WorkerDied as another:
                self._engine.workers.bury(rank)  # which may have begun
                if another.rank != rank or not left:
                    raise

    def _begin(self, rank: int, copied: list[Known], source: int | None) -> Secured:
        """Begin another worker, with all that it needs; it keeps that, as others have."""
        workers, taken = self._engine.workers, self._taken[rank]
        parcel, _segment = self._handover.anew()
        workers.replace(rank)
        self._lives[rank] = life = self._lives.get(rank, 0) + 1
        start = replace(self._start, life=life, profiles=self._profiles(rank, life))
        workers.tell(rank, start, _PATIENCE)
        workers.tell(rank, taken.variables, _PATIENCE)
        if (sent := self._sent()) is not None:
            workers.tell(rank, Distribute(parcel, *sent), _PATIENCE)
        if self._initialize is not None:  # before what it had made of objects is as it was
            workers.tell(rank, self._initialize, self._engine.turns.limit)
        workers.tell(rank, taken.objects, _PATIENCE)
        if source is not None and copied:
            workers.tell(rank, self._handover.copy(copied, source), _PATIENCE)
        if self.always:
            kept = Secure(self._time, 0, (), taken.numbers)
        else:
            kept = Secure(None, 0, taken.numbers, ())
        secured: Secured = workers.tell(rank, kept, _PATIENCE)
        self._handover.forget({*taken.numbers, *(known.number for known in copied)})
        return secured

    def _take(self, secured: Secured) -> _Taken:
        """What a worker had, from the arena.  Raises: CannotReplaceError."""
        if secured.unkept and (names := self._handover.called(secured.unkept)):
            raise CannotReplaceError(
                f"What functions had made of {names[0]!r} cannot be pickled, and is lost: let them "
                f"return what is to be kept, or make it a variable."
            )
        replicas = secured.replicas
        sizes = [np.dtype(each.dtype).itemsize * int(np.prod(each.shape)) for each in replicas]
        segment = self._engine.directory.allocate(sum(map(aligned, sizes)), "variables")
        found, end = [], 0
        for each, nbytes in zip(replicas, sizes, strict=True):
            found.append((each, Region(segment.number, end, each.shape, each.dtype)))
            self._read(each.place, segment.base[end : end + nbytes])
            end += aligned(nbytes)
        pickles, there = [], set(self._handover.numbers())
        groups = [group for group in secured.objects if not there.isdisjoint(group[0])]
        for _, place, nbytes in groups:
            self._read(place, pickled := np.empty(nbytes, np.uint8))
            pickles.append(pickled.tobytes())
        numbers = tuple(there.intersection(chain.from_iterable(group[0] for group in groups)))
        restore = Restore(tuple(found), secured.generator)
        return _Taken(restore, Recover(tuple(pickles)), numbers, segment)

    def _read(self, place: int, memory: NDArray[np.uint8]) -> None:
        """Read what lies in the arena from *place* on."""
        at = 0
        for piece in self._engine.workers.pool.read_arena(place, len(memory)):
            memory[at : at + len(piece)] = memoryview(piece)
            at += len(piece)

    def _profiles(self, rank: int, life: int) -> tuple[str, ...] | None:
        """The files of profiles: that of *rank* gets a name that no earlier worker has used."""
        if self._start.profiles is None:
            return None
        paths = list(self._start.profiles)
        paths[rank] = "{0}-{2}{1}".format(*os.path.splitext(paths[rank]), life)
        self._engine.say(f"Synkro: the next profile of rank {rank} is {paths[rank]}")
        return tuple(paths)


class _Taken(NamedTuple):
    """What a worker had: what gives another one its variables, whose memory is held, and its objects,
    with the numbers of those that functions had changed."""

    variables: Restore
    objects: Recover
    numbers: tuple[int, ...]
    memory: Segment
