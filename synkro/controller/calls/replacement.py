"""``Replacement``: another worker in the place of one that has died, with all that it had.

::

    functions and objects   written anew from here, under the same numbers
    objects that functions have changed there, or the program here
                            copied from a rank that lives, if all ranks had made the same of them
    variables               read from the arena, where they outlive the worker
    segments                come with the commands that name them, as to all
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...errors import counted
from ...messages import Distribute, Restore, Secure, Secured, SecuredReplica, Start
from ...plan.call import Region, aligned
from ..engine.engine import Engine
from ..objects.handover import Handover
from ..objects.known import Known

_PATIENCE = 60.0  # seconds that a worker may take to begin, and to load what functions bring along

Sent = tuple[tuple[str, ...], str, dict[str, dict[str, Any]]]


class CannotReplaceError(Exception):
    """Why no worker can take the place of another: a sentence."""


@dataclass(eq=False)
class Replacement:
    """Replaces workers of one session.

    *start* is the command by which workers began; *sent* returns what they got with the last functions:
    where to import from, the working directory, and settings.
    """

    _engine: Engine
    _handover: Handover
    _start: Start
    _sent: Callable[[], Sent | None]
    _secured: list[Secured] = field(default_factory=list)  # by rank
    _changed: dict[Known, bool] = field(default_factory=dict)
    """Objects that functions have changed on the workers, and whether all have made the same of each."""
    _lives: dict[int, int] = field(default_factory=dict)  # how many workers a rank has had, but for one

    @property
    def refusal(self) -> str | None:
        """Why workers of this session cannot be replaced at all, as a sentence; None if they can."""
        if self._engine.has_hosts:
            return "Workers of a session over several hosts are not replaced."
        if self._engine.on_gpus:
            return (
                "Workers on GPUs are not replaced: their variables go with them, and NCCL connects once."
            )
        return None

    def prepare(self) -> None:
        """See that what the workers have can outlive them; nothing else is to run before they are
        needed."""
        if self.refusal is not None:
            return
        self._secured = self._engine.run(Secure())
        if any(secured.called for secured in self._secured):
            self._changed = self._handover.survey()

    @property
    def copied(self) -> list[Known]:
        """The objects that have to be copied from a rank that lives, and has nothing else to do."""
        return list(dict.fromkeys([*self._changed, *self._handover.changed()]))

    def replace(self, rank: int, copied: list[Known], source: int | None) -> None:
        """Put another worker in the place of that of *rank*, which is buried; objects are *copied* from
        the rank *source*, if there is one that lives, and then it has nothing to do.

        Raises: CannotReplaceError; what the commands raise.
        """
        engine, handover = self._engine, self._handover
        self._check(rank, copied, source)
        restore, _memory = self._restored(self._secured[rank].replicas)
        parcel, _segment = handover.anew()
        engine.workers.replace(rank)
        self._lives[rank] = life = self._lives.get(rank, 0) + 1
        start = replace(self._start, life=life, profiles=self._profiles(rank, life))
        engine.workers.tell(rank, start, _PATIENCE)
        engine.workers.tell(rank, restore, _PATIENCE)
        if (sent := self._sent()) is not None:
            engine.workers.tell(rank, Distribute(parcel, *sent), _PATIENCE)
        if copied:
            assert source is not None
            engine.workers.tell(rank, handover.copy(copied, source), _PATIENCE)

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

    def _restored(self, replicas: tuple[SecuredReplica, ...]) -> tuple[Restore, Any]:
        """What gives a worker the variables of the one before, as long as the memory is held."""
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
        return Restore(tuple(found)), segment

    def _profiles(self, rank: int, life: int) -> tuple[str, ...] | None:
        """The files of profiles: that of *rank* gets a name that no earlier worker has used."""
        if self._start.profiles is None:
            return None
        paths = list(self._start.profiles)
        paths[rank] = "{0}-{2}{1}".format(*os.path.splitext(paths[rank]), life)
        self._engine.say(
            f"Synkro: {counted(life + 1, 'profile')} of rank {rank}; the last is {paths[rank]}"
        )
        return tuple(paths)
