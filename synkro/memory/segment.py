"""Shared memory without a name: whichever process dies, nothing is left to clean up.

A segment is an unnamed file in ``/dev/shm`` (``O_TMPFILE``, mode 0600) or, where that is too small
(Docker's default is 64 MB), a memfd.  Only descriptors of it exist, and the kernel frees it with the
last one.  Its pages are reserved when it is created, so that a full machine is an error here and
never a SIGBUS later.

A table leads from a segment's number to its memory, in whichever process, and versions tell what has
changed there.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import resource
from collections.abc import Callable, Iterator
from typing import Any, Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..errors import SharedMemoryError
from ..machine import available_memory, readable_bytes
from ..plan.call import Access, Region
from .interrupts import call_off, call_with_last, uninterrupted
from .keeper import SHM_FOLDER
from .mapping import map_file, take_huge_pages

_close = ctypes.CDLL(None)["close"]  # it ignores the second argument that callbacks get
_close.argtypes = [ctypes.c_int, ctypes.py_object]

_NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE)

_MEASURED_FROM = 1 << 20
"""Smaller requests are made without a look at the free memory, which would cost more than they do."""


class Segment:
    """One mapping of shared memory, and the descriptor by which other processes map it.

    Attributes:
        number: its name in commands.
        nbytes: its size.
        base: all of it, as a 1-d array of uint8; views of it keep the mapping alive.
        fd: the descriptor, or -1 in a worker, which needs none.
    ``close`` gives the descriptor back; the memory goes with the last view of ``base``.
    """

    __slots__ = ("__weakref__", "_closing", "base", "fd", "nbytes", "number")

    def __init__(self, number: int, fd: int, nbytes: int, access: Access) -> None:
        """Map a file, and own *fd* from here on.  Raises: SharedMemoryError, after closing it."""
        self.number: Final = number
        self.nbytes: Final = nbytes
        self.fd: int = fd
        self._closing = call_with_last(self, _close, fd)
        try:
            self.base: Final = map_file(fd, nbytes, access)
        except OSError as error:
            self.close()
            raise explained(error, nbytes) from None

    @classmethod
    def create(cls, number: int, nbytes: int) -> Segment:
        """Reserve *nbytes* (at least one) of zeroed memory.

        Raises: SharedMemoryError if there is less.
        """
        nbytes = max(nbytes, 1)
        with uninterrupted():
            return cls(number, _reserve(nbytes), nbytes, Access.WRITE)

    @classmethod
    def attach(cls, number: int, fd: int, nbytes: int, access: Access) -> Segment:
        """Map a segment that another process created, and close *fd*."""
        segment = cls(number, fd, nbytes, access)
        segment.close()
        return segment

    def array(self, region: Region) -> NDArray[np.generic]:
        """The array that *region* describes, as a view."""
        return array_in(self.base, region)

    def close(self) -> None:
        if call_off(self._closing):
            os.close(self.fd)
        self.fd = -1


def array_in(memory: NDArray[np.uint8], region: Region) -> NDArray[np.generic]:
    """The array that *region* describes in the *memory* of its segment, as a view."""
    place = region.offset, region.strides
    array: NDArray[np.generic] = np.ndarray(region.shape, region.dtype, memory, *place)
    return array


def _reserve(nbytes: int) -> int:
    """A descriptor of *nbytes* of reserved, zeroed, unnamed memory."""
    require_memory(nbytes)
    try:
        if nbytes < _MEASURED_FROM or nbytes <= shm_free():
            with contextlib.suppress(OSError):  # no such folder, or no room in it after all
                fd = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
                return reserved(fd, nbytes)
        return memory_file("synkro", nbytes)
    except OSError as error:
        raise explained(error, nbytes) from None


def memory_file(name: str, nbytes: int) -> int:
    """A descriptor of *nbytes* of reserved, zeroed memory of no folder, of which Linux shows the *name*.

    Raises: OSError.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC)
    os.fchmod(fd, 0o600)
    return reserved(fd, nbytes)


def require_memory(nbytes: int) -> None:
    """Raises: SharedMemoryError if the machine has less memory left."""
    if nbytes >= _MEASURED_FROM and nbytes > (available := available_memory()):
        raise SharedMemoryError(
            f"{readable_bytes(nbytes)} of shared memory were asked for, but the machine has "
            f"{readable_bytes(available)} of memory left: use less data at once, free some with "
            f"Data.free_memory(), or pass a memory-mapped file (numpy.memmap), which needs none."
        )


def shm_free() -> int:
    """Bytes that are free where shared memory lies; 0 where there is no such folder."""
    with contextlib.suppress(OSError):
        stat = os.statvfs(SHM_FOLDER)
        return stat.f_bavail * stat.f_frsize
    return 0


def reserved(fd: int, nbytes: int) -> int:
    """Reserve the pages of an empty file, and return it; close it where that fails."""
    with undoing(os.close, fd):
        os.ftruncate(fd, nbytes)
        take_huge_pages(fd, nbytes)
        os.posix_fallocate(fd, 0, nbytes)
    return fd


def explained(error: OSError, nbytes: int) -> SharedMemoryError:
    """The error for *nbytes* that could not be reserved or mapped."""
    what = f"{readable_bytes(nbytes)} of shared memory could not be had"
    why = os.strerror(error.errno or 0)
    if error.errno in _NO_DESCRIPTOR:
        return _too_few(error, what)
    if error.errno == errno.EFBIG:
        limit = readable_bytes(resource.getrlimit(resource.RLIMIT_FSIZE)[0])
        return SharedMemoryError(
            f"{what} ({why}): the limit of the size of files (ulimit -f, RLIMIT_FSIZE) is {limit}, and "
            f"holds for shared memory, too: raise it."
        )
    addresses, _ = resource.getrlimit(resource.RLIMIT_AS)
    if error.errno == errno.ENOMEM and addresses != resource.RLIM_INFINITY:
        return SharedMemoryError(
            f"{what} ({why}): this process may have {readable_bytes(addresses)} of memory, shared and "
            f"private (ulimit -v, RLIMIT_AS): raise that, or use less data at once."
        )
    return SharedMemoryError(
        f"{what} ({why}; {SHM_FOLDER} has {readable_bytes(shm_free())} left, the machine "
        f"{readable_bytes(available_memory())}): use less data at once, or free some (Data.free_memory)."
    )


@contextlib.contextmanager
def undoing(undo: Callable[..., object], *args: Any) -> Iterator[None]:
    """A block after something was done, which ``undo(*args)`` undoes if the block fails."""
    try:
        yield
    except BaseException:
        undo(*args)
        raise


@contextlib.contextmanager
def descriptors_for(what: str) -> Iterator[None]:
    """A block that opens files.  Raises: SharedMemoryError, that *what* failed, if none is left."""
    try:
        yield
    except Exception as error:
        check_descriptors(error, what)
        raise


def check_descriptors(error: BaseException, what: str) -> None:
    """Raises: SharedMemoryError, which says *what* failed, if *error* came as no descriptor is left."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno in _NO_DESCRIPTOR:
            raise _too_few(cause, what) from None
        cause = cause.__cause__ or cause.__context__


def _too_few(error: OSError, what: str) -> SharedMemoryError:
    return SharedMemoryError(
        f"{what} ({os.strerror(error.errno or 0)}): raise the limit (ulimit -n), or hold fewer Data, "
        f"files and sockets at once: each needs one."
    )


T = TypeVar("T")
Bytes = NDArray[np.uint8]

_VERSIONS = 1 << 12


class SegmentTable(Generic[T]):
    """The segments that a process knows; each is mapped at its first use.

    If that fails, the next use tries again.
    """

    def __init__(self, mapped: Callable[[int, T], Bytes], release: Callable[[int], object]) -> None:
        """*mapped* maps a segment, by its number and what was said of it; *release* gives back what it
        was to be mapped by."""
        self._mapped = mapped
        self._release = release
        self._memory: dict[int, Bytes] = {}
        self._unmapped: dict[int, T] = {}
        self._kept: set[int] = set()

    def attach(self, number: int, wanted: T) -> bool:
        """There is a segment, of which *wanted* is said; returns whether it is new."""
        new = number not in self._memory and number not in self._unmapped
        if new:
            self._unmapped[number] = wanted
        return new

    def put(self, number: int, memory: Bytes) -> None:
        """There is a segment, which is mapped already."""
        self._memory[number] = memory

    def is_mapped(self, number: int) -> bool:
        """Whether a segment has been used."""
        return number in self._memory

    def keep(self, number: int) -> None:
        """Keep a segment until the end: the ranks write to it although its number is gone."""
        self._kept.add(number)

    def drop(self, number: int) -> bool:
        """Segment *number* is gone in the main process; returns whether it is gone here."""
        if number in self._kept:
            return False
        if self._unmapped.pop(number, None) is not None:
            self._release(number)
        self._memory.pop(number, None)
        return True

    def memory(self, number: int) -> Bytes:
        """All of a segment.  Raises: as what maps it."""
        memory = self._memory.get(number)
        if memory is None:
            with uninterrupted():
                memory = self._memory[number] = self._mapped(number, self._unmapped[number])
                del self._unmapped[number]
                self._release(number)
        return memory

    def array(self, region: Region) -> NDArray[np.generic]:
        """The array that *region* describes, as a view."""
        return array_in(self.memory(region.segment), region)


class Versions:
    """A version for each segment, also this one, which grows when its contents may have changed.

    Versions are hashed by the number of the segment: a collision causes a needless copy, never a stale
    one.

    Attributes:
        segment, region: the memory of the versions.
    """

    NBYTES = 8 * _VERSIONS

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.region: Final = Region(segment.number, 0, (_VERSIONS,), "<u8")
        self._numbers = segment.array(self.region)
        self._own = segment.number % _VERSIONS

    def touch(self, number: int) -> None:
        """Say that the contents of segment *number* may have changed since the last call."""
        self._numbers[number % _VERSIONS] += 1
        self._numbers[self._own] += 1
