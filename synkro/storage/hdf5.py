"""Datasets of HDF5 files, by h5py."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from math import prod
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from ..errors import InvalidType, InvalidValue
from ..plan.call import FileArray
from ..values.arrays import Array, code_of
from .opened import Opened, called, part, stamp_of

KIND = "HDF5 dataset"


def is_array(value: Any) -> bool:
    """Whether *value* is a dataset, or the group that it is in."""
    return isinstance(value, h5py.Dataset | h5py.Group)


def describe(value: Any, number: int) -> FileArray:
    """A dataset, so that another process can open it.

    Raises: InvalidType, InvalidValue for one that others cannot open and find the same.
    """
    if not value:
        raise InvalidType(
            "the HDF5 file of the dataset is closed, so it is no array any more: open it again, with "
            "h5py.File(path, 'r'), and give the dataset before you close it."
        )
    if isinstance(value, h5py.Group):
        inside = ", ".join(map(repr, list(value)[:5])) or "nothing"
        raise InvalidType(
            f"the group {value.name!r} of {_shown(value.file)} is no array: give one of its datasets. "
            f"There is {inside} in it."
        )
    if value.shape is None:
        what = called(KIND, _shown(value.file), value.name or "")
        raise InvalidType(f"{what} is empty: it has a type, and no elements.")
    path = _path_of(value.file)
    what = called(KIND, path, value.name or "")
    if value.name is None:
        raise InvalidValue(f"a dataset of {path} has no name, by which others could open it: give x[:].")
    if value.file.get(value.name) != value:  # h5py names it as in the file where the link is
        raise InvalidValue(
            f"{what} is not there under this name, as it was reached by a link to another file, or has "
            f"got a new name: open {path}, and give the dataset in it; or give a copy, x[:]."
        )
    if value.is_virtual or value.external:
        where = "is a virtual one, and" if value.is_virtual else "is external: it"
        raise InvalidValue(
            f"{what} {where} lies in other files: give datasets of these, or a copy, x[:]."
        )
    if value.dtype.subdtype is not None:
        raise InvalidType(f"each element of {what} is an array, {value.dtype}: give a copy, x[:].")
    row_bytes = max(1, value.dtype.itemsize * prod(value.shape[1:]))
    chunk = value.chunks[0] if value.chunks else max(1, _BLOCK // row_bytes)
    dtype = code_of(value.dtype)
    return FileArray(number, KIND, path, value.name, value.shape, dtype, chunk, stamp_of(path))


_BLOCK = 1 << 20  # bytes that are read together of what has no chunks


def _shown(file: Any) -> str:
    return str(file.filename)


def _path_of(file: Any) -> str:
    """The absolute path of an open file, after a look whether others can open it."""
    if file.driver != "sec2":
        raise InvalidValue(
            f"the HDF5 file {_shown(file)} is opened by the driver {file.driver!r}, so there is no file "
            f"on a disk for the workers: open one with h5py.File(path, 'r'), or give a copy, x[:]."
        )
    if file.mode != "r":
        raise InvalidValue(
            f"the HDF5 file {_shown(file)} is open for writing (mode {file.mode!r}): close it, and open "
            f"it with h5py.File(path, 'r')."
        )
    descriptor = file.id.get_vfd_handle()
    path = os.readlink(f"/proc/self/fd/{descriptor}")
    with contextlib.suppress(OSError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return path
    raise InvalidValue(
        f"the HDF5 file {_shown(file)} was moved, deleted or replaced while it was open: open it again, "
        f"with h5py.File(path, 'r')."
    )


class OpenDataset(Opened):
    """A dataset, in a file that this process has opened by itself.

    The file is locked for readers, where the file system can, so that nobody opens it for writing.
    """

    SKIPPED = 1 << 15  # a row of its own takes h5py as long as so many bytes

    _file: Any = None

    def _open(self) -> None:
        # room for the chunks in which one piece of a call ends and the next begins: unpacked once
        room = max(_BLOCK, self.stored.chunk * self._row_bytes)
        self._file = h5py.File(self.stored.path, "r", locking="best-effort", rdcc_nbytes=room)
        self._dataset = self._file[self.stored.name]

    def _read(self, target: Array, start: int, stop: int) -> None:
        dtype = self._dataset.dtype
        if h5py.check_opaque_dtype(dtype) or h5py.check_string_dtype(dtype):
            # dates and UTF-8, which only h5py's own arrays take
            target[...] = self._dataset[part(self.stored.shape, start, stop)]
        else:
            self._dataset.read_direct(target, part(self.stored.shape, start, stop))

    def _read_rows(self, target: Array, rows: NDArray[np.int64]) -> None:
        target[...] = self._dataset[rows]

    def _is_unchanged(self, chunks: Sequence[int]) -> bool:
        return stamp_of(self.stored.path) == self.stored.stamp

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
