"""What a rank keeps for the case that a worker dies: replicas, and what functions have made of objects.

It lies in the arena, where the main process reads it when the worker is gone.  Objects are kept as
pickles of what they hold: all that they are made of, but for other objects with numbers, which are kept
by themselves.  Those that share something which has no number are pickled together, so that it is there
once.

In a session that replaces workers, what was kept last is how all was when the last call had ended; what
was kept before stays until the next time, as a worker may die while others keep things.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..errors import InternalError
from ..memory.interrupts import atomic
from ..packing.kinds import ARRAY, NAME, WHOLE, Contents, same_contents
from ..values.arrays import Array, code_of, same_bits
from .copying import PickledContents
from .replica import KeptReplica, Replica
from .workspace import Workspace

Bytes = NDArray[np.uint8]

Held = PickledContents | Array | Contents
"""What an object held: pickled, or of an array a copy, or, if pickle does not take it, how it looked."""


class _Object(NamedTuple):
    """An object as it was kept.

    *changed*: functions have changed it since it came; *lost*: then it should be pickled, and cannot be.
    """

    held: Held
    changed: bool = False
    lost: bool = False


class _Sharing(NamedTuple):
    """Objects that functions have changed, and that may share what they hold, by number; they are
    *stored* in the arena, pickled together."""

    objects: dict[int, _Object]
    stored: Bytes


@dataclass
class _Kept:
    """All that was kept at one time, where objects had *came*."""

    time: int = 0
    replicas: dict[int, Array] = field(default_factory=dict)
    objects: dict[int, _Object] = field(default_factory=dict)
    groups: Sequence[_Sharing] = ()
    generator: Any = None
    came: Collection[int] = ()


class Safekeeping:
    """What one rank keeps."""

    def __init__(self, rank: Workspace) -> None:
        self._rank = rank
        self._last, self._before = _Kept(), _Kept()

    def _at(self, time: int) -> _Kept:
        """What was kept at a *time*."""
        for kept in (self._last, self._before):
            if kept.time == time:
                return kept
        raise InternalError(f"nothing was kept at the time {time}.")

    def secure(self, command: messages.Secure) -> messages.Secured:
        """Keep what the command says, and tell where it is."""
        rank, last = self._rank, self._last if command.time is None else self._at(command.before)
        came = rank.objects.came
        if last is not self._last:  # what was kept after that does not count
            came.update(self._last.came)
        called = rank.called
        if command.time is None:  # for a map: nobody changes anything meanwhile
            replicas = {number: _shared(replica) for number, replica in rank.variables.items()}
            objects = {} if called else dict(last.objects)
            renewed = came & objects.keys()  # the program has changed them since
            for number in filter(rank.objects.has, (*command.numbers, *renewed)):
                objects[number] = self._as_changed(self._held(number, None))
        else:
            replicas = {
                number: self._copy(replica, last.replicas.get(number))
                for number, replica in rank.variables.items()
            }
            objects = dict(last.objects)
            self._look(objects, command, came)
        objects = {number: one for number, one in objects.items() if rank.objects.has(number)}
        groups = self._grouped(objects, last.groups)
        generator = rank.group.generator.state
        kept = _Kept(command.time or 0, replicas, objects, groups, generator, came)
        with atomic:
            self._before, self._last = last, kept
            rank.objects.forget_came()
            rank.forget_calls()
        return messages.Secured(
            self._replicas(replicas),
            tuple((tuple(g.objects), rank.comm.offset(g.stored), len(g.stored)) for g in groups),
            tuple(number for number, one in objects.items() if one.lost),
            generator,
            called,
        )

    def _look(self, objects: dict[int, _Object], command: messages.Secure, came: set[int]) -> None:
        """See what has become of *objects*: of those with these *numbers*, of all that they refer to,
        and of those that refer to some that have gone.  The program has sent those that *came*."""
        has, found = self._rank.objects.has, self._rank.objects.found
        gone = (n for n, one in objects.items() if not all(map(has, _links(one))))
        todo, seen = [*{*command.numbers, *came}, *gone], set[int]()
        while todo:
            number = todo.pop()
            if number in seen or not has(number) or found(number)[1] is NAME:  # which nobody assigns to
                continue
            seen.add(number)
            last = objects.get(number)
            held = self._held(number, last)
            if (
                last is not None
                and number not in command.changed
                and self._is_same(number, last.held, held)
            ):
                one = last if _inside(held) == _inside(last.held) else last._replace(held=held)
            elif number in command.changed or not (
                last is None or (number in came and not last.changed and not last.lost)
            ):
                one = self._as_changed(held)
            else:
                one = _Object(held)
            objects[number] = one
            todo += _links(one)

    def _as_changed(self, held: Held) -> _Object:
        """An object that functions have changed."""
        return _Object(held, True, lost=isinstance(held, dict))

    def _held(self, number: int, last: _Object | None) -> Held:
        """What an object holds; the *last* copy of an array, if it is still that."""
        objects = self._rank.objects
        obj, kind = objects.found(number)
        if kind is ARRAY:
            before = None if last is None else last.held
            return before if isinstance(before, np.ndarray) and same_bits(obj, before) else np.array(obj)
        pickled = objects.pickle([number])
        return objects.look(number) if pickled is None else pickled

    def _is_same(self, number: int, one: Held, other: Held) -> bool:
        if isinstance(one, PickledContents) and isinstance(other, PickledContents):
            return one.stream == other.stream
        if isinstance(one, dict) and isinstance(other, dict):
            return same_contents(self._rank.objects.found(number)[1], one, other)
        return one is other

    def _grouped(self, objects: dict[int, _Object], last: Sequence[_Sharing]) -> list[_Sharing]:
        """What functions have changed of *objects*, stored: as it was *last*, where it is still that.

        What cannot be stored is lost."""
        changed = {number: one for number, one in objects.items() if one.changed and not one.lost}
        groups, stored_by = [], {min(group.objects): group for group in last}
        for numbers in _who_share({number: _inside(one.held) for number, one in changed.items()}):
            members = {number: changed[number] for number in numbers}
            group = stored_by.get(min(numbers))
            if group is None or not _are_same(group.objects, members):
                pickled: Any = members[numbers[0]].held if len(numbers) == 1 else None
                if not isinstance(pickled, PickledContents):
                    pickled = self._rank.objects.pickle(numbers)
                if pickled is None:
                    objects |= {number: one._replace(lost=True) for number, one in members.items()}
                    continue
                stored: Bytes = self._rank.comm.empty((len(pickled.stream),), np.uint8)
                stored[:] = np.frombuffer(pickled.stream, np.uint8)
                group = _Sharing(members, stored)
            groups.append(group)
        return groups

    def _copy(self, replica: Replica, last: Array | None) -> Array:
        """A copy of a replica in the arena: the last one, if it is still that."""
        if last is not None and same_bits(last, replica.whole):
            return last
        return self._rank.copied(replica.whole)

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
        rank, kept = self._rank, self._at(command.time)
        for number, array in kept.replicas.items():
            replica = rank.variables.get(number)
            if replica is not None and not same_bits(replica.whole, array):
                replica.adopt(rank.copied(array))
        changed = {number for number, one in kept.objects.items() if self._is_changed(number, one)}
        groups = [group for group in kept.groups if not changed.isdisjoint(group.objects)]
        streams = [group.stored.tobytes() for group in groups]
        changed = changed.union(*(group.objects for group in groups))
        for number in changed.difference(*(group.objects for group in groups)):
            held = kept.objects[number].held
            obj, kind = rank.objects.found(number)
            if isinstance(held, PickledContents):
                streams.append(held.stream)
            else:
                kind.put_back(obj, {WHOLE: held} if isinstance(held, np.ndarray) else held)
        rank.objects.recover(streams)
        for number in filter(rank.objects.has, changed):  # what they hold are other objects now
            one = kept.objects[number]
            kept.objects[number] = one._replace(held=self._held(number, one))
        for group in groups:
            group.objects.update((number, kept.objects[number]) for number in group.objects)
        rank.group.generator.restore(kept.generator)

    def _is_changed(self, number: int, kept: _Object) -> bool:
        if not self._rank.objects.has(number):
            return False
        return not self._is_same(number, kept.held, self._held(number, kept))


def _links(one: _Object) -> Collection[int]:
    """The numbers of the objects that one refers to."""
    return one.held.links if isinstance(one.held, PickledContents) else ()


def _inside(held: Held) -> frozenset[int]:
    return held.inside if isinstance(held, PickledContents) else frozenset()


def _are_same(one: Mapping[int, _Object], other: Mapping[int, _Object]) -> bool:
    return one.keys() == other.keys() and all(one[number] is other[number] for number in one)


def _who_share(inside: Mapping[int, frozenset[int]]) -> list[list[int]]:
    """The numbers of objects, those together that share something: by what each holds *inside*."""
    groups: dict[int, list[int]] = {}  # by each number of a group, the group
    holder: dict[int, int] = {}  # by the id of something, the number of an object that holds it
    for number, held in inside.items():
        groups[number] = [number]
        for other in {holder.setdefault(ident, number) for ident in held}:
            if groups[other] is not groups[number]:
                groups[other] += groups[number]
                groups |= dict.fromkeys(groups[number], groups[other])
    return list({id(group): group for group in groups.values()}.values())


def restore(rank: Workspace, command: messages.Restore) -> None:
    """Have the variables, and the random generator, of the worker before."""
    for was, region in command.replicas:
        array = rank.copied(rank.array(region))
        kind = KeptReplica if was.kept else Replica
        rank.variables[was.number] = kind(was.name, array, rank.device, rank.comm)
    rank.group.generator.restore(command.generator)


def _shared(replica: Replica) -> Array:
    """A replica, where all ranks see it."""
    array = replica.in_place()
    if array is None or not array.flags.c_contiguous:
        raise InternalError(f"{replica.called()} shows some of its rows, or has them apart.")
    return array
