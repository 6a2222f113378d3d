"""Bounded caches."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class Cache(dict[Key, Value]):
    """A dict of at most 64 entries; when it is full, a new entry empties it first."""

    def __setitem__(self, key: Key, value: Value) -> None:
        if len(self) >= 64:
            self.clear()
        super().__setitem__(key, value)


class Unpickled(Cache[bytes, Value]):
    """Values by their pickles, each of which is read once."""

    def __init__(self, load: Callable[[bytes], Value] = pickle.loads) -> None:
        super().__init__()
        self._load = load

    def __missing__(self, payload: bytes) -> Value:
        value = self[payload] = self._load(payload)
        return value
