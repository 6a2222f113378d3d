"""An array in a file that is open for reading, whatever its format."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from ..plan.call import FileArray
from ..values.arrays import Array

Stamp = tuple[int, ...]


def called(kind: str, path: str, name: str) -> str:
    """What errors call the array *name* of the file at *path*."""
    return f"the {kind} {name!r} of {path}" if name else f"the {kind} {path}"


def stamp_of(path: str) -> Stamp:
    """What changes when somebody writes to the file, or puts another one in its place.

    Raises: OSError if it is gone.
    """
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns, status.st_ino


class Opened(ABC):
    """An array in a file, open for reading.

    Whatever the library raises arrives as an OSError that names the file.  So does a change of the file:
    it is looked for after the rows were read, and so they are what it held when it was described.
    """

    def __init__(self, stored: FileArray) -> None:
        """Raises: OSError if there is no such file here, it has changed, or cannot be opened."""
        self.stored = stored
        self.called = called(stored.kind, stored.path, stored.name)
        self.check(0, 0)
        try:
            self._try(self._open, 0, 0)
        except BaseException:
            self.close()
            raise

    def read(self, target: Array, start: int, stop: int) -> None:
        """Fill *target*, which is contiguous, with the rows from *start* to *stop*; without dimensions,
        with the one element.

        Raises: OSError.
        """
        if target.size:
            self._try(lambda: self._read(target, start, stop), start, stop)
            self.check(start, stop)

    def check(self, start: int, stop: int) -> None:
        """Raises: OSError if the file, or what it has of these rows, has changed or is gone."""
        try:
            same = self._is_unchanged(start, stop)
        except OSError as error:
            raise OSError(
                f"{self.called} is not there any more ({error.strerror}): every process that reads it "
                f"opens it at this path. Put it back, or give the array in the file where it is."
            ) from None
        if not same:
            raise OSError(
                f"{self.called} has changed since it was opened, or is another file on this host: open "
                f"it again, and give it anew, when nobody writes to it any more."
            )

    def _try(self, step: Callable[[], None], start: int, stop: int) -> None:
        try:
            step()
        except MemoryError:
            raise
        except Exception as error:
            self.check(start, stop)  # which explains it better
            raise OSError(
                f"{self.called} cannot be read, so it is damaged, cut off, or open for writing "
                f"elsewhere: {type(error).__name__}: {error}"
            ) from error

    @abstractmethod
    def close(self) -> None:
        """Close the file."""

    @abstractmethod
    def _open(self) -> None:
        """Open the file; the library may raise anything."""

    @abstractmethod
    def _read(self, target: Array, start: int, stop: int) -> None:
        """As ``read``, but the library may raise anything."""

    @abstractmethod
    def _is_unchanged(self, start: int, stop: int) -> bool:
        """Whether the file, with these rows, is as it was described.  Raises: OSError if it is gone."""


def part(shape: tuple[int, ...], start: int, stop: int) -> Any:
    """The index of the rows from *start* to *stop* in an array of this *shape*."""
    return slice(start, stop) if shape else ()
