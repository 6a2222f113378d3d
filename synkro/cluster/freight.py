"""Pickled values on their way from one host to another: the items and the results of maps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..ipc.queue import Packed

_INLINE = 1 << 14
"""Bytes up to which a stream travels in the head of the message."""


class Freight(NamedTuple):
    """A value with a number.

    *lengths* are those of its bodies, which come behind the head: its buffers, and before them its
    stream, if that is None here.
    """

    number: int
    stream: bytes | None
    own: bool
    lengths: tuple[int, ...]


def loaded(number: int, value: Packed) -> tuple[Freight, Sequence[Any]]:
    """A value as it travels, and its bodies."""
    stream, buffers, own = value
    if len(stream) <= _INLINE:
        return Freight(number, stream, own, tuple(map(len, buffers))), buffers
    bodies = [stream, *buffers]
    return Freight(number, None, own, tuple(map(len, bodies))), bodies


def unloaded(
    freights: Iterable[Freight], fill: Callable[[Sequence[Any]], None]
) -> list[tuple[int, Packed]]:
    """The values with their numbers; *fill* receives the bodies that came with their message."""
    values: list[tuple[int, Packed]] = []
    bodies = []
    for number, stream, own, lengths in freights:
        memory: list[Any] = [np.empty(length, np.uint8).data for length in lengths]
        bodies += memory
        values.append((number, (memory.pop(0) if stream is None else stream, memory, own)))
    if bodies:
        fill(bodies)
    return values


def weight(value: Packed) -> int:
    """The bytes of the bodies of a value."""
    stream, buffers, _ = value
    return sum(map(len, buffers)) + (len(stream) if len(stream) > _INLINE else 0)
