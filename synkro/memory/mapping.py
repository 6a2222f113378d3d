"""Mappings of shared memory at addresses where huge pages can serve, and the huge pages themselves.

The small pages of large arrays are expensive: the kernel zeroes, charges and maps each by itself, and
rows picked at random need an address translation each.  In pages of 2 MB, 1 GB is created, filled and
freed in a seventh of the time.  tmpfs makes them only on request (``MADV_COLLAPSE``, Linux 6.1,
madvise(2)), and maps them only where address and offset agree modulo 2 MB; Python's ``mmap`` takes no
address.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import numpy as np
from numpy.typing import NDArray

from ..plan.call import Access
from .interrupts import call_with_last

HUGE = 1 << 21
"""Bytes of a huge page, on x86-64 and on ARM with pages of 4 KB."""

_MADV_COLLAPSE = 25  # what the standard library has no names for
_MAP_FIXED = 0x10
_PROT_NONE = 0
_PUNCH_HOLE = 0x03  # FALLOC_FL_PUNCH_HOLE, which keeps the file's size
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

_unmap = ctypes.CDLL(None)["munmap"]  # it ignores the third argument that callbacks get
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.py_object]

_PROTECTION = {
    Access.READ: (mmap.PROT_READ, mmap.MAP_SHARED),
    Access.WRITE: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED),
    Access.COPY: (mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE),
}


def map_file(fd: int, nbytes: int, access: Access, offset: int = 0) -> NDArray[np.uint8]:
    """*nbytes* (at least one) of the file as an array; unmapped with the last view of it.

    *offset* is a multiple of a page.  Raises: OSError.
    """
    address = _map(fd, nbytes, access, offset)
    memory = (ctypes.c_uint8 * nbytes).from_address(address)
    call_with_last(memory, _unmap, address, nbytes)
    view = memoryview(memory)
    return np.frombuffer(view.toreadonly() if access is Access.READ else view, np.uint8)


def take_huge_pages(fd: int, nbytes: int, offset: int = 0) -> None:
    """Give an empty part of the file huge pages of zeros, as many as it holds, if the kernel can.

    *offset*, where the part begins, is a multiple of 2 MB.
    """
    whole = nbytes // HUGE * HUGE
    if not whole:
        return
    with contextlib.suppress(OSError):  # the file works with small pages, too
        for page in range(offset, offset + whole, HUGE):
            os.posix_fallocate(fd, page, 1)  # only what has a page is collapsed
        address = _map(fd, whole, Access.WRITE, offset)
        _libc.madvise(address, whole, mmap.MADV_HUGEPAGE)
        _libc.madvise(address, whole, _MADV_COLLAPSE)
        _libc.munmap(address, whole)


def give_back(fd: int, offset: int, nbytes: int) -> None:
    """Free the memory of a part of the file, which becomes a hole (fallocate(2))."""
    _libc.fallocate(fd, _PUNCH_HOLE, offset, nbytes)


def _map(fd: int, nbytes: int, access: Access, offset: int) -> int:
    """Map a part of the file; a large one at an address that is a multiple of a huge page's size."""
    if nbytes < HUGE:
        return _mmap(None, nbytes, *_PROTECTION[access], fd, offset)
    room = _mmap(None, nbytes + HUGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    address = -(-room // HUGE) * HUGE
    end = -(-(address + nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        protection, flags = _PROTECTION[access]
        _mmap(address, nbytes, protection, flags | _MAP_FIXED, fd, offset)
    except OSError:
        _libc.munmap(room, nbytes + HUGE)
        raise
    if address > room:
        _libc.munmap(room, address - room)
    if room + nbytes + HUGE > end:
        _libc.munmap(end, room + nbytes + HUGE - end)
    return address


def _mmap(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped: int = _libc.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped
