"""Which objects are arrays in files, and what is to be known of them to open them in another process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InvalidType, InvalidValue, line_of
from ..plan.call import FileArray
from .opened import Opened


def is_stored(value: Any) -> bool:
    """Whether *value* is an array of h5py or zarr, or a group of them; this imports neither."""
    home = _home(value)
    return home is not None and bool(home.is_array(value))


def describe(value: Any, number: int) -> FileArray:
    """What is to be known of *value*, an array as ``is_stored`` finds it; *number* is its number.

    Raises: InvalidType, InvalidValue for one that other processes cannot open, as where it is open for
    writing; NotAvailable.
    """
    described: FileArray = _home(value).describe(value, number)
    return described


def opened(stored: FileArray) -> Opened:
    """An array, opened in this process.  Raises: OSError."""
    if stored.kind.startswith("HDF5"):
        from .hdf5 import OpenDataset  # noqa: PLC0415  h5py may not be installed

        return OpenDataset(stored)
    from .zarr import OpenArray  # noqa: PLC0415

    return OpenArray(stored)


def _home(value: Any) -> Any:
    """The module for objects of the package that *value* comes from, or None."""
    packages = {cls.__module__.partition(".")[0] for cls in type(value).__mro__}
    if "h5py" in packages:
        from . import hdf5  # noqa: PLC0415

        return hdf5
    if "zarr" in packages:
        from . import zarr  # noqa: PLC0415

        return zarr
    return None


def mapped(path: str | bytes | os.PathLike[str]) -> Any:
    """The array in a ``.npy`` file, memory-mapped.

    Raises: InvalidType, InvalidValue for a path of anything else.
    """
    shown = os.fspath(path)
    if not isinstance(shown, str):
        raise InvalidType(
            f"data() takes a path as a str, got {line_of(shown, 300)}: give os.fsdecode(path)."
        )
    try:
        with open(shown, "rb") as file:
            head = file.read(8)
    except IsADirectoryError:
        if any(Path(shown, name).exists() for name in ("zarr.json", ".zarray", ".zgroup")):
            raise InvalidType(
                f"{shown} is a folder of zarr's: give the array, zarr.open({shown!r}, mode='r')."
            ) from None
        raise InvalidValue(f"{shown} is a folder: data() takes the path of a .npy file.") from None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidValue(
            f"data() takes a str as the path of a .npy file, and cannot read {line_of(shown, 300)}: "
            f"{why}."
        ) from None
    if head[:6] != b"\x93NUMPY":
        raise InvalidType(f"{shown} is no .npy file. {_advice(shown, head)}")
    try:
        return np.load(shown, mmap_mode="r")
    except ValueError as error:
        raise InvalidValue(
            f"{shown} cannot be mapped: it is damaged or cut off, or holds objects of Python: {error}"
        ) from None


def _advice(path: str, head: bytes) -> str:
    if head == b"\x89HDF\r\n\x1a\n":
        return f"Give one of its datasets: data(h5py.File({path!r}, 'r')['name'])."
    if head[:2] == b"PK":
        return f"Give one of its arrays: data(np.load({path!r})['name'])."
    return "np.memmap(path, dtype, 'r', shape=…) maps files of plain numbers, and data() takes that."
