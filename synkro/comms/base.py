"""The interface of a communicator: what one rank does in a collective."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from .ops import Array, Operation


class Communicator(ABC):
    """One rank's end of the collectives of a session."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def reduce_share(
        self, operation: Operation, divisor: int, sources: Sequence[Array], target: Array
    ) -> None:
        """Reduce this rank's share of the elements of *sources*, in their order, into *target*.

        All ranks together fill *target* (C-contiguous, of the sources' shape and dtype, which may
        not overlap them).  A weighted operation's result is divided by *divisor*.
        """
