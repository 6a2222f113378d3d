"""Records: what a rank shows all others when it enters a collective."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import ranks_in_words
from ..values.arrays import Array, Code, code_of
from .ops import OPERATIONS

_REMEMBERED = 64  # layouts that are kept

_ONE_SIDED = ("broadcast", "scatter", "send or recv", "exchange")


Arrays = Sequence[Array]
"""The arrays of one collective, or of all ranks."""

ArrayType = tuple[tuple[int, ...], Code]
"""The shape and the dtype of an array."""

Entry = tuple[int, str]
"""A collective that the ranks have entered: the number of its call, and which it was, in words."""


class Record(NamedTuple):
    """What a rank says when it enters a collective."""

    kind: str
    operation: str = ""
    root: int = -1
    weight: float = 1
    given: tuple[ArrayType, ...] = ()  # the arrays
    at: tuple[int, ...] = ()  # where they, or the vectors that hold them, lie in the shared file
    in_place: bool = False
    on_gpu: bool = False  # whether the arrays lie on a GPU
    names: str = ""  # of the arrays, where several are nested
    link: int = 0  # the number of the link between the GPUs; 0: none yet
    tracked: int = 0  # a bit for each array: whether it is a tensor with a history
    backward: Entry | None = None  # the collective whose gradient this one belongs to
    window: bytes = b""  # the device memory that holds them; ``at`` is its size then
    among: tuple[int, ...] = ()  # the ranks, where a message goes between members of a smaller world


class FlatLayout(NamedTuple):
    """The vectors that hold the arrays of a reduction, one for each partial dtype."""

    vectors: tuple[tuple[tuple[int], np.dtype[Any]], ...]  # the shape and the dtype of each
    places: tuple[tuple[int, int, int], ...]  # of each array: its vector's number, start, stop


def layout_of(record: Record) -> FlatLayout:
    return _cached_layout(record.given, record.operation)


@lru_cache(_REMEMBERED)
def _cached_layout(given: tuple[ArrayType, ...], op: str) -> FlatLayout:
    sizes: dict[np.dtype[Any], int] = {}  # of the vectors
    places = []
    for shape, dtype in given:
        partial = OPERATIONS[op].partial_dtype(np.dtype(dtype))
        start = sizes.setdefault(partial, 0)
        sizes[partial] += prod(shape)
        places.append((list(sizes).index(partial), start, sizes[partial]))
    return FlatLayout(tuple([((size,), partial) for partial, size in sizes.items()]), tuple(places))


def given(arrays: Arrays) -> tuple[ArrayType, ...]:
    """The shapes and dtypes of *arrays*, as a record has them."""
    return tuple([(array.shape, code_of(array.dtype)) for array in arrays])


def pack(record: Record, arrays: Arrays, vectors: Arrays) -> None:
    """Write the partials of *arrays* to *vectors*: scaled and cast in one step."""
    for array, (vector, start, stop) in zip(arrays, layout_of(record).places, strict=True):
        place = vectors[vector][start:stop].reshape(array.shape)
        if not record.weight:
            place[...] = 0  # a nan times 0 would be a nan
        elif record.weight != 1:
            np.multiply(array, record.weight, out=place, dtype=place.dtype, casting="unsafe")
        else:
            place[...] = array


def as_vector(record: Record, arrays: Arrays) -> Array | None:
    """A single array for which ``pack`` would write what is in it, as a vector; else None."""
    if len(arrays) != 1 or record.weight != 1 or not arrays[0].flags.c_contiguous:
        return None
    ((_, partial),) = layout_of(record).vectors
    return arrays[0].reshape(-1) if arrays[0].dtype == partial else None


def unpack(record: Record, arrays: Arrays, vectors: Arrays) -> list[Array]:
    """The results for *arrays*, cut out of the reduced *vectors*."""
    results = []
    for array, (vector, start, stop) in zip(arrays, layout_of(record).places, strict=True):
        result = vectors[vector][start:stop].reshape(array.shape)
        dtype = OPERATIONS[record.operation].result_dtype(array.dtype)
        results.append(result.astype(dtype, copy=False))
    return results


def listed(record: Record) -> str:
    """The arrays, in words."""
    shown = [f"shape {shape} and dtype {np.dtype(dtype)}" for shape, dtype in record.given]
    if len(shown) > 3:
        shown = [*shown[:3], f"{len(shown)} arrays in all"]
    return "; ".join(shown) or "no array"


def manner(record: Record) -> tuple[Any, ...]:
    """What has to be the same on all ranks, besides the arrays."""
    alone = record.kind in _ONE_SIDED  # a root or a sender, who alone knows where its arrays lie
    on_gpu = not alone and record.on_gpu
    where = record.root, record.in_place, on_gpu
    return record.kind, record.operation, *where, record.names, record.backward, record.among


def described(record: Record) -> str:
    """The collective, in words."""
    operation = f' with "{record.operation}"' if record.operation else ""
    root = f" from or to rank {record.root}" if record.root >= 0 else ""
    place = " in place" if record.in_place else ""
    gpu = " of arrays on the GPU" if record.on_gpu else ""
    names = f" of {record.names}" if record.names else ""
    backward = f" in the backward of {record.backward[1]}" if record.backward else ""
    among = f" in the world of {ranks_in_words(record.among)}" if record.among else ""
    return f"{record.kind}{operation}{root}{place}{gpu}{names}{backward}{among}"
