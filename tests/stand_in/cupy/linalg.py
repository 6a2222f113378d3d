"""Linear algebra, by NumPy."""

from __future__ import annotations

import numpy as _np
from numpy.linalg import LinAlgError

from . import _array, _names

__all__ = ["LinAlgError"]


def __getattr__(name):
    if name not in _names.LINALG:
        raise AttributeError(f"module 'cupy.linalg' has no attribute '{name}'")
    function = getattr(_np.linalg, name)

    def delegate(*args, **kwargs):
        return _array.call(function, args, kwargs)

    return delegate
