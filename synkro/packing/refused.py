"""What cannot be sent to the workers, and what to do instead."""

from __future__ import annotations

import io
from types import GeneratorType
from typing import Any

_ADVICE = {
    "torch.jit": "Send the plain function or module; or save it with torch.jit.save, and load it in the "
    "function.",
    "jax._src.stages": "Send the function that jax.jit has made: every worker compiles it once.",
    "pmap": "Send the plain function, or what jax.jit makes of it: the workers are the parallel map.",
    "compiled": "Send the plain function, and compile it there, at its first call; or decorate it with "
    "torch.compile in a module, which the workers import.",
    "generator": "Make a list of it first, or make it inside the function.",
    "file": "Open it inside the function, and send its path.",
}


def is_open_file(value: Any) -> bool:
    """Whether *value* is a file; cloudpickle would quietly send its contents."""
    return isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO)


def is_parallel_map(value: Any) -> bool:
    """Whether *value* is what ``jax.pmap`` makes: a worker has one device to map over."""
    return _kind(value) == "pmap"


def advice(value: Any) -> str | None:
    """What to do instead of sending *value*, a sentence; None if no more is known than of any object."""
    return _ADVICE.get(_kind(value))


def _kind(value: Any) -> str:
    if isinstance(value, GeneratorType):
        return "generator"
    if is_open_file(value):
        return "file"
    if hasattr(value, "_torchdynamo_orig_callable"):
        return "compiled"
    if getattr(value, "__globals__", {}).get("__name__") == "jax._src.pmap":
        return "pmap"
    home = type(value).__module__
    return "torch.jit" if home.startswith("torch.jit") else home
