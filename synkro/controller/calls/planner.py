"""From a function's arguments to the plan of a call: every error of use arises here.

bind     arguments beside parameters; plain arrays go into shared memory
select   the rows of the call, of scattered inputs and of what the workers hold
plan     rows a rank, slices, weights, pickled
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from ...errors import InvalidType, InvalidValue
from ...messages import Call
from ...plan.batch import Indexed, Selection, Strided, select, select_each
from ...plan.binding import Binder, Bound
from ...plan.call import (
    Access,
    Argument,
    Broadcast,
    CallPlan,
    Constant,
    Form,
    Held,
    Picked,
    Region,
    Replicated,
    Scattered,
)
from ...plan.outputs import Tree, check_subset, flatten, leaf_paths, take_subset
from ...plan.split import Span, equal_slices, split, weight_unit
from ...values.arrays import Array, as_numeric, cast, checked_dtype, native
from ...values.cache import Cache
from ...values.foreign import is_graph_shared, library_of
from ..data import Data, make_data
from ..engine.engine import Engine
from ..results.collector import Collection
from ..variables.registry import Variables
from ..variables.shared import Shared

SCALARS = (bool, int, float, complex, np.number, np.bool_)


class Planner:
    """Plans the calls of one function."""

    def __init__(
        self,
        engine: Engine,
        variables: Variables,
        binder: Binder,
        name: str,
        number: int,
        modes: Any,
        sliced: Sequence[Shared],
        types: Mapping[str, Any],
    ) -> None:
        """*types* say what typed inputs have to be: by name, their dtype, ndim, and ``downcast``."""
        self._engine = engine
        self._variables = variables
        self._binder = binder
        self._name = name
        self._number = number
        self._modes = modes
        self._sliced = sliced
        self._types = types
        self._cached: dict[str, tuple[Any, Data]] = {}
        self._indices: Data | None = None
        self._own_indices: Data | None = None
        self._own_regions: Cache[tuple[Region, int, int], Region] = Cache()
        self._known: Cache[CallPlan, Planned] = Cache()
        self._refillable: list[Data | None] = []  # of the last call: for each value, where it was copied

    def plan(
        self,
        args: Any,
        kwargs: Any,
        batch: Any,
        batch_s: Any,
        slices: int,
        subset: Sequence[Any] | None,
    ) -> Planned:
        positional, named = self._binder.bind(args, kwargs)
        opened, form = self.opened([*positional, *named.values()])
        inputs = [self._input(bound) for bound in opened]
        chosen = check_subset(subset)
        if chosen is not None and isinstance(self._modes, tuple | list | dict):
            take_subset(chosen, self._modes, "outputs=")
        planned = self._plan(inputs, tuple(named), form, batch, batch_s, slices, chosen)
        self._refillable = []
        if batch is None and batch_s is None and subset is None and not self._sliced:
            used = [value for _, value in inputs]
            planned.key = self._recognized([*args, *kwargs.values()], used, (*kwargs, slices))
        return planned

    def _recognized(self, values: list[Any], used: list[Any], rest: Any) -> tuple[Any, ...] | None:
        """What a call with such *values* is found by again, whose inputs are *used*; None for others."""
        plain = [type(value) is np.ndarray for value in values]
        if not all(known or isinstance(value, Data) for known, value in zip(plain, values, strict=True)):
            return None
        if any(plain):
            self._refillable = [
                data if copied else None for data, copied in zip(used, plain, strict=True)
            ]
        return (*[data.region for data in used], *rest)

    def refilled(self, values: Sequence[Any]) -> list[Region | None] | None:
        """The regions of *values*, after arrays were copied to where the last call's arrays lay.

        None, and nothing is copied, where one is no array, or not like the last call's.
        """
        targets = self._refillable
        if len(values) != len(targets):
            return None
        for value, data in zip(values, targets, strict=True):
            if data is None:
                if not isinstance(value, Data):
                    return None
            elif type(value) is not np.ndarray or value.shape != data.shape or value.dtype != data.dtype:
                return None
        for value, data in zip(values, targets, strict=True):
            if data is not None:
                self._copy(value, data)
        used = zip(values, targets, strict=True)
        return [(value if data is None else data).region for value, data in used]

    def _copy(self, array: Array, data: Data) -> None:
        trace = self._engine.trace
        if trace is not None:
            trace.mark("copy")
        data.set_value(array)
        if trace is not None:
            trace.mark("plan")

    def opened(self, arguments: list[Bound]) -> tuple[list[Bound], Form | None]:
        """The leaves of *arguments*, and how to make them again, unless they are themselves."""
        leaves: list[Bound] = []
        trees: list[Tree] = []
        for bound in arguments:
            try:
                values, tree = flatten(bound.value, _is_tree if bound.broadcast else _is_record)
            except RecursionError:
                raise InvalidValue(f"{self._called(bound)} is nested endlessly.") from None
            trees.append(tree)
            for path, value in zip(leaf_paths(tree), values, strict=True):
                own = value.library if isinstance(value, Data) else library_of(value)
                leaves.append(Bound(bound.name + path, bound.broadcast, value, bound.library or own))
        libraries = tuple([leaf.library for leaf in leaves])
        if not any(trees) and {None, "numpy"}.issuperset(libraries):
            return leaves, None
        return leaves, Form(tuple(trees), libraries)

    def _input(self, bound: Bound) -> tuple[Bound, Any]:
        """The argument as ``Data``, or as the variable or the scalar that it is."""
        value = bound.value
        wanted = self._types.get(bound.name)
        if wanted is not None:
            value = self._typed(bound, wanted)
        if isinstance(value, Shared):
            return bound, self._variables.check(value, self._called(bound))
        if isinstance(value, Data):
            value.input(self._engine, self._called(bound))
            return bound, value
        if isinstance(value, SCALARS):
            if bound.broadcast:
                return bound, value
        elif isinstance(value, np.memmap):
            return bound, self._mapped(bound, value)
        array = as_numeric(value, self._called(bound))
        checked_dtype(array.dtype, self._called(bound))
        if self._engine.on_gpus:
            array = native(array)
        mapped, data = self._cached.get(bound.name, (None, None))
        fits = data is not None and (data.dtype, data.ndim) == (array.dtype, array.ndim)
        if data is None or mapped is not None or not fits:
            data = Data(self._engine, array.dtype, array.ndim, name=bound.name)
            self._cached[bound.name] = (None, data)
        self._copy(array, data)
        return bound, data

    def _typed(self, bound: Bound, wanted: Any) -> Any:
        """The argument, of the type that the function's input has.

        Raises: InvalidType, InvalidValue.
        """
        value, called = bound.value, self._called(bound)
        if is_graph_shared(value):
            raise InvalidType(f"{called} is a shared variable: give its values, .get_value().")
        if not isinstance(value, Data | Shared | np.memmap):
            advice = "convert the values yourself, or make the function with allow_input_downcast=True"
            value = cast(value, wanted.dtype, wanted.downcast, called, advice)
        if value.ndim != len(wanted.shape):
            raise InvalidValue(
                f"{called} has {len(wanted.shape)} dimensions in the graph, got {value.ndim} (shape "
                f"{value.shape})."
            )
        if any(wanted.shape) and not isinstance(value, Shared):
            pairs = zip(wanted.shape, value.shape, strict=True)
            if any(length not in (None, given) for length, given in pairs):
                lengths = ", ".join("any" if length is None else str(length) for length in wanted.shape)
                raise InvalidValue(
                    f"{called} has the shape ({lengths}) in the graph, got the shape {value.shape}."
                )
        if not (wanted.downcast or np.can_cast(value.dtype, wanted.dtype, "safe")):
            raise InvalidType(
                f"{called} is {wanted.dtype} in the graph, got {value.dtype}: make the Data of that "
                f"dtype, with data(…, dtype=…, force_cast=True), or the function with "
                f"allow_input_downcast=True."
            )
        return value

    def _mapped(self, bound: Bound, array: np.memmap[Any, Any]) -> Data:
        """A memory-mapped file, mapped once as long as the same array comes again."""
        source, data = self._cached.get(bound.name, (None, None))
        if source is not array or data is None:
            data = make_data(self._engine, array, name=bound.name)
            # a copy, where the file could not be mapped, would be stale by the next call
            self._cached[bound.name] = (None if data.data.flags.writeable else array, data)
        return data

    def _called(self, bound: Bound) -> str:
        return f"the argument {bound.name!r} of the function {self._name!r}"

    def _plan(
        self,
        inputs: list[tuple[Bound, Any]],
        keywords: tuple[str, ...],
        form: Form | None,
        batch: Any,
        batch_s: Any,
        slices: int,
        subset: tuple[Any, ...] | None,
    ) -> Planned:
        scattered = {b.name: v for b, v in inputs if not b.broadcast and isinstance(v, Data)}
        selection = self._select(scattered, batch)
        used = [value for _, value in inputs if isinstance(value, Data)]
        spans, held = self._spans(inputs, selection, batch_s, used)
        chosen: Strided | Picked | None
        if isinstance(selection, Indexed):
            used.append(indices := self._index_data(selection.indices))
            chosen = Picked(indices.input(self._engine, "batch")[0])
        else:
            chosen = selection
        arguments = [
            self._argument(bound, value, selection if batch is not None else None)
            for bound, value in inputs
        ]
        pieces = equal_slices(spans, slices)
        plan = CallPlan(
            function=self._number,
            inputs=tuple(arguments),
            keywords=keywords,
            form=form,
            selection=chosen,
            spans=spans,
            slices=pieces,
            unit=weight_unit(spans, pieces),
            subset=subset,
            held=held,
            sliced=tuple(variable.number for variable in self._sliced),
        )
        return self._known.get(plan) or Planned(plan, used, self._engine)

    def remember(self, planned: Planned) -> None:
        """The workers have run it: an equal plan is this one."""
        self._known[planned.plan] = planned

    def _spans(
        self,
        inputs: list[tuple[Bound, Any]],
        selection: Selection | None,
        batch_s: Any,
        used: list[Data],
    ) -> tuple[tuple[Span, ...], tuple[Strided | Picked, ...] | None]:
        """The rows of the call that each rank computes, and which of its own rows those are."""
        size = self._engine.size
        spans = split(0, selection.count, size) if selection else ((0, 0),) * size
        own = {
            f"the argument {b.name!r}": v for b, v in inputs if isinstance(v, Shared) and not b.broadcast
        }
        own |= {f"the sliceable {variable.called()}": variable for variable in self._sliced}
        if not own:
            if batch_s is not None:
                raise InvalidValue(
                    f"batch_s= selects rows of what the workers hold, but the function {self._name!r} "
                    f"has no sliceable_shareds, and no variable as a scattered input."
                )
            return spans, None
        selections = select_each(batch_s, self._variables.rows(own, self._name))
        counts = [chosen.count for chosen in selections]
        if selection and counts != [stop - start for start, stop in spans]:
            listed = ", ".join(f"{stop - start}" for start, stop in spans)
            raise InvalidValue(
                f"the rows of the function {self._name!r} do not fit: the scattered inputs have "
                f"{listed} on the ranks, but {next(iter(own))} has {', '.join(map(str, counts))}"
                f"{_after(batch_s)}."
            )
        edges = np.cumsum([0, *counts]).tolist()
        return tuple(pairwise(edges)), self._own_rows(selections, used)

    def _own_rows(self, selections: list[Selection], used: list[Data]) -> tuple[Strided | Picked, ...]:
        """The ranks' selections as they travel: indices through shared memory."""
        picked = [s.indices for s in selections if isinstance(s, Indexed)]
        region = None
        if picked:
            if self._own_indices is None:
                self._own_indices = Data(self._engine, np.int64, 1, name="batch_s")
            self._own_indices.set_value(np.concatenate(picked), oversize=1.25)
            used.append(self._own_indices)
            region = self._own_indices.input(self._engine, "batch_s")[0]
        held: list[Strided | Picked] = []
        offset = 0
        for selection in selections:
            if isinstance(selection, Strided):
                held.append(selection)
                continue
            assert region is not None
            held.append(Picked(self._own_region(region, offset, selection.count)))
            offset += selection.indices.nbytes
        return tuple(held)

    def _own_region(self, whole: Region, offset: int, count: int) -> Region:
        """A part of the indices: the same object as long as it is the same part."""
        key = whole, offset, count
        if key not in self._own_regions:
            self._own_regions[key] = Region(whole.segment, offset, (count,), "<i8")
        return self._own_regions[key]

    def _select(self, scattered: dict[str, Data], batch: Any) -> Selection | None:
        """The rows of the call, after the lengths of the scattered inputs have been compared."""
        if not scattered:
            if batch is not None:
                raise InvalidValue(
                    f"batch= selects rows of scattered inputs, but the function {self._name!r} got none "
                    f"(batch_s= selects rows of what the workers hold)."
                )
            return None
        for name, data in scattered.items():
            if data.ndim == 0:
                raise InvalidValue(
                    f"the argument {name!r} of the function {self._name!r} is scattered by rows, but "
                    f"has no dimensions: name it in bcast_inputs to give it to every rank whole."
                )
        whole = {n: len(d) for n, d in scattered.items() if batch is None or not d.minibatch}
        if len(set(whole.values())) > 1:
            listed = ", ".join(f"{name} has {rows}" for name, rows in whole.items())
            raise InvalidValue(
                f"the scattered inputs of the function {self._name!r} have different numbers of rows: "
                f"{listed}. Give them the same number, or name in bcast_inputs what every rank is to "
                f"see whole."
            )
        rows = next(iter(whole.values())) if whole else _unknown_rows(batch)
        selection = select(batch, rows)
        for name, data in scattered.items():
            if name not in whole:
                self._check_minibatch(name, len(data), selection)
        return selection

    def _check_minibatch(self, name: str, rows: int, selection: Selection) -> None:
        if isinstance(selection, Strided):
            reach = (selection.count - 1) * abs(selection.step) + 1
        else:
            reach = int(selection.indices.max()) - selection.lowest + 1
        if rows < reach:
            raise InvalidValue(
                f"the minibatch {name!r} of the function {self._name!r} has {rows} rows, but batch= "
                f"reaches over {reach}: fill it with the rows of the batch."
            )

    def _argument(self, bound: Bound, value: Any, selection: Selection | None) -> Argument:
        if isinstance(value, Shared):
            return Replicated(value.number) if bound.broadcast else Held(value.number)
        if not isinstance(value, Data):
            return Constant(value, pickle.dumps(value, 5))
        region, _ = value.input(self._engine, self._called(bound))
        if bound.broadcast:
            return Broadcast(region)
        return Scattered(region, selection.lowest if selection and value.minibatch else 0)

    def _index_data(self, indices: NDArray[np.int64]) -> Data:
        if self._indices is None:
            self._indices = Data(self._engine, np.int64, 1, name="batch")
        self._indices.set_value(indices, oversize=1.25)
        return self._indices


class Planned:
    """A plan, pickled, with what the workers still need for it and what its outputs looked like.

    Plans are kept and found again by the regions of the ``Data``: those are other objects as soon as
    anything about them has changed.
    """

    def __init__(self, plan: CallPlan, inputs: list[Data], engine: Engine) -> None:
        self.plan = plan
        # a form may have the user's classes
        self.payload = (pickle if plan.form is None else cloudpickle).dumps(Call(plan), 5)
        self.segments = [(data.input(engine, "an input")[1], Access.READ) for data in inputs]
        self.known = False  # whether the workers have run it, and so have all that it needs
        self.key: tuple[Any, ...] | None = None
        self.collection: Collection | None = None


def _is_record(value: Any) -> bool:
    """Whether *value* holds arguments, each by its name."""
    return isinstance(value, dict) or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _is_tree(value: Any) -> bool:
    """Whether *value* holds arguments, nested as it may be; a list of numbers is an array."""
    if _is_record(value):
        return True
    return isinstance(value, list | tuple) and any(
        isinstance(child, np.ndarray | Data | Shared) or library_of(child) or _is_tree(child)
        for child in value
    )


def _after(batch_s: Any) -> str:
    return "" if batch_s is None else ", after batch_s="


def _unknown_rows(batch: Any) -> int:
    """Rows to select from where only minibatches are given: more than any batch can name."""
    if isinstance(batch, slice) and batch.stop is None:
        raise InvalidValue("a batch= of minibatch inputs only must say where it stops.")
    if isinstance(batch, list | tuple):
        is_mask = bool(batch) and all(isinstance(one, bool | np.bool_) for one in batch)
    else:
        is_mask = getattr(batch, "dtype", None) == np.bool_ and np.ndim(batch) == 1
    return len(batch) if is_mask else 2**62
