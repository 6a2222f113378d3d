"""A task of an executor, on its worker: a function with its arguments, which travel by value."""

from __future__ import annotations

import functools
import io
import os
import pickle
from collections.abc import Callable, Sequence
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any, NamedTuple

import numpy as np

from ..memory.mapping import map_file
from ..memory.segment import array_in
from ..plan.call import Access, Region
from ..values.foreign import handed
from . import settings


class Prepared:
    """What the initializer of an executor has used on this worker: tasks find it as that has left it.

    Attributes:
        names: the globals that it has set, or that hold what can change, by the name of their module.
        classes: those of the program's.
    """

    def __init__(self) -> None:
        self.names: dict[str, dict[str, Any]] = {}
        self.classes: list[type] = []

    def call(self, initializer: PickledValue) -> None:
        """Call the initializer.  Raises: what it raises."""
        fn, args = initializer.copy()
        before = {module: dict(names) for module, names in self.names.items()}
        with settings.initializing():
            fn(*args)
        for module, names in self.names.items():
            had = before[module]
            self.names[module] = {
                name: value
                for name, value in names.items()
                if name not in had or value is not had[name] or not isinstance(value, _FIXED)
            }


_FIXED = (
    *(FunctionType, BuiltinFunctionType, ModuleType, type, type(None)),
    *(int, float, complex, str, bytes, tuple, frozenset),
)  # kinds of globals that do not change by themselves


_prepared: dict[str, Prepared] = {}  # by the key of the executor
_prepares: Prepared | None = None  # for the initializer that is called now


class Wrapped(Exception):
    """Carries an exception that is no ``Exception``, such as KeyboardInterrupt, out of a task."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(error)
        self.error = error


class NotPrepared(Exception):
    """The initializer has failed."""


class PickledValue:
    """A pickled value, such as a task: it is made on the worker, anew for each that has it.

    Attributes:
        holds: what is to live as long as this; it does not travel.
    """

    __slots__ = ("_buffers", "_stream", "holds")

    def __init__(self, stream: Any, buffers: Sequence[Any], holds: Sequence[Any] = ()) -> None:
        self._stream, self._buffers, self.holds = stream, buffers, holds

    def __reduce__(self) -> Any:
        apart = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return PickledValue, (pickle.PickleBuffer(self._stream), apart)

    @property
    def is_alone(self) -> bool:
        """Whether the value is a stream and nothing else."""
        return not self._buffers and not self.holds

    def load(self, key: str = "") -> Any:
        """What was pickled, for the only one that has it; for the executor with this *key*."""
        return _loaded(self._stream, self._buffers, key)

    def copy(self, key: str = "") -> Any:
        """What was pickled, for one of several."""
        return _loaded(self._stream, [bytearray(buffer) for buffer in self._buffers], key)


def _loaded(stream: Any, buffers: Sequence[Any], key: str) -> Any:
    if _prepares is None and key not in _prepared:
        return pickle.loads(stream, buffers=buffers)
    return _TaskLoader(io.BytesIO(stream), buffers=buffers).load()


def function_of(stream: bytes, key: str) -> Any:
    """The function that was pickled by itself, for the executor with this *key*."""
    return _loaded(stream, (), key)


class Runner:
    """The function of an executor's items, each of which is a function with its arguments."""

    def __init__(self, key: str, initializer: PickledValue | None) -> None:
        """*initializer* is a function with its arguments: each worker calls it once."""
        self._key = key
        self._initializer = initializer
        self._begins: Callable[[Any], object] = _nobody

    def __call__(self, task: PickledValue | tuple[Any, ...]) -> tuple[Any]:
        """The result of a task, in a tuple: what is none is an exception."""
        if self._initializer is not None and self._key not in _prepared:
            self._prepare(self._initializer)
        return (_done(task, self._key, self._begins),)

    def tell_by(self, begins: Callable[[Any], object]) -> None:
        """Tell of each function that begins."""
        self._begins = begins

    def _prepare(self, initializer: PickledValue) -> None:
        global _prepares  # noqa: PLW0603  only one thread has tasks
        _prepares = used = Prepared()
        try:
            used.call(initializer)
        except BaseException as error:
            raise NotPrepared(f"{type(error).__name__}: {error}") from error
        finally:
            _prepares = None
        _prepared[self._key] = used


def settled(fn: FunctionType, state: tuple[str, Callable[[Any, Any], Any], Any]) -> None:
    """Complete a function of the program's that has come here, by *state*: the key of its executor, and
    how to complete it, by what.  It uses the globals as the initializer has left them."""
    key, complete, parts = state
    complete(fn, parts)
    module = fn.__globals__.get("__name__", "")
    if _prepares is not None:
        _prepares.names[module] = fn.__globals__
    elif key in _prepared and (names := _prepared[key].names.get(module)):
        fn.__globals__.update(names)
        _taken.append((fn.__globals__, names, dict(names)))


_taken: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = []
"""The globals of functions of the task that runs, the names there that the initializer has set, as they
are now, and as the task got them."""


def _keep_assigned() -> None:
    """Keep what the task has assigned to names that the initializer had set."""
    for has, names, before in _taken:
        names |= {name: has[name] for name, value in before.items() if has.get(name, value) is not value}
    _taken.clear()


class _TaskLoader(pickle.Unpickler):
    """Loads what the initializer uses, and notes its classes; or a task, without a change of these."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        if (module, name) == ("cloudpickle.cloudpickle", "_class_setstate"):
            return functools.partial(_class_completed, found)
        return found


def _class_completed(complete: Callable[[type, Any], type], kind: type, state: Any) -> type:
    if _prepares is not None:
        _prepares.classes.append(kind)
    elif any(kind is known for each in _prepared.values() for known in each.classes):
        return kind
    return complete(kind, state)


_changes = 0  # of the settings that tasks bring


def _nobody(fn: Any) -> None:
    """Nothing is done when a function begins."""


def _done(task: PickledValue | tuple[Any, ...], key: str, begins: Callable[[Any], object]) -> Any:
    """What a task returns: it is pickled, or beside its arguments is the pickle of its function."""
    global _changes  # noqa: PLW0603  only one thread has tasks
    try:
        fn, args, kwargs, *changed = task if isinstance(task, tuple) else task.load(key)
        number, found = changed or (0, None)
        if number != _changes:
            _changes = number
            settings.take_back() if found is None else settings.apply(pickle.loads(found))
        if isinstance(fn, bytes):
            fn = function_of(fn, key)
        begins(fn)
        return fn(*args, **kwargs)
    except Exception:
        raise
    except BaseException as error:
        raise Wrapped(error) from error
    finally:
        _keep_assigned()


def chunk(
    fn: PickledValue | Callable[..., Any], items: list[tuple[Any, ...]], key: str = ""
) -> list[Any]:
    """The results of a function for several items, in the executor with this *key*."""
    function = fn.copy(key) if isinstance(fn, PickledValue) else fn
    return [function(*args) for args in items]


class LentArray(NamedTuple):
    """Where an array lies: in a file that another process has open; the inode shows that it is still
    that."""

    process: int
    fd: int
    inode: tuple[int, int]
    nbytes: int
    region: Region
    access: Access


def opened(place: LentArray, library: str | None) -> Any:
    """The array that lies at *place*, as one of *library*.  Raises: RuntimeError if it is gone."""
    fd = _open(place.process, place.fd, place.inode, "the memory of an argument")
    try:
        memory = map_file(fd, place.nbytes, place.access)
    finally:
        os.close(fd)
    return handed(array_in(memory, place.region), library)


def mapped(
    place: tuple[int, int, tuple[int, int]], dtype: Any, mode: Any, offset: int, shape: Any, order: Any
) -> Any:
    """The memory-mapped array of a file that another process has open, as that says.

    Raises: RuntimeError if it is gone.
    """
    fd = _open(*place, "the file of a memory-mapped argument")
    try:
        return np.memmap(f"/proc/self/fd/{fd}", dtype, mode, offset, shape, order)
    finally:
        os.close(fd)


def proxy(key: bytes, rebuild: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The proxy of an object in a server process of ``multiprocessing``, which lets in who has the
    *key*."""
    from multiprocessing import current_process  # noqa: PLC0415  it takes a while

    current_process().authkey = key
    return rebuild(*args)


def _open(process: int, number: int, inode: tuple[int, int], called: str) -> int:
    try:
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(f"{called} cannot be opened ({error}).") from None
    found = os.fstat(fd)
    if (found.st_dev, found.st_ino) != inode:
        os.close(fd)
        raise RuntimeError(f"{called} is gone.")
    return fd
