"""Collectives through shared memory, for workers on CPUs.

What a rank has to show lies in its part of the arena: worker variables in place, other arrays copied to
its *stage*, those to be reduced as one vector a dtype.  The others read it there.  A reduction is done
by all, each its 1/n of the elements::

    rank 0's stage [ a0 │ a1 ]            [ a0+b0 │  ·    ]
                               ─ reduce ▶                    ─ copy ▶ [ a0+b0 │ a1+b1 ] on every rank
    rank 1's stage [ b0 │ b1 ]            [  ·    │ a1+b1 ]

so that n ranks read and write as much as one memory copy each, and always in the order of the ranks.
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

from ..errors import CollectiveError, InternalError
from ..ipc.arena import Arena
from ..ipc.mapping import map_file
from ..ipc.segment import aligned
from ..plan.call import Access
from ..plan.split import split
from .base import Communicator, New
from .meeting import KINDS, Meeting, board_bytes
from .ops import OPERATIONS, Array, Operation
from .records import Record, Shown, described, layout_of, listed, manner, shapes_of

_BLOCK_BYTES = 1 << 18
"""Elements are reduced in blocks of this size, which stay in a core's L2 cache from one source to
the next: the target is then read and written once, however many sources there are."""

_IN_PLACE_FROM = 1 << 14
"""Bytes from which an array that lies in the arena is read where it is rather than copied."""

_RECYCLED_FROM = 1 << 20
"""Bytes from which results are made in the arena, whose blocks are used again: fresh pages cost more
than the reduction."""

_REMEMBERED = 64  # records that are kept decoded

_KIND = {name: number for number, name in enumerate(KINDS)}

_BARRIER = Record(_KIND["barrier"], "", -1, 1, None)


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

        *answered* tells whether a rank has ended the call of an epoch; without it ``end`` tells it.
        """
        self.rank = rank
        self.size = size
        self.place = 0
        self.count = 1
        self._arena = Arena(file, rank)
        board = map_file(file, board_bytes(size), Access.WRITE)
        self._meeting = Meeting(board.data, rank, size, self._arena, wakes, answered)
        self._stage: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._decoded: dict[bytes, Record] = {}
        self._last: tuple[Record | None, bytes] = (None, b"")
        self._sent: dict[int, deque[tuple[int, Array]]] = {}

    def begin(self, epoch: int, ranks: tuple[int, ...]) -> None:
        self._meeting.begin(epoch, ranks)
        self.place = self._meeting.place
        self.count = len(ranks)

    def end(self, failed: bool) -> None:
        self._meeting.end(failed)
        self._sent.clear()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._arena.empty(shape, dtype)

    def new(self, shape: tuple[int, ...], dtype: Any) -> Array:
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

    def all_reduce(self, arrays: Sequence[Array], operation: Operation, weight: float) -> list[Array]:
        records = self._reduced(Record(_KIND["all_reduce"], operation.name, -1, weight, None), arrays)
        results = self._collected(records, operation)
        self._meeting.part()
        return results

    def reduce(
        self, arrays: Sequence[Array], operation: Operation, weight: float, root: int
    ) -> list[Array] | None:
        records = self._reduced(Record(_KIND["reduce"], operation.name, root, weight, None), arrays)
        results = self._collected(records, operation) if self.place == root else None
        self._meeting.part()
        return results

    def reduce_scatter(
        self, arrays: Sequence[Array], operation: Operation, weight: float
    ) -> list[Array]:
        record = Record(_KIND["reduce_scatter"], operation.name, -1, weight, None)
        records = self._lifted(record, arrays)
        self._check_rows(records)
        divisor = sum(record.weight for record in records)
        results = []
        for array, (vector, start, stop) in zip(arrays, layout_of(records[0]).places, strict=True):
            whole = [
                source[start:stop].reshape(array.shape) for source in self._sources(records, vector)
            ]
            low, high = split(0, len(array), self.count)[self.place]
            mine = [source[low:high] for source in whole]
            partial = self.new(mine[0].shape, mine[0].dtype)
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
        record = Record(_KIND["all_reduce"], operation.name, -1, 1, self._where(arrays), True)
        records = self._enter(record)
        self._check_alike(records)
        for index in range(len(arrays)):
            sources = self._sources(records, index)
            share = split(0, sources[0].size, self.count)[self.place]
            _reduce(operation, self.count, sources, sources, share)
        self._meeting.part()

    def _reduced(self, record: Record, arrays: Sequence[Array]) -> list[Record]:
        """Enter with *arrays*, and reduce this rank's share of them in its stage."""
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
        record = record._replace(given=tuple([(array.shape, array.dtype.str) for array in arrays]))
        layout = layout_of(record)
        vectors = self._staged(layout.sizes, layout.dtypes)
        for array, (vector, start, stop) in zip(arrays, layout.places, strict=True):
            place = vectors[vector][start:stop].reshape(array.shape)
            if not record.weight:
                place[...] = 0  # also where there are nans
            elif record.weight != 1:
                np.multiply(array, record.weight, out=place, dtype=place.dtype, casting="unsafe")
            else:
                place[...] = array
        records = self._enter(record._replace(shown=self._where(vectors)))
        self._check_alike(records)
        if not any(other.weight for other in records):
            self._refuse("the weights of all ranks are 0, so there is nothing to take a mean of")
        return records

    def _collected(self, records: list[Record], operation: Operation) -> list[Array]:
        """The reduced arrays: each rank's share out of its stage."""
        layout = layout_of(records[0])
        vectors = []
        for index, dtype in enumerate(layout.dtypes):
            sources = self._sources(records, index)
            vector = self.new(sources[0].shape, dtype)
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
        self._enter(_BARRIER)
        self._meeting.pass_on()

    def broadcast(self, arrays: Sequence[Array] | None, root: int, new: New) -> list[Array]:
        records = self._rooted(_KIND["broadcast"], arrays, root)
        results = [self._copied([self._seen(shown)], new) for shown in records[root].shown or ()]
        self._meeting.part()
        return results

    def all_gather(self, arrays: Sequence[Array], new: New) -> list[Array]:
        records = self._enter(Record(_KIND["all_gather"], "", -1, 1, self._shown(arrays)))
        self._check_fit(records)
        results = [self._copied(self._sources(records, i), new) for i in range(len(arrays))]
        self._meeting.part()
        return results

    def gather(self, arrays: Sequence[Array], root: int, new: New) -> list[Array] | None:
        records = self._enter(Record(_KIND["gather"], "", root, 1, self._shown(arrays)))
        self._check_fit(records)
        results = None
        if self.place == root:
            results = [self._copied(self._sources(records, i), new) for i in range(len(arrays))]
        self._meeting.part()
        return results

    def scatter(self, arrays: Sequence[Array] | None, root: int, new: New) -> list[Array]:
        records = self._rooted(_KIND["scatter"], arrays, root)
        self._check_rows([records[root]])
        results = []
        for shown in records[root].shown or ():
            whole = self._seen(shown)
            start, stop = split(0, len(whole), self.count)[self.place]
            results.append(self._copied([whole[start:stop]], new))
        self._meeting.part()
        return results

    def all_to_all(self, arrays: Sequence[Array], new: New) -> list[Array]:
        records = self._enter(Record(_KIND["all_to_all"], "", -1, 1, self._shown(arrays)))
        self._check_fit(records)
        results = []
        for index in range(len(arrays)):
            mine = []
            for source in self._sources(records, index):
                start, stop = split(0, len(source), self.count)[self.place]
                mine.append(source[start:stop])
            results.append(self._copied(mine, new))
        self._meeting.part()
        return results

    def send(self, array: Array, to: int) -> None:
        rank = self._meeting.group[to]
        sent = self._sent.setdefault(rank, deque())
        while sent and sent[0][0] < self._meeting.received(rank):
            sent.popleft()
        head = pickle.dumps((array.shape, array.dtype.str))
        start = aligned(8 + len(head))
        message = self._arena.empty((start + array.nbytes,), np.uint8)
        message[:8] = memoryview(struct.pack("=q", len(head)))
        message[8 : 8 + len(head)] = memoryview(head)
        body: Array = np.ndarray(array.shape, array.dtype, buffer=message, offset=start)
        body[...] = array
        at = self._arena.locate(message)
        assert at is not None
        sent.append((self._meeting.post(rank, at), message))

    def recv(self, source: int, new: New) -> Array:
        rank = self._meeting.group[source]
        at = self._meeting.fetch(rank)
        length = int(self._arena.view(at, (1,), np.int64)[0])
        shape, dtype = pickle.loads(self._arena.view(at + 8, (length,), np.uint8).tobytes())
        result = self._copied([self._arena.view(at + aligned(8 + length), shape, dtype)], new)
        self._meeting.fetched(rank)
        return result

    # ── showing and seeing ───────────────────────────────────────────────────────────────────────

    def _staged(self, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[np.dtype[Any]]) -> list[Array]:
        """Places for arrays, one behind the other, on this rank's stage."""
        sizes = [
            aligned(prod(shape) * dtype.itemsize) for shape, dtype in zip(shapes, dtypes, strict=True)
        ]
        if sum(sizes) > len(self._stage) or not len(self._stage):
            self._stage = np.empty(0, np.uint8)  # before more is asked for
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
        return tuple(Shown(array.shape, array.dtype.str, self._place_of(array)) for array in arrays)

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

    def _copied(self, pieces: Sequence[Array], new: New) -> Array:
        """*pieces* one behind the other along axis 0, in new memory; a single one as it is."""
        first = pieces[0]
        if len(pieces) == 1:
            result = new(first.shape, first.dtype)
            result[...] = first
            return result
        if first.ndim == 0:
            pieces = [piece.reshape(1) for piece in pieces]
        rows = sum(len(piece) for piece in pieces)
        result = new((rows, *pieces[0].shape[1:]), first.dtype)
        return np.concatenate(pieces, axis=0, out=result)

    # ── agreeing ─────────────────────────────────────────────────────────────────────────────────

    def _rooted(self, kind: int, arrays: Sequence[Array] | None, root: int) -> list[Record]:
        """Enter a collective in which only *root* has something to show."""
        shown = self._shown(arrays) if arrays is not None and self.place == root else None
        return self._enter(Record(kind, "", root, 1, shown))

    def _enter(self, record: Record) -> list[Record]:
        """Meet the others; returns all records, by place, if all are in the same collective."""
        if record != self._last[0]:
            self._last = (record, pickle.dumps(record, 5))
        mine = self._last[1]
        said = self._meeting.meet(record.kind, mine)
        records = [record if payload == mine else self._record(payload) for payload in said]
        for place, other in enumerate(records):
            if other is not record and manner(other) != manner(record):
                self._refuse(
                    f"rank {self.place} is in {described(record)}, but rank {place} in "
                    f"{described(other)}"
                )
        return records

    def _record(self, payload: bytes) -> Record:
        record = self._decoded.get(payload)
        if record is None:
            if len(self._decoded) >= _REMEMBERED:
                self._decoded.clear()
            record = self._decoded[payload] = pickle.loads(payload)
        return record

    def _check_alike(self, records: Sequence[Record]) -> None:
        """Raises: CollectiveError unless all ranks gave arrays of the same shapes and dtypes."""
        first = shapes_of(records[0])
        for place, record in enumerate(records):
            if shapes_of(record) != first:
                self._refuse(
                    f"rank 0 gave {listed(records[0])}, but rank {place} {listed(record)}: a "
                    f"reduction needs the same shapes and dtypes on every rank"
                )

    def _check_fit(self, records: Sequence[Record]) -> None:
        """Raises: CollectiveError unless all ranks' arrays can be concatenated along axis 0."""
        first = [(shape[1:], len(shape), dtype) for shape, dtype in shapes_of(records[0])]
        for place, record in enumerate(records):
            if [(shape[1:], len(shape), dtype) for shape, dtype in shapes_of(record)] != first:
                self._refuse(
                    f"rank 0 gave {listed(records[0])}, but rank {place} {listed(record)}: only the "
                    f"number of rows may differ"
                )
        if records[0].kind == _KIND["all_to_all"]:
            self._check_rows(records)

    def _check_rows(self, records: Sequence[Record]) -> None:
        for record in records:
            if any(not shape for shape, _ in shapes_of(record)):
                self._refuse("a value without dimensions has no rows to give to the ranks")

    def _refuse(self, reason: str) -> None:
        """Leave the collective together with the others, who refuse it as well."""
        where = self._meeting.where()
        self._meeting.part()
        raise CollectiveError(f"{where}: {reason}.")


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
