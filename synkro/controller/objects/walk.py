"""From a function to all objects that it reaches: what it closes over, its globals, what these hold.

function ─▶ globals, cells, defaults ─▶ dicts, lists, instances, modules … ─▶ arrays
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec, resolve_name
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from ...errors import InvalidType, InvalidValue, warn
from ...packing import kinds
from ...packing.code import Uses, is_own, uses
from ...packing.imported import kept_of_part
from ...packing.kinds import WHOLE, Contents, Kind, alike, inside, is_for_program, is_scalar, kind_of
from .known import Known, Snapshot
from .registry import Registry

_HEAVY = (kinds.ARRAY, kinds.TENSOR, kinds.OPAQUE, kinds.CROWD)  # what takes long to look at

_LARGE = 1 << 24  # bytes of an array of which a sample is kept

_SAMPLED = 4096  # elements of that

_MANY = 1000  # entries of a container that is worth a look whether they are plain

_LONG_PATH = 300  # characters of a path, which errors show


GLOBALS = object()
"""Among the entries of a function, all globals that its code names."""

_TYPE = object()
"""Among the entries of an object, its class; of a class, its bases."""

_BUILTIN = {dict, list, set, object, np.ndarray}  # types that hold nothing of the program's

_WRAPPED = object()
"""Among the entries of a compiled or cached function, the plain one."""

_MEMBERS = object()
"""Among the entries of a crowd, the objects of their own in it."""

_KEYS = object()
"""Among the entries of a dict, its keys."""


@dataclass(slots=True, eq=False)
class Found:
    """An object that a walk has found.

    Attributes:
        obj, kind, path: as in ``Known``.
        known: what the workers have of it, or None.
        contents: what it holds now.
        inner: the ids of the objects in each entry that was looked at.
        values: of an array that may change before it is sent, a copy of its elements.
        sample: as in ``Known``.
    """

    obj: Any
    kind: Kind
    path: str
    known: Known | None
    contents: Contents = field(default_factory=dict)
    inner: dict[Any, list[int]] = field(default_factory=dict)
    values: Any = None
    sample: bytes | None = None

    def forget(self) -> None:
        """The workers are to get another object in the place of this one."""
        self.known = None

    def look(self, contents: Contents | None = None, values: Any = None) -> None:
        """See what the object holds, or take *contents* for it, and *values* for an array's elements."""
        self.values = values
        self.contents = self.kind.look(self.obj) if contents is None else contents
        if contents is None and self.kind is kinds.ARRAY and self.obj.nbytes > _LARGE:
            self.sample = _sample_of(self.obj)


def _sample_of(array: Any) -> bytes | None:
    """Elements of a large array, the first among them, evenly spread; None if its rows lie apart."""
    if not array.flags.c_contiguous:
        return None
    return np.ascontiguousarray(array.reshape(-1)[:: max(1, array.size // _SAMPLED)]).tobytes()


def _plain_function(obj: Any) -> Any:
    """The plain function of one that is compiled or cached, or None."""
    for name in ("__wrapped__", "py_func"):
        with contextlib.suppress(Exception):
            return getattr(obj, name)
    return None


class Walk:
    """A walk over objects.

    Attributes:
        found: what it has found, by id.
    """

    def __init__(self, registry: Registry, most: int | None = None) -> None:
        """Arrays of more bytes than *most*, which the workers have, are taken to be as they were."""
        self.found: dict[int, Found] = {}
        self._most = most
        self._registry = registry
        self._modules: set[tuple[int, Uses]] = set()
        self._seen: dict[int, tuple[Contents, Any]] = {}  # by id
        self._kinds: dict[type, Kind] = {}  # of the instances of classes, which takes long to find
        self._steps: list[Callable[[Walk], Any]] = []  # how to do it once more

    def again(self) -> Walk:
        """A new walk, with the steps of this one."""
        walk = Walk(self._registry, self._most)
        for step in self._steps:
            step(walk)
        return walk

    def visit(self, root: Any, path: str) -> list[int]:
        """Look at *root* and all that it holds; returns the ids of the outermost objects."""
        self._steps.append(lambda walk: walk.visit(root, path))
        outermost: list[int] = []
        if kind_of(root) not in (None, kinds.CLASS, kinds.FUNCTION):  # an object that is called
            path += ".__self__"
        self._walk([(root, path, outermost, True)], light=False)
        return outermost

    def visit_function(self, function: Any) -> list[int]:
        """Look at all that a *function* holds; returns the ids of the outermost objects."""
        spec = function.spec
        return self.visit(spec.fn, function.name) + self.visit(spec.finish, function.name)

    def revisit(self, seen: Snapshot, wanted: set[Known]) -> None:
        """Look again at what the workers have, at those *wanted*: *seen* is what the objects hold, or
        held when a call was submitted.

        Arrays in entries that are as they were are taken to be as they were, if nothing else holds them.
        """
        self._steps.append(lambda walk: walk.revisit(seen, wanted))
        self._seen = {id(known.obj): (contents, values) for known, contents, values in seen}
        again = []
        for known, contents, values in seen:
            if known not in wanted:
                continue
            found = self.found[id(known.obj)] = Found(known.obj, known.kind, known.path, known)
            found.look(contents, values)
            before = known.contents or {}
            changed = {k: v for k, v in contents.items() if k not in before or not alike(before[k], v)}
            if id(known.obj) in self._registry.parts:
                changed = kept_of_part(known.kind, changed)
            again.append((found, changed))
        for found, changed in again:
            if found.kind is kinds.FUNCTION:
                self._walk(self._globals(found), light=False)
            self._walk(self._entries(found, changed), light=False)
        for found, changed in again:
            if found.kind not in (kinds.FUNCTION, kinds.NAME):
                rest = {k: v for k, v in self._to_visit(found, False).items() if k not in changed}
                self._walk(self._entries(found, rest), light=True)

    def _walk(self, first: Iterable[Any], light: bool) -> None:
        queue = deque(first)  # what is near comes first, and gets the shorter path
        while queue:
            obj, path, above, direct = queue.popleft()
            kind = self._kind(obj)
            if kind is None:
                queue += [(part, path + way, above, direct) for way, part in inside(obj) or ()]
                continue
            above.append(id(obj))
            if id(obj) in self.found:
                continue
            found = self.found[id(obj)] = self._found(obj, kind, path)
            kind = found.kind
            if kind is kinds.GENERATOR:
                _check_generator(found, direct)
            elif kinds.is_data(obj):
                name = path if path.isidentifier() else "x"
                raise InvalidType(
                    f"{path!r}, which a function brings along, is a Data: give it to the function as an "
                    f"argument, in a map by common={{{name!r}: {name}}}. An object can hold a copy, "
                    f"{name}[:].copy()."
                )
            before = found.known.contents if found.known else None
            if before is not None and kind in _HEAVY and (light or self._is_heavy(found, before)):
                found.look(before)
                continue
            if kind is kinds.CROWD:
                queue += self._members(found)
                continue
            found.look(*self._seen.get(id(obj), ()))
            if kind is kinds.FUNCTION:
                queue += self._globals(found, strict=direct)
            elif kind is kinds.FIXED:
                queue.append((_plain_function(obj), path, found.inner.setdefault(_WRAPPED, []), False))
            queue += self._entries(found, self._to_visit(found, direct))
            for cls in obj.__bases__ if kind is kinds.CLASS else (type(obj),):
                if cls in _BUILTIN:
                    continue
                queue.append((cls, cls.__name__, found.inner.setdefault(_TYPE, []), False))

    def _to_visit(self, found: Found, direct: bool) -> Contents:
        """The contents of *found* that go to the workers."""
        if id(found.obj) in self._registry.parts:
            known = found.kind in (kinds.CLASS, kinds.INSTANCE)
            return kept_of_part(found.kind, found.contents) if known else {}
        if found.kind is kinds.FUNCTION and not direct:
            return {key: value for key, value in found.contents.items() if not is_for_program(value)}
        return found.contents

    def _kind(self, obj: Any) -> Kind | None:
        cls = type(obj)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = kind_of(obj)
            if kind is kinds.INSTANCE and kinds.are_alike_in_kind(cls):
                self._kinds[cls] = kind
        return kind

    def _found(self, obj: Any, kind: Kind, path: str) -> Found:
        """What is found; a container that the workers have stays the crowd that it is, or is not."""
        known = self._registry.known(obj)
        if kind is kinds.DICT or kind is kinds.SEQUENCE:
            kind = known.kind if known else kinds.CROWD if kinds.is_crowd(obj) else kind
        return Found(obj, kind, path, known)

    def _members(self, found: Found) -> Iterator[Any]:
        """See what a crowd holds; the objects of their own among it, to be visited."""
        contents, parts = kinds.look_through(found.obj, self._registry.by_id)
        found.look(contents)
        inner = found.inner.setdefault(_MEMBERS, [])
        return ((part, getattr(part, "__name__", found.path), inner, False) for part in parts)

    def _is_heavy(self, found: Found, before: Contents) -> bool:
        """Whether *found*, an array or opaque, takes too long to look at, and has not changed to be
        seen."""
        if self._most is None:
            return False
        whole = found.kind in (kinds.OPAQUE, kinds.CROWD)
        if (before[WHOLE].nbytes if whole else found.obj.nbytes) <= self._most:
            return False
        sample = None if found.known is None else found.known.sample
        return sample is None or sample == _sample_of(found.obj)

    def _entries(self, found: Found, contents: Contents) -> Iterator[Any]:
        """The *contents* of *found*, to be visited."""
        named = found.kind in (kinds.NAME, kinds.FUNCTION)
        held = contents.get(WHOLE, ()) if found.kind is kinds.SEQUENCE else contents
        if len(held) > _MANY and kinds.holds_only_plain(held):
            return
        if found.kind is kinds.CROWD:
            yield from self._members(found)
            return
        attributes = found.kind is not kinds.DICT
        if found.kind is kinds.OPAQUE:
            contents = kinds.inside_of_opaque(found.obj)
        elif found.kind is kinds.DICT:  # objects may be keys
            keys = tuple(
                key
                for key in contents
                if key is not kinds.ATTRIBUTES
                and (kind_of(key) is not None or isinstance(key, tuple | frozenset))
            )
            yield keys, found.path, found.inner.setdefault(_KEYS, []), False
        for key, value in contents.items():
            above = found.inner.setdefault(key, [])
            if is_scalar(value):
                continue
            if isinstance(key, int) and found.kind is kinds.FUNCTION:
                path = found.obj.__code__.co_freevars[key]
            elif named or key in (WHOLE, kinds.ATTRIBUTES) or len(found.path) > _LONG_PATH:
                path = found.path
            else:
                path = found.path + (f".{key}" if attributes else f"[{key!r}]")
            yield value, path, above, named

    def _globals(self, found: Found, strict: bool = True) -> Iterator[Any]:
        """The globals that a function names, and the user's modules that it imports.

        Of what is not *strict*, a method of a class, say, which may be for the program only, it leaves
        out what cannot be used on a worker.
        """
        fn: FunctionType = found.obj
        space = self._registry.space(fn.__globals__)
        if space.installed:
            return
        used = uses(fn.__code__)
        others = [name for name in used.assigns if name not in space.assigned]
        name = others[-1] if others else used.rebinds
        if name is not None and strict:
            raise InvalidValue(
                f"the function {fn.__qualname__!r}, which is to run on the workers, assigns to "
                f"{name!r}, a name outside of it (global or nonlocal). The program would not see it: "
                f"return it. What each rank is to keep between calls of a function() is a variable, "
                f"{name} = synk.shared(…): assign to {name}.value. In a map let a function with "
                f"functools.lru_cache make it, once on each worker; or let fork(initializer=…) assign "
                f"it, so that each worker has its own."
            )
        found.inner[GLOBALS] = []
        for name in used.names:
            if name in space.assigned:
                continue
            if name in fn.__globals__ and (strict or not is_for_program(fn.__globals__[name])):
                yield from self._name(fn.__globals__, name, found, used)
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                if isinstance(cell.cell_contents, ModuleType):
                    yield from self._module_names(cell.cell_contents, found, used)
        package = fn.__globals__.get("__package__") or ""
        for imported in used.imports:
            with contextlib.suppress(ImportError):  # beyond the outermost package
                module = _imported(resolve_name(imported, package), strict)
                if module is not None and is_own(module):
                    yield from self._module_names(module, found, used)

    def _name(self, names: dict[str, Any], name: str, found: Found, used: Uses) -> Iterator[Any]:
        yield self._registry.name(names, name), name, found.inner[GLOBALS], True
        value = names[name]
        if isinstance(value, ModuleType):
            yield from self._module_names(value, found, used)

    def _module_names(self, module: ModuleType, found: Found, used: Uses) -> Iterator[Any]:
        """The names of *module* that code names, too: all of the user's own, and of an installed package
        its modules, which the program may have imported one by one."""
        if (id(module), used) in self._modules:  # modules name each other
            return
        self._modules.add((id(module), used))
        names, own = vars(module), is_own(module)
        if not (own or "__path__" in names):
            return
        assigned = self._registry.space(names).assigned if own else ()
        for name in sorted(used.attributes & names.keys()):
            if name in assigned:
                continue
            if own or _is_module_in(module, name, names[name]):
                yield from self._name(names, name, found, used)


def _imported(name: str, needed: bool) -> Any:
    """The module of this name; one in a package of the user's, which code would import when it runs, is
    imported now, if it is *needed*."""
    module, (head, _, last) = sys.modules.get(name), name.rpartition(".")
    if module is not None or not needed or not head:
        return module
    package = _imported(head, needed)
    if not is_own(package):
        return None
    with contextlib.suppress(Exception):  # the function is to raise that, where it runs
        if last not in vars(package) and find_spec(name) is not None:
            return importlib.import_module(name)
    return None


def _is_module_in(package: ModuleType, name: str, value: Any) -> bool:
    """Whether *value* is the module *name* of a *package*."""
    return isinstance(value, ModuleType) and sys.modules.get(f"{package.__name__}.{name}") is value


def _check_generator(found: Found, direct: bool) -> None:
    if direct:
        what = f"{found.path!r}, which a function brings along,"
        raise InvalidType(refused_generator(what, found.obj))
    if found.known is None:
        warn(
            f"{found.path}, which a function brings along, is a random generator: each rank "
            f"has a copy of it, and all copies draw the same numbers. Draw from synk.rng() in the "
            f"function for numbers that differ by rank."
        )


def refused_generator(what: str, generator: Any) -> str:
    """Why a random *generator* cannot go to the workers, and what to do instead."""
    return (
        f"{what} is a random generator ({type(generator).__name__}), and would draw the same numbers on "
        f"every rank. Use synk.rng() inside the function, a generator of each rank's own; or, where all "
        f"ranks are to draw alike, pass a seed as an argument that all have in common (bcast_inputs=, "
        f"or common= of a map), and make the generator of it there, np.random.default_rng(seed)."
    )
