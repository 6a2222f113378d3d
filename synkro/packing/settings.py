"""Settings of Python, and of libraries, that functions use: the workers take them over.

A worker is a fresh interpreter, without what the main process has changed at run time (how deep calls
may nest, what is logged and warned of, JAX's 64-bit mode, PyTensor's floatX, PyTorch's default dtype).
Here these settings are read from the imported libraries, and set in the worker: in libraries that it has
imported, and for the others in the environment variables that they read when they are imported.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

JAX = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
PYTENSOR = ("floatX", "mode", "linker", "optimizer", "cxx", "on_unused_input", "cast_policy")

PYTHON = [get for get in ("getrecursionlimit", "get_int_max_str_digits") if hasattr(sys, get)]
"""Functions of ``sys`` that read settings; older ones of Python 3.10 lack the last one."""

_GETTERS = [getattr(sys, get) for get in PYTHON]

_FLAGS = "PYTENSOR_FLAGS"

_MARK: Any = "synkro"  # a key in a cache of logging's, which it clears as levels change

_levelled: set[str] = set()  # on a worker: the loggers whose levels were set here


def collected() -> dict[str, dict[str, Any]]:
    """The settings of Python, and of the libraries that this process has imported, by library."""
    setters = [get.replace("get", "set") for get in PYTHON]
    found: dict[str, dict[str, Any]] = {"sys": dict(zip(setters, _of_python(), strict=True))}
    found["warnings"] = {"filters": [_described(each) for each in warnings.filters]}
    if logging := sys.modules.get("logging"):
        manager = logging.root.manager
        there = [each for each in [*manager.loggerDict.values()] if getattr(each, "level", 0)]
        levels = {"": logging.root.level, **{each.name: each.level for each in there}}
        own = {each.name for each in there if type(each) is not logging.Logger}
        found["logging"] = {"levels": levels, "disable": manager.disable, "own": own}
    for library, names in (("jax", JAX), ("pytensor", PYTENSOR)):
        config = getattr(sys.modules.get(library), "config", None)
        if config is not None:
            values = {name: getattr(config, name, None) for name in names}
            found[library] = {n: v for n, v in values.items() if isinstance(v, bool | int | float | str)}
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_default_dtype() is not torch.float32:
        found["torch"] = {"default_dtype": str(torch.get_default_dtype()).removeprefix("torch.")}
    return found


def changing() -> list[Any]:
    """The settings that programs may change between calls and that change what a call does."""
    modules = sys.modules
    found = _of_python()
    found.append([*warnings.filters])
    if (logging := modules.get("logging")) is not None:
        cache = logging.root._cache
        found.append(cache.get(_MARK) or cache.setdefault(_MARK, object()))
    if (jax := modules.get("jax")) is not None:
        found += [getattr(jax.config, name, None) for name in JAX]
    if (torch := modules.get("torch")) is not None:
        found.append(torch.get_default_dtype())
    return found


def _of_python() -> list[Any]:
    return [get() for get in _GETTERS]


def _described(each: Any) -> tuple[Any, ...]:
    """A filter of warnings, by the module and the name of its category: nothing is imported for it."""
    action, message, kind, module, line = each
    return action, _pattern(message), (kind.__module__, kind.__qualname__), _pattern(module), line


def _pattern(text: Any) -> str:
    """The pattern of a text that is to be the whole, or of a compiled pattern; None is in all."""
    return re.escape(text) + r"\Z" if isinstance(text, str) else getattr(text, "pattern", "")


class _NamedCategory(type):
    """The class of a category of warnings that is known by its name."""

    named: tuple[str, str]

    def __subclasscheck__(cls, other: type) -> bool:
        return any((kind.__module__, kind.__qualname__) == cls.named for kind in other.__mro__)


@functools.cache
def _category(module: str, name: str) -> Any:
    """The category of this name, which nobody may have imported yet."""
    return _NamedCategory(name, (Warning,), {"named": (module, name)})


def _set_filters(filters: list[tuple[Any, ...]]) -> None:
    warnings.resetwarnings()
    for action, message, named, module, line in filters:
        warnings.filterwarnings(action, message, _category(*named), module, line, append=True)


def _set_levels(levels: dict[str, int], disable: int, own: set[str]) -> None:
    """Have loggers these levels, by name, and others none that had one of the main process's.

    Loggers of a class of their *own* are left to the module that makes them, as long as it has not.
    """
    logging = importlib.import_module("logging")
    missing = own.difference(logging.root.manager.loggerDict)
    levels = {name: level for name, level in levels.items() if name not in missing}
    for name in _levelled.difference(levels):
        logging.getLogger(name).setLevel(logging.NOTSET)
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)
    logging.disable(disable)
    _levelled.clear()
    _levelled.update(levels)


_initializing: list[None] = []


@contextlib.contextmanager
def initializing() -> Iterator[None]:
    """In the block this worker's initializer runs, which may say where the worker is to log, too."""
    _initializing.append(None)
    try:
        yield
    finally:
        _initializing.pop()


def is_initializing() -> bool:
    """Whether an initializer runs."""
    return bool(_initializing)


_taken_over: dict[str, dict[str, Any]] = {}


def take_over(settings: dict[str, dict[str, Any]]) -> None:
    """Set in this worker what the main process has, as long as no task brings others."""
    apply(settings)
    _taken_over.clear()
    _taken_over.update(settings)


def take_back() -> None:
    """Set again what was taken over."""
    apply(_taken_over)


def apply(settings: dict[str, dict[str, Any]]) -> None:
    """Set in this worker what ``collected`` found in the main process."""
    for put, value in settings.get("sys", {}).items():
        with contextlib.suppress(RecursionError):  # it is less deep than this
            getattr(sys, put)(value)
    if "warnings" in settings:
        _set_filters(**settings["warnings"])
    if "logging" in settings:
        _set_levels(**settings["logging"])
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
