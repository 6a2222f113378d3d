"""Tasks: while a map goes on, this rank takes one item after the other, and gives results back."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import InvalidValue, OutputError
from ..ipc.listener import Listener
from ..ipc.queue import SEVERAL, Packed, Taker
from ..messages import Ack, Phase, Work
from ..packing.kinds import (
    ARRAY,
    CLASS,
    CROWD,
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
    container_kind,
    same_contents,
)
from ..packing.pickles import is_small, simply_pickled
from ..values.arrays import Array, shortened
from ..values.foreign import is_mock, is_table, times_written
from .call import PreparedCall
from .merging import in_host_memory

if TYPE_CHECKING:
    from .rank import Rank


_LOOKED_AT = (DICT, SEQUENCE, INSTANCE, STATEFUL, TENSOR, CLASS, FUNCTION, NAME)
_LOOKED_INTO = 1 << 27  # bytes of a table up to which it is looked into: that takes 0.1 s
_KEPT = 1 << 24  # bytes of tensors and tables of which a map keeps what they held, to put it back
_WRITTEN = 1 << 20  # bytes of arrays of which it does: libraries may write to read-only ones
_SEVERAL = 32  # small results that are handed over together


class Tasks:
    """What a rank does with items, from the first map of a session on."""

    def __init__(self, rank: Rank, listener: Listener, queue: list[int]) -> None:
        """*queue* are the descriptors of the queue, which it owns."""
        self._rank = rank
        self._listener = listener
        self._frozen: list[Array] = []
        self._state: _State | None = None  # of a map that goes on, or has failed
        self._small: tuple[list[int], list[Any]] = (
            [],
            [],
        )  # results to be handed over together: numbers, values
        self._taker = Taker(rank.number, queue)

    def work(self, command: Work) -> Ack:
        """Take items until there are no more."""
        rank = self._rank
        self._taker.begin(self._listener.blocks_read())
        self._small = [], []
        spec = rank.functions[command.plan.function]
        call = PreparedCall(rank, command.plan)
        rank.begin(tuple(range(rank.size)), call)
        self._state = state = _State(rank, command.objects, spec.name)
        self._freeze([*state.arrays, *(variable.whole for variable in rank.variables.values())])
        try:
            with contextlib.closing(call.common()) as common:
                self._take_all(command, spec.fn, common, state)
        except Exception:
            self._flush()
            raise
        self._flush()
        self._state = None
        state.settle()
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
                args = self._loaded(packed, f"item {number} for the function {rank.function!r}")
            try:
                value = rank.run(fn, args, next(common))
            finally:
                if os.getpid() != rank.pid:  # the function has forked, and this is the child
                    try:
                        sys.stdout.flush()
                    finally:  # whatever its output has become
                        os._exit(0)
            done += 1
            state.ran.append(number)
            if done < 4 or not done & (done - 1):
                state.check()
            self._give(number, value, command.ordered)
        state.check(last=True)

    def _loaded(self, packed: Packed, called: str) -> Any:
        stream, buffers, own = packed
        if own:
            return self._rank.belongings.loaded(called, stream, buffers)
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
        """The command is over, or has failed: then objects are put back as they were before it."""
        for array in self._frozen:
            array.flags.writeable = True
        self._frozen = []
        state, self._state = self._state, None
        if state is not None:
            state.put_back()

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


class _Shared:
    """An object that the tasks of a function share.

    Attributes:
        first: how it looked when the map began.
        last: how it looked at the last check.
        kept: what it held when the map began, to put it back; None if that is too much to keep.
        spent: whether a task has set an attribute that had been set before: only the first may.
    """

    __slots__ = ("first", "kept", "kind", "last", "obj", "path", "spent")

    def __init__(self, obj: Any, kind: Kind, path: str) -> None:
        self.obj, self.kind, self.path = obj, kind, path
        self.first = self.last = self.look()
        self.kept: Contents | None = None
        self.spent = False

    def look(self) -> Contents:
        """How it looks now."""
        return {"written": times_written(self.obj)} if self.kind is TENSOR else self.kind.look(self.obj)

    def keep(self, left: int) -> int:
        """Keep what it holds, if a copy takes at most *left* bytes; returns how many are left then."""
        if self.kind is not TENSOR and self.kind is not OPAQUE:
            self.kept = self.first
            return left
        nbytes = int(self.obj.nbytes if self.kind is TENSOR else self.first[WHOLE].nbytes)
        if nbytes > left:
            return left
        self.kept = self.kind.kept(self.obj)
        return left - nbytes

    def is_fine(self) -> bool:
        """Whether nothing has changed since the last look, or only what may."""
        now, before = self.look(), self.last
        if same_contents(self.kind, before, now):
            return True
        if self.kind in (DICT, SEQUENCE, TENSOR, OPAQUE):
            return False
        if any(before.get(key) is not None and before[key] is not now.get(key) for key in before):
            if self.spent:
                return False
            self.spent = True
        self.last = now
        return True

    def put_back(self) -> None:
        """Have it hold what it held when the map began."""
        if self.kept is not None and not same_contents(self.kind, self.first, self.look()):
            self.kind.put_back(self.obj, self.kept)


class _State:
    """What the tasks of a function share on this worker: they may read it, not change it.

    What a container or a table holds must not change at all.  An attribute that is missing or None may
    be set, and any other by the first task, for this map: many objects prepare something when they are
    first used.  Mocks may note what they like, for this map.

    Attributes:
        arrays: those of NumPy's among it.
        ran: the numbers of the items since the last check.
    """

    def __init__(self, rank: Rank, objects: Mapping[int, str], name: str) -> None:
        """*objects* has the path of each object, by number; *name* is the function's."""
        self._name = name
        self._belongings = rank.belongings
        self.arrays: list[Array] = []
        self.ran: list[int] = []
        self._seen: list[_Shared] = []
        self._tables: list[_Shared] = []  # to look into one takes long
        self._copies: list[tuple[Array, Contents]] = []
        self._crowds: list[tuple[int, Contents]] = []
        self._mocks: list[_Shared] = []
        self._next_look = 0.0
        left, room = _KEPT, _WRITTEN
        found = {number: rank.belongings.found(number) for number in objects}
        records = {id(each) for obj, _ in found.values() if is_mock(obj) for each in vars(obj).values()}
        for number, path in objects.items():
            obj, kind = found[number]
            if isinstance(obj, np.ndarray):
                self.arrays.append(obj)
                if kind is ARRAY and obj.nbytes <= room:
                    self._copies.append((obj, ARRAY.kept(obj)))
                    room -= obj.nbytes
                continue
            if kind is CROWD:
                self._crowds.append((number, CROWD.look(obj)))
                kind = container_kind(obj)
            if kind in _LOOKED_AT or (kind is OPAQUE and hasattr(obj, "__next__")):
                shared = _Shared(obj, kind, path)
                left = shared.keep(left)
                free = is_mock(obj) or id(obj) in records
                (self._mocks if free else self._seen).append(shared)
            elif (
                is_table(obj) and (table := _Shared(obj, kind, path)).first[WHOLE].nbytes <= _LOOKED_INTO
            ):
                self._tables.append(table)
                left = table.keep(left)

    def check(self, last: bool = False) -> None:
        """Raises: InvalidValue if a task has changed something, as far as it is looked into: all if it
        was the *last*.  If not, it is done for half of the time at most."""
        start = time.monotonic()
        if start < self._next_look and not last:
            return
        for shared in (*self._tables, *self._seen) if last else self._seen:
            if not shared.is_fine():
                raise self._changed(shared.path)
        self.ran.clear()
        end = time.monotonic()
        self._next_look = 2 * end - start

    def settle(self) -> None:
        """The map has ended well: keep what tasks have prepared, where nothing was."""
        for shared in self._mocks:
            shared.put_back()
        for shared in self._seen:
            if shared.spent:
                shared.put_back()
            elif shared.last is not shared.first:
                self._belongings.prepared(shared.obj, shared.kind, shared.first, shared.last)
        for number, crowd in self._crowds:
            self._belongings.crowd_prepared(number, crowd)

    def put_back(self) -> None:
        """The map has failed: have all objects hold what they held before."""
        for shared in (*self._tables, *self._seen, *self._mocks):
            shared.put_back()
        for array, contents in self._copies:
            ARRAY.put_back(array, contents)

    def _changed(self, path: str) -> InvalidValue:
        at = ""
        if self.ran:
            first, last = self.ran[0], self.ran[-1]
            at = f", at item {last}" if first == last else f", at an item from {first} to {last}"
        return InvalidValue(
            f"the function {self._name!r} changes {path}{at}. Each worker has its own, which would hold "
            f"what the tasks of that worker have left. Change a copy of it, by copy.copy(…) or by "
            f"scikit-learn's clone(…), and return what is to be kept: map() collects the results. For a "
            f"cache, use functools.lru_cache."
        )
