"""A bounded cache."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


_SIZE = 64


class Cache(dict[Key, Value]):
    """A dict of a bounded number of entries; when it is full, a new entry empties it first."""

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= _SIZE:
            self.clear()
        super().__setitem__(key, value)
