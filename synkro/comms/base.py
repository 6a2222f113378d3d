"""The interface of a communicator: what one rank does in a collective.

Every rank of a call calls the same methods in the same order.  If ranks enter different collectives, all
raise ``CollectiveError``.  Arrays are those of the communicator's device; a list of them is one
collective.  Results are new arrays, the same on every rank that gets them.  With *keep* they are
allocated by ``empty``, so that later collectives can use them in place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from ..errors import InternalError
from ..plan.split import split
from ..values.arrays import Array
from .agreement import Agreement
from .members import Members
from .ops import Operation
from .records import Arrays, Record, given

Read = Callable[[Record], Array]
MESSAGE = Record("send or recv")
_BARRIER = Record("barrier")


class Communicator(ABC):
    """One rank's end of the collectives of a call.

    Attributes:
        agreement: where the ranks agree on a collective, and see each other's records.
    """

    def __init__(self, agreement: Agreement) -> None:
        self.agreement = agreement
        self._meeting = agreement.meeting

    @property
    def place(self) -> int:
        """The index of this rank among those that take part, as roots, sources and destinations are."""
        return self._meeting.members.place

    @property
    def count(self) -> int:
        """The number of ranks that take part."""
        return len(self._meeting.members.ranks)

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        """A call begins, in which *ranks* take part; *epoch* grows from call to call."""
        self._meeting.begin(epoch, ranks)

    @abstractmethod
    def end(self, failed: bool) -> None:
        """End the call on this rank; *failed* says whether by an exception."""

    def among(self, members: Members) -> AbstractContextManager[None]:
        """Until the end of the block, only *members* take part, who have come out of ``split``.

        Raises: UsageError if that was in another call.
        """
        return self._meeting.among(members)

    def split(self, color: int | None) -> Members | None:
        """A collective: the ranks with the same *color*; None for one without a color."""
        at = self._meeting.offer()
        said = self.agreement.enter(Record("split", at=(at,) if color is None else (at, color)))
        alike = [place for place, record in enumerate(said) if record.at[1:] == (color,)]
        ranks = tuple([self._meeting.members.ranks[place] for place in alike])
        return self._meeting.join(ranks, said[alike[0]].at[0] if alike else 0)

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array in memory that collectives may use in place."""

    def offset(self, array: Array) -> int:
        """Where in the arena an *array* lies that ``empty`` has made, and from where it outlives this
        process."""
        raise InternalError("an array in memory that goes with its process.")

    def by_host(self) -> Communicator:
        """A communicator for this call, by which arrays go through host memory wherever they lie."""
        return self

    @abstractmethod
    def tidy(self) -> None:
        """Give unused memory back."""

    def reduce_out(self, jobs: Sequence[tuple[Operation, Any, Array]], divisor: float) -> None:
        """Reduce partials of all ranks, which lie on their GPUs, into arrays in host memory.

        Each job is an operation, this rank's partial, and where the result goes.
        """
        raise InternalError("partials that lie on GPUs, on a rank that has none.")

    def first_problem(self, problem: str) -> str:
        """The *problem* of the first rank that has one, told to all ranks; an empty text if none has."""
        text = np.frombuffer(problem.encode() + b"\0", np.uint8)
        problems = self.all_gather([text])[0].tobytes().decode()
        return next(filter(None, problems.split("\0")), "")

    def part_of(self, array: Array) -> Array:
        """The rows of *array* that go to this rank when they are split."""
        start, stop = split(0, len(array), self.count)[self.place]
        return array[start:stop]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.agreement.enter(_BARRIER)
        self._meeting.pass_on()

    @abstractmethod
    def send(self, array: Array, to: int, record: Record = MESSAGE, keep: Any = None) -> None:
        """Leave a copy of *array* for rank *to*; waits only while many messages for it are unread.

        The receiver finds *record* among those of its agreement.  *keep* is held until it has read all.
        """

    @abstractmethod
    def recv(self, source: int, record: Record = MESSAGE, read: Read | None = None) -> Array:
        """Wait for the next array that *source* sends to this rank.

        *read* fetches an array that lies where the sender's record says.
        Raises: CollectiveError if it was sent for something else than *record* says.
        """

    def exchange(self, array: Array, other: int) -> Array:
        """The array that rank *other* gives, which gets *array*; a rank alone gets a copy of its own."""
        record = self.agreement.addressed(Record("exchange", given=given([array])))
        if other == self.place:
            self.agreement.pair(record, record, other)
            own: Array = array.copy()
            return own
        self.send(array, other, record)
        return self.recv(other, record)

    # ── collectives of three shapes ──────────────────────────────────────────────────────────────

    @abstractmethod
    def reduced(self, record: Record, arrays: Arrays) -> list[Array]:
        """The reduction of *arrays* that *record* describes; anything on a rank that gets no results."""

    @abstractmethod
    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        """``all_reduce_in_place``, if *arrays* can be reduced where they lie; returns whether."""

    @abstractmethod
    def rooted(self, kind: str, arrays: Arrays | None, root: int, keep: bool = False) -> list[Array]:
        """What this rank gets of *root*'s arrays in the collective *kind*."""

    @abstractmethod
    def exchanged(self, kind: str, arrays: Arrays, root: int = -1, keep: bool = False) -> list[Array]:
        """This rank's share of the rows of all ranks, in rank order; anything if it gets no results."""

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def all_reduce(self, arrays: Arrays, operation: Operation, weight: float, names: str = "") -> Arrays:
        """Reduce each array over the ranks, in rank order; shapes and dtypes are the same on all.

        In a mean, a rank's arrays count *weight* times.  *names* describes the arrays; it has to be the
        same on all ranks.
        """
        record = Record("all_reduce", operation.name, weight=weight, given=given(arrays), names=names)
        return self.reduced(record, arrays)

    def all_reduce_in_place(self, arrays: Arrays, operation: Operation) -> None:
        """Reduce *arrays*, which ``empty`` has made, in place, as ``all_reduce`` does with weight 1."""
        if not self.reduced_in_place(arrays, operation):
            for array, result in zip(arrays, self.all_reduce(arrays, operation, 1), strict=True):
                array[...] = result

    def reduce(self, arrays: Arrays, operation: Operation, weight: float, root: int) -> Arrays | None:
        """Reduce each array as ``all_reduce`` does; only *root* gets the results."""
        record = Record("reduce", operation.name, root, weight, given(arrays))
        results = self.reduced(record, arrays)
        return results if self.place == root else None

    def reduce_scatter(self, arrays: Arrays, operation: Operation, weight: float) -> list[Array]:
        """This rank's rows of the results of ``all_reduce``, split as by ``scatter``."""
        record = Record("reduce_scatter", operation.name, weight=weight, given=given(arrays))
        return self.reduced(record, arrays)

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def broadcast(self, arrays: Arrays | None, root: int, keep: bool = False) -> list[Array]:
        """Copies of *root*'s arrays; the other ranks give None."""
        return self.rooted("broadcast", arrays, root, keep)

    def scatter(self, arrays: Arrays | None, root: int) -> list[Array]:
        """This rank's rows of *root*'s arrays, split as evenly as can be; the other ranks give None."""
        return self.rooted("scatter", arrays, root)

    def all_gather(self, arrays: Arrays, keep: bool = False) -> list[Array]:
        """The arrays of all ranks, concatenated along axis 0 in their order."""
        return self.exchanged("all_gather", arrays, keep=keep)

    def gather(self, arrays: Arrays, root: int) -> list[Array] | None:
        """The arrays of all ranks, as ``all_gather`` returns them, on *root*; None on the other
        ranks."""
        results = self.exchanged("gather", arrays, root)
        return results if self.place == root else None

    def all_to_all(self, arrays: Arrays) -> list[Array]:
        """This rank's part of the rows of every rank, in rank order.

        Each rank's rows are split over the ranks as by ``scatter``.
        """
        return self.exchanged("all_to_all", arrays)
