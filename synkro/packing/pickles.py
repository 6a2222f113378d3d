"""Streams of pickles: functions and what they bring along, as bytes, and as objects again.

An object that the workers have already travels as its number.  Those that they are to know from now on
are named, at the end of a stream, by their places in pickle's memo, which is the same on both sides.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
import pickle
import sys
import threading
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from itertools import accumulate
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any, Protocol

import cloudpickle
import numpy as np

from ..values.foreign import is_movable, is_numba
from .code import is_own, uses
from .imported import Part, made, settle, taken_over
from .kinds import (
    CONTEXT,
    FUNCTION_PARTS,
    INSTANCE,
    Contents,
    is_for_program,
    is_named,
    is_sent_by_value,
    is_sent_module,
    own_slots,
    singleton,
    stays_here,
)
from .refused import Absent, is_open_file, is_parallel_map

OUT_OF_BAND = 1 << 15
"""Buffers from this many bytes on stay out of the pickle: they travel once, in shared memory."""

PICKLED = np.dtype(np.uint16).newbyteorder("S").str
"""The dtype of a pickle among a function's outputs, which no output has: they are in native order."""

INTEGER = np.dtype(np.int64).newbyteorder("S").str
"""The dtype of an integer of Python's among them, to be reduced: one of 64 bits, or else a pickle."""

HEAD = 4  # bytes before it, which say how many buffers follow

SIMPLE = frozenset({type(None), bool, int, float, complex, str, bytes})
"""Types that pickle itself takes, and that hold nothing else."""

_NUMBERS = frozenset({type(None), bool, int, float, complex})

_SHORT = 64  # entries of a container that is looked through, characters of a string that is small

_ATOMS = SIMPLE | {tuple}


class Space:
    """The names of one module, here and on the workers.

    Attributes:
        number: its number.
        names: the dict of the names.
        module: the name of the module.
        importable: whether it can be imported by this name.
        installed: whether it is not the user's own: the workers import it themselves.
    """

    __slots__ = ("__weakref__", "importable", "installed", "module", "names", "number")

    def __init__(self, number: int, names: dict[str, Any]) -> None:
        self.number = number
        self.names = names
        self.module = str(names.get("__name__", "__main__"))
        module = sys.modules.get(self.module)
        self.importable = self.module != "__main__" and getattr(module, "__dict__", None) is names
        self.installed = self.importable and not is_own(module)

    @property
    def lasts(self) -> bool:
        """Whether the names are those of a module that is imported."""
        return getattr(sys.modules.get(self.module), "__dict__", None) is self.names

    @property
    def record(self) -> tuple[int, str, Any, dict[str, Any] | None]:
        """What a worker needs to make it: its number, its name, the packages that it is in with their
        folders (None: it cannot be imported), and its names that say where it is from (None: it is to be
        imported)."""
        if self.installed:
            return self.number, self.module, None, None
        packages = None
        if self.importable:
            heads = list(accumulate(self.module.split(".")[:-1], "{}.{}".format))
            packages = tuple(
                (head, list(getattr(sys.modules.get(head), "__path__", ()))) for head in heads
            )
        own = {name: self.names[name] for name in _HOME if self.names.get(name) is not None}
        return self.number, self.module, packages, own


def _folders(package: str) -> list[str]:
    return list(getattr(sys.modules.get(package), "__path__", ()))


_HOME = ("__package__", "__file__")


class NumberOf(Protocol):
    """The numbers of objects, by id."""

    def get(self, ident: int, /) -> int | None: ...


class Writer:
    """Writes one stream."""

    def __init__(
        self,
        numbers: NumberOf,
        space_of: Callable[[dict[str, Any]], Space],
        current: Callable[[Space, str, Any], bool],
        compiled: Callable[[Any], Any],
        least: int = OUT_OF_BAND,
        parts: Mapping[int, tuple[Any, Part]] = MappingProxyType({}),
    ) -> None:
        """*numbers* are those of the objects that the workers have, by id.  Buffers of *least* bytes
        are kept apart from the stream.  *parts*, also by id, the workers make by an import.

        *space_of* gives the space of a function's globals; *current* says whether the workers have a
        value of a name already; *compiled* how a function of numba's is pickled.
        """
        self._stream = io.BytesIO()
        self.buffers: list[memoryview] = []
        self.movable: list[Any] = []
        self._pickler = _Pickler(
            self._stream,
            kept_apart(self.buffers, least),
            numbers,
            space_of,
            current,
            compiled,
            self.movable,
            parts,
        )

    def write(self, value: Any) -> None:
        self._pickler.dump(value)

    @property
    def relies(self) -> bool:
        """Whether what was written relies on objects, or names, that the workers have."""
        return self._pickler.relies

    def places(self, objects: Iterable[Any]) -> list[int | None]:
        """The places of *objects* in the memo; None for what was not pickled."""
        memo = self._pickler.memo.copy()
        return [memo.get(id(obj), (None,))[0] for obj in objects]

    @property
    def stream(self) -> bytes:
        return self._stream.getvalue()


def _is_simple(value: Any, depth: int = 3) -> bool:
    """Whether pickle itself takes *value*: numbers, strings, arrays, and short containers of these."""
    kind = type(value)
    if kind in SIMPLE or kind is np.ndarray:
        return kind is not np.ndarray or (value.flags.writeable and not value.dtype.hasobject)
    if depth and kind in (tuple, list):
        return len(value) <= _SHORT and all(_is_simple(each, depth - 1) for each in value)
    if depth and kind is dict:
        return len(value) <= _SHORT and all(
            type(key) is str and _is_simple(each, depth - 1) for key, each in value.items()
        )
    return isinstance(value, np.number | np.bool_) and type(value) is value.dtype.type


def is_small(value: Any) -> bool:
    """Whether *value* cannot change, and pickle takes a few bytes for it: many travel together."""
    kind = type(value)
    if kind in _NUMBERS:
        return True
    if kind is str or kind is bytes:
        return len(value) <= _SHORT
    return isinstance(value, np.number | np.bool_) and kind is value.dtype.type


def are_small(values: Sequence[Any]) -> bool:
    """Whether all of them are small."""
    return _NUMBERS.issuperset(map(type, values)) or all(map(is_small, values))


def is_too_deep(error: Exception) -> bool:
    """Whether something could not be pickled as it is nested too deeply."""
    return isinstance(error, RecursionError | pickle.PicklingError) and "recursion" in str(error)


def simply_pickled(value: Any) -> tuple[bytes, list[memoryview]] | None:
    """What pickle itself makes of *value*, beside large buffers; None if it needs a pickler of ours."""
    if not _is_simple(value):
        return None
    buffers: list[memoryview] = []
    return pickle.dumps(value, 5, buffer_callback=kept_apart(buffers)), buffers


def kept_apart(
    buffers: list[memoryview], least: int = OUT_OF_BAND
) -> Callable[[pickle.PickleBuffer], bool]:
    """What tells pickle which buffers stay in the stream; those of *least* bytes go to *buffers*."""

    def stays(buffer: pickle.PickleBuffer) -> bool:
        try:
            raw = buffer.raw()
        except BufferError:  # not contiguous
            return True
        if raw.nbytes < least:
            return True
        buffers.append(raw)
        return False

    return stays


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(
        self,
        file: io.BytesIO,
        buffer_callback: Callable[[pickle.PickleBuffer], bool | None] | None,
        numbers: NumberOf,
        space_of: Callable[[dict[str, Any]], Space],
        current: Callable[[Space, str, Any], bool],
        compiled: Callable[[Any], Any],
        movable: list[Any],
        parts: Mapping[int, tuple[Any, Part]],
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self._numbers = numbers
        self._parts = parts
        self._space_of = space_of
        self._current = current
        self._compiled = compiled
        self._movable = movable
        self.relies = False

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _ATOMS:
            return None
        if type(obj) is Space:
            return obj.record
        number = self._numbers.get(id(obj))
        self.relies |= number is not None
        return number

    def reducer_override(self, obj: Any) -> Any:  # noqa: PLR0911, PLR0912
        if id(obj) in self._parts:
            state, part = taken_over(obj), self._parts[id(obj)][1]
            return (made, part) if state is None else (made, part, state, None, None, settle)
        if what := stays_here(obj):
            return Absent, (what,)
        if isinstance(obj, FunctionType):
            return self._function(obj) if is_sent_by_value(obj) else super().reducer_override(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, CodeType):  # from cloudpickle 3.1.3 on it comes without its file
            return _code, (obj.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](obj))
        if isinstance(obj, ModuleType):
            return (_module, (self._space_of(vars(obj)),)) if is_sent_module(obj) else NotImplemented
        if type(obj) is np.ndarray and not (obj.flags.writeable or obj.dtype.hasobject):
            return _read_only, (np.array(obj),)  # in memory that new contents can be put into
        if (reduced := with_attributes(obj)) is not None:
            return reduced
        if is_open_file(obj):
            raise TypeError(f"cannot send the open file {obj!r}")
        if is_movable(obj):
            self._movable.append(obj)
        if is_numba(obj):
            return self._compiled(obj)
        if isinstance(obj, functools._lru_cache_wrapper):
            return _cached, (obj.__wrapped__, obj.cache_parameters())
        if isinstance(obj, functools.cached_property):  # before Python 3.12 it has a lock
            return _cached_property, (obj.func, obj.attrname)
        if type(obj) is ContextVar:
            return ContextVar, (obj.name,), CONTEXT.look(obj), None, None, _set
        if type(obj) is threading.local:
            return threading.local, (), INSTANCE.look(obj), None, None, _complete
        if isinstance(obj, np.finfo):
            return np.finfo, (obj.dtype,)
        if is_named(obj):
            return _made, (type(obj),), INSTANCE.look(obj), None, None, _complete
        place = singleton(obj) or _place(obj)
        return super().reducer_override(obj) if place is None else (_singleton, place)

    def _function(self, fn: FunctionType) -> Any:
        if is_parallel_map(fn):
            raise TypeError(f"cannot send the parallel map {fn!r}")
        space = self._space_of(fn.__globals__)
        self.relies |= not space.installed
        names = {
            name: value
            for name in (() if space.installed else uses(fn.__code__).names)
            if name in space.names and not self._current(space, name, value := space.names[name])
            if not is_for_program(value)
        }
        cells: list[tuple[int, Any]] = []
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                if not is_for_program(value := cell.cell_contents):
                    cells.append((len(cells), value))
                    continue
            cells.append((-1, None))
        parts = {name: getattr(fn, name) for name in (*FUNCTION_PARTS[1:], *_DESCRIBING)}
        try:
            parts["__annotations__"] = fn.__annotations__
        except NameError:  # from Python 3.14 on, of what is imported for type checkers only
            parts["__annotations__"] = {}
        state = (parts, fn.__dict__.copy(), [c for c in cells if c[0] >= 0], names)
        return _bare_function, (fn.__code__, space, len(cells)), state, None, None, _complete_function

    def _class(self, cls: type) -> Any:
        module = sys.modules.get(cls.__module__)
        if module is None and str(cls.__module__).partition(".")[0] in sys.modules:
            with contextlib.suppress(ImportError):  # of a part that its package imports when it is used
                module = importlib.import_module(cls.__module__)
        own = cls.__module__ != "__main__" and module is not None and is_own(module)
        register = own and cls.__module__ not in cloudpickle.list_registry_pickle_by_value()
        if register:
            cloudpickle.register_pickle_by_value(module)
        try:
            reduced = super().reducer_override(cls)
        finally:
            if register:
                cloudpickle.unregister_pickle_by_value(module)
        if isinstance(reduced, tuple) and "__slots__" in vars(cls):  # private ones are forgotten there
            for name in own_slots(cls):
                reduced[2][0].pop(name, None)
        return reduced


def with_attributes(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce an array to that has attributes, such as a unit, which pickle leaves out.

    None for all else, and where the class says itself how it is pickled.
    """
    if not isinstance(obj, np.ndarray) or not getattr(obj, "__dict__", None):
        return None
    cls = type(obj)
    for way in ("__reduce__", "__reduce_ex__"):
        if getattr(cls, way) is not getattr(np.ndarray, way):
            return None
    if isinstance(obj, np.memmap):
        return None
    return _viewed, (np.ndarray.view(obj, np.ndarray), cls), vars(obj), None, None, _attribute


def _place(obj: Any) -> tuple[str, str] | None:
    """Of a ufunc of a library's its module and its name; pickle may find it in ``__mp_main__``, which is
    the script where multiprocessing has been imported."""
    if type(obj) is not np.ufunc:
        return None
    module = pickle.whichmodule(obj, obj.__name__)  # type: ignore[attr-defined]
    return None if module == "__main__" else (module, obj.__name__)


_DESCRIBING = ("__name__", "__qualname__", "__module__", "__doc__")


# ── on a worker ──────────────────────────────────────────────────────────────────────────────────────


class Reader(pickle.Unpickler):
    """Reads one stream."""

    def __init__(
        self,
        stream: bytes,
        buffers: Iterable[memoryview],
        objects: Mapping[int, Any],
        space: Callable[..., Any],
    ) -> None:
        """*objects* are those that this worker has, by number; *space* makes the space of a record."""
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._objects = objects
        self._space = space

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid] if isinstance(pid, int) else self._space(*pid)

    def placed(self, places: Iterable[int]) -> list[Any]:
        """The objects at these *places* of the memo."""
        memo = self.memo.copy()
        return [memo[place] for place in places]


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def _viewed(array: np.ndarray[Any, Any], cls: type[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    return array.view(cls)


def _attribute(array: np.ndarray[Any, Any], attributes: dict[str, Any]) -> None:
    array.__dict__.update(attributes)


def _made(cls: Any) -> Any:
    return cls.__new__(cls)


def _complete(obj: Any, contents: Contents) -> None:
    INSTANCE.change(obj, contents, ())


def _set(variable: ContextVar[Any], contents: Contents) -> None:
    CONTEXT.change(variable, contents, ())


def _module(module: ModuleType) -> ModuleType:
    return module


def _code(file: str, make: Callable[..., CodeType], parts: Any) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _bare_function(code: CodeType, module: ModuleType, cells: int) -> FunctionType:
    closure = tuple(types.CellType() for _ in range(cells))
    return FunctionType(code, vars(module), code.co_name, None, closure)


def _complete_function(fn: FunctionType, state: Any) -> None:
    parts, attributes, cells, names = state
    fn.__globals__.update(names)
    fn.__dict__.update(attributes)
    for name, value in parts.items():
        setattr(fn, name, value)
    for index, value in cells:
        (fn.__closure__ or ())[index].cell_contents = value


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def _cached_property(fn: Callable[..., Any], name: str | None) -> Any:
    made: Any = functools.cached_property(fn)
    if name is not None:
        made.__set_name__(None, name)
    return made


def _singleton(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)
