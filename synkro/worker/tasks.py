"""Tasks: while a map goes on, this rank takes one item after the other, and gives results back."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue, OutputError
from ..ipc.channel import Listener
from ..ipc.queue import SEVERAL, Packed, Taker
from ..messages import Ack, Phase, Work
from ..packing.kinds import (
    CLASS,
    DICT,
    FUNCTION,
    INSTANCE,
    NAME,
    OPAQUE,
    SEQUENCE,
    STATEFUL,
    TENSOR,
    WHOLE,
    Contents,
    Kind,
    same_contents,
)
from ..packing.pickles import is_small, simply_pickled
from ..values.arrays import Array, shortened
from ..values.foreign import is_table, times_written
from .call import PreparedCall
from .merging import in_host_memory

if TYPE_CHECKING:
    from .rank import Rank


_LOOKED_AT = (DICT, SEQUENCE, INSTANCE, STATEFUL, TENSOR, CLASS, FUNCTION, NAME)
_LOOKED_INTO = 1 << 27  # bytes of a table up to which it is looked into: that takes 0.1 s
_SEVERAL = 32  # small results that are handed over together


class Tasks:
    """What a rank does with items, from the first map of a session on."""

    def __init__(self, rank: Rank, listener: Listener, descriptors: tuple[int, ...]) -> None:
        """*descriptors* are the numbers of those that the queue needs."""
        self._rank = rank
        self._listener = listener
        self._frozen: list[Array] = []
        self._small: tuple[list[int], list[Any]] = (
            [],
            [],
        )  # results to be handed over together: numbers, values
        self._taker = Taker(rank.number, [os.dup(listener.descriptor(n)) for n in descriptors])
        for number in descriptors:
            listener.release(number)

    def work(self, command: Work) -> Ack:
        """Take items until there are no more."""
        rank = self._rank
        self._taker.begin(self._listener.blocks_read())
        self._small = [], []
        spec = rank.functions[command.plan.function]
        call = PreparedCall(rank, command.plan)
        rank.begin(tuple(range(rank.size)), call)
        state = _State(rank, command.objects, spec.name)
        self._freeze([*state.arrays, *(variable.whole for variable in rank.variables.values())])
        try:
            with contextlib.closing(call.common()) as common:
                self._take_all(command, spec.fn, common, state)
        except Exception:
            self._flush()
            raise
        self._flush()
        return Ack()

    def _take_all(
        self, command: Work, fn: Callable[..., Any], common: Iterator[dict[str, Any]], state: _State
    ) -> None:
        rank, taker = self._rank, self._taker
        done = 0
        group: Any = None
        while (taken := taker.take(self._wait)) is not None:
            number, packed, place = taken
            rank.begin_item((command.seed, command.number, number))
            if place >= 0:
                if packed is not group:
                    group, items = packed, pickle.loads(packed[0])
                args = items[place]
            else:
                args = self._loaded(packed)
            try:
                value = rank.run(fn, args, next(common))
            finally:
                if os.getpid() != rank.pid:  # the function has forked, and this is the child
                    try:
                        sys.stdout.flush()
                    finally:  # whatever its output has become
                        os._exit(0)
            done += 1
            if done < 4 or not done & (done - 1):
                state.check()
            self._give(number, value, command.ordered)
        state.check(last=True)

    def _loaded(self, packed: Packed) -> Any:
        stream, buffers, own = packed
        if own:
            return self._rank.belongings.loaded(stream, buffers)
        return pickle.loads(stream, buffers=buffers)

    def _give(self, number: int, value: Any, at_once: bool) -> None:
        """Hand a result over; small ones together, unless *at_once* or if they are waited for."""
        expected = self._listener.is_expected(number)
        if is_small(value):
            numbers, values = self._small
            numbers.append(number)
            values.append(value)
            if at_once or expected or len(numbers) >= _SEVERAL:
                self._flush()
        else:
            self._flush()
            result = self._packed(value, number)
            self._taker.give(number, result, self._listener.blocks_read, self._listener.wake_main)
        if expected:
            self._listener.wake_main()

    def _flush(self) -> None:
        """Hand over the small results that were kept."""
        small, self._small = self._small, ([], [])
        if small[0]:
            stream = pickle.dumps(small, 5)
            listener = self._listener
            self._taker.give(SEVERAL, (stream, (), False), listener.blocks_read, listener.wake_main)

    def end(self) -> None:
        """The command is over, or has failed."""
        for array in self._frozen:
            array.flags.writeable = True
        self._frozen = []

    def _freeze(self, arrays: list[Array]) -> None:
        for array in arrays:
            if isinstance(array, np.ndarray) and array.flags.writeable:
                self._frozen.append(array)
                array.flags.writeable = False

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._flush()
        self._listener.wake_main()
        self._rank.report(Phase.TAKING, 0)
        self._listener.wait_for(condition)

    def _packed(self, value: Any, number: int) -> Packed:
        """A result, pickled.  Raises: OutputError."""
        try:
            if (simply := simply_pickled(value)) is not None:
                return *simply, False
            if self._rank.device.xp is not np:
                value = in_host_memory(value, self._rank.device)
            return *self._rank.belongings.packed_apart(value), True
        except Exception as error:
            raise OutputError(
                f"the result of the function {self._rank.function!r} for item {number}, "
                f"{shortened(value)}, cannot be pickled: {type(error).__name__}: {error}"
            ) from None


class _State:
    """What the tasks of a function share on this worker: they may read it, not change it.

    What a container or a table holds must not change at all.  An attribute that is missing or None may
    be set, and any other by the first task: many objects prepare something when they are first used.

    Attributes:
        arrays: those of NumPy's among it.
    """

    def __init__(self, rank: Rank, objects: Mapping[int, str], name: str) -> None:
        """*objects* has the path of each object, by number; *name* is the function's."""
        self._name = name
        self._belongings = rank.belongings
        self.arrays: list[Array] = []
        self._seen: list[tuple[Any, Kind, Contents, str]] = []
        self._tables: list[tuple[Any, Contents, str]] = []  # to look into one takes long
        self._settled: set[int] = set()  # the ids of objects whose attributes were set by a task
        for number, path in objects.items():
            obj, kind = rank.belongings.found(number)
            if isinstance(obj, np.ndarray):
                self.arrays.append(obj)
            elif kind in _LOOKED_AT or (kind is OPAQUE and hasattr(obj, "__next__")):
                self._seen.append((obj, kind, _look(obj, kind), path))
            elif is_table(obj) and (look := OPAQUE.look(obj))[WHOLE].nbytes <= _LOOKED_INTO:
                self._tables.append((obj, look, path))

    def check(self, last: bool = False) -> None:
        """Raises: InvalidValue if a task has changed something, as far as it is looked into: all if it
        was the *last*."""
        for table, before, path in self._tables if last else ():
            if OPAQUE.look(table) != before:
                raise self._changed(path)
        for index, (obj, kind, before, path) in enumerate(self._seen):
            now = _look(obj, kind)
            if same_contents(kind, before, now):
                continue
            if kind in (DICT, SEQUENCE, TENSOR, OPAQUE):
                raise self._changed(path)
            if any(before.get(key) is not None and before[key] is not now.get(key) for key in before):
                if id(obj) in self._settled:
                    raise self._changed(path)
                self._settled.add(id(obj))
            self._belongings.prepared(obj, kind, before, now)
            self._seen[index] = (obj, kind, now, path)

    def _changed(self, path: str) -> InvalidValue:
        return InvalidValue(
            f"the function {self._name!r} changes {path}, of which each worker has its own: it would "
            f"hold what the tasks of that worker have left. Return what is to be kept: map() collects "
            f"the results. For a cache, use functools.lru_cache."
        )


def _look(obj: Any, kind: Kind) -> Contents:
    return {"written": times_written(obj)} if kind is TENSOR else kind.look(obj)
