"""PyTensor's own shared variables, and the worker variables that stand for them.

A value that the main process has put into one (by ``set_value``, or by a function of its own that
updates it) reaches the workers before the next call that uses it.  After a call or a collective that
changes the replicas it holds the master rank's replica, as if the master had computed by itself.

Of a random stream the ranks get entropy, of which each makes a part of its own.  The stream moves on by
that, and hands out more when the main process has put another one there, or has drawn from this one.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np

from ...errors import InvalidValue, UsageError, WorkerError, ranks_in_words, shown
from ...values.arrays import Array, same_bits
from ...values.random import handed_out
from ..placement.targets import Targets
from .collectives import Collectives
from .shared import Shared

_PLACE = "synkro_place"
"""The tag of a shared variable of PyTensor's that was placed: its target."""


@dataclass(frozen=True)
class Pair:
    """The worker variable of a PyTensor shared variable, and what both were when they last agreed.

    Attributes:
        ours: the worker variable.
        value: a copy of their common value.
        held: the array that held it in the main process: ``set_value`` puts another one there.
    """

    ours: Shared
    value: Array
    held: Any


@dataclass(eq=False)
class Linked:
    """The PyTensor shared variables of a session, and its random streams.

    The methods are called under the engine's lock.

    *make* makes variables of the session, whose replicas *transport* reads and writes.
    """

    _targets: Targets
    _make: Callable[..., Shared]
    _transport: Collectives
    _theirs: WeakValueDictionary[int, Any] = field(default_factory=WeakValueDictionary)  # by our numbers
    _pairs: WeakKeyDictionary[Any, Pair] = field(default_factory=WeakKeyDictionary)  # by theirs
    _uncertain: WeakSet[Any] = field(default_factory=WeakSet)  # that a call was to change, and may have
    _placed: WeakSet[Any] = field(default_factory=WeakSet)  # that one rank alone has
    _streams: WeakKeyDictionary[Any, Shared] = field(default_factory=WeakKeyDictionary)  # ours
    _handed_out: WeakKeyDictionary[Any, Any] = field(default_factory=WeakKeyDictionary)  # held then

    def shared(self, theirs: Any) -> Shared:
        """The worker variable that stands for a PyTensor shared variable; the same one always.

        Raises: InvalidValue if it was placed on a device that this session does not have.
        """
        if theirs in self._pairs:
            return self._pairs[theirs].ours
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
            self._placed.add(theirs)
        self._theirs[ours.number] = theirs
        self._agree(theirs, ours, value)
        return ours

    def place(self, theirs: Any, target: str | int) -> None:
        """Let *theirs* be on the rank *target* alone, here and in later sessions.

        Raises: InvalidType, InvalidValue; UsageError if it is somewhere else already.
        """
        rank = self._targets.rank(target)
        if theirs not in self._pairs:
            setattr(theirs.tag, _PLACE, target)
            self.shared(theirs)
        elif (place := self.place_of(theirs)) != rank:
            where = "all ranks" if place is None else ranks_in_words([place])
            raise UsageError(
                f"the shared variable {theirs} is on {where} already: place a variable once, before "
                f"the first function that uses it. (In a graph, its transfer() moves its value.)"
            )

    def place_of(self, theirs: Any) -> int | None:
        """The rank that *theirs* was placed on, also in an earlier session; None if it was not."""
        if hasattr(theirs.tag, _PLACE):
            self.shared(theirs)
        return self._pairs[theirs].ours.ranks[0] if theirs in self._placed else None

    def _agree(self, theirs: Any, ours: Shared, value: Array) -> None:
        """*theirs* and *ours* hold *value* now."""
        self._pairs[theirs] = Pair(ours, value, theirs.get_value(borrow=True))
        self._uncertain.discard(theirs)

    def push(self, variables: Iterable[Shared]) -> None:
        """Send the workers what the main process has put into PyTensor's variables.

        Where a call has failed that was to change the replicas, and nothing was put there since, the
        master rank's replica comes here instead.
        """
        unsettled = []
        for pair, theirs in self._found(variables):
            held, uncertain = theirs.get_value(borrow=True), theirs in self._uncertain
            # what was set counts for all replicas, though the master rank's may be equal to it
            if held is not pair.held or not same_bits(np.asarray(held), pair.value):
                self._uncertain.add(theirs)  # until the workers have it
                self._transport.send([pair.ours], [np.asarray(held)])
                self._agree(theirs, pair.ours, np.array(held))
            elif uncertain:
                unsettled.append(pair.ours)
        self.pull(unsettled)

    def mark_uncertain(self, variables: Iterable[Shared]) -> None:
        """A call begins that changes the replicas."""
        self._uncertain.update(theirs for _, theirs in self._found(variables))

    def pull(self, variables: Iterable[Shared]) -> None:
        """Put the replicas of the master rank, or of where each is placed, into PyTensor's variables."""
        found: dict[tuple[int, ...], list[tuple[Pair, Any]]] = {}
        for pair, theirs in self._found(variables):
            found.setdefault(pair.ours.ranks, []).append((pair, theirs))
        for pairs in found.values():
            ours = [pair.ours for pair, _ in pairs]
            values = self._transport.fetch(ours, (ours[0].first,))
            for (pair, theirs), value in zip(pairs, values, strict=True):
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
            theirs = self._theirs.get(variable.number)
            if theirs in self._pairs:
                yield self._pairs[theirs], theirs

    # ── random streams ───────────────────────────────────────────────────────────────────────────

    def stream(self, theirs: Any) -> Shared:
        """The worker variable that stands for a random stream; the same one always."""
        if theirs not in self._streams:
            self._streams[theirs] = ours = self._make(np.zeros(8, np.uint64))
            self._theirs[ours.number] = theirs
        return self._streams[theirs]

    def hand_out(self, variables: Iterable[Shared]) -> None:
        """Give the ranks new parts of the streams that are not as they were left here."""
        for ours in variables:
            theirs = self._theirs.get(ours.number)
            if theirs is None or theirs.get_value(borrow=True) is self._handed_out.get(theirs):
                continue
            stream = theirs.get_value()
            self._transport.send([ours], [handed_out(stream)])
            theirs.set_value(stream, borrow=True)
            self._handed_out[theirs] = theirs.get_value(borrow=True)


@dataclass(frozen=True)
class Bridge:
    """A block whose calls use variables, and change some: PyTensor's go to the workers and come back.

    Attributes:
        linked: all that are PyTensor's.
        used, changed: the variables of the block.
        hand_out: gives the ranks new parts of random streams, where a call needs them.
    """

    linked: Linked
    used: Collection[Shared]
    changed: Collection[Shared]
    hand_out: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self.linked.push(self.used)
        self.linked.mark_uncertain(self.changed)

    def __exit__(self, kind: Any, error: BaseException | None, where: Any) -> None:
        if error is None or isinstance(error, WorkerError):  # what the ranks have done by then counts
            self.linked.pull(self.changed)
