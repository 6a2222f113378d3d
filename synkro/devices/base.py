"""The interface of a device, as a worker sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..values.arrays import Array


class Source(NamedTuple):
    """The rows of an input, in host memory, that a piece of a call computes on.

    ``array`` is a view of the rows or, with *indices*, the array to take them from.  ``version``,
    the number of its segment and that one's version, changes when the contents may have changed; None:
    unknown.
    """

    array: Array
    indices: NDArray[np.int64] | None = None
    version: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the rows."""
        if self.indices is None:
            return self.array.shape
        return (len(self.indices), *self.array.shape[1:])

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.array.itemsize


class Device(ABC):
    """Where a worker computes.  Methods that only some devices need do nothing here.

    Attributes:
        xp: the array module of the device's arrays.
        pins: whether ``feed`` copies the inputs.  They are mapped writable then, so that their pages can
            be pinned, and fed in every call; else a call uses the same views of them again and again.
    """

    xp: Any
    pins: bool = False

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialized array on the device."""

    @abstractmethod
    def adopt(self, value: Any) -> Array | None:
        """*value* as an array of this device's library, if it lies on a GPU; else None."""

    @abstractmethod
    def owns(self, array: Array) -> bool:
        """Whether *array* lies on the device, in memory of its own."""

    def holds(self, value: Any) -> bool:
        """Whether *value* is an array of this device's library that lies on the device."""
        return False

    @abstractmethod
    def beside(self, array: Array, other: Array) -> Array:
        """*array*, copied to where *other* lies: to the device, or to host memory."""

    @abstractmethod
    def stow(self, array: Array) -> Array:
        """A copy in host memory: later pieces neither overwrite it nor lack GPU memory for it."""

    @abstractmethod
    def assign(self, target: Array, source: Any) -> None:
        """``target[...] = source``, wherever the two lie."""

    @abstractmethod
    def take(self, array: Array, indices: NDArray[np.int64]) -> Array:
        """Rows of an array, by valid index, as a new array where it lies."""

    def welcome(self, things: Sequence[Any]) -> None:
        """Move PyTorch's modules and optimizers, which came with functions, to the device."""

    # ── between host and device ──────────────────────────────────────────────────────────────────

    @abstractmethod
    def feed(self, pieces: Sequence[Sequence[Any]]) -> Generator[list[Any], None, None]:
        """Yield each piece with its sources replaced by arrays on the device; other values stay.

        The arrays are valid until the next piece is asked for.  Nothing reads the sources once the
        generator is closed.
        """

    @abstractmethod
    def copy_out(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy each second array into the first, in host memory; complete when it returns."""

    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        """Segment *number* has been mapped: inputs and results may lie in its *memory*."""

    def forget(self, number: int) -> None:
        """Segment *number* is about to be unmapped."""

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    def let_inputs_go(self) -> None:
        """Wait until nothing reads inputs, also where an interrupt kept ``feed`` from its end."""

    def resume(self) -> None:
        """Make this the current device again, which a function may have changed."""

    def settle(self) -> None:
        """``resume``, and wait for all that the device computes; raises its errors."""

    def lost(self, error: BaseException) -> str | None:
        """Why this process cannot use the device any more, after *error*; None if it can."""
        return None

    def advice(self, error: BaseException, in_call: bool) -> str:
        """What to do about *error*, in brackets, or an empty text.

        *in_call* says whether a function raised it, whose rows can be sliced.
        """
        return ""
