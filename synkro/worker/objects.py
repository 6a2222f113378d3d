"""The objects that functions have brought along, on this worker: each lives here once."""

from __future__ import annotations

import builtins
import functools
import gc
import importlib
import importlib.machinery
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from ..errors import InvalidType, InvalidValue, reason
from ..messages import Parcel, Preserve
from ..packing import kinds
from ..packing.code import used_by, uses
from ..packing.imported import OwnModule
from ..packing.pickles import HEAD, PICKLED, Reader
from ..packing.refused import advice_on_loading
from ..packing.together import Together
from ..values.arrays import Array
from .copying import Copier, PickledContents, Sender, WholeObject
from .replica import Replica


class RankObjects:
    """The objects and the modules that this worker has, by number."""

    def __init__(self) -> None:
        self._objects: dict[int, Any] = {}
        self._kinds: dict[int, kinds.Kind] = {}
        self._by_id: dict[int, int] = {}  # the numbers of what results refer to
        self._together: Together[Copier] | None = None  # whose writer pickles each result apart
        self._modules: dict[int, ModuleType] = {}
        self._bound: dict[tuple[int, str], int] = {}  # numbers of names, by dict and name
        self._kept: list[tuple[kinds.Kind, Any, kinds.Contents]] = []
        self._values: list[tuple[Replica, Array]] = []
        self._prepared: list[tuple[Any, kinds.Kind, kinds.Contents, kinds.Contents]] = []
        self._unused: list[kinds.Name] = []
        self._next_look = 0.0
        self._computed: dict[int, frozenset[str]] = {}  # cached properties that came with objects
        self._digests: dict[int, Any] = {}  # of what cannot be looked into, when it came
        self._sender: Sender | None = None  # for other workers, as long as the objects are these
        self._came: set[int] = set()  # what the program has sent, or changed, since somebody asked

    def load(
        self, parcel: Parcel, memory: memoryview, loading: Callable[[int], None]
    ) -> tuple[dict[int, Any], list[Any]]:
        """Take a delivery over; returns its functions, and PyTorch's modules and optimizers in it.

        *memory* is that of the parcel's segment.  *loading* is called before each function, with the
        number of those that have been.
        """
        reader = self._reader(parcel, memory)
        specs = {}
        for done in range(reader.load()):
            loading(done)
            number, spec = reader.load()
            specs[number] = spec
        named = []
        for number, module, name, contents in reader.load():
            named.append(number)
            place = self._objects[number] = kinds.Name(vars(module), name, module)
            self._kinds[number] = kinds.NAME
            self._bound[id(place.names), name] = number
            kinds.NAME.change(place, contents, ())
        changed, caching, _ = reader.load()
        renewed = [number for number in changed if not self._kinds[number].apart]
        self._forget_prepared([*named, *changed], renewed)
        for number in changed:  # one may hold another, and copy it
            self._change(number, *reader.load())
        self._forget_computed(caching)
        movable = reader.load()
        placed = reader.load()
        found = reader.placed(place for place, _, _ in placed)
        for (_, number, kind), obj in zip(placed, found, strict=True):
            self._objects[number], self._kinds[number] = obj, kinds.KINDS[kind]
            if kinds.goes_by_number(obj):
                self._by_id[id(obj)] = number
            if kinds.KINDS[kind] in _WHOLES:
                self._digests[number] = kinds.KINDS[kind].look(obj)[kinds.WHOLE]
            elif kinds.KINDS[kind] in (kinds.INSTANCE, kinds.STATEFUL) and (
                names := kinds.cached_names(type(obj))
            ):
                self._computed[number] = names & (kinds.attributes_of(obj) or {}).keys()
        self._came.update(changed, (number for _, number, _ in placed))
        self._sender = None
        for number in self._digests.keys() & changed:
            self._digests[number] = self._kinds[number].look(self._objects[number])[kinds.WHOLE]
        return specs, movable

    def assign(self, entries: dict[int, kinds.Contents], caching: Sequence[int]) -> None:
        """Put numbers and strings into objects; those *caching* keep what they have computed of them."""
        self._forget_prepared([*entries])
        self._came.update(entries)
        for number, contents in entries.items():
            self._change(number, contents, (), False)
        self._forget_computed(caching)

    def prepared(self, obj: Any, kind: kinds.Kind, before: kinds.Contents, now: kinds.Contents) -> None:
        """A task has set attributes of an object, which looked otherwise *before*."""
        self._prepared.append((obj, kind, before, now))

    def crowd_prepared(self, number: int, before: kinds.Contents) -> None:
        """Tasks may have set attributes in a crowd, which looked otherwise *before*."""
        if before[kinds.WHOLE] == self._digests[number]:
            self._digests[number] = kinds.CROWD.look(self._objects[number])[kinds.WHOLE]

    def _forget_prepared(self, changed: Sequence[int], renewed: Sequence[int] = ()) -> None:
        """The program has changed objects: put away what was computed of how they were before.

        That is what tasks have prepared, and the memo of each ``lru_cache`` whose function uses one of
        the objects, or names, that have changed.  Those *renewed* get all that they are to hold.
        """
        if not changed:
            return
        spared = {id(self._objects[number]) for number in renewed}
        for obj, kind, before, now in self._prepared:
            if id(obj) in spared:
                continue
            there = kind.look(obj)
            if (rest := _without(there, before, now)) is not there:
                kind.put_back(obj, rest)
        self._prepared = []
        caches = [obj for obj in self._objects.values() if isinstance(obj, functools._lru_cache_wrapper)]
        objects = [self._objects[number] for number in changed if caches]
        found = {(id(o.names), o.name) if isinstance(o, kinds.Name) else id(o) for o in objects}
        for cache in caches:
            if not found.isdisjoint(used_by(cache)):
                cache.cache_clear()

    def _forget_computed(self, caching: Sequence[int]) -> None:
        """The program has changed what some objects hold: put away what their cached properties have
        computed of that here."""
        for number in caching:
            obj = self._objects[number]
            for name in kinds.cached_names(type(obj)) - self._computed.get(number, frozenset()):
                (kinds.attributes_of(obj) or {}).pop(name, None)

    def _change(self, number: int, contents: Any, gone: tuple[Any, ...], whole: bool) -> None:
        """Put *contents* into an object, and delete the entries *gone*: if *whole*, all others."""
        obj, kind = self._objects[number], self._kinds[number]
        if whole or not kind.apart:
            kind.put_back(obj, contents)
        else:
            kind.change(obj, contents, gone)
        if number in self._computed:
            kept = self._computed[number] - set(gone)
            self._computed[number] = kept | (kinds.cached_names(type(obj)) & contents.keys())

    def _reader(self, parcel: Parcel, memory: memoryview) -> Reader:
        buffers = [memory[start:stop] for start, stop in parcel.buffers]
        return Reader(parcel.stream, buffers, self._objects, self._space)

    def compare(self, parcel: Parcel, memory: memoryview) -> tuple[bool, ...]:
        """For each object of a list, whether it is neither what it was when it came nor is to be."""
        found = []
        listed = self._reader(parcel, memory).load()
        self._forget_prepared([number for number, *_ in listed])
        for number, came, after, keys in listed:
            obj, kind = self._objects[number], self._kinds[number]
            try:
                now = kind.look(obj)
            except Exception:  # its __getstate__ does not work here: nobody can tell
                found.append(False)
                continue
            before = {kinds.WHOLE: self._digests[number]} if kind in _WHOLES else came
            same = (
                all(_equal(now.get(key, _GONE), expected.get(key, _GONE)) for key in keys)
                for expected in (before, after)
                if expected is not None
            )
            found.append(not any(same))
        return tuple(found)

    def survey(self, parcel: Parcel, memory: memoryview) -> tuple[int, ...]:
        """The numbers of those in a list of objects that are not what they were when they came."""
        found = []
        for number, came in self._reader(parcel, memory).load():
            kind = self._kinds[number]
            before = {kinds.WHOLE: self._digests[number]} if kind in _WHOLES else came
            try:
                if before is not None and kinds.same_contents(kind, before, self.look(number)):
                    continue
            except Exception:  # its __getstate__ does not work here: nobody can tell
                pass
            found.append(number)
        return tuple(found)

    def pickle(self, numbers: Iterable[int]) -> PickledContents | None:
        """What objects hold, pickled together; None if pickle does not take it."""
        if self._sender is None:
            self._sender = Sender(self._objects, self._kinds, self._modules)
        contents: dict[int, Any] = {}
        try:
            for number in numbers:
                obj, kind = self.found(number)
                if number in self._sender.parts:
                    contents[number] = WholeObject(obj)
                else:
                    held: kinds.Contents = {} if kind is kinds.OPAQUE else self.look(number)
                    contents[number] = kind.travelling(obj, held)
            return self._sender.together(contents)
        except Exception:  # of the object's own methods
            self._sender = None
            return None

    def recover(self, streams: Iterable[bytes]) -> None:
        """Put into objects what ``pickle`` has found in them."""
        late = []
        for stream in streams:
            try:
                held = Reader(stream, (), self._objects, self._space).load()
            except KeyError:
                raise InvalidValue(
                    "what functions have made of objects holds others that the program has dropped since"
                ) from None
            for number, contents in held.items():
                if number not in self._objects:
                    continue
                if isinstance(contents, WholeObject):
                    self._replace(number, contents.obj)
                elif self._kinds[number] in (kinds.OPAQUE, kinds.STATEFUL):  # copies what others hold
                    late.append((number, contents))
                else:
                    self._put(number, contents)
        for number, contents in late:
            self._put(number, contents)
        self._sender = None

    def _replace(self, number: int, obj: Any) -> None:
        """Have another object be object *number*, also where names and functions refer to it."""
        before, self._objects[number] = self._objects[number], obj
        for each, kind in self._kinds.items():
            if kind in (kinds.NAME, kinds.FUNCTION):
                held = kind.look(self._objects[each])
                stale = {key: obj for key, value in held.items() if value is before}
                if stale:
                    kind.change(self._objects[each], stale, ())

    def _put(self, number: int, contents: kinds.Contents) -> None:
        obj, kind = self.found(number)
        if kind is kinds.FUNCTION:
            kind.change(obj, contents, tuple(vars(obj).keys() - contents.keys()))
        else:
            kind.put_back(obj, contents)

    @property
    def came(self) -> set[int]:
        """The numbers of what the program has sent, or changed, since ``forget_came``."""
        return set(self._came)

    def forget_came(self) -> None:
        """From now on nothing has come."""
        self._came.clear()

    def has(self, number: int) -> bool:
        """Whether object *number* is there."""
        return number in self._objects

    def look(self, number: int) -> kinds.Contents:
        """What an object holds, but for what tasks have prepared."""
        obj, kind = self._objects[number], self._kinds[number]
        found = dict(vars(obj)) if kind is kinds.FUNCTION else kind.look(obj)
        for prepared, _, before, now in self._prepared:
            if prepared is obj:
                found = _without(found, before, now)
        return found

    def preserve(self, command: Preserve, variables: Iterable[Replica]) -> None:
        """Put back what was kept, or keep what objects, *variables* and random generators hold."""
        if command.restore:
            for kind, obj, contents in self._kept:
                kind.put_back(obj, contents)
            for variable, value in self._values:
                variable.value = value
        self._kept, self._values = [], []
        if command.keep:
            pairs = [self.found(number) for number in command.objects]
            pairs += [(generator, kinds.GENERATOR) for generator in kinds.global_generators()]
            self._kept = [(kind, obj, kind.kept(obj)) for obj, kind in pairs]
            self._values = [(variable, variable.whole.copy()) for variable in variables]

    def copy(self, number: int) -> bytes:
        """An object, pickled for the main process; of classes and functions that it has, their numbers.

        Arrays are in host memory.
        """
        return Copier(self._by_id, sys.maxsize).pickled(self._objects[number])[0]

    def found(self, number: int) -> tuple[Any, kinds.Kind]:
        """An object, and its kind."""
        return self._objects[number], self._kinds[number]

    def unpickled(self, called: str, stream: bytes, buffers: Iterable[Any] = ()) -> Any:
        """The value of an argument that was pickled; errors call it what *called* says.

        Raises: InvalidType if it cannot be made again.
        """
        try:
            return Reader(stream, buffers, self._objects, self._space).load()
        except Exception as error:
            raise InvalidType(
                f"{called} pickles in the program, and cannot be made again on a worker: "
                f"{reason(error)}. "
                f"{advice_on_loading(error, is_result=False)}"
            ) from error

    def pickled_apart(self, value: Any) -> tuple[bytes, list[memoryview], bool]:
        """What a function returned, pickled, beside its large buffers, and whether pickle itself cannot
        read it."""
        together, self._together = self.together, None
        found = together.writer.pickled(value)
        self._together = together  # after an exception the next result needs another one
        return found

    @property
    def together(self) -> Together[Copier]:
        """What pickles many results as one."""
        together = self._together
        if together is None or together.failed:
            together = self._together = Together(Copier(self._by_id))
        return together

    def pickled_arrays(self, value: Any) -> list[Array]:
        """What a function returned, as bytes: the pickle, with the number of its buffers, and these."""
        pickled, buffers, _ = self.pickled_apart(value)
        head = len(buffers).to_bytes(HEAD, "little") + pickled
        head += bytes(len(head) % 2)  # elements have two bytes; the pickle knows where it ends
        return [np.frombuffer(head, PICKLED), *(np.frombuffer(buffer, np.uint8) for buffer in buffers)]

    def let_begin(self, names: Iterable[tuple[int, str, Any]]) -> None:
        """Have *names* of modules, by their numbers, begin with values, which functions replace."""
        for number, name, value in names:
            if number in self._modules:
                vars(self._modules[number]).setdefault(name, value)

    def classes(self) -> list[type]:
        """The classes among the objects."""
        return [obj for obj in self._objects.values() if isinstance(obj, type)]

    def generators(self) -> dict[int, Any]:
        """The random generators among the objects, by number."""
        found = (number for number, kind in self._kinds.items() if kind is kinds.GENERATOR)
        return {number: self._objects[number] for number in found}

    def drop(self, number: int) -> None:
        """No function uses object *number* any more."""
        self._together = self._sender = None
        obj = self._objects.pop(number, None)
        if self._by_id.get(id(obj)) == number:
            del self._by_id[id(obj)]
        self._prepared = [entry for entry in self._prepared if entry[0] is not obj]
        for known in (self._digests, self._computed, self._kinds):
            known.pop(number, None)
        if isinstance(obj, kinds.Name) and self._bound.get((id(obj.names), obj.name)) == number:
            del self._bound[id(obj.names), obj.name]
            if isinstance(obj.home, OwnModule):  # not a module of an installed package
                self._unused.append(obj)
        module = self._modules.pop(number, None)
        if module is not None:
            _uninstall(module)

    def tidy(self) -> None:
        """Forget the values of names that no function uses any more, after all else was dropped.

        Functions may live on here that the program has dropped: hooks, say.  To look for them takes a
        while, so it is done for 2 % of the time at most.
        """
        start = time.monotonic()
        if not self._unused or start < self._next_look:
            return
        referrers = gc.get_referrers(*{id(place.names): place.names for place in self._unused}.values())
        living = (uses(fn.__code__).attributes for fn in referrers if isinstance(fn, FunctionType))
        named = frozenset[str]().union(*living)
        for place in self._unused:
            if place.name not in named and (id(place.names), place.name) not in self._bound:
                place.names.pop(place.name, None)
        self._unused = [place for place in self._unused if place.name in named]
        self._next_look = start + 50 * (time.monotonic() - start)

    def _space(self, number: int, name: str, packages: Any, own: Any) -> ModuleType:
        """The module *name* of the user's, in which names are bound as they come."""
        module = self._modules.get(number)
        if own is None:
            return importlib.import_module(name)
        if module is None:
            module = OwnModule(name)
            of_main = packages is None and name == "__main__"  # as Python itself has it
            vars(module).update(own, __builtins__=builtins if of_main else vars(builtins))
            if "__path__" in own:
                module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            if packages is not None:
                for package, folders in packages:
                    _in_place(package, folders)
                _install(module)
            self._modules[number] = module  # last: an interrupt may have come before it is whole
        return module


_GONE = object()

_WHOLES = (kinds.OPAQUE, kinds.CROWD)  # kinds that are compared by digests


def _without(there: kinds.Contents, before: kinds.Contents, now: kinds.Contents) -> kinds.Contents:
    """What is *there* without what was prepared, where *before* became *now*; itself if there is
    nothing."""
    mine = [key for key in now if now[key] is not before.get(key, _GONE)]
    mine = [key for key in mine if there.get(key, _GONE) is now[key]]
    if not mine:
        return there
    rest = {key: value for key, value in there.items() if key not in mine}
    return rest | {key: before[key] for key in mine if key in before}


def _in_place(package: str, folders: list[str]) -> None:
    """Have a package in which modules of the user's can be, where there is none."""
    if package not in sys.modules:
        module = OwnModule(package)
        module.__path__ = folders
        module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
        _install(module)


def _install(module: ModuleType) -> None:
    """Have imports find *module*, in its package and with the modules in it, whichever came first."""
    name = module.__name__
    sys.modules[name] = module
    for each in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
        package, _, last = each.rpartition(".")
        if package in sys.modules:
            setattr(sys.modules[package], last, sys.modules[each])


def _uninstall(module: ModuleType) -> None:
    """Have no import find *module*, unless one in it is still there."""
    name = module.__name__
    if sys.modules.get(name) is module and not any(each.startswith(f"{name}.") for each in sys.modules):
        del sys.modules[name]


def _equal(now: Any, expected: Any) -> bool:
    """Whether an entry is what is *expected*, or has its digest."""
    if isinstance(expected, kinds.Digest) and not isinstance(now, kinds.Digest):
        return kinds.OPAQUE.look(now)[kinds.WHOLE] == expected and expected.nbytes > 0
    return kinds.alike(now, expected)
