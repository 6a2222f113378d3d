"""Values as arrays of numbers: checks and casts; errors call the value what *called* says."""

from __future__ import annotations

import importlib
import math
import operator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import InvalidType, InvalidValue
from .foreign import columns_of, host_array, is_key

Array = NDArray[Any]

NUMERIC_KINDS = "biufc"
"""The kinds of dtype that arrays may have: bools, integers, floats and complex numbers."""


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of *dtype* have arithmetic: NumPy's kinds, and the bfloat16 of ml_dtypes."""
    return dtype.kind in NUMERIC_KINDS or dtype.name == "bfloat16"


def native(array: Array) -> Array:
    """*array* in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    first, second = (np.ascontiguousarray(array).reshape(-1).view(np.uint8) for array in (one, other))
    return np.array_equal(first, second)


def digest(array: Array) -> bytes:
    """Of two arrays that are equal to the bit the same, and of others another one."""
    import hashlib  # noqa: PLC0415  it takes a while, and few programs need it

    found = hashlib.sha256(repr((code_of(array.dtype), array.shape)).encode())
    found.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return found.digest()


def code_of(dtype: np.dtype[Any]) -> str:
    """The name of a dtype in messages: every process can give it to ``np.dtype``."""
    plain = dtype.kind in NUMERIC_KINDS or dtype.type is np.void
    return dtype.str if plain else _Extension(dtype.name)


class _Extension(str):
    """The name of a dtype that NumPy knows only after an import."""

    def __reduce__(self) -> Any:
        return _imported, (str(self),)


def _imported(name: str) -> _Extension:
    importlib.import_module("ml_dtypes")
    return _Extension(name)


def cast(
    value: ArrayLike,
    dtype: np.dtype[Any],
    force: bool,
    called: str,
    advice: str = "convert the values yourself, or pass force_cast=True",
) -> Array:
    """*value* as an array of *dtype*.

    Arrays and NumPy scalars are cast where NumPy calls that safe.  Python numbers, alone or in lists,
    have no dtype of their own: they are cast if their kind allows it and no integer changes.

    Raises: InvalidType.
    """
    given = as_numeric(value, called)
    if given.dtype == dtype:
        return given
    if force:  # what *dtype* cannot hold is lost: imaginary parts, fractions, digits, range
        real = given.real if given.dtype.kind == "c" and dtype.kind not in "cb" else given
        with np.errstate(all="ignore"):
            return real.astype(dtype)
    if np.can_cast(given.dtype, dtype, "safe"):
        return given.astype(dtype)
    if not hasattr(value, "dtype"):
        kind, wanted = given.dtype.kind, dtype.kind
        if wanted in {"i": "iufc", "u": "iufc", "f": "fc", "c": "c"}.get(kind, ""):
            with np.errstate(all="ignore"):
                converted = given.astype(dtype)
            if kind in "fc" or np.array_equal(converted, given):
                return converted
    raise InvalidType(
        f"{called} holds {dtype}, and a cast of {given.dtype} to it may lose information: {advice}."
    )


def as_numeric(value: ArrayLike, called: str) -> Array:
    """*value* as an array.

    Raises: InvalidType for ragged lists, masked arrays, tables that are not one array, and objects
    that are no numbers.
    """
    columns = columns_of(value)
    if columns is not None:
        return _of_table(value, columns, called)
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidType(f"{called} cannot hold a mask: fill it first, with value.filled(…).")
    if is_key(value):
        raise InvalidType(
            f"{called} is a random key of JAX's, which is no array of numbers: give "
            f"jax.random.key_data(key), and make a key of it in the function, with "
            f"jax.random.wrap_key_data."
        )
    try:
        array = np.asarray(host_array(value))
    except ValueError as error:
        raise InvalidType(f"{called} is no array: {str(error).rstrip('.')}.") from None
    except TypeError as error:
        if hasattr(value, "__cuda_array_interface__"):
            raise InvalidType(
                f"{called} needs an array in host memory, and got one on a GPU: copy it, with .get()."
            ) from None
        raise InvalidType(f"{called} needs an array in host memory: {error}") from None
    if not is_numeric(array.dtype):
        got = "" if hasattr(value, "dtype") else f"; got {shortened(value)}"
        raise _no_arithmetic(array.dtype, called, got)
    return array


def _of_table(frame: Any, columns: list[tuple[str, Any]], called: str) -> Array:
    """A DataFrame as one array, if that has all that is in its *columns*.

    Raises: InvalidType.
    """
    array = np.empty(0)
    problems = [_missing_in(column) for _, column in columns]
    if not any(problems):
        array = np.asarray(frame)
        problems = [_lost_in(column, array, place) for place, (_, column) in enumerate(columns)]
    for (name, column), problem in zip(columns, problems, strict=True):
        if problem:
            names = "frame" if hasattr(frame, "iloc") else "frame.columns"
            raise InvalidType(
                f"{called} is a table that cannot be one array of numbers without loss: its column "
                f"{name!r} ({column.dtype}) {problem}. Give functions a dict of the columns, "
                f"{{name: frame[name].to_numpy() for name in {names}}}, which arrives as a dict of "
                f"arrays; convert columns that are not of numbers, or leave them out."
            )
    return array


def _missing_in(column: Any) -> str:
    """Why a table's *column* is no array of numbers by itself; empty if it is one."""
    own, named = column.to_numpy(), str(column.dtype).lower()
    if not is_numeric(own.dtype) or named == "category":
        return "holds what is no number"
    return "has missing values" if own.dtype.kind == "f" and named.startswith(("int", "uint")) else ""


def _lost_in(column: Any, table: Array, place: int) -> str:
    """What *column* of numbers loses as column number *place* of *table*; empty if nothing."""
    own = column.to_numpy()
    if not is_numeric(table.dtype) or (own.dtype.kind == "b") != (table.dtype.kind == "b"):
        return f"would be of {table.dtype}"
    there = table[:, place]
    if own.dtype.kind != "c" and there.dtype.kind == "c":
        there = there.real
    with np.errstate(all="ignore"):
        changed = (own != there.astype(own.dtype)) & ~np.isnan(own)
    if not changed.any():
        return ""
    row = changed.argmax()
    return f"would have {there[row]} in row {row}, where it has {own[row]}"


def _no_arithmetic(dtype: np.dtype[Any], called: str, got: str = "") -> InvalidType:
    advice = (
        "Rows of anything come as a list: give .tolist(). What every rank is to see whole may be "
        "anything: name it in bcast_inputs."
    )
    if dtype.kind in "US":
        advice = "Give a list of strings, .tolist(), or codes: np.unique(…, return_inverse=True)."
    return InvalidType(
        f"{called} cannot have the dtype {dtype}: expected bools, integers, floats or complex "
        f"numbers{got}. {advice}"
    )


def shortened(value: Any) -> str:
    """*value* and its type, in a sentence."""
    try:
        text = repr(value)
    except Exception:  # it is the user's, or nested too deeply
        return f"a {type(value).__name__}"
    return "None" if value is None else f"{text[:60]}{'…' * (len(text) > 60)}, a {type(value).__name__}"


def checked_dtype(dtype: DTypeLike, called: str) -> np.dtype[Any]:
    """*dtype* as a NumPy dtype that has arithmetic.

    Raises: InvalidType for objects, strings, dates, records and unknown names.
    """
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise InvalidType(f"{called} cannot have the dtype {dtype!r}: {error}.") from None
    if not is_numeric(known):
        raise _no_arithmetic(known, called)
    return known


def checked_int(value: Any, called: str, low: int, high: int | None = None, instead: str = "") -> int:
    """*value* as an int from *low* to *high*; *instead* says what else could have been given.

    Raises: InvalidType unless it is an int, InvalidValue if it is out of bounds.
    """
    bounds = f"{low} or more" if high is None else f"from {low} to {high}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise InvalidType(
            f"{called} must be an int{' of' * (high is None)} {bounds}{instead}; got {value!r}, a "
            f"{type(value).__name__}."
        ) from None
    if number < low or (high is not None and number > high):
        raise InvalidValue(f"{called} must be {bounds}{instead}; got {value!r}.")
    return number


def checked_seconds(value: Any, called: str) -> float:
    """Raises: InvalidType, InvalidValue unless it is a finite number of more than 0 seconds."""
    try:
        if isinstance(value, str | bytes):
            raise TypeError
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        raise InvalidType(f"{called} must be a number of seconds; got {value!r}.") from None
    if not seconds > 0 or math.isinf(seconds):
        raise InvalidValue(f"{called} must be more than 0 seconds, and finite; got {value!r}.")
    return seconds


def checked_bool(value: Any, called: str) -> bool:
    """Raises: InvalidType unless it is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidType(f"{called} must be True or False; got {value!r}.")
    return bool(value)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Raises: InvalidType, InvalidValue unless it is a tuple of lengths of 0 or more."""
    try:
        lengths = tuple(operator.index(n) for n in (shape if np.iterable(shape) else (shape,)))
    except TypeError:
        raise InvalidType(f"a shape must be a tuple of ints; got {shape!r}.") from None
    if any(length < 0 for length in lengths):
        raise InvalidValue(f"the lengths of a shape must be 0 or more; got {lengths}.")
    try:
        np.broadcast_to(np.empty((), np.clongdouble), lengths)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"no array can have the shape {lengths}: {error}.") from None
    return lengths


def checked_oversize(oversize: float) -> float:
    """Raises: InvalidType, InvalidValue unless it is a number from 1 to 2."""
    try:
        value = float(oversize)
    except (TypeError, ValueError):
        raise InvalidType(f"oversize must be a number from 1 to 2; got {oversize!r}.") from None
    if not 1 <= value <= 2:
        raise InvalidValue(f"oversize must be from 1 to 2; got {oversize!r}.")
    return value
