"""The interface of a device, as a worker sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..values.arrays import Array

"""An array of NumPy's, or of the device's own library."""


class Source(NamedTuple):
    """Rows of an input in host memory, which a piece of a call computes on.

    ``array`` is a view of the rows or, with *indices*, what they are to be taken from.  ``stamp``, the
    number of its segment and another, changes when the contents may have changed; it is None where
    nobody can tell.
    """

    array: Array
    indices: NDArray[np.int64] | None = None
    stamp: tuple[int, int] | None = None

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
    """Where a worker computes.

    Attributes:
        pins: whether it wants inputs mapped writable, so that their pages can be pinned.
    """

    pins: bool = False

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The array module of the device's arrays."""

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialized array on the device."""

    @abstractmethod
    def adopt(self, value: Any) -> Array | None:
        """*value*, if it lies on a device, as an array of this one's library; else None."""

    @abstractmethod
    def owns(self, array: Array) -> bool:
        """Whether *array* lies on the device, in memory that is not another array's."""

    @abstractmethod
    def beside(self, array: Array, other: Array) -> Array:
        """*array* where *other* lies: on the device, or in host memory."""

    @abstractmethod
    def stow(self, array: Array) -> Array:
        """A copy that a later piece can neither change nor crowd: in host memory."""

    @abstractmethod
    def assign(self, target: Array, source: Any) -> None:
        """``target[...] = source``, wherever the two lie."""

    @abstractmethod
    def take(self, array: Array, indices: NDArray[np.int64]) -> Array:
        """Rows of an array, by valid index, as a new array where it lies."""

    @abstractmethod
    def welcome(self, things: Sequence[Any]) -> None:
        """Let modules and optimizers of PyTorch's, which came with functions, live on the device."""

    # ── between host and device ──────────────────────────────────────────────────────────────────

    @abstractmethod
    def feed(self, pieces: Sequence[Sequence[Any]]) -> Generator[list[Any], None, None]:
        """Each piece with its sources replaced by arrays on the device; other values stay.

        What a piece gets is valid until the next one is asked for.  Once it is closed, nobody reads the
        sources any more.
        """

    @abstractmethod
    def copy_out(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        """Copy each second array into the first, which is in host memory; done when it returns."""

    @abstractmethod
    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        """The segment of this number has been mapped: inputs and results may lie in its *memory*."""

    @abstractmethod
    def forget(self, number: int) -> None:
        """The segment of this number is about to be unmapped."""

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    @abstractmethod
    def resume(self) -> None:
        """Be the current device again, whatever a function has made of that."""

    @abstractmethod
    def settle(self) -> None:
        """``resume``, and wait for what the device still computes; raises what went wrong with it."""

    @abstractmethod
    def lost(self, error: BaseException) -> str | None:
        """After *error*: what happened to the device, if it is of no more use to this process."""

    @abstractmethod
    def advice(self, error: BaseException, in_call: bool) -> str:
        """What to do against *error*, if that is the device's to say, else an empty text.

        *in_call* says whether it came in the call of a function, whose rows can be sliced.
        """
