"""One call of one function on this rank.

A call is prepared once, and run as often as the same command comes.  Preparing makes the views of the
inputs.  Running computes the rank's rows piece by piece, a slice each, merges the outputs and lays them
out::

    rows of this rank ─▶ slice ─▶ function ─▶ leaves ─▶ merged ─▶ outbox, where they are small
                           ▲          │                   │
                           │          ▼                   ├─────▶ kept here, where they are large
                           │       updates ─▶ merged      └─────▶ kept here, where they are to stay
                           │                     │
                           └── next slice        └─ after the last slice ─▶ variables
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import accumulate, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..comms.ops import OPERATIONS
from ..devices.base import Device, Source
from ..errors import InvalidValue
from ..memory.interrupts import atomic
from ..messages import Done, FunctionSpec, Phase
from ..plan import call as plans
from ..plan.batch import Selection, indices_of
from ..plan.call import aligned
from ..plan.outputs import modes_of, pair_of, take_subset
from ..plan.split import Span, slices_of
from ..values.arrays import Array
from ..values.foreign import handed, host_array, library_instead
from .group import Group, fitted
from .merging import Layout, Merger
from .reading import fed_from_files
from .replica import read_only
from .workspace import Workspace

Arguments = tuple[list[Any], dict[str, Any], int]  # positional, by keyword, the weight of their piece


class PreparedCall:
    """One call of one function on this rank's rows; runs again as long as its inputs stay in place.

    Attributes:
        name: the function's.
        in_parts, piece: as in ``group.Running``.
    """

    def __init__(self, rank: Workspace, plan: plans.CallPlan) -> None:
        self._rank = rank
        self._plan = plan
        self._spec = spec = rank.functions[plan.function]
        outputs = modes_of(plan.subset, spec.outputs)
        self._ranks = plan.world if spec.finish else plan.participants
        self.name: str = spec.name
        self.in_parts: bool = plan.in_parts
        self._called = f"an argument of the function {spec.name!r}"
        self._spans = slices_of(plan.spans[rank.number], plan.slices)
        self.piece: int = 0
        self._sliced = [rank.variables[number] for number in plan.sliced]
        self._form = form = plan.form
        if form is not None and form.pickle:
            trees = rank.objects.unpickled(self._called, form.pickle)
            self._form = form._replace(trees=trees)
        libraries = form.libraries if form else (None,) * len(plan.inputs)
        instead = None if rank.device.xp is np else library_instead(spec.fn)
        self._libraries = tuple([library or instead for library in libraries])
        arrays = [a for a in plan.inputs if isinstance(a, plans.Broadcast | plans.Scattered)]
        files = [a for a in arrays if isinstance(a.array, plans.FileArray)]
        self._files: list[Any] = [a for a in files if isinstance(a, plans.Scattered)]
        changing = isinstance(plan.selection, plans.Picked) or files or (arrays and rank.device.pins)
        self._pieces = None if changing else self._sources()
        # whether every run has the same arguments, except for numbers and pickles
        held = {*map(type, plan.inputs)} & {plans.Held, plans.Replicated, plans.Items}
        same = not (changing or held or form)
        self._fixed = list(self._arguments()) if same else None
        self._numbers = list(self._numbers_among(self._fixed or []))
        # whether a run only calls the function, once, and leaves its outputs
        special = spec.updates or spec.finish or plan.sliced or plan.subset is not None
        self._plain = same and len(self._spans) == 1 and not special and rank.device.xp is np
        self._merger = Merger(spec.name, outputs, len(self._spans) > 1, rank.objects.pickled_arrays)
        self._layout = Layout()

    def _numbers_among(
        self, fixed: list[Arguments]
    ) -> Iterator[tuple[Any, Any, plans.Number | plans.Pickled]]:
        """What is new in each call among *fixed* arguments: the list or dict that holds each, and its
        place there."""
        for args, kwargs, _ in fixed:
            places = [*((args, index) for index in range(len(args))), *((kwargs, key) for key in kwargs)]
            for (holder, key), argument in zip(places, self._plan.inputs, strict=True):
                if isinstance(argument, plans.Number | plans.Pickled):
                    yield holder, key, argument

    def run(self) -> Done:
        """Compute all pieces, merge them, and lay the outputs out."""
        rank, spec = self._rank, self._spec
        if not self._spans:
            return self._run_without_rows()
        rank.begin_call(self._ranks, self, spec.fn)
        rank.mark(Phase.FEEDING)
        for place, key, number in self._numbers:
            place[key] = self._value_of(number)
        if self._plain:
            return self._run_plain()
        merger = self._merger
        updates = Updates(spec, len(self._spans) > 1) if spec.updates else None
        arguments = self._fixed or self._arguments()
        try:
            try:
                self._compute(arguments, updates)
            finally:
                self._let_go(arguments)
            if updates is not None:
                rank.mark(Phase.COMMUNICATING)
                updates.apply(rank.group)
            if spec.finish is not None:
                start, stop = self._plan.spans[rank.number]
                self._finish((stop - start) // self._plan.unit)
            rank.report(Phase.MERGING, len(self._spans))
            done = self._layout.place(merger, rank.outbox, rank.device)
            rank.keep(merger.leaves if self._layout.keeps else [])
        finally:
            merger.reset()
        return done

    def _run_plain(self) -> Done:
        assert self._fixed is not None
        rank, layout, merger = self._rank, self._layout, self._merger
        args, kwargs, weight = self._fixed[0]
        rank.report(Phase.RUNNING, 0)
        value = rank.run(self._spec.fn, args, kwargs)
        rank.report(Phase.MERGING, 1)
        if merger.nothing or layout.take(value, weight):
            rank.keep([])
            return layout.done
        try:
            merger.add(value, weight, rank.device)
            done = layout.place(merger, rank.outbox, rank.device)
            layout.expect(value, merger)
            rank.keep(merger.leaves if layout.keeps else [])
        finally:
            merger.reset()
        return done

    def _run_without_rows(self) -> Done:
        rank, spec = self._rank, self._spec
        rank.keep([])
        if spec.finish is not None:
            rank.begin_call(self._ranks, self, spec.fn)
            if spec.updates:
                rank.comm.barrier()  # in which the others wait before they update
            self._finish(0)
        return Done(None, None)

    @contextlib.contextmanager
    def shown(self, piece: int) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """A block in which variables show the rows of a *piece*; yields its arguments."""
        if piece >= len(self._spans):
            raise InvalidValue(
                f"the arguments of the function {self.name!r} have fewer rows than when it failed: call "
                f"it with those, and replay that."
            )
        self.piece = piece
        for place, key, number in self._numbers:
            place[key] = self._value_of(number)
        arguments: Any = self._fixed or self._arguments()
        try:
            args, kwargs, _ = next(islice(arguments, piece, None))
            for variable in self._sliced:
                variable.show(self._rows_held(self._spans[piece]))
            yield args, kwargs
        finally:
            self._let_go(arguments)

    def _compute(self, arguments: Any, updates: Updates | None) -> None:
        """Run the function on each piece, and merge what it returns."""
        rank, spec, subset = self._rank, self._spec, self._plan.subset
        for number, (args, kwargs, weight) in enumerate(arguments):
            rank.report(Phase.RUNNING, number)
            self.piece = number
            if number:
                rank.draws.note(spec.fn, rank.group.generator.own)
            for variable in self._sliced:
                variable.show(self._rows_held(self._spans[number]))
            value = rank.start(spec.fn, args, kwargs)
            if updates is not None:
                value = updates.add(value, weight, rank.device)
            if subset is not None:
                value = take_subset(subset, value, f"the result of {spec.name!r}")
            found = self._merger.find(value, rank.device)
            rank.device.settle()  # while it computed, the host has looked at what there is
            rank.mark(Phase.MERGING)
            self._merger.merge(found, weight, rank.device)
            if number + 1 < len(self._spans):
                rank.mark(Phase.FEEDING)

    def _let_go(self, arguments: Any) -> None:
        """Let go of the inputs, after the last piece or a failure."""
        if arguments is self._fixed and not self._sliced:
            return
        with atomic:
            for variable in self._sliced:
                variable.show(None)
            if arguments is not self._fixed:
                arguments.close()

    def _finish(self, weight: int) -> None:
        self._rank.mark(Phase.RUNNING)
        self._rank.group.forget()  # which is for the pieces
        with atomic:  # Ctrl-C stops all ranks before this block, or none
            self._rank.run(self._spec.finish, (weight,), {})

    def _arguments(self) -> Generator[Arguments, None, None]:
        """The arguments of each piece."""
        plan = self._plan
        pieces = self._sources() if self._pieces is None else self._pieces
        with contextlib.closing(self._feed(pieces)) as feeding:
            for span, fed in zip(self._spans, feeding, strict=True):
                values = self._values(fed, span)
                if self._form is not None:
                    values = self._form.build(values)
                weight = (span[1] - span[0]) // plan.unit
                count = len(values) - len(plan.keywords)
                args, kwargs = values[:count], dict(zip(plan.keywords, values[count:], strict=True))
                yield args, kwargs, weight
                if self._files:  # nobody may hold a piece while the one after the next is read
                    for holder in (values, args, kwargs):
                        holder.clear()

    def _feed(self, pieces: list[list[Source | None]]) -> Generator[list[Any], None, None]:
        """Each piece's inputs, on the device."""
        device, files = self._rank.device, self._files
        if not files:
            return device.feed(pieces)
        wanted = [[(f.array, self._selection(f, span)) for f in files] for span in self._spans]
        columns = [n for n, argument in enumerate(self._plan.inputs) if argument in files]
        return fed_from_files(device, pieces, wanted, columns)

    def _selection(self, argument: plans.Scattered, span: Span) -> Selection:
        """The rows *span* of the call, as rows of an array in a file."""
        start, stop = span
        selection = self._plan.selection
        if argument.of_batch:
            return range(start, stop)
        if isinstance(selection, range):
            return selection[start:stop]
        assert selection is not None
        return self._rank.array(selection.indices)[start:stop]

    def common(self) -> Generator[dict[str, Any], None, None]:
        """The arguments by keyword of a call without rows, again and again: what was pickled anew."""
        plan = self._plan
        sources = self._sources() if self._pieces is None else self._pieces
        with contextlib.closing(self._rank.device.feed(sources)) as feeding:
            values = self._values(next(feeding), self._spans[0])
            pickled = [(n, a) for n, a in enumerate(plan.inputs) if isinstance(a, plans.Pickled)]
            while True:
                built = values if self._form is None else self._form.build(values)
                yield dict(zip(plan.keywords, built, strict=True))
                for number, argument in pickled:
                    values[number] = self._value_of(argument)

    def _values(self, fed: list[Any], span: Span) -> list[Any]:
        """The arguments of one piece, before they are built into containers; *fed* are its inputs."""
        return [
            self._argument(argument, library, value, span)
            for argument, library, value in zip(self._plan.inputs, self._libraries, fed, strict=True)
        ]

    def _argument(self, argument: plans.Argument, library: str | None, value: Any, span: Span) -> Any:
        """The argument of one piece; *value* is what the device has made of its source."""
        rank = self._rank
        match argument:
            case plans.Number() | plans.Pickled():
                return self._value_of(argument)
            case plans.Items():
                return self._items(argument, host_array(value))
            case plans.Replicated():
                value = read_only(rank.variables[argument.variable].whole.view())
            case plans.Held():
                rows = self._rows_held(span)(rank.variables[argument.variable].whole)
                value = read_only(rows.view())
        return handed(value, library)

    def _value_of(self, argument: plans.Number | plans.Pickled) -> Any:
        array = self._rank.array(argument.region)
        if isinstance(argument, plans.Number):
            return array.item() if argument.plain else array[()]
        lengths = argument.lengths(array)
        places = accumulate(map(aligned, lengths))
        stream, *buffers = [array[p : p + n].data for p, n in zip(places, lengths[1:], strict=False)]
        return self._rank.objects.unpickled(self._called, bytes(stream), buffers)

    def _items(self, argument: plans.Items, places: Array) -> list[Any]:
        memory = self._rank.array(argument.items).data
        found = [bytes(memory[start:stop]) for start, stop in places.tolist()]
        if argument.strings:
            return [item.decode("utf-8", "surrogatepass") for item in found]
        return [self._rank.objects.unpickled(self._called, item) for item in found]

    def _sources(self) -> list[list[Source | None]]:
        """For each piece, the sources of its arguments; None for what lies in no shared memory."""
        inputs: Sequence[Any] = self._plan.inputs
        whole = {each: self._whole(each.array) for each in inputs if isinstance(each, plans.Broadcast)}
        return [
            [
                self._rows(each, span)
                if isinstance(each, plans.Scattered) and each not in self._files
                else whole.get(each)
                for each in inputs
            ]
            for span in self._spans
        ]

    def _whole(self, array: plans.Region | plans.FileArray) -> Source:
        if isinstance(array, plans.FileArray):
            return self._rank.files.whole(array)
        return Source(self._rank.array(array), version=self._rank.version(array))

    def _rows(self, argument: Any, span: Span) -> Source:
        array = self._rank.array(argument.array)
        if argument.of_batch:
            return Source(array[slice(*span)])
        assert self._plan.selection is not None
        return selected(self._rank, array, self._plan.selection, span)

    def rows(self) -> NDArray[np.int64] | None:
        """The indices of the rows of the running piece among all rows of the scattered inputs."""
        start, stop = self._spans[self.piece]
        selection = self._plan.selection
        if selection is None:
            return None
        if isinstance(selection, range):
            return indices_of(selection[start:stop])
        return np.array(self._rank.array(selection.indices)[start:stop], np.int64)

    def _rows_held(self, span: Span) -> Callable[[Array], Array]:
        """A function that takes the rows *span* of the call out of an array that this rank holds."""
        rank, plan = self._rank, self._plan
        assert plan.held is not None
        selection = plan.held[rank.number]
        first = plan.spans[rank.number][0]
        local = (span[0] - first, span[1] - first)
        return lambda array: taken(rank, array, selection, local)


def taken(rank: Workspace, array: Array, selection: plans.Rows, span: Span) -> Array:
    """The rows *span* of a selection of *array*, on the device where that lies."""
    rows = selected(rank, array, selection, span)
    return rows.array if rows.indices is None else rank.device.take(array, rows.indices)


def selected(rank: Workspace, array: Array, selection: plans.Rows, span: Span) -> Source:
    """The rows *span* of a selection of *array*, as a source."""
    start, stop = span
    if start == stop:
        return Source(array[:0])
    if isinstance(selection, range):
        rows = selection[start:stop]
        end = rows.stop if rows.stop >= 0 else None  # backwards to the first row
        return Source(array[rows.start : end : rows.step])
    return Source(array, rank.array(selection.indices)[start:stop])


class Updates:
    """The new values of variables that a function returns beside its outputs, merged over its pieces.

    They are computed from the values that the variables had before the call, and put in place after
    its last piece.
    """

    def __init__(self, spec: FunctionSpec, several: bool) -> None:
        self._spec = spec
        modes = tuple(op for _, op in spec.updates)
        self._merger = Merger(f"{spec.name}, its updates", modes, several)
        self._several = several
        self._single: tuple[Any, ...] = ()
        self._weight = 0

    def add(self, value: Any, weight: int, device: Device) -> Any:
        """Take the new values out of what one piece returned; returns its outputs."""
        outputs, new = pair_of(value, len(self._spec.updates), self._spec.name)
        if self._several:
            self._weight += weight
            self._merger.add(new, weight, device)
        else:
            self._single = new
        return outputs

    def apply(self, group: Group) -> None:
        """Put the values in place, merged where there were several pieces: on all ranks, or on none."""
        values: list[Any] = list(self._single)
        if self._several:
            for (variable, mode), pieces in zip(self._spec.updates, self._merger.leaves, strict=True):
                operation = OPERATIONS[mode]
                merged = operation.finish(pieces[0], self._weight)
                values.append(fitted(merged, variable, operation) if mode == "mean" else merged)
        group.assign(zip([variable for variable, _ in self._spec.updates], values, strict=True))
