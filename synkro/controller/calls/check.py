"""``check``: a call beside the plain function on the same rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...errors import InvalidValue, OutputError, UsageError, WorkerError, cut, too_deep
from ...messages import Preserve
from ...packing.kinds import attributes_of, slots_of
from ...plan.outputs import describe, flatten, leaf_modes, leaf_paths
from ...values.arrays import is_numeric
from ...values.foreign import host_array, offers
from ..engine.engine import Engine, State
from ..objects.known import reached
from ..variables.shared import Shared
from .distribution import SentFunction

_TOLERANCES = {8: 1e-7, 16: 1e-7, 4: 1e-4, 2: 1e-2}
"""By the bytes of a float: how far, relative to the largest element, two results may be apart."""

_REASONS = {
    "mean": "it is no mean over rows: a standard deviation, a median or a ratio of sums is none",
    "sum": "it is no sum over rows: a constant, say, is added by every rank",
    "prod": "it is no product over rows",
    "max": "it is no maximum over rows: the place of a maximum is none",
    "min": "it is no minimum over rows: the place of a minimum is none",
    "gather": "what it computes for a row depends on other rows: a sort, say, or a mean over rows that "
    "is subtracted",
}


@contextlib.contextmanager
def preserved(engine: Engine, function: SentFunction) -> Iterator[Callable[[], Any]]:
    """A block in which the workers keep what *function* can change.

    Yields what puts it back; after an exception it is put back, too.
    """
    numbers = tuple(known.number for known in reached(function.roots))
    engine.run(Preserve(numbers, restore=False, keep=True))
    try:
        yield lambda: engine.run(Preserve(numbers, restore=True, keep=True))
    except BaseException:
        if engine.state is State.READY:
            engine.run(Preserve((), restore=True, keep=False))
        raise
    engine.run(Preserve((), restore=False, keep=False))


def compare(name: str, modes: Any, result: Any, plain: Any) -> None:
    """Compare the *result* of a call, reduced by *modes*, with that of the *plain* function.

    Raises: OutputError for the output of the function *name* that differs most, if one does.
    """
    if isinstance(modes, tuple | list | dict) and not modes:  # nothing is returned
        return
    if modes is None or (isinstance(modes, tuple | list) and None in modes):
        raise InvalidValue(
            "check() compares outputs of which there is one for all rows: with outputs=None, the list "
            "of every rank's value, there is none."
        )
    called = f"output of the function {name!r}"
    try:
        opened = _opened(_gathered(result), _gathered(plain))
    except RecursionError:
        raise too_deep(called, OutputError) from None
    (leaves, tree), (expected, shape) = (flatten(each, called=called) for each in opened)
    if tree != shape:
        raise OutputError(
            f"check() of the function {name!r}: the call returns {describe(tree)}, the plain function "
            f"{describe(shape)}."
        )
    columns = leaf_paths(tree), leaf_modes(modes, tree), map(_array, leaves), map(_array, expected)
    outputs = zip(*columns, strict=True)
    if problems := [problem for each in outputs if (problem := _difference(name, *each))]:
        raise OutputError(max(problems)[1])


def raise_refusal(error: WorkerError) -> None:
    """Raises: the reason why check() cannot be used, if that is why the plain run failed."""
    original = error.original
    if isinstance(original, UsageError) and str(original).startswith("check()"):
        raise original from error


def _gathered(value: Any) -> Any:
    """*value* with the rows of outputs that were kept."""
    if isinstance(value, Shared):
        return value.get_value()
    if isinstance(value, dict):
        return {key: _gathered(each) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*map(_gathered, value))
    return type(value)(map(_gathered, value)) if isinstance(value, tuple | list) else value


def _opened(got: Any, want: Any, above: tuple[int, ...] = ()) -> tuple[Any, Any]:
    """Two values with instances of one class as dicts of their attributes; *above* are those around."""
    if id(got) in above:
        return None, None
    one, other = _parts(got, want)
    inner = (*above, id(got))
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        both = {key: _opened(value, other[key], inner) for key, value in one.items()}
        return {key: pair[0] for key, pair in both.items()}, {key: pair[1] for key, pair in both.items()}
    if type(one) is type(other) and isinstance(one, list | tuple) and len(one) == len(other):
        pairs = [_opened(*pair, inner) for pair in zip(one, other, strict=True)]
        return [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return one, other


def _parts(got: Any, want: Any) -> tuple[Any, Any]:
    """Two instances as dicts, where they are of one class and not equal; other values as they are.

    What cannot be compared, as its class says nothing of equality and it has no attributes, is None.
    """
    if isinstance(got, dict | list | tuple) or _kind(got) != _kind(want) or offers(got, "__array__"):
        return got, want
    if got is want or are_equal(got, want):
        return None, None
    parts = _attributes(got), _attributes(want)
    if any(parts):
        return parts
    kind: Any = type(got)
    return (None, None) if kind.__eq__ is object.__eq__ else (got, want)


def _kind(value: Any) -> tuple[str, str]:
    return type(value).__module__, type(value).__qualname__


def are_equal(one: Any, other: Any) -> bool:
    """Whether two objects say that they are equal; False where they cannot be compared."""
    try:
        return bool(one == other)
    except Exception:  # of arrays in them, say
        return False


def _attributes(obj: Any) -> dict[str, Any]:
    slots = {name: getattr(obj, name) for name in slots_of(obj) if hasattr(obj, name)}
    args = {"args": obj.args} if isinstance(obj, BaseException) else {}
    return {**args, **slots, **(attributes_of(obj) or {})}


def _array(value: Any) -> Any:
    """*value* as an array; an object, such as a set, is one element."""
    if offers(value, "__array__") or isinstance(value, bool | int | float | complex | np.generic):
        return np.asarray(host_array(value))
    array = np.empty((), object)
    array[()] = value
    return array


def _difference(name: str, path: str, mode: Any, got: Any, want: Any) -> tuple[float, str] | None:
    """How much an output differs, beside a sentence; None if it does not."""
    by = repr(getattr(mode, "__name__", str(mode)))
    head = f"check(): output{cut(path)} of the function {name!r}, reduced by {by}, differs from the "
    why = f" Perhaps {_REASONS[mode]}." if mode in _REASONS else ""
    if got.shape != want.shape:
        sentence = f"{head}plain function's: it has the shape {got.shape} instead of {want.shape}.{why}"
        return np.inf, sentence
    if got.size == 0:
        return None
    if got.dtype.names is not None and got.dtype.names == want.dtype.names:  # field by field
        fields = [(f"{path}[{each!r}]", got[each], want[each]) for each in got.dtype.names]
        found = [_difference(name, where, mode, one, other) for where, one, other in fields]
        return max(filter(None, found), default=None)
    if not (is_numeric(got.dtype) and is_numeric(want.dtype)):
        equal = got == want
        if got.dtype.kind == want.dtype.kind and got.dtype.kind in "mM":
            equal |= np.isnat(got) & np.isnat(want)
        same = bool(np.all(equal))
        return None if same else (np.inf, f"{head}plain function's: it is {got} instead of {want}.{why}")
    with np.errstate(all="ignore"):
        same = (got == want) | ((got != got) & (want != want))  # noqa: PLR0124  NaN
        distance = np.abs(got.astype(_wide(got)) - want.astype(_wide(want)))
    distance = np.where(same, 0, np.where(np.isnan(distance), np.inf, distance))
    finite = np.abs(want.astype(_wide(want))[np.isfinite(want)])
    scale = float(finite.max()) if finite.size else 0.0
    tolerance = max(_tolerance(got), _tolerance(want))
    worst = np.unravel_index(distance.argmax(), distance.shape)
    if same.all() or (tolerance and distance[worst] <= tolerance * scale):
        return None
    where = f" at {tuple(map(int, worst))}" if worst else ""
    sentence = (
        f"{head}plain function's on the same rows, by up to {distance[worst]:.3g}: {got[worst]} instead "
        f"of {want[worst]}{where}.{why}"
    )
    return float(distance[worst]) / (scale or 1.0), sentence


def _wide(array: Any) -> np.dtype[Any]:
    """The dtype to compute differences in."""
    wide = np.result_type(array, np.float64) if array.dtype.kind in "biufc" else np.float64
    return np.dtype(wide)


def _tolerance(array: Any) -> float:
    """How far an element may be off; integers are exact."""
    if array.dtype.kind in "biu":
        return 0.0
    return _TOLERANCES.get(array.dtype.itemsize // (2 if array.dtype.kind == "c" else 1), 1e-7)
