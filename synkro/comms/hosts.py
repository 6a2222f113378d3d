"""Collectives of ranks on several hosts: through shared memory that is mirrored (``journal``).

A rank reads the arrays of another host's ranks in its own host's file, once its host has been shown
them.  Each collective shows them to the hosts that read them, and no more of them than is read there.

In a reduction of small arrays each rank reduces all elements, in rank order.  Large arrays are reduced
on each host first, so that each element goes once from host to host, and so does its result::

                    its part of its host's      its part of all             collected
    host 0 ─┬─ rank 0  [ p0 p0 │  ·  ·  ] ─┐     [ r0 │  · │  · │  · ] ─┐
            └─ rank 1  [  ·  · │ p1 p1  ] ─┤show [  · │ r1 │  · │  · ] ─┤show   [ r0 │ r1 │ r2 │ r3 ]
    host 1 ─┬─ rank 2  [ q0 q0 │  ·  ·  ] ─┤ ──▶ [  · │  · │ r2 │  · ] ─┤ ──▶   on every rank
            └─ rank 3  [  ·  · │ q1 q1  ] ─┘     [  · │  · │  · │ r3 ] ─┘

Partials merge in rank order on a host, and then in the order of the hosts: the same way every time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import NamedTuple

from ..plan.split import split
from ..values.arrays import Array
from .journal import Journal
from .ops import OPERATIONS, Operation, reduce_share
from .records import Arrays, Record, layout_of, unpack
from .shm import ShmCommunicator

_WHOLE_UP_TO = 1 << 14
"""Bytes of the partials of a rank up to which each rank reduces all: one exchange instead of three."""

_REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
_TO_ROOT = ("reduce", "gather", "send")
_BY_ROWS = ("scatter", "all_to_all")


class _Group(NamedTuple):
    """The ranks that meet who are on one host: from place *start* to *stop*."""

    host: int
    start: int
    stop: int


class _Part(NamedTuple):
    """Some elements of a vector."""

    vector: int
    start: int
    stop: int


@lru_cache(64)
def _by_host(ranks: tuple[int, ...], hosts: tuple[range, ...]) -> list[_Group]:
    """*ranks*, which are in order, as those of each host."""
    found: list[_Group] = []
    for place, rank in enumerate(ranks):
        host = bisect_right(hosts, rank, key=lambda each: each.start) - 1
        start = found.pop().start if found and found[-1].host == host else place
        found.append(_Group(host, start, place + 1))
    return found


def _parts(record: Record, count: int, first: int, last: int) -> list[_Part]:
    """What the ranks from place *first* to *last*, of *count*, reduce of what all hosts have.

    For ``reduce_scatter``, of each array their rows, else of each vector as much as all others.
    """
    layout = layout_of(record)
    whole = [(number, 0, size, 1) for number, ((size,), _) in enumerate(layout.vectors)]
    if record.kind == "reduce_scatter":
        whole = [
            (vector, start, shape[0], prod(shape[1:]))
            for (shape, _), (vector, start, _) in zip(record.given, layout.places, strict=True)
        ]
    parts = []
    for vector, start, rows, row in whole:
        spans = split(0, rows, count)
        parts.append(_Part(vector, start + spans[first][0] * row, start + spans[last - 1][1] * row))
    return parts


class HostsCommunicator(ShmCommunicator):
    """One rank's end of the collectives of ranks on several hosts, which has a journal.

    The file of the arena is that of this host, and ranks are woken on this host only.
    """

    _journal: Journal

    def _groups(self) -> list[_Group]:
        """The ranks that meet, by host."""
        return _by_host(self._meeting.members.ranks, self._journal.hosts)

    def _reveal(self, kind: str, root: int, arrays: Arrays, at: Sequence[int]) -> None:
        if kind in _REDUCTIONS and sum(array.nbytes for array in arrays) > _WHOLE_UP_TO:
            return  # this host reduces them first
        for group in self._groups():
            if kind in _TO_ROOT and not group.start <= root < group.stop:
                continue
            for array, start in zip(arrays, at, strict=True):
                low, high = 0, array.nbytes
                if kind in _BY_ROWS and array.ndim:
                    rows, row = split(0, len(array), self.count), prod(array.shape[1:]) * array.itemsize
                    low, high = rows[group.start][0] * row, rows[group.stop - 1][1] * row
                self._journal.show(start + low, high - low, [group.host])

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced(self, record: Record, arrays: Arrays) -> list[Array]:
        if len(self._groups()) == 1:
            return super().reduced(record, arrays)
        nbytes = sum(size * dtype.itemsize for (size,), dtype in layout_of(record).vectors)
        by_host = nbytes > _WHOLE_UP_TO
        divisor, sources, alone = self._entered(record, arrays, self._share() if by_host else None)
        results = []
        if by_host:
            self._reduce_on_host(record, sources, alone)
            results = self._reduced_by_host(record, arrays, divisor, sources)
        elif record.kind == "reduce_scatter":
            results = self._rows_reduced(record, divisor, sources)
        elif record.root in (-1, self.place):
            vectors = [self._new(stages[0].shape, stages[0].dtype) for stages in sources]
            for vector, stages in zip(vectors, sources, strict=True):
                reduce_share(OPERATIONS[record.operation], divisor, stages, [vector])
            results = unpack(record, arrays, vectors)
        self._meeting.part()
        return results

    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        return len(self._groups()) == 1 and super().reduced_in_place(arrays, operation)

    def _reduced_by_host(
        self, record: Record, arrays: Arrays, divisor: float, sources: Sequence[Arrays]
    ) -> list[Array]:
        """The results of a reduction that each host has begun; anything on a rank that gets none."""
        operation = OPERATIONS[record.operation]
        self._meeting.step()
        parts = _parts(record, self.count, self.place, self.place + 1)
        if record.kind == "reduce_scatter":
            results = []
            for part, array in zip(parts, arrays, strict=True):
                stages = sources[part.vector]
                values = self._new((part.stop - part.start,), stages[0].dtype)
                self._merge(operation, divisor, stages, part, values)
                rows = values.reshape(self.part_of(array).shape)
                results.append(rows.astype(operation.result_dtype(array.dtype), copy=False))
            return results
        # ranks of this host, and what is under way to others, may still read of this stage what other
        # ranks merge; what this rank merges is read by nobody else since the step
        for part in parts:
            stages = sources[part.vector]
            self._merge(operation, divisor, stages, part, stages[self.place][part.start : part.stop])
            for group in self._groups():
                if record.root == -1 or group.start <= record.root < group.stop:
                    self._show(sources, part, group.host)
        self._meeting.step()
        if record.root not in (-1, self.place):
            return []
        return unpack(record, arrays, [self._collected(stages) for stages in sources])

    def _share(self) -> tuple[int, int]:
        """Which share of its host's partials this rank reduces: so many-th of so many."""
        here = next(group for group in self._groups() if group.start <= self.place < group.stop)
        return self.place - here.start, here.stop - here.start

    def _reduce_on_host(self, record: Record, sources: Sequence[Arrays], alone: Array | None) -> None:
        """Reduce this rank's share of its host's partials, and show each other host what it merges."""
        groups, (place, count) = self._groups(), self._share()
        first = self.place - place
        for stages in sources if count > 1 or alone is not None else ():
            near = self._with_own(stages, alone)[first : first + count]
            reduce_share(OPERATIONS[record.operation], 1, near, [stages[self.place]], place, count)
        for group in groups:
            for vector, start, stop in _parts(record, self.count, group.start, group.stop):
                low, high = split(0, sources[vector][0].size, count)[place]
                part = _Part(vector, max(start, low), min(stop, high))  # which may be empty
                self._show(sources, part, group.host)

    def _merge(
        self, operation: Operation, divisor: float, stages: Arrays, part: _Part, into: Array
    ) -> None:
        """Merge what all hosts have of *part*; *stages* hold what each has reduced, share by share.

        *into* may be that part of this rank's stage.
        """
        groups, size = self._groups(), stages[0].size
        shares = [split(0, size, group.stop - group.start) for group in groups]  # of each on its host
        starts = [[start for start, _ in each] for each in shares]
        within = {edge for each in starts for edge in each if part.start < edge < part.stop}
        for low, high in pairwise(sorted({part.start, part.stop, *within})):
            places = [
                group.start + bisect_right(each, low) - 1
                for group, each in zip(groups, starts, strict=True)
            ]
            sources = [stages[place][low:high] for place in places]
            reduce_share(operation, divisor, sources, [into[low - part.start : high - part.start]])

    def _show(self, sources: Sequence[Arrays], part: _Part, host: int) -> None:
        """Show *host* a part of what lies on this rank's stage."""
        at = self.agreement.records[self.place].at[part.vector]
        itemsize = sources[part.vector][0].itemsize
        self._journal.show(at + part.start * itemsize, max(0, part.stop - part.start) * itemsize, [host])
