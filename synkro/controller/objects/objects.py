"""``Objects``: the objects that functions bring along, as the workers have them.

walk   what a function reaches, and what of it is new or has changed here
compare  whether the workers have changed it, too
write    new functions and objects, and new contents of known ones, in one stream
send     one command to all ranks; then both sides agree
"""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ...errors import InvalidType, InvalidValue, UsageError, WorkerError, warn
from ...memory.departures import WhileThere
from ...memory.segment import Segment, aligned
from ...messages import Assign, Command, Compare, Fetch, FunctionSpec, Parcel, Preserve, Renew
from ...packing.kinds import (
    ARRAY,
    CLASS,
    DICT,
    FIXED,
    FUNCTION,
    KINDS,
    NAME,
    OPAQUE,
    Contents,
    Digest,
    alike,
    is_plain,
    kind_of,
    same_contents,
    same_entries,
)
from ...packing.pickles import OUT_OF_BAND, NumberOf, Writer
from ...plan.call import Access
from ...values.arrays import checked_int, shortened
from ..engine.engine import Engine, State
from .explain import explain, explain_loading
from .glances import Assigned
from .parts import find_parts, find_parts_of, loading
from .remembered import UNKNOWN
from .walk import Found, Known, Look, Registry, Walk
from .watch import Watch
from .words import contradiction, missed, uncompared

_LOOKED_AT = 1 << 24  # bytes of an array that is compared at the second call of a function

_NO_SPECS: Mapping[int, FunctionSpec] = {}


class Change(NamedTuple):
    """What an object is to hold on the workers.

    Attributes:
        known: the object.
        contents: its new contents, or the entries that are new.
        gone: the entries to delete.
        before: what the workers took over last, for the same entries.
        whole: whether the object is to hold nothing else.
        values: an array with the elements to send, where those of the object may be others by now.
    """

    known: Known
    contents: Contents
    gone: tuple[Any, ...]
    before: Contents
    whole: bool = False
    values: Any = None


class Objects:
    """The objects of one session."""

    def __init__(self, engine: Engine, master_rank: int) -> None:
        self._engine = engine
        self._master = master_rank
        self._watches: WhileThere[Watch, None] = WhileThere()
        self._registry = Registry(engine.directory.number, engine.directory.watch)
        self._functions: WhileThere[Any, Watch | None] = WhileThere()  # with what ``dump`` compares
        self._numba: Any = None
        self._told: set[str] = set()  # the names of objects that are not compared at each call

    # ── with functions ───────────────────────────────────────────────────────────────────────────

    def send(
        self,
        functions: dict[int, Any],
        command: Callable[[Parcel], Command],
        on_tick: Callable[[], None] | None,
    ) -> None:
        """Send *functions* (by number) and what they bring along, by the *command* for a parcel.

        Raises: InvalidType for what cannot be pickled, InvalidValue for what changed on both sides;
        WorkerError if a worker cannot load them.
        """
        walk = Walk(self._registry)
        roots = {}
        for number, function in functions.items():
            roots[number] = walk.visit(function.spec.fn, function.name)
            roots[number] += walk.visit(function.spec.finish, function.name)
        specs = {number: function.spec for number, function in functions.items()}
        known = self._deliver(walk, command, specs, on_tick)
        for number, function in functions.items():
            function.hold([known[each] for each in roots[number] if each in known])
            self._functions[function] = None

    def watch(self, function: Any) -> Watch:
        """What the calls of *function* are to compare."""
        watch = Watch(function.roots)
        for name, sentence in uncompared(watch.uncompared, function.name):
            if name not in self._told:
                self._told.add(name)
                self._engine.say(f"Synkro: {sentence}")
        return self._listed(watch)

    def renew(self, function: Any, watch: Watch, view: Look | None = None) -> Watch:
        """Send what has changed of what a call of *function* compares; returns its watch from now on.

        *view* is what the call is to see, where that is not what is there now.
        """
        if watch.due and view is None:
            return self._look_again(function, watch)
        while True:
            changed = watch.changed() if view is None else list(view)
            defined = watch.defined(changed)
            looked_at = {known for known, _, _ in changed}
            changed += [(k, k.kind.look(k.obj), None) for k in defined if k not in looked_at]
            there = reached(function.roots, {known: contents for known, contents, _ in changed})
            walk = Walk(self._registry)
            news = {known for known, contents, _ in changed if not _is_as_known(known, contents)}
            walk.revisit(changed, (there & news) | set(defined))
            self._deliver(walk, Renew)
            if watch.refresh() and not defined:
                return watch
            # other objects are in these places, which may have changed since another function sent them
            watch = self._listed(watch.again())
            if view is not None or not watch.changed():
                return watch

    @contextlib.contextmanager
    def assigning(self, watch: Watch, assigned: Sequence[Assigned], command: bytes) -> Iterator[bytes]:
        """A block that sends the command which it yields: *command*, and before it what was *assigned*.

        Numbers and strings hold nothing else, so they need no walk, and no question to the workers.
        """
        entries: dict[Known, Contents] = {}
        for one in assigned:
            known, key = one.place
            if not alike((known.contents or {})[key], one.value):
                entries.setdefault(known, {})[key] = one.value
        for one in assigned:  # until all ranks have them, and this side knows it
            one.glance.last[one.at] = UNKNOWN
        if entries:
            new = {known.number: contents for known, contents in entries.items()}
            command = pickle.dumps(Assign(new, command), 5)
            for known, contents in entries.items():
                known.assign(dict.fromkeys(contents, UNKNOWN))
            for other in self._watches:
                if other is not watch:
                    other.expire()
        try:
            yield command
        except WorkerError:  # all ranks have answered
            self._agree(entries, assigned)
            raise
        self._agree(entries, assigned)

    @staticmethod
    def _agree(entries: Mapping[Known, Contents], assigned: Sequence[Assigned]) -> None:
        for known, contents in entries.items():
            known.assign(contents)
        for one in assigned:
            one.glance.last[one.at] = one.value

    def _expire_all_watches(self) -> None:
        """The next calls of all functions are to look closer."""
        for watch in self._watches:
            watch.expire()

    def view(self, function: Any, watch: Watch) -> tuple[Watch, Look]:
        """What a call that is submitted now is to see, beside the watch of *function* from now on.

        Where other objects are than before, they are sent at once, which waits for the running call.
        """
        if watch.moved():
            with self._engine.lock:
                self._engine.turns.land()
                watch = self.renew(function, watch)
        return watch, watch.look()

    def _listed(self, watch: Watch) -> Watch:
        self._watches[watch] = None
        return watch

    def _look_again(self, function: Any, watch: Watch) -> Watch:
        """Compare all that *function* uses, and send what has changed, with a warning of what is not
        compared at each call."""
        start = time.monotonic()
        walk = Walk(self._registry, most=_LOOKED_AT)
        walk.visit(function.spec.fn, function.name)
        walk.visit(function.spec.finish, function.name)
        changes = [c for c in (change_of(f, False) for f in walk.found.values()) if c is not None]
        unseen = [
            change.known
            for change in changes
            if watch.missed and not watch.notices(change.known, {*change.contents, *change.gone})
        ]
        unasked = [c for c in changes if _is_doubtful(c) and not watch.covers(c.known)]
        for change in self._contradicted(unasked):
            changes.remove(change)  # it has a life of its own there, and goes on with it
            walk.found[id(change.known.obj)].look(change.known.contents)
        self._deliver(walk, Renew)
        unseen = [known for known in unseen if any(change.known is known for change in changes)]
        if unseen:
            warn(missed(unseen, function.name))
        return self._listed(watch.after_look(time.monotonic() - start))

    @contextlib.contextmanager
    def preserved(self, function: Any) -> Iterator[Callable[[], Any]]:
        """A block in which the workers keep what *function* can change, for ``check``.

        Yields what puts it back; after an exception it is put back, too.
        """
        numbers = tuple(known.number for known in reached(function.roots))
        self._engine.run(Preserve(numbers, restore=False, keep=True))
        try:
            yield lambda: self._engine.run(Preserve(numbers, restore=True, keep=True))
        except BaseException:
            if self._engine.state is State.READY:
                self._engine.run(Preserve((), restore=True, keep=False))
            raise
        self._engine.run(Preserve((), restore=False, keep=False))

    # ── by hand ──────────────────────────────────────────────────────────────────────────────────

    def push(self, obj: Any) -> None:
        """Send an object that functions use to the workers, as it is here.

        It becomes that for all functions, whatever the workers have made of it.  So do the objects in
        it: a model's parameters, say.  See "What travels" in the documentation.

        Args:
            obj: a module, an optimizer, an estimator, an instance, a dict, a list, an array …

        Raises: InvalidType for what never changes; InvalidValue for what no function that was sent uses;
        InvalidType for what cannot be pickled.
        """
        with self._engine.lock:
            self._engine.turns.land()
            self._engine.require_ready()
            self._require_known(obj, "push")
            walk = Walk(self._registry)
            walk.visit(obj, type(obj).__name__)
            self._deliver(walk, Renew, forced=True)

    def fetch(self, obj: Any, rank: int | None = None) -> Any:
        """A copy of what an object that functions use has become on a worker, in host memory.

        Args:
            obj: the object, as it is here: a model, say, that the workers have trained.
            rank: whose; the master rank's by default.

        Raises: as ``push``; InvalidValue for a rank that does not exist; WorkerError if it cannot be
        pickled there.
        """
        place = self._master
        if rank is not None:
            place = checked_int(rank, "rank", 0, self._engine.size - 1)
        with self._engine.lock:
            self._engine.turns.land()
            self._engine.require_ready()
            known = self._require_known(obj, "fetch")
            replies = self._engine.run(Fetch(known.number, place))
        return self.load(replies[place].pickle)

    def dump(self, value: Any, least: int = sys.maxsize) -> tuple[bytes, list[memoryview]]:
        """*value*, pickled for the workers, beside buffers of *least* bytes: it is a value there,
        whatever objects functions use."""
        writer = self._writer(self._registry, least)
        try:
            writer.write(value)
        except Exception:
            if not find_parts_of(value, self._registry):
                raise
            return self.dump(value, least)
        if writer.relies:
            self._renew_all()
        return writer.stream, writer.buffers

    def _renew_all(self) -> None:
        """Send what has changed of all that functions use: a value that is sent uses it, too."""
        for function in self._functions:
            watch = self._functions.get(function) or self.watch(function)
            self._functions[function] = watch if watch.same() else self.renew(function, watch)

    def load(self, stream: bytes, buffers: Iterable[Any] = ()) -> Any:
        """What a worker has pickled; its classes, functions and modules are those of this process."""
        return _Copy(stream, buffers, self._registry.named).load()

    def _require_known(self, obj: Any, verb: str) -> Known:
        if kind_of(obj) is None or (verb == "fetch" and kind_of(obj) in (CLASS, FUNCTION, FIXED)):
            raise InvalidType(
                f"{verb}() takes an object that functions use and that can change (a model, an "
                f"optimizer, an instance, a dict, a list, an array); got {shortened(obj)}."
            )
        known = self._registry.known(obj)
        if known is None:  # a name may be bound to it since the last call
            for function in self._functions:
                self.renew(function, Watch(function.roots))
            known = self._registry.known(obj)
        if known is None:
            raise InvalidValue(
                f"{verb}() takes an object that a function uses which the workers have; they know no "
                f"{type(obj).__name__} like this one: call such a function first, or distribute()."
            )
        return known

    # ── one delivery ─────────────────────────────────────────────────────────────────────────────

    def _deliver(
        self,
        walk: Walk,
        command: Callable[[Parcel], Command],
        specs: Mapping[int, FunctionSpec] = _NO_SPECS,
        on_tick: Callable[[], None] | None = None,
        forced: bool = False,
    ) -> dict[int, Known]:
        """Bring the workers up to date; returns all that they have of what was walked, by id."""
        _forget_parts(self._registry, walk)
        changes = [c for c in (change_of(f, forced) for f in walk.found.values()) if c is not None]
        if not forced:
            for change in self._contradicted([c for c in changes if _is_doubtful(c)]):
                raise InvalidValue(self._contradiction(change.known))
        altered = [walk.found[id(change.known.obj)] for change in changes]
        new = {ident: found for ident, found in walk.found.items() if found.known is None}
        has = {ident: f.known for ident, f in walk.found.items() if f.known is not None}
        if command is Renew and not (changes or new):
            return has
        self._engine.turns.require_all()
        writer = self._writer()
        try:
            known = self._write(writer, walk, new, changes, specs)
        except Exception as error:
            if not isinstance(error, UsageError) and find_parts(walk, self._registry.parts):
                return self._deliver(walk.again(), command, specs, on_tick, forced)
            explain(error, specs, walk.found.values(), self._registry.parts)
            raise
        parcel, segments = self._parcel(writer)
        self._expire_all_watches()
        for change in changes:  # until all ranks have them, and this side knows it
            change.known.doubt()
        try:
            self._engine.run(command(parcel), segments, on_tick=on_tick)
        except WorkerError as error:
            if find_parts(walk, self._registry.parts, loading(error)):
                return self._deliver(walk.again(), command, specs, on_tick, forced)
            explain_loading(error, specs, walk.found.values(), self._registry.parts)
            raise
        known |= has
        for ident, one in known.items():
            found = walk.found[ident]
            inner = {
                key: [known[each] for each in ids if each in known] for key, ids in found.inner.items()
            }
            self._registry.keep(one)
            one.agree(found.contents, inner)
            if (ident in new or found in altered) and _was_written_to(found):
                one.doubt()
        self._registry.settle(list(known.values()))
        return known

    def _write(
        self,
        writer: Writer,
        walk: Walk,
        new: dict[int, Found],
        changes: Sequence[Change],
        specs: Mapping[int, FunctionSpec],
    ) -> dict[int, Known]:
        """Write the stream of a delivery; returns the objects that are new to the workers, by id."""
        writer.write(len(specs))
        for item in specs.items():
            writer.write(item)
        names, others = [], {}
        known: dict[int, Known] = {}
        for ident, found in new.items():
            one = self._registry.add(found)
            if found.kind is NAME:
                known[ident] = one
                space = self._registry.space(found.obj.names)
                names.append((one.number, space, found.obj.name, found.contents))
            else:
                others[ident] = one
        writer.write(names)
        writer.write([(c.known.number, _travelling(c), c.gone, c.whole) for c in changes])
        writer.write(writer.movable)
        placed = []
        places = writer.places(one.obj for one in others.values())
        for (ident, one), place in zip(others.items(), places, strict=True):
            if place is not None:
                known[ident] = one
                placed.append((place, one.number, KINDS.index(one.kind)))
        writer.write(placed)
        return known

    def _contradicted(self, changes: Sequence[Change]) -> list[Change]:
        """Those of *changes* that are of what a worker has changed, too, and not alike."""
        if not changes:
            return []
        writer = self._writer()
        writer.write([(c.known.number, c.before, _comparable(c), _known_keys(c)) for c in changes])
        parcel, segments = self._parcel(writer)
        replies = self._engine.run(Compare(parcel), segments)
        differ = zip(*(reply.differs for reply in replies), strict=True)
        return [change for change, each in zip(changes, differ, strict=True) if any(each)]

    def _contradiction(self, known: Known) -> str:
        return contradiction(known, {f.name for f in self._functions if known in reached(f.roots)})

    def _writer(self, numbers: NumberOf | None = None, least: int = OUT_OF_BAND) -> Writer:
        return self._registry.writer(numbers or self._registry.numbers, self._compiled, least)

    def _compiled(self, fn: Any) -> Any:
        """How a function of numba's is pickled."""
        if self._numba is None:
            from ...packing.numba import Compilations  # noqa: PLC0415  its user has imported numba

            self._numba = Compilations()
        return self._numba.reduced(fn)

    def _parcel(self, writer: Writer) -> tuple[Parcel, list[tuple[Segment, Access]]]:
        """The stream; its big buffers go once into memory that all workers map."""
        if not writer.buffers:
            return Parcel(writer.stream, None, ()), []
        segment = self._engine.allocate(sum(aligned(b.nbytes) for b in writer.buffers))
        spans = []
        end = 0
        for buffer in writer.buffers:
            stop = end + buffer.nbytes
            segment.base[end:stop] = np.frombuffer(buffer, np.uint8)
            spans.append((end, stop))
            end = aligned(stop)
        return Parcel(writer.stream, segment.number, tuple(spans)), [(segment, Access.COPY)]

    def close(self) -> None:
        """Close the file of numba's machine code, if there is one."""
        if self._numba is not None:
            self._numba.close()
            self._numba = None


class _Copy(pickle.Unpickler):
    """Loads a copy from a worker."""

    def __init__(self, stream: bytes, buffers: Iterable[Any], objects: Mapping[int, Any]) -> None:
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._objects = objects

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid] if isinstance(pid, int) else sys.modules[pid]


def _forget_parts(registry: Registry, walk: Walk) -> None:
    """Let what cannot be changed there be made anew, as a part of what is sent anew itself."""
    opaque = [found for found in walk.found.values() if found.kind is OPAQUE]
    _renew_holders(registry, walk, opaque)
    for outer in opaque:
        changed = outer.known is not None and outer.contents != outer.known.contents
        for ident in chain.from_iterable(outer.inner.values()) if changed else ():
            part = walk.found[ident]
            if part.kind is OPAQUE and part.known and not OPAQUE.can_travel(part.obj):
                registry.forget(part.obj)
                part.forget()


def _renew_holders(registry: Registry, walk: Walk, opaque: Sequence[Found]) -> None:
    """Let what holds a part that has changed, and that cannot be changed there, get another one."""
    for part in opaque:
        known = part.known
        if known is None or known.contents == part.contents or OPAQUE.can_travel(part.obj):
            continue
        near = [f for f in walk.found.values() if any(id(part.obj) in ids for ids in f.inner.values())]
        holders = {*registry.holders(known), *(f.known for f in near if f.known is not None)}
        seen = [(holder, holder.kind.look(holder.obj), None) for holder in holders]
        walk.revisit(seen, holders)
        registry.forget(part.obj)
        part.forget()
        for holder in holders:
            holder.doubt()


def change_of(found: Found, forced: bool) -> Change | None:
    """What is to change on the workers of an object that they have; None for nothing."""
    known = found.known
    if known is None:
        return None
    before, now = known.contents, found.contents
    if forced and known.kind is OPAQUE and before == now and not known.kind.can_travel(known.obj):
        return None
    if forced or before is None or _is_reordered(known, before, now):
        return Change(known, now, (), before or {}, True, found.values)
    if not known.kind.apart:
        same = same_entries(before, now)
        return None if same else Change(known, now, (), before, False, found.values)
    changed = {k: v for k, v in now.items() if k not in before or not alike(before[k], v)}
    gone = tuple(key for key in before if key not in now)
    if not (changed or gone):
        return None
    old = {key: before[key] for key in (*changed, *gone) if key in before}
    return Change(known, changed, gone, old, False, found.values)


def _is_as_known(known: Known, contents: Contents) -> bool:
    """Whether the workers have these contents."""
    return known.contents is not None and same_contents(known.kind, known.contents, contents)


def _was_written_to(found: Found) -> bool:
    """Whether another thread has written to an array while it was sent."""
    if found.kind is not ARRAY or found.values is not None or found.obj.nbytes > _LOOKED_AT:
        return False
    return ARRAY.look(found.obj) != found.contents


def _is_reordered(known: Known, before: Contents, now: Contents) -> bool:
    """Whether a dict would have its keys in another order than here, or other ones, after its entries
    have changed one by one."""
    if known.kind is not DICT:
        return False
    if any(isinstance(key, float) and key != key for key in now):  # noqa: PLR0124  NaN finds no other
        return True
    after = [key for key in before if key in now] + [key for key in now if key not in before]
    return len(after) != len(now) or not all(map(alike, after, now))


def _is_doubtful(change: Change) -> bool:
    """Whether the workers may have changed the same: numbers and strings are sent all the same."""
    known = change.known
    if known.contents is None or known.kind in (NAME, FUNCTION):
        return False
    values = (*change.contents.values(), *change.before.values())
    return not known.kind.apart or not all(map(is_plain, values))


def _travelling(change: Change) -> Contents:
    obj = change.known.obj if change.values is None else change.values
    return change.known.kind.travelling(obj, change.contents)


def _comparable(change: Change) -> Contents | None:
    """The new contents, for a worker to see whether it has them already; None if they hold objects."""
    flat = all(map(_is_flat, change.contents.values()))
    return change.contents if flat else None


def _known_keys(change: Change) -> list[Any]:
    """The entries of which the workers have what they were given."""
    keys = (*change.contents, *change.gone)
    return [key for key in keys if change.before.get(key) is not UNKNOWN]


def _is_flat(value: Any) -> bool:
    return (
        is_plain(value)
        or isinstance(value, Digest)
        or (isinstance(value, tuple) and all(map(is_plain, value)))
    )


def reached(
    roots: Iterable[Known], changed: Mapping[Known, Contents] = MappingProxyType({})
) -> set[Known]:
    """All objects that *roots* hold, and these; of what is *changed* only the entries that stay."""
    found = set(roots)
    stack = list(found)
    while stack:
        known = stack.pop()
        now, before = changed.get(known), known.contents or {}
        entries = known.inner
        if now is not None:
            entries = {
                k: v for k, v in entries.items() if k not in before or alike(before[k], now.get(k))
            }
        inner = set(chain.from_iterable(entries.values())) - found
        found |= inner
        stack += inner
    return found
