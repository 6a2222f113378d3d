"""One call of one function on this rank: its arguments, piece by piece, its outputs merged and laid out.

A call is prepared once and run as often as the same command comes: preparing makes the views of the
inputs, running computes them piece by piece, merges the outputs and lays them out::

    rows of this rank ─▶ slice ─▶ function ─▶ leaves ─▶ merged ─▶ outbox, where they are small
                           ▲          │                   │
                           │          ▼                   ├─────▶ kept here, where they are large
                           │       updates ─▶ merged      └─────▶ kept here, where they are to stay
                           │                     │
                           └── next slice        └─ after the last slice ─▶ variables
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from .arrays import code_of
from .comms.base import Communicator
from .comms.ops import OPERATIONS
from .devices.base import Device, Source
from .errors import OutputError
from .foreign import library_instead
from .frontends.base import FrontEnd
from .group import fitted
from .ipc.interrupts import atomic
from .ipc.segment import aligned
from .messages import Done, FunctionSpec, Leaf, Phase, Piece
from .plan.batch import Strided
from .plan.call import (
    Argument,
    Broadcast,
    CallPlan,
    Constant,
    Held,
    Picked,
    Region,
    Replicated,
    Scattered,
)
from .plan.outputs import Tree, describe, flatten, leaf_modes, leaf_paths, take_subset
from .plan.split import Span, slices_of
from .resident import Resident, read_only

Array = NDArray[Any]


class Rank(Protocol):
    """What a call needs of the replica that it runs on."""

    rank: int
    comm: Communicator
    device: Device
    front_end: FrontEnd
    functions: dict[int, FunctionSpec]
    variables: dict[int, Resident]
    function: str | None
    in_function: bool
    outbox: NDArray[np.uint8]
    report: Callable[[int, int], None]
    mark: Callable[[int], None]

    def array(self, region: Region) -> Array: ...

    def stamp(self, region: Region) -> tuple[int, int] | None: ...

    def begin(self, ranks: tuple[int, ...]) -> None: ...

    def keep(self, outputs: list[list[Array]]) -> None: ...


class PreparedCall:
    """One call of one function on this rank's rows; can be run again as long as its inputs stand."""

    def __init__(self, replica: Rank, plan: CallPlan) -> None:
        self._replica = replica
        self._plan = plan
        self._spec = replica.functions[plan.function]
        self._outputs = self._spec.outputs
        if plan.subset is not None and isinstance(self._outputs, tuple | list | dict):
            self._outputs = take_subset(plan.subset, self._outputs, "outputs=")
        self._participants = plan.participants
        self._everyone = tuple(range(len(plan.spans)))
        self._spans = _pieces(plan, replica.rank)
        self._sliced = [replica.variables[number] for number in plan.sliced]
        libraries = plan.form.libraries if plan.form else (None,) * len(plan.inputs)
        instead = None if replica.device.xp is np else library_instead(self._spec.fn)
        self._libraries = tuple([library or instead for library in libraries])
        changing = isinstance(plan.selection, Picked) or replica.device.pins
        self._pieces = None if changing else self._sources()
        self._fixed = list(self._arguments()) if self._stands() else None
        self._layout = Layout()

    def _stands(self) -> bool:
        """Whether the arguments are the same in every call: views of shared memory, and constants."""
        plan = self._plan
        changing = any(isinstance(argument, Held | Replicated) for argument in plan.inputs)
        return self._pieces is not None and not changing and plan.form is None

    def run(self) -> Done:
        """Compute all pieces, merge them, and lay the outputs out."""
        replica, spec = self._replica, self._spec
        replica.function = spec.name
        if not self._spans:
            replica.keep([])
            if spec.finish is not None:
                replica.begin(self._everyone)
                if spec.updates:
                    replica.comm.barrier()  # the others' before they update
                self._finish(0)
            return Done(None, None)
        replica.begin(self._participants if spec.finish is None else self._everyone)
        several = len(self._spans) > 1
        merger = Merger(spec.name, self._outputs, replica.front_end, several)
        updates = Updates(spec, replica.front_end, several) if spec.updates else None
        replica.mark(Phase.FEEDING)
        arguments = self._fixed or self._arguments()
        try:
            for number, (args, kwargs, weight) in enumerate(arguments):
                replica.report(Phase.RUNNING, number)
                for variable in self._sliced:
                    variable.show(self._rows_held(self._spans[number]))
                replica.in_function = True
                value = spec.fn(*args, **kwargs)
                replica.in_function = False
                replica.device.settle()
                replica.mark(Phase.MERGING)
                if updates is not None:
                    value = updates.add(value, weight, replica.device)
                if self._plan.subset is not None:
                    value = take_subset(self._plan.subset, value, f"the result of {spec.name!r}")
                merger.add(value, weight, replica.device)
                if number + 1 < len(self._spans):
                    replica.mark(Phase.FEEDING)
        finally:
            self._let_go(arguments)
        if updates is not None:
            replica.mark(Phase.COMMUNICATING)
            updates.apply(replica.comm)
        if spec.finish is not None:
            start, stop = self._plan.spans[replica.rank]
            self._finish((stop - start) // self._plan.unit if self._plan.by_rows else 1)
        replica.report(Phase.MERGING, len(self._spans))
        done = self._layout.place(merger, replica.outbox, replica.device)
        replica.keep(merger.leaves if self._layout.keeps else [])
        return done

    def _let_go(self, arguments: Any) -> None:
        """The pieces are computed, or one has failed: of the inputs nothing is needed any more."""
        if arguments is self._fixed and not self._sliced:
            return
        with atomic:
            for variable in self._sliced:
                variable.show(None)
            if arguments is not self._fixed:
                arguments.close()

    def _finish(self, weight: int) -> None:
        self._replica.mark(Phase.RUNNING)
        self._replica.in_function = True
        with atomic:  # Ctrl-C stops all ranks before it, or none
            self._spec.finish(weight)
        self._replica.in_function = False
        self._replica.device.settle()

    def _arguments(self) -> Generator[tuple[list[Any], dict[str, Any], int], None, None]:
        """Positional and keyword arguments, and the weight, of each piece."""
        plan = self._plan
        pieces = self._sources() if self._pieces is None else self._pieces
        with contextlib.closing(self._replica.device.feed(pieces)) as feeding:
            for span, fed in zip(self._spans, feeding, strict=True):
                values = [
                    self._argument(argument, library, value, span)
                    for argument, library, value in zip(plan.inputs, self._libraries, fed, strict=True)
                ]
                if plan.form is not None:
                    values = plan.form.build(values)
                weight = (span[1] - span[0]) // plan.unit if plan.by_rows else 1
                count = len(values) - len(plan.keywords)
                yield values[:count], dict(zip(plan.keywords, values[count:], strict=True)), weight

    def _argument(self, argument: Argument, library: str | None, value: Any, span: Span) -> Any:
        """The argument of one piece; *value* is what the device has made of its source."""
        replica = self._replica
        match argument:
            case Constant():
                return argument.value
            case Replicated():
                value = read_only(replica.variables[argument.variable].whole.view())
            case Held():
                rows = self._rows_held(span)(replica.variables[argument.variable].whole)
                value = read_only(rows.view())
        return replica.front_end.argument(value, library)

    def _sources(self) -> list[list[Source | None]]:
        """Of each piece, where those of its arguments come from that lie in shared memory."""
        whole: dict[Argument, Source] = {
            argument: Source(
                self._replica.array(argument.region), stamp=self._replica.stamp(argument.region)
            )
            for argument in self._plan.inputs
            if isinstance(argument, Broadcast)
        }
        return [
            [
                self._rows(argument, span) if isinstance(argument, Scattered) else whole.get(argument)
                for argument in self._plan.inputs
            ]
            for span in self._spans
        ]

    def _rows(self, argument: Scattered, span: Span) -> Source:
        selection = self._plan.selection
        assert selection is not None
        array = self._replica.array(argument.region)
        return selected(array, selection, span, self._replica.array, argument.base)

    def _rows_held(self, span: Span) -> Callable[[Array], Array]:
        """What takes the rows *span* of the call out of something that this rank holds."""
        replica, plan = self._replica, self._plan
        assert plan.held is not None
        selection = plan.held[replica.rank]
        first = plan.spans[replica.rank][0]
        local = (span[0] - first, span[1] - first)
        return lambda array: taken(array, selection, local, replica.array, replica.device)


def taken(
    array: Array,
    selection: Strided | Picked,
    span: Span,
    find: Callable[[Region], Array],
    device: Device,
) -> Array:
    """The rows *span* of a selection, out of *array*, where that lies."""
    rows = selected(array, selection, span, find)
    return rows.array if rows.indices is None else device.take(array, rows.indices)


def selected(
    array: Array,
    selection: Strided | Picked,
    span: Span,
    find: Callable[[Region], Array],
    base: int = 0,
) -> Source:
    """The rows *span* of a selection of *array*, whose first row is row *base* of all."""
    start, stop = span
    if start == stop:
        return Source(array[:0])
    if isinstance(selection, Strided):
        first = selection.start + start * selection.step - base
        last = selection.start + (stop - 1) * selection.step - base
        end = last + (1 if selection.step > 0 else -1)
        return Source(array[first : None if end < 0 else end : selection.step])
    indices = find(selection.indices)[start:stop]
    return Source(array, indices - base if base else indices)


def _pieces(plan: CallPlan, rank: int) -> tuple[Span, ...]:
    """The pieces that *rank* computes one after the other; one empty one if nothing is scattered."""
    if not plan.by_rows:
        return ((0, 0),)
    return slices_of(plan.spans[rank], plan.slices)


class Updates:
    """The new values of variables that a function returns beside its outputs, merged over its pieces.

    They are computed from the values that the variables had before the call, and put in place after
    its last piece.
    """

    def __init__(self, spec: FunctionSpec, front_end: FrontEnd, several: bool) -> None:
        self._name = spec.name
        self._variables = [variable for variable, _ in spec.updates]
        modes = tuple(op for _, op in spec.updates)
        self._merger = Merger(f"{spec.name}, its updates", modes, front_end, several)
        self._several = several
        self._single: tuple[Any, ...] = ()
        self._weight = 0

    def add(self, value: Any, weight: int, device: Device) -> Any:
        """Take the new values out of what one piece returned; returns its outputs."""
        outputs, new = pair_of(value, len(self._variables), self._name)
        if self._several:
            self._weight += weight
            self._merger.add(new, weight, device)
        else:
            self._single = new
        return outputs

    def apply(self, comm: Communicator) -> None:
        """Put the values in place, merged where there were several pieces: on all ranks, or on none."""
        values: list[Any] = list(self._single)
        if self._several:
            for variable, mode, pieces in zip(
                self._variables, self._merger.modes, self._merger.leaves, strict=True
            ):
                assert mode is not None
                operation = OPERATIONS[mode]
                merged = operation.finish(pieces[0], self._weight)
                values.append(fitted(merged, variable, operation) if mode == "mean" else merged)
        checked = [variable.checked(v) for variable, v in zip(self._variables, values, strict=True)]
        with atomic:
            if comm.count > 1:
                comm.barrier()  # which fails where a rank has failed
            for variable, value in zip(self._variables, checked, strict=True):
                variable.value = value


def pair_of(value: Any, count: int, name: str) -> tuple[Any, tuple[Any, ...]]:
    """The outputs and the *count* new values that a function with ``updates=`` returned.

    Raises: OutputError.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise OutputError(
            f"the function {name!r} has updates=, so it returns two things, its outputs and the new "
            f"values; it returned {describe(flatten(value)[1])}."
        )
    outputs, new = value
    if not isinstance(new, tuple | list):
        new = (new,)
    if len(new) != count:
        raise OutputError(
            f"the function {name!r} returned {len(new)} new values for the {count} variables in "
            f"updates=: return one for each, in their order."
        )
    return outputs, tuple(new)


class Merger:
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
                array = device.adopt(leaf)
                arrays.append(self._front_end.output(leaf if array is None else array))
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
            self._merge(index, array, weight, device)
        self._first = False

    def _begin(self, tree: Tree, arrays: list[Array]) -> None:
        self.tree = tree
        try:
            self.modes = leaf_modes(self._outputs, tree)
        except OutputError as error:
            raise OutputError(f"the function {self._name!r}: {error}") from None
        self.dtypes = [array.dtype for array in arrays]
        self.leaves = [[] for _ in arrays]

    def _merge(self, index: int, array: Array, weight: int, device: Device) -> None:
        mode, pieces = self.modes[index], self.leaves[index]
        if array.dtype != self.dtypes[index]:
            raise self._error(
                self.tree,
                index,
                f"dtype {self.dtypes[index]} for one slice, {array.dtype} for another",
            )
        if mode not in OPERATIONS:
            if mode is not None and array.ndim == 0:
                advice = "return an array, or say outputs=None"
                raise self._error(
                    self.tree, index, f'"{mode}" concatenates rows, got a scalar: {advice}'
                )
            if self._several:
                array = array.copy() if mode == "keep" else device.stow(array)
            pieces.append(array)
            return
        operation = OPERATIONS[mode]
        partial = operation.lift(array, weight)
        if pieces:  # which may be in host memory for one slice, on the device for another
            partial = device.beside(partial, pieces[0])
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


class Layout:
    """Where the outputs of a call lie; kept while they stay the same from call to call."""

    def __init__(self) -> None:
        self.keeps = False
        self._key: Any = None
        self._done = Done(None, None)
        self._slots: list[tuple[int, int, Array]] = []

    def place(self, merger: Merger, outbox: NDArray[np.uint8], device: Device) -> Done:
        """Copy what fits into the outbox, and say what lies where."""
        key = (merger.tree, [[(a.dtype, a.shape) for a in pieces] for pieces in merger.leaves])
        if key != self._key:
            self._key = None  # an interrupt may leave the arrangement half-done
            self._arrange(merger, outbox)
            self._key = key
        device.copy_out((slot, merger.leaves[leaf][piece]) for leaf, piece, slot in self._slots)
        return self._done

    def _arrange(self, merger: Merger, outbox: NDArray[np.uint8]) -> None:
        offsets: dict[tuple[int, int], int] = {}
        self._slots = []
        end = 0
        # Reduced leaves first: they are of one size on all ranks, and so find the same place.
        order = sorted(range(len(merger.leaves)), key=lambda leaf: merger.modes[leaf] not in OPERATIONS)
        for leaf in order:
            for piece, array in enumerate(merger.leaves[leaf]):
                if merger.modes[leaf] != "keep" and end + array.nbytes <= len(outbox):
                    offsets[leaf, piece] = end
                    slot: Array = np.ndarray(array.shape, array.dtype, buffer=outbox, offset=end)
                    self._slots.append((leaf, piece, slot))
                    end += aligned(array.nbytes)
        self._done = Done(
            merger.tree,
            tuple(
                Leaf(
                    code_of(dtype),
                    tuple(
                        Piece(array.shape, code_of(array.dtype), offsets.get((leaf, piece)))
                        for piece, array in enumerate(pieces)
                    ),
                )
                for leaf, (dtype, pieces) in enumerate(zip(merger.dtypes, merger.leaves, strict=True))
            ),
        )
        self.keeps = len(offsets) < sum(map(len, merger.leaves))
