"""From what a call is asked to do to its plan: every error of use arises here.

request  what one call is asked to do; a call in the background copies its arguments first
bind     give each parameter its argument; copy arrays and numbers into shared memory
select   choose the rows of the call, of scattered inputs and of what the workers hold
plan     split the rows over ranks and slices; pickle the plan
"""

from __future__ import annotations

import copy
import functools
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from operator import attrgetter
from typing import Any, Final

import numpy as np

from ...errors import InvalidValue, counted
from ...memory.segment import Segment
from ...messages import Call
from ...plan.batch import UNKNOWN, Selection, select, select_each
from ...plan.binding import RESERVED, Bound
from ...plan.call import Access, CallPlan, FileArray, Form, Held, Picked, Region, Rows, Scattered
from ...plan.outputs import Tree, check_subset, flatten, modes_of, unflatten
from ...plan.split import AUTO, Span, equal_slices, fitting_slices, split_over, weight_unit
from ...storage.files import is_stored
from ...values.arrays import checked_int
from ...values.cache import Cache
from ...values.foreign import is_future, library_of
from ..data.data import Data
from ..data.outgoing import Outgoing
from ..data.stored import StoredData
from ..engine.directory import Directory
from ..objects.known import Snapshot
from ..results.collector import Collection
from ..results.targets import Destinations
from ..variables.shared import Shared
from .arguments import Arguments, Input
from .background import result_of
from .distribution import SentFunction, Services


@dataclass(slots=True)  # and not frozen: that takes twice as long to make
class Request:
    """What one call is asked to do; nobody keeps it when the call is over.

    Attributes:
        args, kwargs: the function's own arguments.
        batch, batch_s, num_slices, output_subset, progress: as in ``Function.__call__``.
        alone: the rank that is to compute all rows, if one is to.
        limit: seconds that it may take; None for as long as all others.
        out: where outputs go; None for new memory.
        view: what the function is to see of its objects, where that is not what is there now.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any = None
    batch_s: Any = None
    num_slices: Any = 1
    output_subset: Sequence[Any] | None = None
    progress: bool = False
    alone: int | None = None
    limit: float | None = None
    out: Destinations | None = None
    view: Snapshot | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any) -> Request:
        """The request of a call with *args* and *kwargs*, options of calls among these; *how* are other
        attributes."""
        options = {name: kwargs[name] for name in RESERVED if name in kwargs}
        named = {name: value for name, value in kwargs.items() if name not in RESERVED}
        return cls(args, named, **options, **how)


def snapshot(argument: Any) -> Any:
    """A copy of *argument* for a later call: the caller may go on writing to the original."""
    leaves, tree = _taken_apart(argument)
    return unflatten(tree, map(_copied, leaves))


def arrived(arguments: Any, name: str) -> Any:
    """*arguments* of the function *name*, with results in the place of futures, after a wait for them.

    Raises: InvalidValue for the future of a call that failed, or was cancelled.
    """
    leaves, tree = _taken_apart(arguments)
    for index, leaf in enumerate(leaves):
        if is_future(leaf):
            leaves[index] = result_of(leaf, f"the function {name!r}")
    return unflatten(tree, iter(leaves))


def _taken_apart(value: Any) -> tuple[list[Any], Tree]:
    """What plain containers hold; *value* itself if they are nested too deeply, as the call will say."""
    try:
        return flatten(value, lambda each: type(each) in (dict, list) or isinstance(each, tuple))
    except InvalidValue:
        return [value], None


def _copied(leaf: Any) -> Any:
    if library_of(leaf) == "torch":
        return leaf.detach().clone()
    known = isinstance(leaf, np.memmap | np.generic | Data | StoredData | Shared)
    if known or library_of(leaf) or is_future(leaf) or is_stored(leaf):
        return leaf
    if isinstance(leaf, np.ndarray | bytearray | memoryview | array):
        return np.array(leaf, subok=True)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # it cannot be pickled, either, which the call will say
        return leaf


_region_of = attrgetter("_memory.placed.region")  # in C, faster than ``data.region``
_are_data = {Data}.issuperset

Bind = Callable[[tuple[Any, ...], dict[str, Any]], list[Bound]]


class Planned:
    """What is kept of a plan between equal calls.

    Attributes:
        plan: the plan.
        payload: the command, pickled.
        segments: the memory that the workers do not have yet.
        known: whether the workers have run it, and so have all that it needs.
        collection: what makes results of the last replies, or None.
    """

    def __init__(self, plan: CallPlan, directory: Directory) -> None:
        """*directory* has what it names."""
        self.plan: Final = plan
        command = Call(plan)
        self.payload: Final = pickle.dumps(command, 5)
        self.segments: list[tuple[Segment, Access]] = directory.segments(command)
        self.known: bool = False
        self.collection: Collection | None = None

    def ran(self) -> None:
        """The workers have run the plan: they have its memory, and none is kept here."""
        self.known = True
        self.segments = []

    def collect(self, collection: Collection) -> Collection:
        """Make results by *collection*, as long as the replies are the same; returns it."""
        self.collection = collection
        return collection


class Planner:
    """Plans the calls of one function, and keeps the plans."""

    def __init__(
        self, services: Services, function: SentFunction, bind: Bind, sliced: Sequence[Shared]
    ) -> None:
        """*bind* gives the arguments of the *function* their parameters."""
        engine = services.engine
        self._engine, self._variables = engine, services.variables
        self._world = (function.lane or engine.everyone).ranks
        self._spec, self._number = function.spec, function.number
        self._name = function.name
        self._bind = bind
        self.arguments: Final = Arguments(services, self._spec, self._world)
        self._sliced = sliced
        self._indices = Outgoing(engine)
        self._own_indices = Outgoing(engine)
        self._own_regions: Cache[tuple[Region, int, int], Region] = Cache()
        self._known: Cache[CallPlan, Planned] = Cache()
        self._found: Cache[tuple[Any, ...], Planned] = Cache()  # by the cache keys of calls
        self._key: tuple[Any, ...] | None = None  # of the last call; None if it has none

    def planned(self, request: Request) -> Planned:
        """The plan of a call, after its arguments have gone into shared memory.

        Raises: UsageError for what cannot be called; SharedMemoryError, SessionError.
        """
        args, kwargs, slices = request.args, request.kwargs, request.num_slices
        if self._engine.versions is not None:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Data):
                    arg.touch_if_shared()
        # True and 1.0 are equal to 1, but are no numbers of slices
        simple = request.batch is None and request.batch_s is None and request.output_subset is None
        simple = simple and (type(slices) is int or type(slices) is str) and request.alone is None
        if simple:
            values = (*args, *kwargs.values()) if kwargs else args
            try:
                again = self.arguments.again(values) if self.arguments.copied else None
                regions: Any = again or (map(_region_of, values) if _are_data(map(type, values)) else ())
                found = self._found.get((slices, *kwargs, *regions))
            except AttributeError:  # not all of them are Data
                found = None
            if found is not None:
                return found
        self._engine.require_ready()
        self._engine.settle()
        if not (type(slices) is str and slices == AUTO):
            slices = checked_int(slices, "num_slices", 1, instead=', or "auto"')
        opened, form = self.arguments.opened(self._bind(args, kwargs))
        inputs = [self.arguments.input(index, bound) for index, bound in enumerate(opened)]
        subset = check_subset(request.output_subset)
        modes_of(subset, self._spec.outputs)  # they are there
        planned = self._plan(request, inputs, form, slices, subset)
        nested = form is not None and any(form.trees)
        reusable = simple and not nested and not self._sliced
        if self.arguments.reuse(inputs if reusable else None):
            self._key = (slices, *kwargs, *[each.placed.region for each in inputs if each.placed])
            if planned.known:
                self._found[self._key] = planned
        else:
            self._key = None
        return planned

    def again(self, request: Request) -> Callable[[], Planned]:
        """What plans the same call once more."""
        return functools.partial(self.planned, replace(request, view=None))

    def remember(self, planned: Planned) -> None:
        """The workers have run a plan: equal calls find it, and it no longer keeps its memory alive."""
        planned.ran()
        self._known[planned.plan] = planned
        if self._key is not None:
            self._found[self._key] = planned

    def _plan(
        self,
        request: Request,
        inputs: list[Input],
        form: Form | None,
        slices: int | str,
        subset: tuple[Any, ...] | None,
    ) -> Planned:
        selection = self._select(inputs, request.batch)
        spans, held = self._spans(inputs, selection, request.batch_s)
        if (alone := request.alone) is not None:
            rows = 1 if selection is None else len(selection)
            spans = tuple((rows * (r > alone), rows * (r >= alone)) for r in range(self._engine.size))
        chosen: Rows | None
        if isinstance(selection, np.ndarray):
            chosen = Picked(self._indices.put(selection, "batch=", oversize=1.25).region)
        else:
            chosen = selection
        in_parts = isinstance(slices, str)
        pieces = equal_slices(spans, self._fitting(inputs, spans) if slices == AUTO else int(slices))
        changed = [v for v in self._sliced if any(v is updated for updated, _ in self._spec.updates)]
        if changed and (pieces > 1 or request.batch_s is not None):
            raise InvalidValue(
                f"the function {self._name!r} changes all rows of {changed[0].called()} by updates=, "
                f"but num_slices= or batch_s= gives it some of them at a time: leave both out, or write "
                f"to the rows in a function of Python, by w.value = …"
            )
        plan = CallPlan(
            function=self._number,
            inputs=tuple(each.argument for each in inputs),
            keywords=tuple(request.kwargs),
            form=self.arguments.travelling(form),
            selection=chosen,
            spans=spans,
            world=self._world,
            slices=pieces,
            unit=weight_unit(spans, pieces),
            subset=subset,
            held=held,
            sliced=tuple(variable.number for variable in self._sliced),
            in_parts=in_parts,
        )
        return self._known.get(plan) or Planned(plan, self._engine.directory)

    def _fitting(self, inputs: list[Input], spans: tuple[Span, ...]) -> int:
        """Into how many pieces the rows of a rank are cut by ``num_slices="auto"``.

        One, where pieces would show: values are listed, or updates computed, from all rows of a rank.
        """
        listed = None in flatten(self._spec.outputs)[0]
        if listed or (self._spec.updates and self._spec.finish is None) or self._engine.on_gpus:
            return 1
        arrays = [each.argument.array for each in inputs if isinstance(each.argument, Scattered)]
        rows: list[Any] = [*arrays, *self._sliced]
        rows += [each.variable for each in inputs if isinstance(each.argument, Held)]
        row_bytes = sum(prod(each.shape[1:]) * np.dtype(each.dtype).itemsize for each in rows)
        chunk = max([1, *(array.chunk for array in arrays if isinstance(array, FileArray))])
        return fitting_slices(spans, row_bytes, chunk)

    def _spans(
        self, inputs: list[Input], selection: Selection | None, batch_s: Any
    ) -> tuple[tuple[Span, ...], tuple[Rows, ...] | None]:
        """The rows of the call that each rank computes, and which of its own rows those are."""
        size, world = self._engine.size, self._world
        spans = split_over(len(world if selection is None else selection), world, size)
        own = {
            f"the argument {each.name!r}": each.variable
            for each in inputs
            if each.variable is not None and isinstance(each.argument, Held)
        }
        own |= {f"the sliceable {variable.called()}": variable for variable in self._sliced}
        if not own:
            if batch_s is not None:
                raise InvalidValue(
                    f"batch_s= selects rows of what the workers hold, but the function {self._name!r} "
                    f"has no sliceable_shareds, and no variable as a scattered input."
                )
            return spans, None
        selections = select_each(batch_s, self._variables.rows(own, self._name, world))
        by_rank = dict(zip(world, selections, strict=True))
        counts = [len(by_rank.get(rank, ())) for rank in range(size)]
        if selection is not None and counts != [stop - start for start, stop in spans]:
            listed = ", ".join(f"{stop - start}" for start, stop in spans)
            raise InvalidValue(
                f"the rows of the function {self._name!r} do not fit: the scattered inputs have "
                f"{listed} on the ranks, but {next(iter(own))} has {', '.join(map(str, counts))}"
                f"{'' if batch_s is None else ', after batch_s='}."
            )
        edges = np.cumsum([0, *counts]).tolist()
        held = dict(zip(world, self._own_rows(selections), strict=True))
        return tuple(pairwise(edges)), tuple(held.get(rank, held[world[0]]) for rank in range(size))

    def _own_rows(self, selections: list[Selection]) -> tuple[Rows, ...]:
        """The ranks' selections, with their indices copied into shared memory."""
        picked = [each for each in selections if isinstance(each, np.ndarray)]
        region = None
        if picked:
            region = self._own_indices.put(np.concatenate(picked), "batch_s=", oversize=1.25).region
        held: list[Rows] = []
        offset = 0
        for selection in selections:
            if isinstance(selection, range):
                held.append(selection)
                continue
            assert region is not None
            part = region, offset, len(selection)
            if part not in self._own_regions:  # the same part has to be the same region
                self._own_regions[part] = Region(region.segment, offset, selection.shape, "<i8")
            held.append(Picked(self._own_regions[part]))
            offset += selection.nbytes
        return tuple(held)

    def _select(self, inputs: list[Input], batch: Any) -> Selection | None:
        """The rows of the call, after the lengths of the scattered inputs have been compared."""
        by_rows = {each.name: each.argument for each in inputs if isinstance(each.argument, Scattered)}
        if not by_rows:
            if batch is not None:
                raise InvalidValue(
                    f"batch= selects rows of scattered inputs, but the function {self._name!r} got none "
                    f"(batch_s= selects rows of what the workers hold)."
                )
            return None
        for name, argument in by_rows.items():
            if not argument.array.shape:
                raise InvalidValue(
                    f"the argument {name!r} of the function {self._name!r} is scattered by rows, but "
                    f"has no dimensions: name it in bcast_inputs to give it to every rank whole."
                )
        minibatches = {n for n, a in by_rows.items() if a.of_batch and batch is not None}
        whole = {name: a.array.shape[0] for name, a in by_rows.items() if name not in minibatches}
        if len(set(whole.values())) > 1:
            listed = ", ".join(f"{name} has {rows}" for name, rows in whole.items())
            raise InvalidValue(
                f"the scattered inputs of the function {self._name!r} have different numbers of rows: "
                f"{listed}. Give them the same number, or name in bcast_inputs what every rank is to "
                f"see whole."
            )
        rows = next(iter(whole.values())) if whole else _unknown_rows(batch)
        selection = select(batch, rows)
        for name in minibatches:
            rows = by_rows[name].array.shape[0]
            if rows < len(selection):
                raise InvalidValue(
                    f"the minibatch {name!r} of the function {self._name!r} has "
                    f"{counted(rows, 'row')}, but batch= names {len(selection)}: fill it with the rows "
                    f"of the batch, in their order."
                )
        return selection


def _unknown_rows(batch: Any) -> int:
    """The rows to select from if all inputs are minibatches."""
    if isinstance(batch, slice) and batch.stop is None:
        raise InvalidValue("a batch= of minibatch inputs only must say where it stops.")
    if isinstance(batch, list | tuple):
        is_mask = bool(batch) and all(isinstance(one, bool | np.bool_) for one in batch)
    else:
        is_mask = getattr(batch, "dtype", None) == np.bool_ and np.ndim(batch) == 1
    return len(batch) if is_mask else UNKNOWN
