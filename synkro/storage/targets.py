"""Arrays of zarr's, which take what functions return: each rank writes chunks of its own.

A store is a folder, so that every process opens it by itself.  Rows are cut where chunks (or shards)
begin, so that no two ranks write to one file::

    rows    0        64       128      192   230
    chunks  │────────│────────│────────│─────│
    ranks   │ 0 ──────────────│ 1 ───────────│
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import Any, NamedTuple

import numpy as np

from ..errors import A_LINE, InvalidType, InvalidValue, shown, with_article
from ..messages import Export, Exported
from ..plan.split import Span, split
from ..values.arrays import Array

_BLOCK = 1 << 24  # bytes of rows that are written at a time
_REPLACED = "was replaced, resized or deleted since it was opened"


class Chunked(NamedTuple):
    """An array of zarr's, as far as other processes need to know it.

    Attributes:
        store, path: the folder of its store, and its path there.
        rows: how many rows no two ranks may share: those of a shard, or of a chunk.
        layout: what it was when the user opened it.
    """

    store: str
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    rows: int
    layout: str

    def __str__(self) -> str:
        return f"the zarr array {self.folder}"

    @property
    def folder(self) -> str:
        return os.path.join(self.store, self.path).rstrip(os.sep)

    def check(self) -> None:
        """Raises: InvalidValue if another array lies there now than the user has opened."""
        from .zarr import layout_at  # noqa: PLC0415  zarr may not be installed

        if layout_at(self.store, self.path) != self.layout:
            raise InvalidValue(
                f'{self} {_REPLACED}: open it again, by zarr.open_array(…, mode="r+"). Nothing was '
                f"computed."
            )

    def shares(self, count: int) -> list[Span]:
        """The rows that each of *count* processes writes, whole chunks; some may have none."""
        end = self.shape[0]
        parts = split(0, -(-end // self.rows), count)
        return [(min(start * self.rows, end), min(stop * self.rows, end)) for start, stop in parts]


def chunked(array: Any) -> Chunked:
    """What other processes need to know of an *array* of zarr's that they are to write to.

    Raises: InvalidType, InvalidValue for one that they cannot.
    """
    kind = type(array).__name__
    if kind != "Array":
        raise InvalidType(
            f"out= takes arrays of zarr's, got {shown(array, A_LINE)}, a zarr {kind}: name an array in "
            f'it, such as group["result"].'
        )
    store = array.store
    if type(store).__name__ != "LocalStore":
        raise InvalidType(
            f"out= takes zarr arrays in a folder, which every worker opens by itself (a LocalStore of "
            f"zarr 3); this one is in {with_article(type(store).__name__)}: make it by "
            f'zarr.create_array("folder.zarr", …), or take the result, and then array[...] = result.'
        )
    from .zarr import layout  # noqa: PLC0415  zarr may not be installed

    found = Chunked(
        str(store.root),
        array.path,
        tuple(array.shape),
        np.dtype(array.dtype),
        (array.shards or array.chunks or (1,))[0],
        layout(array),
    )
    if array.read_only:
        raise InvalidValue(f'{found} is read-only: open it by zarr.open_array(…, mode="r+").')
    if not os.path.isdir(found.folder):
        raise InvalidValue(f"{found} is not there any more: make it anew.")
    return found


def write(command: Export, rows: Array, span: Span) -> Exported:
    """Write the *span* of all *rows* to the array that a *command* names, some chunks at a time.

    An interrupt comes between two chunks, and no chunk is written after it, or after an error.
    """
    from .zarr import ChunkWriter  # noqa: PLC0415  it takes a while, and few programs need it

    done, stop = span
    reached = done
    with contextlib.closing(ChunkWriter()) as writer:
        try:
            if writer.open(command.store, command.path) != command.layout:
                raise OSError(errno.ESTALE, f"it {_REPLACED}")
            step = writer.unit * max(1, _BLOCK // max(1, writer.unit * rows[:1].nbytes))
            while done < stop:
                reached = min(done + step, stop)
                writer.write(rows, done, reached)
                done = reached
        except OSError as error:
            return Exported(done, reached, error.errno or 0, error.strerror or str(error))
    return Exported(done, reached)
