"""From a function to all objects that it reaches: what it closes over, its globals, what these hold.

function ─▶ globals, cells, defaults ─▶ dicts, lists, instances, modules … ─▶ arrays
"""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import resolve_name
from itertools import chain
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

from ...errors import InvalidType, InvalidValue, warn
from ...memory.departures import call_with_last
from ...packing.code import Uses, is_own, uses
from ...packing.imported import Part, taken_over
from ...packing.kinds import (
    ARRAY,
    ATTRIBUTES,
    CLASS,
    CROWD,
    DICT,
    FIXED,
    FUNCTION,
    GENERATOR,
    INSTANCE,
    NAME,
    OPAQUE,
    SEQUENCE,
    TENSOR,
    WHOLE,
    Contents,
    Kind,
    Name,
    alike,
    are_alike_in_kind,
    goes_by_number,
    holds_only_plain,
    inside,
    inside_of_opaque,
    is_crowd,
    is_data,
    is_for_program,
    is_named,
    is_scalar,
    kind_of,
    look_through,
)
from ...packing.pickles import OUT_OF_BAND, NumberOf, Space, Writer
from .remembered import Remembered, in_cycles

_HEAVY = (ARRAY, TENSOR, OPAQUE, CROWD)  # what takes long to look at

_MANY = 1000  # entries of a container that is worth a look whether they are plain

_LONG_PATH = 300  # characters of a path, which errors show


_RECENT = 100
"""So many containers that functions name, or close over, are kept when no function uses them."""

_HEAVIEST = 1 << 26
"""If they hold arrays of no more bytes."""

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


class Known:
    """An object that the workers have.

    Attributes:
        number: its number.
        obj: the object.
        kind: its kind.
        path: what it is called in errors: a name, and the way from there.
        contents: what the workers took over of it last; None if nobody knows.
        inner: the objects in each entry, which live on the workers as long as this.
        space: of a function the space of its globals, which lives as long, too.
        copied: whether a submitted call has brought a copy of what it was then.
        kept: what remembers this as long as the program has the object; None for a name.
    """

    __slots__ = (
        *("__weakref__", "_kept_of", "contents", "copied", "inner", "kept", "kind", "number", "obj"),
        *("path", "space"),
    )

    def __init__(
        self,
        number: int,
        obj: Any,
        kind: Kind,
        path: str,
        space: Space | None,
        kept: Remembered | None = None,
        kept_of: Callable[[Any], Remembered | None] = lambda obj: None,
    ) -> None:
        """*kept_of* finds what is remembered of an object in it."""
        self.number = number
        self.space = space
        self.obj = obj
        self.kind = kind
        self.path = path
        self.contents: Contents | None = None
        self.copied = False
        self.inner: dict[Any, list[Known]] = {}
        self.kept = kept
        self._kept_of = kept_of

    def _remember(self, contents: Contents | None) -> None:
        self.contents = contents
        if self.kept is not None:
            self.kept.remember(contents, self._kept_of)

    def assign(self, entries: Contents) -> None:
        """The workers have these entries now, and the others as they were."""
        self._remember({**(self.contents or {}), **entries})

    def was_copied(self, now: bool) -> bool:
        """Whether a submitted call has ever brought a copy, which it does *now*, or not."""
        self.copied |= now
        return self.copied

    def doubt(self) -> None:
        """Some workers may have been changed."""
        self._remember(None)

    def agree(self, contents: Contents, inner: dict[Any, list[Known]]) -> None:
        """The workers have *contents* now; *inner* are the objects in entries that were looked at."""
        self._remember(contents)
        both = {**self.inner, **inner}
        self.inner = {
            k: held
            for k, held in both.items()
            if k in contents or self.kind is OPAQUE or type(k) is object
        }


Look = list[tuple[Known, Contents, Any]]
"""What objects hold, or held at some moment; of arrays with a copy of the elements, or None."""


class Found:
    """An object that a walk has found.

    Attributes:
        obj, kind, path: as in ``Known``.
        known: what the workers have of it, or None.
        contents: what it holds now.
        inner: the ids of the objects in each entry that was looked at.
        values: of an array that may change before it is sent, a copy of its elements.
    """

    __slots__ = ("contents", "inner", "kind", "known", "obj", "path", "values")

    def __init__(self, obj: Any, kind: Kind, path: str, known: Known | None) -> None:
        self.obj = obj
        self.kind = kind
        self.path = path
        self.known = known
        self.contents: Contents = {}
        self.inner: dict[Any, list[int]] = {}
        self.values: Any = None

    def forget(self) -> None:
        """The workers are to get another one in its place."""
        self.known = None

    def look(self, contents: Contents | None = None, values: Any = None) -> None:
        """See what it holds, or take *contents* for it, and *values* for an array's elements."""
        self.values = values
        self.contents = self.kind.look(self.obj) if contents is None else contents


class NumbersById:
    """The numbers of the objects that the workers have, by id; each goes with the ``Known`` that has it.

    A C function notes the end of that, so that Ctrl-C cannot prevent it; the next look acts upon it.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._ended: dict[tuple[int, int], Any] = {}  # the keys are entries that are to go

    def add(self, known: Known) -> None:
        """The workers have it."""
        if self._ended:
            self._tidy()  # the same number may have ended before
        entry = id(known.obj), known.number
        call_with_last(known, self._ended.__setitem__, entry)
        self._numbers[entry[0]] = entry[1]

    def drop(self, ident: int) -> None:
        """Have none for the object with this id."""
        self._numbers.pop(ident, None)

    def get(self, ident: int, /) -> int | None:
        """That of the object with this id; None if the workers do not have it."""
        if self._ended:
            self._tidy()
        return self._numbers.get(ident)

    def __contains__(self, ident: object) -> bool:
        if self._ended:
            self._tidy()
        return ident in self._numbers

    def _tidy(self) -> None:
        for entry in list(self._ended):
            ident, number = entry
            if self._numbers.get(ident) == number:  # and not of another object, in the same place
                del self._numbers[ident]
            del self._ended[entry]


Parts = dict[int, tuple[Any, Part]]
"""Objects that cannot be pickled, and that workers make by an import: by id, each beside what it is."""


class Registry:
    """The objects that the workers have, and the modules whose names they know.

    Attributes:
        parts: what the workers make by an import.
    """

    def __init__(self, number: Any, watch: Any, parts: Parts | None = None) -> None:
        """*number* gives numbers; *watch* tells the workers of an owner's end."""
        self._number = number
        self._watch = watch
        self._known: weakref.WeakValueDictionary[int, Known] = weakref.WeakValueDictionary()
        self._spaces: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
        self._names: weakref.WeakValueDictionary[tuple[int, str], Name] = weakref.WeakValueDictionary()
        self._kept: dict[int, Remembered] = {}  # by the id of an object that the program has
        self._containers: weakref.WeakValueDictionary[int, Remembered] = weakref.WeakValueDictionary()
        self._recent: dict[Remembered, None] = {}  # of containers that functions name
        self.numbers = NumbersById()
        self.parts = {} if parts is None else parts
        # classes and functions by number: results may refer to them when no function uses them any more
        self.named: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def writer(
        self, numbers: NumberOf, compiled: Callable[[Any], Any], least: int = OUT_OF_BAND
    ) -> Writer:
        """What writes a stream, in which the objects that have *numbers* are these."""
        return Writer(numbers, self.space, self.current, compiled, least, self.parts)

    def holders(self, known: Known) -> list[Known]:
        """The objects that hold *known*, as far as the workers have them."""
        every = list(self._known.values())
        return [one for one in every if any(known in inner for inner in one.inner.values())]

    def known(self, obj: Any) -> Known | None:
        """What the workers have of *obj*; None if they do not have it."""
        found = self._known.get(id(obj))
        if found is not None and found.obj is obj:
            return found
        kept = self._kept_of(obj)
        if kept is None or not kept.is_of(obj) or not self._has_class_of(obj, kept.kind):
            return None
        known = Known(kept.number, obj, kept.kind, kept.path, kept.space, kept, self._kept_of)
        now = kept.kind.look(obj)
        contents = kept.contents(now, self._kept_of, self._has)
        known.assign(contents)
        self.keep(known)
        for key, value in contents.items():
            if key not in now or now[key] is not value:  # it held that before, and may be asked for it
                held = map(self.known, _objects_in(value))
                known.inner[key] = [each for each in held if each is not None]
        return known

    def _kept_of(self, obj: Any) -> Remembered | None:
        return self._kept.get(id(obj)) or self._containers.get(id(obj))

    def _has(self, value: Any) -> bool:
        """Whether the workers have the objects that a value is, or is made of."""
        if kind_of(value) is None:
            return all(self._has(part) for _, part in inside(value) or ())
        found, kept = self._known.get(id(value)), self._kept_of(value)
        return (found is not None and found.obj is value) or (kept is not None and kept.is_of(value))

    def _has_class_of(self, obj: Any, kind: Kind) -> bool:
        """Whether the workers have the class of *obj*, if it travels: else they would get another."""
        return kind in (CLASS, FUNCTION) or self._has(type(obj))

    def add(self, found: Found) -> Known:
        """What stands for *found*, which the workers are to have: until nothing here holds it, or, if
        that is longer, until the program does not."""
        obj, kind, number = found.obj, found.kind, self._number()
        space = self.space(obj.__globals__) if kind is FUNCTION else None
        if kind is NAME or (space is not None and not space.lasts):
            known = Known(number, obj, kind, found.path, space)
            self._watch(known, number)
            return known
        kept = Remembered(number, obj, kind, found.path, space)
        self._watch(kept, number)
        if kept.is_weak:
            self._kept[id(obj)] = kept
            call_with_last(obj, self._kept.pop, id(obj))
        else:
            self._containers[id(obj)] = kept
        return Known(number, obj, kind, found.path, space, kept, self._kept_of)

    def settle(self, knowns: Sequence[Known]) -> None:
        """After a delivery of *knowns*: hold the containers among them that do not lead to what holds
        them; of those that functions name or close over the last ones."""
        containers = [known for known in knowns if known.kept is not None and not known.kept.is_weak]
        circular = in_cycles(containers)
        for known in containers:
            assert known.kept is not None
            known.kept.hold(None if known in circular else known.obj)
        for known in knowns:
            named = known.kind in (NAME, FUNCTION)
            for inner in chain.from_iterable(known.inner.values()) if named else ():
                if inner.kept is not None and not inner.kept.is_weak and _bytes_in(inner) <= _HEAVIEST:
                    self._recent.pop(inner.kept, None)
                    self._recent[inner.kept] = None
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def keep(self, known: Known) -> None:
        """The workers have it."""
        if self._known.get(id(known.obj)) is not known:  # in this order, as Ctrl-C may come in between
            self._known[id(known.obj)] = known
            self.numbers.add(known)
            if goes_by_number(known.obj):
                self.named[known.number] = known.obj

    def forget(self, obj: Any) -> None:
        """Have *obj* sent anew when it comes again."""
        self._known.pop(id(obj), None)
        self._kept.pop(id(obj), None)
        self._containers.pop(id(obj), None)
        self.numbers.drop(id(obj))

    def get(self, ident: int) -> int | None:
        """The number of what the workers have, by its id, where it is no value as an argument: of a
        class, a function, what is the only one of its kind; None for all else."""
        known = self._known.get(ident)
        if known is None and (kept := self._kept.get(ident)) is not None and is_named(kept.obj):
            known = self.known(kept.obj)  # as no function names it, nobody has seen whether it changed
            if known is None or known.contents != known.kind.look(known.obj):
                return None
        if known is None or not (known.kind is FIXED or goes_by_number(known.obj)):
            return None
        return known.number

    def space(self, names: dict[str, Any]) -> Space:
        """The space of these names: of a module's ``vars``, or of a function's globals."""
        space = self._spaces.get(id(names))
        if space is None or space.names is not names:
            space = self._spaces[id(names)] = Space(self._number(), names)
            self._watch(space, space.number)
        return space

    def name(self, names: dict[str, Any], name: str) -> Name:
        """The object that stands for one name."""
        space = self.space(names)
        found = self._names.get((space.number, name))
        if found is None:
            found = self._names[space.number, name] = Name(names, name, space)
        return found

    def current(self, space: Space, name: str, value: Any) -> bool:
        """Whether the workers have *value* under this name."""
        found = self._names.get((space.number, name))
        known = None if found is None else self.known(found)
        contents: Contents = (known.contents if known else None) or {}
        return WHOLE in contents and contents[WHOLE] is value


def _objects_in(value: Any) -> Iterator[Any]:
    """The objects of their own that a value is, or is made of."""
    if kind_of(value) is not None:
        yield value
        return
    for _, part in inside(value) or ():
        yield from _objects_in(part)


def _bytes_in(known: Known) -> int:
    """The bytes of arrays that a container holds."""
    arrays = (each for each in chain.from_iterable(known.inner.values()) if each.kind in (ARRAY, TENSOR))
    return sum(int(each.obj.nbytes) for each in arrays)


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
        """The same walk once more."""
        walk = Walk(self._registry, self._most)
        for step in self._steps:
            step(walk)
        return walk

    def visit(self, root: Any, path: str) -> list[int]:
        """Look at *root* and all that it holds; returns the ids of the outermost objects."""
        self._steps.append(lambda walk: walk.visit(root, path))
        outermost: list[int] = []
        if kind_of(root) not in (None, FUNCTION):  # an object that is called
            path += ".__self__"
        self._walk([(root, path, outermost, True)], light=False)
        return outermost

    def revisit(self, seen: Look, wanted: set[Known]) -> None:
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
            again.append((found, changed))
        for found, changed in again:
            if found.kind is FUNCTION:
                self._walk(self._globals(found), light=False)
            self._walk(self._entries(found, changed), light=False)
        for found, changed in again:
            if found.kind not in (FUNCTION, NAME):
                rest = {key: value for key, value in found.contents.items() if key not in changed}
                self._walk(self._entries(found, rest), light=True)

    def _walk(self, first: Iterable[Any], light: bool) -> None:
        queue = deque(first)  # what is near comes first, and gets the shorter path
        while queue:
            obj, path, above, direct = queue.popleft()
            kind = self._kind(obj)
            if kind is None:
                parts = inside(obj)
                queue += [(part, path + way, above, direct) for way, part in parts or ()]
                continue
            above.append(id(obj))
            if id(obj) in self.found:
                continue
            found = self.found[id(obj)] = self._found(obj, kind, path)
            kind = found.kind
            if kind is GENERATOR:
                _check_generator(found, direct)
            elif is_data(obj):
                name = path if path.isidentifier() else "x"
                raise InvalidType(
                    f"{path!r}, which a function brings along, is a Data: give it to the function as an "
                    f"argument, in a map by common={{{name!r}: {name}}}. An object can hold a copy, "
                    f"{name}[:].copy()."
                )
            before = found.known.contents if found.known else None
            if before is not None and kind in _HEAVY and (light or self._is_heavy(obj, kind, before)):
                found.look(before)
                continue
            if kind is CROWD:
                queue += self._members(found)
                continue
            found.look(*self._seen.get(id(obj), ()))
            if kind is FUNCTION:
                queue += self._globals(found, strict=direct)
            elif kind is FIXED:
                queue.append((_plain_function(obj), path, found.inner.setdefault(_WRAPPED, []), False))
            queue += self._entries(found, self._to_visit(found, direct))
            for cls in obj.__bases__ if kind is CLASS else (type(obj),):
                if cls in _BUILTIN:
                    continue
                queue.append((cls, cls.__name__, found.inner.setdefault(_TYPE, []), False))

    def _to_visit(self, found: Found, direct: bool) -> Contents:
        """The contents of *found* that go to the workers."""
        if id(found.obj) in self._registry.parts:
            taken = taken_over(found.obj)
            return {} if taken is None else taken[1]
        if found.kind is FUNCTION and not direct:
            return {key: value for key, value in found.contents.items() if not is_for_program(value)}
        return found.contents

    def _kind(self, obj: Any) -> Kind | None:
        cls = type(obj)
        kind = self._kinds.get(cls)
        if kind is None:
            kind = kind_of(obj)
            if kind is INSTANCE and are_alike_in_kind(cls):
                self._kinds[cls] = kind
        return kind

    def _found(self, obj: Any, kind: Kind, path: str) -> Found:
        """What is found; a container that the workers have stays the crowd that it is, or is not."""
        known = self._registry.known(obj)
        if kind is DICT or kind is SEQUENCE:
            kind = known.kind if known else CROWD if is_crowd(obj) else kind
        return Found(obj, kind, path, known)

    def _members(self, found: Found) -> Iterator[Any]:
        """See what a crowd holds; the objects of their own among it, to be visited."""
        contents, parts = look_through(found.obj, self._registry.numbers)
        found.look(contents)
        inner = found.inner.setdefault(_MEMBERS, [])
        return ((part, getattr(part, "__name__", found.path), inner, False) for part in parts)

    def _is_heavy(self, obj: Any, kind: Kind, before: Contents) -> bool:
        """Whether *obj*, an array or opaque, takes too long to look at."""
        if self._most is None:
            return False
        return bool((before[WHOLE].nbytes if kind in (OPAQUE, CROWD) else obj.nbytes) > self._most)

    def _entries(self, found: Found, contents: Contents) -> Iterator[Any]:
        """The *contents* of *found*, to be visited."""
        named = found.kind in (NAME, FUNCTION)
        held = contents.get(WHOLE, ()) if found.kind is SEQUENCE else contents
        if len(held) > _MANY and holds_only_plain(held):
            return
        if found.kind is CROWD:
            yield from self._members(found)
            return
        attributes = found.kind is not DICT
        if found.kind is OPAQUE:
            contents = inside_of_opaque(found.obj)
        elif found.kind is DICT:  # objects may be keys
            keys = tuple(
                key
                for key in contents
                if key is not ATTRIBUTES
                and (kind_of(key) is not None or isinstance(key, tuple | frozenset))
            )
            yield keys, found.path, found.inner.setdefault(_KEYS, []), False
        for key, value in contents.items():
            above = found.inner.setdefault(key, [])
            if is_scalar(value):
                continue
            if isinstance(key, int) and found.kind is FUNCTION:
                path = found.obj.__code__.co_freevars[key]
            elif named or key in (WHOLE, ATTRIBUTES) or len(found.path) > _LONG_PATH:
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
        if self._registry.space(fn.__globals__).installed:
            return
        used = uses(fn.__code__)
        if used.rebinds is not None and strict:
            raise InvalidValue(
                f"the function {fn.__qualname__!r}, which is to run on the workers, assigns to "
                f"{used.rebinds!r}, a name outside of it (global or nonlocal). The program would not "
                f"see it: return it. What each rank is to keep between calls of a function() is a "
                f"variable, {used.rebinds} = synk.shared(…): assign to {used.rebinds}.value."
            )
        found.inner[GLOBALS] = []
        for name in used.names:
            if name in fn.__globals__ and (strict or not is_for_program(fn.__globals__[name])):
                yield from self._name(fn.__globals__, name, found, used)
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # nothing was assigned yet
                if isinstance(cell.cell_contents, ModuleType):
                    yield from self._module_names(cell.cell_contents, found, used)
        package = fn.__globals__.get("__package__") or ""
        for imported in used.imports:
            with contextlib.suppress(ImportError):  # beyond the outermost package
                module = sys.modules.get(resolve_name(imported, package))
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
        for name in sorted(used.attributes & names.keys()):
            if own or _is_module_in(module, name, names[name]):
                yield from self._name(names, name, found, used)


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
