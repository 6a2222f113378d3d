"""``Function``: one array function, run on all ranks at once.

plan     what every rank will do, in ``planner``: every error of use arises until here
run      one command to all workers
collect  merge what the ranks have left, in ``results.collector``
"""

from __future__ import annotations

import copy
import functools
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidType, WorkerError
from ...messages import Phase
from ...plan.binding import Binder, Bound
from ...plan.outputs import check_modes, flatten, pair_of, unflatten
from ...values.arrays import checked_int
from ...values.cache import Cache
from ...values.foreign import handed, host_array, library_of
from ..data import Data, make_data
from ..progress import Progress
from ..results.collector import Collection
from ..variables.mirror import Bridge
from ..variables.shared import Shared
from .distribution import Functions
from .planner import SCALARS, Planned, Planner
from .serial import alone

if TYPE_CHECKING:
    from concurrent.futures import Future


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
        updates: Any,
        sliceable_shareds: Any,
        name: str | None,
        finish: Callable[[int], None] | None = None,
        bridge: Bridge | None = None,
    ) -> None:
        """As ``Session.function``; *finish* as in ``FunctionSpec``, *bridge* for a graph's variables."""
        home.engine.require_ready()
        if not callable(fn):
            raise InvalidType(f"function() takes a callable, got {fn!r}, a {type(fn).__name__}.")
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Function) else fn
        self.name = name or _name_of(self.fn)
        self.output_modes = check_modes(outputs)
        self.updates = home.variables.check_updates(updates)
        self.finish = finish
        self.bridge = bridge
        self._sliced = home.variables.check_sliceable(sliceable_shareds)
        self._home = home
        self._engine = home.engine
        self._binder = Binder(self.fn, inputs, bcast_inputs, self.name)
        self._quick: Cache[Any, Planned] = Cache()
        functools.update_wrapper(self, self.fn, updated=())
        self.number = home.add(self)
        self._planner = Planner(
            self._engine,
            home.variables,
            self._binder,
            self.name,
            self.number,
            self.output_modes,
            self._sliced,
            getattr(self.fn, "input_types", {}),
        )

    @property
    def update_modes(self) -> tuple[str, ...]:
        """The operations by which the new values of ``updates=`` accumulate over slices."""
        return tuple(op for _, op in self.updates)

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
            batch_s: which rows to use of what the workers hold already, of ``sliceable_shareds`` and of
                variables given as inputs: one selection for all ranks, in the same forms, or a list of
                them, one a rank.  All rows by default.
            num_slices: each rank computes its rows in so many pieces, one after the other, so that
                the function's own memory is bounded; the result is the same.
            output_subset: indices (or keys) of the outputs to reduce and return.
            progress: show a bar over the slices of all ranks, by tqdm if that is installed; where there
                is no terminal and no notebook, a line now and then.

        Raises: UsageError for what cannot be run, before any worker is woken, and OutputError for
        results that do not fit ``outputs=``; WorkerError, WorkerDied, CallTimeout, SessionError.
        """
        with self._engine.lock:
            if self._engine.trace is None:
                return self._call(args, kwargs, batch, batch_s, num_slices, output_subset, progress)
            with self._engine.trace.call(self.name, self.number):
                return self._call(args, kwargs, batch, batch_s, num_slices, output_subset, progress)

    def _call(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        batch_s: Any,
        num_slices: int,
        output_subset: Sequence[Any] | None,
        progress: bool,
    ) -> Any:
        self._engine.require_ready()
        if self._engine.open:
            self._engine.settle()
        if self.bridge is not None:
            self.bridge.before()
        if self._engine.on_gpus:
            for arg in (*args, *kwargs.values()):
                if isinstance(arg, Data):
                    arg.touch_if_shared()
        planned = None
        whole = batch is None and batch_s is None and output_subset is None
        if whole and type(num_slices) is int:  # True and 1.0 are equal to 1
            values = (*args, *kwargs.values()) if kwargs else args
            regions = [getattr(value, "region", None) for value in values]
            planned = self._quick.get((*regions, *kwargs, num_slices))
            if planned is None and (refilled := self._planner.refilled(values)):
                planned = self._quick.get((*refilled, *kwargs, num_slices))
        if planned is None:
            planned = self._planner.plan(
                args, kwargs, batch, batch_s, checked_int(num_slices, "num_slices", 1), output_subset
            )
        if not planned.known or self._home.settings_changed():
            self._home.bring(self)
        try:
            result = self._run_with_bar(planned) if progress else self._run(planned)
        except WorkerError:  # what the ranks have done by then is seen here, too
            if self.bridge is not None:
                self.bridge.after()
            raise
        if self.bridge is not None:
            self.bridge.after()
        return result

    def _run(self, planned: Planned, on_tick: Callable[[], None] | None = None) -> Any:
        replies = self._engine.run(planned.payload, planned.segments, on_tick=on_tick)
        if not planned.known:
            planned.known = True
            planned.segments = []  # no memory is kept with a plan
            self._planner.remember(planned)
            if planned.key is not None:
                self._quick[planned.key] = planned
        collection = planned.collection
        if collection is None or collection.replies != replies:
            collection = planned.collection = Collection(
                self._home.outputs,
                self.name,
                self.output_modes,
                planned.plan,
                replies,
                self._home.variables.keep,
            )
        return collection.result()

    def _run_with_bar(self, planned: Planned) -> Any:
        plan = planned.plan
        slices = [min(plan.slices, stop - start) for start, stop in plan.spans]
        totals = slices if plan.by_rows else [1] * len(slices)
        phases = (Phase.RUNNING, Phase.MERGING)
        with Progress(self.name, sum(totals), "slice") as progress:
            result = self._run(planned, lambda: progress.reach(self._engine.steps(totals, phases)))
            progress.reach(sum(totals))
        return result

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background: a future of what the call returns or raises.

        Submitted calls run in the order submitted; those that have not begun when the session is closed
        are cancelled (``concurrent.futures.CancelledError``), or, where they were about to begin, raise
        ``SessionClosed``.  Arrays and lists are copied now; variables and ``Data`` are read when the
        call runs, so do not write to them before the future is done.  Other calls of yours do not wait
        for those in the background.
        """
        named = {name: _snapshot(value) for name, value in kwargs.items()}
        return self._home.submit(functools.partial(self, *map(_snapshot, args), **named))

    def as_serial(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain function once, in this process, on whole arrays; returns what it returns.

        ``Data`` are read-only in it, as on the workers.
        """
        positional, named = self._binder.bind(args, kwargs)
        leaves, form = self._planner.opened([*positional, *named.values()])
        values = [_serial(leaf) for leaf in leaves]
        if form is not None:
            values = form.build(values)
        split_at = len(positional)
        if self.bridge is not None:
            with self._engine.lock:
                self.bridge.before()
        with alone(self._home.variables.rng):
            value = self.fn(*values[:split_at], **dict(zip(named, values[split_at:], strict=True)))
            if self.updates:
                value, new = pair_of(value, len(self.updates), self.name)
                for (variable, _), one in zip(self.updates, new, strict=True):
                    variable.value = one
            if self.finish is not None:
                self.finish(1)
        if self.bridge is not None:
            with self._engine.lock:
                self.bridge.after()
        return value

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
        types = getattr(self.fn, "input_types", {})
        return tuple(
            make_data(
                self._engine,
                bound.value,
                dtype=types[bound.name].dtype if bound.name in types else None,
                force_cast=force_cast,
                oversize=oversize,
                minibatch=minibatch and not bound.broadcast,
                name=bound.name,
            )
            for bound in (*positional, *named.values())
        )


def _snapshot(argument: Any) -> Any:
    """What a later call can use although the caller goes on writing to *argument*."""
    leaves, tree = flatten(argument)
    return unflatten(tree, map(_copied, leaves))


def _copied(leaf: Any) -> Any:
    if library_of(leaf) == "torch":
        return leaf.detach().clone()
    if library_of(leaf) or isinstance(leaf, np.memmap | Data | Shared):
        return leaf
    if isinstance(leaf, np.ndarray):
        return copy.deepcopy(leaf)
    changes = isinstance(leaf, bytearray | memoryview | array) or hasattr(leaf, "__array__")
    return np.array(leaf) if changes else leaf


def _serial(argument: Bound) -> Any:
    """An argument as a function in this process gets it."""
    value = argument.value
    if isinstance(value, Shared):
        value = value.value
    elif isinstance(value, Data):
        value = value.data.view()
        value.flags.writeable = False
    if argument.library == "numpy":
        return host_array(value)
    if argument.library is None or library_of(value) or isinstance(value, SCALARS):
        return value
    return handed(np.array(value), argument.library)  # a copy: tensors cannot be read-only


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))
