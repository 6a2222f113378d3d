"""Values that all dtypes hold, the variables that hold them, and what NumPy says of them."""

import numpy as np

import synkro as synk
from synkro.comms.ops import OPERATIONS

OPS = list(OPERATIONS)
DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "g", "c8", "c16"]
ORDERED = [dtype for dtype in DTYPES if dtype[0] != "c"]
SHAPES = [(), (1,), (5,), (0,), (2, 3), (3, 0, 2), (2, 1, 3, 2)]


def values(seed, shape, dtype):
    """Small numbers, different for each seed, that all dtypes hold and none overflows with."""
    rng = np.random.default_rng([seed, *shape])
    if np.dtype(dtype).kind == "c":
        return np.asarray(rng.integers(1, 4, shape) + 1j * rng.integers(1, 4, shape)).astype(dtype)
    low = -3 if np.dtype(dtype).kind in "if" else 0
    return np.asarray(rng.integers(low, 4, shape)).astype(dtype)


def mine(rank, shape=(5,), dtype="f8"):
    """What a rank gives to a collective."""
    return (np.arange(np.prod(shape, dtype=int)).reshape(shape) % 7 + 3 * rank + 1).astype(dtype)


def serial(op, arrays):
    """What NumPy says of a list of one array a rank, in the dtype that is promised."""
    stacked = np.stack(arrays)
    dtype = stacked.dtype
    if op == "mean":
        result = stacked.mean(axis=0, dtype="f4" if dtype == "f2" else None)
        return result.astype("f8" if dtype.kind in "biu" else dtype)
    if op in ("max", "min"):
        return stacked.max(axis=0) if op == "max" else stacked.min(axis=0)
    if dtype.kind == "b":
        stacked = stacked.astype("i8")
    reduced = stacked.sum if op == "sum" else stacked.prod
    with np.errstate(all="ignore"):
        return reduced(axis=0, dtype=stacked.dtype)


def chosen(batch, rows):
    """The rows that a selection takes of so many."""
    if batch is None:
        return np.arange(rows)
    if isinstance(batch, int):
        return np.arange(batch)
    index = batch if isinstance(batch, slice) else np.asarray(batch, None if len(batch) else int)
    return np.arange(rows)[index]


def check(got, want):
    """Same shape and dtype; integers to the bit, floats to rounding."""
    want = np.asarray(want)
    assert (np.shape(got), np.asarray(got).dtype) == (want.shape, want.dtype)
    if want.dtype.kind in "biu":
        assert np.array_equal(got, want)
    else:
        assert np.allclose(got, want, rtol=8 * np.finfo(want.dtype).eps, atol=0)


def alike(result, expected):
    """Equal, up to rounding, and of the same classes all the way down."""
    if isinstance(expected, dict):
        assert type(result) is dict
        assert list(result) == list(expected)
        result, expected = list(result.values()), list(expected.values())
    if isinstance(expected, tuple | list):
        assert type(result) is type(expected)
        assert len(result) == len(expected)
        for one, other in zip(result, expected, strict=True):
            alike(one, other)
    elif expected is None:
        assert result is None
    else:
        assert isinstance(result, np.ndarray | np.generic)
        assert result.shape == np.shape(expected)
        assert np.allclose(result, expected)


def fill(variable, arrays):
    for rank, array in enumerate(arrays):
        synk.set_value(rank, variable, array)


def replicas(variable, ranks):
    return [synk.get_value(rank, variable) for rank in range(ranks)]
