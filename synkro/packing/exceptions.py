"""A worker's exception, and its classes, on their way to the main process."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any

from ..errors import Parts, joined
from ..values.foreign import is_outcome
from .pickles import Loader, dumped

_LIMIT = 1 << 16  # bytes that a pickled exception may have


# ── in the worker ────────────────────────────────────────────────────────────────────────────────────


def pickled(error: BaseException) -> bytes | None:
    """The exception, pickled; None if it cannot be unpickled again, or is too long."""
    for form in (_Outcome(error),) if is_outcome(error) else (error, Parts(error)):
        try:
            data: bytes = dumped(form, there=True)
            again = _Familiar(io.BytesIO(data)).load()
        except BaseException:
            continue
        if type(again) is type(error) and len(data) <= _LIMIT:
            return data
    return None


class _Outcome(Parts):
    """Pickles an exception of pytest's, whose class says of itself that it is a builtin."""

    def __reduce__(self) -> Any:
        return _outcome, (type(self.error).__name__, self.error.args, vars(self.error))


def _outcome(name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    return joined(getattr(sys.modules["_pytest.outcomes"], name), args, attributes)


def kinds(error: BaseException) -> tuple[bytes, ...]:
    """The classes of the exception, the nearest first, each pickled by itself."""
    found = []
    for kind in type(error).__mro__[: -len(BaseException.__mro__)]:
        with contextlib.suppress(BaseException):
            found.append(dumped(kind, there=True))
    return tuple(found)


# ── in the main process ──────────────────────────────────────────────────────────────────────────────


def unpickled(data: bytes) -> Any:
    """The exception, or the class, in *data*; None if its modules are not imported here."""
    with contextlib.suppress(Exception):
        return _Familiar(io.BytesIO(data)).load()
    return None


class _Familiar(Loader):
    """Loads an exception only if its modules are imported here already.

    An error of CuPy's would otherwise import CuPy, and so CUDA, into the main process.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules:
            raise ImportError(f"{module} is not imported here")
        return super().find_class(module, name)
