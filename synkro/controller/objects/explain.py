"""Why something cannot be sent to the workers: which function, which of its objects, what to do."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from types import ModuleType
from typing import Any

from ...errors import InvalidType, UsageError, WorkerError
from ...messages import FunctionSpec
from ...packing.code import is_own_name
from ...packing.kinds import NAME
from ...packing.pickles import Reader, Writer
from ...packing.refused import advice, advice_on_loading
from ...values.arrays import shortened
from ...values.foreign import is_numba
from .walk import Found, Registry

_PICKLE_RAISES = (TypeError, ValueError, RuntimeError, AttributeError, pickle.PicklingError)

_ADVICE = "Create such an object inside the function, or pass what it is made of as an argument."


def explain(error: Exception, specs: Mapping[int, FunctionSpec], found: Iterable[Found]) -> None:
    """Raise an InvalidType that names the function among *specs*, or the object that was *found*, that
    cannot be pickled."""
    for spec in specs.values():
        if isinstance(error, InvalidType) and _pickling(spec.fn) is not None:  # it says what to do
            raise InvalidType(
                f"the function {spec.name!r} cannot be sent to the workers: {error}"
            ) from error
        _explain_function(spec, _pickling, "cannot be pickled")
    if isinstance(error, UsageError):
        return
    _explain_object(found, _pickling, "")
    if isinstance(error, _PICKLE_RAISES):
        raise InvalidType(
            f"what a function uses cannot be sent to the workers: {_reason(error)}. {_ADVICE}"
        ) from error


def explain_loading(
    error: WorkerError, specs: Mapping[int, FunctionSpec], found: Iterable[Found]
) -> None:
    """As ``explain``, of what was pickled, and which the workers could not make again."""

    def loading(value: Any) -> Exception | None:
        why = _loading(value)
        return why if isinstance(error, type(why)) else None  # it may be one rank's own failure

    for spec in specs.values():
        _explain_function(spec, loading, "pickles here, and cannot be made again there")
    _explain_object(found, loading, "it pickles here, and cannot be made again there: ")


Trial = Callable[[Any], Exception | None]
"""What is tried with a value: returns what was raised."""


def _explain_object(found: Iterable[Found], tried: Trial, how: str) -> None:
    new = {id(each.obj): each for each in found if each.known is None}
    failing = {}
    for ident, each in new.items():
        why = tried(each.contents if each.kind is NAME else each.obj)
        if why is not None:
            failing[ident] = each, why
    for each, why in failing.values():
        if each.kind is not NAME and not any(
            ident in failing for some in each.inner.values() for ident in some
        ):
            raise InvalidType(
                f"{each.path!r}, {shortened(each.obj)}, which a function uses, cannot be sent to the "
                f"workers: {how}{_reason(why)}. {_advice(each.obj, why, tried)}"
            ) from why


def _explain_function(spec: FunctionSpec, tried: Trial, how: str) -> None:
    why = tried(spec.fn)
    if why is None:
        return
    where, culprit = "", spec.fn
    while not advice(culprit):
        failing = ((where, part, tried(part)) for where, part in _parts(culprit))
        way, part, inner = next((each for each in failing if each[2] is not None), ("", None, None))
        if inner is None:
            break
        of = f" (of {culprit.__name__!r})" if where else ""
        where, culprit, why = f"{way}{of}", part, inner
        if not inspect.isfunction(part):
            break
    subject = f"{where}, {shortened(culprit)}," if where else "it"
    raise InvalidType(
        f"the function {spec.name!r} cannot be sent to the workers: {subject} {how} ({_reason(why)}). "
        f"{_advice(culprit, why, tried)}"
    ) from why


def _advice(culprit: Any, why: Exception, tried: Trial) -> str:
    last = _ADVICE if tried is _pickling else advice_on_loading(why, is_result=False)
    return advice(culprit) or last


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0].rstrip('.')}"


def _written(value: Any) -> Writer:
    registry = Registry(count().__next__, lambda owner, number: None)
    writer = Writer({}, registry.space, registry.current, _compiled)
    writer.write(value)
    return writer


def _pickling(value: Any) -> Exception | None:
    try:
        _written(value)
    except Exception as error:
        return error
    return None


def _loading(value: Any) -> Exception | None:
    """Load it as a worker does, which has nothing of the program's."""
    try:
        writer = _written(value)
        _Stranger(writer.stream, writer.buffers, {}, lambda number, name, *_: ModuleType(name)).load()
    except Exception as error:
        return error
    return None


class _Stranger(Reader):
    """Loads what a worker could load, and no class of the program's becomes another one by that."""

    def find_class(self, module: str, name: str) -> Any:
        if is_own_name(module) or module == "__main__":
            raise AttributeError(f"{name!r} is a name of the program's, and not of the workers'")
        found = super().find_class(module, name)
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):  # those known here are not to change
            return lambda *parts: found(*parts[:-2], None, parts[-1])
        return found


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
    if inspect.isfunction(fn):
        for name, value in inspect.get_annotations(fn).items():
            yield f"the annotation of {name!r}", value
