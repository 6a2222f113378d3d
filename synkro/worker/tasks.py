"""Tasks: while a map goes on, this rank takes one item after the other, and gives results back."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue, OutputError
from ..ipc.channel import Listener
from ..ipc.queue import Packed, Taker
from ..memory.interrupts import uninterrupted
from ..messages import Ack, Phase, Work
from ..packing.kinds import DICT, INSTANCE, SEQUENCE, STATEFUL, TENSOR, Contents, Kind, same_contents
from ..packing.pickles import is_simple, kept_apart
from ..values.arrays import Array, shortened
from ..values.foreign import times_written
from .call import PreparedCall
from .merging import in_host_memory

if TYPE_CHECKING:
    from .rank import Rank


class Tasks:
    """What a rank does with items, from the first map of a session on."""

    def __init__(self, rank: Rank, listener: Listener, descriptors: tuple[int, ...]) -> None:
        """*descriptors* are the numbers of those that the queue needs."""
        self._rank = rank
        self._listener = listener
        self._frozen: list[Array] = []
        with uninterrupted():
            self._taker = Taker(rank.number, [os.dup(listener.descriptor(n)) for n in descriptors])
            for number in descriptors:
                listener.release(number)

    def work(self, command: Work) -> Ack:
        """Take items until there are no more."""
        rank, listener, taker = self._rank, self._listener, self._taker
        taker.begin(listener.blocks_read())
        spec = rank.functions[command.plan.function]
        call = PreparedCall(rank, command.plan)
        rank.begin(tuple(range(rank.size)), call)
        state = _State(rank, command.objects, spec.name)
        self._freeze([*state.arrays, *(variable.whole for variable in rank.variables.values())])
        done = 0
        with contextlib.closing(call.common()) as common:
            while (taken := taker.take(self._wait)) is not None:
                if listener.unwanted():  # and the function has caught the interrupt
                    raise KeyboardInterrupt
                number, (stream, buffers, own) = taken
                rank.begin_item((command.seed, command.number, number))
                args = (rank.belongings.loaded if own else _loaded)(stream, buffers)
                value = rank.run(spec.fn, args, next(common))
                done += 1
                if done < 4 or not done & (done - 1):
                    state.check()
                result = self._packed(value, number, spec.name)
                taker.give(number, result, listener.blocks_read, listener.wake_main)
                listener.give(number)
        return Ack()

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
        self._rank.report(Phase.TAKING, 0)
        self._listener.wait_for(condition)

    def _packed(self, value: Any, number: int, name: str) -> Packed:
        """A result, pickled.  Raises: OutputError."""
        try:
            if is_simple(value):
                buffers: list[memoryview] = []
                return pickle.dumps(value, 5, buffer_callback=kept_apart(buffers)), buffers, False
            if self._rank.device.xp is not np:
                value = in_host_memory(value, self._rank.device)
            stream, buffers = self._rank.belongings.packed_apart(value)
            return stream, buffers, True
        except Exception as error:
            raise OutputError(
                f"the result of the function {name!r} for item {number}, {shortened(value)}, cannot be "
                f"pickled: {type(error).__name__}: {error}"
            ) from None


class _State:
    """What the tasks of a function share on this worker: they may read it, not change it.

    What a container holds must not change at all.  An attribute may be set by the first task: many
    objects prepare something when they are first used.

    Attributes:
        arrays: those of NumPy's among it.
    """

    def __init__(self, rank: Rank, objects: Mapping[int, str], name: str) -> None:
        """*objects* has the path of each object, by number; *name* is the function's."""
        self._name = name
        self.arrays: list[Array] = []
        self._seen: list[tuple[Any, Kind, Contents, str]] = []
        self._settled: set[int] = set()  # the ids of objects whose attributes were set by a task
        for number, path in objects.items():
            obj, kind = rank.belongings.found(number)
            if isinstance(obj, np.ndarray):
                self.arrays.append(obj)
            elif kind in (DICT, SEQUENCE, INSTANCE, STATEFUL, TENSOR):
                self._seen.append((obj, kind, _look(obj, kind), path))

    def check(self) -> None:
        """Raises: InvalidValue if a task has changed something."""
        for index, (obj, kind, before, path) in enumerate(self._seen):
            now = _look(obj, kind)
            if same_contents(kind, before, now):
                continue
            if kind not in (INSTANCE, STATEFUL) or id(obj) in self._settled:
                raise InvalidValue(
                    f"the function {self._name!r} changes {path}, of which each worker has its own: it "
                    f"would hold what the tasks of that worker have left. Return what is to be kept: "
                    f"map() collects the results. For a cache, use functools.lru_cache."
                )
            self._settled.add(id(obj))
            self._seen[index] = (obj, kind, now, path)


def _look(obj: Any, kind: Kind) -> Contents:
    return {"written": times_written(obj)} if kind is TENSOR else kind.look(obj)


def _loaded(stream: bytes, buffers: Any) -> Any:
    return pickle.loads(stream, buffers=buffers)
