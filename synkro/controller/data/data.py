"""``Data``: a typed array in shared memory, or in a file that all workers map.

    Data ──▶ Outgoing (the array) ──▶ Placed: Region (which bytes, shape, dtype), Segment (the memory)

A region is never changed: when the array moves or takes another shape, it gets a new one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from types import EllipsisType
from typing import Any, ClassVar, Protocol, SupportsIndex, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ...errors import InvalidValue, counted, named
from ...memory.files import file_of
from ...memory.interrupts import uninterrupted
from ...memory.segment import undoing
from ...plan.call import Access, Region
from ...storage.files import is_stored, mapped
from ...values import arrays
from ...values.arrays import Array, Scalar
from ...values.foreign import library_of
from ...values.owners import sole_owner
from ..engine.engine import Engine
from .handle import InputArray
from .named import HandedBack, NamedOutgoing, Slot
from .outgoing import Outgoing, Placed, check_for_gpus
from .stored import StoredData, make_stored


class Data(InputArray[Scalar]):
    """An array that all workers see: an input of functions.

    It reads and writes like an ndarray: indexing, ``len``, arithmetic, NumPy's functions.  Views of it
    (``x[:]``) stay valid whatever becomes of the ``Data``.

    Attributes:
        name: a name for messages, or None.
        minibatch: whether it holds the rows of a batch, in its order: row k belongs to the k-th row
            that ``batch=`` names.
        library: "torch" or "jax" if its values came from such an array; functions get one like it.
    """

    ATTRIBUTE: ClassVar[str] = "x[:].{}"
    COPY: ClassVar[str] = "send a copy, x[:].copy()"
    ANEW: ClassVar[str] = "make it anew in this one with data(x[:])"

    def __init__(
        self,
        engine: Engine,
        dtype: DTypeLike,
        ndim: int,
        *,
        minibatch: bool = False,
        name: str | None = None,
        library: str | None = None,
    ) -> None:
        """An empty ``Data``; made by ``data()``."""
        super().__init__(engine, minibatch, name)
        self.library = library
        self._dtype = arrays.checked_dtype(dtype, self._called())
        if engine.on_gpus:  # which know one byte order
            self._dtype = self._dtype.newbyteorder("=")
        self._ndim = ndim
        self._memory = self._no_memory()
        self._was_shared = False
        if ndim == 0:
            self._resize((), 1.0)

    # ── as an array ──────────────────────────────────────────────────────────────────────────────

    @property
    def data(self) -> NDArray[Scalar]:
        """The array itself, a view of the shared memory."""
        self._memory.touch()
        return self._memory.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._memory.array.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions, which never changes."""
        return self._ndim

    @property
    def alloc_size(self) -> int:
        """The number of elements that there is memory for."""
        if self._memory.placed is None:
            return 0
        region, segment = self._memory.placed
        return (segment.nbytes - region.offset) // self._dtype.itemsize

    def __len__(self) -> int:
        return len(self._memory.array)

    @overload
    def __getitem__(self, key: slice | EllipsisType | list[Any] | None) -> NDArray[Scalar]: ...

    @overload
    def __getitem__(self, key: Any) -> Any: ...

    def __getitem__(self, key: Any) -> Any:
        found = self._memory.array[key]
        if isinstance(found, np.ndarray):  # perhaps a view, which may be written to
            self._memory.touch()
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        if not self._memory.array.flags.writeable:
            raise InvalidValue(
                f"{self._called()} is read-only: it shows a file, or memory of another program, which "
                f"attach(…, writable=True) opens for writing."
            )
        arrays.check_whole([value], self._called())
        self._memory.array[key] = value
        self._memory.wrote()

    def __contains__(self, value: Any) -> bool:
        return value in self._memory.array

    def _element(self) -> Array:
        return self._memory.array

    def __iter__(self) -> Iterator[Any]:
        self._memory.touch()
        return iter(self._memory.array)

    def __dlpack__(self, **options: Any) -> Any:
        array: Array = self.data
        return array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return self._memory.array.__dlpack_device__()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        if copy:
            return np.array(self._memory.array, dtype)
        self._memory.touch()
        converted = np.asarray(self._memory.array, dtype)
        if copy is False and converted.dtype != self._dtype:
            raise ValueError(f"{self._called()} of {self._dtype} as {dtype} needs a copy.")
        return converted

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.get("out", ())
        if out:
            arrays.check_whole(inputs, self._called())
            kwargs["out"] = tuple(o.data if isinstance(o, Data) else o for o in out)
        changes = method == "at"  # its first input
        plain = [
            (value.data if changes else value._memory.array) if isinstance(value, Data) else value
            for value in inputs
        ]
        result = getattr(ufunc, method)(*plain, **kwargs)
        for written in (*out, *inputs[:changes]):
            if isinstance(written, Data):
                written._memory.wrote()
        return out[0] if len(out) == 1 else result

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        if isinstance(self._memory, HandedBack):
            return f"Data({name}handed back)"
        return f"Data({name}shape={self.shape}, dtype={self._dtype})"

    # ── changing it ──────────────────────────────────────────────────────────────────────────────

    def set_value(self, input_data: ArrayLike, force_cast: bool = False, oversize: float = 1) -> None:
        """Replace the contents, and the shape, by those of *input_data*.

        More memory is taken only where it does not suffice: then *oversize* times as much, from 1 to 2.
        *force_cast* allows casts that lose information.

        Raises: InvalidType, InvalidValue, as ``condition_data``; SharedMemoryError.
        """
        oversize = arrays.checked_oversize(oversize)
        array = self.condition_data(input_data, force_cast)
        library = library_of(input_data) or self.library
        same = array.shape == self.shape and library == self.library
        if not same or self._memory.placed is None or not self._memory.array.flags.writeable:
            self._resize(array.shape, oversize)  # makes a new region, by which plans are found
        self.library = library
        self._memory.refill(array)

    def condition_data(self, input_data: ArrayLike, force_cast: bool = False) -> Array:
        """*input_data* as an array of this Data's dtype and number of dimensions; changes nothing.

        Raises: InvalidType if the cast would lose information, unless *force_cast*, and for objects;
        InvalidValue for another number of dimensions.
        """
        array = arrays.cast(input_data, self._dtype, force_cast, self._called())
        if array.ndim != self._ndim:
            raise arrays.of_other_ndim(array, self._ndim, self._called())
        return array

    def set_length(self, length: SupportsIndex, oversize: float = 1) -> None:
        """Change the number of rows to *length*.  Old rows keep their contents, new ones are zero.

        *oversize*, from 1 to 2, is how much more memory to take where more is needed.
        """
        if self._ndim == 0:
            raise InvalidValue(f"{self._called()} has no dimensions, so it has no length to set.")
        self.set_shape((length, *self.shape[1:]), oversize)

    def set_shape(self, shape: Sequence[SupportsIndex], oversize: float = 1) -> None:
        """Change the lengths of the dimensions to *shape*, not their number.

        Elements whose index is in both shapes keep their contents, new ones are zero.
        *oversize*, from 1 to 2, is how much more memory to take where more is needed.
        """
        oversize = arrays.checked_oversize(oversize)
        wanted = arrays.checked_shape(shape)
        if len(wanted) != self._ndim:
            raise InvalidValue(
                f"{self._called()} has {counted(self._ndim, 'dimension')}, got the shape {wanted} of "
                f"{len(wanted)}; the number of dimensions cannot change."
            )
        if wanted == self.shape and self._memory.placed is not None:
            return
        if self._memory.placed is None:
            self._resize(wanted, oversize)
            return
        common = tuple(slice(0, min(old, new)) for old, new in zip(self.shape, wanted, strict=True))
        old, rows = self._memory.array, self.shape[0]
        stay = self.shape[1:] == wanted[1:]  # rows move when they change their length
        if not (stay and old.flags.writeable):
            old = old[common].copy()
        self._resize(wanted, oversize)
        new = self._memory.array
        new[rows if stay else 0 :] = np.zeros((), self._dtype)
        if new.base is not old.base:
            new[common] = old[common]

    def free_memory(self) -> None:
        """Give the memory back, here and on the workers; leaves an array without rows.

        A name that ``shm_name=`` has given to the memory is removed.
        """
        self._memory.free()
        self._memory = self._no_memory()
        self._engine.release_freed()

    def _no_memory(self) -> Outgoing:
        return Outgoing(self._engine, np.zeros((0,) * self._ndim, self._dtype))

    def _resize(self, shape: tuple[int, ...], oversize: float) -> None:
        self._memory.resize(shape, self._dtype, self._called(), oversize)

    def map_file(self, array: np.memmap[Any, Any]) -> bool:
        """Become *array*, the map of a file, without a copy; False if that cannot be done."""
        found = file_of(array)
        if found is None:
            return False
        fd, offset = found
        with undoing(os.close, fd):
            nbytes = os.fstat(fd).st_size
            extent = sum((n - 1) * step for n, step in zip(array.shape, array.strides, strict=True))
            if offset + extent + array.itemsize > nbytes:
                raise InvalidValue(
                    f"the file of the memory-mapped array has {nbytes} bytes, and the array reaches to "
                    f"byte {offset + extent + array.itemsize}: the file was cut after it was mapped."
                )
        segment = self._engine.directory.opened(fd, nbytes, Access.READ, self._called())
        self._dtype = array.dtype  # as it lies there, in whatever byte order
        region = Region(segment.number, offset, array.shape, arrays.code_of(array.dtype), array.strides)
        self._memory.point(Placed(region, segment))
        return True

    def lie_in(self, memory: Outgoing) -> None:
        """Become the array in *memory*, if there is one."""
        self._memory = memory
        if memory.placed is not None:
            self._dtype = memory.array.dtype  # as it lies there, in whatever byte order

    # ── whether it has changed ───────────────────────────────────────────────────────────────────

    def wrote(self) -> None:
        """Say that this program, or its workers, have written to the memory."""
        self._memory.wrote()

    def touch_if_shared(self) -> None:
        """Before a call: the contents may have changed through a view that still lives."""
        memory = self._memory
        if memory.placed is None:
            return
        ours = sole_owner(getattr, memory, "array") and not isinstance(memory, NamedOutgoing)
        shared = not (ours and sole_owner(getattr, memory.placed.segment, "base", 2))  # the array's, too
        if shared or self._was_shared:  # a view of the last call may have been written to since
            memory.touch()
        self._was_shared = shared

    # ── as an input ──────────────────────────────────────────────────────────────────────────────

    def detached(self) -> Data | Array:
        """The ``Data`` itself; of a frame of a ring, which the writer gets back, the array, which can be
        copied."""
        return self._memory.array if isinstance(self._memory, Slot) else self

    def lent(self) -> Placed | Array:
        """Where the contents lie, for workers of others; a copy of what lies there for a while only, as
        a frame of a ring does.

        Raises: InvalidValue if it was freed.
        """
        placed = self._memory.placed
        if placed is None:
            raise InvalidValue(f"{self._called()} {self._memory.MISSING}")
        if isinstance(self._memory, Slot) or placed.segment.fd == -1:
            return np.array(self._memory.array)
        return placed

    @property
    def region(self) -> Region | None:
        """Where the contents lie; another object whenever they move or change their shape."""
        placed = self._memory.placed
        return None if placed is None else placed.region

    def input(self, engine: Engine, called: str) -> Placed:
        """Where the contents lie, for a call on *engine*.

        Raises: InvalidValue if it belongs to another session or was freed.
        """
        if self._engine is not engine:
            raise self._foreign(called)
        if self._memory.placed is None:
            raise InvalidValue(f"{called} {self._memory.MISSING}")
        check_for_gpus(engine, self._dtype, called)
        if isinstance(self._memory, NamedOutgoing):
            self._memory.touch()
        return self._memory.placed


def make_data(
    engine: Engine,
    value: ArrayLike | os.PathLike[str] | Any = None,
    var: Any = None,
    dtype: DTypeLike | None = None,
    ndim: int | None = None,
    shape: Any = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
    shm_name: str | None = None,
) -> Data | StoredData:
    """An array in shared memory, or in a file: an input of functions.

    Args:
        value: its contents, of any shape.  A memory-mapped array (``np.load(…, mmap_mode="r")``,
            ``np.memmap``), or the path of a ``.npy`` file, is not copied: the workers map the same file,
            and the Data is read-only.  Of an ``h5py.Dataset`` and a ``zarr.Array`` the workers read
            their rows in each call: it becomes a ``StoredData``.
        var: something with a ``dtype`` and an ``ndim`` (and perhaps a ``name``) to take them from.
        dtype: one of fixed size: of numbers, dates, strings or records; by default the value's, or
            float64.
        ndim, shape: the number of dimensions, or all lengths, of one without a value: zeros.
        minibatch: it holds the rows of a batch, in its order: row k belongs to the k-th row that
            ``batch=`` names.
        force_cast: allow casts that lose information.
        oversize: how much more memory to take than is needed now, from 1 to 2.
        name: for messages.
        shm_name: a name by which other programs open the memory, such as ``"/frames"``; see
            docs/howto/named_memory.md.  It lasts until ``free_memory()``, ``close()`` or the end of the
            program, and the Data keeps its shape as long.

    Raises: InvalidType, InvalidValue; SharedMemoryError.
    """
    engine.require_ready()
    oversize = arrays.checked_oversize(oversize)
    if var is not None:
        dtype, ndim = dtype or var.dtype, var.ndim if ndim is None else ndim
        name = name or getattr(var, "name", None)
    wanted = None if shape is None else arrays.checked_shape(shape)
    if is_stored(value):
        if shm_name is not None:
            raise InvalidValue(
                "shm_name= gives a name to memory, and the workers read a file by themselves: give what "
                "it holds, data(value[...], shm_name=…)."
            )
        return make_stored(engine, value, dtype, ndim, wanted, minibatch, name)
    if isinstance(value, str | bytes | os.PathLike):
        value = mapped(value)
    array = None if value is None else _as_array(value, dtype, force_cast, name)
    dims = _one_ndim(ndim, wanted, array)
    if dtype is None:
        dtype = np.float64 if array is None else array.dtype
    made = Data(
        engine, dtype, dims, minibatch=minibatch, name=name or shm_name, library=library_of(value)
    )
    if array is not None and wanted is not None and wanted != array.shape:
        raise InvalidValue(f"shape={wanted} does not fit a value of shape {array.shape}: give one.")
    if shm_name is not None:
        if oversize != 1:
            raise InvalidValue("memory with a name (shm_name=) does not grow: leave oversize= out.")
        shape = wanted if array is None else array.shape
        with contextlib.ExitStack() as undo:
            with uninterrupted():
                made.lie_in(NamedOutgoing.made(engine, shm_name, made.dtype, shape, array))
                undo.callback(made.free_memory)
            undo.pop_all()
        return made
    if array is None:
        if wanted is not None:
            made.set_shape(wanted, oversize)
        return made
    if not (isinstance(array, np.memmap) and made.map_file(array)):
        made.set_value(array, force_cast, oversize)
    return made


def _as_array(value: ArrayLike, dtype: DTypeLike | None, force: bool, name: str | None) -> Array:
    """*value* as an array of *dtype*, or of its own; a memory map stays one where it can."""
    called = f"the Data {named(name)!r}" if name else "a Data"
    array = value if isinstance(value, np.memmap) else arrays.as_array(value, called)
    wanted = arrays.checked_dtype(array.dtype if dtype is None else dtype, called)
    return array if array.dtype == wanted else arrays.cast(value, wanted, force, called)


def _one_ndim(ndim: Any, shape: tuple[int, ...] | None, array: Array | None) -> int:
    """The number of dimensions that *ndim*, *shape* and *array*, where given, agree on."""
    said: dict[str, int] = {}
    if ndim is not None:
        said["ndim="] = arrays.checked_int(ndim, "ndim", 0)
    if shape is not None:
        said["shape="] = len(shape)
    if array is not None:
        said["the value"] = array.ndim
    if not said:
        raise InvalidValue("data() needs a value, a shape, an ndim, or a var that has one.")
    if len(set(said.values())) > 1:
        listed = ", ".join(f"{who} has {count}" for who, count in said.items())
        raise InvalidValue(f"the numbers of dimensions disagree: {listed}.")
    return next(iter(said.values()))


class InFile(Protocol):
    """An array of h5py's or zarr's."""

    @property
    def chunks(self) -> Any: ...


class MakesData(Protocol):
    """The type of ``data()``: what it returns is of the dtype, and the kind, of the value."""

    @overload
    def __call__(
        self,
        value: NDArray[Scalar],
        *,
        minibatch: bool = ...,
        oversize: float = ...,
        name: str | None = ...,
        shm_name: str | None = ...,
    ) -> Data[Scalar]: ...

    @overload
    def __call__(
        self,
        value: ArrayLike | os.PathLike[str] | None = ...,
        var: Any = ...,
        dtype: DTypeLike | None = ...,
        ndim: int | None = ...,
        shape: Any = ...,
        minibatch: bool = ...,
        force_cast: bool = ...,
        oversize: float = ...,
        name: str | None = ...,
        shm_name: str | None = ...,
    ) -> Data: ...

    @overload
    def __call__(
        self, value: InFile, *, minibatch: bool = ..., name: str | None = ...
    ) -> StoredData: ...
