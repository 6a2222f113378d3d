"""``Values``: arguments and items on their way to the workers, which are values there."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import CallTimeout, SessionError, WorkerDied
from ...packing.pickles import ValueWriter, are_small
from ...packing.together import Together
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
        flat = all(are_small(column) or together.are_flat(column) for column in columns)
        if not flat or together.count > _ENTRIES:
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
