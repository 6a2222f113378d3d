"""Checkpoints of maps: files to which results are added as they come, and from which a map goes on.

A file has a mark, and then records: a head, with the number of the item (-1: what map it is of), how
many bytes follow, a digest of that, and one of these bytes; the digest of the item; and the pickled
result.  A record is written at once at the end.  What a process that was killed has left of one is cut.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import pickle
import stat
import struct
import time
import weakref
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any, NamedTuple

import cloudpickle

from ..errors import InvalidType, InvalidValue, reason
from ..memory.interrupts import uninterrupted
from ..memory.segment import undoing

_MARK = b"Synkro checkpoint 1\n"
_NUMBERS = struct.Struct("<qQ")
_HEAD = struct.Struct("<qQ16s16s")
_SIZE = 16  # bytes of a digest
_EACH = 1.0  # seconds after which what was written is to be on the disk


class _Place(NamedTuple):
    """Where a result lies in the file, and the digest of its item."""

    offset: int
    nbytes: int
    item: bytes


class Checkpoint:
    """The checkpoint of one map."""

    def __init__(self, path: str) -> None:
        """Open the file at *path*, or make it.

        Raises: InvalidValue for one of another user, one that others can write, one that another map has
        open, and one that is no checkpoint, or damaged; OSError.
        """
        self._path = path
        try:
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except ValueError as error:
            raise InvalidValue(f"checkpoint={path!r} is no path: {error}.") from None
        self._closing = weakref.finalize(self, os.close, self._file)
        with undoing(self._closing):
            self._places: dict[int, _Place] = {}
            self._items: dict[int, bytes] = {}  # digests of items that have no result yet
            self._map: dict[str, Any] | None = None
            self._synced = time.monotonic()
            self._check_owner()
            self._end = self._read_all()

    def close(self) -> None:
        """Have all be on the disk, and let go of the file."""
        with uninterrupted():
            if self._closing.alive:
                self._sync()
                fcntl.flock(self._file, fcntl.LOCK_UN)  # a fork of this program may have it open, too
                self._closing()

    def _check_owner(self) -> None:
        found = os.fstat(self._file)
        if not stat.S_ISREG(found.st_mode):
            raise InvalidValue(f"checkpoint= takes the path of a file; {self._path} is something else.")
        if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidValue(
                f"the checkpoint {self._path} belongs to another user, or others can write it: what "
                f"they put there could run any code here. Take another path, or chmod 600 {self._path}."
            )
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidValue(
                f"another map, perhaps of another program, writes to the checkpoint {self._path}: wait "
                f"for its end, or take another path."
            ) from None

    # ── what is there ────────────────────────────────────────────────────────────────────────────

    def _read_all(self) -> int:
        """Find all records; returns where the last whole one ends."""
        size = os.fstat(self._file).st_size
        mark, at = os.pread(self._file, len(_MARK), 0).rstrip(b"\0"), len(_MARK)
        if not _MARK.startswith(mark) or (mark != _MARK and self._has_more(at, size)):
            raise InvalidValue(f"{self._path} is no checkpoint of this version: take another path.")
        while at + _HEAD.size <= size:
            number, nbytes, head, digest = _HEAD.unpack(os.pread(self._file, _HEAD.size, at))
            start = at + _HEAD.size
            is_head = head == _digest(_NUMBERS.pack(number, nbytes))
            if is_head and nbytes > size - start:
                break
            body = _read(self._file, nbytes, start) if is_head else memoryview(b"")
            if not is_head or _digest(body) != digest:
                if not self._has_more(start + nbytes if is_head else start, size):
                    break
                raise InvalidValue(
                    f"the checkpoint {self._path} is damaged at byte {at} of {size}. To go on with the "
                    f"results before that, cut it there: truncate -s {at} {self._path}"
                )
            if number < 0:
                self._map = pickle.loads(body)
            else:
                self._places[number] = _Place(start + _SIZE, nbytes - _SIZE, bytes(body[:_SIZE]))
            at = start + nbytes
        return at if self._map is not None else 0

    def _has_more(self, at: int, size: int) -> bool:
        """Whether something was written after byte *at*: a system that crashes may leave zeros."""
        return size > at and any(_read(self._file, size - at, at))

    def begin(self, name: str, parts: Mapping[str, str], seed: Any, number: int) -> tuple[Any, int]:
        """A map of the function *name*, which has these *parts*, begins; its random numbers are those of
        *seed* and its *number*, or of what is returned: those that it had before.

        Raises: InvalidValue if the file is of another function; OSError.
        """
        if self._map is None:
            self._map = {"name": name, "parts": dict(parts), "seed": seed, "number": number}
            os.ftruncate(self._file, 0)
            self._write(_MARK + _record(-1, pickle.dumps(self._map, 5)))
        known = self._map
        other = {key for key in parts if known["parts"].get(key) != parts[key]}
        other |= known["parts"].keys() - parts.keys()
        if known["name"] != name or other:
            what = f"of a map of {known['name']!r}, and this is one of {name!r}"
            if known["name"] == name:
                what = f"of another {name!r}: {', '.join(sorted(other))} changed since"
            raise InvalidValue(
                f"the checkpoint {self._path} is {what}. Take another path, or remove the file to begin "
                f"anew."
            )
        os.ftruncate(self._file, self._end)  # of what a killed process has left
        return known["seed"], known["number"]

    def has(self, number: int) -> bool:
        """Whether the result of item *number* is there."""
        return number in self._places

    def note(self, number: int, item: bytes) -> None:
        """Item *number* has this digest.

        Raises: InvalidValue if the result that is there is one of another item.
        """
        if number not in self._places:
            self._items[number] = item
        elif self._places[number].item != item:
            raise InvalidValue(
                f"the checkpoint {self._path} has the result of another item {number} than this map's: "
                f"the items are not those of the map that began it. Take another path, or remove the "
                f"file to begin anew."
            )

    def result(self, number: int) -> tuple[Any, int]:
        """The result of item *number*, and its bytes.

        Raises: InvalidValue if it cannot be unpickled.
        """
        place = self._places[number]
        try:
            return pickle.loads(_read(self._file, place.nbytes, place.offset)), place.nbytes
        except Exception as error:
            raise InvalidValue(
                f"the result of item {number} in the checkpoint {self._path} cannot be unpickled: "
                f"{reason(error)}."
            ) from error

    # ── what comes ───────────────────────────────────────────────────────────────────────────────

    def add(self, results: Iterable[tuple[int, Any, bool]]) -> None:
        """Write *results*, with the numbers of their items, if the last says that they are some.

        Raises: InvalidType for one that cannot be pickled; OSError, with all before them in the file.
        """
        records = []
        for number, value, is_result in results:
            if (item := self._items.pop(number, None)) is None or not is_result:
                continue
            try:
                pickled = pickle.dumps(value, 5)
            except Exception:
                try:
                    pickled = cloudpickle.dumps(value, 5)
                except Exception as error:
                    raise InvalidType(
                        f"the result of item {number} cannot be pickled for the checkpoint "
                        f"{self._path}: {reason(error)}."
                    ) from error
            records.append(_record(number, item + pickled))
        if records:
            self._write(b"".join(records))

    def _write(self, records: bytes) -> None:
        """Write whole records at the end, or nothing that counts."""
        done, left = 0, memoryview(records)
        try:
            while left[done:]:
                done += os.pwrite(self._file, left[done:], self._end + done)
            self._end += done
            if time.monotonic() > self._synced + _EACH:
                self._sync()
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._file, self._end)
            raise OSError(error.errno, f"{error.strerror}: the checkpoint", self._path) from error

    def _sync(self) -> None:
        with contextlib.suppress(OSError):
            os.fdatasync(self._file)
        self._synced = time.monotonic()


def _record(number: int, body: bytes) -> bytes:
    head = _digest(_NUMBERS.pack(number, len(body)))
    return _HEAD.pack(number, len(body), head, _digest(body)) + body


def _digest(data: Any) -> bytes:
    return blake2b(data, digest_size=_SIZE).digest()


def _read(file: int, nbytes: int, offset: int) -> memoryview:
    """Read *nbytes* of a file.  Raises: OSError if it is shorter."""
    memory, done = memoryview(bytearray(nbytes)), 0
    while done < nbytes:  # one call reads 2 GB at most
        count = os.preadv(file, [memory[done:]], offset + done)
        if not count:
            raise OSError(errno.EIO, "the file was cut off")
        done += count
    return memory
