"""Digests of functions, with all that they use, and of values: the same in each run of a program.

Pickles will not do: in those of sets all follows the order of hashes, those of functions tell where in a
file they stand, and what is defined in ``__main__`` goes by its name, whatever it is.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from importlib.util import find_spec, resolve_name
from itertools import chain
from pathlib import Path
from types import CellType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import numpy as np

from ..errors import too_deep
from ..values.variable import Variable
from .code import Uses, is_installed, is_own, uses
from .kinds import is_sent_by_value

_SIZE = 16  # bytes of a digest
_MOST = 1 << 20  # objects that are pickled without a memo
_MANY = 1000  # classes and functions whose digests are kept
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
    uses, and of the arguments that its calls have in *common*.

    Raises: InvalidValue for what is nested too deeply.
    """
    parts: dict[str, Any] = {f"common={{{name!r}: …}}": value for name, value in common.items()}
    parts["the version of Python"] = sys.version_info[:2]
    given = []
    while isinstance(fn, functools.partial):
        given += [fn.args, fn.keywords, vars(fn)]
        fn = fn.func
    parts["the arguments of its partial"] = given
    if isinstance(fn, MethodType):
        parts["the object of the method"] = fn.__self__
        fn = fn.__func__
    plain = _plain(fn)
    if isinstance(plain, FunctionType) and is_sent_by_value(plain):
        parts["its code"] = plain.__code__, plain.__defaults__, plain.__kwdefaults__
        parts["its attributes"] = _attributes(plain)
        parts |= _used(plain)
    else:
        parts["what it is"] = fn
    try:
        return {name: _Fingerprints().of_any(value).hex() for name, value in parts.items()}
    except RecursionError:
        raise too_deep("what the function uses") from None


def _plain(obj: Any) -> Any:
    """The function of one that is compiled or cached; all else as it is."""
    if isinstance(obj, _CACHED):
        return obj.__wrapped__
    if isinstance(obj, FunctionType):
        return obj
    return getattr(obj, "py_func", getattr(getattr(obj, "_dispatcher", None), "py_func", obj))


def _used(fn: FunctionType) -> dict[str, Any]:
    """What a function uses, by name: what it closes over, globals, names of the user's modules."""
    used, found = uses(fn.__code__), dict[str, Any]()
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        if name == "__classdict__":  # what annotations of a class see: all of it, also where it stands
            continue
        with contextlib.suppress(ValueError):  # nothing was assigned yet
            found |= _named(name, cell.cell_contents, used)
    for name in sorted(used.names & fn.__globals__.keys()):
        found |= _named(name, fn.__globals__[name], used)
    for name in used.imports:
        with contextlib.suppress(Exception):  # of an import that fails, and is to fail where it runs
            found |= _source(resolve_name(name, fn.__globals__.get("__package__") or ""))
    return found


def _named(name: str, value: Any, used: Uses) -> dict[str, Any]:
    """What code uses by a name: a value, or what is in a module of the user's."""
    if not isinstance(value, ModuleType) or not is_own(value):
        return {name: value}
    found: dict[str, Any] = {}
    there = vars(value)
    for each in sorted(used.attributes & there.keys()):
        inner = there[each]
        is_part = isinstance(inner, ModuleType) and inner.__name__ == f"{value.__name__}.{each}"
        found |= _named(f"{name}.{each}", inner, used) if is_part else {f"{name}.{each}": inner}
    return found


def _source(name: str) -> dict[str, Any]:
    """What the file of a module of the user's has, which code imports when it runs."""
    outermost = find_spec(name.partition(".")[0])  # a package's parts would be imported to be found
    if outermost is None or (outermost.origin is not None and is_installed(outermost.origin)):
        return {}
    spec = find_spec(name)
    if spec is None or spec.origin is None or is_installed(spec.origin):
        return {}
    return {f"the module {name}": Path(spec.origin).read_bytes()}


def _attributes(fn: FunctionType) -> dict[str, Any]:
    return {name: value for name, value in vars(fn).items() if name != "__wrapped__"}


class _Fingerprints:
    """Digests of what belongs together: what comes again is said to be that."""

    def __init__(self, named: dict[int, tuple[bytes, Any]] | None = None) -> None:
        """Take the digests of classes and functions from *named*, by id, if that is given."""
        self._named = named
        self._seen: dict[int, tuple[int, Any]] = {}  # by id: in which order they came

    def of(self, value: Any) -> bytes:
        """The digest of a value.  Raises: what pickle raises."""
        before = len(self._seen)
        for fast in (True, False):  # without a memo equal objects are as one; what holds itself needs it
            digest, buffers = blake2b(digest_size=_SIZE), list[pickle.PickleBuffer]()
            try:
                _Pickler(self, digest, buffers, fast).dump(value)
                break
            except ValueError:
                if not fast:
                    raise
                self._forget(before)
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
        except RecursionError:
            raise
        except Exception:
            self._forget(before)
            return _digest(b"object", _name(type(value)), *map(self.of_any, _inside(value)))

    def of_named(self, obj: Any, way: Callable[[_Fingerprints, Any], bytes]) -> bytes:
        """The digest of a class or a function, which *way* makes."""
        if self._named is None:
            return self.known(obj) or way(self, obj)
        if id(obj) not in self._named:
            if len(self._named) > _MANY:
                self._named.clear()
            self._named[id(obj)] = _Fingerprints().of(obj), obj
        return self._named[id(obj)][0]

    def known(self, value: Any) -> bytes | None:
        """The digest of what was seen before, or None; from now on it was seen."""
        if id(value) in self._seen:
            return _digest(b"seen", b"%d" % self._seen[id(value)][0])
        self._seen[id(value)] = len(self._seen), value
        return None

    def apart(self, value: Any) -> bytes:
        """The digest of a value, which does not count as seen."""
        before = len(self._seen)
        try:
            return self.of(value)
        finally:
            self._forget(before)

    def _forget(self, count: int) -> None:
        """Have only the first *count* be seen: what came later is in no digest."""
        while len(self._seen) > count:
            self._seen.popitem()

    def of_function(self, fn: FunctionType) -> bytes:
        """The digest of a function: of the user's by what it does, of others by its name."""
        if not is_sent_by_value(fn):
            return _digest(b"named", _name(fn))
        parts = [fn.__qualname__.encode()]
        parts.append(self.of_any((fn.__code__, fn.__defaults__, fn.__kwdefaults__, _attributes(fn))))
        for name, value in _used(fn).items():
            parts += name.encode(), self.of_any(value)
        return _digest(b"function", *parts)

    def of_class(self, cls: type) -> bytes:
        """The digest of a class: of the user's by what it has, of others by its name."""
        if not is_sent_by_value(cls):
            return _digest(b"named", _name(cls))
        parts = [_name(cls), *map(self.of_any, (type(cls), *cls.__bases__))]
        for name, value in sorted(vars(cls).items()):
            if name in _UNSAID:
                continue
            held = getattr(value, "__func__", value)
            code = getattr(held, "__code__", None)
            if code is not None and code.co_filename.startswith("<attrs generated"):
                continue  # it has the hash of a string, and its fields tell the same
            if isinstance(value, property):
                held = value.fget, value.fset, value.fdel
            parts += name.encode(), self.of_any(held)
        return _digest(b"class", *parts)


class _Pickler(pickle.Pickler):
    """Pickles a value; what pickle takes by its name, or its order, by a digest."""

    def __init__(self, prints: _Fingerprints, digest: Any, buffers: list[Any], fast: bool) -> None:
        """*fast* is pickle's word for: without a memo."""
        super().__init__(_Writing(digest), 5, buffer_callback=buffers.append)
        self.fast = fast
        self._prints = prints
        self._count = 0

    def persistent_id(self, obj: Any) -> bytes | None:
        """The digest that stands for *obj*; None for what is pickled.

        Raises: ValueError where the same things come again and again, and there is no memo.
        """
        self._count += 1
        if self.fast and self._count > _MOST:
            raise ValueError("so much is pickled with a memo")
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


def _inside(value: Any) -> Iterator[Any]:
    """The parts of what cannot be pickled as a whole."""
    if isinstance(value, Mapping):
        yield from chain.from_iterable(value.items())
    elif isinstance(value, list | tuple | deque):
        yield from value
    elif isinstance(value, memoryview):
        yield value.tobytes()
    if not is_sent_by_value(type(value)):  # what packages keep for themselves is deep
        return
    held = getattr(value, "__dict__", {})
    for name in sorted(name for name in held if isinstance(name, str)):
        yield name
        yield held[name]
    for cls in type(value).__mro__:
        members = (name for name, held in vars(cls).items() if isinstance(held, MemberDescriptorType))
        yield from (getattr(value, name, None) for name in sorted(members))  # of __slots__


def _of_set(prints: _Fingerprints, values: Any) -> bytes:
    return _digest(_name(type(values)), *sorted(map(prints.apart, values)))


def _of_array(prints: _Fingerprints, array: Any) -> bytes:
    if array.dtype.hasobject:
        return _digest(b"array", prints.of((array.shape, array.tolist())))
    rows = np.ascontiguousarray(array)
    return _digest(
        b"array", repr((array.dtype.descr, array.shape)).encode(), rows.reshape(-1).view("u1")
    )


def _of_module(_: _Fingerprints, module: ModuleType) -> bytes:
    with contextlib.suppress(ImportError, ValueError):  # it was made by hand
        return _digest(b"module", module.__name__.encode(), *_source(module.__name__).values())
    return _digest(b"module", module.__name__.encode())


def _of_data(prints: _Fingerprints, data: Any) -> bytes:
    return _of_array(prints, np.asarray(data))


def _of_variable(_: _Fingerprints, variable: Variable) -> bytes:
    return _digest(b"variable", str(variable.name).encode())


def _of_compiled(prints: _Fingerprints, compiled: Any) -> bytes:
    plain = _plain(compiled)
    if plain is compiled:
        raise TypeError(f"{type(compiled).__name__} has no function of Python's")
    return _digest(b"function", prints.of_any(plain))


def _of_tensor(prints: _Fingerprints, tensor: Any) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(sys.modules["torch"].uint8)
    return _digest(b"tensor", f"{tensor.dtype} {tuple(tensor.shape)}".encode(), flat.numpy())


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
    ModuleType: _of_module,
    set: _of_set,
    frozenset: _of_set,
}


@functools.cache
def _way(kind: type) -> Callable[[_Fingerprints, Any], bytes] | None:
    """How to digest the objects of a *kind* that are not pickled."""
    homes = {cls.__module__.partition(".")[0] for cls in kind.__mro__}
    way = _NAMED.get(kind)
    if issubclass(kind, type):
        way = _Fingerprints.of_class
    elif issubclass(kind, set | frozenset):
        way = _of_set
    elif issubclass(kind, np.ndarray) and kind.__module__.partition(".")[0] == "numpy":
        way = _of_array
    elif "torch" in homes and any(cls.__name__ == "Tensor" for cls in kind.__mro__):
        way = _of_tensor
    elif kind is _CACHED or "numba" in homes:
        way = _of_compiled
    elif getattr(kind, "ONLY_HERE", False) is True:  # it is Data
        way = _of_data
    elif issubclass(kind, Variable):
        way = _of_variable
    return way


def _digest(*parts: Any) -> bytes:
    digest = blake2b(digest_size=_SIZE)
    for part in parts:
        digest.update(b"%d," % len(part))
        digest.update(part)
    return digest.digest()


def _name(obj: Any) -> bytes:
    return f"{obj.__module__}.{obj.__qualname__}".encode()
