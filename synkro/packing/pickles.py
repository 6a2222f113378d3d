"""Streams of pickles: functions and what they bring along, as bytes, and as objects again.

An object that the workers have already travels as its number.  Those that they are to know from now on
are named, at the end of a stream, by their places in pickle's memo, which is the same on both sides.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import io
import pickle
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from copyreg import __newobj__  # type: ignore[attr-defined]
from itertools import accumulate, chain
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import cloudpickle
import numpy as np

from ..errors import InvalidValue, UsageError, too_deep
from ..memory.segment import check_descriptors
from ..values.foreign import is_movable, is_numba
from . import kinds
from .code import is_own, uses
from .imported import Part, made, settle, taken_over
from .kinds import Contents, NumberOf, is_for_program, is_named, is_sent_by_value, reduces_itself
from .pytrees import set_and_register, ways_of
from .refused import Absent, is_parallel_map, refuse_open_file

if TYPE_CHECKING:
    from pickle import Pickler  # which cloudpickle's is
else:
    from cloudpickle import Pickler

OUT_OF_BAND = 1 << 15
"""Buffers from this many bytes on stay out of the pickle: they travel once, in shared memory."""

PICKLED = np.dtype(np.uint16).newbyteorder("S").str
"""The dtype of a pickle among a function's outputs, which no output has: they are in native order."""

INTEGER = np.dtype(np.int64).newbyteorder("S").str
"""The dtype of Python's integers among outputs, to be reduced: one of 64 bits, or else a pickle."""

HEAD = 4  # bytes before it, which say how many buffers follow

NUMBERS = kinds.SIMPLE - {str, bytes}
"""Types of numbers, and of nothing."""

_SHORT = 64  # entries of a container that is looked through, characters of a string that is small

_ATOMS = kinds.SIMPLE | {tuple}


class Space:
    """The names of one module, here and on the workers.

    Attributes:
        number: its number.
        names: the dict of the names.
        module: the name of the module.
        importable: whether it can be imported by this name.
        installed: whether it is not the user's own: the workers import it themselves.
        assigned: names that the initializer of the session assigns, so that each worker has its own.
    """

    __slots__ = ("__weakref__", "assigned", "importable", "installed", "module", "names", "number")

    def __init__(self, number: int, names: dict[str, Any]) -> None:
        self.number: Final = number
        self.names: Final = names
        self.assigned: set[str] = set()
        self.module: Final = str(names.get("__name__", "__main__"))
        module = sys.modules.get(self.module)
        self.importable: Final = self.module != "__main__" and getattr(module, "__dict__", None) is names
        self.installed: Final = self.importable and not is_own(module)

    @property
    def lasts(self) -> bool:
        """Whether the names are those of a module that is imported."""
        return getattr(sys.modules.get(self.module), "__dict__", None) is self.names

    @property
    def record(self) -> tuple[int, str, Any, dict[str, Any] | None]:
        """What a worker needs to make the space: its number, its name, the packages that it is in with
        their folders (None: it cannot be imported), and its names that say where it is from (None: it is
        to be imported)."""
        if self.installed:
            return self.number, self.module, None, None
        packages = None
        if self.importable:
            heads = list(accumulate(self.module.split(".")[:-1], "{}.{}".format))
            packages = tuple((head, _folders(head)) for head in heads)
        own = {name: self.names[name] for name in _HOME if self.names.get(name) is not None}
        if "__path__" in self.names:  # it is a package, parts of which may be imported later
            own["__path__"] = _folders(self.module)
        return self.number, self.module, packages, own


def _folders(package: str) -> list[str]:
    return list(getattr(sys.modules.get(package), "__path__", ()))


_HOME = ("__package__", "__file__", "__path__")


def is_small(value: Any) -> bool:
    """Whether *value* cannot change, and pickle takes a few bytes for it: many travel together."""
    kind = type(value)
    if kind in NUMBERS:
        return True
    if kind is str or kind is bytes:
        return len(value) <= _SHORT
    return isinstance(value, np.number | np.bool_) and kind is value.dtype.type


def are_small(values: Sequence[Any]) -> bool:
    """Whether all *values* are small."""
    return NUMBERS.issuperset(map(type, values)) or all(map(is_small, values))


def check_cause(error: Exception, called: str, kind: type[UsageError] = InvalidValue) -> None:
    """See whether it is *error* of something else that what is *called* so could not be pickled.

    Raises: SharedMemoryError if no descriptor is left; an error of a *kind* if it is nested too deeply.
    """
    check_descriptors(error, f"{called} cannot be pickled")
    if isinstance(error, RecursionError | pickle.PicklingError) and "recursion" in str(error):
        raise too_deep(called, kind) from None


Stays = Callable[[pickle.PickleBuffer], bool]


def kept_apart(buffers: list[memoryview], least: int = OUT_OF_BAND) -> Stays:
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


class Stream(Pickler):
    """A pickler with a stream of its own.

    Attributes:
        buffers: what is kept apart from the stream.
    """

    def __init__(self, least: int) -> None:
        """Buffers of *least* bytes are kept apart."""
        self._stream = io.BytesIO()
        self.buffers: list[memoryview] = []
        super().__init__(self._stream, protocol=5, buffer_callback=kept_apart(self.buffers, least))

    @property
    def stream(self) -> bytes:
        """All that was written."""
        return self._stream.getvalue()


class _ForWorkers(Stream):
    """What functions, classes and objects are made of again on a worker.

    Attributes:
        movable: PyTorch's modules and optimizers among what was written.
        relies: whether that relies on objects, or names, that the workers have.
        relied: these objects, by id.
        classes: those that were written, by id.
    """

    def __init__(
        self,
        numbers: NumberOf,
        space_of: Callable[[dict[str, Any]], Space],
        current: Callable[[Space, str, Any], bool],
        compiled: Callable[[Any], Any],
        parts: Mapping[int, tuple[Any, Part]],
        least: int = OUT_OF_BAND,
    ) -> None:
        """*numbers* are those of the objects that the workers have, by id.  Buffers of *least* bytes
        are kept apart from the stream.  *parts*, also by id, the workers make by an import.

        *space_of* gives the space of a function's globals; *current* says whether the workers have a
        value of a name already; *compiled* how a function of numba's is pickled.
        """
        super().__init__(least)
        self._numbers = numbers
        self._parts = parts
        self._space_of = space_of
        self._current = current
        self._compiled = compiled
        self.movable: list[Any] = []
        self.relies: bool = False
        self.relied: dict[int, Any] = {}
        self.classes: dict[int, type] = {}

    def number_of(self, obj: Any) -> int | None:
        """The number of an object that the workers have; None for others."""
        number = self._numbers.get(id(obj))
        if number is not None:
            self.relies = True
            self.relied[id(obj)] = obj
        return number

    def reducer_override(self, obj: Any) -> Any:  # noqa: PLR0911, PLR0912
        if id(obj) in self._parts:
            state, part = taken_over(obj), self._parts[id(obj)][1]
            return (made, part) if state is None else (made, part, state, None, None, settle)
        if what := kinds.stays_here(obj):
            return Absent, (what,)
        if isinstance(obj, FunctionType):
            return self._function(obj) if is_sent_by_value(obj) else super().reducer_override(obj)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, CodeType):
            return with_file(obj)
        if isinstance(obj, ModuleType):
            return (as_it_is, (self._space_of(vars(obj)),)) if is_own(obj) else NotImplemented
        if type(obj) is np.ndarray and not obj.dtype.hasobject:
            if not obj.flags.writeable:
                return _read_only, (np.array(obj),)  # in memory that new contents can be put into
            if not obj.flags.forc:  # pickle would make it of bytes, which cannot be written to for long
                return np.array(obj).__reduce_ex__(5)
        if (reduced := with_attributes(obj)) is not None:
            return reduced
        refuse_open_file(obj)
        if is_movable(obj):
            self.movable.append(obj)
        if is_numba(obj):
            return self._compiled(obj)
        if isinstance(obj, functools._lru_cache_wrapper):
            return with_cache(obj)
        if (reduced := without_lock(obj) or with_values(obj)) is not None:
            return reduced
        if isinstance(obj, np.finfo):
            return np.finfo, (obj.dtype,)
        if (reduced := by_value(obj)) is not None:
            return reduced
        place = kinds.singleton(obj) or _place(obj)
        return super().reducer_override(obj) if place is None else (found_in, place)

    def _function(self, fn: FunctionType) -> Any:
        if is_parallel_map(fn):
            raise TypeError(f"cannot send the parallel map {fn!r}")
        space = self._space_of(fn.__globals__)
        self.relies |= not space.installed
        names = {
            name: value
            for name in (() if space.installed else uses(fn.__code__).names)
            if name in space.names and name not in space.assigned
            if not self._current(space, name, value := space.names[name]) and not is_for_program(value)
        }
        return made_function(fn, space, names)

    def _class(self, cls: type) -> Any:
        module = sys.modules.get(cls.__module__)
        if module is None and str(cls.__module__).partition(".")[0] in sys.modules:
            with contextlib.suppress(ImportError):  # of a part that its package imports when it is used
                module = importlib.import_module(cls.__module__)
        reduced = reduced_class(super().reducer_override, cls, module)
        if is_class_by_value(reduced):
            self.classes[id(cls)] = cls
        return _whole_class(cls, reduced)


def made_function(fn: FunctionType, module: Any, names: dict[str, Any]) -> tuple[Any, ...]:
    """What to reduce a function to that is made anew with these *names* in a *module*."""
    cells: list[tuple[int, Any]] = []
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing was assigned yet
            if not is_for_program(value := cell.cell_contents):
                cells.append((len(cells), value))
                continue
        cells.append((-1, None))
    parts = {name: getattr(fn, name) for name in (*kinds.FUNCTION_PARTS[1:], *_DESCRIBING)}
    try:
        parts["__annotations__"] = fn.__annotations__
    except NameError:  # from Python 3.14 on, of what is imported for type checkers only
        parts["__annotations__"] = {}
    state = (parts, fn.__dict__.copy(), [c for c in cells if c[0] >= 0], names)
    return _bare_function, (fn.__code__, module, len(cells)), state, None, None, _complete_function


def reduced_class(reduce: Callable[[Any], Any], cls: type, module: ModuleType | None) -> Any:
    """What cloudpickle's *reduce* makes of a class, which goes whole if its module is the user's own."""
    register = module is not None and cls.__module__ != "__main__" and is_own(module)
    register = register and cls.__module__ not in cloudpickle.list_registry_pickle_by_value()
    if register:
        cloudpickle.register_pickle_by_value(module)
    try:
        return reduce(cls)
    finally:
        if register:
            cloudpickle.unregister_pickle_by_value(module)


def another_class(cls: type, reduced: Any) -> Any:
    """What to reduce a class to, which cloudpickle has *reduced*, so that where it is loaded it becomes
    another one than that which is there."""
    reduced = _whole_class(cls, reduced)
    place = _SKELETONS.get(getattr(reduced[0], "__name__", "")) if isinstance(reduced, tuple) else None
    if place is None:
        return reduced
    make, args, *rest = reduced
    return make, (*args[:place], None, *args[place + 1 :]), *rest


def is_class_by_value(reduced: Any) -> bool:
    """Whether cloudpickle has *reduced* a class to what it holds, and not to its name."""
    return isinstance(reduced, tuple) and len(reduced) == 6


def _whole_class(cls: type, reduced: Any) -> Any:
    """What to reduce a class to, with its whole name, its slots and members, and as JAX knows it, all of
    which cloudpickle leaves out."""
    if not is_class_by_value(reduced):
        return reduced
    contents = reduced[2][0]
    contents["__qualname__"] = cls.__qualname__
    if slots := kinds.own_slots(cls):
        for name in slots:
            contents.pop(name, None)
        if isinstance(contents["__slots__"], str | tuple | list | dict):  # no iterator: that is over
            reduced[1][3]["__slots__"] = contents.pop("__slots__")
    if issubclass(cls, enum.Enum):
        return _enum(cls, *reduced)
    if (ways := ways_of(cls)) is None:
        return reduced
    make, arguments, contents, _, _, set_contents = reduced
    return make, arguments, (set_contents, contents, ways), None, None, set_and_register


def _whole_function(fn: FunctionType, reduced: Any) -> Any:
    """What cloudpickle has *reduced* a function to, with globals that bodies of classes in it use, which
    cloudpickle leaves out."""
    has, brings = fn.__globals__, reduced[2][1]["__globals__"]
    brings |= {name: has[name] for name in uses(fn.__code__).names if name in has}
    return reduced


class Writer(_ForWorkers):
    """Writes one stream, by ``dump``."""

    def places(self, objects: Iterable[Any]) -> list[int | None]:
        """The places of *objects* in the memo; None for what was not pickled."""
        memo = self.memo.copy()
        return [memo.get(id(obj), (None,))[0] for obj in objects]

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) in _ATOMS:
            return None
        return obj.record if type(obj) is Space else self.number_of(obj)


class OneByOne(Stream):
    """Pickles values one by one: none knows of the others.

    It asks ``reduced`` once where the answer is that pickle does what it always does.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._ours = False  # whether pickle itself cannot read what was written
        self._usual: tuple[set[type], dict[int, Any]] = set(_DTYPES), {id(numbered): numbered}

    def pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]:
        """*value*, pickled, beside its large buffers, and whether pickle itself cannot read it."""
        self._ours = False
        try:
            self.dump(value)
            return self.stream, self.buffers[:], self._ours
        finally:
            self._forget()

    def head(self, classes: tuple[type, ...]) -> tuple[bytes, dict[int, Any], bool]:
        """*classes*, pickled, the memo of a pickler that goes on behind, and whether pickle itself
        cannot read them."""
        self._ours = False
        try:
            self.dump(classes)
            return self.stream, self.memo.copy(), self._ours
        finally:
            self._forget()

    def _forget(self) -> None:
        self.clear_memo()
        self.buffers.clear()
        self._stream.seek(0)
        self._stream.truncate()

    def is_usual(self, value: Any) -> bool:
        """Whether pickle does with all instances of *value*'s class what it always does."""
        self.reducer_override(value)
        return type(value) in self._usual[0]

    def reduced(self, obj: Any) -> Any:
        """What to reduce *obj* to; NotImplemented for what pickle makes of it."""
        raise NotImplementedError

    def reducer_override(self, obj: Any) -> Any:
        cls, (classes, named) = type(obj), self._usual
        if cls in classes or (cls is np.ndarray and obj.flags.writeable and not obj.dtype.hasobject):
            return obj.__reduce_ex__(5)  # as pickle calls it, after a look into the table of cloudpickle
        if id(obj) in named:
            return NotImplemented
        reduced = self.reduced(obj)
        if reduced is not NotImplemented:
            return reduced
        if isinstance(obj, type | FunctionType | types.BuiltinFunctionType):
            named[id(obj)] = obj
        elif _is_reduced_as_usual(obj) and cls not in self.dispatch_table:
            classes.add(cls)
        return reduced


_DTYPES = {type(np.dtype(code)) for code in "?bhilqBHILQefdgFDG"}


class ValueWriter(OneByOne, _ForWorkers):
    """Pickles values for workers: of what they hold, only what ``reduced`` sees can be the workers' own.

    So numbers, strings and containers go as fast as plain pickle takes them, and so do objects of
    classes that say nothing of how they are pickled.
    """

    def reduced(self, obj: Any) -> Any:
        if type(obj) is Space:
            self._ours = True
            return space, obj.record
        found = self._numbers_found.get(id(obj))
        if found is None:
            found = self._numbers_found[id(obj)] = obj, self.number_of(obj)
        if found[1] is None:
            return _ForWorkers.reducer_override(self, obj)
        self._ours = True
        return numbered, (found[1],)

    @functools.cached_property
    def _numbers_found(self) -> dict[int, tuple[Any, int | None]]:
        return {}  # by id: objects, and their numbers


def _is_reduced_as_usual(obj: Any) -> bool:
    """Whether all instances of *obj*'s class are pickled as Python does where nobody says how."""
    cls = type(obj)
    return not (reduces_itself(cls) or cls.__module__ == "builtins" or is_movable(obj))


def numbered(number: int) -> Any:
    """Stands for an object by its number; who unpickles it finds the object."""
    raise NotImplementedError


def space(*record: Any) -> Any:
    """Stands for the names of a module; a worker that unpickles it has them."""
    raise NotImplementedError


def _enum(cls: Any, make: Any, args: tuple[Any, ...], state: Any, *rest: Any) -> tuple[Any, ...]:
    """What to reduce an enum to, with other names of its members, and with their attributes, both of
    which cloudpickle leaves out."""
    members = cls.__members__
    values = {name: member.value for name, member in members.items()}
    own, slots = state
    state = {name: value for name, value in own.items() if name not in members}, slots
    attributes = [
        (name, {key: value for key, value in vars(member).items() if not key.endswith("_")})
        for name, member in members.items()
    ]
    given = (state, rest[-1], attributes)
    return make, (*args[:3], values, *args[4:]), given, None, None, _complete_enum


class ByValue(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles functions and classes, and what their annotations name, for a process that has none of
    them: one that is not the program's, or *there*, where the program had them."""

    def __init__(self, file: io.BytesIO, stays: Stays | None = None, there: bool = False) -> None:
        """*stays* says which buffers are in the stream; all, if it is None."""
        super().__init__(file, protocol=5, buffer_callback=stays)
        self._there = there

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, CodeType):
            return with_file(obj)
        if (reduced := (for_program if self._there else by_value)(obj)) is not None:
            return reduced
        reduced = super().reducer_override(obj)
        if self._there or not isinstance(reduced, tuple):
            return reduced
        whole: Any = _whole_function if isinstance(obj, FunctionType) else _whole_class
        return whole(obj, reduced)


def dumped(value: Any, there: bool = False) -> bytes:
    """A value with classes of the user's, pickled for workers; if *there*, by one for the program."""
    stream = io.BytesIO()
    ByValue(stream, there=there).dump(value)
    return stream.getvalue()


def by_value(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce an object to which pickle takes for a name in a module of the user's, such as a
    ``NewType``; None for all else."""
    if not is_named(obj):
        return None
    return __newobj__, (type(obj),), kinds.INSTANCE.look(obj), None, None, complete


def for_program(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce an object to which pickle takes for a name, for the program, which has the name, or
    had it; None for all else."""
    if not is_named(obj):
        return None
    return _programs, (obj.__module__, obj.__reduce_ex__(4), type(obj), kinds.INSTANCE.look(obj))


def _programs(module: str, name: str, cls: Any, contents: Contents) -> Any:
    found: Any = sys.modules.get(module)
    for step in name.split("."):
        found = getattr(found, step, None)
    if type(found) is cls:
        return found
    made = cls.__new__(cls)
    complete(made, contents)
    return made


def with_attributes(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce an array to that has attributes, such as a unit, which pickle leaves out.

    None for all else, and where the class says itself how it is pickled.
    """
    if not isinstance(obj, np.ndarray) or not getattr(obj, "__dict__", None):
        return None
    cls = type(obj)
    if reduces_itself(cls, np.ndarray) or isinstance(obj, np.memmap):
        return None
    return np.ndarray.view, (np.ndarray.view(obj, np.ndarray), cls), vars(obj), None, None, complete


def _place(obj: Any) -> tuple[str, str] | None:
    """The module and the name of a library's ufunc; pickle may find it in ``__mp_main__``, which is the
    script where multiprocessing has been imported."""
    if type(obj) is not np.ufunc:
        return None
    module = pickle.whichmodule(obj, obj.__name__)  # type: ignore[attr-defined]
    return None if module == "__main__" else (module, obj.__name__)


_DESCRIBING = ("__name__", "__qualname__", "__module__", "__doc__")


# ── on a worker ──────────────────────────────────────────────────────────────────────────────────────


class _Finder(pickle.Unpickler):
    """Reads one stream, in which ``numbered`` and ``space`` stand for what this process has."""

    def __init__(
        self,
        stream: bytes,
        buffers: Iterable[Any] = (),
        objects: Mapping[int, Any] = types.MappingProxyType({}),
        space: Callable[..., Any] = sys.modules.__getitem__,
    ) -> None:
        """*objects* are those that this process has, by number; *space* makes the space of a record."""
        super().__init__(io.BytesIO(stream), buffers=buffers)
        self._objects = objects
        self._space = space

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in ("numbered", "space"):
            return self._space if name == "space" else self._objects.__getitem__
        return super().find_class(module, name)


class Loader(_Finder):
    """Loads what has come back, and leaves the classes that this process has as they are: their methods
    would become copies of the other's."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if module == "cloudpickle.cloudpickle":
            if name in _SKELETONS:
                return functools.partial(_bare_class, found, _SKELETONS[name])
            if name == "_class_setstate":
                return functools.partial(_complete_class, found)
        return found


_SKELETONS = {"_make_skeleton_class": 4, "_make_skeleton_enum": 5}  # which argument is the class's id
_incomplete: weakref.WeakSet[type] = weakref.WeakSet()  # classes that were made here, without contents


def _bare_class(make: Callable[..., type], place: int, *args: Any) -> type:
    """The class that has the id ``args[place]``; this process has it, or *make* makes it."""
    known = args[place] in cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
    kind = make(*args)
    if not known:
        _incomplete.add(kind)
    return kind


def _complete_class(complete: Callable[[type, Any], type], kind: type, state: Any) -> type:
    if kind in _incomplete:
        complete(kind, state)
        _incomplete.discard(kind)
    return kind


def by_themselves(value: Any) -> Any:
    """*value*, which plain pickle takes then: an object of the user's for the program, which has its
    class."""
    return value if type(value) in kinds.SIMPLE else _ByItself(dumped(value, there=True))


class _ByItself:
    """A pickle, which becomes what was pickled when it is unpickled."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __reduce__(self) -> Any:
        return loads, (self._data,)


def loads(data: bytes) -> Any:
    """What ``dumped`` has made of a value that comes back."""
    return Loader(data).load() if b"_class_setstate" in data else pickle.loads(data)


class Reader(_Finder):
    """Reads one stream on a worker."""

    def persistent_load(self, pid: Any) -> Any:
        return self._objects[pid] if isinstance(pid, int) else self._space(*pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_make_skeleton_class"):
            return functools.partial(_without_hooks, found)
        return found

    def placed(self, places: Iterable[int]) -> list[Any]:
        """The objects at these *places* of the memo."""
        memo = self.memo.copy()
        return [memo[place] for place in places]


_travelled: weakref.WeakSet[type] = weakref.WeakSet()
_OF_METACLASSES = ("__new__", "__init__", "__call__", "__prepare__")


def _without_hooks(make: Callable[..., type], meta: type, name: str, bases: Any, *rest: Any) -> type:
    """The class that *make* makes, of which classes that have travelled, too, learn nothing: what their
    ``__init_subclass__``, or a metaclass, has done with it travels by itself."""
    resolved = types.resolve_bases(bases)  # of generic ones, and of named tuples
    parents = dict.fromkeys(chain.from_iterable(base.__mro__ for base in resolved))
    hooks = [(parent, "__init_subclass__") for parent in parents]
    hooks += [(each, name) for each in meta.__mro__ for name in _OF_METACLASSES]
    held = [
        (owner, hook, vars(owner)[hook])
        for owner, hook in hooks
        if owner in _travelled and hook in vars(owner)
    ]
    for owner, hook, _ in held:
        type.__delattr__(owner, hook)
    try:
        made = make(meta, name, bases, *rest)
    finally:
        for owner, hook, value in held:
            type.__setattr__(owner, hook, value)
    _travelled.add(made)
    return made


def _read_only(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    array.flags.writeable = False
    return array


def complete(obj: Any, contents: Contents) -> None:
    """Have an object hold these contents."""
    kinds.INSTANCE.change(obj, contents, ())


def _put_context(variable: ContextVar[Any], contents: Contents) -> None:
    kinds.CONTEXT.change(variable, contents, ())


def as_it_is(module: ModuleType) -> ModuleType:
    """A module for which another one was pickled."""
    return module


def with_cache(fn: Any) -> Any:
    """What to reduce a function to that keeps its results: to one that has none yet."""
    return _cached, (fn.__wrapped__, fn.cache_parameters())


def with_file(code: CodeType) -> Any:
    """What to reduce code to: from cloudpickle 3.1.3 on it would come without its file."""
    return _code, (code.co_filename, *cloudpickle.Pickler.dispatch_table[CodeType](code))


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


def _complete_enum(cls: Any, given: Any) -> None:
    state, put, members = given
    put(cls, state)
    for name, attributes in members:
        vars(cls[name]).update(attributes)


def _cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(fn)


def without_lock(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce a ``cached_property`` to, which has a lock before Python 3.12; else None."""
    if isinstance(obj, functools.cached_property):
        return _cached_property, (obj.func, obj.attrname)
    return None


def with_values(obj: Any) -> tuple[Any, ...] | None:
    """What to reduce a variable of contexts, or a ``threading.local``, to; else None."""
    if type(obj) is ContextVar:
        return ContextVar, (obj.name,), kinds.CONTEXT.look(obj), None, None, _put_context
    if type(obj) is threading.local:
        return threading.local, (), kinds.INSTANCE.look(obj), None, None, complete
    return None


def _cached_property(fn: Callable[..., Any], name: str | None) -> Any:
    made: Any = functools.cached_property(fn)
    if name is not None:
        made.__set_name__(None, name)
    return made


def found_in(module: str, name: str) -> Any:
    """What a module, which is imported for that, calls *name*."""
    return getattr(importlib.import_module(module), name)
