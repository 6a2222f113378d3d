"""Collectives through shared memory, for workers on CPUs.

A rank shows its arrays in its part of the arena: worker variables where they lie, other arrays as copies
on its *stage*, those to be reduced as one vector a dtype.  The other ranks read them there.  Each of n
ranks reduces 1/n of the elements::

    rank 0's stage [ a0 │ a1 ]            [ a0+b0 │  ·    ]
                               ─ reduce ▶                    ─ copy ▶ [ a0+b0 │ a1+b1 ] on every rank
    rank 1's stage [ b0 │ b1 ]            [  ·    │ a1+b1 ]

so that each rank reads and writes as much as one memory copy does.  Elements merge in rank order.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..memory.arena import Arena
from ..memory.mapping import map_file
from ..plan.call import Access, aligned
from ..plan.split import split
from ..values.arrays import Array, code_of
from .agreement import Agreement
from .base import MESSAGE, Communicator, Read
from .board import board_bytes
from .journal import Journal
from .meeting import Meeting
from .ops import OPERATIONS, Operation, reduce_share
from .records import Arrays, Record, as_vector, given, layout_of, pack, unpack

_IN_PLACE_FROM = 1 << 14
"""Bytes from which an array that lies in the arena is read where it is rather than copied."""

_RECYCLED_FROM = 1 << 20
"""Bytes from which results are made in the arena, whose blocks are used again: fresh pages cost more
than the reduction."""


class ShmCommunicator(Communicator):
    """One rank's end of the collectives through shared memory."""

    def __init__(
        self,
        rank: int,
        size: int,
        file: int,
        wakes: Sequence[int],
        answered: Callable[[int, int], bool] | None = None,
        journal: Journal | None = None,
    ) -> None:
        """One of *size* ranks that share the sparse *file*; *wakes* are the eventfds they sleep on.

        *answered* tells whether a rank has ended the call of an epoch; None: ``end`` tells the others.
        A *journal* is for sessions on several hosts (``hosts``).
        """
        self._journal = journal
        self._arena = Arena(file, rank, None if journal is None else journal.forget)
        board = map_file(file, board_bytes(size), Access.WRITE)
        meeting = Meeting(board.data, rank, size, self._arena, wakes, answered, journal)
        super().__init__(Agreement(meeting))
        self._stage: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sent: dict[int, deque[tuple[int, Any]]] = {}  # by receiver: what it may still read

    def end(self, failed: bool) -> None:
        self._meeting.end(failed)
        self._sent.clear()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._arena.empty(shape, dtype)

    def offset(self, array: Array) -> int:
        return self._arena.place(array)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for a result; a large one lies in the arena, whose blocks are used again."""
        if prod(shape) * np.dtype(dtype).itemsize < _RECYCLED_FROM:
            return np.empty(shape, dtype)
        return self._arena.empty(shape, dtype)

    def tidy(self) -> None:
        self._arena.tidy()

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduced(self, record: Record, arrays: Arrays) -> list[Array]:
        operation, place, count = OPERATIONS[record.operation], self.place, self.count
        share = None if record.kind == "reduce_scatter" else (place, count)
        divisor, sources, alone = self._entered(record, arrays, share)
        results = []
        if record.kind == "reduce_scatter":
            results = self._rows_reduced(record, divisor, sources)
        else:
            for stages in sources:
                partials = self._with_own(stages, alone)
                reduce_share(operation, divisor, partials, [stages[place]], place, count)
            self._meeting.step()
            if record.root in (-1, place):
                results = unpack(record, arrays, [self._collected(stages) for stages in sources])
        self._meeting.part()
        return results

    def _entered(
        self, record: Record, arrays: Arrays, share: tuple[int, int] | None
    ) -> tuple[float, list[list[Array]], Array | None]:
        """Enter a reduction: what a mean divides by, and the stages with the partials of each vector, by
        place.

        *share* is the one that only this rank reads: so many-th of so many.  If the partials are a
        single array as it is, that share is not copied to the stage, and the array is returned, too.
        """
        layout = layout_of(record)
        vectors = self._staged(layout.vectors)
        alone = None if share is None else as_vector(record, arrays)
        if share is None or alone is None:
            pack(record, arrays, vectors)
        else:
            start, stop = split(0, alone.size, share[1])[share[0]]
            vectors[0][:start], vectors[0][stop:] = alone[:start], alone[stop:]
        at = self._places_of(vectors)
        self._reveal(record.kind, record.root, vectors, at)
        records = self.agreement.enter(record._replace(at=at))
        self.agreement.check_alike(records)
        divisor = self.agreement.check_weights(records)
        if record.kind == "reduce_scatter":
            self.agreement.check_rows(records)
        stages = [
            [self._arena.view(each.at[index], *vector) for each in records]
            for index, vector in enumerate(layout.vectors)
        ]
        return divisor, stages, alone

    def _with_own(self, stages: Arrays, alone: Array | None) -> list[Array]:
        """*stages*, with the partials that are not on this rank's."""
        own = stages[self.place] if alone is None else alone
        return [*stages[: self.place], own, *stages[self.place + 1 :]]

    def _rows_reduced(self, record: Record, divisor: float, sources: Sequence[Arrays]) -> list[Array]:
        """This rank's rows of a ``reduce_scatter``."""
        operation, results = OPERATIONS[record.operation], []
        places = layout_of(record).places
        for (shape, dtype), (vector, start, stop) in zip(record.given, places, strict=True):
            mine = [self.part_of(source[start:stop].reshape(shape)) for source in sources[vector]]
            partial = self._new(mine[0].shape, mine[0].dtype)
            reduce_share(operation, divisor, mine, [partial])
            results.append(partial.astype(operation.result_dtype(np.dtype(dtype)), copy=False))
        return results

    def reduced_in_place(self, arrays: Arrays, operation: Operation) -> bool:
        if any(operation.partial_dtype(array.dtype) != array.dtype for array in arrays):
            return False
        at = self._places_of(arrays)
        record = Record("all_reduce", operation.name, given=given(arrays), at=at, in_place=True)
        records = self.agreement.enter(record)
        self.agreement.check_alike(records)
        for index in range(len(arrays)):
            sources = self._sources(records, index)
            reduce_share(operation, self.count, sources, sources, self.place, self.count)
        self._meeting.part()
        return True

    def _collected(self, sources: Arrays) -> Array:
        """A reduced vector, put together of the shares on all stages."""
        vector = self._new(sources[0].shape, sources[0].dtype)
        for source, (start, stop) in zip(sources, split(0, vector.size, self.count), strict=True):
            vector[start:stop] = source[start:stop]
        return vector

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def rooted(self, kind: str, arrays: Arrays | None, root: int, keep: bool = False) -> list[Array]:
        at = () if arrays is None else self._shown(arrays)
        record = Record(kind, root=root, given=given(arrays or ()), at=at)
        self._reveal(kind, root, arrays or (), at)
        origin = self.agreement.enter(record)[root]
        if kind == "scatter":
            self.agreement.check_rows([origin])
        results = []
        for index in range(len(origin.at)):
            (whole,) = self._sources([origin], index)
            results.append(self._copied([self.part_of(whole) if kind == "scatter" else whole], keep))
        self._meeting.part()
        return results

    def exchanged(self, kind: str, arrays: Arrays, root: int = -1, keep: bool = False) -> list[Array]:
        record = Record(kind, root=root, given=given(arrays), at=self._shown(arrays))
        self._reveal(kind, root, arrays, record.at)
        records = self.agreement.enter(record)
        self.agreement.check_fit(records)
        results = []
        for index in range(len(arrays)) if root in (-1, self.place) else ():
            pieces = self._sources(records, index)
            if kind == "all_to_all":
                pieces = [self.part_of(piece) for piece in pieces]
            results.append(self._copied(pieces, keep))
        self._meeting.part()
        return results

    def send(self, array: Array, to: int, record: Record = MESSAGE, keep: Any = None) -> None:
        rank, record = self._meeting.members.ranks[to], self.agreement.addressed(record)
        sent = self._sent.setdefault(rank, deque())
        while sent and sent[0][0] < self._meeting.received(rank):
            sent.popleft()
        said = None if record is MESSAGE else record
        head = pickle.dumps((array.shape, code_of(array.dtype), said))
        start = aligned(8 + len(head))
        message = self._arena.empty((start + array.nbytes,), np.uint8)
        message[:8].view(np.int64)[:] = len(head)
        message[8 : 8 + len(head)] = memoryview(head)
        body: Array = np.ndarray(array.shape, array.dtype, buffer=message, offset=start)
        body[...] = array
        at = self._places_of([message])
        self._reveal("send", to, [message], at)
        sent.append((self._meeting.post(rank, *at), (message, keep)))

    def recv(self, source: int, record: Record = MESSAGE, read: Read | None = None) -> Array:
        rank, record = self._meeting.members.ranks[source], self.agreement.addressed(record)
        at = self._meeting.fetch(rank)
        length = int(self._arena.view(at, (1,), np.int64)[0])
        head = self._arena.view(at + 8, (length,), np.uint8).tobytes()
        shape, dtype, said = pickle.loads(head)
        if read is not None and said is not None and said.window:
            result = read(said)
        else:
            result = self._copied([self._arena.view(at + aligned(8 + length), shape, dtype)])
        self._meeting.fetched(rank)
        self.agreement.pair(record, said or MESSAGE, source)
        return result

    # ── showing and seeing ───────────────────────────────────────────────────────────────────────

    def _reveal(self, kind: str, root: int, arrays: Arrays, at: Sequence[int]) -> None:
        """Other ranks will read *arrays*, which lie *at* these offsets: all of them can, on one host."""

    def _staged(self, types: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> list[Array]:
        """Places for arrays of these shapes and dtypes, one behind the other, on this rank's stage."""
        sizes = [aligned(prod(shape) * dtype.itemsize) for shape, dtype in types]
        needed = max(4096, sum(sizes))
        if needed > len(self._stage):
            self._stage = np.empty(0, np.uint8)  # freed before more is asked for
            self._stage = self._arena.empty((needed,), np.uint8)
        starts = accumulate(sizes, initial=0)
        return [np.ndarray(*each, self._stage, at) for each, at in zip(types, starts, strict=False)]

    def _shown(self, arrays: Arrays) -> tuple[int, ...]:
        """Where all can see *arrays*: large ones of the arena where they are, others staged."""
        shown = list(arrays)
        copied = [
            index
            for index, array in enumerate(arrays)
            if array.nbytes < _IN_PLACE_FROM or self._arena.locate(array) is None
        ]
        places = self._staged([(arrays[index].shape, arrays[index].dtype) for index in copied])
        for index, place in zip(copied, places, strict=True):
            place[...] = arrays[index]
            shown[index] = place
        return self._places_of(shown)

    def _places_of(self, arrays: Arrays) -> tuple[int, ...]:
        """The offsets of *arrays*, which lie in this rank's shared memory."""
        return tuple([self._arena.place(array) for array in arrays])

    def _sources(self, records: Sequence[Record], index: int) -> list[Array]:
        """Array *index* of each record, seen in place."""
        return [self._arena.view(each.at[index], *each.given[index]) for each in records]

    def _copied(self, pieces: Arrays, keep: bool = False) -> Array:
        """*pieces* one behind the other along axis 0, in new memory; a single one as it is."""
        first = pieces[0]
        make = self.empty if keep else self._new
        if len(pieces) == 1:
            result = make(first.shape, first.dtype)
            result[...] = first
            return result
        if first.ndim == 0:
            pieces = [piece.reshape(1) for piece in pieces]
        result = make((sum(len(piece) for piece in pieces), *pieces[0].shape[1:]), first.dtype)
        return np.concatenate(pieces, axis=0, out=result)
