"""Which file a memory-mapped array maps, so that others can map it as well, also on other hosts."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any, NamedTuple

import numpy as np

from .segment import descriptors_for

_PAGE = 1 << 12
_PAGES = 16  # of a file that are compared


def file_of(array: np.memmap[Any, Any], flags: int = os.O_RDONLY) -> tuple[int, int] | None:
    """A descriptor of the file that *array* maps, and the offset of its first element there.

    *flags* say for what it is opened.  None if the file's contents may differ from the array's (a
    copy-on-write map, a replaced file), if it has no name, or if a stride is not positive.
    """
    handle = getattr(array, "_mmap", None)
    if array.filename is None or not isinstance(handle, mmap.mmap) or array.mode == "c":
        return None
    if array.size == 0 or any(stride <= 0 for stride in array.strides):
        return None
    start = np.frombuffer(handle, np.uint8).__array_interface__["data"][0]
    address = array.__array_interface__["data"][0]
    with descriptors_for(f"the file {array.filename} could not be mapped"):
        mapped = _mapped_file(start)
    with contextlib.suppress(OSError):
        fd = os.open(array.filename, flags | os.O_CLOEXEC)
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


class Likeness(NamedTuple):
    """By what another host knows a file: *mtime* is in ns, *digest* that of pages all over it."""

    path: str
    nbytes: int
    mtime: int
    digest: bytes


def likeness(fd: int, path: str | None = None) -> Likeness:
    """The likeness of an open file, which has this *path*, or the one by which it was opened.

    What this host has written to it goes to the disk first: there other hosts see it.

    Raises: OSError.
    """
    import hashlib  # noqa: PLC0415  it takes a while, and few programs need it

    if path is None:
        with contextlib.suppress(OSError):  # not on every file system
            os.fsync(fd)
    status = os.fstat(fd)
    last = max(0, status.st_size - _PAGE)
    pages = [os.pread(fd, _PAGE, last * place // (_PAGES - 1)) for place in range(_PAGES)]
    digest = hashlib.sha256(b"".join(pages)).digest()
    path = os.readlink(f"/proc/self/fd/{fd}") if path is None else path
    return Likeness(path, status.st_size, status.st_mtime_ns, digest)


def same_file(wanted: Likeness) -> int | None:
    """A descriptor of the file here that looks as *wanted*; None if there is none at its path."""
    with contextlib.suppress(OSError):
        fd = os.open(wanted.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            if likeness(fd, wanted.path) == wanted:
                return fd
        os.close(fd)
    return None
