"""How the ranks agree on a collective before they enter it: each shows a record, and all compare them.

A rank moves data only when all are in the same collective, with arrays that fit: so a mistake, or an
exception, never strands a rank in the middle.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from ..errors import CollectiveError
from ..values.arrays import Code
from ..values.cache import Unpickled
from .board import KINDS
from .meeting import Meeting
from .ops import FOR_ANY_INT
from .records import Entry, Record, described, listed, manner

_NUMBERS = {kind: number for number, kind in enumerate(KINDS)}


class Agreement:
    """One rank's end of agreements: it shows its record, and checks those of the others.

    Attributes:
        records: those of all ranks in the last collective, by place; of an exchange, those of the two.
    """

    def __init__(self, meeting: Meeting) -> None:
        self.meeting = meeting
        self.records: list[Record] = []
        self._noted: tuple[int, Entry | None] = (0, None)
        self._decoded: Unpickled[Record] = Unpickled()
        self._last: tuple[Record | None, bytes] = (None, b"")

    def note(self, tracked: int, backward: Entry | None) -> None:
        """Let the records of this rank say so from now on: see ``Record``."""
        self._noted = tracked, backward

    def noted(self, record: Record) -> Record:
        """*record*, with what was noted."""
        tracked, backward = self._noted
        return record._replace(tracked=tracked, backward=backward) if tracked or backward else record

    def addressed(self, record: Record) -> Record:
        """*record* of a message, with what was noted, and with the ranks where they are not all."""
        members = self.meeting.members
        return self.noted(record._replace(among=members.ranks) if members.at else record)

    def tracked(self) -> int:
        """Which arrays of the last collective have a history on any rank: a bit for each."""
        tracked = 0
        for record in self.records:
            tracked |= record.tracked
        return tracked

    def enter(self, record: Record) -> list[Record]:
        """Show *record*; returns those of all ranks, by place, if all are in the same collective.

        Raises: CollectiveError.
        """
        record = self.noted(record)
        if record != self._last[0]:
            self._last = (record, pickle.dumps(record, 5))
        mine = self._last[1]
        said = self.meeting.meet(_NUMBERS[record.kind], mine)
        records = self.records = [
            record if payload == mine else self._decoded[payload] for payload in said
        ]
        own = self.meeting.members.place
        for place, other in enumerate(records):
            if other is not record and manner(other) != manner(record):
                mixed = other.on_gpu != record.on_gpu
                self.refuse(
                    f"rank {own} is in {described(record)}, but rank {place} in "
                    f"{described(other)}"
                    + (": give arrays on the GPU on all ranks, or on none" if mixed else "")
                )
        return records

    def pair(self, mine: Record, theirs: Record, source: int) -> None:
        """A message has come: the records of the two, who have to do the same.

        Raises: CollectiveError.
        """
        if manner(mine) != manner(theirs):
            own = self.meeting.members.place
            raise CollectiveError(
                f"{self.meeting.where()}: rank {own} is in {described(mine)}, but "
                f"rank {source} was in {described(theirs)} when it sent the array."
            )
        self.records = [mine, theirs]

    def check_alike(self, records: Sequence[Record]) -> None:
        """Raises: CollectiveError unless all ranks gave arrays of the same shapes and dtypes."""
        rule = "a reduction needs the same shapes and dtypes on every rank"
        if {each for record in records for each in record.given} >= {((), "<i8"), ((), "<u8")}:
            rule += f", and an int from 2**63 on is a uint64: {FOR_ANY_INT}"
        self._check_same(records, lambda record: record.given, rule)

    def check_weights(self, records: Sequence[Record]) -> float:
        """The weights of all ranks together.  Raises: CollectiveError if all are 0."""
        if not any(record.weight for record in records):
            self.refuse("the weights of all ranks are 0, so there is nothing to take a mean of")
        return sum(record.weight for record in records)

    def check_fit(self, records: Sequence[Record]) -> None:
        """Raises: CollectiveError unless all ranks' arrays can be concatenated along axis 0."""

        def but_for_rows(record: Record) -> list[tuple[tuple[int, ...], int, Code]]:
            return [(shape[1:], len(shape), dtype) for shape, dtype in record.given]

        self._check_same(records, but_for_rows, "only the number of rows may differ")
        if records[0].kind == "all_to_all":
            self.check_rows(records)

    def _check_same(self, records: Sequence[Record], said: Callable[[Record], Any], rule: str) -> None:
        first = said(records[0])
        for place, record in enumerate(records):
            if said(record) != first:
                gave = f"rank 0 gave {listed(records[0])}, but rank {place} {listed(record)}"
                self.refuse(f"{gave}: {rule}")

    def check_rows(self, records: Sequence[Record]) -> None:
        """Raises: CollectiveError if an array has no rows that could be split."""
        for record in records:
            if any(not shape for shape, _ in record.given):
                self.refuse("a value without dimensions has no rows to give to the ranks")

    def refuse(self, reason: str) -> NoReturn:
        """Leave the collective and raise a CollectiveError, as the other ranks do, too."""
        where = self.meeting.where()
        self.meeting.part()
        raise CollectiveError(f"{where}: {reason}.")
