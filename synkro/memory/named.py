"""Shared memory with a name: segments in ``/dev/shm`` that programs of any language open.

::

    0     the header: ``HEADER``
    4096  the rows of an array; or the slots of a ring, each at a multiple of 64 bytes

A segment is made without a name, filled and locked, and gets its name last: whoever opens it finds it
whole.  Its maker holds flock(2) on it, by a descriptor that nothing is mapped by, and shares that with
its keeper only; so a name whose lock is free is one that a program has left.

A name ends with the ``Data`` or ring that it is of, the session, or the program.  If the program is
killed, its keeper removes it; if that is killed, too, the next ``fork()`` of any program of this user's.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import errno
import fcntl
import importlib
import os
import socket
import stat
import struct
import subprocess
import threading
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidType, InvalidValue, NotAvailable, counted
from ..machine import python
from ..plan.call import Access, Region, aligned
from ..values.arrays import Array, code_of, is_fixed, is_of_extension
from . import keeper
from .interrupts import uninterrupted
from .keeper import COMPANIONS, MAGIC, SHM_FOLDER, remove
from .segment import Segment, descriptors_for, explained, require_memory, reserved, undoing

HEADER_BYTES = 4096
VERSION = 1
ARRAY, RING = 0, 1
_NDIM = 64
_DTYPE_BYTES = 1024
_LONGEST = 254  # bytes of a name, without its slash

_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("magic", "S8", 0),
    ("version", "<u4", 8),
    ("kind", "<u4", 12),
    ("offset", "<u8", 16),
    ("slots", "<u8", 24),
    ("slot_bytes", "<u8", 32),
    ("ndim", "<u8", 40),
    ("shape", f"({_NDIM},)<u8", 48),
    ("dtype", f"S{_DTYPE_BYTES}", 1024),
    ("writes", "<u8", 2048),
    ("writer", "<u8", 2056),
    ("ended", "<u8", 2064),
    ("read", "<u8", 2112),
)

_NAMES, _FORMATS, _OFFSETS = map(list, zip(*_FIELDS, strict=True))

HEADER = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": _OFFSETS, "itemsize": HEADER_BYTES})
"""The header, little-endian.  What the writer and the reader of a ring count are 64 bytes apart."""

WRITER_BYTE = 1
"""The byte of a ring's segment that its writer locks, as fcntl(2) does for open file descriptions."""

_RANGE = struct.Struct("hhqqi4x")  # struct flock


class SegmentLayout(NamedTuple):
    """What lies behind a header: an array of this *shape*, or so many *slots* with one each."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    slots: int = 0
    offset: int = HEADER_BYTES
    slot_bytes: int = 0

    @property
    def one(self) -> int:
        """The bytes of one array."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """The bytes of the whole segment."""
        last = self.slot_bytes * (self.slots - 1) if self.slots else 0
        return self.offset + last + self.one

    def region(self, segment: int, slot: int = 0) -> Region:
        """Where an array lies in the segment of this number."""
        return Region(segment, self.offset + slot * self.slot_bytes, self.shape, code_of(self.dtype))


def ring_layout(dtype: np.dtype[Any], shape: tuple[int, ...], slots: int) -> SegmentLayout:
    """The layout of a ring: each slot begins at a multiple of 64 bytes."""
    layout = SegmentLayout(dtype, shape, slots)
    return layout._replace(slot_bytes=aligned(max(layout.one, 1)))


def checked_name(name: Any, room: int = 0) -> str:
    """A name with its slash, which may be left out; *room* is for what is put behind it.

    Raises: InvalidType, InvalidValue.
    """
    if not isinstance(name, str):
        raise InvalidType(
            f"a name of shared memory is a string, such as '/frames'; got {name!r}, a "
            f"{type(name).__name__}."
        )
    bare = name.removeprefix("/")
    longest = _LONGEST - room
    if not bare or "/" in bare or "\0" in bare or bare in (".", ".."):
        raise InvalidValue(
            f"a name of shared memory is a slash and what is no path, such as '/frames'; got {name!r}."
        )
    if len(os.fsencode(bare)) > longest:
        raise InvalidValue(
            f"a name of shared memory has at most {longest} bytes behind its slash; {name[:20]}… has "
            f"{len(os.fsencode(bare))}."
        )
    return f"/{bare}"


def checked_ring_name(name: Any) -> str:
    """A name of a ring with its slash, which may be left out; there is room for the names of its
    semaphores."""
    return checked_name(name, len("sem.") + len(COMPANIONS[0]))


# ── making one ───────────────────────────────────────────────────────────────────────────────────────


def create(number: int, name: str, layout: SegmentLayout) -> Segment:
    """A segment of zeros with a name and a header, which ``end`` ends.

    Raises: SharedMemoryError; InvalidValue if the name is in use.
    """
    require_memory(layout.nbytes)
    with uninterrupted():
        try:
            fd = os.open(SHM_FOLDER, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(fd, 0o600)
            fd = reserved(fd, layout.nbytes)
        except OSError as error:
            raise explained(error, layout.nbytes) from None
        segment = Segment(number, fd, layout.nbytes, Access.WRITE)
        with undoing(segment.close):
            _fill_in(header_of(segment.base), layout)
            with descriptors_for(f"the name {name} could not be had"):
                _names.publish(name, segment)
    return segment


def end(name: str, segment: Segment) -> None:
    """Remove the name, if it is still that of *segment*; the memory lives on where it is mapped."""
    with uninterrupted():
        _names.end(name, segment)


def _fill_in(header: Array, layout: SegmentLayout) -> None:
    code = _description(layout.dtype)
    if len(code) >= _DTYPE_BYTES:
        raise InvalidValue(
            f"the dtype {layout.dtype} is too long for memory with a name: its description has "
            f"{len(code)} bytes, and there is room for {_DTYPE_BYTES - 1}."
        )
    header["version"], header["kind"] = VERSION, RING if layout.slots else ARRAY
    header["offset"], header["slots"], header["slot_bytes"] = layout[3], layout[2], layout[4]
    header["ndim"] = len(layout.shape)
    header["shape"][0, : len(layout.shape)] = layout.shape
    header["dtype"], header["magic"] = code, MAGIC


def _description(dtype: np.dtype[Any]) -> bytes:
    """*dtype* as the header has it: by its name, records as in the header of a ``.npy`` file."""
    if dtype.names is None:
        return str(code_of(dtype)).encode()
    try:
        fields = repr(np.lib.format.dtype_to_descr(dtype))
    except ValueError:  # they overlap, or are in another order
        raise InvalidType(
            f"memory with a name holds records whose fields lie one behind the other; got {dtype}: "
            f"convert them, by numpy.lib.recfunctions.repack_fields."
        ) from None
    return fields.encode()


def header_of(base: Array) -> Array:
    """The header of a mapped segment, as an array of one record."""
    return base[:HEADER_BYTES].view(HEADER)


# ── opening one ──────────────────────────────────────────────────────────────────────────────────────


def posix_ipc() -> Any:
    """The module.  Raises: NotAvailable."""
    try:
        import posix_ipc as module  # noqa: PLC0415  Python 3.14 may not have it
    except ModuleNotFoundError:
        raise NotAvailable(
            "opening memory with a name needs posix_ipc: pip install posix_ipc (on Python 3.14 with a C "
            "compiler)."
        ) from None
    return module


def open_named(name: str, writable: bool, any_owner: bool) -> tuple[int, int]:
    """A descriptor of a segment that another program has made, and its size.

    Raises: InvalidValue if there is none, it cannot be opened, or ``check_owner`` refuses it;
    SharedMemoryError.
    """
    path = SHM_FOLDER + name
    flags = (os.O_RDWR if writable else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        with descriptors_for(f"the shared memory {name} could not be opened"):
            fd = os.open(path, flags)
    except FileNotFoundError:
        raise InvalidValue(
            f"there is no shared memory with the name {name}: start the program that makes it first. If "
            f"it was there, a program may have removed it: up to Python 3.12, "
            f"multiprocessing.shared_memory does so at the end of a program that has only opened it."
        ) from None
    except PermissionError:
        how = "written" if writable else "read"
        raise InvalidValue(
            f"the shared memory {name} is another user's, or cannot be {how} by this one: run both "
            f"programs as the same user{', or leave writable= out' if writable else ''}."
        ) from None
    except OSError as error:  # a folder, a link, or a name that the system does not take
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise InvalidValue(f"the shared memory {name} cannot be opened: {why}.") from None
    with undoing(os.close, fd):
        status = os.fstat(fd)
        check_owner(fd, f"the shared memory {name}", path, any_owner)
        check_kind(status.st_mode, f"the shared memory {name}")
        if not status.st_size:
            raise InvalidValue(
                f"the shared memory {name} is empty: its maker has to give it a size first."
            )
    return fd, status.st_size


def check_owner(fd: int, called: str, path: str, any_owner: bool = False) -> None:
    """Raises: InvalidValue where somebody else than this user and root may have written an open file."""
    if any_owner:
        return
    status = os.fstat(fd)
    otherwise = "or give any_owner=True if you trust what they write"
    if status.st_uid not in (os.geteuid(), 0):
        raise InvalidValue(
            f"{called} belongs to another user, of the number {status.st_uid}, who may have put "
            f"anything there: run both programs as the same user, {otherwise}."
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise InvalidValue(
            f"{called} can be written by other users (its mode is {stat.S_IMODE(status.st_mode):04o}): "
            f"take that from them, by chmod 600 {path}, {otherwise}."
        )


def check_kind(mode: int, called: str) -> None:
    """Raises: InvalidValue for what is no file, but lies where memory is looked for."""
    if not stat.S_ISREG(mode):
        kind = next((what for what, test in _KINDS.items() if test(mode)), "a device")
        raise InvalidValue(f"{called} is {kind}, and no memory: remove it, or take another name.")


_KINDS = {
    "a symbolic link": stat.S_ISLNK,
    "a folder": stat.S_ISDIR,
    "a pipe": stat.S_ISFIFO,
    "a socket": stat.S_ISSOCK,
}
_SEMAPHORE_BYTES = 4 * struct.calcsize("P")  # sizeof(sem_t), of glibc and of musl


def check_companions(name: str, any_owner: bool) -> None:
    """Raises: InvalidValue where the semaphores of a ring are none, and as ``check_owner``.

    No other user can put another in the place of one that is checked: the folder is sticky.
    """
    for path in keeper.companions(name):
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # whoever opens them says it
        try:
            status = os.fstat(fd)
            called = f"a semaphore of the ring {name}, {path},"
            check_kind(status.st_mode, called)
            check_owner(fd, called, path, any_owner)
            if status.st_size < _SEMAPHORE_BYTES:
                raise InvalidValue(
                    f"{called} has {counted(status.st_size, 'byte')}, and a semaphore has "
                    f"{_SEMAPHORE_BYTES}: make the ring anew."
                )
        finally:
            os.close(fd)


def layout_of(fd: int, name: str) -> SegmentLayout | None:
    """What the header says, checked; None if there is none.

    Arrays of this layout can be made, and they lie in the file, whatever the bytes are.

    Raises: InvalidValue for a header that cannot be.
    """
    data = os.pread(fd, HEADER_BYTES, 0)
    if data[: len(MAGIC)] != MAGIC or len(data) < HEADER_BYTES:
        return None
    header = np.frombuffer(data, HEADER)[0]
    if header["version"] != VERSION:
        raise InvalidValue(
            f"the header of the shared memory {name} is of version {header['version']}, and this is "
            f"Synkro for version {VERSION}: use the same Synkro in both programs."
        )
    kind, ndim, offset, slots, slot_bytes = (
        int(header[field]) for field in ("kind", "ndim", "offset", "slots", "slot_bytes")
    )
    _check_field(name, "kind", kind, kind in (ARRAY, RING), f"{ARRAY}, an array, or {RING}, a ring")
    _check_field(name, "ndim", ndim, ndim <= _NDIM, f"at most {_NDIM}")
    _check_field(name, "offset", offset, offset >= HEADER_BYTES, f"at least {HEADER_BYTES}")
    _check_field(name, "slots", slots, bool(slots) == (kind == RING), "0 of an array, more of a ring")
    dtype, shape = _dtype_of(bytes(header["dtype"]), name), tuple(map(int, header["shape"][:ndim]))
    layout = SegmentLayout(dtype, shape, slots, offset, slot_bytes)
    least = ring_layout(dtype, shape, slots).slot_bytes
    apart = not slots or (slot_bytes >= least and slot_bytes == aligned(slot_bytes))
    expected = f"a multiple of {aligned(1)}, and at least {least}, for a frame"
    _check_field(name, "slot_bytes", slot_bytes, apart, expected)
    nbytes = os.fstat(fd).st_size
    if layout.nbytes > nbytes:
        raise InvalidValue(
            f"the header of the shared memory {name} cannot be right: it tells of "
            f"{counted(layout.nbytes, 'byte')}, of {slots or 1} × {_shown(dtype)} of shape "
            f"{_shown(shape)} from byte {offset} on, and there are {nbytes}. Make it anew."
        )
    _check_field(name, "shape", _shown(shape), _can_be(shape, dtype), "one that an array can have")
    return layout


def _can_be(shape: tuple[int, ...], dtype: np.dtype[Any]) -> bool:
    """Whether NumPy makes such arrays: lengths beside one of zero can be too large, too."""
    with contextlib.suppress(ValueError, OverflowError):
        np.broadcast_to(np.empty((), dtype), shape)
        return True
    return False


def _check_field(name: str, field: str, value: object, right: bool, expected: str) -> None:
    """Raises: InvalidValue for a field of a header that is not *right*."""
    if not right:
        raise InvalidValue(
            f"the header of the shared memory {name} cannot be right: its field {field!r} is {value}, "
            f"and has to be {expected}. Let the program that writes it write that, or make it anew."
        )


def _shown(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _dtype_of(code: bytes, name: str) -> np.dtype[Any]:
    ends = len(code) < _DTYPE_BYTES
    _check_field(
        name, "dtype", f"{code[:20]!r}…", ends, f"shorter than {_DTYPE_BYTES} bytes, and a zero"
    )
    text = code.decode("ascii", "replace")
    with contextlib.suppress(ImportError):
        if text == "bfloat16":
            importlib.import_module("ml_dtypes")
    try:
        if text.startswith("["):
            dtype = np.lib.format.descr_to_dtype(ast.literal_eval(text))
        else:
            dtype = np.dtype(text)
    except Exception:  # any text may be there
        dtype = np.dtype(object)
    known = text == "bfloat16" or not is_of_extension(dtype)
    right = known and is_fixed(dtype) and (dtype.names is None or text.startswith("["))
    shown = repr(text if len(text) <= 40 else f"{text[:40]}…")
    _check_field(name, "dtype", shown, right, "one of NumPy's, whose elements have one size, as '<f8'")
    return dtype


# ── the locks ────────────────────────────────────────────────────────────────────────────────────────


def is_held(fd: int) -> bool:
    """Whether the maker of a segment lives; *fd* is a descriptor that this process has opened."""
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def reopened(fd: int) -> int:
    """A descriptor of the same file with locks of its own.

    Mappings, in this process, in workers and in forks, hold the locks of that by which they were made.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)


def lock_as_writer(fd: int) -> bool:
    """Lock the byte of a ring's writer for *fd*; returns whether it was free."""
    with contextlib.suppress(BlockingIOError, PermissionError):
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _RANGE.pack(fcntl.F_WRLCK, 0, WRITER_BYTE, 1, 0))
        return True
    return False


def has_writer(fd: int) -> bool:
    """Whether somebody else has locked that byte."""
    asked = _RANGE.pack(fcntl.F_WRLCK, 0, WRITER_BYTE, 1, 0)
    return bool(_RANGE.unpack(fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked))[0] != fcntl.F_UNLCK)


# ── the end of names ─────────────────────────────────────────────────────────────────────────────────


def sweep() -> list[str]:
    """Remove the names that killed programs of this user's have left; returns them."""
    try:
        entries = [entry.name for entry in os.scandir(SHM_FOLDER)]
    except OSError:
        return []
    return [f"/{name}" for name in entries if _remove_if_left(f"/{name}")]


def _remove_if_left(name: str) -> bool:
    """Remove a segment with our header if nobody holds its lock; returns whether it was one."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(SHM_FOLDER + name, flags)
    except OSError:
        return False
    try:
        status = os.fstat(fd)
        ours = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        if not ours or os.pread(fd, len(MAGIC), 0) != MAGIC:
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove(name, fd)
    except OSError:  # it is held
        return False
    finally:
        os.close(fd)


class _Keeper:
    """The process that removes this one's names if this one is killed."""

    def __init__(self) -> None:
        """Start the keeper.  Raises: OSError."""
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with undoing(self._socket.close), other:
            self._process = subprocess.Popen(
                [python(), "-I", "-S", str(keeper.__file__)],
                stdin=other.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                start_new_session=True,
            )

    def remember(self, name: str, fd: int) -> None:
        """Raises: OSError if it was killed."""
        socket.send_fds(self._socket, [os.fsencode(name)], [fd])

    def forget(self, name: str) -> None:
        with contextlib.suppress(OSError):
            self._socket.send(os.fsencode(name))

    def close(self) -> None:
        """Let the keeper remove what it remembers, and end."""
        self._socket.close()
        self._process.wait()

    def disown(self) -> None:
        """In a fork of this process: the keeper is the parent's."""
        self._socket.close()
        self._process.poll()  # which says that it is no child


class _Made(NamedTuple):
    """A named segment of this process's, and the descriptor that holds its lock."""

    segment: Segment
    lock: int


class _Names:
    """The names that this process has made."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._made: dict[str, _Made] = {}
        self._keeper: _Keeper | None = None

    def publish(self, name: str, segment: Segment) -> None:
        """Lock *segment*, and give it a name.  Raises: InvalidValue if that is in use."""
        with self._mutex:
            if name in self._made:
                raise InvalidValue(
                    f"this program has shared memory with the name {name} already: end that first, with "
                    f"free_memory() of its Data, or close() of its ring; or take another name."
                )
            lock = reopened(segment.fd)
            with undoing(self._forget, name), undoing(os.close, lock):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._remember(name, lock)
                if not (_link(segment.fd, name) or (_remove_if_left(name) and _link(segment.fd, name))):
                    raise InvalidValue(
                        f"the name {name} is in use: attach({name!r}) opens what is there. If no "
                        f"program needs it any more, remove it with rm {SHM_FOLDER}{name} (python -m "
                        f"synkro doctor removes what killed programs have left). Or take another name."
                    )
            self._made[name] = _Made(segment, lock)

    def end(self, name: str, segment: Segment) -> None:
        """Remove a name, unless it is another segment's by now."""
        with self._mutex:
            made = self._made.get(name)
            if made is not None and made.segment is segment:
                del self._made[name]
                removed = remove(name, made.lock)
                os.close(made.lock)
                self._forget(name, removed)

    def end_all(self) -> None:
        for name, made in list(self._made.items()):
            self.end(name, made.segment)

    def disown(self) -> None:
        """In a fork of this process: the names are the parent's, and so are their locks."""
        self._mutex = threading.RLock()
        for made in self._made.values():
            os.close(made.lock)
        self._made.clear()
        if self._keeper is not None:
            self._keeper.disown()
            self._keeper = None

    def _remember(self, name: str, lock: int) -> None:
        """Tell the keeper; one that was killed is replaced."""
        try:
            self._keeper = self._keeper or _Keeper()
            self._keeper.remember(name, lock)
        except OSError:
            if self._keeper is not None:
                self._keeper.close()
            self._keeper = _Keeper()
            for known, made in self._made.items():
                self._keeper.remember(known, made.lock)
            self._keeper.remember(name, lock)

    def _forget(self, name: str, removed: bool = True) -> None:
        """Tell the keeper, which takes care of a name that this user may not remove."""
        if self._keeper is None:
            return
        if removed:
            self._keeper.forget(name)
        if not self._made:
            self._keeper.close()
            self._keeper = None


def _link(fd: int, name: str) -> bool:
    """Give an open file a name; returns whether that was free.  Raises: InvalidValue."""
    try:
        os.link(f"/proc/self/fd/{fd}", SHM_FOLDER + name, src_dir_fd=fd)  # so it follows the link
    except FileExistsError:
        return False
    except OSError as error:
        raise InvalidValue(f"shared memory cannot have the name {name}: {error.strerror}.") from None
    return True


_names = _Names()
atexit.register(_names.end_all)
os.register_at_fork(after_in_child=_names.disown)
