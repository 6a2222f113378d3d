"""What a rank keeps for the case that a worker dies: replicas, and what functions have made of objects.

It lies in the arena, where the main process reads it when the worker is gone.  Objects are kept as
pickles of what they hold: all that they are made of, but for other objects with numbers, which are kept
by themselves.

In a session that replaces workers, what was kept last is how all was when the last call had ended; what
was kept before stays until the next time, as a worker may die while others keep things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..errors import InternalError
from ..packing.kinds import ARRAY, NAME, WHOLE, Contents, same_contents
from ..values.arrays import Array, code_of, same_bits
from .replica import KeptReplica, Replica
from .workspace import Workspace

Bytes = NDArray[np.uint8]


@dataclass
class _Object:
    """An object as it was kept: a pickle of what it held, or of an array a copy, or, if pickle does not
    take it, how it looked.

    *stored* is the pickle in the arena, if functions have changed it since it came; *lost*: there should
    be one, and is none.
    """

    held: bytes | Array | Contents
    stored: Bytes | None = None
    lost: bool = False


@dataclass
class _Kept:
    """All that was kept at one time."""

    time: int = 0
    replicas: dict[int, Array] = field(default_factory=dict)
    objects: dict[int, _Object] = field(default_factory=dict)
    generator: Any = None


class Safekeeping:
    """What one rank keeps."""

    def __init__(self, rank: Workspace) -> None:
        self._rank = rank
        self._last, self._before = _Kept(), _Kept()

    def secure(self, command: messages.Secure) -> messages.Secured:
        """Keep what the command says, and tell where it is."""
        rank, last = self._rank, self._last
        called = rank.forget_calls()
        came = rank.objects.forget_came()
        if command.time is None:  # for a map: nobody changes anything meanwhile
            replicas = {number: _shared(replica) for number, replica in rank.variables.items()}
            objects = {} if called else dict(last.objects)
            renewed = filter(
                rank.objects.has, came & objects.keys()
            )  # the program has changed them since
            objects |= {number: self._stored(number) for number in (*command.numbers, *renewed)}
        else:
            replicas = {
                number: self._copy(replica, last.replicas.get(number))
                for number, replica in rank.variables.items()
            }
            objects = dict(last.objects)
            for number in filter(self._may_change, {*command.numbers, *came}):
                objects[number] = self._object(number, number in came, number in command.changed)
        objects = {number: one for number, one in objects.items() if rank.objects.has(number)}
        generator = rank.group.rng_state
        self._last, self._before = _Kept(command.time or 0, replicas, objects, generator), last
        stored = {number: one.stored for number, one in objects.items() if one.stored is not None}
        return messages.Secured(
            self._replicas(replicas),
            tuple((number, rank.comm.offset(array), len(array)) for number, array in stored.items()),
            tuple(number for number, one in objects.items() if one.lost),
            generator,
            called,
        )

    def _may_change(self, number: int) -> bool:
        """Whether an object is there, and no name, which functions do not assign to."""
        return self._rank.objects.has(number) and self._rank.objects.found(number)[1] is not NAME

    def _copy(self, replica: Replica, last: Array | None) -> Array:
        """A copy of a replica in the arena: the last one, if it is still that."""
        whole = replica.whole
        if last is not None and same_bits(last, whole):
            return last
        fresh = self._rank.comm.empty(whole.shape, whole.dtype)
        self._rank.device.assign(fresh, whole)
        return fresh

    def _object(self, number: int, came: bool, changed: bool) -> _Object:
        """An object as it is kept: the last time's, if it is still that.  The program has sent it since
        then if it *came*; functions had *changed* it before, if they are known to have."""
        last, objects = self._last.objects.get(number), self._rank.objects
        if last is not None and not changed and self._is_as_kept(number, last):
            return last
        obj, kind = objects.found(number)
        pickled = None if kind is ARRAY else objects.pickle(number)
        held = np.array(obj) if kind is ARRAY else objects.look(number) if pickled is None else pickled
        if not changed and (last is None or (came and last.stored is None and not last.lost)):
            return _Object(held)
        return self._stored(number, held)

    def _stored(self, number: int, held: bytes | Array | Contents | None = None) -> _Object:
        """An object that functions have changed."""
        pickled = held if isinstance(held, bytes) else self._rank.objects.pickle(number)
        if pickled is None:
            return _Object({} if held is None else held, lost=True)
        array: Bytes = self._rank.comm.empty((len(pickled),), np.uint8)
        array[:] = np.frombuffer(pickled, np.uint8)
        return _Object(pickled if held is None else held, array)

    def _is_as_kept(self, number: int, kept: _Object) -> bool:
        objects = self._rank.objects
        obj, kind = objects.found(number)
        if isinstance(kept.held, bytes):
            return objects.pickle(number) == kept.held
        if isinstance(kept.held, np.ndarray):
            return same_bits(obj, kept.held)
        return same_contents(kind, kept.held, objects.look(number))

    def _replicas(self, arrays: Mapping[int, Array]) -> tuple[messages.SecuredReplica, ...]:
        rank = self._rank
        found = []
        for number, array in arrays.items():
            replica = rank.variables[number]
            place, kept = rank.comm.offset(array), isinstance(replica, KeptReplica)
            shape = array.shape, code_of(array.dtype)
            found.append(messages.SecuredReplica(number, replica.name, kept, place, *shape))
        return tuple(found)

    def revert(self, command: messages.Revert) -> None:
        """Be as at the time that the command says."""
        if self._last.time != command.time:
            self._last = self._before
        if self._last.time != command.time:
            raise InternalError(f"nothing was kept at the time {command.time}.")
        rank, kept = self._rank, self._last
        for number, array in kept.replicas.items():
            replica = rank.variables.get(number)
            if replica is not None and not same_bits(replica.whole, array):
                fresh = rank.comm.empty(array.shape, array.dtype)
                rank.device.assign(fresh, array)
                replica.adopt(fresh)
        changed = {n: one for n, one in kept.objects.items() if self._is_changed(n, one)}
        for number, one in changed.items():
            obj, kind = rank.objects.found(number)
            if isinstance(one.held, np.ndarray):
                kind.put_back(obj, {WHOLE: one.held})
            elif isinstance(one.held, dict):
                kind.put_back(obj, one.held)
        pickles = ((n, one.held) for n, one in changed.items() if isinstance(one.held, bytes))
        rank.objects.recover(pickles)
        rank.group.restore_rng(kept.generator)

    def _is_changed(self, number: int, kept: _Object) -> bool:
        return self._rank.objects.has(number) and not self._is_as_kept(number, kept)


def restore(rank: Workspace, command: messages.Restore) -> None:
    """Have the variables, and the random generator, of the worker before."""
    for was, region in command.replicas:
        array = rank.comm.empty(was.shape, np.dtype(was.dtype))
        rank.device.assign(array, rank.array(region))
        kind = KeptReplica if was.kept else Replica
        rank.variables[was.number] = kind(was.name, array, rank.device, rank.comm)
    rank.group.restore_rng(command.generator)


def _shared(replica: Replica) -> Array:
    """A replica, where all ranks see it."""
    array = replica.in_place()
    if array is None or not array.flags.c_contiguous:
        raise InternalError(f"{replica.called()} shows some of its rows, or has them apart.")
    return array
