"""The rows that a user's ``batch=`` selects, checked against their number, in one of two forms."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidIndex, InvalidType, InvalidValue, counted, cut, shortened, shown, there_are

UNKNOWN = 1 << 62
"""Stands for the number of rows where only the rows of the batch are there: more than any can name."""


Selection = range | NDArray[np.int64]
"""Rows at equal distances, which are taken as views, or rows by their indices, all in ``0 … rows-1``."""


def indices_of(rows: range) -> NDArray[np.int64]:
    """Rows at equal distances, by their indices."""
    return np.arange(rows.start, rows.stop, rows.step, dtype=np.int64)


def select_each(batch_s: Any, rows: Sequence[int]) -> list[Selection]:
    """The rows that *batch_s* selects on each rank, where rank r holds ``rows[r]``.

    *batch_s* is None (all), one selection for all ranks, in any form that ``select`` takes, or a list
    (or a 2-d array) of such selections, one a rank.  Some ranks may have no rows, but not all.

    Raises: as ``select``; InvalidValue for a wrong number of selections, or if no rank has a row.
    """
    each: Sequence[Any] = [batch_s] * len(rows)
    if _one_a_rank(batch_s):
        if len(batch_s) != len(rows):
            raise InvalidValue(
                f"batch_s has {counted(len(batch_s), 'selection')} for {counted(len(rows), 'rank')}: "
                f"give one for all, or one a rank."
            )
        each = batch_s
    selections = [select_any(batch, count, "batch_s") for batch, count in zip(each, rows, strict=True)]
    if not any(map(len, selections)):
        raise InvalidValue(
            f"the call has no rows to compute on: the ranks hold {list(rows)} rows, and none is "
            f"selected."
        )
    return selections


def _one_a_rank(batch_s: Any) -> bool:
    if isinstance(batch_s, np.ndarray):
        return batch_s.ndim == 2
    if not isinstance(batch_s, list | tuple):
        return False
    return any(one is None or isinstance(one, slice) or np.ndim(one) for one in batch_s)


def select(batch: Any, rows: int) -> Selection:
    """The rows that *batch* selects out of *rows*.

    *batch* is None (all rows), an int (the first so many rows), a slice (as in NumPy: it is cut at
    the ends), or a list, tuple or 1-d array of ints (negative ones count from the end) or of bools
    (one a row).

    Raises: InvalidType for anything else; InvalidIndex for rows that do not exist; InvalidValue
    for a mask of the wrong length or an empty selection.
    """
    selection = select_any(batch, rows, "batch")
    if len(selection) == 0:
        chosen = "" if batch is None else " that batch= selects"
        raise InvalidValue(
            f"the call has no rows to compute on: expected at least 1 row{chosen}, got 0"
            f"{'' if rows == UNKNOWN else f' of {rows}'}."
        )
    return selection


def select_any(batch: Any, rows: int, name: str) -> Selection:
    """The rows that *batch* selects out of *rows*, perhaps none; errors call the keyword *name*."""
    if batch is None:
        return range(rows)
    if isinstance(batch, slice):
        return _from_slice(batch, rows, name)
    if isinstance(batch, np.ma.MaskedArray):
        raise InvalidType(f"{name} cannot be a masked array: give the indices, or a mask of bools.")
    try:
        given = np.asarray(batch)
    except (TypeError, ValueError) as error:  # as where it lies on a GPU
        raise InvalidType(f"{name} is not a 1-d array of ints or bools: {cut(str(error))}") from None
    if given.ndim == 0:
        return range(_length(batch, rows, name))
    return _indices(given, rows, name)


def _from_slice(batch: slice, rows: int, name: str) -> range:
    try:
        return range(rows)[batch]
    except (TypeError, ValueError) as error:
        raise InvalidType(
            f"{name}={shown(batch)} is not a usable slice ({cut(str(error))}): its start, stop and step "
            f"must be integers or None, and its step not 0."
        ) from None


def _length(batch: Any, rows: int, name: str) -> int:
    try:
        if isinstance(batch, bool | np.bool_):
            raise TypeError
        length = operator.index(batch)
    except TypeError:
        raise InvalidType(
            f"{name} must be an int (the first so many rows), a slice, or a list or 1-d array of "
            f"ints or bools; got {shortened(batch)}."
        ) from None
    if not 0 <= length <= rows:
        if rows == UNKNOWN:
            raise InvalidIndex(f"{name}={length} asks for {length} rows: give 1 or more.")
        raise InvalidIndex(
            f"{name}={length} asks for the first {counted(length, 'row')}, but "
            f"{there_are(rows, 'row')}: give a number from 1 to {rows}."
        )
    return length


def _indices(given: NDArray[Any], rows: int, name: str) -> NDArray[np.int64]:
    if given.ndim != 1 or (given.size and given.dtype.kind not in "biu"):
        got = f"dtype {given.dtype}" if given.ndim == 1 else counted(given.ndim, "dimension")
        raise InvalidType(f"{name} must be a 1-d array of ints or bools; got {got}.")
    if given.dtype.kind == "b":
        if len(given) != rows:
            raise InvalidValue(
                f"{name} is a mask of {counted(len(given), 'bool')} for {counted(rows, 'row')}: give "
                f"one bool a row."
            )
        return np.flatnonzero(given)
    if not given.size:
        return np.empty(0, np.int64)
    low, high = int(given.min()), int(given.max())
    if low < -rows or high >= rows:
        worst = high if high >= rows else low
        raise InvalidIndex(
            f"{name} has the index {worst}, but {there_are(rows, 'row')}: "
            f"give indices from {-rows} to {rows - 1}."
        )
    indices = given.astype(np.int64, copy=False)
    return np.where(indices < 0, indices + rows, indices) if low < 0 else indices
