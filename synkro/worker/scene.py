"""What a function that has failed needs, to run once more in the main program: as this rank has it.

::

    a call, or a task, begins      Draws.note      the states of the generators that it may draw from
    it fails                       Began           goes to the main program with the failure
    the user wants to see it       SceneWriter     function, arguments, globals, objects: copies
                                   Scene           is run there
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from ..devices.cpu import CpuDevice
from ..errors import reason, shown
from ..packing import pickles
from ..packing.code import functions_of, is_own, uses
from ..packing.imported import OwnModule
from ..packing.kinds import global_generators, is_sent_by_value, singleton
from ..packing.refused import Absent, refuse_open_file
from ..packing.scene import OF_WORKER, Began, Result
from ..values.arrays import Array
from ..values.cache import Cache
from ..values.foreign import in_host_memory, is_tensor
from ..values.random import Reader, reader_of
from .replica import Elsewhere, Replica

_GENERATORS = 16  # of functions' own, of which the states are noted


class Draws:
    """The random generators that functions may draw from, and how they were when a run began."""

    def __init__(
        self, owned: Callable[[], Mapping[int, Any]], classes: Callable[[], Iterable[type]]
    ) -> None:
        """*owned* returns the generators of functions' own, by number, and *classes* the user's."""
        self._owned = owned
        self._classes = classes
        self._asks: Cache[Any, bool] = Cache()  # by function: whether it draws from rng()
        self._readers: list[tuple[Any, Reader]] = []
        self._imported = -1  # how many modules there were when these were listed
        self._read: list[Any] = []
        self._rng: Any = None

    def forget(self) -> None:
        """Functions may use something else from now on."""
        self._asks.clear()
        self._imported = -1

    def note(self, fn: Any, rng: Callable[[], np.random.Generator] | None = None) -> None:
        """A function begins; *rng* gives the generator of its rank, if that may be drawn from."""
        key = getattr(fn, "__code__", fn)  # each task of an executor has a function of its own
        try:
            asks = self._asks.get(key)
        except TypeError:  # it cannot be hashed
            key, asks = type(fn), None
        if asks is None:
            asks = self._asks[key] = self._begin_with(fn)
        if len(sys.modules) != self._imported:
            self._list()
        self._read = [read() for _, (read, _) in self._readers]
        self._rng = rng().bit_generator.state if asks and rng is not None else None

    def note_again(self) -> bool:
        """A run begins that draws from the same generators; returns whether there are some."""
        self._read = [read() for _, (read, _) in self._readers]
        return bool(self._read)

    def _begin_with(self, fn: Any) -> bool:
        """Have the generators there that a function names; returns whether it draws from ``rng()``."""
        names = set[str]()
        methods = (method for cls in self._classes() for method in vars(cls).values())
        with contextlib.suppress(Exception):  # what a function reaches may be of any kind
            for each in (*functions_of(fn), *methods):
                plain = getattr(each, "fget", None) or getattr(each, "__func__", each)
                if isinstance(plain, FunctionType):
                    used = uses(plain.__code__)
                    names |= {*used.attributes, *used.names}
        if "random" in names:
            importlib.import_module("random")
            importlib.import_module("numpy.random")
        return "rng" in names

    def _list(self) -> None:
        generators = [*global_generators(), *[*self._owned().values()][:_GENERATORS]]
        known = {id(each): reader for each, reader in self._readers}
        self._readers = [(each, known.get(id(each)) or reader_of(each)) for each in generators]
        self._imported = len(sys.modules)

    def began(self, piece: int, task: tuple[int, int, int] | None, results: tuple[Result, ...]) -> Began:
        """How the run has begun that was noted last."""
        numbers = {id(each): number for number, each in self._owned().items()}
        read = zip(self._readers, self._read, strict=False)
        states = [(each, singleton(each), made(found)) for (each, (_, made)), found in read]
        singles = {place: state for _, place, state in states if place is not None}
        owned = {numbers[id(each)]: state for each, _, state in states if id(each) in numbers}
        return Began(piece, task, self._rng, singles, owned, results)


def imported_by(fn: Any) -> dict[str, ModuleType]:
    """The modules of the user's own that a function, and those that it uses, import while they run."""
    names = {name for plain in functions_of(fn) for name in uses(plain.__code__).imports}
    found = {name: sys.modules.get(name) for name in names}
    return {name: module for name, module in found.items() if module is not None and is_own(module)}


class SceneWriter(pickles.Stream):
    """Pickles a scene: what the program's modules and classes have become here goes with it.

    A lock is a new one.  Whatever uses what else cannot be copied is told.
    """

    def __init__(self) -> None:
        super().__init__(sys.maxsize)
        self._modules: dict[int, ModuleType] = {}  # in the place of names, by the id of their dict
        self._kept: list[Any] = []  # whose ids are used

    def reducer_override(self, obj: Any) -> Any:  # noqa: PLR0911
        cls = type(obj)
        if cls is FunctionType and is_sent_by_value(obj):
            has = obj.__globals__
            used = {name: has[name] for name in uses(obj.__code__).names if name in has}
            return pickles.made_function(obj, self._module(has), used)
        if isinstance(obj, type):
            return self._class(obj)
        if isinstance(obj, CodeType):
            return pickles.with_file(obj)
        if isinstance(obj, ModuleType):
            return self._of_module(obj)
        if isinstance(obj, FunctionType | BuiltinFunctionType):
            return super().reducer_override(obj)
        try:
            return self._reduced(obj)
        except Exception as error:  # it cannot be copied: a lock, say
            what = f"{shown(obj)} is on the worker, and cannot be copied: {reason(error)}."
            return Absent, (what,)

    def _reduced(self, obj: Any) -> Any:  # noqa: PLR0911
        if isinstance(obj, Replica):
            value: Any = obj.value
            host = in_host_memory(value)
            return _variable, (obj.name, np.array(value if host is None else host))
        if isinstance(obj, Elsewhere):
            return object.__reduce_ex__(obj, 2)
        if (host := in_host_memory(obj)) is not None:
            return host.__reduce_ex__(5)
        if isinstance(obj, functools._lru_cache_wrapper):
            return pickles.with_cache(obj)
        refuse_open_file(obj)
        given = (
            pickles.with_attributes(obj)
            or pickles.without_lock(obj)
            or pickles.for_program(obj)
            or pickles.with_values(obj)
        )
        if given is not None:
            return given
        if (place := singleton(obj)) is not None:
            return pickles.found_in, place
        if type(obj) in _LOCKS:
            return _LOCKS[type(obj)], ()
        reduce = self.dispatch_table.get(type(obj))
        reduced = obj.__reduce_ex__(5) if reduce is None else reduce(obj)
        if is_tensor(obj) and obj.is_leaf and obj.grad is not None:  # which PyTorch leaves out
            return *reduced[:2], obj.grad, None, None, _with_gradient
        return reduced

    def _module(self, names: dict[str, Any]) -> ModuleType:
        """The module that has these names, or what stands for one."""
        module = self._modules.get(id(names))
        if module is None:
            module = self._modules[id(names)] = ModuleType(str(names.get("__name__", "__main__")))
            module.__dict__[_STANDS] = True
            self._kept.append(names)
        return module

    def _of_module(self, module: ModuleType) -> Any:
        if _STANDS in vars(module):
            return WorkerNames, (module.__name__,)
        if isinstance(module, OwnModule) or (is_own(module) and module.__name__ != "__main__"):
            held = {name: value for name, value in vars(module).items() if not name.startswith("__")}
            return pickles.as_it_is, (self._module(vars(module)),), held, None, None, _named
        return super().reducer_override(module)

    def _class(self, cls: type) -> Any:
        if not is_sent_by_value(cls):
            return super().reducer_override(cls)
        module = sys.modules.get(cls.__module__)
        return pickles.another_class(cls, pickles.reduced_class(super().reducer_override, cls, module))


_LOCKS: dict[type, Callable[[], Any]] = {type(new()): new for new in (threading.Lock, threading.RLock)}
_STANDS = "__stands_for_names__"


# ── in the main program ──────────────────────────────────────────────────────────────────────────────


def _variable(name: str | None, array: Array) -> Replica:
    memory: Any = SimpleNamespace(empty=np.empty)  # what makes the arrays of variables
    return Replica(name, array, CpuDevice(), memory)


class WorkerNames(ModuleType):
    """The names of a module, as a worker had them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        vars(self).update({"__builtins__": builtins, OF_WORKER: True})


def _with_gradient(tensor: Any, gradient: Any) -> None:
    tensor.grad = gradient


def _named(module: ModuleType, names: dict[str, Any]) -> None:
    vars(module).update(names)
