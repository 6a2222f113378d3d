"""Values as arrays: checks and casts; errors call the value what *called* says."""

from __future__ import annotations

import importlib
import math
import operator
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..errors import InvalidType, InvalidValue, counted, cut, shortened, shown
from .foreign import columns_of, host_array, is_key, is_on_gpu, is_sparse, is_view_of_hdf5

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Scalar = TypeVar("Scalar", bound=np.generic, default=Any)
else:
    from typing import TypeVar

    Scalar = TypeVar("Scalar", bound=np.generic)

Array = NDArray[Any]

NUMERIC_KINDS = "biufc"
"""The kinds of dtype that have arithmetic: bools, integers, floats and complex numbers."""

Code = str | np.dtype[Any]
"""A dtype in messages: its name, or itself where it has no name."""

Shape = tuple[int, ...]


def is_numeric(dtype: np.dtype[Any]) -> bool:
    """Whether arrays of *dtype* have arithmetic: NumPy's kinds, and the bfloat16 of ml_dtypes."""
    return dtype.kind in NUMERIC_KINDS or dtype.name == "bfloat16"


def is_fixed(dtype: np.dtype[Any]) -> bool:
    """Whether elements of *dtype* are bytes, as many in each: numbers, dates, strings, records."""
    if is_numeric(dtype):
        return True
    known = issubclass(dtype.type, np.character | np.datetime64 | np.timedelta64 | np.void)
    return known and bool(dtype.itemsize) and dtype.subdtype is None and not dtype.hasobject


def longer(one: np.dtype[Any], other: np.dtype[Any]) -> np.dtype[Any] | None:
    """The dtype of rows of one dtype behind rows of another; None unless both are the same.

    Strings may be of two lengths.
    """
    if one == other:
        return one
    strings = one.kind == other.kind and one.kind in "SU"
    return max(one, other, key=lambda dtype: dtype.itemsize) if strings else None


def native(array: Array) -> Array:
    """*array* in the machine's byte order."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def same_bits(one: Array, other: Array) -> bool:
    """Whether two arrays are equal to the bit: -0.0 is not 0.0, and a NaN is itself."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return all(map(_are_equal, _bytes_of(one), _bytes_of(other)))


_PIECE = 1 << 16  # bytes that are compared at once: they stay in the cache


def _are_equal(one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
    """Whether bytes are equal: piece by piece, until some are not."""
    starts = range(0, len(one), _PIECE)
    return all(np.array_equal(one[at : at + _PIECE], other[at : at + _PIECE]) for at in starts)


def digest(array: Array) -> bytes:
    """The digest of an array: the same for two that are equal to the bit, and another one for others."""
    import hashlib  # noqa: PLC0415  it takes a while, and few programs need it

    found = hashlib.sha256(repr((code_of(array.dtype), array.shape)).encode())
    for part in _bytes_of(array):
        found.update(part.data)
    return found.digest()


def _bytes_of(array: Array) -> Iterator[NDArray[np.uint8]]:
    """The bytes of an array; of records without those between their fields, which mean nothing."""
    if array.dtype.names is None:
        yield np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for name in array.dtype.names or ():
        yield from _bytes_of(array[name])


def code_of(dtype: np.dtype[Any]) -> Code:
    """A dtype in messages: every process can give it to ``np.dtype``."""
    if dtype.names is not None:
        return dtype
    return _Extension(dtype.name) if is_of_extension(dtype) or not is_fixed(dtype) else dtype.str


def is_of_extension(dtype: np.dtype[Any]) -> bool:
    """Whether NumPy has *dtype* from another package, such as ml_dtypes."""
    return dtype.num >= _USER_DEFINED


_USER_DEFINED = 256  # NPY_USERDEF of NumPy's C API


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
    have no dtype of their own: they are cast if their kind allows it and no integer changes.  What is
    no number becomes nothing of another kind.

    Raises: InvalidType.
    """
    given = as_array(value, called)
    if given.dtype == dtype:
        return given
    if not (is_numeric(given.dtype) and is_numeric(dtype)):
        return _cast_alike(given, dtype, force, called, advice)
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


def _cast_alike(given: Array, dtype: np.dtype[Any], force: bool, called: str, advice: str) -> Array:
    """Strings, dates or records as others of their kind.

    Raises: InvalidType.
    """
    own = given.dtype
    if own.kind != dtype.kind or not _same_fields(own, dtype):
        raise InvalidType(f"{called} holds {dtype}, and {own} is no such thing: convert it yourself.")
    if force or can_assign(own, dtype):
        converted = given.astype(dtype)
        # a finer unit of time has a smaller range
        if force or dtype.kind in "SU" or same_bits(converted.astype(own), given):
            return converted
    raise InvalidType(
        f"{called} holds {dtype}, and a cast of {own} to it may lose information: {advice}."
    )


def of_other_ndim(array: Array, ndim: int, called: str, what: str = "an array") -> InvalidValue:
    """The error for an *array*, which is *what* was given, where there are *ndim* dimensions."""
    return InvalidValue(
        f"{called} has {counted(ndim, 'dimension')}, got {what} of {array.ndim} (shape {array.shape}); "
        f"the number of dimensions cannot change."
    )


def can_assign(given: np.dtype[Any], dtype: np.dtype[Any]) -> bool:
    """Whether a variable of *dtype* takes values of the dtype *given*: numbers may be rounded."""
    if is_numeric(given) and is_numeric(dtype):
        return bool(np.can_cast(given, dtype, "same_kind"))
    alike = given.kind == dtype.kind and _same_fields(given, dtype)
    return alike and bool(np.can_cast(given, dtype, "safe"))


def _same_fields(one: np.dtype[Any], other: np.dtype[Any]) -> bool:
    """Whether records have fields of the same names in the same order, as NumPy casts them by place."""
    if one.names != other.names:
        return False
    return all(_same_fields(one[name].base, other[name].base) for name in one.names or ())


class Rounded(InvalidType):
    """A list of numbers that no array holds as they are."""


def as_array(value: ArrayLike, called: str) -> Array:
    """*value* as an array; lists, which have no dtype, become arrays of numbers only.

    Raises: InvalidType for ragged lists, masked arrays, tables that are not one array, and objects.
    """
    columns = columns_of(value)
    if columns is not None:
        return _of_table(value, columns, called)
    if is_key(value):
        raise InvalidType(
            f"{called} is a random key of JAX's, which is no array of numbers: give "
            f"jax.random.key_data(key), and make a key of it in the function, with "
            f"jax.random.wrap_key_data."
        )
    if is_sparse(value):
        raise InvalidType(
            f"{called} is {shortened(value)}, of SciPy's, and no array with rows: give x.toarray(), or "
            f"list(x.tocsr()), the list of its rows, each a sparse one. What every rank is to see whole "
            f"may be anything: name it in bcast_inputs."
        )
    if is_view_of_hdf5(value):
        value = value[()]  # type: ignore[index,call-overload]
    try:
        array, lost = plain(host_array(value))
    except ValueError as error:
        raise InvalidType(f"{called} is no array: {cut(str(error)).rstrip('.')}.") from None
    except TypeError as error:
        on_gpu = ", and got one on a GPU: copy it, with .get()." if is_on_gpu(value) else ""
        why = on_gpu or f": {cut(str(error))}"
        raise InvalidType(f"{called} needs an array in host memory{why}") from None
    if lost:
        raise InvalidType(f"{called}: {shortened(value)}, would lose {lost}")
    if hasattr(value, "dtype"):
        _check_fixed(array.dtype, called)
    elif array.dtype.kind == "f" and _is_rounded(value, array):
        raise Rounded(
            f"{called} would be rounded: it has integers that no floats hold, beside floats, or beside "
            f"others with which no integers of 64 bits hold them. Give np.array(…, float), if floats "
            f"will do."
        )
    elif not is_numeric(array.dtype):
        raise InvalidType(
            f"{called} cannot have the dtype {array.dtype} of a list: expected bools, integers, floats "
            f"or complex numbers; got {shortened(value)}. For an array of strings, dates or records "
            f"give np.array(…, dtype), where the dtype has a fixed size."
        )
    return array


def _is_plain(cls: type) -> bool:
    """Whether *cls* is one of NumPy's classes of arrays that say nothing beyond the array."""
    return cls.__module__.partition(".")[0] == "numpy" and not issubclass(cls, np.ma.MaskedArray)


def is_of_own_class(value: Any) -> bool:
    """Whether *value* is an array of a class that computes, or says, something else than an array."""
    return isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap)


def plain(value: Any) -> tuple[Array, str]:
    """*value* as an array of NumPy's own, and what that lacks, in a sentence's end: empty for nothing.

    Arrays in lists are looked at, too.  Raises: as ``numpy.asarray``.
    """
    if type(value) is np.ndarray:
        return value, ""
    lost = lost_in(value)
    array = np.asarray([]) if lost else np.asanyarray(value)
    return np.asarray(array), lost or lost_in(array) or _missing_in(value, array)


def lost_in(value: Any) -> str:
    """What an array of NumPy's own would lack of an array, or of arrays in lists."""
    try:
        return _lost_within(value)
    except RecursionError:  # what nests as deep is no array
        return ""


def _lost_within(value: Any) -> str:
    if isinstance(value, np.ndarray):
        if _is_plain(type(value)):
            return ""
        if hasattr(value, "mask"):
            return "its mask: fill it first, with .filled(…)."
        return (
            f"what its class {type(value).__qualname__} adds to an array, such as a unit: give "
            f"np.asarray(…) of it, in a unit that is the same everywhere."
        )
    if isinstance(value, list | tuple):
        for kind in set(map(type, value)):
            if issubclass(kind, (np.ndarray, list, tuple)) and not _is_plain(kind):
                for each in value:
                    if type(each) is kind and (lost := _lost_within(each)):
                        return lost
    return ""


def check_whole(values: Iterable[Any], called: str) -> None:
    """Raises: InvalidType for what would lose something as elements of an array, such as a mask."""
    for value in values:
        if lost := lost_in(value):
            raise InvalidType(f"{called}: {shortened(value)}, would lose {lost}")


def _missing_in(value: Any, array: Array) -> str:
    """The integers of a column that has missing ones, too, which NumPy's integers do not know."""
    dtype = str(getattr(value, "dtype", getattr(value, "type", ""))).lower()
    if array.dtype.kind == "f" and dtype.startswith(("int", "uint")):
        return (
            "its integers, as some are missing, and NumPy knows no missing ones: fill them first, with "
            ".fillna(…) or .fill_null(…)."
        )
    return ""


def _is_rounded(value: Any, array: Array) -> bool:
    """Whether an *array* of floats has other numbers than the integers of Python's in lists."""
    with np.errstate(invalid="ignore"):
        if not (np.abs(array) >= 1 << 53).any():
            return False
    while isinstance(value, list | tuple) and value and isinstance(value[0], list | tuple):
        value = [each for row in value for each in row]
    numbers = value if isinstance(value, list | tuple) else ()
    whole = bool(numbers) and {int, bool}.issuperset(map(type, numbers))
    large = [each for each in numbers if type(each) is int and abs(each) >= 1 << 53]
    return any(int(float(each)) != each or (whole and abs(each) >= 1 << 63) for each in large)


def _of_table(frame: Any, columns: list[tuple[str, Any]], called: str) -> Array:
    """A DataFrame as one array, if that has all that is in its *columns*.

    Raises: InvalidType.
    """
    array = np.empty(0)
    problems = [_unlike_numbers(column) for _, column in columns]
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


def _unlike_numbers(column: Any) -> str:
    """Why a table's *column* is no array of numbers by itself; empty if it is one."""
    own = column.to_numpy()
    if not is_numeric(own.dtype) or str(column.dtype) == "category":
        return "holds what is no number"
    return "has missing values" if _missing_in(column, own) else ""


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


def _check_fixed(dtype: np.dtype[Any], called: str) -> None:
    """Raises: InvalidType for objects, strings of any length, and what has no bytes."""
    if is_fixed(dtype):
        return
    advice = (
        "Rows of anything come as a list: give x[:].tolist(). What every rank is to see whole may be "
        "anything: name it in bcast_inputs."
    )
    if dtype.subdtype is not None:
        advice = f"It is an array: give the dtype {dtype.base}, and the lengths {dtype.shape} in shape=."
    elif not dtype.itemsize:
        advice = 'Its elements have no bytes: say how long they are, by "U10" say.'
    elif dtype.names is not None:
        advice = f'Its fields hold objects: give them a fixed size, by "U10" say. {advice}'
    raise InvalidType(
        f"{called} cannot have the dtype {dtype}: expected numbers, dates, strings or records of a "
        f"fixed size. {advice}"
    )


def checked_dtype(dtype: DTypeLike, called: str) -> np.dtype[Any]:
    """*dtype* as a NumPy dtype of fixed size.

    Raises: InvalidType for objects, strings without a length, and unknown names.
    """
    try:
        known = np.dtype(dtype)
    except TypeError as error:
        raise InvalidType(f"{called} cannot have the dtype {shown(dtype)}: {cut(str(error))}.") from None
    _check_fixed(known, called)
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
            f"{called} must be an int{' of' * (high is None)} {bounds}{instead}; got {shortened(value)}."
        ) from None
    if number < low or (high is not None and number > high):
        raise InvalidValue(f"{called} must be {bounds}{instead}; got {shown(value)}.")
    return number


def checked_seconds(value: Any, called: str) -> float:
    """Raises: InvalidType, InvalidValue unless *value* is a finite number of more than 0 seconds."""
    try:
        if isinstance(value, str | bytes | bool):
            raise TypeError
        seconds = float(value)
    except OverflowError:
        seconds = math.inf
    except (TypeError, ValueError):
        raise InvalidType(f"{called} must be a number of seconds; got {shown(value)}.") from None
    if not seconds > 0 or math.isinf(seconds):
        raise InvalidValue(f"{called} must be more than 0 seconds, and finite; got {shown(value)}.")
    return seconds


def checked_bool(value: Any, called: str) -> bool:
    """Raises: InvalidType unless *value* is True or False."""
    if not isinstance(value, bool | np.bool_):
        raise InvalidType(f"{called} must be True or False; got {shown(value)}.")
    return bool(value)


def checked_shape(shape: Any) -> tuple[int, ...]:
    """Raises: InvalidType, InvalidValue unless *shape* is a length, or a tuple of lengths, of 0 or
    more."""
    try:
        lengths = tuple(operator.index(n) for n in (shape if np.iterable(shape) else (shape,)))
    except TypeError:
        raise InvalidType(f"a shape must be a tuple of ints; got {shown(shape)}.") from None
    if any(length < 0 for length in lengths):
        raise InvalidValue(f"the lengths of a shape must be 0 or more; got {lengths}.")
    try:
        np.broadcast_to(np.empty((), np.clongdouble), lengths)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"no array can have the shape {lengths}: {error}.") from None
    return lengths


def checked_oversize(oversize: float) -> float:
    """Raises: InvalidType, InvalidValue unless *oversize* is a number from 1 to 2."""
    try:
        value = float(oversize)
    except (TypeError, ValueError):
        raise InvalidType(f"oversize must be a number from 1 to 2; got {shown(oversize)}.") from None
    if not 1 <= value <= 2:
        raise InvalidValue(f"oversize must be from 1 to 2; got {shown(oversize)}.")
    return value
