"""``Function``: one array function, run on all ranks at once.

plan     what every rank will do, in ``planner``: every error of use arises there
run      one command to all workers
collect  merge the outputs of the ranks, in ``results.collector``
"""

from __future__ import annotations

import contextlib
import functools
import sys
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import InvalidType, InvalidValue, counted
from ...messages import FunctionSpec, Phase
from ...plan.binding import Binder, Bound
from ...plan.outputs import check_modes, flatten, unflatten
from ...values.arrays import checked_bool
from ...values.foreign import library_of
from ..data import Data, make_data
from ..engine.nesting import check_alone, operation
from ..variables.mirror import Bridge
from ..variables.shared import Shared
from .distribution import Functions
from .planner import Planned, Planner
from .serial import run_alone

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
        """*finish* is for ``FunctionSpec``; *bridge* is for a graph with shared variables."""
        home.engine.require_ready()
        if not callable(fn):
            raise InvalidType(f"function() takes a callable, got {fn!r}, a {type(fn).__name__}.")
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Function) else fn
        self.name = name or _name_of(self.fn)
        self.output_modes = check_modes(outputs)
        checked = home.variables.check_updates(updates)
        sliced = home.variables.check_sliceable(sliceable_shareds)
        self.spec = FunctionSpec(self.name, self.fn, self.output_modes, checked, finish)
        self._home = home
        self._engine = home.engine
        self._bridge = bridge
        self._binder = Binder(self.fn, inputs, bcast_inputs, self.name)
        functools.update_wrapper(self, self.fn, updated=())
        self.number = home.add(self)
        self._planner = Planner(home, self._binder, self.spec, self.number, sliced)

    @property
    def update_modes(self) -> tuple[str, ...]:
        """The operations by which the new values of ``updates=`` accumulate over slices."""
        return tuple(op for _, op in self.spec.updates)

    def __repr__(self) -> str:
        return f"<synkro.Function {self.name!r}, outputs={self.output_modes!r}>"

    def __reduce__(self) -> Any:
        return _plain, (self.fn,)

    # ── calling ──────────────────────────────────────────────────────────────────────────────────

    @operation(unbroken=False)  # its arguments may be made by other calls
    def __call__(
        self,
        *args: Any,
        output_subset: Sequence[Any] | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int = 1,
        progress: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Run the function on all ranks and return its reduced outputs.

        Args:
            args, kwargs: the function's own arguments: ``Data``, or arrays, which are copied into
                shared memory first.  Scattered inputs have the same number of rows, at least one.
                Broadcast numbers arrive as they are.
            output_subset: indices (or keys) of the outputs to reduce and return.
            batch: which rows of the scattered inputs to use: an int (the first so many), a slice, a
                list or 1-d array of ints, or of bools, one a row.
            batch_s: which rows to use of what the workers hold already, of ``sliceable_shareds`` and of
                variables given as inputs: one selection for all ranks, in the same forms, or a list of
                them, one a rank.  All rows by default.
            num_slices: each rank computes its rows in so many pieces, one after the other, so that
                the function's own memory is bounded; the result is the same, but what the function
                itself changes it changes once for each piece.
            progress: show a bar over the slices of all ranks, by tqdm if that is installed; where there
                is no terminal and no notebook, a line now and then.

        Raises: UsageError for what cannot be run, before any worker is woken, and OutputError for
        results that do not fit ``outputs=``; WorkerError, WorkerDied, CallTimeout, SessionError.
        """
        calls = self._engine.calls
        with self._engine.lock:
            if calls:
                check_alone(self._engine, sys._getframe(1), self)
            calls.append(self)
            try:
                self._engine.rouse()
                trace = self._engine.trace
                if trace is None and self._bridge is None:
                    return self._call(args, kwargs, batch, batch_s, num_slices, output_subset, progress)
                tracing = trace.call(self.name, self.number) if trace else contextlib.nullcontext()
                with tracing, self._bridged():
                    if self._bridge is not None:
                        self._bridge.hand_out()
                    return self._call(args, kwargs, batch, batch_s, num_slices, output_subset, progress)
            finally:
                calls.pop()

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
        planned = self._planner.planned(args, kwargs, batch, batch_s, num_slices, output_subset)
        if not planned.known or self._home.settings_changed():
            self._home.bring(self)
        if not progress:
            return self._run(planned)
        plan = planned.plan
        slices = [min(plan.slices, stop - start) for start, stop in plan.spans]
        with self._home.progress(self.name, slices, "slice", Phase.RUNNING, Phase.MERGING) as on_tick:
            return self._run(planned, on_tick)

    @contextlib.contextmanager
    def _bridged(self) -> Iterator[None]:
        """Bring the shared variables of a graph to the workers before the block, and back after it."""
        if self._bridge is None:
            yield
            return
        with self._engine.lock:
            self._engine.require_ready()
            self._engine.settle()
            with self._bridge:
                yield

    @operation(unbroken=True)
    def _run(self, planned: Planned, on_tick: Callable[[], None] | None = None) -> Any:
        replies = self._engine.perform(planned.payload, planned.segments, on_tick)
        if not planned.known:
            self._planner.remember(planned)
        return planned.result(replies)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background: a future of what the call returns or raises.

        Submitted calls run in the order submitted; those that have not begun when the session is closed
        are cancelled (``concurrent.futures.CancelledError``), or, where they were about to begin, raise
        ``SessionClosed``.  Arrays and lists are copied now; variables and ``Data`` are read when the
        call runs, so do not write to them before the future is done.  A function that the workers do not
        have yet is pickled when its first call runs: ``distribute()`` sends it before.

        Nothing else waits for submitted calls: a plain call, a collective, ``get_value``, ``set_value``
        and ``save`` may overtake them.  At the end of the program, also after an exception, those that
        have not begun still run.
        """
        named = {name: _snapshot(value) for name, value in kwargs.items()}
        return self._home.submit(functools.partial(self, *map(_snapshot, args), **named))

    def as_serial(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain function once, in this process, on whole arrays; returns what it returns.

        ``Data`` are read-only in it, as on the workers.
        """
        leaves, form = self._planner.arguments.opened(self._binder.bind(args, kwargs))
        with self._bridged():
            return run_alone(self.spec, leaves, form, tuple(kwargs), self._home.variables.rng)

    as_theano = as_serial

    def build_inputs(
        self,
        *args: Any,
        force_cast: bool = False,
        oversize: float = 1.0,
        minibatch: bool | Sequence[bool] = False,
        **kwargs: Any,
    ) -> Any:
        """``Data`` with the contents of *args* and *kwargs*, named as the parameters.

        *force_cast* and *oversize* go to all, *minibatch* to the scattered ones, or each of its flags to
        one argument.  Returns a ``Data`` for one argument, else a tuple of them, in this order.
        """
        types = getattr(self.fn, "input_types", {})
        bound = self._binder.bind(args, kwargs)
        made = tuple(
            make_data(
                self._engine,
                each.value,
                dtype=types[each.name].dtype if each.name in types else None,
                force_cast=force_cast,
                oversize=oversize,
                minibatch=flag,
                name=each.name,
            )
            for each, flag in zip(bound, self._minibatch_flags(minibatch, bound), strict=True)
        )
        return made[0] if len(made) == 1 else made

    def _minibatch_flags(self, given: Any, bound: Sequence[Bound]) -> list[bool]:
        """Whether each argument is a minibatch; *given* is a flag each, or one for the scattered."""
        if not isinstance(given, list | tuple):
            flag = checked_bool(given, "minibatch")
            return [flag and not each.broadcast for each in bound]
        if len(given) != len(bound):
            raise InvalidValue(
                f"minibatch= has {counted(len(given), 'flag')} for the "
                f"{counted(len(bound), 'argument')} of the function {self.name!r}: give one each, or "
                f"one for all."
            )
        return [checked_bool(flag, f"each flag of minibatch= for {self.name!r}") for flag in given]


def _snapshot(argument: Any) -> Any:
    """A copy of *argument* for a later call: the caller may go on writing to the original."""
    leaves, tree = flatten(argument)
    return unflatten(tree, map(_copied, leaves))


def _copied(leaf: Any) -> Any:
    if library_of(leaf) == "torch":
        return leaf.detach().clone()
    if library_of(leaf) or isinstance(leaf, np.memmap | np.generic | Data | Shared):
        return leaf
    changes = isinstance(leaf, bytearray | memoryview | array) or hasattr(leaf, "__array__")
    return np.array(leaf, subok=True) if changes else leaf


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def _name_of(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))
