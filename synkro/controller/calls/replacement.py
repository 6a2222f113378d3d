"""``Replacement``: another worker in the place of one that has died, with all that it had.

::

    functions and objects   written anew from here, under the same numbers
    objects that functions have changed there, or the program here
                            copied from a rank that lives, if all ranks had made the same of them
    variables               read from the arena, where they outlive the worker
    segments                as all have them

In a map nobody changes variables and objects, so nothing is kept.  A session that replaces workers
(``fork(replace=True)``) keeps copies after each operation that may change them: by these all ranks are,
after a death, as when the last one had ended.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from ...errors import WorkerDied, WorkerError
from ...ipc.process import BROKEN, ProcessEnd
from ...messages import Distribute, Renew, Restore, Revert, Secure, Secured, Start
from ...plan.call import Region, aligned
from ..engine.engine import Engine, State
from ..objects.handover import Handover
from ..objects.known import Known, reached

T = TypeVar("T")

_PATIENCE = 60.0  # seconds that a worker may take to begin, and to load what functions bring along
_AGAIN = 5  # deaths of those that are to take the place of others, after which the session ends
_CALM = 5.0  # seconds that ranks may take to end a call that was interrupted, before they are killed

Sent = tuple[tuple[str, ...], str, dict[str, dict[str, Any]]]


INTERRUPTED = "That another one took its place was interrupted."


def failed(error: Exception) -> str:
    """What to say where no worker took the place of another because of an *error*."""
    return f"Another one could not take its place: {str(error).partition(f' {BROKEN}')[0]}"


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
    _secured: list[Secured] = field(default_factory=list)  # by rank
    _changed: dict[Known, bool] = field(default_factory=dict)
    """Objects that functions have changed on the workers, and whether all have made the same of each."""
    _copies: Renew | None = None  # what gives a worker those that are alike, for maps
    _restores: dict[int, tuple[Restore, Any]] = field(default_factory=dict)
    """What gives ranks that are being replaced their variables, which are no longer where they were, and
    the memory of that."""
    _lives: dict[int, int] = field(default_factory=dict)  # how many workers a rank has had, but for one
    _time: int = 0  # the number of the last time that all ranks have kept copies
    _owed: set[int] | None = None  # numbers of objects of which copies are to be kept; None: nothing is
    _apart: bool = False  # whether calls on some ranks alone have ended since then
    _inside: bool = False  # whether an operation of several commands goes on

    @property
    def refusal(self) -> str | None:
        """Why workers of this session cannot be replaced at all, as a sentence; None if they can."""
        if self._engine.has_hosts:
            return "Workers of a session over several hosts are not replaced."
        if self._engine.on_gpus:
            return "Workers on GPUs are not replaced: NCCL connects them once."
        return None

    # ── before a death ───────────────────────────────────────────────────────────────────────────

    def prepare(self) -> None:
        """A map begins: see that what the workers have can outlive them."""
        if self.refusal is not None:
            return
        if self.always:
            self._catch_up()
        else:
            self._secured = self._engine.run(Secure(None, (), ()))
            if any(secured.called for secured in self._secured):
                self._changed, self._copies = self._handover.survey(), None
        alike = [known for known, same in self._changed.items() if same]
        if alike and self._copies is None:
            self._copies = self._handover.copy(alike, 0)

    def insist(self, action: Callable[[], T]) -> T:
        """Do *action*, also if workers die that are replaced, and all is as before."""
        for left in reversed(range(_AGAIN)):
            try:
                return action()
            except WorkerDied:
                if not left or self._engine.state is not State.READY:
                    raise
        raise AssertionError

    def call(self, function: UsesObjects, action: Callable[[], T]) -> T:
        """Do *action*, a call of *function*, in a session that replaces workers: copies are kept when it
        ends."""
        self._catch_up()
        self._inside = True
        try:
            result = action()
        except WorkerError:  # what they have done by then counts
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
        if self._inside:
            self._owe(())
        else:
            self._keep(())

    def _keep(self, roots: Iterable[Known]) -> None:
        self._owe(roots)
        self._apart |= self._engine.turns.own is not None
        self._catch_up()

    def _owe(self, roots: Iterable[Known]) -> None:
        self._owed = (self._owed or set()) | {known.number for known in reached(roots)}

    def _catch_up(self) -> None:
        """Keep copies of what has changed since they were kept."""
        if self._owed is None or not self.always or self._engine.turns.own is not None:
            return
        self._copies = None
        numbers, changed = tuple(self._owed), tuple(known.number for known in self._changed)
        self._secured = self._engine.run(Secure(self._time + 1, numbers, changed))
        self._time, self._owed, self._apart = self._time + 1, None, False
        ways = [secured.changed for secured in self._secured]
        self._changed = self._handover.alike(ways) if any(ways) else {}

    def reseed(self, seed: int) -> None:
        """The generators of all ranks were seeded anew."""
        self._start = replace(self._start, seed=seed, seeded=True)

    # ── after a death ────────────────────────────────────────────────────────────────────────────

    def copied(self, used: Iterable[Known] = ()) -> list[Known]:
        """The objects that have to be copied from a rank that lives, and has nothing else to do.

        What is *used* meanwhile is to be as the workers have it.  What else the program has changed, it
        sends to all before the next call that uses it.
        """
        found = dict.fromkeys([*self._changed, *self._handover.changed(used)])
        return [known for known in found if self._copies is None or not self._changed.get(known)]

    def heal(self, ended: Sequence[ProcessEnd], at: str) -> WorkerDied:
        """Workers have died in an operation, which nobody goes on with: all ranks become as they were
        when the last one had ended.  Returns what to raise; *at* begins its sentence."""
        workers, first = self._engine.workers, ended[0]
        dead = [each.rank for each in ended]
        try:
            if self._apart:
                raise CannotReplaceError("A call with target= had run, of which no copies were kept.")
            for rank in dead:
                workers.bury(rank)
            dead += workers.calm(_CALM)
            self._revive(dead)
        except CannotReplaceError as error:
            return self.ended(first, at, str(error))
        except Exception as error:
            died = self.ended(first, at, failed(error))
            died.__cause__ = error
            return died
        except BaseException:
            self.ended(first, at, INTERRUPTED)
            raise
        return workers.died(
            first, at, "Another one has taken its place: all is as when the last call had ended."
        )

    def _revive(self, dead: list[int]) -> None:
        """Put all ranks back, those that live and others in the places of the *dead*; who dies meanwhile
        is one of these.

        Raises: CannotReplaceError; what the commands raise; WorkerDied as that happens again and again.
        """
        deaths = 0
        reverted: set[int] = set()
        while dead:
            living = [rank for rank in self._engine.everyone.ranks if rank not in dead]
            try:
                for rank in living:
                    if rank not in reverted:
                        self._engine.workers.tell(rank, Revert(self._time), _PATIENCE)
                    reverted.add(rank)
                self.replace(dead[-1], self.copied(), next(iter(living), None))
                reverted.add(dead.pop())
            except WorkerDied as another:
                deaths += 1
                if deaths > _AGAIN:
                    raise
                if another.rank not in dead:
                    self._engine.workers.bury(another.rank)
                    dead.append(another.rank)

    def ended(self, ended: ProcessEnd, at: str, why: str) -> WorkerDied:
        """What to raise as no worker takes the place of one that has *ended*: the session is over."""
        died = self._engine.workers.died(ended, at, f"{why} {BROKEN}")
        self._engine.break_by(died)
        return died

    def replace(self, rank: int, copied: list[Known], source: int | None) -> None:
        """Put another worker in the place of that of *rank*, which is buried; objects are *copied* from
        the rank *source*, if there is one that lives, and then it has nothing to do.

        Raises: CannotReplaceError; what the commands raise.
        """
        self._check(rank, copied, source)
        if rank not in self._restores:
            self._restores[rank] = self._restored(self._secured[rank])
        for left in reversed(range(_AGAIN)):
            try:
                self._secured[rank] = self._begin(rank, copied, source)
                del self._restores[rank]
                break
            except WorkerDied as another:
                self._engine.workers.bury(rank)  # which may have begun
                if another.rank != rank or not left:
                    raise

    def _begin(self, rank: int, copied: list[Known], source: int | None) -> Secured:
        """Begin another worker, with all that it needs; it keeps that, as others have."""
        engine, handover = self._engine, self._handover
        parcel, _segment = handover.anew()
        engine.workers.replace(rank)
        self._lives[rank] = life = self._lives.get(rank, 0) + 1
        start = replace(self._start, life=life, profiles=self._profiles(rank, life))
        engine.workers.tell(rank, start, _PATIENCE)
        engine.workers.tell(rank, self._restores[rank][0], _PATIENCE)
        if (sent := self._sent()) is not None:
            engine.workers.tell(rank, Distribute(parcel, *sent), _PATIENCE)
        if self._copies is not None:
            engine.workers.tell(rank, self._copies, _PATIENCE)
        if copied:
            assert source is not None
            engine.workers.tell(rank, handover.copy(copied, source), _PATIENCE)
        changed = tuple(known.number for known in self._changed)
        kept = Secure(self._time, (), changed) if self.always else Secure(None, (), ())
        secured: Secured = engine.workers.tell(rank, kept, _PATIENCE)
        return secured

    def _check(self, rank: int, copied: list[Known], source: int | None) -> None:
        """Raises: CannotReplaceError if not all that the worker had can be had."""
        if self.refusal is not None:
            raise CannotReplaceError(self.refusal)
        if apart := [known.path for known in copied if not self._changed.get(known, True)]:
            raise CannotReplaceError(
                f"The ranks had made different things of {apart[0]!r}, which functions use, and rank "
                f"{rank}'s is lost: let functions return what is to be kept, or make it a variable."
            )
        if copied and source is None:
            raise CannotReplaceError(
                f"What {copied[0].path!r}, which functions use, had become on the workers died with the "
                f"last one: let functions return what is to be kept, or make it a variable."
            )

    def _restored(self, secured: Secured) -> tuple[Restore, Any]:
        """What gives a worker the variables of the one before, as long as the memory is held."""
        replicas = secured.replicas
        sizes = [np.dtype(each.dtype).itemsize * int(np.prod(each.shape)) for each in replicas]
        segment = self._engine.directory.allocate(sum(map(aligned, sizes)), "variables")
        found, end = [], 0
        for each, nbytes in zip(replicas, sizes, strict=True):
            found.append((each, Region(segment.number, end, each.shape, each.dtype)))
            at = end
            for piece in self._engine.workers.read_arena(each.place, nbytes):
                segment.base[at : at + len(piece)] = memoryview(piece)
                at += len(piece)
            end += aligned(nbytes)
        return Restore(tuple(found), secured.generator), segment

    def _profiles(self, rank: int, life: int) -> tuple[str, ...] | None:
        """The files of profiles: that of *rank* gets a name that no earlier worker has used."""
        if self._start.profiles is None:
            return None
        paths = list(self._start.profiles)
        paths[rank] = "{0}-{2}{1}".format(*os.path.splitext(paths[rank]), life)
        self._engine.say(f"Synkro: the next profile of rank {rank} is {paths[rank]}")
        return tuple(paths)
