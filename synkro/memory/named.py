"""Shared memory with a name: segments in ``/dev/shm`` that programs of any language open.

::

    0     the header of an ``.npy`` file, with blanks up to the rows
    4096  the rows of an array; or the slots of a ring, each at a multiple of 64 bytes
    -192  ``TAIL``: what it is, in numbers, and what is counted

A segment is made without a name, filled and locked, and gets its name last: whoever opens it finds it
whole.  Its maker holds flock(2) on it, by a descriptor that nothing is mapped by, and shares that with
its keeper only; so a name whose lock is free is one that a program has left.

A name ends with the ``Data`` or ring that it is of, the session, or the program.  If the program is
killed, its keeper removes it; if that is killed, too, the next ``fork()`` of any program of this user's.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import importlib
import io
import os
import stat
import struct
import threading
from math import prod
from typing import Any, NamedTuple

import numpy as np

from ..errors import InvalidType, InvalidValue, NotAvailable, counted, reason
from ..plan.call import Access, Region, aligned
from ..values.arrays import Array, code_of, is_fixed, is_of_extension
from .interrupts import uninterrupted
from .keeper import COMPANIONS, MAGIC, SHM_FOLDER, TAIL_BYTES, Keeper, companions, remove, tail_of
from .segment import Segment, descriptors_for, explained, require_memory, reserved, undoing

ROWS = 4096
"""The byte where the rows of an array, or the slots of a ring, begin."""

VERSION = 2
ARRAY, RING = 0, 1
_LONGEST = 254  # bytes of a name, without its slash
_NPY = b"\x93NUMPY"
_NPY_1 = _NPY + b"\x01\x00"  # as which NumPy reads it, with two bytes for the length of the rest
_BFLOAT16 = "bfloat16"  # of ml_dtypes, which NumPy does not know
_HEADER = 1 << 16  # bytes of the longest header of a file; NumPy reads 10,000 characters at most
_FRAME = "frame"  # the field of a slot of a ring

_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("magic", "S8", 0),
    ("version", "<u4", 8),
    ("kind", "<u4", 12),
    ("dtype", "S16", 16),
    ("nbytes", "<u8", 32),
    ("slots", "<u8", 40),
    ("slot_bytes", "<u8", 48),
    ("writes", "<u8", 64),
    ("writer", "<u8", 72),
    ("ended", "<u8", 80),
    ("read", "<u8", 128),
)

_NAMES, _FORMATS, _OFFSETS = map(list, zip(*_FIELDS, strict=True))

TAIL = np.dtype({"names": _NAMES, "formats": _FORMATS, "offsets": _OFFSETS, "itemsize": TAIL_BYTES})
"""The last bytes, little-endian.  What the writer and the reader of a ring count are 64 bytes apart."""

WRITER_BYTE = 1
"""The byte of a ring's segment that its writer locks, as fcntl(2) does for open file descriptions."""

_RANGE = struct.Struct("hhqqi4x")  # struct flock


class SegmentLayout(NamedTuple):
    """What lies behind a header: an array of this *shape*, or so many *slots* with one each.

    *counted*: there is a tail.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    slots: int = 0
    offset: int = ROWS
    slot_bytes: int = 0
    counted: bool = True

    @property
    def one(self) -> int:
        """The bytes of one array."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """The byte behind the last row."""
        return self.offset + (self.slot_bytes * self.slots or self.one)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole segment."""
        return aligned(self.end) + TAIL_BYTES

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


def create(number: int, name: str, layout: SegmentLayout, value: Array | None = None) -> Segment:
    """A segment with a name and a header, which ``end`` ends: of zeros, or of an array's *value*.

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
            _fill_in(segment.base, layout)
            if value is not None:
                segment.array(layout.region(number))[...] = value
                counters_of(segment.base)["writes"] += 1
            with descriptors_for(f"the name {name} could not be had"):
                _names.publish(name, segment)
    return segment


def end(name: str, segment: Segment) -> None:
    """Remove the name, if it is still that of *segment*; the memory lives on where it is mapped."""
    with uninterrupted():
        _names.end(name, segment)


def _fill_in(base: Array, layout: SegmentLayout) -> None:
    header = _npy_header(layout)
    base[: len(header)] = np.frombuffer(header, np.uint8)
    tail = counters_of(base)
    tail["version"], tail["kind"] = VERSION, RING if layout.slots else ARRAY
    tail["nbytes"], tail["slots"], tail["slot_bytes"] = layout.one, layout.slots, layout.slot_bytes
    if layout.dtype.name == _BFLOAT16:
        tail["dtype"] = _BFLOAT16.encode()
    tail["magic"] = MAGIC


def _npy_header(layout: SegmentLayout) -> bytes:
    """The header of an ``.npy`` file.  Raises: InvalidType, InvalidValue."""
    descr, shape = _description(layout.dtype), layout.shape
    if layout.slots:
        rest = layout.slot_bytes - layout.one
        frame = (_FRAME, descr, shape) if shape else (_FRAME, descr)
        descr, shape = [frame, *([("", f"|V{rest}")] if rest else [])], (layout.slots,)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    room = ROWS - len(_NPY_1) - 2
    try:
        data = text.encode("latin-1")
    except UnicodeEncodeError:
        raise InvalidType(
            f"memory with a name has fields with names in Latin-1; got {_shown(layout.dtype)}: rename "
            f"them, by numpy.lib.recfunctions.rename_fields."
        ) from None
    if len(data) >= room:
        raise InvalidValue(
            f"the dtype {_shown(layout.dtype)} is too long for memory with a name: its description has "
            f"{len(data)} bytes, and there is room for {room - 1}."
        )
    return _NPY_1 + room.to_bytes(2, "little") + data.ljust(room - 1) + b"\n"


def _description(dtype: np.dtype[Any]) -> Any:
    """*dtype* as an ``.npy`` file has it; of bfloat16 its bytes.  Raises: InvalidType."""
    if dtype.name == _BFLOAT16:
        return f"|V{dtype.itemsize}"
    if _has_extension(dtype):
        raise InvalidType(
            f"memory with a name holds NumPy's own dtypes, as .npy files do, and bfloat16, but that in "
            f"no record; got {_shown(dtype)}: convert it, to float32 say."
        )
    try:
        return np.lib.format.dtype_to_descr(dtype)
    except ValueError:  # they overlap, or are in another order
        raise InvalidType(
            f"memory with a name holds records whose fields lie one behind the other; got {dtype}: "
            f"convert them, by numpy.lib.recfunctions.repack_fields."
        ) from None


def _has_extension(dtype: np.dtype[Any]) -> bool:
    """Whether *dtype*, or some field of it, is of another package than NumPy."""
    if dtype.base.names is None:
        return is_of_extension(dtype.base)
    return any(_has_extension(dtype.base[name]) for name in dtype.base.names)


def counters_of(base: Array) -> Array:
    """The tail of a mapped segment, as an array of one record."""
    return base[-TAIL_BYTES:].view(TAIL)


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


def open_named(name: str, writable: bool, any_owner: bool, otherwise: str = "") -> tuple[int, int]:
    """A descriptor of a segment that another program has made, and its size.

    *otherwise* is what else to do where the rights do not suffice.

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
            f"programs as the same user{otherwise}."
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
    for path in companions(name):
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
    data = os.pread(fd, _HEADER, 0)
    if data.startswith(MAGIC):
        raise _of_version(1, name)
    if not data.startswith(_NPY):
        return None
    plain = _read_npy(data, name)
    tail, there = np.frombuffer(tail_of(fd), TAIL), os.fstat(fd).st_size
    if not len(tail) or not tail_of(fd).startswith(MAGIC):  # some other program's .npy file
        layout = plain._replace(counted=False)
    else:
        layout = _layout_in(tail[0], plain, name)
        there -= TAIL_BYTES
    if layout.end > there:
        raise InvalidValue(
            f"the header of the shared memory {name} cannot be right: it tells of "
            f"{_shown(plain.dtype)} of shape {_shown(plain.shape)} from byte {plain.offset} to byte "
            f"{_shown(layout.end)}, and there are {there}. Make it anew."
        )
    right = _can_be(layout.shape, layout.dtype)
    _check_field(name, "shape", _shown(plain.shape), right, "one that an array can have")
    return layout


def _of_version(version: int, name: str) -> InvalidValue:
    return InvalidValue(
        f"the header of the shared memory {name} is of version {version}, and this is Synkro for "
        f"version {VERSION}: use the same Synkro in both programs."
    )


def _read_npy(data: bytes, name: str) -> SegmentLayout:
    """The layout of what lies behind the header of an ``.npy`` file.  Raises: InvalidValue."""
    file = io.BytesIO(data)
    of_first = np.lib.format.read_magic(file) == (1, 0) if len(data) > len(_NPY_1) else True
    read: Any = np.lib.format.read_array_header_1_0 if of_first else np.lib.format.read_array_header_2_0
    try:
        shape, by_columns, dtype = read(file)
    except Exception as error:  # any bytes may be there
        raise InvalidValue(
            f"the header of the shared memory {name} begins as that of an .npy file, and cannot be "
            f"read: {reason(error)}. Let the program that writes it write that, or make it anew."
        ) from None
    plain = all(type(length) is int for length in shape)  # and no bool
    _check_field(name, "shape", _shown(shape), plain, "one that an array can have")
    right = is_fixed(dtype) and not is_of_extension(dtype)
    _check_field(name, "descr", _shown(dtype), right, "a dtype of NumPy's whose elements have one size")
    in_order = not by_columns or len(shape) < 2
    _check_field(name, "fortran_order", by_columns, in_order, "False")
    return SegmentLayout(dtype, shape, 0, file.tell())


def _layout_in(tail: Any, plain: SegmentLayout, name: str) -> SegmentLayout:
    """The layout of a segment of ours: *plain* by its header, and with this *tail*.

    Raises: InvalidValue.
    """
    if tail["version"] != VERSION:
        raise _of_version(int(tail["version"]), name)
    kind = int(tail["kind"])
    _check_field(name, "kind", kind, kind in (ARRAY, RING), f"{ARRAY}, an array, or {RING}, a ring")
    known = bytes(tail["dtype"])
    if kind == ARRAY:
        layout = plain._replace(dtype=_known(plain.dtype, known, name))
    else:
        layout = _ring_in(known, plain, name)
    told = {"nbytes": layout.one, "slots": layout.slots, "slot_bytes": layout.slot_bytes}
    for says, is_so in told.items():
        _check_field(name, says, int(tail[says]), tail[says] == is_so, f"{is_so}, by the header")
    return layout


def _ring_in(known: bytes, plain: SegmentLayout, name: str) -> SegmentLayout:
    """The layout of a ring, whose slots are the records of a *plain* array.  Raises: InvalidValue."""
    dtype, shape = plain.dtype, plain.shape
    right = dtype.names == (_FRAME,) and dtype.itemsize == aligned(dtype.itemsize)
    expected = f"that of slots of a multiple of {aligned(1)} bytes, with a field {_FRAME!r}"
    _check_field(name, "descr", _shown(dtype), right and len(shape) == 1 and shape[0] > 0, expected)
    frame, lengths = dtype[_FRAME].subdtype or (dtype[_FRAME], ())
    return SegmentLayout(_known(frame, known, name), lengths, shape[0], plain.offset, dtype.itemsize)


def _known(dtype: np.dtype[Any], known: bytes, name: str) -> np.dtype[Any]:
    """*dtype*, or the one of an extension that has as many bytes, and is *known* as that.

    Raises: InvalidValue.
    """
    if not known:
        return dtype
    found = dtype
    with contextlib.suppress(Exception):
        importlib.import_module("ml_dtypes")
        found = np.dtype(known.decode())
    right = known == _BFLOAT16.encode() and found.itemsize == dtype.itemsize and found is not dtype
    _check_field(name, "dtype", repr(known), right, "empty, or bfloat16, which needs ml_dtypes")
    return found


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
        if not ours or not (tail_of(fd).startswith(MAGIC) or os.pread(fd, len(MAGIC), 0) == MAGIC):
            return False
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return remove(name, fd)
    except OSError:  # it is held
        return False
    finally:
        os.close(fd)


class _Made(NamedTuple):
    """A named segment of this process's, and the descriptor that holds its lock."""

    segment: Segment
    lock: int


class _Names:
    """The names that this process has made."""

    def __init__(self) -> None:
        self._mutex = threading.RLock()
        self._made: dict[str, _Made] = {}
        self._keeper: Keeper | None = None

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
            self._keeper = self._keeper or Keeper()
            self._keeper.tell("name", name, fds=(lock,))
        except OSError:
            if self._keeper is not None:
                self._keeper.close()
            self._keeper = Keeper()
            for known, made in self._made.items():
                self._keeper.tell("name", known, fds=(made.lock,))
            self._keeper.tell("name", name, fds=(lock,))

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
