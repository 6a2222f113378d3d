"""Digests of functions, with all that they use, and of values: the same in each run of a program.

Pickles will not do: in those of sets all follows the order of hashes, those of functions tell where in a
file they stand, and what is defined in ``__main__`` goes by its name, whatever it is.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Mapping
from hashlib import blake2b
from importlib.util import resolve_name
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np

from ..values.variable import Variable
from .code import Uses, is_own, uses
from .kinds import is_sent_by_value

_SIZE = 16  # bytes of a digest
_CACHED = type(functools.lru_cache(lambda: None))
_UNSAID = {"__dict__", "__weakref__", "__module__", "__doc__", "__abstractmethods__", "_abc_impl"}
_UNSAID |= {"__firstlineno__", "__static_attributes__", "__annotations_cache__"}
"""Attributes of classes that say nothing, or where they were written."""


def values() -> Callable[[Any], bytes]:
    """What gives the digests of values, and raises what pickle raises; it looks at each class and each
    function once."""
    named: dict[int, tuple[bytes, Any]] = {}
    return lambda value: _Fingerprints(named).of(value)


def of_function(fn: Callable[..., Any], common: Mapping[str, Any]) -> dict[str, str]:
    """The digests of a function's parts, by what an error calls them: of its code, of each thing that it
    uses, and of the arguments that its calls have in *common*."""
    parts: dict[str, Any] = {f"common={{{name!r}: …}}": value for name, value in common.items()}
    parts["the version of Python"] = sys.version_info[:2]
    while isinstance(fn, functools.partial):
        parts["the arguments of its partial"] = fn.args, fn.keywords
        fn = fn.func
    if isinstance(fn, MethodType):
        parts["the object whose method it is"] = fn.__self__
        fn = fn.__func__
    plain = _plain(fn)
    if isinstance(plain, FunctionType) and is_sent_by_value(plain):
        parts["its code"] = plain.__code__, plain.__defaults__, plain.__kwdefaults__
        parts |= _used(plain)
    else:
        parts["what it is"] = fn
    return {name: _Fingerprints().of_any(value).hex() for name, value in parts.items()}


def _plain(obj: Any) -> Any:
    """The function of one that is compiled or cached; all else as it is."""
    if isinstance(obj, _CACHED):
        return obj.__wrapped__
    return obj if isinstance(obj, FunctionType) else getattr(obj, "py_func", obj)


def _used(fn: FunctionType) -> dict[str, Any]:
    """What a function uses, by name: what it closes over, globals, names of the user's modules."""
    used, found = uses(fn.__code__), dict[str, Any]()
    found |= zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    for name in sorted(used.names):
        value = fn.__globals__.get(name, _Fingerprints)
        if value is _Fingerprints:  # of builtins
            continue
        if not isinstance(value, ModuleType) or not is_own(value):
            found[name] = value
            continue
        found |= _names_in(value, name, used)
    for name in used.imports:
        with contextlib.suppress(ImportError):  # beyond the outermost package
            module = sys.modules.get(resolve_name(name, fn.__globals__.get("__package__") or ""))
            if module is not None and is_own(module):
                found |= _names_in(module, name, used)
    return found


def _names_in(module: ModuleType, called: str, used: Uses) -> dict[str, Any]:
    """What code uses of a module of the user's."""
    there = vars(module)
    return {f"{called}.{name}": there[name] for name in sorted(used.attributes & there.keys())}


class _Fingerprints:
    """Digests of what belongs together: what comes again is said to be that."""

    def __init__(self, named: dict[int, tuple[bytes, Any]] | None = None) -> None:
        """Take the digests of classes and functions from *named*, by id, if that is given."""
        self._named = named
        self._seen: dict[int, tuple[int, Any]] = {}  # by id: in which order they came

    def of(self, value: Any) -> bytes:
        """The digest of a value.  Raises: what pickle raises."""
        digest = blake2b(digest_size=_SIZE)
        buffers: list[pickle.PickleBuffer] = []
        _Pickler(self, digest, buffers).dump(value)
        for buffer in buffers:
            with buffer.raw() as raw:
                digest.update(b"%d," % raw.nbytes)
                digest.update(raw)
        return digest.digest()

    def of_any(self, value: Any) -> bytes:
        """The digest of a value; of one that cannot be pickled that of its type and its attributes."""
        known = None if type(value) in _NAMED or isinstance(value, type) else self.known(value)
        if known is not None:
            return known
        before = len(self._seen)
        try:
            return self.of(value)
        except Exception:
            while len(self._seen) > before:  # what was seen is in no digest
                self._seen.popitem()
            held = getattr(value, "__dict__", {})
            names = sorted(name for name in held if isinstance(name, str))
            parts = [part for name in names for part in (name.encode(), self.of_any(held[name]))]
            return _digest(b"object", _name(type(value)), *parts)

    def of_named(self, obj: Any, way: Callable[[_Fingerprints, Any], bytes]) -> bytes:
        """The digest of a class or a function, which *way* makes."""
        if self._named is None:
            return self.known(obj) or way(self, obj)
        if id(obj) not in self._named:
            self._named[id(obj)] = _Fingerprints().of(obj), obj
        return self._named[id(obj)][0]

    def known(self, value: Any) -> bytes | None:
        """The digest of what was seen before, or None; from now on it was seen."""
        if id(value) in self._seen:
            return _digest(b"seen", b"%d" % self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value
        return None

    def of_function(self, fn: FunctionType) -> bytes:
        """The digest of a function: of the user's by what it does, of others by its name."""
        if not is_sent_by_value(fn):
            return _digest(b"named", _name(fn))
        parts = [fn.__qualname__.encode()]
        parts.append(self.of_any((fn.__code__, fn.__defaults__, fn.__kwdefaults__)))
        for name, value in _used(fn).items():
            parts += name.encode(), self.of_any(value)
        return _digest(b"function", *parts)

    def of_class(self, cls: type) -> bytes:
        """The digest of a class: of the user's by what it has, of others by its name."""
        if not is_sent_by_value(cls):
            return _digest(b"named", _name(cls))
        parts = [_name(cls), *map(self.of_any, cls.__bases__)]
        for name, value in sorted(vars(cls).items()):
            if name in _UNSAID:
                continue
            held = getattr(value, "__func__", value)
            if isinstance(value, property):
                held = value.fget, value.fset, value.fdel
            parts += name.encode(), self.of_any(held)
        return _digest(b"class", *parts)


class _Pickler(pickle.Pickler):
    """Pickles a value; what pickle takes by its name, or its order, by a digest."""

    def __init__(self, prints: _Fingerprints, digest: Any, buffers: list[pickle.PickleBuffer]) -> None:
        super().__init__(_Writing(digest), 5, buffer_callback=buffers.append)
        self._prints = prints

    def persistent_id(self, obj: Any) -> bytes | None:
        """The digest that stands for *obj*; None for what is pickled."""
        cls: Any = type(obj)
        way = _way(cls)
        if way is None:
            return None
        if isinstance(obj, FunctionType | type):
            return self._prints.of_named(obj, way)
        return way(self._prints, obj)


class _Writing:
    """A file whose bytes go into a digest."""

    def __init__(self, digest: Any) -> None:
        self.write = digest.update


def _of_set(prints: _Fingerprints, values: Any) -> bytes:
    return _digest(_name(type(values)), *sorted(map(prints.of, values)))


def _of_code(prints: _Fingerprints, code: CodeType) -> bytes:
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_consts
    counts = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags
    return _digest(b"code", code.co_code, prints.of((names, counts)))


def _of_cell(prints: _Fingerprints, cell: CellType) -> bytes:
    try:
        return _digest(b"cell", prints.of_any(cell.cell_contents))
    except ValueError:  # nothing was assigned yet
        return b"empty cell"


_NAMED: dict[type, Callable[[_Fingerprints, Any], bytes]] = {
    FunctionType: _Fingerprints.of_function,
    CodeType: _of_code,
    CellType: _of_cell,
    ModuleType: lambda _, module: _digest(b"module", module.__name__.encode()),
    set: _of_set,
    frozenset: _of_set,
}


@functools.cache
def _way(kind: type) -> Callable[[_Fingerprints, Any], bytes] | None:
    """How to digest the objects of a *kind* that are not pickled."""
    if kind in _NAMED:
        return _NAMED[kind]
    if issubclass(kind, type):
        return _Fingerprints.of_class
    if kind is _CACHED or hasattr(kind, "py_func"):
        return lambda prints, obj: _digest(b"function", prints.of_any(_plain(obj)))
    if getattr(kind, "ONLY_HERE", False) is True:  # it is Data
        return lambda prints, data: _digest(b"data", prints.of(np.asarray(data)))
    if issubclass(kind, Variable):
        return lambda _, variable: _digest(b"variable", str(variable.name).encode())
    return None


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=_SIZE)
    for part in parts:
        digest.update(b"%d," % len(part))
        digest.update(part)
    return digest.digest()


def _name(obj: Any) -> bytes:
    return f"{obj.__module__}.{obj.__qualname__}".encode()
