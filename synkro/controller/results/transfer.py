"""Large outputs, from the workers' memory to one result that the user has.

Windows: memory of the user's, mapped once more, so that the workers write results straight there.

    Data      the workers have it for reading, as an input; its window is the same memory, for writing
    a map     … of a file: its window is the whole file

A window has a number of its own in commands.  It lasts as long as the memory that it shows, so that the
workers map it once.
"""

from __future__ import annotations

import mmap
import os
import pickle
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Final, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from ...comms.direct import carrier
from ...comms.ops import OPERATIONS, Operation
from ...errors import InvalidValue
from ...ipc.channel import Lane
from ...memory.files import file_of
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment, explained
from ...messages import Piece, Reduce, Reduction, Store, StoredPiece
from ...packing.pickles import PICKLED
from ...plan.call import Access, Region, aligned
from ...values.arrays import Array, Code, code_of
from ...values.cache import Cache
from ...values.owners import sole_owner
from ..data.outgoing import Placed
from ..engine.engine import Engine


class Bytes(NamedTuple):
    """Bytes of a file, or of memory, which is a file without a name."""

    device: int
    inode: int
    start: int
    stop: int

    def overlap(self, other: Bytes) -> bool:
        """Whether *other* has some of the same bytes."""
        return self[:2] == other[:2] and self.start < other.stop and other.start < self.stop


class Windows:
    """The windows of one session."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._of_data: WeakKeyDictionary[Segment, Segment] = WeakKeyDictionary()
        self._of_maps: WeakKeyDictionary[mmap.mmap, tuple[Segment, int]] = WeakKeyDictionary()

    def on_data(self, placed: Placed) -> Placed:
        """The window on the memory of a ``Data``.  Raises: SharedMemoryError."""
        region, segment = placed
        window = self._of_data.get(segment)
        if window is None:
            with uninterrupted():
                try:
                    fd = os.dup(segment.fd)
                except OSError as error:
                    raise explained(error, segment.nbytes) from None
                window = self._engine.directory.opened(fd, segment.nbytes, Access.WRITE)
                self._of_data[segment] = window
        return Placed(replace(region, segment=window.number), window)

    def on_map(self, array: Array) -> Placed | None:
        """The window on the file which *array*, or what it is a view of, maps; None if there is none.

        Raises: InvalidValue for a file that was cut; OSError for one that its disk has no room for.
        """
        below = mapped_below(array)
        handle: Any = getattr(below, "_mmap", None)
        if below is None or array.size == 0:
            return None
        found = self._of_maps.get(handle)
        if found is None:
            with uninterrupted():
                opened = file_of(below, os.O_RDWR)
                if opened is None:
                    return None
                fd, offset = opened
                window = self._engine.directory.opened(fd, os.fstat(fd).st_size, Access.WRITE)
                found = self._of_maps[handle] = window, offset - _address(below)
        window, start = found
        low, high = _bounds(array)
        _reserve(window, low + start, high + start, below.filename)
        region = Region(
            window.number, _address(array) + start, array.shape, code_of(array.dtype), array.strides
        )
        return Placed(region, window)

    def close(self) -> None:
        """Forget all windows."""
        self._of_data.clear()
        self._of_maps.clear()


def mapped_below(array: Array) -> np.memmap[Any, Any] | None:
    """The memory-mapped array that *array* is a view of, or is itself; the whole map, not a part."""
    found = None
    below: Any = array
    while isinstance(below, np.ndarray):
        found = below if isinstance(below, np.memmap) else found
        below = below.base
    return found


def bytes_of(placed: Placed) -> Bytes:
    """Which bytes lie at *placed*, from the first to the last."""
    region, segment = placed
    return _bytes_in(segment.fd, segment.array(region), _address(segment.base))


def _bytes_in(fd: int, array: Array, start: int) -> Bytes:
    """Which bytes of a file *array* has, where that file begins at the address *start*."""
    file = os.fstat(fd)
    low, high = _bounds(array)
    return Bytes(file.st_dev, file.st_ino, low - start, high - start)


def bytes_of_map(array: np.memmap[Any, Any]) -> Bytes | None:
    """Which bytes of a file a memory-mapped array shows; None if that is not known."""
    below = mapped_below(array)
    opened = None if below is None else file_of(below)
    if below is None or opened is None:
        return None
    fd, offset = opened
    try:
        return _bytes_in(fd, array, _address(below) - offset)
    finally:
        os.close(fd)


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def _bounds(array: Array) -> tuple[int, int]:
    """The addresses of the first byte, and behind the last one."""
    low = high = _address(array)
    if array.size == 0:
        return low, low
    for length, stride in zip(array.shape, array.strides, strict=True):
        low += (length - 1) * min(stride, 0)
        high += (length - 1) * max(stride, 0)
    return low, high + array.itemsize


def _reserve(window: Segment, start: int, stop: int, name: Any) -> None:
    """Have room on the disk for these bytes of a file: a full one is an error now, no SIGBUS later.

    Raises: OSError; InvalidValue for a file that was cut.
    """
    nbytes = os.fstat(window.fd).st_size
    if stop > nbytes:
        raise InvalidValue(
            f"the file {name} has {nbytes} bytes, and the array in out= reaches to byte {stop}: the "
            f"file was cut after it was mapped."
        )
    try:
        os.posix_fallocate(window.fd, start, stop - start)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise OSError(
            error.errno,
            f"{why}: there is no room for the {stop - start} bytes that out= is to take in the file "
            f"{name}. Nothing was computed, and the file holds what it held",
        ) from None


_SHARED_RESULTS = 4
"""Large results that can be views of shared memory at a time; further ones are copies."""

_RESULT = -1
"""Stands for the result segment, where a rank stands for its stage; lower numbers for targets."""


class Outputs:
    """The memory of a session that outputs pass through.

    Attributes:
        outbox: ``outbox[r]`` is where rank r leaves its small outputs.
        linked: whether NCCL connects the ranks' GPUs, so that they reduce large outputs there.
        windows: on memory of the user's that outputs go to.
    """

    def __init__(self, engine: Engine, outbox: Array, linked: bool) -> None:
        self.engine = engine
        self.outbox: Array = outbox
        self.linked = linked
        self.windows: Final = Windows(engine)
        self._stages: dict[int, Segment] = {}
        self._results: list[Segment] = []

    def in_outbox(self, rank: int, piece: Piece) -> Array:
        """A piece that *rank* has left in its outbox."""
        assert piece.offset is not None
        view: Array = np.ndarray(piece.shape, piece.dtype, buffer=self.outbox[rank], offset=piece.offset)
        return view

    def stage(self, where: int, nbytes: int) -> Segment:
        """The memory where rank *where* puts what is to be reduced; for *where* < 0 that of a result."""
        if where not in self._stages or self._stages[where].nbytes < nbytes:
            self._stages.pop(where, None)  # free it before more is asked for
            self._stages[where] = self.engine.allocate(nbytes)
        return self._stages[where]

    def result(self, nbytes: int, rank: int) -> tuple[Segment, bool]:
        """Memory for a result of ranks of which *rank* is the first, and whether it may be given away.

        A segment is used again when no array refers to it any more, so that a loop that drops its
        results does not pay for fresh pages in each round.
        """
        self._results = [s for s in self._results if _in_use(s) or nbytes <= s.nbytes <= 4 * nbytes]
        for segment in self._results:
            if not _in_use(segment) and segment.nbytes >= nbytes:
                return segment, True
        if len(self._results) < _SHARED_RESULTS:
            segment = self.engine.allocate(nbytes)
            self._results.append(segment)
            return segment, True
        return self.stage(~rank, nbytes), False

    def close(self) -> None:
        """Give all memory back, except what users have views of."""
        self.outbox = np.empty((0, 0), np.uint8)
        self._stages.clear()
        self._results.clear()
        self.windows.close()


def _in_use(segment: Segment) -> bool:
    return not sole_owner(getattr, segment, "base")


@dataclass
class Leaves:
    """One leaf of the result before it is merged: its pieces on all ranks, in the order of the rows.

    ``dtype`` is that of what the function returned, ``result`` that of the result.  ``views`` are the
    pieces in the outboxes; there are none if some piece still waits in its worker.
    """

    mode: Any
    dtype: np.dtype[Any]
    pieces: list[tuple[int, int, Piece]]  # rank, number of the piece there, piece
    views: list[Array]

    def __post_init__(self) -> None:
        self.operation: Operation | None = OPERATIONS.get(self.mode or "")
        self.is_one_array: bool = self.mode in ("gather", "keep") and self.dtype != PICKLED
        self.result: np.dtype[Any] = (
            self.operation.result_dtype(self.dtype) if self.operation else self.dtype
        )


@dataclass(eq=False, repr=False)
class Transfer:
    """The ``Store`` and ``Reduce`` of one call's large outputs: first planned, then run.

    The plan has no segments yet: in their place its regions name the rank in whose stage they lie,
    ``_RESULT``, or the target of an output.

    *outputs* are the large ones, by the numbers of their leaves, of *ranks* among those of the *lane*;
    *nccl* may reduce them.  Those that are *straight* go to a place that ``run`` is told.
    """

    _home: Outputs
    _total_weight: int
    _ranks: tuple[int, ...]
    _lane: Lane
    _outputs: Mapping[int, Leaves]
    _nccl: bool
    _straight: Collection[int]
    _reductions: list[Reduction] = field(default_factory=list)
    _copies: list[tuple[Array, Region]] = field(default_factory=list)
    _results: list[list[Region]] = field(default_factory=list)
    _pickled: Cache[tuple[int, ...], list[bytes]] = field(default_factory=Cache)

    def __post_init__(self) -> None:
        size = self._home.engine.size
        self._sizes = dict.fromkeys(range(_RESULT, size), 0)
        self._stores: list[list[StoredPiece]] = [[] for _ in range(size)]
        for index, output in self._outputs.items():
            self._add(index, output)

    def _add(self, index: int, output: Leaves) -> None:
        if output.operation is not None:
            operation, first = output.operation, output.pieces[0][2]
            target = self._reserve(_RESULT, first.shape, first.dtype)
            owners, sources, hosts = [], [], set()
            linked = self._home.linked and self._nccl
            if not linked or carrier(operation, np.dtype(first.dtype)) is None:
                for rank, number, piece in output.pieces:
                    host = self._home.engine.workers.pool.host_number(rank)
                    first_there = host not in hosts  # it stores where all is reduced
                    source = target if first_there else self._reserve(rank, piece.shape, piece.dtype)
                    hosts.add(host)
                    self._stores[rank].append(StoredPiece(index, number, source, True))
                    owners.append(rank)
                    sources.append(source)
            name, divisor = operation.name, self._total_weight
            self._reductions.append(
                Reduction(name, divisor, tuple(owners), tuple(sources), target, index)
            )
            self._results.append([target])
            return
        regions = self._gathered(index, output) if output.is_one_array else self._separate(output)
        for (rank, number, piece), region in zip(output.pieces, regions, strict=True):
            if piece.offset is None:
                self._stores[rank].append(StoredPiece(index, number, region, False))
            else:
                self._copies.append((self._home.in_outbox(rank, piece), region))

    def _gathered(self, index: int, output: Leaves) -> list[Region]:
        """Regions one behind the other, for one array of all rows."""
        shapes = [piece.shape for _, _, piece in output.pieces]
        dtype = code_of(output.dtype)
        shape_of_all = sum(s[0] for s in shapes), *shapes[0][1:]
        if index in self._straight:
            whole = Region(_target(index), 0, shape_of_all, dtype)
        else:
            whole = self._reserve(_RESULT, shape_of_all, dtype)
        self._results.append([whole])
        regions, offset = [], whole.offset
        for shape in shapes:
            regions.append(Region(whole.segment, offset, shape, dtype))
            offset += _nbytes(shape, dtype)
        return regions

    def _separate(self, output: Leaves) -> list[Region]:
        regions = [self._reserve(_RESULT, p.shape, p.dtype) for _, _, p in output.pieces]
        self._results.append(regions)
        return regions

    def _reserve(self, where: int, shape: tuple[int, ...], dtype: Code) -> Region:
        region = Region(where, self._sizes[where], shape, dtype)
        self._sizes[where] += aligned(_nbytes(shape, dtype))
        return region

    def run(self, places: Mapping[int, Placed] | None = None) -> tuple[list[list[Placed]], bool]:
        """Let the workers do the transfer, outputs that go straight to *places*.

        Returns where the arrays of each output lie, in their order, and whether they may be given away;
        else they have to be copied before the next transfer.
        """
        segments = {
            rank: self._home.stage(rank, nbytes)
            for rank, nbytes in self._sizes.items()
            if rank != _RESULT and nbytes
        }
        lent, taken = True, None
        if any(index not in self._straight for index in self._outputs):
            result, lent = self._home.result(self._sizes[_RESULT], self._lane.ranks[0])
            taken = result.base  # by which the result is in use, while other calls look for memory
            segments[_RESULT] = result
        starts: dict[int, int] = {}
        for index, (region, segment) in (places or {}).items():
            segments[_target(index)] = segment
            starts[_target(index)] = region.offset
        mapped = [(segment, Access.WRITE) for segment in segments.values()]

        def placed(region: Region) -> Placed:
            segment, offset = segments[region.segment], region.offset + starts.get(region.segment, 0)
            return Placed(replace(region, segment=segment.number, offset=offset), segment)

        for command in self._commands(segments, starts, lambda region: placed(region).region):
            self._home.engine.run(command, mapped, lane=self._lane)
        for source, region in self._copies:
            there = placed(region)
            there.segment.array(there.region)[...] = source
        found = [[placed(region) for region in regions] for regions in self._results]
        del taken
        return found, lent

    def _commands(
        self, segments: dict[int, Segment], starts: dict[int, int], placed: Callable[[Region], Region]
    ) -> list[bytes]:
        """The commands, pickled, with *segments* filled in; cached, as the same segments come again."""
        numbers = *(segment.number for segment in segments.values()), *starts.values()
        if numbers in self._pickled:
            return self._pickled[numbers]

        stores = [[s._replace(region=placed(s.region)) for s in stores] for stores in self._stores]
        reductions = [
            each._replace(sources=tuple(map(placed, each.sources)), target=placed(each.target))
            for each in self._reductions
        ]
        on_devices = tuple(each for each in reductions if not each.sources)
        stored = tuple(each for each in reductions if each.sources)
        wanted: list[Store | Reduce] = []
        if on_devices:
            wanted.append(Reduce(on_devices, self._ranks))
        if any(stores):
            wanted.append(Store(tuple(map(tuple, stores))))
        if stored:
            wanted.append(Reduce(stored, self._lane.ranks))
        commands = self._pickled[numbers] = [pickle.dumps(command, 5) for command in wanted]
        return commands


def _target(index: int) -> int:
    """Stands for the place of output number *index*."""
    return _RESULT - 1 - index


def _nbytes(shape: tuple[int, ...], dtype: Code) -> int:
    return prod(shape) * np.dtype(dtype).itemsize
