"""How partials travel over NCCL: casts for dtypes that it lacks and operations that differ from NumPy's.

NCCL reduces int8, int32, int64, their unsigned kin, float16, float32 and float64, and nothing else.
Partials of other dtypes travel as one of those, so that the result is NumPy's:

    sum, prod of int16, uint16     as int32: what overflows is cut off when it comes back, as in NumPy
    sum, mean of complex           as pairs of reals
    max, min of bool               as uint8
    max, min of floats             as integers in the same order, nan the greatest or the least of all:
                                   NCCL drops nan, NumPy keeps it

Sums and means of float16 and bfloat16 need no entry: their partials are float32 (``ops``).  Products
and orders of complex numbers, and long doubles, go through host memory.

The functions take arrays of NumPy and of GPUs alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..values.arrays import Array, code_of
from .ops import Operation

CARRIED = ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
"""The dtypes in which reductions travel."""

_WIDER = {"i2": "i4", "u2": "i4"}
_REALS = {"c8": "f4", "c16": "f8"}
_ORDERED = {"f2": "i4", "bfloat16": "i4", "f4": "i4", "f8": "i8"}
_BITS = {"i4": (31, 0x7FFFFFFF), "i8": (63, 0x7FFFFFFFFFFFFFFF)}

REDUCTIONS = {"mean": "SUM", "sum": "SUM", "prod": "PROD", "max": "MAX", "min": "MIN"}
"""NCCL's name of each operation; partials of a mean have been multiplied by their weights.  Operations
without a name go through host memory."""


def carrier(operation: Operation, partial: np.dtype[Any]) -> str | None:
    """The dtype in which partials of dtype *partial* travel, or None if there is none."""
    if operation.name not in REDUCTIONS:
        return None
    code = _code(partial)
    if operation.name in ("max", "min"):
        code = {"b1": "u1", **_ORDERED}.get(code, "" if partial.kind in "fc" else code)
    elif operation.name != "prod":
        code = _REALS.get(code, code)
    code = _WIDER.get(code, code)
    return code if code in CARRIED else None


def carried_as_is(operation: Operation, partial: np.dtype[Any]) -> bool:
    """Whether partials travel without a cast or a view."""
    code = _code(partial)
    return carrier(operation, partial) == code and not _reordered(operation, code)


def encode(operation: Operation, vector: Array) -> Array:
    """*vector*, contiguous partials, in the dtype that travels; a view of it where possible."""
    code = _code(vector.dtype)
    wire = carrier(operation, vector.dtype)
    assert wire is not None
    if _reordered(operation, code):
        return _ordered(vector, wire, greatest=operation.name == "max")
    return vector.astype(wire) if code in _WIDER else vector.view(wire)


def decode(operation: Operation, carried: Array, dtype: np.dtype[Any]) -> Array:
    """The inverse of ``encode``: the reduced vector, as *dtype*."""
    code = _code(dtype)
    if _reordered(operation, code):
        shift, mask = _BITS[carried.dtype.str[1:]]
        bits = carried ^ ((carried >> shift) & mask)
        floats: Array = bits.view("f8" if code == "f8" else "f4")
        return floats.astype(dtype, copy=False)
    return carried.astype(dtype) if code in _WIDER else carried.view(dtype)


def _code(dtype: np.dtype[Any]) -> str:
    """A dtype's kind and size, without its byte order, which is the machine's."""
    return str(code_of(dtype)).lstrip("<>|=")


def _reordered(operation: Operation, code: str) -> bool:
    return operation.name in ("max", "min") and code in _ORDERED


def _ordered(vector: Array, wire: str, greatest: bool) -> Array:
    """Floats as signed integers in the same order; nan is the greatest or the least."""
    wide = vector.astype("f8" if wire == "i8" else "f4", copy=False)
    shift, mask = _BITS[wire]
    bits = wide.view(wire)
    keys: Array = bits ^ ((bits >> shift) & mask)
    keys[wide != wide] = mask if greatest else -mask - 1  # noqa: PLR0124  only nan is not itself
    return keys
