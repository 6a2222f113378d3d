"""``Function``: one array function, run on all ranks at once.

bind     arguments beside parameters; plain arrays go into shared memory
plan     rows a rank, slices, weights: every error of use arises until here
run      one command to all workers
collect  merge what the ranks have left, in ``collect``
"""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .arrays import as_numeric, checked_dtype
from .collect import Collection
from .data import Data, make_data
from .distribution import Functions
from .engine import Engine
from .errors import InvalidType, InvalidValue, NotAvailable
from .messages import Call
from .plan.batch import Indexed, Selection, Strided, select
from .plan.binding import Binder, Bound
from .plan.call import Access, Argument, Broadcast, CallPlan, Constant, Picked, Scattered
from .plan.outputs import check_modes, check_subset, take_subset
from .plan.split import split, weight_unit

_SCALARS = (bool, int, float, complex, np.number, np.bool_)
_REMEMBERED = 64  # plans that are kept


class Function:
    """A function that runs on all ranks at once; made by ``function()``.

    Inside other functions, on the workers, it is the plain function again.

    Attributes:
        fn: the plain function.
        name: for messages.
        output_modes: the reduce operation of each output, nested as the outputs, or one for all.
    """

    def __init__(
        self,
        home: Functions,
        fn: Callable[..., Any],
        inputs: str | Sequence[str] | None,
        outputs: Any,
        bcast_inputs: str | Sequence[str] | None,
        name: str | None,
    ) -> None:
        home.engine.require_ready()
        if not callable(fn):
            raise InvalidType(f"function() takes a callable, got {fn!r}, a {type(fn).__name__}.")
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Function) else fn
        self.name = name or _name_of(self.fn)
        self.output_modes = check_modes(outputs)
        self._home = home
        self._engine = home.engine
        self._binder = Binder(self.fn, inputs, bcast_inputs, self.name)
        self._cached: dict[str, tuple[Any, Data]] = {}
        self._indices: Data | None = None
        self._quick: dict[Any, _Planned] = {}
        functools.update_wrapper(self, self.fn, updated=())
        self.number = home.add(self)

    @property
    def update_modes(self) -> tuple[str, ...]:
        """The operations by which updates accumulate over slices: none yet."""
        return ()

    def __repr__(self) -> str:
        return f"<synkro.Function {self.name!r}, outputs={self.output_modes!r}>"

    def __reduce__(self) -> Any:
        return _plain, (self.fn,)

    # ── calling ──────────────────────────────────────────────────────────────────────────────────

    def __call__(
        self,
        *args: Any,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        output_subset: Sequence[Any] | None = None,
        progress: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the function on all ranks and return its reduced outputs.

        Args:
            args, kwargs: the function's own arguments: ``Data``, or arrays, which are copied into
                shared memory first.  Scattered inputs have the same number of rows, at least one.
                Broadcast numbers arrive as they are.
            batch: which rows of the scattered inputs to use: an int (the first so many), a slice, a
                list or 1-d array of ints, or of bools, one a row.
            num_slices: each rank computes its rows in so many pieces, one after the other, so that
                the function's own memory is bounded; the result is the same.
            output_subset: indices (or keys) of the outputs to reduce and return.
            progress: show a bar over the slices of all ranks (needs tqdm).

        Raises: UsageError for what cannot be run, before any worker is woken, and OutputError for
        results that do not fit ``outputs=``; WorkerError, WorkerDied, CallTimeout, SessionError.
        """
        if batch_s is not None:
            raise NotAvailable("batch_s (rows of variables on the workers) is not available yet.")
        with self._engine.lock:
            self._engine.require_ready()
            planned = None
            whole = type(num_slices) is int and num_slices == 1
            if whole and batch is None and not kwargs and output_subset is None:
                planned = self._quick.get(tuple([getattr(arg, "region", None) for arg in args]))
            if planned is None:
                planned = self._planned(args, kwargs, batch, _slices(num_slices), output_subset)
            if not planned.known:
                self._home.bring(self)
            if progress:
                return self._run_with_bar(planned)
            return self._run(planned)

    def _run(self, planned: _Planned, on_tick: Callable[[], None] | None = None) -> Any:
        replies = self._engine.run(planned.payload, planned.segments, on_tick=on_tick)
        if not planned.known:
            planned.known = True
            planned.segments = []  # no memory is kept with a plan
            if planned.key is not None:
                if len(self._quick) >= _REMEMBERED:
                    self._quick.clear()
                self._quick[planned.key] = planned
        collection = planned.collection
        if collection is None or collection.replies != replies:
            collection = planned.collection = Collection(
                self._home.outputs, self.name, self.output_modes, planned.plan, replies
            )
        return collection.result()

    def _run_with_bar(self, planned: _Planned) -> Any:
        bar = _Bar(self._engine, self.name, planned.plan)
        try:
            return self._run(planned, bar.update)
        finally:
            bar.close()

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background: a future of what the call returns or raises.

        Submitted calls run in the order submitted.  Arrays and lists are copied now; ``Data`` are read
        when the call runs, so do not write to them before the future is done.
        """
        named = {name: _snapshot(value) for name, value in kwargs.items()}
        return self._home.submit(functools.partial(self, *map(_snapshot, args), **named))

    def as_serial(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain function once, in this process, on whole arrays; returns what it returns.

        ``Data`` are read-only in it, as on the workers.
        """
        named = {key: _serial(arg) for key, arg in kwargs.items()}
        return self.fn(*map(_serial, args), **named)

    as_theano = as_serial

    def build_inputs(
        self,
        *args: Any,
        force_cast: bool = False,
        oversize: float = 1,
        minibatch: bool = False,
        **kwargs: Any,
    ) -> tuple[Data, ...]:
        """``Data`` with the contents of *args* and *kwargs*, in this order, named as the parameters.

        *minibatch* goes to the scattered ones, *force_cast* and *oversize* to all.
        """
        positional, named = self._binder.bind(args, kwargs)
        return tuple(
            make_data(
                self._engine,
                bound.value,
                force_cast=force_cast,
                oversize=oversize,
                minibatch=minibatch and not bound.broadcast,
                name=bound.name,
            )
            for bound in (*positional, *named.values())
        )

    # ── bind and plan ────────────────────────────────────────────────────────────────────────────

    def _planned(
        self, args: Any, kwargs: Any, batch: Any, slices: int, subset: Sequence[Any] | None
    ) -> _Planned:
        positional, named = self._binder.bind(args, kwargs)
        inputs = [self._input(bound) for bound in (*positional, *named.values())]
        chosen = check_subset(subset)
        if chosen is not None and isinstance(self.output_modes, tuple | list | dict):
            take_subset(chosen, self.output_modes, "outputs=")
        planned = self._plan(inputs, tuple(named), batch, slices, chosen)
        whole = batch is None and not kwargs and slices == 1 and subset is None
        if whole and all(isinstance(arg, Data) for arg in args):
            planned.key = tuple([value.region for _, value in inputs])
        return planned

    def _input(self, bound: Bound) -> tuple[Bound, Any]:
        """The argument as ``Data``, or as the scalar that it is."""
        value = bound.value
        if isinstance(value, Data):
            value.input(self._engine, self._called(bound))
            return bound, value
        if isinstance(value, _SCALARS):
            if bound.broadcast:
                return bound, value
        elif isinstance(value, np.memmap):
            return bound, self._mapped(bound, value)
        array = as_numeric(value, self._called(bound))
        checked_dtype(array.dtype, self._called(bound))
        mapped, data = self._cached.get(bound.name, (None, None))
        fits = data is not None and (data.dtype, data.ndim) == (array.dtype, array.ndim)
        if data is None or mapped is not None or not fits:
            data = Data(self._engine, array.dtype, array.ndim, name=bound.name)
            self._cached[bound.name] = (None, data)
        data.set_value(array)
        return bound, data

    def _mapped(self, bound: Bound, array: np.memmap[Any, Any]) -> Data:
        """A memory-mapped file, mapped once as long as the same array comes again."""
        source, data = self._cached.get(bound.name, (None, None))
        if source is not array or data is None:
            data = make_data(self._engine, array, name=bound.name)
            # a copy, where the file could not be mapped, would be stale by the next call
            self._cached[bound.name] = (None if data.data.flags.writeable else array, data)
        return data

    def _called(self, bound: Bound) -> str:
        return f"the argument {bound.name!r} of the function {self.name!r}"

    def _plan(
        self,
        inputs: list[tuple[Bound, Any]],
        keywords: tuple[str, ...],
        batch: Any,
        slices: int,
        subset: tuple[Any, ...] | None,
    ) -> _Planned:
        scattered = {b.name: v for b, v in inputs if not b.broadcast}
        selection = self._select(scattered, batch)
        size = self._engine.size
        spans = split(0, selection.count if selection else size, size)
        used = [value for _, value in inputs if isinstance(value, Data)]
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
        split_at = len(arguments) - len(keywords)
        plan = CallPlan(
            function=self.number,
            args=tuple(arguments[:split_at]),
            kwargs=tuple(zip(keywords, arguments[split_at:], strict=True)),
            selection=chosen,
            spans=spans,
            slices=slices,
            unit=weight_unit(spans, slices) if selection else 1,
            subset=subset,
        )
        return _Planned(plan, used, self._engine)

    def _select(self, scattered: dict[str, Data], batch: Any) -> Selection | None:
        """The rows of the call, after the lengths of the scattered inputs have been compared."""
        if not scattered:
            if batch is not None:
                raise InvalidValue(
                    f"batch= selects rows of scattered inputs, but the function {self.name!r} got none."
                )
            return None
        for name, data in scattered.items():
            if data.ndim == 0:
                raise InvalidValue(
                    f"the argument {name!r} of the function {self.name!r} is scattered by rows, but "
                    f"has no dimensions: name it in bcast_inputs to give it to every rank whole."
                )
        whole = {n: len(d) for n, d in scattered.items() if batch is None or not d.minibatch}
        if len(set(whole.values())) > 1:
            listed = ", ".join(f"{name} has {rows}" for name, rows in whole.items())
            raise InvalidValue(
                f"the scattered inputs of the function {self.name!r} have different numbers of rows: "
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
                f"the minibatch {name!r} of the function {self.name!r} has {rows} rows, but batch= "
                f"reaches over {reach}: fill it with the rows of the batch."
            )

    def _argument(self, bound: Bound, value: Any, selection: Selection | None) -> Argument:
        if not isinstance(value, Data):
            return Constant(value)
        region, _ = value.input(self._engine, self._called(bound))
        if bound.broadcast:
            return Broadcast(region)
        return Scattered(region, selection.lowest if selection and value.minibatch else 0)

    def _index_data(self, indices: NDArray[np.int64]) -> Data:
        if self._indices is None:
            self._indices = Data(self._engine, np.int64, 1, name="batch")
        self._indices.set_value(indices, oversize=1.25)
        return self._indices


class _Planned:
    """A plan, pickled, with what the workers still need for it and what its outputs looked like.

    Plans of calls on whole ``Data`` are kept, found by the regions of the ``Data``: those are other
    objects as soon as anything about them has changed.
    """

    def __init__(self, plan: CallPlan, inputs: list[Data], engine: Engine) -> None:
        self.plan = plan
        self.payload = pickle.dumps(Call(plan), 5)
        self.segments = [(data.input(engine, "an input")[1], Access.READ) for data in inputs]
        self.known = False  # whether the workers have run it, and so have all that it needs
        self.key: tuple[Any, ...] | None = None
        self.collection: Collection | None = None


class _Bar:
    """A tqdm bar over the slices of all ranks."""

    def __init__(self, engine: Engine, name: str, plan: CallPlan) -> None:
        try:
            from tqdm.auto import tqdm  # noqa: PLC0415 - an optional package
        except ImportError:
            raise NotAvailable("progress=True needs tqdm: pip install tqdm.") from None
        self._engine = engine
        rows = [min(plan.slices, stop - start) for start, stop in plan.spans]
        self._slices = rows if plan.selection is not None else [1] * len(rows)
        self._bar = tqdm(total=sum(self._slices), desc=name, unit="slice")

    def update(self) -> None:
        done = self._engine.slices_done(self._slices)
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        self.update()
        self._bar.close()


def _snapshot(argument: Any) -> Any:
    """What a later call can use although the caller goes on writing to *argument*."""
    changes = isinstance(argument, np.ndarray | list) and not isinstance(argument, np.memmap)
    return copy.deepcopy(argument) if changes else argument


def _serial(argument: Any) -> Any:
    if not isinstance(argument, Data):
        return argument
    view = argument.data.view()
    view.flags.writeable = False
    return view


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))


def _slices(num_slices: Any) -> int:
    try:
        if isinstance(num_slices, bool):
            raise TypeError
        slices = operator.index(num_slices)
    except TypeError:
        raise InvalidType(
            f"num_slices must be an int of 1 or more; got {num_slices!r}, a {type(num_slices).__name__}."
        ) from None
    if slices < 1:
        raise InvalidValue(f"num_slices must be 1 or more; got {slices}.")
    return slices


def _unknown_rows(batch: Any) -> int:
    """Rows to select from where only minibatches are given: more than any batch can name."""
    if isinstance(batch, slice) and batch.stop is None:
        raise InvalidValue("a batch= of minibatch inputs only must say where it stops.")
    if isinstance(batch, list | tuple):
        is_mask = bool(batch) and all(isinstance(one, bool | np.bool_) for one in batch)
    else:
        is_mask = getattr(batch, "dtype", None) == np.bool_ and np.ndim(batch) == 1
    return len(batch) if is_mask else 2**62
