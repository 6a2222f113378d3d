"""What a rank says when it enters a collective: a record that all others read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..values.arrays import Array, code_of
from .meeting import KINDS
from .ops import OPERATIONS

_REMEMBERED = 64  # layouts that are kept

KIND = {name: number for number, name in enumerate(KINDS)}
"""The number of each collective."""

_ROOTED = (KIND["broadcast"], KIND["scatter"])


class Shown(NamedTuple):
    """An array that a rank shows: where it lies in the file."""

    shape: tuple[int, ...]
    dtype: str
    at: int


class Record(NamedTuple):
    """What a rank says when it enters a collective."""

    kind: int
    operation: str
    root: int
    weight: float
    shown: tuple[Shown, ...] | None
    in_place: bool = False
    given: tuple[tuple[tuple[int, ...], str], ...] = ()  # shapes and dtypes, where others are shown
    on_gpu: bool = False  # whether the arrays lie on a GPU
    names: str = ""  # what the arrays are, where several are nested
    link: int = 0  # the number of the connection between the GPUs, 0 where there is none yet


class PackedLayout(NamedTuple):
    """The arrays of a reduction as vectors, one a partial dtype: their sizes, and each array's place."""

    dtypes: tuple[np.dtype[Any], ...]
    sizes: tuple[tuple[int], ...]
    places: tuple[tuple[int, int, int], ...]  # the number of its vector, from where to where


def layout_of(record: Record) -> PackedLayout:
    return _cached_layout(record.given, record.operation)


@lru_cache(_REMEMBERED)
def _cached_layout(given: tuple[tuple[tuple[int, ...], str], ...], op: str) -> PackedLayout:
    dtypes: list[np.dtype[Any]] = []
    sizes: list[int] = []
    places = []
    for shape, given_dtype in given:
        dtype = OPERATIONS[op].partial_dtype(np.dtype(given_dtype))
        if dtype not in dtypes:
            dtypes.append(dtype)
            sizes.append(0)
        vector = dtypes.index(dtype)
        start = sizes[vector]
        sizes[vector] += prod(shape)
        places.append((vector, start, sizes[vector]))
    return PackedLayout(tuple(dtypes), tuple((size,) for size in sizes), tuple(places))


def given(arrays: Sequence[Array]) -> tuple[tuple[tuple[int, ...], str], ...]:
    """The shapes and dtypes of *arrays*, as a record has them."""
    return tuple([(array.shape, code_of(array.dtype)) for array in arrays])


def pack(record: Record, arrays: Sequence[Array], vectors: Sequence[Array]) -> None:
    """Put partials of the arrays of a reduction into its vectors: each scaled and cast in one step."""
    for array, (vector, start, stop) in zip(arrays, layout_of(record).places, strict=True):
        place = vectors[vector][start:stop].reshape(array.shape)
        if not record.weight:
            place[...] = 0  # also where there are nans
        elif record.weight != 1:
            np.multiply(array, record.weight, out=place, dtype=place.dtype, casting="unsafe")
        else:
            place[...] = array


def shapes_of(record: Record) -> Sequence[tuple[tuple[int, ...], str]]:
    return record.given or [(shown.shape, shown.dtype) for shown in record.shown or ()]


def listed(record: Record) -> str:
    shown = [f"shape {shape} and dtype {np.dtype(dtype)}" for shape, dtype in shapes_of(record)]
    if len(shown) > 3:
        shown = [*shown[:3], f"{len(shown)} arrays in all"]
    return "; ".join(shown) or "no array"


def manner(record: Record) -> tuple[Any, ...]:
    rooted = record.kind in _ROOTED  # only the root knows
    on_gpu = not rooted and record.on_gpu
    return record.kind, record.operation, record.root, record.in_place, on_gpu, record.names


def described(record: Record) -> str:
    operation = f' with "{record.operation}"' if record.operation else ""
    root = f" from or to rank {record.root}" if record.root >= 0 else ""
    place = " in place" if record.in_place else ""
    gpu = " of arrays on the GPU" if record.on_gpu else ""
    names = f" of {record.names}" if record.names else ""
    return f"{KINDS[record.kind]}{operation}{root}{place}{gpu}{names}"
