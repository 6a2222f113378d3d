"""Settings of Python, and of libraries, that functions use: the workers take them over.

A worker is a fresh interpreter, without what the main process has changed at run time (how deep calls
may nest, JAX's 64-bit mode, PyTensor's floatX, PyTorch's default dtype).  Here these settings are read
from the imported libraries, and set in the worker: in libraries that it has imported, and for the
others in the environment variables that they read when they are imported.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import Any

JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
PYTENSOR = ("floatX", "mode", "linker", "optimizer", "cxx", "on_unused_input", "cast_policy")

PYTHON = [get for get in ("getrecursionlimit", "get_int_max_str_digits") if hasattr(sys, get)]
"""Functions of ``sys`` that read settings; older ones of Python 3.10 lack the last one."""

_FLAGS = "PYTENSOR_FLAGS"


def collected() -> dict[str, dict[str, Any]]:
    """The settings of Python, and of the libraries that this process has imported, by library."""
    setters = [get.replace("get", "set") for get in PYTHON]
    found = {"sys": dict(zip(setters, _of_python(), strict=True))}
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
    found = _of_python()
    if jax is not None:
        found += [getattr(jax.config, name, None) for name in JAX]
    if torch is not None:
        found.append(torch.get_default_dtype())
    return tuple(found)


def _of_python() -> list[Any]:
    return [getattr(sys, get)() for get in PYTHON]


def apply(settings: dict[str, dict[str, Any]]) -> None:
    """Set in this worker what ``collected`` found in the main process."""
    for put, value in settings.get("sys", {}).items():
        with contextlib.suppress(RecursionError):  # it is less deep than this
            getattr(sys, put)(value)
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
