"""``Objects``: the objects that functions bring along, as the workers have them.

walk   what a function reaches, and what of it is new or has changed here
compare  whether the workers have changed it, too
write    new functions and objects, and new contents of known ones, in one stream
send     one command to all ranks; then both sides agree
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import time
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from ...errors import InvalidType, InvalidValue, UsageError, WorkerError, shortened, warn
from ...ipc.channel import OnTick
from ...memory.interrupts import WhileThere
from ...memory.segment import descriptors_for
from ...messages import Assign, Command, Compare, Fetch, FunctionSpec, Parcel, Renew
from ...packing import kinds
from ...packing.code import is_own_name
from ...packing.imported import kept_of_part
from ...packing.kinds import WHOLE, Contents, alike, cached_names, is_plain, kind_of, same_entries
from ...packing.pickles import Loader, Writer
from ...values.arrays import checked_int
from ..engine.engine import Engine
from .comparison import Assigned, is_flat
from .explain import contradiction, explain, explain_loading, missed, uncompared
from .handover import Handover, parcelled
from .known import UNKNOWN, Known, Snapshot, inner_first, reached
from .parts import find_parts, loading
from .registry import Registry
from .values import Relied, ReliedOn, SharedByTasks, Values
from .walk import Found, Walk
from .watch import Watch

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
    """The objects of one session.

    Attributes:
        handover: all of them, for workers that take the places of others.
    """

    def __init__(self, engine: Engine, master_rank: int) -> None:
        self._engine = engine
        self._master = master_rank
        self._watches: WhileThere[Watch, None] = WhileThere()
        self._registry = Registry(engine.directory.number, engine.directory.watch)
        self._functions: WhileThere[Any, Watch | None] = WhileThere()  # with what ``dump`` compares
        self._relied = ReliedOn()
        self._by_value: weakref.WeakSet[type] = weakref.WeakSet()  # classes that go with each value
        self._numba: Any = None
        self.handover: Final = Handover(
            engine, self._registry, self._functions, self._compiled, self._watches
        )
        self._told: set[str] = set()  # the names of objects that are not compared at each call

    # ── with functions ───────────────────────────────────────────────────────────────────────────

    def send(
        self, functions: dict[int, Any], command: Callable[[Parcel], Command], on_tick: OnTick
    ) -> None:
        """Send *functions* (by number) and what they bring along, by the *command* for a parcel.

        Raises: InvalidType for what cannot be pickled, InvalidValue for what changed on both sides;
        WorkerError if a worker cannot load them; SharedMemoryError.
        """
        walk = Walk(self._registry)
        specs = {number: function.spec for number, function in functions.items()}
        with descriptors_for("what functions use cannot be sent to the workers"):
            roots = {number: walk.visit_function(function) for number, function in functions.items()}
        known = self._deliver(walk, command, specs, on_tick)
        for number, function in functions.items():
            function.hold([known[each] for each in roots[number] if each in known])
            self._functions[function] = None

    def send_changes(self, function: Any) -> None:
        """Send what has changed of all that *function*, which the workers have, uses.

        Raises: as ``send``.
        """
        walk = Walk(self._registry)
        roots = walk.visit_function(function)
        known = self._deliver(walk, Renew)
        function.hold([known[each] for each in roots if each in known])

    def watch(self, function: Any) -> Watch:
        """What the calls of *function* are to compare."""
        watch = Watch(function.roots)
        for name, sentence in uncompared(watch.uncompared, function.name):
            if name not in self._told and not isinstance(function, Relied):
                self._told.add(name)
                self._engine.say(f"Synkro: {sentence}")
        return self._listed(watch)

    def renew(
        self, function: Any, watch: Watch, view: Snapshot | None = None, aside: bool = False
    ) -> Watch:
        """Send what has changed of what a call of *function* compares; returns its watch from now on.

        *view* is what the call is to see, where that is not what is there now.  What has changed on both
        sides is left *aside*, or an error.
        """
        if watch.due and view is None:
            return self._look_again(function, watch)
        while True:
            changed = watch.comparison.changed() if view is None else list(view)
            defined = watch.defined(changed)
            looked_at = {known for known, _, _ in changed}
            changed += [(k, k.kind.look(k.obj), None) for k in defined if k not in looked_at]
            there = reached(function.roots, {known: contents for known, contents, _ in changed})
            walk = Walk(self._registry)
            news = {known for known, contents, _ in changed if not known.has(contents)}
            walk.revisit(changed, (there & news) | set(defined))
            self._deliver(walk, Renew, aside=aside)
            if watch.refresh() and not defined:
                return watch
            # other objects are in these places, which may have changed since another function sent them
            watch = self._listed(watch.again())
            if view is not None or not watch.comparison.changed():
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
            one.group.last[one.at] = UNKNOWN
        if entries:
            new = {known.number: contents for known, contents in entries.items()}
            command = pickle.dumps(Assign(new, self._caching(entries), command), 5)
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
            one.group.last[one.at] = one.value

    def view(self, function: Any, watch: Watch) -> tuple[Watch, Snapshot]:
        """What a call that is submitted now is to see, beside the watch of *function* from now on.

        Where other objects are than before, or it is time to look at all, they are sent at once, which
        waits for the running call.
        """
        if watch.due or watch.moved():
            with self._engine.lock:
                self._engine.turns.wait_for_all()
                watch = self.renew(function, watch)
        return watch, watch.comparison.look()

    def _listed(self, watch: Watch) -> Watch:
        self._watches[watch] = None
        return watch

    def _look_again(self, function: Any, watch: Watch) -> Watch:
        """Compare all that *function* uses, and send what has changed, with a warning of what is not
        compared at each call."""
        start = time.monotonic()
        walk = Walk(self._registry, most=_LOOKED_AT)
        walk.visit_function(function)
        changes = _changes(walk, False, self._registry.parts)
        unseen = [
            change.known
            for change in changes
            if watch.missed
            and not watch.comparison.notices(change.known, {*change.contents, *change.gone})
        ]
        unasked = [c for c in changes if _may_contradict(c) and not watch.comparison.covers(c.known)]
        _set_aside(self._contradicted(unasked), changes, walk)
        self._deliver(walk, Renew)
        unseen = [known for known in unseen if any(change.known is known for change in changes)]
        if unseen and not isinstance(function, Relied):
            warn(missed(unseen, function.name))
        return self._listed(watch.after_look(time.monotonic() - start))

    # ── by hand ──────────────────────────────────────────────────────────────────────────────────

    def push(self, obj: Any) -> None:
        """Send an object that functions use to the workers, as it is here.

        It becomes that for all functions, whatever the workers have made of it.  So do the objects in
        it: a model's parameters, say.  Calls see changes in small objects by themselves, and maps in
        all: docs/explanation/one-controller.md says which.

        Args:
            obj: a module, an optimizer, an estimator, an instance, a dict, a list, an array …

        Raises: InvalidType for what never changes; InvalidValue for what no function that was sent uses;
        InvalidType for what cannot be pickled.
        """
        with self._engine.lock:
            self._engine.wait_until_ready()
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
        most = self._engine.size - 1
        place = self._master if rank is None else checked_int(rank, "rank", 0, most)
        with self._engine.lock:
            self._engine.wait_until_ready()
            replies = self._engine.run(Fetch(self._require_known(obj, "fetch").number, place))
        return self.load(replies[place].pickle)

    def values(self, least: int, shared: SharedByTasks | None = None) -> Values:
        """What pickles values beside buffers of *least* bytes; *shared* learns what items rely on."""
        writer = functools.partial(self._registry.value_writer, self._compiled, least)
        return Values(self._registry, writer, self._introduce, shared.add if shared else self.rely)

    def rely(self, objects: Mapping[int, Any]) -> list[Known]:
        """Values rely on *objects* that the workers have: send what has changed of these."""
        found = [*filter(None, map(self._registry.known, objects.values()))]
        for known in found:
            by_name = known.kind in (kinds.CLASS, kinds.FUNCTION)
            if by_name and (one := self._relied.by(known)) is not None:
                watch = self._functions.get(one) or self.watch(one)
                self._functions[one] = watch if watch.same() else self.renew(one, watch, aside=True)
        return found

    def _introduce(self, classes: Mapping[int, type]) -> bool:
        """Have the workers know *classes*, by id, of values; returns whether they do."""
        if not (self._relied.has_room(classes) and self._by_value.isdisjoint(classes.values())):
            return False
        walk, directory = Walk(self._registry), self._engine.directory
        new = {ident: Relied(cls) for ident, cls in classes.items()}
        specs = {directory.number(): relied.spec for relied in new.values()}
        try:
            for number, relied in zip(specs, new.values(), strict=True):
                directory.watch(relied, number)  # by which the workers hold it
                walk.visit_function(relied)
            known = self._deliver(walk, Renew, specs)
        except (UsageError, WorkerError):  # they go with each value, as far as they can
            self._by_value.update(classes.values())
            return False
        self._relied.add(new)
        self.rely(classes)
        return all(ident in known for ident in classes)

    def load(self, stream: bytes, buffers: Iterable[Any] = ()) -> Any:
        """What a worker has pickled; its classes, functions and modules are those of this process."""
        return Loader(stream, buffers, self._registry.named).load()

    def _require_known(self, obj: Any, verb: str) -> Known:
        kind, by_name = kind_of(obj), (kinds.CLASS, kinds.FUNCTION, kinds.FIXED)
        if kind is None or (verb == "fetch" and kind in by_name):
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
        on_tick: OnTick = None,
        forced: bool = False,
        aside: bool = False,
    ) -> dict[int, Known]:
        """Bring the workers up to date; returns all that they have of what was walked, by id."""
        _forget_parts(self._registry, walk)
        changes = _changes(walk, forced, self._registry.parts)
        if not forced:
            contradicted = self._contradicted([c for c in changes if _may_contradict(c)])
            if contradicted and not aside:
                one = contradicted[0].known
                users = {f.name for f in self._functions if one in reached(f.roots)}
                raise InvalidValue(contradiction(one, users))
            _set_aside(contradicted, changes, walk)
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
        parcel, _memory = parcelled(self._engine.allocate, writer)
        for watch in self._watches:
            watch.expire()
        for change in changes:  # until all ranks have them, and this side knows it
            change.known.forget_contents()
        try:
            self._engine.run(command(parcel), on_tick=on_tick)
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
            one.agree(found.contents, inner, found.sample)
            if (ident in new or found in altered) and _was_written_to(found):
                one.forget_contents()
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
        writer.dump(len(specs))
        for item in specs.items():
            writer.dump(item)
        names, others = [], {}
        known: dict[int, Known] = {}
        for ident, found in new.items():
            one = self._registry.add(found.obj, found.kind, found.path)
            if found.kind is kinds.NAME:
                known[ident] = one
                space = self._registry.space(found.obj.names)
                names.append((one.number, space, found.obj.name, found.contents))
            else:
                others[ident] = one
        writer.dump(names)
        ordered = _inner_first(changes, walk)
        caching = self._caching(change.known for change in changes)
        writer.dump(([change.known.number for change in ordered], caching, ()))
        for change in ordered:
            obj = change.known.obj if change.values is None else change.values
            contents = change.known.kind.travelling(obj, change.contents)
            writer.dump((contents, change.gone, change.whole))
        writer.dump(writer.movable)
        placed = []
        places = writer.places(one.obj for one in others.values())
        for (ident, one), place in zip(others.items(), places, strict=True):
            if place is not None:
                known[ident] = one
                placed.append((place, one.number, kinds.KINDS.index(one.kind)))
        writer.dump(placed)
        return known

    def _caching(self, changed: Iterable[Known]) -> list[int]:
        """The numbers of objects that keep what they have computed of what has *changed*."""
        every = list(self._registry.caching)
        found = set(changed) if every else set()
        return [one.number for one in every if not found.isdisjoint(reached([one]))]

    def _contradicted(self, changes: Sequence[Change]) -> list[Change]:
        """The *changes* of what a worker has changed, too, and not alike."""
        for comparable in (_comparable, _digested):
            if not changes:
                break
            writer = self._writer()
            writer.dump([(c.known.number, c.before, comparable(c), _known_keys(c)) for c in changes])
            parcel, _memory = parcelled(self._engine.allocate, writer)
            replies = self._engine.run(Compare(parcel))
            differ = zip(*(reply.differs for reply in replies), strict=True)
            changes = [change for change, each in zip(changes, differ, strict=True) if any(each)]
        return list(changes)

    def _writer(self) -> Writer:
        return self._registry.writer(self._compiled)

    def _compiled(self, fn: Any) -> Any:
        """How a function of numba's is pickled."""
        if self._numba is None:
            from ...packing.numba import Compilations  # noqa: PLC0415  its user has imported numba

            self._numba = Compilations()
        return self._numba.reduced(fn)

    def close(self) -> None:
        """Close the file of numba's machine code, if there is one."""
        if self._numba is not None:
            self._numba.close()
            self._numba = None


def _set_aside(contradicted: Sequence[Change], changes: list[Change], walk: Walk) -> None:
    """Leave out of *changes* what has a life of its own on the workers, and goes on with it."""
    for change in contradicted:
        changes.remove(change)
        walk.found[id(change.known.obj)].look(change.known.contents)


def _forget_parts(registry: Registry, walk: Walk) -> None:
    """Let what cannot be changed there be made anew, as a part of what is sent anew itself."""
    opaque = [found for found in walk.found.values() if found.kind is kinds.OPAQUE]
    _renew_holders(registry, walk, opaque)
    for outer in opaque:
        changed = outer.known is not None and outer.contents != outer.known.contents
        for ident in chain.from_iterable(outer.inner.values()) if changed else ():
            part = walk.found[ident]
            if part.kind is kinds.OPAQUE and part.known and not kinds.OPAQUE.can_travel(part.obj):
                registry.forget(part.obj)
                part.forget()


def _renew_holders(registry: Registry, walk: Walk, opaque: Sequence[Found]) -> None:
    """Let what holds a part that has changed, and that cannot be changed there, get another one."""
    for part in opaque:
        known = part.known
        if known is None or known.contents == part.contents or kinds.OPAQUE.can_travel(part.obj):
            continue
        near = [f for f in walk.found.values() if any(id(part.obj) in ids for ids in f.inner.values())]
        holders = {*registry.holders(known), *(f.known for f in near if f.known is not None)}
        walk.revisit([(holder, holder.kind.look(holder.obj), None) for holder in holders], holders)
        registry.forget(part.obj)
        part.forget()
        for holder in holders:
            holder.forget_contents()


def _changes(walk: Walk, forced: bool, parts: Container[int]) -> list[Change]:
    """What is to change on the workers; of *parts*, by id, what they have taken over."""
    changes = (_change_of(found, forced, ident in parts) for ident, found in walk.found.items())
    return [change for change in changes if change is not None]


def _change_of(found: Found, forced: bool, is_part: bool) -> Change | None:
    """What is to change on the workers of an object that they have; None for nothing.

    Of a *part*, which they have made by an import, that are entries which they have taken over.
    """
    known = found.known
    if known is None or (is_part and known.kind not in (kinds.CLASS, kinds.INSTANCE)):
        return None
    kind, before, now = known.kind, known.contents, found.contents
    if is_part:
        there = {key: value for key, value in (before or {}).items() if value is not UNKNOWN}
        before, now = kept_of_part(kind, there), kept_of_part(kind, now)
    elif forced and before == now and kind is kinds.OPAQUE and not kinds.OPAQUE.can_travel(known.obj):
        return None
    elif forced or before is None or _is_reordered(known, before, now):
        return Change(known, now, (), before or {}, True, found.values)
    elif not kind.apart:
        same = same_entries(before, now)
        return None if same else Change(known, now, (), before, False, found.values)
    changed = {k: v for k, v in now.items() if forced or k not in before or not alike(before[k], v)}
    gone = tuple(key for key in before if key not in found.contents)
    if not (changed or gone):
        return None
    old = {key: before[key] for key in (*changed, *gone) if key in before}
    return Change(known, changed, gone, old, False, found.values)


def _inner_first(changes: Sequence[Change], walk: Walk) -> list[Change]:
    """*changes*, in the order in which they are made: what an object holds before the object itself,
    which may copy it when it takes over a state."""
    by_id = {id(change.known.obj): change for change in changes}
    by_state = (kinds.OPAQUE, kinds.STATEFUL)
    whole = {ident for ident, change in by_id.items() if change.known.kind in by_state}
    ordered = [change for ident, change in by_id.items() if ident not in whole]
    others = inner_first(whole, functools.partial(_held, walk), set())
    return ordered + [by_id[ident] for ident in others if ident in whole]


def _held(walk: Walk, ident: int) -> Iterable[int]:
    """The ids of what an object holds."""
    found = walk.found.get(ident)
    return () if found is None else chain.from_iterable(found.inner.values())


def _was_written_to(found: Found) -> bool:
    """Whether another thread has written to an array while it was sent."""
    if found.kind is not kinds.ARRAY or found.values is not None or found.obj.nbytes > _LOOKED_AT:
        return False
    return kinds.ARRAY.look(found.obj) != found.contents


def _is_reordered(known: Known, before: Contents, now: Contents) -> bool:
    """Whether a dict would have its keys in another order than here, or other ones, after its entries
    have changed one by one."""
    if known.kind is not kinds.DICT:
        return False
    if any(isinstance(key, float) and key != key for key in now):  # noqa: PLR0124  NaN finds no other
        return True
    after = [key for key in before if key in now] + [key for key in now if key not in before]
    return len(after) != len(now) or not all(map(alike, after, now))


def _may_contradict(change: Change) -> bool:
    """Whether the workers may have changed what *change* does: numbers and strings are sent all the
    same."""
    known, asked = change.known, _asked(change)
    if known.contents is None or known.kind in (kinds.NAME, kinds.FUNCTION) or not asked:
        return False
    values = [held[key] for held in (change.contents, change.before) for key in asked if key in held]
    return not known.kind.apart or not all(map(is_plain, values))


def _asked(change: Change) -> list[Any]:
    """The entries of which workers are asked whether they have changed them: not those that an object
    sets by itself, where nothing was, to keep what it computes."""
    keys, cls = [*change.contents, *change.gone], type(change.known.obj)
    if change.known.kind is kinds.DICT and "cache" in change.known.path.lower():
        return [key for key in keys if change.before.get(key) is not None]
    if change.known.kind not in (kinds.INSTANCE, kinds.STATEFUL) or is_own_name(cls.__module__):
        return keys
    cached = cached_names(cls)
    return [
        key
        for key in keys
        if change.before.get(key) is not None
        or not (isinstance(key, str) and (key.startswith("_") or key in cached))
    ]


def _comparable(change: Change) -> Contents | None:
    """The new contents, for a worker to see whether it has them already; None if they hold objects."""
    return change.contents if all(map(is_flat, change.contents.values())) else None


def _digested(change: Change) -> Contents:
    """The new contents, of what holds objects the digests: both sides may have made the same."""
    return {k: v if is_flat(v) else kinds.OPAQUE.look(v)[WHOLE] for k, v in change.contents.items()}


def _known_keys(change: Change) -> list[Any]:
    """The entries of which the workers have what they were given."""
    return [key for key in _asked(change) if change.before.get(key) is not UNKNOWN]
