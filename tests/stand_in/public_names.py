"""Print as JSON what a CuPy, the real one or the stand-in, has to offer: for comparing the two.

Run by a Python that finds one of them.
"""

import importlib
import inspect
import json
import re
import types

MODULES = ["cupy", "cupy.linalg", "cupy.random", "cupy.cuda"]
MODULES += [
    f"cupy.cuda.{name}" for name in ("device", "memory", "nccl", "pinned_memory", "runtime", "stream")
]


def lent():
    """The names that the stand-in takes from NumPy only when somebody asks for them."""
    try:
        from cupy import _names
    except ImportError:
        return {}
    return {"cupy": _names.UFUNCS | _names.FUNCTIONS | _names.SHARED, "cupy.linalg": _names.LINALG}


def described(name, more=()):
    """The public names of a module and of its classes, each with its parameters where they are known."""

    def parameters(value):
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
        return (getattr(value, "__module__", None) or "").startswith("cupy")

    found = {}
    module = importlib.import_module(name)
    for public in {*dir(module), *more}:
        value = getattr(module, public, None)
        if public.startswith("_") or isinstance(value, types.ModuleType) or public == "annotations":
            continue
        if not isinstance(value, type):
            found[public] = parameters(value) if callable(value) else None
        elif ours(value):
            found[public] = None
            for attribute in {key for base in value.__mro__ if ours(base) for key in vars(base)}:
                if not attribute.startswith("_"):
                    method = getattr(value, attribute)
                    found[f"{public}.{attribute}"] = parameters(method) if callable(method) else None
    return found


if __name__ == "__main__":
    print(json.dumps({name: described(name, lent().get(name, ())) for name in MODULES}))
