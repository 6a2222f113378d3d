"""Functions and arguments on their way to a task: by value, but for large arrays, which lie in memory,
or in a file, that the worker maps."""

from __future__ import annotations

import functools
import io
import marshal
import operator
import os
import pickle
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import cloudpickle
import numpy as np

from ...errors import InvalidType, SharedMemoryError
from ...memory.files import file_of
from ...memory.segment import Segment
from ...packing import pickles
from ...packing.code import uses
from ...packing.futures import LentArray, PickledValue, function_of, mapped, opened, proxy, settled
from ...packing.kinds import SIMPLE, reduces_itself
from ...packing.refused import refuse_open_file
from ...plan.call import Access, Region
from ...values.arrays import Array, code_of, same_bits
from ...values.foreign import handed, is_future
from ..data.data import Data
from ..variables.shared import Shared

_LARGE = 1 << 20  # bytes of an array that several tasks map instead of having copies
_KNOWN = 256  # arrays, and classes, that are remembered

_DEEP, _FEW = 4, 64  # how deep plain arguments are looked at, and how many entries of each container

_NEVER_USUAL = (
    *(type, FunctionType, CodeType, functools.cached_property, Future, io.IOBase),
    *(np.memmap, Data, Shared),
)


class PickledTask(NamedTuple):
    """A task as an item of a map: its pickle, beside its large buffers, and what is to live as long."""

    stream: bytes
    buffers: list[memoryview]
    holds: Sequence[Any]


class TaskPickler:
    """Pickles what tasks get.  Workers *nearby* map large arrays; others get copies.

    A task may write to what it gets, and nobody sees it; with *writes*, to files that it maps it writes.

    Attributes:
        key: by which workers know what the initializer of these tasks has done.
        usual: classes whose instances pickle takes as it takes most.
        prepares: whether there is an initializer.
    """

    def __init__(self, nearby: bool, writes: bool = False, prepares: bool = False) -> None:
        self.key: str = os.urandom(8).hex()
        script = sys.modules.get("__mp_main__")  # as a child that multiprocessing has started calls it
        if script is not None and script.__name__ == "__mp_main__":
            cloudpickle.register_pickle_by_value(script)  # no worker can import it
        self._nearby = nearby
        self._writes = writes
        self.prepares = prepares
        self.usual: set[type] = {BuiltinFunctionType}
        self._functions: dict[FunctionType, _KeptFunction] = {}  # some that have come more than once
        self._came: weakref.WeakSet[FunctionType] = weakref.WeakSet()  # functions that have come
        self._lock = threading.RLock()  # of what follows: several threads pickle
        self._seen: dict[Any, _Seen] = {}  # arrays, by where they lie
        self._files: weakref.WeakValueDictionary[tuple[int, int], _OpenFile]
        self._files = weakref.WeakValueDictionary()  # by their inodes

    def pickled(self, value: Any, often: bool = False) -> PickledValue:
        """*value*, pickled, for one task, or for many, *often*.

        Raises: InvalidType for a variable of a session and for a future; what pickling raises.
        """
        stream, buffers = io.BytesIO(), list[memoryview]()
        writer = _Writer(stream, pickles.kept_apart(buffers), self, often)
        writer.dump(value)
        return PickledValue(stream.getvalue(), buffers, writer.holds)

    def task(self, fn: Any, *rest: Any) -> PickledTask:
        """A function, its arguments, and settings, as an item of a map.  Raises: as ``pickled``."""
        kind, head = type(fn), None
        if kind is FunctionType:
            head = fn if _has_name(fn) else self.known(fn)
        elif kind is BuiltinFunctionType and type(fn.__self__) is ModuleType:
            head = fn
        if head is not None and all(_is_plain(each, _DEEP) for each in rest):
            return PickledTask(pickle.dumps(((head, *rest),), 5), [], ())
        value = self.pickled((fn, *rest))
        buffers = list[memoryview]()
        stays = pickles.kept_apart(buffers, pickles.OUT_OF_BAND)
        return PickledTask(pickle.dumps((value,), 5, buffer_callback=stays), buffers, value.holds)

    def known(self, fn: FunctionType) -> bytes | None:
        """The pickle of a function that is as it was when this was kept; None of others."""
        fixed = self._functions.get(fn)
        return fixed.stream if fixed is not None and fixed.is_valid() else None

    def keep(self, fn: FunctionType) -> None:
        """Keep the pickle of a function that comes again, if all that it uses can only be replaced, and
        not changed."""
        used: dict[FunctionType, _Used] = {}
        if fn not in self._came:
            self._came.add(fn)
        elif _is_fixed(fn, used):
            if len(self._functions) > _KNOWN:
                self._functions.clear()
            stream = io.BytesIO()
            _Writer(stream, None, self, often=False, whole=True).dump(fn)
            self._functions[fn] = _KeptFunction(stream.getvalue(), used, _modules())

    def is_usual(self, cls: type) -> bool:
        """Whether pickle is to do with instances of *cls* what it does by itself."""
        if reduces_itself(cls) or issubclass(cls, _NEVER_USUAL):
            return False
        if len(self.usual) > _KNOWN:
            self.usual.clear()
        self.usual.add(cls)
        return True

    def placed(self, array: Array, often: bool) -> tuple[LentArray, Segment] | None:
        """Where a large array lies for all tasks: if they get it *often*, or it was there before.

        None if it is to travel with the task.
        """
        dtype = array.dtype
        if not self._nearby or dtype.hasobject or dtype.metadata or not array.flags.forc:
            return None
        key = array.__array_interface__["data"][0], array.shape, array.strides, dtype
        with self._lock:
            return self._placed(key, array, often)

    def _placed(self, key: Any, array: Array, often: bool) -> tuple[LentArray, Segment] | None:
        seen = self._seen.get(key)
        if seen is not None and seen.segment is not None:
            if same_bits(seen.segment.array(seen.region), array):
                return seen.place(array), seen.segment
            seen.forget()  # the program has written to it
            return None
        if seen is None:
            seen = self._note(key, array)
            if not often:
                return None
        try:
            seen.copy(array)
        except SharedMemoryError:
            return None
        return None if seen.segment is None else (seen.place(array), seen.segment)

    def _note(self, key: Any, array: Array) -> _Seen:
        owner: Any = array
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        seen = self._seen
        while len(seen) >= _KNOWN:
            seen.pop(next(iter(seen)), None)
        seen[key] = found = _Seen(weakref.ref(owner, lambda _: seen.pop(key, None)), array)
        return found

    def reduced(self, obj: Any, often: bool, holds: list[Any]) -> Any:
        """What to reduce an object to; None if pickle takes it by itself.

        *holds* gets what is to live as long as the task may need it.  Raises: InvalidType for a variable
        of a session and for a future, TypeError for an open file.
        """
        if isinstance(obj, np.memmap):
            return self._file(obj, holds)
        if isinstance(obj, Data):
            return self._data(obj, holds)
        if isinstance(obj, Shared):
            raise InvalidType(
                f"{obj.called()} is a variable of a session, whose workers have it, and those of an "
                f"Executor have not: pass its value, get_value()."
            )
        if is_future(obj):
            raise InvalidType("an argument of a task is a future: pass its result, result().")
        if type(obj) is not np.ndarray:
            return _unusual(obj)
        if obj.nbytes >= _LARGE and (found := self.placed(obj, often)) is not None:
            place, segment = found
            holds.append(segment)
            return opened, (place, None)
        return None

    def _data(self, data: Data, holds: list[Any]) -> Any:
        lent = data.lent() if self._nearby else np.asarray(data[...])
        if isinstance(lent, np.ndarray):
            return handed, (lent, data.library)
        holds.append(data)
        return opened, (_place(*lent, Access.READ), data.library)

    def _file(self, array: np.memmap[Any, Any], holds: list[Any]) -> Any:
        found = file_of(array) if self._nearby and array.flags.forc else None
        if found is None:
            return None
        fd, offset = found
        status = os.fstat(fd)
        inode = status.st_dev, status.st_ino
        with self._lock:
            file = self._files.get(inode)
            if file is None:
                file = self._files[inode] = _OpenFile(fd)
            else:
                os.close(fd)
        holds.append(file)
        mode = "c" if not self._writes else "r+" if array.flags.writeable else "r"
        order = "C" if array.flags.c_contiguous else "F"
        place = os.getpid(), file.fd, inode
        return mapped, (place, array.dtype, mode, offset, array.shape, order)


def _is_plain(value: Any, deep: int) -> bool:
    """Whether pickle alone does with *value* what it should: numbers, strings, small arrays, and tuples,
    lists and dicts of a few of these, one in the other, if they are no deeper than *deep*."""
    kind = type(value)
    if kind in SIMPLE:
        return True
    if kind is np.ndarray:
        dtype = value.dtype
        return value.nbytes < _LARGE and dtype.kind in "biufcSUmM" and dtype.metadata is None
    if kind is tuple or kind is list:
        return deep > 0 and len(value) <= _FEW and all(_is_plain(each, deep - 1) for each in value)
    if kind is dict:
        return deep > 0 and len(value) <= _FEW and _is_plain([*value, *value.values()], deep)
    if kind is PickledValue:
        return bool(value.is_alone)
    return isinstance(value, np.number | np.bool_) and kind is value.dtype.type


def _unusual(obj: Any) -> Any:
    """What to reduce an object to that has a way of its own; None if pickle takes it by itself."""
    if isinstance(obj, functools._lru_cache_wrapper) and not _has_name(obj):
        return pickles.with_cache(obj)
    managers = sys.modules.get("multiprocessing.managers")
    if managers is not None and isinstance(obj, managers.BaseProxy):
        key = sys.modules["multiprocessing.process"].current_process().authkey
        return proxy, (bytes(key), *obj.__reduce__())
    refuse_open_file(obj)
    return pickles.without_lock(obj) or pickles.with_attributes(obj)


def _has_name(obj: Any) -> bool:
    """Whether the workers find a function, or a class, by its name in a module, as pickle does."""
    name = obj.__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__" or _goes_by_value(name):
        return False
    try:
        return operator.attrgetter(obj.__qualname__)(module) is obj
    except AttributeError:
        return False


def _goes_by_value(name: str) -> bool:
    """Whether the program has said that the module of this name, or a package that it is in, does."""
    registered = cloudpickle.list_registry_pickle_by_value()
    return any(name == each or name.startswith(f"{each}.") for each in registered)


class _OpenFile:
    """A file that is open as long as this."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        weakref.finalize(self, os.close, fd).atexit = False


class _Seen:
    """A large array that a task has got, and the copy that others map.

    Attributes:
        owner: has the memory; without it the array is forgotten.
        region: where the copy lies in its segment.
        segment: None if there is no copy.
    """

    def __init__(self, owner: weakref.ref[Any], array: Array) -> None:
        self.owner = owner
        self.region = Region(0, 0, array.shape, code_of(array.dtype), array.strides)
        self.segment: Segment | None = None

    def copy(self, array: Array) -> None:
        """Copy the array.  Raises: SharedMemoryError."""
        segment = Segment.create(0, array.nbytes)
        np.copyto(segment.array(self.region), array)
        self.segment = segment

    def forget(self) -> None:
        """There is no copy any more; tasks that have it keep it."""
        self.segment = None

    def place(self, array: Array) -> LentArray:
        """Where the copy of *array* is, for tasks that may write to it if the program may."""
        assert self.segment is not None
        return _place(self.region, self.segment, Access.COPY if array.flags.writeable else Access.READ)


class _KeptFunction(NamedTuple):
    """The pickle of a function, and what it was made of: for each function that travels with it the
    globals that it uses; and the ``_modules``."""

    stream: bytes
    used: dict[FunctionType, _Used]
    modules: tuple[int, set[str]]

    def is_valid(self) -> bool:
        """Whether all is as it was."""
        return _modules() == self.modules and all(used.is_valid(fn) for fn, used in self.used.items())


def _modules() -> tuple[int, set[str]]:
    """How many modules are imported, and the names of those that go by value."""
    return len(sys.modules), cloudpickle.list_registry_pickle_by_value()


class _Used(NamedTuple):
    """What a function has, and the globals that it uses, by their names."""

    parts: tuple[Any, ...]
    keywords: dict[str, Any]
    annotations: dict[str, Any]
    names: dict[str, Any]

    def is_valid(self, fn: FunctionType) -> bool:
        """Whether all is as it was."""
        return (
            all(map(operator.is_, _parts(fn), self.parts))
            and not vars(fn)
            and _are(fn.__kwdefaults__ or {}, self.keywords)
            and _are(fn.__annotations__, self.annotations)
            and all(fn.__globals__.get(name, _NOTHING) is self.names[name] for name in self.names)
        )


_parts = operator.attrgetter(
    "__code__", "__defaults__", "__name__", "__qualname__", "__module__", "__doc__"
)


def _are(found: dict[str, Any], kept: dict[str, Any]) -> bool:
    """Whether both have the same values."""
    return len(found) == len(kept) and all(found.get(key, _NOTHING) is kept[key] for key in kept)


_NOTHING = object()  # where there is no global of a name


_ATOMS = (int, float, complex, str, bytes, type(None))


def _is_fixed(fn: FunctionType, used: dict[FunctionType, _Used]) -> bool:
    """Whether all that a function uses can only be replaced; it comes to *used*.

    Such are numbers, strings, modules, what has a name in a module, and other functions like that.
    """
    if fn in used:
        return True
    found = uses(fn.__code__)
    keywords = dict(fn.__kwdefaults__ or {})
    given = (*(fn.__defaults__ or ()), *keywords.values())
    if fn.__closure__ or vars(fn) or found.assigns or not all(type(v) in _ATOMS for v in given):
        return False
    names = {name: fn.__globals__.get(name, _NOTHING) for name in found.names}
    used[fn] = _Used(_parts(fn), keywords, dict(fn.__annotations__), names)
    return all(
        value is _NOTHING
        or type(value) in _ATOMS
        or (type(value) is BuiltinFunctionType and type(value.__self__) is ModuleType)
        or (type(value) is ModuleType and _is_imported(value))
        or (isinstance(value, FunctionType | type) and _has_name(value))
        or (type(value) is FunctionType and _is_fixed(value, used))
        for value in names.values()
    )


def _is_imported(module: ModuleType) -> bool:
    """Whether the workers import a module."""
    return sys.modules.get(module.__name__) is module and not _goes_by_value(module.__name__)


def _place(region: Region, segment: Segment, access: Access) -> LentArray:
    status = os.fstat(segment.fd)
    inode = status.st_dev, status.st_ino
    return LentArray(os.getpid(), segment.fd, inode, segment.nbytes, region, access)


class _Writer(pickles.ByValue):
    """Pickles one value for tasks.

    Attributes:
        holds: what is to live as long as a task may need it.
    """

    def __init__(
        self, file: io.BytesIO, stays: Any, arguments: TaskPickler, often: bool, whole: bool = False
    ) -> None:
        """*whole*: what is kept of functions does not serve."""
        super().__init__(file, stays)
        self._whole = whole
        self.holds: list[Any] = []
        self._arguments = arguments
        self._often = often

    def reducer_override(self, obj: Any) -> Any:
        cls, arguments = type(obj), self._arguments
        if cls in arguments.usual:
            return NotImplemented
        if (cls is FunctionType or cls is type) and _has_name(obj):
            return NotImplemented
        if cls is FunctionType:
            return self._function(obj)
        if cls is CodeType:
            return marshal.loads, (marshal.dumps(obj),)
        if arguments.is_usual(cls):
            return NotImplemented
        reduced = arguments.reduced(obj, self._often, self.holds)
        return super().reducer_override(obj) if reduced is None else reduced

    def _function(self, fn: FunctionType) -> Any:
        if not self._whole and (stream := self._arguments.known(fn)) is not None:
            return function_of, (stream, self._arguments.key)
        reduced = super().reducer_override(fn)
        if not isinstance(reduced, tuple):
            return reduced
        if not self._whole:
            self._arguments.keep(fn)
        make, args, state, _, _, complete = reduced
        return make, args, (self._arguments.key, complete, state), None, None, settled
