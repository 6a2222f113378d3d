"""Arrays on their way to the workers: buffers in shared memory, used again and again.

``Outgoing`` holds one array at a time.  ``Data`` sits on top of it; arguments that are plain arrays,
values of variables and indices of rows go through one each.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import numpy as np

from ...errors import InvalidType, SharedMemoryError
from ...memory.segment import Segment
from ...plan.call import Region
from ...values.arrays import Array, Shape, code_of, is_numeric
from ..engine.engine import Engine

_NOTHING = np.empty(0, np.uint8)


class Placed(NamedTuple):
    """Where an array lies: its region, which commands name, and the segment, which has the bytes."""

    region: Region
    segment: Segment


class Outgoing:
    """A buffer in shared memory for one array, and then for the next.

    Attributes:
        array: the array there, as a view of the memory.
        placed: where it lies, or None while there is no memory.  Its region is another object after
            the place, the shape or the dtype has changed, and only then: plans are found by it.

    The workers may read it until the call has ended, also an interrupted one: settle before writing.
    """

    MISSING = "has no memory (it is empty, or was freed): give it contents with set_value()."
    """What to say of an array where there is no memory."""

    def __init__(self, engine: Engine, array: Array = _NOTHING) -> None:
        """A buffer without memory; *array* is what it holds: nothing, but of some dtype."""
        self.array: Array = array
        self.placed: Placed | None = None
        self._engine = engine

    def put(self, array: Array, called: str, oversize: float = 1) -> Placed:
        """Copy *array* in, as large as it is; errors call it *called*.

        *oversize* says how much more memory to take where there is too little.

        Raises: SharedMemoryError; InvalidType for a dtype that GPUs do not have.
        """
        check_for_gpus(self._engine, array.dtype, called)
        placed = self.placed
        if placed is None or (self.array.shape, self.array.dtype) != (array.shape, array.dtype):
            placed = self.resize(array.shape, array.dtype, called, oversize)
        self.refill(array)
        return placed

    def refill(self, array: Array) -> None:
        """Copy in an array of the shape and dtype of the one there."""
        self.array[...] = array
        self.wrote()

    def resize(self, shape: Shape, dtype: np.dtype[Any], called: str, oversize: float = 1) -> Placed:
        """Make room for an array: in the memory that there is, if it suffices, or in new zeroed memory.

        Raises: SharedMemoryError.
        """
        segment = None if self.placed is None else self.placed.segment
        elements = prod(shape)
        available = segment.nbytes if segment and self.array.flags.writeable else -1
        if segment is None or elements * dtype.itemsize > available:
            self._engine.require_ready()
            try:
                segment = self._engine.allocate(int(elements * oversize) * dtype.itemsize, called)
            except SharedMemoryError as error:
                raise SharedMemoryError(
                    f"no memory for {called} of shape {shape} and dtype {dtype}: {error}"
                ) from None
        return self.point(Placed(Region(segment.number, 0, shape, code_of(dtype)), segment))

    def point(self, placed: Placed) -> Placed:
        """Hold the array that lies at *placed*."""
        self.array = placed.segment.array(placed.region)  # which may raise
        self.placed = placed
        self.touch()
        return placed

    def wrote(self) -> None:
        """Say that this program has written to the buffer."""
        self.touch()

    def free(self) -> None:
        """Nobody needs the buffer any more."""

    def touch(self) -> None:
        """Say that copies on GPUs are stale: the contents have changed, or somebody got a view."""
        if self.placed is not None:
            self._engine.touch(self.placed.segment)


def check_for_gpus(engine: Engine, dtype: np.dtype[Any], called: str) -> None:
    """Raises: InvalidType if the workers compute on GPUs, and those do not have *dtype*."""
    if not engine.on_gpus:
        return
    if dtype.char in "gG":
        raise InvalidType(f"{called} holds {dtype}, which GPUs do not have: convert it, to float64 say.")
    if not is_numeric(dtype):
        raise InvalidType(
            f"{called} holds {dtype}, which GPUs do not have: give numbers, such as codes of strings "
            f'(np.unique(…, return_inverse=True)), .view("i8") of dates, and the fields of records.'
        )
