"""Why something cannot be sent to the workers: which function, which of its objects, what to do."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from ...errors import InvalidType, UsageError
from ...messages import FunctionSpec
from ...packing.kinds import NAME
from ...packing.pickles import Writer
from ...packing.refused import advice
from ...values.arrays import shortened
from ...values.foreign import is_numba
from .walk import Found, Registry

_PICKLE_RAISES = (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError)

_ADVICE = "Create such an object inside the function, or pass what it is made of as an argument."


def explain(error: Exception, specs: Mapping[int, FunctionSpec], found: Iterable[Found]) -> None:
    """Raise an InvalidType that names the function among *specs*, or the object that was *found*, that
    cannot be pickled."""
    for spec in specs.values():
        _explain_function(spec, error, found)
    if isinstance(error, UsageError):
        return
    new = {id(each.obj): each for each in found if each.known is None}
    failing = {
        ident: each
        for ident, each in new.items()
        if not _pickles(each.contents if each.kind is NAME else each.obj)
    }
    for each in failing.values():
        if each.kind is not NAME and not any(
            ident in failing for some in each.inner.values() for ident in some
        ):
            raise InvalidType(
                f"{each.path!r}, {shortened(each.obj)}, which a function uses, cannot be sent to the "
                f"workers: {_reason(error)}. {advice(each.obj) or _ADVICE}"
            ) from error
    if isinstance(error, _PICKLE_RAISES):
        raise InvalidType(
            f"what a function uses cannot be sent to the workers: {_reason(error)}. {_ADVICE}"
        ) from error


def _explain_function(spec: FunctionSpec, error: Exception, found: Iterable[Found]) -> None:
    if _pickles(spec.fn):
        return
    if isinstance(error, InvalidType):  # it says itself what to do
        raise InvalidType(
            f"the function {spec.name!r} cannot be sent to the workers: {error}"
        ) from error
    where, culprit = "", spec.fn
    while not advice(culprit):
        failing = ((where, part) for where, part in _parts(culprit) if not _pickles(part))
        way, part = next(failing, ("", None))
        if part is None:
            break
        of = f" (of {culprit.__name__!r})" if where else ""
        where, culprit = f"{way}{of}", part
        if not inspect.isfunction(part):
            break
    subject = f"{where}, {shortened(culprit)}," if where else "it"
    raise InvalidType(
        f"the function {spec.name!r} cannot be sent to the workers: {subject} cannot be pickled "
        f"({_reason(error)}). {advice(culprit) or _ADVICE}"
    ) from error


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"


def _pickles(value: Any) -> bool:
    registry = Registry(count().__next__, lambda owner, number: None)
    writer = Writer({}, registry.space, registry.current, _compiled)
    try:
        writer.write(value)
    except Exception:
        return False
    return True


def _compiled(fn: Any) -> Any:
    assert is_numba(fn)
    return NotImplemented


def _parts(fn: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a callable carries along, each with its name in a sentence."""
    for name in ("__self__", "func"):  # a bound method's object, a partial's function
        if hasattr(fn, name):
            part = getattr(fn, name)
            yield f"its {name}", part
            yield from _parts(part)
    for index, value in enumerate(getattr(fn, "args", ())):
        yield f"its argument {index}", value
    for name, value in getattr(fn, "keywords", {}).items():
        yield f"its argument {name!r}", value
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        used = inspect.getclosurevars(fn)
        for name, value in used.nonlocals.items():
            yield f"the variable {name!r} that it closes over", value
        for name, value in used.globals.items():
            yield f"the global variable {name!r} that it uses", value
    else:
        for name, value in getattr(fn, "__dict__", {}).items():
            yield f"its attribute {name!r}", value
    for index, value in enumerate(getattr(fn, "__defaults__", None) or ()):
        yield f"the default of its parameter {index}", value
