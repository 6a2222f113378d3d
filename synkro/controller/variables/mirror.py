"""PyTensor's own shared variables, and the worker variables that stand for them.

A value that the main process has put into one (by ``set_value``, or by a function of its own that
updates it) reaches the workers before the next call that uses it.  After a call or a collective that
changes the replicas it holds the master rank's replica, as if the master had computed by itself.

Of a random stream the ranks get entropy, of which each makes a part of its own.  The stream moves on by
that, and hands out more when the main process has put another one there, or has drawn from this one.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidValue, UsageError, WorkerError, ranks_in_words, shown
from ...values.arrays import Array, same_bits
from ...values.random import handed_out
from ..placement.targets import Targets
from .shared import Shared, Transport

_PLACE = "synkro_place"
"""The tag of a shared variable of PyTensor's that was placed: its target."""


@dataclass(frozen=True)
class Pair:
    """A PyTensor shared variable, its worker variable, and what both were when they last agreed.

    Attributes:
        theirs, ours: the two.
        value: a copy of their common value.
        held: the array that held it in the main process: ``set_value`` puts another one there.
    """

    theirs: weakref.ref[Any]
    ours: Shared
    value: Array
    held: Any


class Linked:
    """The PyTensor shared variables of a session.  Its methods are called under the engine's lock."""

    def __init__(self, targets: Targets, make: Callable[..., Shared], transport: Transport) -> None:
        """*make* makes variables of the session, whose replicas *transport* reads and writes."""
        self._targets = targets
        self._make = make
        self._transport = transport
        self._pairs: dict[int, Pair] = {}  # by the number of ours
        self._uncertain: set[int] = set()  # numbers of ours that a call was to change, and may have
        self._placed: set[int] = set()  # numbers of ours that one rank alone has

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a PyTensor shared variable; the same one always.

        Raises: InvalidValue if it was placed on a device that this session does not have.
        """
        ours = self._known(theirs)
        if ours is not None:
            return ours
        target, rank = getattr(theirs.tag, _PLACE, None), None
        if target is not None:
            try:
                rank = self._targets.rank(target)
            except InvalidValue as error:
                raise InvalidValue(
                    f"the shared variable {theirs} was placed on {shown(target)}: {error} Place it "
                    f"anew, by place()."
                ) from None
        value = np.array(theirs.get_value(borrow=True))
        ours = self._make(value, target=rank)
        if rank is not None:
            self._placed.add(ours.number)
        self._agree(theirs, ours, value)
        weakref.finalize(theirs, self._forget, ours.number)
        return ours

    def _known(self, theirs: Any) -> Shared | None:
        pairs = list(self._pairs.values())
        return next((pair.ours for pair in pairs if pair.theirs() is theirs), None)

    def place(self, theirs: Any, target: str | int) -> None:
        """Let *theirs* be on the rank *target* alone, here and in later sessions.

        Raises: InvalidType, InvalidValue; UsageError if it is somewhere else already.
        """
        rank, ours = self._targets.rank(target), self._known(theirs)
        if ours is None:
            setattr(theirs.tag, _PLACE, target)
            self.shared(theirs)
        elif self.place_of(theirs) != rank:
            where = ranks_in_words(ours.ranks) if ours.number in self._placed else "all ranks"
            raise UsageError(
                f"the shared variable {theirs} is on {where} already: place a variable once, before "
                f"the first function that uses it. (In a graph, its transfer() moves its value.)"
            )

    def place_of(self, theirs: Any) -> int | None:
        """The rank that *theirs* was placed on, also in an earlier session; None if it was not."""
        ours = self.shared(theirs) if hasattr(theirs.tag, _PLACE) else self._known(theirs)
        return ours.ranks[0] if ours is not None and ours.number in self._placed else None

    def _agree(self, theirs: Any, ours: Shared, value: Array) -> None:
        """*theirs* and *ours* hold *value* now."""
        held = theirs.get_value(borrow=True)
        self._pairs[ours.number] = Pair(weakref.ref(theirs), ours, value, held)
        self._uncertain.discard(ours.number)

    def _forget(self, number: int) -> None:
        self._pairs.pop(number, None)
        self._placed.discard(number)
        self._uncertain.discard(number)

    def push(self, variables: Iterable[Shared]) -> None:
        """Send the workers what the main process has put into PyTensor's variables.

        Where a call has failed that was to change the replicas, and nothing was put there since, the
        master rank's replica comes here instead.
        """
        unsettled = []
        for pair, theirs in self._found(variables):
            number, held = pair.ours.number, theirs.get_value(borrow=True)
            uncertain = number in self._uncertain
            # what was set counts for all replicas, though the master rank's may be equal to it
            if held is not pair.held or not same_bits(np.asarray(held), pair.value):
                self._uncertain.add(number)  # until the workers have it
                self._transport.send([pair.ours], [np.asarray(held)])
                self._agree(theirs, pair.ours, np.array(held))
            elif uncertain:
                unsettled.append(pair.ours)
        self.pull(unsettled)

    def mark_uncertain(self, variables: Iterable[Shared]) -> None:
        """A call begins that changes the replicas."""
        self._uncertain.update(pair.ours.number for pair, _ in self._found(variables))

    def pull(self, variables: Iterable[Shared]) -> None:
        """Put the replicas of the master rank, or of where each is placed, into PyTensor's variables."""
        found: dict[tuple[int, ...], list[tuple[Pair, Any]]] = {}
        for pair, theirs in self._found(variables):
            found.setdefault(pair.ours.ranks, []).append((pair, theirs))
        for pairs in found.values():
            self._pull(pairs)

    def _pull(self, found: Sequence[tuple[Pair, Any]]) -> None:
        """Put the replicas of *found*, variables that the same ranks have, into PyTensor's variables."""
        first = found[0][0].ours.first
        values = self._transport.fetch([pair.ours for pair, _ in found], (first,))
        for (pair, theirs), value in zip(found, values, strict=True):
            copy = np.array(value)
            try:
                theirs.set_value(copy, borrow=True)
            except TypeError as error:
                raise InvalidValue(
                    f"the shared variable {theirs} cannot hold what its replica on the master rank "
                    f"has become, of shape {copy.shape}: {str(error).splitlines()[-1]}"
                ) from None
            self._agree(theirs, pair.ours, np.asarray(value))

    def _found(self, variables: Iterable[Shared]) -> Iterator[tuple[Pair, Any]]:
        """The pairs of *variables* that are PyTensor's."""
        for variable in variables:
            pair = self._pairs.get(variable.number)
            if pair is not None and (theirs := pair.theirs()) is not None:
                yield pair, theirs


class Streams:
    """The random streams of PyTensor's in a session.  Its methods are called under the engine's lock."""

    def __init__(self, make: Callable[..., Shared], transport: Transport) -> None:
        """*make* makes variables of the session, whose replicas *transport* writes."""
        self._make = make
        self._transport = transport
        self._known: dict[int, tuple[weakref.ref[Any], Shared]] = {}  # by the number of ours
        self._held: dict[int, Any] = {}  # what each stream held when it was last handed out

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a stream; the same one always."""
        for stream, ours in list(self._known.values()):
            if stream() is theirs:
                return ours
        ours = self._make(np.zeros(8, np.uint64))
        self._known[ours.number] = weakref.ref(theirs), ours
        weakref.finalize(theirs, self._forget, ours.number)
        return ours

    def _forget(self, number: int) -> None:
        self._known.pop(number, None)
        self._held.pop(number, None)

    def hand_out(self, variables: Iterable[Shared]) -> None:
        """Give the ranks new parts of the streams that are not as they were left here."""
        for ours in variables:
            theirs = self._known[ours.number][0]()
            if theirs is None or theirs.get_value(borrow=True) is self._held.get(ours.number):
                continue
            stream = theirs.get_value()
            self._transport.send([ours], [handed_out(stream)])
            theirs.set_value(stream, borrow=True)
            self._held[ours.number] = theirs.get_value(borrow=True)


def is_stream(theirs: Any) -> bool:
    """Whether a shared variable of PyTensor's is a random stream."""
    return isinstance(theirs.get_value(borrow=True), np.random.Generator)


class Bridge:
    """A block whose calls use variables, and change some: PyTensor's go to the workers and come back.

    Attributes:
        hand_out: gives the ranks new parts of random streams, where a call needs them.
    """

    def __init__(
        self,
        linked: Linked,
        used: Iterable[Shared],
        changed: Iterable[Shared],
        hand_out: Callable[[], None] = lambda: None,
    ) -> None:
        self.hand_out = hand_out
        self._linked = linked
        self._used = tuple(used)
        self._changed = tuple(changed)

    def __enter__(self) -> None:
        self._linked.push(self._used)
        self._linked.mark_uncertain(self._changed)

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is None or isinstance(error, WorkerError):  # what the ranks have done by then counts
            self._linked.pull(self._changed)
