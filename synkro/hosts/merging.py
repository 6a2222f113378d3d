"""The parts of a result, which come from the hosts in any order, merged in the order of their ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..comms.ops import OPERATIONS, reduce_share
from ..plan.extents import Partial
from ..values.arrays import Array

HERE = 0
"""The main process's host, whose part lies where the result is to be."""


class Merging:
    """The parts of one result.  What comes in its turn is merged piece by piece, as it comes.

    Attributes:
        nbytes: the bytes of a part.
    """

    def __init__(self, partial: Partial, target: Array, order: Sequence[int]) -> None:
        """*order* are the hosts that have a part, two at least; the result is to be in *target*."""
        self._operation, self._divisor = OPERATIONS[partial.op], partial.divisor
        self._target = target.reshape(-1)
        self._left = list(order)
        self._early: dict[int, Array] = {}
        self._merged: Array | None = None  # the parts of those that are not left
        self.nbytes: Final = target.nbytes

    def here(self) -> None:
        """The ranks of this host have reduced their part, if they have one."""
        if HERE in self._left:
            self._early[HERE] = self._target
            self._advance()

    def take(self, host: int, pieces: Iterable[NDArray[np.uint8]]) -> None:
        """The part of another *host* comes, one piece after the other."""
        early = self._merged is None or host != self._left[0]
        part = np.empty_like(self._target) if early else self._target
        start = 0
        for piece in pieces:
            values = piece.view(part.dtype)
            place = slice(start, start + len(values))
            if early:
                part[place] = values
            else:
                self._merge(values, place)
            start = place.stop
        if early:
            self._early[host] = part
        else:
            self._pass_on()
        self._advance()

    def _advance(self) -> None:
        """Merge what has come early, as far as it is its turn."""
        while self._left and self._left[0] in self._early:
            part = self._early.pop(self._left[0])
            if self._merged is None:
                self._merged = part
                del self._left[0]
            else:
                self._merge(part, slice(None))
                self._pass_on()

    def _merge(self, values: Array, place: slice) -> None:
        """Merge a piece of the next part with those before."""
        assert self._merged is not None
        divisor = self._divisor if len(self._left) == 1 else 1
        reduce_share(self._operation, divisor, [self._merged[place], values], [self._into()[place]])

    def _into(self) -> Array:
        """Where the next part is merged with those before: not over the part of this host."""
        assert self._merged is not None
        return self._merged if HERE in self._left[1:] else self._target

    def _pass_on(self) -> None:
        self._merged = self._into()
        del self._left[0]
