"""Which file a memory-mapped array maps, so that others can map it as well."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np


def file_of(array: np.memmap[Any, Any]) -> tuple[int, int] | None:
    """A descriptor of the file that *array* maps, and the offset of its first element there.

    None if the file's contents may differ from the array's (a copy-on-write map, a replaced file), if
    it has no name, or if a stride is not positive.
    """
    handle = getattr(array, "_mmap", None)
    if array.filename is None or not isinstance(handle, mmap.mmap) or array.mode == "c":
        return None
    if array.size == 0 or any(stride <= 0 for stride in array.strides):
        return None
    start = np.frombuffer(handle, np.uint8).__array_interface__["data"][0]
    address = array.__array_interface__["data"][0]
    mapped = _mapped_file(start)
    with contextlib.suppress(OSError):
        fd = os.open(array.filename, os.O_RDONLY | os.O_CLOEXEC)
        if mapped is not None and os.fstat(fd).st_ino == mapped[0]:
            return fd, mapped[1] + address - start
        os.close(fd)
    return None


def _mapped_file(address: int) -> tuple[int, int] | None:
    """The inode of the file that is mapped at *address*, and the file's offset there (proc(5))."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            span, _, offset, _, inode, *_ = line.split()
            low, high = (int(part, 16) for part in span.split("-"))
            if low <= address < high:
                return int(inode), int(offset, 16) + address - low
    return None
