"""A stand-in for CuPy, for tests of code for GPUs on machines that have none.

It is a package of this name so that the code under test imports it unawares. What it offers is a
part of CuPy 14.2, done by NumPy; it is meant to be harder to please than a device: copies run as late
as CUDA allows, and memory that nobody wrote is full of 0xAB. The environment says what machine it
makes believe: FAKE_CUDA_DEVICES (how many), FAKE_CUDA_MEMORY (bytes each), FAKE_CUDA_DRIVER (old or
none), FAKE_CUDA_LAZY (0: copies run at once), FAKE_CUDA_FOLDER (where ranks meet), FAKE_NCCL (none or
broken), FAKE_NCCL_VERSION; and CUDA_VISIBLE_DEVICES, as ever.
"""

from __future__ import annotations

import functools as _functools

import numpy as _np

from . import _array, _names, _signals, cuda, linalg, random
from ._array import array, ndarray, ufunc
from ._kernels import RawKernel, RawModule
from .cuda import is_available
from .cuda.memory import get_default_memory_pool
from .cuda.pinned_memory import get_default_pinned_memory_pool

__all__ = [
    "RawKernel",
    "RawModule",
    "arange",
    "array",
    "asarray",
    "ascontiguousarray",
    "asnumpy",
    "copyto",
    "cuda",
    "empty",
    "empty_like",
    "full",
    "full_like",
    "fuse",
    "get_array_module",
    "get_default_memory_pool",
    "get_default_pinned_memory_pool",
    "is_available",
    "linalg",
    "ndarray",
    "ones",
    "ones_like",
    "random",
    "take",
    "ufunc",
    "zeros",
    "zeros_like",
]

__version__ = "14.2.0"

_signals.shield()


@_functools.cache
def __getattr__(name):
    """NumPy's function of that name, for arrays of the device, where the real CuPy has one."""
    if name in _names.SHARED:
        return getattr(_np, name)
    if name not in _names.UFUNCS | _names.FUNCTIONS:
        raise AttributeError(f"module 'cupy' has no attribute '{name}'")
    function = getattr(_np, name)
    if isinstance(function, _np.ufunc) and name != "matmul":
        return ufunc(function)

    def delegate(*args, **kwargs):
        result = _array.call(function, args, kwargs, view=name in _names.VIEWS)
        return array(result) if name in _names.TRUTHS else result

    delegate.__name__ = delegate.__qualname__ = name
    return delegate


def asarray(a, dtype=None, order=None, *, copy=None, blocking=False):
    """An array on the device, `a` itself where it is one and nothing needs to change."""
    return array(a, dtype, copy=bool(copy), order=order, blocking=blocking)


def ascontiguousarray(a, dtype=None):
    """An array on the device in C order with at least one dimension, `a` itself where it will do."""
    a = asarray(a, dtype)
    if not a.flags.c_contiguous:
        a = a.copy("C")
    return a if a.ndim else a.reshape(1)


def asnumpy(a, stream=None, order="C", out=None, *, blocking=True):
    """An array on the host."""
    if isinstance(a, ndarray):
        return a.get(stream=stream, order=order, out=out, blocking=blocking)
    if out is None:
        return _np.asarray(a, order=order)
    _np.copyto(out, a)
    return out


def copyto(dst, src, casting="same_kind", where=None):
    """Copy the elements of `src`, where `where` says so, in another dtype if the casting allows it."""
    chosen = True if where is None else getattr(where, "_a", where)
    function = _functools.partial(_np.copyto, where=chosen)
    _array.call(function, (dst, src), {"casting": casting})


def empty(shape, dtype=float, order="C"):
    """A new array, full of poison."""
    return ndarray(shape, dtype, order=order)


def full(shape, fill_value, dtype=None, order="C"):
    """A new array full of a value."""
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else _np.array(fill_value).dtype
    result = ndarray(shape, dtype, order=order)
    result[...] = fill_value
    return result


def zeros(shape, dtype=float, order="C"):
    """A new array of zeros."""
    return full(shape, 0, dtype, order)


def ones(shape, dtype=float, order="C"):
    """A new array of ones."""
    return full(shape, 1, dtype, order)


def empty_like(prototype, dtype=None, order="K", subok=None, shape=None):
    """A new array of the same shape and dtype, full of poison."""
    dtype = prototype.dtype if dtype is None else dtype
    if shape is not None:
        return ndarray(shape, dtype)
    keep = order in {"K", "A"} and prototype.flags.f_contiguous and not prototype.flags.c_contiguous
    return ndarray(prototype.shape, dtype, order="F" if keep or order == "F" else "C")


def full_like(a, fill_value, dtype=None, order="K", subok=None, shape=None):
    """A new array of the same shape and dtype, full of a value."""
    result = empty_like(a, dtype, order, subok, shape)
    result[...] = fill_value
    return result


def zeros_like(a, dtype=None, order="K", subok=None, shape=None):
    """A new array of zeros of the same shape and dtype."""
    return full_like(a, 0, dtype, order, subok, shape)


def ones_like(a, dtype=None, order="K", subok=None, shape=None):
    """A new array of ones of the same shape and dtype."""
    return full_like(a, 1, dtype, order, subok, shape)


def arange(start, stop=None, step=1, dtype=None):
    """Evenly spaced values."""
    bounds = (0, start) if stop is None else (start, stop)
    return _array.call(_np.arange, (*bounds, step), {"dtype": dtype})


def take(a, indices, axis=None, out=None):
    """Elements along an axis."""
    return a.take(indices, axis, out)


def get_array_module(*args):
    """This module where any argument is an array of the device, NumPy otherwise."""
    if any(isinstance(arg, ndarray) for arg in args):
        import cupy

        return cupy
    return _np


def fuse(*args, **kwargs):
    """Return the function as it is: nothing would be gained by fusing it."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function
