"""A worker's exception, and its classes, on their way to the main process."""

from __future__ import annotations

import contextlib
import io
import pickle
import sys
from typing import Any

import cloudpickle

from ..errors import Parts

_LIMIT = 1 << 16  # bytes that a pickled exception may have


# ── in the worker ────────────────────────────────────────────────────────────────────────────────────


def packed(error: BaseException) -> bytes | None:
    """The exception, pickled; None if it cannot be unpickled again, or is too long."""
    for form in (error, Parts(error)):
        try:
            data: bytes = cloudpickle.dumps(form)
            again = _Familiar(io.BytesIO(data)).load()
        except BaseException:
            continue
        if type(again) is type(error) and len(data) <= _LIMIT:
            return data
    return None


def kinds(error: BaseException) -> tuple[bytes, ...]:
    """The classes of the exception, the nearest first, each pickled by itself."""
    found = []
    for kind in type(error).__mro__[: -len(BaseException.__mro__)]:
        with contextlib.suppress(BaseException):
            found.append(cloudpickle.dumps(kind))
    return tuple(found)


# ── in the main process ──────────────────────────────────────────────────────────────────────────────


def loaded(data: bytes) -> Any:
    """The exception, or the class, in *data*; None if its modules are not imported here."""
    with contextlib.suppress(Exception):
        return _Familiar(io.BytesIO(data)).load()
    return None


class _Familiar(pickle.Unpickler):
    """Loads an exception only if its modules are imported here already.

    An error of CuPy's would otherwise import CuPy, and so CUDA, into the main process.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise ImportError(f"{module} is not imported here")
        found = super().find_class(module, name)
        if (module, name) != ("cloudpickle.cloudpickle", "_class_setstate"):
            return found

        def set_unless_known(kind: type, state: Any) -> type:
            """Leave a class that this process has: its methods would become copies of the other's."""
            known = vars(kind).keys() >= state[0].keys()
            return kind if known else found(kind, state)

        return set_unless_known
