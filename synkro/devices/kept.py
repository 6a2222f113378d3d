"""Copies of inputs that stay on a GPU from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..values.arrays import Array
from .base import Source


class KeptInputs:
    """Copies of broadcast inputs on the device, by their version and where they lie in host memory.

    Attributes:
        limit: the bytes that they may have together; larger inputs are not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._copies: dict[Any, Array] = {}

    def find(self, source: Source) -> Array | None:
        """A copy of an input that has not changed; None if there is none."""
        return self._copies.get(_key(source))

    def add(self, source: Source, array: Array) -> None:
        """Remember that *array* is a copy of *source*."""
        if source.version is None or array.nbytes > self.limit:
            return
        number = source.version[0]
        self._drop(lambda version: version[0] == number and version != source.version)
        while sum(copy.nbytes for copy in self._copies.values()) + array.nbytes > self.limit:
            del self._copies[next(iter(self._copies))]  # the oldest
        self._copies[_key(source)] = array

    def forget(self, number: int) -> None:
        """Drop the copies of inputs in segment *number*."""
        self._drop(lambda version: version[0] == number)

    def _drop(self, goes: Callable[[tuple[int, int]], bool]) -> None:
        for key in [key for key in self._copies if goes(key[0])]:
            del self._copies[key]

    def clear(self) -> None:
        self._copies.clear()


def _key(source: Source) -> Any:
    array = source.array
    return source.version, array.ctypes.data, array.shape, array.dtype, array.strides
