"""The main process's segments, as the gateway sees them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ..ipc.descriptors import Descriptors
from ..memory.files import Likeness, likeness
from ..memory.mapping import map_file
from ..messages import Attach
from ..plan.call import Access, Region
from ..values.arrays import Array


class Segments:
    """Those of a session."""

    def __init__(self, descriptors: Descriptors) -> None:
        self._descriptors = descriptors
        self._kept: set[int] = set()
        self._unmapped: dict[int, Attach] = {}
        self._memory: dict[int, NDArray[np.uint8]] = {}
        self._files: dict[int, Likeness] = {}

    def attach(self, attach: Attach) -> None:
        """There is one, whose descriptor has been sent."""
        number = attach.segment
        if number not in self._memory and number not in self._unmapped:
            self._unmapped[number] = attach
            if attach.file:
                self._files[number] = likeness(self._descriptors.descriptor(number))

    def keep(self, number: int) -> None:
        """Keep a segment until the end: the ranks write to it although its number is gone."""
        self._kept.add(number)

    def drop(self, number: int) -> None:
        """It is gone."""
        if number in self._kept:
            return
        if self._unmapped.pop(number, None) is not None:
            self._descriptors.release(number)
        self._memory.pop(number, None)
        self._files.pop(number, None)

    def file(self, number: int) -> Likeness | None:
        """What it looked like if it is a file of the user's, which others may write to."""
        return self._files.get(number)

    def memory(self, number: int) -> NDArray[np.uint8]:
        """All of a segment."""
        if number in self._unmapped:
            attach = self._unmapped.pop(number)
            fd = self._descriptors.descriptor(number)
            access = Access.WRITE if attach.access is Access.WRITE else Access.READ
            self._memory[number] = map_file(fd, attach.nbytes, access)
            self._descriptors.release(number)
        return self._memory[number]

    def array(self, region: Region) -> Array:
        """The array that *region* describes."""
        memory = self.memory(region.segment)
        array: Array = np.ndarray(region.shape, region.dtype, memory, region.offset, region.strides)
        return array
