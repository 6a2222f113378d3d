"""Items that come while a map goes on, such as an executor's tasks."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any, Protocol


class ItemPickler(Protocol):
    """What pickles items: as ``Values`` does."""

    def pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]: ...

    def together(self, columns: list[list[Any]]) -> tuple[bytes, int, bool] | None: ...

    def introduce(self, classes: set[type]) -> None: ...

    def settle(self) -> None: ...


class Item:
    """An item of a source; its ``repr`` is what errors call it."""

    __slots__ = ()

    def remember(self, error: BaseException) -> None:
        """Keep with an *error* how to do the item once more, of which it was."""


class ItemSource(Iterator[Item]):
    """Items that come while the map goes on: the iterator ends where there is none, and goes on later.

    It pickles its items, too.
    """

    @property
    @abc.abstractmethod
    def is_ready(self) -> bool:
        """Whether there is an item, or there will be none any more."""

    @property
    @abc.abstractmethod
    def is_over(self) -> bool:
        """Whether there will be no item any more."""

    @abc.abstractmethod
    def pickler(self, least: int) -> ItemPickler:
        """What pickles the items; buffers of *least* bytes are kept apart."""
