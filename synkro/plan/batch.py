"""What a user's ``batch=`` selects: checked against the number of rows, in one of two forms."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidIndex, InvalidType, InvalidValue


@dataclass(frozen=True)
class Strided:
    """Rows ``start, start + step, …``: *count* of them, taken as views."""

    start: int
    step: int
    count: int

    @property
    def lowest(self) -> int:
        return min(self.start, self.start + (self.count - 1) * self.step)


@dataclass(frozen=True, eq=False)
class Indexed:
    """Rows by their indices, int64, all in ``0 … rows-1``."""

    indices: NDArray[np.int64]

    @property
    def count(self) -> int:
        return len(self.indices)

    @property
    def lowest(self) -> int:
        return int(self.indices.min())


Selection = Strided | Indexed


def select(batch: Any, rows: int) -> Selection:
    """The rows that *batch* selects out of *rows*.

    *batch* is None (all rows), an int (the first so many rows), a slice (as in NumPy: it is cut at
    the ends), or a list, tuple or 1-d array of ints (negative ones count from the end) or of bools
    (one a row).

    Raises: InvalidType for anything else; InvalidIndex for rows that are not there; InvalidValue
    for a mask of the wrong length or a selection of no row.
    """
    if batch is None:
        selection: Selection = Strided(0, 1, rows)
    elif isinstance(batch, slice):
        selection = _from_slice(batch, rows)
    else:
        if isinstance(batch, np.ma.MaskedArray):
            raise InvalidType("batch cannot be a masked array: give the indices, or a mask of bools.")
        try:
            given = np.asarray(batch)
        except ValueError as error:
            raise InvalidType(f"batch is not a 1-d array of ints or bools: {error}") from None
        if given.ndim == 0:
            selection = Strided(0, 1, _length(batch, rows))
        else:
            selection = Indexed(_indices(given, rows))
    if selection.count == 0:
        chosen = "" if batch is None else " that batch= selects"
        raise InvalidValue(
            f"the call has no rows to compute on: expected at least 1 row{chosen}, got 0 of {rows}."
        )
    return selection


def _from_slice(batch: slice, rows: int) -> Strided:
    try:
        chosen = range(rows)[batch]
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"batch={batch} is not a usable slice ({error}): its start, stop and step must be "
            f"integers or None, and its step not 0."
        ) from None
    return Strided(chosen.start, chosen.step, len(chosen))


def _length(batch: Any, rows: int) -> int:
    try:
        if isinstance(batch, bool | np.bool_):
            raise TypeError
        length = operator.index(batch)
    except TypeError:
        raise InvalidType(
            f"batch must be an int (the first so many rows), a slice, or a list or 1-d array of "
            f"ints or bools; got {batch!r}, a {type(batch).__name__}."
        ) from None
    if not 0 <= length <= rows:
        raise InvalidIndex(
            f"batch={length} asks for the first {length} rows, but there are {rows}: "
            f"give a number from 1 to {rows}."
        )
    return length


def _indices(given: NDArray[Any], rows: int) -> NDArray[np.int64]:
    if given.ndim != 1 or (given.size and given.dtype.kind not in "biu"):
        got = f"dtype {given.dtype}" if given.ndim == 1 else f"{given.ndim} dimensions"
        raise InvalidType(f"batch must be a 1-d array of ints or bools; got {got}.")
    if given.dtype.kind == "b":
        if len(given) != rows:
            raise InvalidValue(
                f"batch is a mask of {len(given)} bools for {rows} rows: give one bool a row."
            )
        return np.flatnonzero(given)
    if not given.size:
        return np.empty(0, np.int64)
    low, high = int(given.min()), int(given.max())
    if low < -rows or high >= rows:
        worst = high if high >= rows else low
        raise InvalidIndex(
            f"batch has the index {worst}, but there are {rows} rows: "
            f"give indices from {-rows} to {rows - 1}."
        )
    indices = given.astype(np.int64, copy=False)
    return np.where(indices < 0, indices + rows, indices) if low < 0 else indices
