"""A bounded cache."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(dict[Key, Value]):
    """A dict of at most *size* entries; when it is full, a new entry empties it first."""

    def __init__(self, size: int = 64) -> None:
        super().__init__()
        self._size = size

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= self._size:
            self.clear()
        super().__setitem__(key, value)
