"""``Registry``: the objects that the workers have, by number, by id, and by name."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final

from ...memory.interrupts import WhileThere, call_with_last
from ...packing import kinds
from ...packing.code import functions_of, uses
from ...packing.imported import Part
from ...packing.kinds import Contents, Kind, Name, cached_names, goes_by_number, inside, kind_of
from ...packing.pickles import Space, ValueWriter, Writer, is_small
from .known import Known, Remembered, in_cycles

_RECENT = 100
"""So many containers that functions name, or close over, are kept when no function uses them."""

_HEAVIEST = 1 << 26
"""If they hold arrays of no more bytes."""


class KnownById:
    """What the workers have, by the id of the program's object: an entry goes with its ``Known``.

    A C function removes it, so that Ctrl-C cannot prevent that.
    """

    def __init__(self) -> None:
        self._known: dict[int, weakref.ref[Known]] = {}

    def add(self, known: Known) -> None:
        """The workers have *known*."""
        ident = id(known.obj)
        self._known[ident] = weakref.ref(known, functools.partial(self._known.pop, ident))

    def drop(self, ident: int) -> None:
        """Have nothing for the object with this id."""
        self._known.pop(ident, None)

    def known(self, ident: int) -> Known | None:
        """What the workers have of the object with this id."""
        found = self._known.get(ident)
        return None if found is None else found()

    def get(self, ident: int, /) -> int | None:
        """The number of the object with this id; None if the workers do not have it."""
        found = self._known.get(ident)
        known = None if found is None else found()
        return None if known is None else known.number

    def __iter__(self) -> Iterator[Known]:
        return filter(None, [found() for found in list(self._known.values())])


Parts = dict[int, tuple[Any, Part]]
"""Objects that cannot be pickled, and that workers make by an import: by id, each beside what it is."""


class Registry:
    """The objects that the workers have, and the modules whose names they know.

    Attributes:
        parts: what the workers make by an import.
        caching: what has cached properties, which are to go when the rest of it changes.
    """

    def __init__(self, number: Any, watch: Any, parts: Parts | None = None) -> None:
        """*number* gives numbers; *watch* tells the workers of an owner's end."""
        self._number = number
        self._watch = watch
        self._spaces: weakref.WeakValueDictionary[int, Space] = weakref.WeakValueDictionary()
        self._modules: list[Space] = []  # that are imported
        self._assigned: list[Space] = []  # with names that each worker has assigned
        self._names: weakref.WeakValueDictionary[tuple[int, str], Name] = weakref.WeakValueDictionary()
        self._kept: dict[int, Remembered] = {}  # by the id of an object that the program has
        self._containers: weakref.WeakValueDictionary[int, Remembered] = weakref.WeakValueDictionary()
        self._recent: dict[Remembered, None] = {}  # of containers that functions name
        self.by_id: Final = KnownById()
        self.parts: Final = {} if parts is None else parts
        self.caching: WhileThere[Known, None] = WhileThere()
        # classes and functions by number: results may refer to them when no function uses them any more
        self.named: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def writer(self, compiled: Callable[[Any], Any]) -> Writer:
        """What writes a stream, in which the objects that the workers have are these."""
        return Writer(self.by_id, self.space, self.current, compiled, self.parts)

    def value_writer(self, compiled: Callable[[Any], Any], least: int) -> ValueWriter:
        """What writes values, as values."""
        return ValueWriter(self, self.space, self.current, compiled, self.parts, least)

    def holders(self, known: Known) -> list[Known]:
        """The objects that hold *known*, as far as the workers have them."""
        return [one for one in self.by_id if any(known in inner for inner in one.inner.values())]

    def known(self, obj: Any) -> Known | None:
        """What the workers have of *obj*; None if they do not have it."""
        found = self.by_id.known(id(obj))
        if found is not None and found.obj is obj:
            return found
        kept = self._kept_of(obj)
        if kept is None or not kept.is_of(obj):
            return None
        if kept.kind not in (kinds.CLASS, kinds.FUNCTION) and not self._has(type(obj)):
            return None  # if its class travels, the workers would get another one
        known = Known(kept.number, obj, kept.kind, kept.path, kept.space, kept)
        now = kept.kind.look(obj)
        contents = kept.contents(now, self._has)
        known.assign(contents)
        self.keep(known)
        for key, value in contents.items():
            if key not in now or now[key] is not value:  # it held that before, and may be asked for it
                held = map(self.known, _objects_in(value))
                known.inner[key] = [each for each in held if each is not None]
        return known

    def all(self) -> list[Known]:
        """All objects that the workers have, and the program, too."""
        kept = [*self._kept.values(), *self._containers.values()]
        found = [self.known(each.obj) for each in kept if each.obj is not None]
        return [*dict.fromkeys(chain(self.by_id, filter(None, found)))]

    def _kept_of(self, obj: Any) -> Remembered | None:
        return self._kept.get(id(obj)) or self._containers.get(id(obj))

    def _has(self, value: Any) -> bool:
        """Whether the workers have the objects that a value is, or is made of."""
        if kind_of(value) is None:
            return all(self._has(part) for _, part in inside(value) or ())
        found, kept = self.by_id.known(id(value)), self._kept_of(value)
        return (found is not None and found.obj is value) or (kept is not None and kept.is_of(value))

    def add(self, obj: Any, kind: Kind, path: str) -> Known:
        """What stands for *obj*, which the workers are to have: until nothing here holds it, or, if that
        is longer, until the program does not."""
        number = self._number()
        space = self.space(obj.__globals__) if kind is kinds.FUNCTION else None
        if kind is kinds.NAME or (space is not None and not space.lasts):
            known = Known(number, obj, kind, path, space)
            self._watch(known, number)
            return known
        kept = Remembered(number, obj, kind, path, space, self._kept_of)
        self._watch(kept, number)
        if kept.is_weak:
            self._kept[id(obj)] = kept
            call_with_last(obj, self._kept.pop, id(obj))
        else:
            self._containers[id(obj)] = kept
        return Known(number, obj, kind, path, space, kept)

    def settle(self, knowns: Sequence[Known]) -> None:
        """After a delivery of *knowns*: hold the containers among them that do not lead to what holds
        them; of those that functions name or close over the last ones."""
        containers = [known for known in knowns if known.kept is not None and not known.kept.is_weak]
        circular = in_cycles(containers)
        for known in containers:
            assert known.kept is not None
            known.kept.hold(None if known in circular else known.obj)
        for known in knowns:
            named = known.kind in (kinds.NAME, kinds.FUNCTION)
            for inner in chain.from_iterable(known.inner.values()) if named else ():
                if inner.kept is not None and not inner.kept.is_weak and _bytes_in(inner) <= _HEAVIEST:
                    self._recent.pop(inner.kept, None)
                    self._recent[inner.kept] = None
        while len(self._recent) > _RECENT:
            del self._recent[next(iter(self._recent))]

    def keep(self, known: Known) -> None:
        """The workers have *known*."""
        if self.by_id.known(id(known.obj)) is not known:
            self.by_id.add(known)
            if goes_by_number(known.obj):
                self.named[known.number] = known.obj
            if known.kind in (kinds.INSTANCE, kinds.STATEFUL) and cached_names(type(known.obj)):
                self.caching[known] = None

    def forget(self, obj: Any) -> None:
        """Have *obj* sent anew when it comes again."""
        self._kept.pop(id(obj), None)
        self._containers.pop(id(obj), None)
        self.by_id.drop(id(obj))

    def forget_dropped(self) -> None:
        """Forget the containers that nothing but the registry holds any more."""
        while dropped := [kept for kept in self._recent if self._is_dropped(kept)]:
            for kept in dropped:
                del self._recent[kept]
                self._containers.pop(id(kept.obj), None)
            del kept  # and what it holds

    def _is_dropped(self, kept: Remembered) -> bool:
        return self.by_id.known(id(kept.obj)) is None and _holders(kept) == _holders(_ALONE)

    def get(self, ident: int) -> int | None:
        """The number of what the workers have, by its id, where it is no value as an argument: of a
        class, a function, what is the only one of its kind; None for all else."""
        known = self.by_id.known(ident)
        if known is None and (kept := self._kept.get(ident)) is not None and kinds.is_named(kept.obj):
            known = self.known(kept.obj)  # as no function names it, nobody has seen whether it changed
            if known is None or known.contents != known.kind.look(known.obj):
                return None
        if known is None or not (known.kind is kinds.FIXED or goes_by_number(known.obj)):
            return None
        return known.number

    def space(self, names: dict[str, Any]) -> Space:
        """The space of *names*: of a module's ``vars``, or of a function's globals."""
        space = self._spaces.get(id(names))
        if space is None or space.names is not names:
            space = self._spaces[id(names)] = Space(self._number(), names)
            self._watch(space, space.number)
            if space.lasts:  # values refer to the module, whether functions use its names or not
                self._modules.append(space)
        return space

    def leave_to_workers(self, fn: Any) -> list[tuple[int, str, Any]]:
        """What *fn* assigns, and the user's functions that it uses: each worker has its own.

        Returns what workers begin with: numbers of spaces, names, and their values, if these are small.
        """
        begins = []
        for plain in functions_of(fn, lambda plain: not self.space(plain.__globals__).installed):
            space = self.space(plain.__globals__)
            names = uses(plain.__code__).assigns
            space.assigned.update(names)
            self._assigned.append(space)
            held = [(name, space.names[name]) for name in names if name in space.names]
            begins += [(space.number, name, value) for name, value in held if is_small(value)]
        return begins

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
        return kinds.WHOLE in contents and contents[kinds.WHOLE] is value


def _objects_in(value: Any) -> Iterator[Any]:
    """The objects of their own that a value is, or is made of."""
    if kind_of(value) is not None:
        yield value
        return
    for _, part in inside(value) or ():
        yield from _objects_in(part)


def _holders(kept: Remembered) -> int:
    """A count of what holds a container, by which two of them compare."""
    return sys.getrefcount(kept.obj)


_ALONE = Remembered(0, [], kinds.SEQUENCE, "", None, lambda _: None)
_ALONE.hold([])


def _bytes_in(known: Known) -> int:
    """The bytes of arrays that a container holds."""
    held = chain.from_iterable(known.inner.values())
    return sum(int(each.obj.nbytes) for each in held if each.kind in (kinds.ARRAY, kinds.TENSOR))
