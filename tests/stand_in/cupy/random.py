"""Random numbers on the device, from NumPy's generators. They are others than CuPy's."""

from __future__ import annotations

import numpy as _np

from . import _array
from .cuda import _machine

_NAMES = frozenset(
    (
        "normal",
        "permutation",
        "rand",
        "randint",
        "randn",
        "random",
        "random_sample",
        "standard_normal",
        "uniform",
    )
)
_state = _np.random.RandomState()  # one of its own: drawing here changes nothing that NumPy draws


class _Generator:
    """The part of CuPy's Generator that is here."""

    def __init__(self, seed):
        self._inner = _np.random.default_rng(seed)

    def random(self, size=None, dtype=_np.float64, out=None):
        """Uniform numbers in [0, 1)."""
        return _out(_array.call(self._inner.random, (size, dtype), {}), out)

    def standard_normal(self, size=None, dtype=_np.float64, out=None):
        """Normal numbers."""
        return _out(_array.call(self._inner.standard_normal, (size, dtype), {}), out)

    def integers(self, low, high=None, size=None, dtype=_np.int64, endpoint=False):
        """Integers from a range."""
        return _array.call(self._inner.integers, (low, high, size, dtype, endpoint), {})

    def uniform(self, low=0.0, high=1.0, size=None, dtype=_np.float64):
        """Uniform numbers in a range."""
        return _array.call(self._inner.uniform, (low, high, size), {}).astype(dtype, copy=False)


def _out(result, out):
    if out is None:
        return result
    out[...] = result
    return out


def default_rng(seed=None):
    """A generator."""
    return _Generator(seed)


def seed(seed=None):
    """Start the module's own generator anew."""
    _machine.check()
    _state.seed(seed)


def __getattr__(name):
    if name not in _NAMES:
        raise AttributeError(f"module 'cupy.random' has no attribute '{name}'")
    function = getattr(_state, name)

    def delegate(*args, dtype=None, **kwargs):
        result = _array.call(function, args, kwargs)
        return result if dtype is None else result.astype(dtype, copy=False)

    return delegate
