"""Mirrors: a host's copies of the main process's segments, of the same numbers and sizes.

That of a memory-mapped file is the same file, where the host has it.
"""

from __future__ import annotations

import mmap
import os

import numpy as np
from numpy.typing import NDArray

from ..memory.files import Likeness, same_file
from ..memory.mapping import HUGE, map_file, take_huge_pages
from ..memory.segment import explained
from ..plan.call import Access, Region
from ..values.arrays import Array
from .traffic import Extent


class Mirrors:
    """Those of one host.  Only what is used of them takes memory."""

    def __init__(self) -> None:
        self._kept: set[int] = set()
        self._files: dict[int, int] = {}
        self._memory: dict[int, NDArray[np.uint8]] = {}

    def descriptor(self, number: int, nbytes: int) -> int:
        """That of a mirror, which is made at the first time.  Raises: SharedMemoryError."""
        if number not in self._files:
            try:
                file = os.memfd_create("synkro-mirror", os.MFD_CLOEXEC)
                self._files[number] = file
                os.fchmod(file, 0o600)
                os.ftruncate(file, nbytes)
                self._memory[number] = map_file(file, nbytes, Access.WRITE)
            except OSError as error:
                raise explained(error, nbytes) from None
        return self._files[number]

    def share(self, number: int, nbytes: int, wanted: Likeness) -> bool:
        """Be the file of this host that looks as *wanted*; returns whether there is one."""
        file = same_file(wanted)
        if file is None:
            return False
        try:
            self._memory[number] = map_file(file, nbytes, Access.READ)
        except OSError:
            os.close(file)
            return False
        self._files[number] = file
        return True

    def memory(self, number: int) -> NDArray[np.uint8]:
        """All of a mirror."""
        return self._memory[number]

    def array(self, region: Region) -> Array:
        """What a region of the main process's memory is here."""
        array: Array = np.ndarray(
            region.shape, region.dtype, self._memory[region.segment], region.offset, region.strides
        )
        return array

    def reserve(self, extent: Extent) -> None:
        """Have memory for these bytes: a full machine is an error here, and no SIGBUS later.

        Raises: SharedMemoryError.
        """
        file, page = self._files[extent.segment], mmap.PAGESIZE
        start = extent.start // page * page
        nbytes = min(-(-extent.stop // page) * page, os.fstat(file).st_size) - start
        try:
            if nbytes >= 2 * HUGE:
                low = -(-start // HUGE) * HUGE
                take_huge_pages(file, (start + nbytes - low) // HUGE * HUGE, low)
            os.posix_fallocate(file, start, nbytes)
        except OSError as error:
            raise explained(error, nbytes) from None

    def keep(self, number: int) -> None:
        """Keep a mirror until the end: the ranks write to it although its number is gone."""
        self._kept.add(number)

    def drop(self, number: int) -> None:
        """It is gone in the main process."""
        if number in self._files and number not in self._kept:
            self._memory.pop(number, None)
            os.close(self._files.pop(number))

    def close(self) -> None:
        """Drop them all."""
        self._kept.clear()
        for number in tuple(self._files):
            self.drop(number)
