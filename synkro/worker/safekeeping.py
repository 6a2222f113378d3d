"""What a rank keeps for the case that a worker dies: where its replicas outlive it, and copies.

In a session that replaces workers, what was kept last is how all was when the last call had ended; what
was kept before stays until the next time, as a worker may die while others keep things.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .. import messages
from ..errors import InternalError
from ..packing.kinds import ARRAY, FUNCTION, NAME, WHOLE, Contents, Kind, same_contents
from ..values.arrays import Array, code_of, same_bits
from .replica import KeptReplica, Replica
from .workspace import Workspace

_UNCHANGED = (FUNCTION, NAME)  # kinds that calls do not change


@dataclass
class _Object:
    """An object as it was kept: a copy of what it held, how it looked, and a digest, if functions have
    changed it since it came; None if it cannot be pickled."""

    obj: Any
    kind: Kind
    contents: Contents
    look: Contents
    changed: dict[int, bytes | None] = field(default_factory=dict)  # by its number, or nothing


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
        rank = self._rank
        called = rank.forget_calls()
        generator = rank.group.rng_state
        if command.time is None:
            found = {number: _shared(replica) for number, replica in rank.variables.items()}
            return messages.Secured(self._places(found), generator, called, {})
        last = self._last
        replicas = {
            number: self._copy(replica, last.replicas.get(number))
            for number, replica in rank.variables.items()
        }
        objects = {n: one for n, one in last.objects.items() if rank.objects.has(n)}
        came = rank.objects.forget_came()
        for number in filter(rank.objects.has, {*command.numbers, *came}):
            obj, kind = rank.objects.found(number)
            if kind not in _UNCHANGED:
                one = objects[number] = self._object(obj, kind, number, number in came)
                if number in command.changed and not one.changed:
                    one.changed[number] = self._rank.objects.digest(number)
        self._last, self._before = _Kept(command.time, replicas, objects, generator), last
        changed: dict[int, bytes | None] = {}
        for one in objects.values():
            changed |= one.changed
        return messages.Secured(self._places(replicas), generator, called, changed)

    def _copy(self, replica: Replica, last: Array | None) -> Array:
        """A copy of a replica in the arena: the last one, if it is still that."""
        whole = replica.whole
        if last is not None and same_bits(last, whole):
            return last
        fresh = self._rank.comm.empty(whole.shape, whole.dtype)
        self._rank.device.assign(fresh, whole)
        return fresh

    def _object(self, obj: Any, kind: Kind, number: int, came: bool) -> _Object:
        """An object as it is kept: the last time's, if it is still that; *came* says whether the program
        has sent it, or some of it, since then."""
        last = self._last.objects.get(number)
        if last is not None and not came and self._is_as_kept(number, last):
            return last
        look = {} if kind is ARRAY else self._rank.objects.look(number)
        kept = _Object(obj, kind, kind.kept(obj), look)
        was_changed = bool(last is not None and last.changed)
        if was_changed or (last is not None and not came):
            kept.changed[number] = self._rank.objects.digest(number)
        return kept

    def _is_as_kept(self, number: int, kept: _Object) -> bool:
        if kept.kind is ARRAY:  # faster than by digests
            return same_bits(kept.obj, kept.contents[WHOLE])
        return same_contents(kept.kind, kept.look, self._rank.objects.look(number))

    def _places(self, arrays: Mapping[int, Array]) -> tuple[messages.SecuredReplica, ...]:
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
        for number, one in kept.objects.items():
            if rank.objects.has(number) and not self._is_as_kept(number, one):
                one.kind.put_back(one.obj, one.contents)
        rank.group.restore_rng(kept.generator)


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
