"""What to do after an error that comes of mixing arrays of the host and of the GPU."""

from __future__ import annotations

import re


def hint(error: BaseException) -> str:
    """What to do about *error*, in brackets, or an empty text."""
    for (kind, words), what in _HINTS.items():
        if isinstance(error, kind) and words in str(error):
            return f" ({what})"
    return ""


def shorten(error: BaseException) -> None:
    """JAX's error about an argument prints all of it: have it print less than a line."""
    if len(error.args) == 1 and isinstance(text := error.args[0], str):
        error.args = (_ARGUMENT.sub(r"Argument '\1…' of type", text),)


_ARGUMENT = re.compile(r"\AArgument '([^\n]{1,60})[^\0]*' of type")

_HINTS = {
    (TypeError, "is not a valid JAX type"): (
        "a function of JAX's got an array of CuPy's: annotate the argument, def f(x: jax.Array), or "
        "make a Synkro function of the jitted one, synkro.function(jax.jit(…))"
    ),
    (TypeError, "numpy.ndarray"): (
        "a NumPy array met one on the GPU: make constants with synkro.xp().asarray(…), or broadcast "
        "them, and use .value of variables"
    ),
    (ValueError, "non-scalar numpy.ndarray"): (
        "a NumPy array cannot be written to one on the GPU: take synkro.xp().asarray(…) of it first"
    ),
    (TypeError, "conversion to a NumPy array"): (
        "a function for NumPy arrays got one on the GPU: take it from synkro.xp(), or copy the array "
        "with .get()"
    ),
    (Exception, "Cannot determine Numba type of <class 'cupy"): (
        "numba compiles for the CPU: copy the array, with .get()"
    ),
    (RuntimeError, "tensors to be on the same device"): (
        "modules that a function brings along are moved to the GPU, tensors are not: move them, with "
        ".to(x.device), or make them arguments"
    ),
}
"""By the class of an error and words in its text: what to do about it."""
