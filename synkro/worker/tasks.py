"""Tasks: while a map goes on, this rank takes one item after the other, and gives results back."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidValue, OutputError, SharedMemoryError, reason, shortened
from ..ipc.listener import Listener
from ..ipc.queue import ALONE, EACH, FAILED, TOGETHER, Batch, Pickles, Taker, Ticket, fits
from ..messages import Phase, Work
from ..packing import kinds
from ..packing.futures import Runner
from ..packing.pickles import NUMBERS, check_cause, is_small
from ..packing.together import Together
from ..values.arrays import Array
from ..values.foreign import is_mock, is_table, times_written
from ..values.random import state_of
from .call import PreparedCall
from .group import Task
from .merging import in_host_memory
from .terminal import end_lines, open_lines
from .workspace import Workspace

Columns = list[list[Any]]  # of items, by argument

_LOOKED_AT = (
    *(kinds.DICT, kinds.SEQUENCE, kinds.INSTANCE, kinds.STATEFUL, kinds.TENSOR),
    *(kinds.CLASS, kinds.FUNCTION, kinds.NAME, kinds.GENERATOR),
)
_LOOKED_INTO = 1 << 27  # bytes of a table up to which it is looked into: that takes 0.1 s
_KEPT = 1 << 24  # bytes of tensors and tables of which a map keeps what they held, to put it back
_WRITTEN = 1 << 20  # bytes of arrays of which it does: libraries may write to read-only ones
_GOAL = 1e-3  # seconds that the items of a run should take
_MOST = 1 << 12  # items of a run
_LATE = 5e-3  # seconds after which a run is told of, though its task goes on
_QUIET = 40  # looks without a run of several items, after which nobody looks any more
_SMALL = 1 << 11  # bytes of a result that needs no block
_ENOUGH = 1 << 14  # bytes of results that are handed over at once
_ENTRIES = 1 << 13  # … and how many entries they have, if they are pickled as one


class _Run:
    """Some items of a batch, one after the other.

    Attributes:
        ticket: what is to be done of the batch, from the first of these items on.
        first: the number of the first one.
        places: of the items that have not begun, in the batch.  Whoever takes one of it has it.
        results: of those that have ended: themselves, where *together* pickles them; else pickles.
        given: how many of them were handed over.
        nbytes: of those that were pickled.
        stop: the place after the last of these items.
        was_put_back: whether those that had not begun went back.
    """

    def __init__(self, ticket: Ticket, batch: Batch, count: int, together: Together[Any]) -> None:
        self.ticket = ticket
        self.together = together
        self.first = batch.first + ticket.start
        self.stop = min(ticket.start + count, ticket.stop)
        self.places = iter(range(ticket.start, self.stop))
        self.results: list[Any] = []
        self.given = self.nbytes = 0
        self.was_put_back = False

    def gave(self, count: int) -> None:
        """Note that *count* more results were handed over."""
        self.given += count

    def grew(self, nbytes: int) -> None:
        """Note that a result of so many bytes was pickled."""
        self.nbytes += nbytes

    def end_here(self) -> None:
        """Note that the items which had not begun went back."""
        self.was_put_back = True


class _Job(NamedTuple):
    """What a map has done with each item: *fn*, with what all have in *common*, if there is something.

    *state* is what the tasks share.  *goes_on*: after a task that has failed, too.
    """

    fn: Callable[..., Any]
    common: Iterator[dict[str, Any]] | None
    state: _State
    goes_on: bool


class Tasks(Task):
    """What a rank does with items, from the first map of a session on: one task after the other."""

    def __init__(self, rank: Workspace, listener: Listener, queue: list[int]) -> None:
        """*queue* are the descriptors of the queue, which it owns."""
        self._rank = rank
        self._listener = listener
        self._frozen: list[Array] = []
        self._state: _State | None = None  # of a map that goes on, or has failed
        self._taker = Taker(rank.number, queue, listener.blocks_read)
        os.register_at_fork(after_in_child=self._on_fork)
        self._items: tuple[Batch, Columns] | None = None  # of a batch that is pickled together
        self._function = 0  # the number of the last function
        self._quota = 1  # how many items the next run should have
        self._done = 0  # how many items were done in the command
        self._total = 0  # and in the life of this worker
        self._most: int | None = None  # how many of these it may do
        self._plainly = False  # whether errors are those of the program's own process
        self._check = 1  # after how many what they share is looked at
        self._lock = threading.Lock()  # held by whoever hands results over
        self._run: _Run | None = None  # that goes on
        self._looking = threading.Event()  # whether somebody looks at the run now and then
        self._looker: threading.Thread | None = None

    def work(self, command: Work) -> None:
        """Take items until there are no more."""
        rank = self._rank
        self._taker.begin()
        self._items, self._done, self._check = None, 0, 1
        if command.plan.function != self._function:
            self._function, self._quota = command.plan.function, 1
        spec = rank.functions[command.plan.function]
        call = PreparedCall(rank, command.plan)
        rank.begin(tuple(range(rank.size)), call)
        self.seed, self.map = command.seed, command.number
        self._most = command.most
        self._plainly = isinstance(spec.fn, Runner)
        if isinstance(spec.fn, Runner):
            spec.fn.tell_by(rank.draws.note)
        self._state = state = _State(rank, command.objects, spec.name)
        self._freeze([*state.arrays, *(variable.whole for variable in rank.variables.values())])
        with contextlib.closing(call.common()) as common:
            job = _Job(spec.fn, common if command.plan.inputs else None, state, command.goes_on)
            while not self._is_worn and (drawn := self._taker.take(self._wait)) is not None:
                self._do(*drawn, job)
        state.check(last=True)
        self._state = None
        state.settle()
        if self._is_worn:
            rank.leave()

    @property
    def _is_worn(self) -> bool:
        """Whether this worker has done all tasks that one is to do."""
        return self._most is not None and self._total >= self._most

    def _do(self, ticket: Ticket, batch: Batch, job: _Job) -> None:
        """Do the items of a ticket, run by run, unless others have nothing to do."""
        taker = self._taker
        while ticket.start < ticket.stop:
            if taker.withdrawn or not taker.wanted or self._is_worn:
                taker.put_back(ticket)
                self._listener.wake_sleepers()
                return
            together = self._rank.objects.together
            together.look_again()
            run = _Run(ticket, batch, self._count(), together)
            self._begin(run)
            began = time.perf_counter()
            try:
                problem = self._rank.start(self._follow, (run, batch, job), {})
            except BaseException as error:
                if not job.goes_on or not isinstance(error, Exception | SystemExit):
                    if self._taker.wanted:
                        self._give(run)
                    raise
                problem = error
            finally:
                self._let_go()
            took = time.perf_counter() - began
            problem = self._give_all(run, job.goes_on) or problem
            done = len(run.results)
            if problem is not None:  # that of an item or a result, if it is not the function's
                if not job.goes_on:
                    raise problem
                done += 1
                taker.advance(ticket.start + done)  # others may try it again
                self._give_failure(run, problem)
            self._done += done
            self._total += done
            if done:
                job.state.note(run.first, run.first + done - 1)
                if done >= self._quota or took > _GOAL:  # else it says little
                    self._quota = max(1, min(_MOST, int(_GOAL * done / took)))
            if self._done >= self._check:
                self._check = max(self._done + 1, 2 * self._done - 2)
                job.state.check()
            if run.was_put_back:
                return
            ticket = self._share(ticket._replace(start=ticket.start + done))

    def _count(self) -> int:
        """How many items the next run should have."""
        count = self._quota if self._done else 1
        return count if self._most is None else min(count, self._most - self._total)

    def _share(self, ticket: Ticket) -> Ticket:
        """Put half of *ticket* back, if there is no other; returns what is left of it."""
        middle = (ticket.start + ticket.stop + 1) // 2
        rest = ticket._replace(start=middle)
        if middle == ticket.stop or not self._taker.is_dry or not self._taker.put_back(rest):
            return ticket
        self._listener.wake_sleepers()
        return ticket._replace(stop=middle)

    def _follow(self, run: _Run, batch: Batch, job: _Job) -> BaseException | None:
        """Do the items of a run, until there are some large results.

        Returns why an item, or a result, is none: what the function raises is raised.
        """
        first, give = batch.first, run.results.append
        words, place = self._listener.count
        device = None if self._rank.device.xp is np else self._rank.device
        try:
            columns = self._columns(batch)
        except Exception as error:
            return error
        fn, items = job.fn, None
        if columns and len(columns) == 1 and job.common is None and not self._listener.traced:
            items = columns[0]
        draws = self._rank.draws
        draws.note(fn)
        notes = draws.note_again()
        for index in run.places:
            self.number = words[place] = first + index
            if notes:
                draws.note_again()
            if items is not None:  # what a task makes of its item does not stay
                item, items[index] = items[index], None
                value = fn(item)
            else:
                try:
                    args, kwargs = self._arguments(batch, columns, index, job.common)
                except Exception as error:
                    return error
                value = fn(*args, **kwargs)
            if device is not None:
                device.settle()
            if open_lines:
                end_lines()
            if type(value) in NUMBERS:
                give(value)
                continue
            try:
                if self._keep(value, run):
                    break
            except OutputError as error:
                return error
        return None

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    def _columns(self, batch: Batch) -> Columns | None:
        """The items of a batch that are pickled together, by argument; None of any other.

        Those that have begun are no longer there.
        """
        if batch.pickles.kind != TOGETHER:
            return None
        if self._items is None or self._items[0] is not batch:
            self._items = batch, self._made(batch.pickles, batch.pickles.parts[0])
        return self._items[1]

    def _arguments(
        self, batch: Batch, columns: Columns | None, index: int, common: Iterator[dict[str, Any]] | None
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """What the function gets for an item of a batch."""
        self._rank.report(Phase.TASK, self.number)
        kwargs = {} if common is None else next(common)
        if columns is None:
            return self._unpickled(batch.pickles, index), kwargs
        args = [column[index] for column in columns]
        for column in columns:
            column[index] = None
        return args, kwargs

    def _unpickled(self, items: Pickles, index: int) -> Any:
        """The arguments of an item, made anew."""
        stream, *buffers = items.parts if items.kind == ALONE else [items.parts[index]]
        return self._made(items, stream, buffers)

    def _made(self, items: Pickles, stream: Any, buffers: Sequence[Any] = ()) -> Any:
        if not items.by_us:
            return pickle.loads(stream, buffers=buffers)
        called = f"item {self.number} for the function {self._rank.function!r}"
        return self._rank.objects.unpickled(called, stream, buffers)

    def _wait(self, condition: Callable[[], bool]) -> None:
        self._listener.wake_main()
        self._rank.report(Phase.TAKING, 0)
        self._listener.wait_for(condition, looks=not self._done or self._quota > 1)

    # ── results ──────────────────────────────────────────────────────────────────────────────────

    def _keep(self, value: Any, run: _Run) -> bool:
        """Add a result to those of the run; returns whether they should be handed over now."""
        give, together = run.results.append, run.together
        if is_small(value[0] if self._plainly else value):
            give(value)
            return False
        if copies := together.copied(value):
            give(copies[0])
            return together.count > _ENTRIES
        give(pickled := self._pickled(value))
        nbytes = len(pickled.parts[0])
        run.grew(nbytes)
        return pickled.kind == ALONE or nbytes > _SMALL or run.nbytes > _ENOUGH

    def _pickled(self, value: Any) -> Pickles:
        """A result, pickled.  Raises: OutputError."""
        try:
            if self._rank.device.xp is not np:
                value = in_host_memory(value, self._rank.device)
            stream, buffers, by_us = self._rank.objects.pickled_apart(value)
        except Exception as error:
            if self._plainly:
                raise
            what = f"the result of the function {self._rank.function!r} for item {self.number}"
            check_cause(error, what, OutputError)
            raise OutputError(
                f"{what}, {shortened(value)}, cannot be pickled: {reason(error)}"
            ) from None
        return Pickles(ALONE if buffers else EACH, [stream, *buffers], by_us)

    def _give_all(self, run: _Run, goes_on: bool) -> BaseException | None:
        """Hand the results of a run over; if it *goes_on* where there is no memory for one, that and
        those after it are none, and why is returned."""
        try:
            self._give(run)
        except SharedMemoryError as error:
            if not goes_on:
                raise
            del run.results[run.given :]
            return error
        return None

    def _give(self, run: _Run) -> None:
        """Hand the results of a run over."""
        with self._lock:
            while run.given < len(run.results):
                self._give_some(run, len(run.results))

    def _give_failure(self, run: _Run, error: BaseException) -> None:
        """Hand over what has become of the task after the last one of a run that has a result."""
        self._items = None  # another try gets the item as it was
        if open_lines:
            end_lines()
        failed = pickle.dumps((self._rank.number, self._rank.failure(error)), 5)
        number, listener = run.first + len(run.results), self._listener
        self._taker.give(run.ticket.slot, number, 1, Pickles(FAILED, [failed]), listener.wake_main)
        listener.wake_main()

    def _give_some(self, run: _Run, stop: int, late: bool = False) -> bool:
        """Hand over results up to place *stop* of the run, as many as are pickled alike.

        If the run is *late*, as many as need no block, which its own thread makes; False if none does.
        """
        start, results = run.given, run.results
        first = results[start]
        if isinstance(first, Pickles):
            alike = results[start : start + 1]
            if first.kind == EACH:
                alike = [*takewhile(lambda each: _is_like(each, first), results[start:stop])]
            several = first._replace(parts=[part for each in alike for part in each.parts])
        else:
            alike, classes = results[start:stop], [*map(type, results[start:stop])]
            if Pickles in classes:
                del alike[classes.index(Pickles) :]
            stream, by_us = run.together.pickled(alike)
            several = Pickles(TOGETHER, [stream], by_us)
        stop = start + len(alike)
        if late and not fits(several):
            return stop - start > 1 and self._give_some(run, (start + stop) // 2, late)
        listener, number = self._listener, run.first + start
        self._taker.give(run.ticket.slot, number, stop - start, several, listener.wake_main)
        run.gave(stop - start)
        if listener.is_expected(number, stop - start):
            listener.wake_main()
        return True

    # ── runs that take longer than was expected ──────────────────────────────────────────────────

    def _begin(self, run: _Run) -> None:
        """A run begins; if it may be late, a thread looks at it."""
        self._run, self.number = run, run.first
        self._rank.begin_task(self)
        self._rank.report(Phase.TASK, run.first)
        if run.ticket.stop - run.ticket.start > 1 and not self._looking.is_set():
            self._looking.set()
            if self._looker is None:
                self._looker = threading.Thread(target=self._look, name="synkro-tasks", daemon=True)
                self._looker.start()

    def _look(self) -> None:
        """Look at the run now and then, as long as there are some."""
        while True:
            self._looking.wait()
            before, quiet = None, 0
            while quiet < _QUIET:
                time.sleep(_LATE)
                run = self._run
                quiet = 0 if run is not None else quiet + 1
                if run is not None and run is before:
                    self._hand_over_late(run)
                before = run
            self._looking.clear()
            if self._run is not None:
                self._looking.set()

    def _hand_over_late(self, run: _Run) -> None:
        """Hand over what a run has done; where others have nothing to do, they do what has not begun."""
        with self._lock:
            if run is not self._run:  # it has ended meanwhile, and the map, perhaps
                return
            while run.given < len(run.results) and self._give_some(run, len(run.results), late=True):
                pass
            if run.was_put_back or not self._taker.is_dry:
                return
            rest = list(run.places)
            ticket = run.ticket._replace(start=rest[0] if rest else run.stop)
            if ticket.start == ticket.stop or not self._taker.put_back(ticket):
                return
            run.end_here()
        self._listener.wake_sleepers()

    def _let_go(self) -> None:
        """The run is over: nobody hands something of it over, or puts it back, any more."""
        with self._lock:
            self._run = None

    # ── what tasks share ─────────────────────────────────────────────────────────────────────────

    def _on_fork(self) -> None:
        """The child of a task that has forked ends with the task."""
        if self._run is not None:
            list(self._run.places)

    def end(self) -> None:
        """The command is over, or has failed: then objects are put back as they were before it."""
        self._let_go()  # where another interrupt came before it did
        for array in self._frozen:
            array.flags.writeable = True
        self._frozen = []
        state, self._state = self._state, None
        if state is not None:
            state.put_back()

    def _freeze(self, arrays: list[Array]) -> None:
        for array in arrays:
            if isinstance(array, np.ndarray) and array.flags.writeable and _can_thaw(array):
                self._frozen.append(array)
                array.flags.writeable = False


def _can_thaw(array: Array) -> bool:
    """Whether an array that was made read-only can be made writeable again: its memory says so."""
    base = array.base
    while isinstance(base, np.ndarray):
        base = base.base
    with contextlib.suppress(TypeError):  # it shows its memory another way
        return base is None or not memoryview(base).readonly
    return False


def _is_like(one: Any, other: Pickles) -> bool:
    """Whether a result can be in one batch with another, which is pickled by itself."""
    return isinstance(one, Pickles) and one.kind == EACH and one.by_us == other.by_us


class _Shared:
    """An object that the tasks of a function share.

    Attributes:
        first: how it looked when the map began.
        last: how it looked at the last check.
        kept: what it held when the map began, to put it back; None if that is too much to keep.
        was_set: whether the first task has set an attribute that had been set before.
    """

    __slots__ = ("first", "kept", "kind", "last", "obj", "path", "was_set")

    def __init__(self, obj: Any, kind: kinds.Kind, path: str) -> None:
        self.obj, self.kind, self.path = obj, kind, path
        self.first = self.last = self.look()
        self.kept: kinds.Contents | None = None
        self.was_set = False

    def look(self) -> kinds.Contents:
        """How the object looks now."""
        if self.kind is kinds.TENSOR:
            return {"written": times_written(self.obj)}
        if self.kind is kinds.GENERATOR:
            return {kinds.WHOLE: pickle.dumps(state_of(self.obj))}
        return self.kind.look(self.obj)

    def keep(self, left: int) -> int:
        """Keep what the object holds, if a copy takes at most *left* bytes; returns how many are left
        then."""
        nbytes = 0
        if self.kind is kinds.TENSOR:  # of sparse ones more than they have
            nbytes = int(self.obj.numel() * self.obj.element_size())
        elif self.kind is kinds.OPAQUE:
            nbytes = int(self.first[kinds.WHOLE].nbytes)
        elif self.kind is not kinds.GENERATOR:
            self.kept = self.first
            return left
        if nbytes > left:
            return left
        self.kept = self.kind.kept(self.obj)
        return left - nbytes

    def is_allowed(self) -> bool:
        """Whether nothing has changed since the last look, or only what may."""
        now, before = self.look(), self.last
        if kinds.same_contents(self.kind, before, now):
            return True
        if self.kind in (kinds.DICT, kinds.SEQUENCE, kinds.TENSOR, kinds.OPAQUE, kinds.GENERATOR):
            return False
        if any(before.get(key) is not None and before[key] is not now.get(key) for key in before):
            if before is not self.first:  # a later task than the one that first set anything
                return False
            self.was_set = True
        self.last = now
        return True

    def put_back(self) -> None:
        """Have the object hold what it held when the map began."""
        if self.kept is not None and not kinds.same_contents(self.kind, self.first, self.look()):
            self.kind.put_back(self.obj, self.kept)


class _State:
    """What the tasks of a function share on this worker: they may read it, not change it.

    What a container or a table holds must not change at all.  An attribute that is missing or None may
    be set, and any other by the first task, for this map: many objects prepare something when they are
    first used.  Mocks may note what they like, and values of a ``ContextVar`` be set, for this map.

    Attributes:
        arrays: those of NumPy's among it.
    """

    def __init__(self, rank: Workspace, objects: Mapping[int, str], name: str) -> None:
        """*objects* has the path of each object, by number; *name* is the function's."""
        self._name = name
        self._objects = rank.objects
        self.arrays: list[Array] = []
        self._ran: list[int] = []  # items since the last check
        self._seen: list[_Shared] = []
        self._tables: list[_Shared] = []  # to look into one takes long
        self._copies: list[tuple[Array, kinds.Contents]] = []
        self._crowds: list[tuple[int, kinds.Contents]] = []
        self._free: list[_Shared] = []
        self._next_look = 0.0
        left, room = _KEPT, _WRITTEN
        found = {number: rank.objects.found(number) for number in objects}
        records = {id(each) for obj, _ in found.values() if is_mock(obj) for each in vars(obj).values()}
        for number, path in objects.items():
            obj, kind = found[number]
            if isinstance(obj, np.ndarray):
                self.arrays.append(obj)
                if kind is kinds.ARRAY and obj.nbytes <= room:
                    self._copies.append((obj, kinds.ARRAY.kept(obj)))
                    room -= obj.nbytes
                continue
            if kind is kinds.CROWD:
                self._crowds.append((number, kinds.CROWD.look(obj)))
                kind = kinds.container_kind(obj)
            free = kind is kinds.CONTEXT or is_mock(obj) or id(obj) in records
            if free or kind in _LOOKED_AT or (kind is kinds.OPAQUE and hasattr(obj, "__next__")):
                shared = _Shared(obj, kind, path)
                left = shared.keep(left)
                (self._free if free else self._seen).append(shared)
            elif (
                is_table(obj)
                and (table := _Shared(obj, kind, path)).first[kinds.WHOLE].nbytes <= _LOOKED_INTO
            ):
                self._tables.append(table)
                left = table.keep(left)

    def note(self, first: int, last: int) -> None:
        """Tasks have run on the items from number *first* to number *last*."""
        self._ran += first, last

    def check(self, last: bool = False) -> None:
        """Raises: InvalidValue if a task has changed something, as far as it is looked into: all if it
        was the *last*.  If not, it is done for half of the time at most."""
        start = time.monotonic()
        if start < self._next_look and not last:
            return
        for shared in (*self._tables, *self._seen) if last else self._seen:
            if not shared.is_allowed():
                raise self._changed(shared)
        self._ran.clear()
        self._next_look = 2 * time.monotonic() - start

    def settle(self) -> None:
        """The map has ended well: keep what tasks have prepared, where nothing was."""
        for shared in self._free:
            shared.put_back()
        for shared in self._seen:
            if shared.was_set:
                shared.put_back()
            elif shared.last is not shared.first:
                self._objects.prepared(shared.obj, shared.kind, shared.first, shared.last)
        for number, crowd in self._crowds:
            self._objects.crowd_prepared(number, crowd)

    def put_back(self) -> None:
        """The map has failed: have all objects hold what they held before."""
        for shared in (*self._tables, *self._seen, *self._free):
            shared.put_back()
        for array, contents in self._copies:
            kinds.ARRAY.put_back(array, contents)

    def _changed(self, shared: _Shared) -> InvalidValue:
        at = ""
        if self._ran:
            first, last = self._ran[0], self._ran[-1]
            at = f", at item {last}" if first == last else f", at an item from {first} to {last}"
        if shared.kind is kinds.GENERATOR:
            return InvalidValue(
                f"the function {self._name!r} draws from {shared.path}{at}. Each worker has a copy of "
                f"it, so the numbers would repeat, and depend on who runs which task. Draw from "
                f"synk.rng() in the function: it is the item's own. Or put a seed into each item, and "
                f"draw from np.random.default_rng(seed)."
            )
        holds = shared.kind in (kinds.DICT, kinds.SEQUENCE)
        inside = holds and "." in shared.path  # what a flat copy would share
        copier = f"copy.{'deepcopy' if inside else 'copy'}(…)"
        return InvalidValue(
            f"the function {self._name!r} changes {shared.path}{at}. Each worker has its own, which "
            f"would hold what the tasks of that worker have left. Change a copy of it, by {copier} or "
            f"by scikit-learn's clone(…), and return what is to be kept: map() collects the results. "
            f"For a cache of your own, use functools.lru_cache; an object that keeps one for itself let "
            f"a function with functools.lru_cache make, which runs once on each worker."
        )
