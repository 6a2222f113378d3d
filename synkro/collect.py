"""From the replies of all ranks to the user's result.

Each output of each rank lies either in the rank's outbox (it is small: this process merges them) or
still in the worker (it is large).  Large outputs take two more steps, in which all ranks work::

    workers' memory ─ Store ─▶ stages, one a rank ─ Reduce, each rank its share ─▶ result segment
                    └ Store, for what is gathered, straight to its place ────────▶ result segment

The result is a view of that segment, not a copy.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .comms.ops import OPERATIONS, Operation
from .comms.wire import carrier
from .engine import Engine
from .errors import OutputError
from .ipc.segment import Segment, aligned
from .messages import Done, Kept, Leaf, Piece, Placement, Reduce, Reduction, Store
from .owners import sole_owner
from .plan.call import Access, CallPlan, Region, Survey
from .plan.outputs import assemble, describe, leaf_modes, leaf_paths, take_subset

Array = NDArray[Any]

_SHARED_RESULTS = 4
"""Large results that can be views of shared memory at a time; further ones are copies."""


class Outputs:
    """The memory of a session that outputs pass through.

    ``outbox[r]`` is where rank r leaves its small outputs.
    """

    def __init__(self, engine: Engine, outbox: Array) -> None:
        self.engine = engine
        self.outbox = outbox
        self.linked = False  # whether GPUs reduce what waits on them by themselves
        self._stages: list[Segment | None] = [None] * engine.size
        self._results: list[Segment] = []
        self._spill: Segment | None = None

    def stage(self, rank: int, nbytes: int) -> Segment:
        """The memory where *rank* puts what is to be reduced."""
        stage = self._stages[rank]
        if stage is None or stage.nbytes < nbytes:
            self._stages[rank] = None  # before more is asked for
            self._stages[rank] = stage = self.engine.allocate(nbytes)
        return stage

    def result(self, nbytes: int) -> tuple[Segment, bool]:
        """Memory for a result, and whether the user may have views of it.

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
        if self._spill is None or self._spill.nbytes < nbytes:
            self._spill = None
            self._spill = self.engine.allocate(nbytes)
        return self._spill, False

    def close(self) -> None:
        """Give all memory back, but what users have views of."""
        self.outbox = np.empty((0, 0), np.uint8)
        self._stages = [None] * self.engine.size
        self._results = []
        self._spill = None


def _in_use(segment: Segment) -> bool:
    return not sole_owner(getattr, segment, "base")


@dataclass
class _Output:
    """One leaf of the result, on its way: its pieces on all ranks, in the order of the rows."""

    mode: str | None
    dtype: np.dtype[Any]
    pieces: list[tuple[int, int, Piece]]  # rank, number of the piece there, piece
    views: list[Array] = field(default_factory=list)  # where all lie in outboxes

    @property
    def operation(self) -> Operation | None:
        return None if self.mode is None else OPERATIONS.get(self.mode)

    @property
    def waits(self) -> bool:
        """Whether some of it is still in the workers."""
        return any(piece.offset is None for _, _, piece in self.pieces)


class Collection:
    """How the outputs of one call come together; serves again as long as the replies are the same."""

    def __init__(
        self,
        outputs: Outputs,
        name: str,
        spec: Any,
        plan: CallPlan | Survey,
        replies: Sequence[Done],
        keep: Callable[[Sequence[Kept]], list[Any]] | None = None,
    ) -> None:
        """*keep* makes handles of the outputs that stay where they are.

        Raises: OutputError if the ranks' outputs do not fit each other.
        """
        self.replies = replies
        self._home = outputs
        self._name = name
        self._plan = plan
        self._spec = spec
        if plan.subset is not None and isinstance(spec, tuple | list | dict):
            self._spec = take_subset(plan.subset, spec, "outputs=")
        self._nothing = isinstance(self._spec, tuple | list | dict) and not self._spec
        self._tree = replies[plan.participants[0]].tree
        self._outputs = [] if self._nothing else self._match()
        for output in self._outputs:
            if not output.waits:
                output.views = [self._in_outbox(rank, piece) for rank, _, piece in output.pieces]
        self._transfer: _Transfer | None = None
        self._keep = keep
        self._kept = [index for index, output in enumerate(self._outputs) if output.mode == "keep"]
        self._waiting = [
            index for index, output in enumerate(self._outputs) if output.waits and output.mode != "keep"
        ]

    def _match(self) -> list[_Output]:
        first = self._plan.participants[0]
        for rank in self._plan.participants:
            if self.replies[rank].tree != self._tree:
                raise OutputError(
                    f"the function {self._name!r} returned {describe(self._tree)} on rank {first}, but "
                    f"{describe(self.replies[rank].tree)} on rank {rank}: it must return the same on "
                    f"every rank."
                )
        modes = leaf_modes(self._spec, self._tree)
        return [
            self._checked(index, mode, path)
            for index, (mode, path) in enumerate(zip(modes, leaf_paths(self._tree), strict=True))
        ]

    def _checked(self, index: int, mode: str | None, path: str) -> _Output:
        leaves = [(rank, self._leaf(rank, index)) for rank in self._plan.participants]
        pieces = [
            (rank, number, piece) for rank, leaf in leaves for number, piece in enumerate(leaf.pieces)
        ]
        if mode is not None:
            by_rows = mode in ("gather", "keep")
            same = slice(1, None) if by_rows else slice(None)
            first_rank, first = leaves[0]
            for rank, leaf in leaves:
                for piece in leaf.pieces:
                    ours, theirs = first.pieces[0].shape, piece.shape
                    differ = len(ours) != len(theirs) or ours[same] != theirs[same]
                    if leaf.dtype != first.dtype or differ:
                        rows = " but for the first dimension" if by_rows else ""
                        hint = "" if by_rows else ' To concatenate rows say outputs="gather".'
                        raise OutputError(
                            f"output{path} of the function {self._name!r} has shape {ours} and dtype "
                            f"{np.dtype(first.dtype)} on rank {first_rank}, but {theirs} and "
                            f'{np.dtype(leaf.dtype)} on rank {rank}: "{mode}" needs the same dtype, and '
                            f"the same shape{rows}.{hint}"
                        )
        return _Output(mode, np.dtype(leaves[0][1].dtype), pieces)

    def _leaf(self, rank: int, index: int) -> Leaf:
        leaves = self.replies[rank].leaves
        assert leaves is not None  # a participant has outputs
        return leaves[index]

    def _in_outbox(self, rank: int, piece: Piece) -> Array:
        assert piece.offset is not None
        memory = self._home.outbox[rank]
        view: Array = np.ndarray(piece.shape, piece.dtype, buffer=memory, offset=piece.offset)
        return view

    # ── the result ───────────────────────────────────────────────────────────────────────────────

    def result(self) -> Any:
        """Merge what the ranks have left, into new memory, and nest it as the function did."""
        if self._nothing:
            return None
        merged: list[Any] = [
            None if output.waits else self._merge(output, output.views) for output in self._outputs
        ]
        if self._kept and self._keep is not None:
            pieces = [self._outputs[index].pieces[0][2] for index in self._kept]
            wanted = [
                Kept(index, self._home.engine.number(), piece.shape[1:], piece.dtype)
                for index, piece in zip(self._kept, pieces, strict=True)
            ]
            for index, handle in zip(self._kept, self._keep(wanted), strict=True):
                merged[index] = handle
        if self._waiting:
            for index, value in zip(self._waiting, self._fetch(), strict=True):
                merged[index] = value
        if self._tree is None and self._spec is not None:
            return merged[0]
        return assemble(self._spec, self._tree, iter(merged))

    def _merge(self, output: _Output, views: list[Array]) -> Any:
        """A leaf whose pieces lie in outboxes."""
        if output.mode is None:
            return [view.copy()[()] for view in views]
        operation = output.operation
        if operation is None:
            return np.concatenate(views)
        value = views[0] if len(views) > 1 else views[0].copy()
        for number, view in enumerate(views[1:]):
            value = operation.merge(value, view, out=value if number and value.ndim else None)
        value = operation.finish(value, self._plan.total_weight, out=value if value.ndim else None)
        return value.astype(operation.result_dtype(output.dtype), copy=False)[()]

    def _fetch(self) -> list[Any]:
        """The leaves that still wait in the workers: through shared memory, by all ranks."""
        if self._transfer is None:
            self._transfer = self._planned_transfer()
        results: list[Any] = []
        for index, arrays in zip(self._waiting, self._transfer.run(), strict=True):
            output = self._outputs[index]
            if output.operation is not None:
                dtype = output.operation.result_dtype(output.dtype)
                results.append(arrays[0].astype(dtype, copy=False))
            else:
                results.append(arrays if output.mode is None else arrays[0])
        return results

    def _planned_transfer(self) -> _Transfer:
        transfer = _Transfer(self._home, self._plan.total_weight, self._plan.participants)
        for index in self._waiting:
            output = self._outputs[index]
            inline = {
                (rank, number): self._in_outbox(rank, piece)
                for rank, number, piece in output.pieces
                if piece.offset is not None
            }
            transfer.add(index, output, inline)
        return transfer


class _Spot(NamedTuple):
    """A place for an array: in the stage of rank ``where``, or in the result segment."""

    where: int
    offset: int
    shape: tuple[int, ...]
    dtype: str


_RESULT = -1


class _Transfer:
    """The ``Store`` and ``Reduce`` of one call's large outputs: first planned, then run."""

    def __init__(self, home: Outputs, total_weight: int, ranks: tuple[int, ...]) -> None:
        self._home = home
        self._total_weight = total_weight
        self._ranks = ranks
        self._sizes = dict.fromkeys(range(_RESULT, home.engine.size), 0)
        self._stores: list[list[tuple[int, int, _Spot]]] = [[] for _ in range(home.engine.size)]
        self._reductions: list[tuple[str, list[_Spot], _Spot]] = []
        self._on_devices: list[tuple[str, int, _Spot]] = []
        self._copies: list[tuple[Array, _Spot]] = []
        self._results: list[list[_Spot]] = []
        self._pickled: dict[tuple[int, ...], list[bytes]] = {}

    def add(self, index: int, output: _Output, inline: dict[tuple[int, int], Array]) -> None:
        """Plan for leaf *index*; *inline* are those of its pieces that lie in outboxes."""
        if output.operation is not None and self._stays(output):
            target = self._reserve(_RESULT, output.pieces[0][2].shape, output.pieces[0][2].dtype)
            self._on_devices.append((output.operation.name, index, target))
            self._results.append([target])
            return
        if output.operation is not None:
            sources = []
            for rank, number, piece in output.pieces:
                spot = self._reserve(rank, piece.shape, piece.dtype)
                self._stores[rank].append((index, number, spot))
                sources.append(spot)
            target = self._reserve(_RESULT, *sources[0][2:])
            self._reductions.append((output.operation.name, sources, target))
            self._results.append([target])
            return
        spots = self._gathered(output) if output.mode == "gather" else self._separate(output)
        for (rank, number, _), spot in zip(output.pieces, spots, strict=True):
            if (rank, number) in inline:
                self._copies.append((inline[rank, number], spot))
            else:
                self._stores[rank].append((index, number, spot))

    def _stays(self, output: _Output) -> bool:
        """Whether the ranks' GPUs reduce the output, rather than store it for the CPUs to reduce."""
        assert output.operation is not None
        partial = np.dtype(output.pieces[0][2].dtype)
        return self._home.linked and carrier(output.operation, partial) is not None

    def _gathered(self, output: _Output) -> list[_Spot]:
        """Places one behind the other, for one array of all rows."""
        shapes = [piece.shape for _, _, piece in output.pieces]
        dtype = output.pieces[0][2].dtype
        whole = self._reserve(_RESULT, (sum(s[0] for s in shapes), *shapes[0][1:]), dtype)
        self._results.append([whole])
        spots, offset = [], whole.offset
        for shape in shapes:
            spots.append(_Spot(_RESULT, offset, shape, dtype))
            offset += _nbytes(shape, dtype)
        return spots

    def _separate(self, output: _Output) -> list[_Spot]:
        spots = [self._reserve(_RESULT, p.shape, p.dtype) for _, _, p in output.pieces]
        self._results.append(spots)
        return spots

    def _reserve(self, where: int, shape: tuple[int, ...], dtype: str) -> _Spot:
        spot = _Spot(where, self._sizes[where], shape, dtype)
        self._sizes[where] += aligned(_nbytes(shape, dtype))
        return spot

    def run(self) -> list[list[Array]]:
        """Let the workers do it; returns the arrays of each leaf, in the order they were added."""
        result, lent = self._home.result(self._sizes[_RESULT])
        segments = {
            rank: self._home.stage(rank, nbytes)
            for rank, nbytes in self._sizes.items()
            if rank != _RESULT and nbytes
        }
        segments[_RESULT] = result
        mapped = [(segment, Access.WRITE) for segment in segments.values()]
        for command in self._commands(segments):
            self._home.engine.run(command, mapped)
        for source, spot in self._copies:
            result.array(_region(spot, segments))[...] = source
        arrays = [[result.array(_region(spot, segments)) for spot in spots] for spots in self._results]
        return arrays if lent else [[array.copy() for array in some] for some in arrays]

    def _commands(self, segments: dict[int, Segment]) -> list[bytes]:
        """The commands, pickled, with *segments* filled in; kept, as segments come again and again."""
        numbers = tuple(segment.number for segment in segments.values())
        commands = self._pickled.get(numbers)
        if commands is None:
            if len(self._pickled) > _SHARED_RESULTS:
                self._pickled.clear()
            wanted: list[Store | Reduce] = []
            if self._on_devices:
                wanted.append(self._reduce_on_devices(segments))
            if any(self._stores):
                wanted.append(self._store(segments))
            if self._reductions:
                wanted.append(self._reduce(segments))
            commands = self._pickled[numbers] = [pickle.dumps(command, 5) for command in wanted]
        return commands

    def _store(self, segments: dict[int, Segment]) -> Store:
        return Store(
            tuple(
                tuple(Placement(leaf, piece, _region(spot, segments)) for leaf, piece, spot in stores)
                for stores in self._stores
            )
        )

    def _reduce(self, segments: dict[int, Segment]) -> Reduce:
        return Reduce(
            tuple(
                Reduction(
                    op,
                    self._total_weight,
                    tuple(_region(source, segments) for source in sources),
                    _region(target, segments),
                )
                for op, sources, target in self._reductions
            )
        )

    def _reduce_on_devices(self, segments: dict[int, Segment]) -> Reduce:
        return Reduce(
            tuple(
                Reduction(op, self._total_weight, (), _region(target, segments), leaf)
                for op, leaf, target in self._on_devices
            ),
            self._ranks,
        )


def _region(spot: _Spot, segments: dict[int, Segment]) -> Region:
    return Region(segments[spot.where].number, spot.offset, spot.shape, spot.dtype)


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    return prod(shape) * np.dtype(dtype).itemsize
