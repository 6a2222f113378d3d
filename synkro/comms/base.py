"""The interface of a communicator: what one rank does in a collective.

Every rank of a call calls the same methods in the same order.  Arrays are those of the communicator's
device; a list of them is one collective.  Results are new arrays, the same on every rank that gets one;
*lasting* ones lie where ``empty`` would put them.

Who does not do what the others do gets a ``CollectiveError``, and so do they.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..values.arrays import Array
from .ops import Operation


class Communicator(ABC):
    """One rank's end of the collectives of a call.

    Attributes:
        place, count: which of the ranks that take part this is, and how many they are.  Roots,
            sources and destinations are such places.
    """

    place: int
    count: int

    @abstractmethod
    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        """A call begins, in which *ranks* take part; *epoch* grows from call to call."""

    @abstractmethod
    def end(self, failed: bool) -> None:
        """The call is over on this rank, perhaps by an exception."""

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array in memory that collectives may use in place."""

    @abstractmethod
    def tidy(self) -> None:
        """Give memory back that nobody uses any more."""

    @abstractmethod
    def reduce_share(
        self, operation: Operation, divisor: int, sources: Sequence[Array], target: Array
    ) -> None:
        """Reduce this rank's share of the elements of *sources*, in their order, into *target*.

        All ranks of the session together fill *target* (C-contiguous, of the sources' shape and dtype,
        which may not overlap them).  A weighted operation's result is divided by *divisor*.
        """

    @abstractmethod
    def barrier(self) -> None:
        """Wait until all ranks are here."""

    @abstractmethod
    def all_reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, names: str = ""
    ) -> list[Array]:
        """Each array reduced over the ranks, in their order; all give the same shapes and dtypes.

        A mean counts a rank's arrays *weight* times.  *names*, what the arrays are, has to be the same
        on all ranks.
        """

    @abstractmethod
    def all_reduce_in_place(self, arrays: Sequence[Array], operation: Operation) -> None:
        """The same with weights of 1, written into *arrays*, which ``empty`` has made."""

    @abstractmethod
    def reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, root: int
    ) -> list[Array] | None:
        """``all_reduce`` whose results only *root* gets."""

    @abstractmethod
    def reduce_scatter(
        self, arrays: Sequence[Array], operation: Operation, weight: float
    ) -> list[Array]:
        """This rank's rows of what ``all_reduce`` gives: those that ``scatter`` would give it."""

    @abstractmethod
    def broadcast(self, arrays: Sequence[Array] | None, root: int, lasting: bool = False) -> list[Array]:
        """Copies of *root*'s arrays; the other ranks give None."""

    @abstractmethod
    def all_gather(self, arrays: Sequence[Array], lasting: bool = False) -> list[Array]:
        """The arrays of all ranks, concatenated along axis 0 in their order."""

    @abstractmethod
    def gather(self, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """``all_gather`` whose results only *root* gets."""

    @abstractmethod
    def scatter(self, arrays: Sequence[Array] | None, root: int) -> list[Array]:
        """This rank's rows of *root*'s arrays, split as evenly as can be; the others give None."""

    @abstractmethod
    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        """The rows of all ranks that are for this one, in the order of the ranks.

        Each rank's rows are split over the ranks as ``scatter`` would split them.
        """

    @abstractmethod
    def send(self, array: Array, to: int) -> None:
        """Leave a copy of *array* to rank *to*; waits only where several wait there already."""

    @abstractmethod
    def recv(self, source: int) -> Array:
        """Wait for the next array that *source* sends to this rank."""
