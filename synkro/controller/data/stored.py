"""``StoredData``: an array in a file that the workers read by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, NoReturn

import numpy as np
from numpy.typing import DTypeLike

from ...errors import InvalidValue, named
from ...plan.batch import Selection
from ...plan.call import FileArray
from ...storage.files import describe
from ...values.arrays import Array, checked_dtype
from ..engine.engine import Engine
from .handle import InputArray
from .outgoing import check_for_gpus

_AT_ONCE = 1 << 24
"""Bytes that are read at once while an array is iterated over."""


class StoredData(InputArray[Any]):
    """An array in an HDF5 or zarr file: an input of functions.

    Each worker opens the file and reads its rows, a piece of a call at a time.  Here ``x[…]`` reads rows
    as an array of NumPy's, with any index that NumPy knows; arithmetic and NumPy's functions read all of
    it.  It is read-only.

    Attributes:
        name: a name for messages, or None.
        minibatch: as for ``Data``.
    """

    ATTRIBUTE: ClassVar[str] = "x[:].{}, which reads all of it"
    COPY: ClassVar[str] = "open the file, {0.path}"
    ANEW: ClassVar[str] = "give the dataset to data() in this one"

    def __init__(self, engine: Engine, stored: FileArray, *, minibatch: bool, name: str | None) -> None:
        """Made by ``data()``."""
        super().__init__(engine, minibatch, name)
        self._stored = stored
        self._dtype = np.dtype(stored.dtype)
        engine.directory.watch(self, stored.number, self._called())

    # ── as an array ──────────────────────────────────────────────────────────────────────────────

    @property
    def path(self) -> str:
        """The path of the file."""
        return self._stored.path

    @property
    def shape(self) -> tuple[int, ...]:
        return self._stored.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"{self._called()} has no dimensions, so it has no length.")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        first, *rest = key if isinstance(key, tuple) and key else (key,)
        first = int(first) if isinstance(first, np.integer) else first
        rows = slice(first, first + 1 or None) if type(first) is int else first
        if not isinstance(rows, slice) or not self.shape:
            return self._read_list(key)
        if type(first) is int and not -len(self) <= first < len(self):
            raise IndexError(f"{self._called()} has {len(self)} rows, and no row {first}.")
        array = self._read(range(len(self))[rows])
        return array[(0, *rest) if type(first) is int else (slice(None), *rest)]

    def _read(self, selection: Selection | None = None) -> Array:
        """Rows of the array, or all of them.  Raises: OSError where the file has changed, or is gone."""
        from ...storage.reading import read  # noqa: PLC0415  few programs need it, and its threads

        return read(self._stored, selection)

    def _read_list(self, key: Any) -> Any:
        """By a list or an array of indices only the rows that it names are read, else all."""
        if isinstance(key, list | np.ndarray) and self.shape:
            indices = np.asarray(key)
            if indices.ndim == 1 and indices.dtype.kind in "bi":
                return self._read(np.arange(len(self), dtype=np.int64)[indices])  # which may raise
        return self._read()[key]

    def __iter__(self) -> Iterator[Any]:
        for rows in self._parts():
            yield from rows

    def _parts(self) -> Iterator[Array]:
        """All rows, some at a time."""
        step = max(1, _AT_ONCE * len(self) // max(1, self.nbytes))
        for start in range(0, len(self), step):
            yield self[start : start + step]

    def __contains__(self, value: Any) -> bool:
        return any(value in rows for rows in (self._parts() if self.shape else [self._read()]))

    def _element(self) -> Array:
        """The array, if it is one number.  Raises: ValueError."""
        if self.size != 1:
            raise ValueError(
                f"{self._called()} has {self.size} elements, so it is no number, and neither true nor "
                f"false: use x.shape, or x[…] of one element."
            )
        return self._read()

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        self._refuse_writing()

    def _refuse_writing(self) -> NoReturn:
        raise TypeError(
            f"{self._called()} is read-only: write to {self.path} by the library of its file, and call "
            f"data() anew; or write to a copy in shared memory, data(x[:])."
        )

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self._called()} is in a file: an array of it is a copy.")
        return np.array(self._read(), dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        for target in (*kwargs.get("out", ()), *inputs[: method == "at"]):
            if isinstance(target, StoredData):
                target._refuse_writing()
        plain = [value._read() if isinstance(value, StoredData) else value for value in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        where = f"{self._stored.name!r} of {self.path}" if self._stored.name else self.path
        return f"StoredData({name}{where}, shape={self.shape}, dtype={self._dtype})"

    # ── as an input ──────────────────────────────────────────────────────────────────────────────

    def is_of(self, stored: FileArray, known: bool) -> bool:
        """Whether the array is *stored*, as it is now.

        *known* is one that was not opened anew; another may have been written to in between.
        """
        return _identity(self._stored, known) == _identity(stored, known)

    def input(self, engine: Engine, called: str) -> FileArray:
        """What the workers open, for a call on *engine*.

        Raises: InvalidValue if it belongs to another session; InvalidType for a dtype that GPUs lack.
        """
        if self._engine is not engine:
            raise self._foreign(called)
        check_for_gpus(engine, self._dtype, called)
        return self._stored


def _identity(stored: FileArray, known: bool) -> tuple[Any, ...]:
    """What is the same of two descriptions of an array that did not change in between."""
    stamp = stored.stamp[:3] if known else stored.stamp  # with the time of the description, in zarr
    return stored.kind, stored.path, stored.name, stored.shape, stored.dtype, stamp


def make_stored(
    engine: Engine,
    value: Any,
    dtype: DTypeLike | None = None,
    ndim: int | None = None,
    shape: tuple[int, ...] | None = None,
    minibatch: bool = False,
    name: str | None = None,
) -> StoredData:
    """``StoredData`` of *value*, a dataset of h5py or an array of zarr.

    Raises: InvalidType, InvalidValue for one that the workers cannot read, or with another dtype,
    number of dimensions or shape than asked for.
    """
    called = f"the StoredData {named(name)!r}" if name else "a StoredData"
    stored = describe(value, engine.directory.number())
    own = checked_dtype(value.dtype, f"{called}, of {stored.path},")
    asked = {
        "dtype": (own if dtype is None else np.dtype(dtype), own),
        "ndim": (len(stored.shape) if ndim is None else ndim, len(stored.shape)),
        "shape": (stored.shape if shape is None else shape, stored.shape),
    }
    for keyword, (wanted, found) in asked.items():
        if wanted != found:
            raise InvalidValue(
                f"{called} is read from {stored.path} as it lies there, with {keyword}={found}: leave "
                f"out {keyword}={wanted} and convert the rows in the function, or copy it, data(x[:])."
            )
    return StoredData(engine, stored, minibatch=minibatch, name=name)
