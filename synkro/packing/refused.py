"""What cannot be sent to the workers, and what to do instead."""

from __future__ import annotations

import io
import re
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
    "h5py": "Give a dataset to the function as an argument, synk.data(dataset): each worker reads its "
    "rows; or open the file in the function, by its path.",
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


def advice_on_loading(error: Exception) -> str:
    """What to do about a value that could be pickled, and not be unpickled: a sentence."""
    made = re.search(r"(\w+)\.__(init|new)__\(\)", str(error))
    if made is None:
        return "Return what it is made of, or mend the __reduce__ of its class."
    return (
        f"Python makes an exception again from its class and its args alone: return repr(error), or "
        f"give {made[1]} a __reduce__ with all that its __{made[2]}__ takes."
    )


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
    if home.startswith("h5py."):
        return "h5py"
    return "torch.jit" if home.startswith("torch.jit") else home
