"""``Values``: arguments and items on their way to the workers, which are values there.

What they rely on, classes and functions, is as one function more.  An instance that is an argument or
an item has a class that the workers have, perhaps since a function came that is gone.  What the program
changes of the class reaches the workers before the instance does.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from ...errors import CallTimeout, SessionError, WorkerDied
from ...messages import FunctionSpec
from ...packing.kinds import CLASS, FUNCTION
from ...packing.pickles import ValueWriter, are_small
from ...packing.together import Together
from .known import Known, reached
from .parts import find_parts_of
from .registry import Registry

_ENTRIES = 1 << 15  # that items have which are pickled as one


class Values:
    """Pickles values one by one, whatever objects functions use.

    Classes that the workers do not have are sent to them first: they travel once, and not with each
    value.
    """

    def __init__(
        self,
        registry: Registry,
        writer: Callable[[], ValueWriter],
        introduce: Callable[[Mapping[int, type]], bool],
        rely: Callable[[Mapping[int, Any]], object],
    ) -> None:
        """*writer* makes a writer; *introduce* sends classes, by id, and says whether they are there;
        *rely* brings what the workers have of objects up to date."""
        self._registry = registry
        self._writer = writer
        self._together = Together(writer())
        self._introduce = introduce
        self._rely = rely

    def pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]:
        """*value*, pickled, beside its large buffers, and whether pickle itself cannot read it.

        ``settle`` has to follow before it is sent.

        Raises: what pickling raises.
        """
        found = self._pickled(value)
        if self._together.writer.classes and self._introduce(self._together.writer.classes):
            self.settle()
            self._together = Together(self._writer())
            found = self._pickled(value)
        return found

    def _pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]:
        self._together.writer.classes.clear()
        try:
            return self._together.writer.pickled(value)
        except Exception:
            self._together = Together(self._writer())
            if not find_parts_of(value, self._registry):
                raise
            return self._together.writer.pickled(value)

    def together(self, columns: list[list[Any]]) -> tuple[bytes, int, bool] | None:
        """The first of some items, pickled as one, how many they are, and whether pickle itself cannot
        read that; None if the first one has to be pickled apart.  *columns* have an argument each.

        ``settle`` has to follow before it is sent.
        """
        if all(map(are_small, columns)):
            return pickle.dumps(columns, 5), len(columns[0]), False
        together, copies = self._together, []
        together.writer.classes.clear()
        together.look_again()
        if not together.are_flat(columns) or together.count > _ENTRIES:
            together.look_again()
            for args in zip(*columns, strict=True):
                if (copy := together.copied(*args)) is None or together.count > _ENTRIES:
                    break
                copies.append(copy)
            columns = [*map(list, zip(*copies, strict=True))]
        if together.failed or together.writer.classes:  # which are sent before their instances
            self._together = Together(self._writer())
            return None
        if not columns:
            return None
        stream, by_us = together.pickled(columns)
        return stream, len(columns[0]), by_us

    def introduce(self, classes: Iterable[type]) -> None:
        """Have the workers know *classes*, as far as they can be, before there are values of them."""
        for cls in classes:
            try:
                self.pickled(cls)
                self.settle()
            except (CallTimeout, SessionError, WorkerDied):
                raise
            except Exception:  # it is told where there is a value
                continue

    def settle(self) -> None:
        """Send what has changed of what the values rely on."""
        if self._together.writer.relies:
            self._rely(self._together.writer.relied)


# ── what they rely on ────────────────────────────────────────────────────────────────────────────

_MOST = 128
"""How many objects are compared when a value is sent that relies on them."""

_RECENTLY = 10.0
"""Seconds in which others have to be compared as well, so that none takes the place of another."""


class Relied:
    """A class or a function that values rely on, as a function that is nothing else.

    Attributes:
        name, roots, spec: as a function has them.
    """

    def __init__(self, obj: Any) -> None:
        self.name: Final = str(getattr(obj, "__name__", type(obj).__name__))
        self.roots: list[Known] = []
        self.spec: Final = FunctionSpec(self.name, obj, None)
        self._at = time.monotonic()  # when a value relied on it last

    @property
    def is_recent(self) -> bool:
        """Whether a value relied on it a moment ago."""
        return time.monotonic() - self._at < _RECENTLY

    def hold(self, roots: list[Known]) -> None:
        """A value relies on it; the workers know it as *roots*."""
        self.roots, self._at = roots, time.monotonic()


class ReliedOn:
    """All that values rely on, what came last in the end; it takes the place of what came first."""

    def __init__(self) -> None:
        self._found: dict[int, Relied] = {}  # by id

    def has_room(self, idents: Iterable[int]) -> bool:
        """Whether objects can be relied on, too."""
        new = len({*idents} - self._found.keys())
        over = max(0, len(self._found) + new - _MOST)
        return new <= _MOST and not any(relied.is_recent for relied in [*self._found.values()][:over])

    def add(self, new: Mapping[int, Relied]) -> None:
        """Values rely on *new* ones, by id, for which there is room."""
        self._found |= new
        for ident in [*self._found][:-_MOST]:
            del self._found[ident]

    def by(self, known: Known) -> Relied | None:
        """What stands for an object on which a value relies now; None if there is no room."""
        ident = id(known.obj)
        relied = self._found.pop(ident) if ident in self._found else Relied(known.obj)
        if not self.has_room([ident]):
            return None
        self.add({ident: relied})
        relied.hold([known])
        return relied


class SharedByTasks:
    """What the tasks of one map share: they may read it, not change it.

    That is what the function uses, and what its items rely on, such as their classes, with all that is
    in it.  An item that is the first to rely on something pauses the map.
    """

    def __init__(
        self, pause: Callable[[], None], rely: Callable[[Mapping[int, Any]], list[Known]]
    ) -> None:
        """*rely* sends what has changed of objects, by id, and returns what is known of them."""
        self._pause = pause
        self._rely = rely
        self._objects: dict[int, Any] = {}  # what is shared, by id
        self._known: set[Known] = set()  # of it

    def use(self, roots: Iterable[Known]) -> None:
        """Tasks share *roots*, which stay on the workers, whatever takes their places here."""
        self._known |= reached(roots)
        self._objects |= {id(known.obj): known.obj for known in self._known}

    def add(self, objects: Mapping[int, Any]) -> None:
        """Items rely on these *objects*, by id."""
        new = {ident: obj for ident, obj in objects.items() if ident not in self._objects}
        if not new:
            return
        self._pause()
        self._objects |= new
        self.use(self._rely(new))

    @property
    def known(self) -> frozenset[Known]:
        """All that the tasks share."""
        return frozenset(self._known)

    def paths(self) -> dict[int, str]:
        """How to call what is shared, by number."""
        return {known.number: _PATHS.get(known.kind, "{}").format(known.path) for known in self._known}


_PATHS = {FUNCTION: "an attribute of {}", CLASS: "the class {}"}
