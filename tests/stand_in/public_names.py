"""Print as JSON what a CuPy, the real one or the stand-in, has to offer: for comparing the two.

Run by a Python that finds one of them.  The arguments are expressions such as
``cupy.cuda.Device().mem_info``; those that name something which is not there are printed, too.
"""

import contextlib
import importlib
import inspect
import json
import re
import sys
import types

MODULES = ["cupy", "cupy.linalg", "cupy.random", "cupy.cuda"]
MODULES += [
    f"cupy.cuda.{name}" for name in ("device", "memory", "nccl", "pinned_memory", "runtime", "stream")
]

RETURNED = {"get_current_stream": "Stream", "get_default_memory_pool": "MemoryPool"}
"""Of which class of ``made`` the results of functions are."""


def lent():
    """The names that the stand-in takes from NumPy only when somebody asks for them."""
    try:
        from cupy import _names
    except ImportError:
        return {}
    return {"cupy": _names.UFUNCS | _names.FUNCTIONS | _names.SHARED, "cupy.linalg": _names.LINALG}


def parameters(value):
    """The names of the parameters of a function or class, or None where they are not known."""
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        line = (getattr(value, "__doc__", None) or "").strip().split("\n")[0]
        inside = re.match(r"[\w.]+\((.*?)\)( ->.*)?$", line)
        if inside is None or not inside[1]:
            return None
        words = [part.split("=")[0].split() for part in inside[1].split(",")]
        return [word[-1].lstrip("*") for word in words if word[-1] not in ("/", "*")]


def ours(value):
    """Whether a class or function is of CuPy."""
    return (getattr(value, "__module__", None) or "").startswith("cupy")


def made():
    """One object of every class that can be made without a driver, by module and class."""
    import cupy
    from cupy.cuda import nccl, runtime

    memory = cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    pinned = cupy.cuda.alloc_pinned_memory(0)
    objects = [memory, pointer, pinned, pinned.mem, cupy.ndarray((3,), "f4", pointer), cupy.add]
    objects += [cupy.cuda.Device(0), cupy.cuda.Stream.null, cupy.cuda.MemoryPool()]
    event = cupy.cuda.Event.__new__(cupy.cuda.Event)
    with contextlib.suppress(runtime.CUDARuntimeError):
        event.__init__()  # its handle is there before the driver is asked
    objects += [
        event,
        nccl.NcclError(1),
        runtime.CUDARuntimeError(1),
        cupy.cuda.memory.OutOfMemoryError(1, 2),
    ]
    return {type(each).__name__: each for each in objects}


def described(name, more=()):
    """The public names of a module and of its classes, with what can be said of each.

    Of a class these are the built-in classes that it is made of, and what its objects can do: take
    attributes of any name, be referred to weakly, be keys.
    """
    found = {}
    module = importlib.import_module(name)
    for public in {*dir(module), *more}:
        value = getattr(module, public, None)
        if (public.startswith("_") and public != "__version__") or public == "annotations":
            continue
        if isinstance(value, types.ModuleType):
            continue
        if not isinstance(value, type):
            found[public] = {"callable": callable(value)}
            if callable(value):
                found[public]["parameters"] = parameters(value)
            elif type(value) in (int, bool, str):
                found[public]["value"] = value
        elif ours(value):
            found[public] = {
                "callable": True,
                "parameters": parameters(value),
                "bases": [base.__name__ for base in value.__mro__ if base.__module__ == "builtins"],
                "abilities": {
                    "attributes": bool(value.__dictoffset__),
                    "weak references": bool(value.__weakrefoffset__),
                    "hash": value.__hash__ is not None,
                },
            }
            for attribute in {key for base in value.__mro__ if ours(base) for key in vars(base)}:
                if not attribute.startswith("_"):
                    method = getattr(value, attribute)
                    found[f"{public}.{attribute}"] = {"callable": callable(method)}
                    if callable(method):
                        found[f"{public}.{attribute}"]["parameters"] = parameters(method)
    return found


def there(expression):
    """Whether an expression names something, up to the first call whose result nobody knows.

    Where a class is called, its objects have what it has.
    """
    value = importlib.import_module("cupy")
    for part in expression.split(".")[1:]:
        name = part.removesuffix("()")
        if isinstance(value, types.ModuleType):
            if not hasattr(value, name):
                try:
                    importlib.import_module(f"{value.__name__}.{name}")  # as nccl
                except ImportError:
                    return False
        elif name not in dir(made().get(getattr(value, "__name__", ""), value)):
            return False
        value = getattr(value, name, None)
        if part != name and not isinstance(value, type):
            if name not in RETURNED:
                return True
            value = made()[RETURNED[name]]
    return True


if __name__ == "__main__":
    facts = {
        "names": {name: described(name, lent().get(name, ())) for name in MODULES},
        "given": {name: [*getattr(thing, "__dict__", ())] for name, thing in made().items()},
        "attributes": {name: dir(thing) for name, thing in made().items()},
        "missing": [expression for expression in sys.argv[1:] if not there(expression)],
    }
    print(json.dumps(facts))
