"""Copies of inputs that stay on a GPU from call to call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..values.arrays import Array
from .base import Source


class KeptInputs:
    """Copies of broadcast inputs on the device, by where they lie in host memory.

    Attributes:
        limit: the bytes that they may have together; larger inputs are not kept.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._copies: dict[Any, tuple[tuple[int, int], Array]] = {}

    def find(self, source: Source) -> Array | None:
        """A copy of an input that has not changed; None if there is none."""
        version, array = self._copies.get(_place(source), (None, None))
        return None if version is None or version != source.version else array

    def add(self, source: Source, array: Array) -> None:
        """Remember that *array* is a copy of *source*."""
        if source.version is None or array.nbytes > self.limit:
            return
        now = source.version
        self._drop(
            lambda version: version[0] == now[0] and version != now
        )  # copies of its former contents
        while sum(copy.nbytes for _, copy in self._copies.values()) + array.nbytes > self.limit:
            del self._copies[next(iter(self._copies))]  # the oldest
        self._copies[_place(source)] = (source.version, array)

    def forget(self, number: int) -> None:
        """Drop the copies of inputs in segment *number*."""
        self._drop(lambda version: version[0] == number)

    def _drop(self, goes: Callable[[tuple[int, int]], bool]) -> None:
        for place in [place for place, (version, _) in self._copies.items() if goes(version)]:
            del self._copies[place]

    def clear(self) -> None:
        self._copies.clear()


def _place(source: Source) -> Any:
    array = source.array
    return array.ctypes.data, array.shape, array.dtype, array.strides
