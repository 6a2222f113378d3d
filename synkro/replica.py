"""What every rank is: its functions, its segments, and one handler for each command.

A ``Call`` is prepared once and run as often as the same command comes: preparing makes the views of
the inputs, running computes them piece by piece, merges the outputs and lays them out::

    rows of this rank ─▶ slice ─▶ function ─▶ leaves ─▶ merged ─▶ outbox, where they are small
                           ▲                              │
                           └────────── next slice ◀───────┘      ─▶ kept here, where they are large

Large outputs wait for a ``Store``, which puts them into a segment that all ranks see, and then for a
``Reduce``, in which every rank reduces its share of the elements.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .comms.base import Communicator
from .comms.ops import OPERATIONS
from .devices.base import Device
from .devices.cpu import CpuDevice
from .errors import InternalError, OutputError
from .frontends.base import FrontEnd
from .frontends.plain import PlainFrontEnd
from .ipc.segment import Segment, aligned
from .messages import (
    Ack,
    Attach,
    Call,
    Command,
    Distribute,
    Done,
    FunctionSpec,
    Housekeeping,
    Leaf,
    Phase,
    Piece,
    Reduce,
    Release,
    Reply,
    Start,
    Store,
)
from .plan.batch import Strided
from .plan.call import Argument, Broadcast, CallPlan, Constant, Picked, Region, Scattered
from .plan.outputs import Tree, describe, flatten, leaf_modes, leaf_paths, take_subset
from .plan.split import Span, slices_of

Array = NDArray[Any]


class Replica:
    """One rank.

    Attributes:
        rank, size: who this is, and of how many.
        function: the name of the function that runs or ran last, for messages.
        in_function: whether the user's code is running.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        comm: Communicator,
        descriptor: Callable[[int], int],
        report: Callable[[int, int], None],
    ) -> None:
        self.rank = rank
        self.size = size
        self.device: Device = CpuDevice()
        self.comm = comm
        self.front_end: FrontEnd = PlainFrontEnd()
        self.functions: dict[int, FunctionSpec] = {}
        self.function: str | None = None
        self.in_function = False
        self.outbox: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.report = report
        self._descriptor = descriptor
        self._segments: dict[int, Segment] = {}
        self._unmapped: dict[int, tuple[int, Attach]] = {}
        self._kept: list[list[Array]] = []

    def keep_house(self, housekeeping: Housekeeping) -> None:
        """Forget what the main process has freed, and map what it has created."""
        for number in housekeeping.drop_segments:
            self._segments.pop(number, None)
            if number in self._unmapped:
                os.close(self._unmapped.pop(number)[0])
        for number in housekeeping.drop_functions:
            self.functions.pop(number, None)
        for wanted in housekeeping.attach:
            self._unmapped[wanted.segment] = (self._descriptor(wanted.segment), wanted)

    def array(self, region: Region) -> Array:
        """The array that *region* describes."""
        return self._segment(region.segment).array(region)

    def _segment(self, number: int) -> Segment:
        """A segment, mapped when it is first used: what fails or is interrupted can be tried again."""
        if number in self._unmapped:
            fd, wanted = self._unmapped[number]
            self._segments[number] = Segment.attach(number, os.dup(fd), wanted.nbytes, wanted.access)
            del self._unmapped[number]
            os.close(fd)
        return self._segments[number]

    def action(self, command: Command) -> Callable[[], Reply]:
        """What *command* asks for, ready to be done."""
        match command:
            case Call():
                return PreparedCall(self, command.plan).run
            case Store():
                return self._storing(command)
            case Reduce():
                return self._reducing(command)
            case Distribute():
                return lambda: self._load(command)
            case Start():
                return lambda: self._start(command)
            case Release():
                return Ack
        raise InternalError(f"rank {self.rank} does not know the command {command!r}.")

    def _start(self, start: Start) -> Ack:
        core = start.cores[self.rank]
        if core is not None:
            os.sched_setaffinity(0, {core})
        rows: Array = self.array(start.outbox)
        self.outbox = rows[self.rank]
        return Ack()

    def _load(self, command: Distribute) -> Ack:
        self.function = None
        self.report(Phase.LOADING, 0)
        sys.path[:] = command.sys_path
        os.chdir(command.cwd)
        parcel = command.parcel
        buffers: list[memoryview] = []
        if parcel.segment is not None:
            memory = self._segment(parcel.segment).base.data
            buffers = [memory[start:stop] for start, stop in parcel.buffers]
        self.functions |= self.front_end.unpack(parcel.stream, buffers)
        return Ack()

    def keep(self, leaves: list[list[Array]]) -> None:
        """Hold the outputs of a call until a ``Store`` fetches them."""
        self._kept = leaves

    def _storing(self, command: Store) -> Callable[[], Reply]:
        places = [(p.leaf, p.piece, self.array(p.region)) for p in command.placements[self.rank]]

        def store() -> Ack:
            self.report(Phase.STORING, 0)
            for leaf, piece, place in places:
                place[...] = self._kept[leaf][piece]
            self._kept = []
            return Ack()

        return store

    def _reducing(self, command: Reduce) -> Callable[[], Reply]:
        shares = [
            (OPERATIONS[r.op], r.divisor, [self.array(s) for s in r.sources], self.array(r.target))
            for r in command.reductions
        ]

        def reduce() -> Ack:
            self.report(Phase.REDUCING, 0)
            for share in shares:
                self.comm.reduce_share(*share)
            return Ack()

        return reduce


class PreparedCall:
    """One call of one function on this rank's rows; can be run again as long as its inputs stand."""

    def __init__(self, replica: Replica, plan: CallPlan) -> None:
        self._replica = replica
        self._plan = plan
        self._spec = replica.functions[plan.function]
        self._outputs = self._spec.outputs
        if plan.subset is not None and isinstance(self._outputs, tuple | list | dict):
            self._outputs = take_subset(plan.subset, self._outputs, "outputs=")
        self._spans = _pieces(plan, replica.rank)
        self._fixed = None if isinstance(plan.selection, Picked) else list(self._arguments())
        self._layout = _Layout()

    def run(self) -> Done:
        """Compute all pieces, merge them, and lay the outputs out."""
        replica = self._replica
        replica.function = self._spec.name
        if not self._spans:
            return Done(None, None)
        merger = _Merger(self._spec.name, self._outputs, replica.front_end, len(self._spans) > 1)
        for number, (args, kwargs, weight) in enumerate(self._fixed or self._arguments()):
            replica.report(Phase.RUNNING, number)
            replica.in_function = True
            value = self._spec.fn(*args, **kwargs)
            replica.in_function = False
            if self._plan.subset is not None:
                value = take_subset(self._plan.subset, value, f"the result of {self._spec.name!r}")
            merger.add(value, weight, replica.device)
        replica.report(Phase.RUNNING, len(self._spans))
        done = self._layout.place(merger, replica.outbox)
        replica.keep(merger.leaves if self._layout.keeps else [])
        return done

    def _arguments(self) -> Iterator[tuple[list[Any], dict[str, Any], int]]:
        """Positional and keyword arguments, and the weight, of each piece."""
        plan = self._plan
        for span in self._spans:
            yield (
                [self._argument(argument, span) for argument in plan.args],
                {name: self._argument(argument, span) for name, argument in plan.kwargs},
                1 if plan.selection is None else (span[1] - span[0]) // plan.unit,
            )

    def _argument(self, argument: Argument, span: Span) -> Any:
        replica = self._replica
        match argument:
            case Constant():
                return argument.value
            case Broadcast():
                array = replica.array(argument.region)
            case Scattered():
                array = self._rows(replica.array(argument.region), argument.base, span)
        return replica.front_end.argument(replica.device.to_device(array))

    def _rows(self, array: Array, base: int, span: Span) -> Array:
        start, stop = span
        selection = self._plan.selection
        if isinstance(selection, Strided):
            first = selection.start + start * selection.step - base
            last = selection.start + (stop - 1) * selection.step - base
            end = last + (1 if selection.step > 0 else -1)
            return array[first : None if end < 0 else end : selection.step]
        assert isinstance(selection, Picked)
        indices = self._replica.array(selection.indices)[start:stop]
        if base:
            indices = indices - base
        # The main process has checked the indices; "clip" spares a second check and a buffer.
        return np.take(array, indices, axis=0, mode="clip")


def _pieces(plan: CallPlan, rank: int) -> tuple[Span, ...]:
    """The pieces that *rank* computes one after the other; one empty one if nothing is scattered."""
    if plan.selection is None:
        return ((0, 0),)
    return slices_of(plan.spans[rank], plan.slices)


class _Merger:
    """Merges the outputs of one rank's pieces, leaf by leaf.

    ``leaves`` holds, for each leaf, its merged partial, or its pieces where they do not merge.
    """

    def __init__(self, name: str, outputs: Any, front_end: FrontEnd, several: bool) -> None:
        self.tree: Tree = None
        self.modes: list[str | None] = []
        self.dtypes: list[np.dtype[Any]] = []
        self.leaves: list[list[Array]] = []
        self._name = name
        self._outputs = outputs
        self._front_end = front_end
        self._several = several
        self._first = True

    def add(self, value: Any, weight: int, device: Device) -> None:
        if isinstance(self._outputs, tuple | list | dict) and not self._outputs:
            return  # outputs=[]: what the function returns is of no use
        values, tree = flatten(value)
        arrays = []
        for index, leaf in enumerate(values):
            try:
                arrays.append(self._front_end.output(device.to_host(leaf)))
            except OutputError as error:
                raise self._error(tree, index, str(error)) from None
        if self._first:
            self._begin(tree, arrays)
        elif tree != self.tree:
            raise OutputError(
                f"the function {self._name!r} returned {describe(self.tree)} for one slice and "
                f"{describe(tree)} for another: it must return the same for every slice."
            )
        for index, array in enumerate(arrays):
            self._merge(index, array, weight)
        self._first = False

    def _begin(self, tree: Tree, arrays: list[Array]) -> None:
        self.tree = tree
        try:
            self.modes = leaf_modes(self._outputs, tree)
        except OutputError as error:
            raise OutputError(f"the function {self._name!r}: {error}") from None
        self.dtypes = [array.dtype for array in arrays]
        self.leaves = [[] for _ in arrays]

    def _merge(self, index: int, array: Array, weight: int) -> None:
        mode, pieces = self.modes[index], self.leaves[index]
        if array.dtype != self.dtypes[index]:
            raise self._error(
                self.tree,
                index,
                f"dtype {self.dtypes[index]} for one slice, {array.dtype} for another",
            )
        if mode not in OPERATIONS:
            if mode == "gather" and array.ndim == 0:
                advice = "return an array, or say outputs=None"
                raise self._error(
                    self.tree, index, f'"gather" concatenates rows, got a scalar: {advice}'
                )
            pieces.append(array.copy() if self._several else array)
            return
        operation = OPERATIONS[mode]
        partial = operation.lift(array, weight)
        if not pieces:
            # the function may hand out the same array for every slice
            pieces.append(partial.copy() if self._several and partial is array else partial)
        elif partial.shape != pieces[0].shape:
            raise self._error(
                self.tree,
                index,
                f"shape {pieces[0].shape} for one slice and {partial.shape} for another cannot be "
                f'reduced with "{mode}"; "gather" concatenates',
            )
        elif partial.ndim == 0:
            pieces[0] = operation.merge(pieces[0], partial)
        else:
            operation.merge(pieces[0], partial, out=pieces[0])

    def _error(self, tree: Tree, index: int, what: str) -> OutputError:
        return OutputError(f"output{leaf_paths(tree)[index]} of the function {self._name!r}: {what}")


class _Layout:
    """Where the outputs of a call lie; kept while they stay the same from call to call."""

    def __init__(self) -> None:
        self.keeps = False
        self._key: Any = None
        self._done = Done(None, None)
        self._slots: list[tuple[int, int, Array]] = []

    def place(self, merger: _Merger, outbox: NDArray[np.uint8]) -> Done:
        """Copy what fits into the outbox, and say what lies where."""
        key = (merger.tree, [[(a.dtype, a.shape) for a in pieces] for pieces in merger.leaves])
        if key != self._key:
            self._key = None  # an interrupt may leave the arrangement half-done
            self._arrange(merger, outbox)
            self._key = key
        for leaf, piece, slot in self._slots:
            slot[...] = merger.leaves[leaf][piece]
        return self._done

    def _arrange(self, merger: _Merger, outbox: NDArray[np.uint8]) -> None:
        offsets: dict[tuple[int, int], int] = {}
        self._slots = []
        end = 0
        # Reduced leaves first: they are of one size on all ranks, and so find the same place.
        order = sorted(range(len(merger.leaves)), key=lambda leaf: merger.modes[leaf] not in OPERATIONS)
        for leaf in order:
            for piece, array in enumerate(merger.leaves[leaf]):
                if end + array.nbytes <= len(outbox):
                    offsets[leaf, piece] = end
                    slot: Array = np.ndarray(array.shape, array.dtype, buffer=outbox, offset=end)
                    self._slots.append((leaf, piece, slot))
                    end += aligned(array.nbytes)
        self._done = Done(
            merger.tree,
            tuple(
                Leaf(
                    dtype.str,
                    tuple(
                        Piece(array.shape, array.dtype.str, offsets.get((leaf, piece)))
                        for piece, array in enumerate(pieces)
                    ),
                )
                for leaf, (dtype, pieces) in enumerate(zip(merger.dtypes, merger.leaves, strict=True))
            ),
        )
        self.keeps = len(offsets) < sum(map(len, merger.leaves))
