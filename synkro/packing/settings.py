"""Settings of libraries that functions use, which the workers take over from the main process.

A worker is a fresh interpreter, without what the main process has changed at run time (JAX's 64-bit
mode, PyTensor's floatX, PyTorch's default dtype).  Here these settings are read from the imported
libraries, and set in the worker: in libraries that it has imported, and for the others in the
environment variables that they read when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
PYTENSOR = ("floatX", "mode", "linker", "optimizer", "cxx", "on_unused_input", "cast_policy")

_FLAGS = "PYTENSOR_FLAGS"


def collected() -> dict[str, dict[str, Any]]:
    """The settings of the libraries that this process has imported, by library."""
    found = {}
    for library, names in (("jax", JAX), ("pytensor", PYTENSOR)):
        config = getattr(sys.modules.get(library), "config", None)
        if config is not None:
            values = {name: getattr(config, name, None) for name in names}
            found[library] = {n: v for n, v in values.items() if isinstance(v, bool | int | float | str)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() is not torch.float32:
        found["torch"] = {"default_dtype": str(torch.get_default_dtype()).removeprefix("torch.")}
    return found


def changing() -> tuple[Any, ...]:
    """The settings that programs may change between calls and that change what a call computes."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")
    if jax is None and torch is None:
        return ()
    found = [] if jax is None else [getattr(jax.config, name, None) for name in JAX]
    return tuple(found) if torch is None else (*found, torch.get_default_dtype())


def apply(settings: dict[str, dict[str, Any]]) -> None:
    """Set in this worker what ``collected`` found in the main process."""
    if "torch" in settings or "torch" in sys.modules:
        torch = importlib.import_module("torch")
        name = settings.get("torch", {}).get("default_dtype", "float32")
        torch.set_default_dtype(getattr(torch, name))
    for name, value in settings.get("jax", {}).items():
        os.environ[name.upper()] = str(value)
        if "jax" in sys.modules:
            sys.modules["jax"].config.update(name, value)
    flags = settings.get("pytensor", {})
    if flags:
        listed = ",".join(f"{name}={value}" for name, value in flags.items() if value != "")
        before = os.environ.get(_FLAGS, "")
        if not before.endswith(listed):
            os.environ[_FLAGS] = f"{before},{listed}".lstrip(",")
    if "pytensor" in sys.modules:
        for name, value in flags.items():
            with contextlib.suppress(Exception):  # what can be set only once
                setattr(sys.modules["pytensor"].config, name, value)
