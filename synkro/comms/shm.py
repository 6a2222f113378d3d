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

import os
import pickle
import struct
from collections import deque
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import InternalError
from ..memory.arena import Arena
from ..memory.mapping import map_file
from ..memory.segment import aligned
from ..plan.call import Access
from ..plan.split import split
from ..values.arrays import Array, code_of
from .agreement import Agreement
from .base import Communicator
from .meeting import Meeting, board_bytes
from .ops import OPERATIONS, Operation
from .records import KIND, Record, Shown, given, layout_of, pack

_BLOCK_BYTES = 1 << 18
"""Elements are reduced in blocks of this size, which stay in a core's L2 cache from one source to
the next: the target is then read and written once, however many sources there are."""

_IN_PLACE_FROM = 1 << 14
"""Bytes from which an array that lies in the arena is read where it is rather than copied."""

_RECYCLED_FROM = 1 << 20
"""Bytes from which results are made in the arena, whose blocks are used again: fresh pages cost more
than the reduction."""

_BARRIER = Record(KIND["barrier"])


class ShmCommunicator(Communicator):
    """One rank's end."""

    def __init__(
        self,
        rank: int,
        size: int,
        file: int,
        wakes: Sequence[int],
        answered: Callable[[int, int], bool] | None = None,
    ) -> None:
        """One of *size* ranks that share the sparse *file*; *wakes* are the eventfds they sleep on.

        *answered* tells whether a rank has ended the call of an epoch; None: ``end`` tells the others.
        """
        self.rank = rank
        self.size = size
        self.place = 0
        self.count = 1
        self._arena = Arena(file, rank)
        board = map_file(file, board_bytes(size), Access.WRITE)
        self._meeting = Meeting(board.data, rank, size, self._arena, wakes, answered)
        self.agreement = Agreement(self._meeting)
        self._stage: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._sent: dict[int, deque[tuple[int, Array]]] = {}  # by receiver: messages it may still read

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        self._meeting.begin(epoch, ranks)
        self.place = self._meeting.place
        self.count = len(ranks)

    def end(self, failed: bool) -> None:
        self._meeting.end(failed)
        self._sent.clear()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._arena.empty(shape, dtype)

    def _new(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Memory for a result; a large one lies in the arena, whose blocks are used again."""
        if prod(shape) * np.dtype(dtype).itemsize < _RECYCLED_FROM:
            return np.empty(shape, dtype)
        return self._arena.empty(shape, dtype)

    def tidy(self) -> None:
        self._arena.tidy()

    # ── reductions ───────────────────────────────────────────────────────────────────────────────

    def reduce_share(
        self, operation: Operation, divisor: int, sources: Sequence[Array], target: Array
    ) -> None:
        share = split(0, target.size, self.size)[self.rank]
        _reduce(operation, divisor, sources, [target], share)

    def all_reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, names: str = ""
    ) -> list[Array]:
        record = Record(KIND["all_reduce"], operation.name, weight=weight, names=names)
        records = self._reduced(record, arrays)
        results = self._collected(records, operation)
        self._meeting.part()
        return results

    def reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, root: int
    ) -> list[Array] | None:
        records = self._reduced(Record(KIND["reduce"], operation.name, root, weight), arrays)
        results = self._collected(records, operation) if self.place == root else None
        self._meeting.part()
        return results

    def reduce_scatter(
        self, arrays: Sequence[Array], operation: Operation, weight: float
    ) -> list[Array]:
        record = Record(KIND["reduce_scatter"], operation.name, weight=weight)
        records = self._lifted(record, arrays)
        self.agreement.check_rows(records)
        divisor = sum(record.weight for record in records)
        results = []
        for array, (vector, start, stop) in zip(arrays, layout_of(records[0]).places, strict=True):
            whole = [
                source[start:stop].reshape(array.shape) for source in self._sources(records, vector)
            ]
            low, high = split(0, len(array), self.count)[self.place]
            mine = [source[low:high] for source in whole]
            partial = self._new(mine[0].shape, mine[0].dtype)
            _reduce(operation, divisor, mine, [partial], (0, partial.size))
            results.append(partial.astype(operation.result_dtype(array.dtype), copy=False))
        self._meeting.part()
        return results

    def all_reduce_in_place(self, arrays: Sequence[Array], operation: Operation) -> None:
        if any(operation.partial_dtype(array.dtype) != array.dtype for array in arrays):
            results = self.all_reduce(arrays, operation, 1)
            for array, result in zip(arrays, results, strict=True):
                array[...] = result
            return
        record = Record(KIND["all_reduce"], operation.name, shown=self._where(arrays), in_place=True)
        records = self.agreement.enter(record)
        self.agreement.check_alike(records)
        for index in range(len(arrays)):
            sources = self._sources(records, index)
            share = split(0, sources[0].size, self.count)[self.place]
            _reduce(operation, self.count, sources, sources, share)
        self._meeting.part()

    def _reduced(self, record: Record, arrays: Sequence[Array]) -> list[Record]:
        """Enter a reduction, and reduce this rank's share of the elements on its stage."""
        records = self._lifted(record, arrays)
        operation = OPERATIONS[record.operation]
        divisor = sum(record.weight for record in records)
        for vector in range(len(layout_of(records[0]).sizes)):
            sources = self._sources(records, vector)
            share = split(0, sources[0].size, self.count)[self.place]
            _reduce(operation, divisor, sources, [sources[self.place]], share)
        self._meeting.step()
        return records

    def _lifted(self, record: Record, arrays: Sequence[Array]) -> list[Record]:
        """Enter a reduction with partials of *arrays* on the stage, one vector a dtype."""
        record = record._replace(given=given(arrays))
        layout = layout_of(record)
        vectors = self._staged(layout.sizes, layout.dtypes)
        pack(record, arrays, vectors)
        records = self.agreement.enter(record._replace(shown=self._where(vectors)))
        self.agreement.check_alike(records)
        self.agreement.check_weights(records)
        return records

    def _collected(self, records: list[Record], operation: Operation) -> list[Array]:
        """The reduced arrays, put together of the shares on all stages."""
        layout = layout_of(records[0])
        vectors = []
        for index, dtype in enumerate(layout.dtypes):
            sources = self._sources(records, index)
            vector = self._new(sources[0].shape, dtype)
            for source, (start, stop) in zip(sources, split(0, vector.size, self.count), strict=True):
                vector[start:stop] = source[start:stop]
            vectors.append(vector)
        return [
            vectors[vector][start:stop]
            .reshape(shape)
            .astype(operation.result_dtype(np.dtype(dtype)), copy=False)
            for (shape, dtype), (vector, start, stop) in zip(
                records[0].given, layout.places, strict=True
            )
        ]

    # ── moving ───────────────────────────────────────────────────────────────────────────────────

    def barrier(self) -> None:
        self.agreement.enter(_BARRIER)
        self._meeting.pass_on()

    def broadcast(self, arrays: Sequence[Array] | None, root: int, lasting: bool = False) -> list[Array]:
        records = self._rooted(KIND["broadcast"], arrays, root)
        results = [self._copied([self._seen(shown)], lasting) for shown in records[root].shown or ()]
        self._meeting.part()
        return results

    def all_gather(self, arrays: Sequence[Array], lasting: bool = False) -> list[Array]:
        records = self.agreement.enter(Record(KIND["all_gather"], shown=self._shown(arrays)))
        self.agreement.check_fit(records)
        results = [self._copied(self._sources(records, i), lasting) for i in range(len(arrays))]
        self._meeting.part()
        return results

    def gather(self, arrays: Sequence[Array], root: int) -> list[Array] | None:
        records = self.agreement.enter(Record(KIND["gather"], root=root, shown=self._shown(arrays)))
        self.agreement.check_fit(records)
        results = None
        if self.place == root:
            results = [self._copied(self._sources(records, i)) for i in range(len(arrays))]
        self._meeting.part()
        return results

    def scatter(self, arrays: Sequence[Array] | None, root: int) -> list[Array]:
        records = self._rooted(KIND["scatter"], arrays, root)
        self.agreement.check_rows([records[root]])
        results = []
        for shown in records[root].shown or ():
            whole = self._seen(shown)
            start, stop = split(0, len(whole), self.count)[self.place]
            results.append(self._copied([whole[start:stop]]))
        self._meeting.part()
        return results

    def all_to_all(self, arrays: Sequence[Array]) -> list[Array]:
        records = self.agreement.enter(Record(KIND["all_to_all"], shown=self._shown(arrays)))
        self.agreement.check_fit(records)
        results = []
        for index in range(len(arrays)):
            mine = []
            for source in self._sources(records, index):
                start, stop = split(0, len(source), self.count)[self.place]
                mine.append(source[start:stop])
            results.append(self._copied(mine))
        self._meeting.part()
        return results

    def send(self, array: Array, to: int, on_gpu: bool = False) -> None:
        rank = self._meeting.group[to]
        sent = self._sent.setdefault(rank, deque())
        while sent and sent[0][0] < self._meeting.received(rank):
            sent.popleft()
        head = pickle.dumps((array.shape, code_of(array.dtype), on_gpu))
        start = aligned(8 + len(head))
        message = self._arena.empty((start + array.nbytes,), np.uint8)
        message[:8] = memoryview(struct.pack("=q", len(head)))
        message[8 : 8 + len(head)] = memoryview(head)
        body: Array = np.ndarray(array.shape, array.dtype, buffer=message, offset=start)
        body[...] = array
        at = self._arena.locate(message)
        assert at is not None
        sent.append((self._meeting.post(rank, at), message))

    def recv(self, source: int) -> Array:
        return self.receive(source)[0]

    def receive(self, source: int) -> tuple[Array, bool]:
        """As ``recv``; also, whether the array was sent from a GPU."""
        rank = self._meeting.group[source]
        at = self._meeting.fetch(rank)
        length = int(self._arena.view(at, (1,), np.int64)[0])
        shape, dtype, on_gpu = pickle.loads(self._arena.view(at + 8, (length,), np.uint8).tobytes())
        result = self._copied([self._arena.view(at + aligned(8 + length), shape, dtype)])
        self._meeting.fetched(rank)
        return result, on_gpu

    # ── showing and seeing ───────────────────────────────────────────────────────────────────────

    def _staged(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
        """Places for arrays, one behind the other, on this rank's stage."""
        sizes = [
            aligned(prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        if sum(sizes) > len(self._stage) or not len(self._stage):
            self._stage = np.empty(0, np.uint8)  # freed before more is asked for
            self._stage = self._arena.empty((max(4096, sum(sizes)),), np.uint8)
        places, end = [], 0
        for shape, dtype, nbytes in zip(shapes, dtypes, sizes, strict=True):
            place: Array = np.ndarray(shape, dtype, buffer=self._stage, offset=end)
            places.append(place)
            end += nbytes
        return places

    def _shown(self, arrays: Sequence[Array]) -> tuple[Shown, ...]:
        """*arrays* where all can see them: large ones of the arena where they are, others staged."""
        shown = list(arrays)
        copied = [
            index
            for index, array in enumerate(arrays)
            if array.nbytes < _IN_PLACE_FROM or self._arena.locate(array) is None
        ]
        places = self._staged(
            [arrays[index].shape for index in copied], [arrays[index].dtype for index in copied]
        )
        for index, place in zip(copied, places, strict=True):
            place[...] = arrays[index]
            shown[index] = place
        return self._where(shown)

    def _where(self, arrays: Sequence[Array]) -> tuple[Shown, ...]:
        return tuple(Shown(array.shape, code_of(array.dtype), self._place_of(array)) for array in arrays)

    def _place_of(self, array: Array) -> int:
        at = self._arena.locate(array)
        if at is None:
            raise InternalError("an array that other ranks should see does not lie in shared memory.")
        return at

    def _seen(self, shown: Shown) -> Array:
        return self._arena.view(shown.at, shown.shape, shown.dtype)

    def _sources(self, records: Sequence[Record], index: int) -> list[Array]:
        """Array *index* of each rank, seen in place."""
        return [self._seen(record.shown[index]) for record in records if record.shown is not None]

    def _copied(self, pieces: Sequence[Array], lasting: bool = False) -> Array:
        """*pieces* one behind the other along axis 0, in new memory; a single one as it is."""
        first = pieces[0]
        make = self.empty if lasting else self._new
        if len(pieces) == 1:
            result = make(first.shape, first.dtype)
            result[...] = first
            return result
        if first.ndim == 0:
            pieces = [piece.reshape(1) for piece in pieces]
        rows = sum(len(piece) for piece in pieces)
        result = make((rows, *pieces[0].shape[1:]), first.dtype)
        return np.concatenate(pieces, axis=0, out=result)

    # ── agreeing ─────────────────────────────────────────────────────────────────────────────────

    def _rooted(self, kind: int, arrays: Sequence[Array] | None, root: int) -> list[Record]:
        """Enter a collective in which only *root* has something to show."""
        shown = self._shown(arrays) if arrays is not None and self.place == root else None
        return self.agreement.enter(Record(kind, root=root, shown=shown))


def shared_file(size: int) -> int:
    """A descriptor of the file that *size* ranks share."""
    fd = os.memfd_create("synkro-arena", os.MFD_CLOEXEC)
    try:
        os.fchmod(fd, 0o600)
        os.posix_fallocate(fd, 0, board_bytes(size))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _reduce(
    operation: Operation,
    divisor: float,
    sources: Sequence[Array],
    targets: Sequence[Array],
    share: tuple[int, int],
) -> None:
    """Reduce the elements *share* of *sources*, in their order, into all *targets*.

    The arrays are C-contiguous; targets may be sources.
    """
    flat = [source.reshape(-1) for source in sources]
    into = [target.reshape(-1) for target in targets]
    start, stop = share
    step = max(1, _BLOCK_BYTES // sources[0].itemsize)
    # a target that is a later source must not be written before that source is merged
    apart = len(sources) > 2 and any(target is source for target in targets for source in sources[2:])
    spare = np.empty(min(step, stop - start), sources[0].dtype) if apart else None
    for low in range(start, stop, step):
        block = slice(low, min(low + step, stop))
        out = into[0][block] if spare is None else spare[: block.stop - low]
        if len(flat) == 1:
            np.copyto(out, flat[0][block])
        else:
            operation.merge(flat[0][block], flat[1][block], out=out)
        for source in flat[2:]:
            operation.merge(out, source[block], out=out)
        operation.finish(out, divisor, out=out)
        for target in into[1:] if spare is None else into:
            np.copyto(target[block], out)
