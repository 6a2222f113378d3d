"""The classes and functions that values of calls and maps rely on, as one function more.

An instance that is an argument or an item has a class that the workers have, perhaps since a function
came that is gone.  What the program changes of the class reaches the workers before the instance does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import FunctionType, SimpleNamespace
from typing import Any

from ...packing.kinds import CLASS, FUNCTION
from .known import Known, reached
from .registry import Registry

_MOST = 128
"""How many objects, those that came last, are compared when a value is sent that relies on some."""


class Relied:
    """What values rely on, compared as what functions would use that had these for globals.

    Attributes:
        name, roots, spec: as a function has them.
    """

    name = "a value that was sent"

    def __init__(self) -> None:
        self.roots: list[Known] = []
        self._objects: dict[int, Any] = {}  # by id

    @property
    def spec(self) -> Any:
        return SimpleNamespace(fn=tuple(self._objects.values()), finish=None)

    @property
    def is_full(self) -> bool:
        """Whether one more would take the place of another."""
        return len(self._objects) >= _MOST

    def add(self, objects: Mapping[int, Any], registry: Registry) -> bool:
        """Values rely on these *objects*, by id, too; returns whether there is a new one among them."""
        new = {
            ident: obj
            for ident, obj in objects.items()
            if ident not in self._objects and isinstance(obj, type | FunctionType)
        }
        if not new:
            return False
        every = {**self._objects, **new}
        kept = list(every)[-_MOST:]
        found = {ident: registry.known(every[ident]) for ident in kept}
        self._objects = {ident: every[ident] for ident, known in found.items() if known is not None}
        self.roots = [known for known in found.values() if known is not None]
        return True


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
        self._objects: dict[int, Any] = {}  # on which items rely, by id
        self._roots: list[Known] = []

    def use(self, roots: Iterable[Known]) -> None:
        """The function uses *roots*, which stay on the workers, whatever takes their places here."""
        self._known = reached(roots)

    def add(self, objects: Mapping[int, Any]) -> None:
        """Items rely on these *objects*, by id."""
        new = {ident: obj for ident, obj in objects.items() if ident not in self._objects}
        if not new:
            return
        self._pause()
        self._objects |= new
        self._known |= reached(self._rely(new))

    def paths(self) -> dict[int, str]:
        """How to call what is shared, by number."""
        return {known.number: _PATHS.get(known.kind, "{}").format(known.path) for known in self._known}


_PATHS = {FUNCTION: "an attribute of {}", CLASS: "the class {}"}
