"""``Function``: one array function, run on all ranks at once.

plan     what every rank will do, in ``planner``: every error of use arises there
run      one command to all workers
collect  merge the outputs of the ranks, in ``results.collector``
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import sys
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import (
    InvalidType,
    InvalidValue,
    NotForked,
    SessionClosed,
    UsageError,
    WorkerError,
    counted,
)
from ...messages import FunctionSpec, Phase, Release
from ...plan.binding import RESERVED, Binder, Bound
from ...plan.outputs import DEFAULT, check_modes, flatten, for_workers, only_one, take_subset, unflatten
from ...storage.files import is_stored
from ...values.arrays import checked_bool
from ...values.foreign import is_future, library_of
from ..data import Data, make_data
from ..engine.engine import Engine, State
from ..engine.nesting import check_alone, operation
from ..objects.glances import Assigned
from ..objects.walk import Look
from ..results.targets import Destinations, OpenTargets
from ..stored import StoredData
from ..variables.mirror import Bridge
from ..variables.shared import Shared, check_there
from .carried import Carried
from .check import compare, raise_refusal
from .distribution import Functions
from .options import Options, options_of
from .planner import Planned, Planner
from .serial import run_alone
from .submitted import result_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from ...graphs.placed import Assembly, PlacementTable


_CLOSED = State.CLOSED  # looking into an enum takes as long as all else that is looked at


@dataclass(frozen=True)
class Definition:
    """What a function is, without a session: the arguments of ``function()``.

    *finish* is for ``FunctionSpec``; *bridge* is for a graph with shared variables, *placed* for one
    that runs over several devices.
    """

    fn: Callable[..., Any]
    inputs: str | Sequence[str] | None
    outputs: Any
    bcast_inputs: str | Sequence[str] | None
    updates: Any
    sliceable_shareds: Any
    name: str | None
    finish: Callable[[int], None] | None = None
    bridge: Bridge | None = None
    target: Any = None
    placed: Assembly | None = None


class Function(Carried):
    """A function that runs on all ranks at once; made by ``function()``.

    It works in the session that was current when it was made; if there was none, or that one was
    closed, in the current one.  Inside other functions, on the workers, it is the plain function again.

    Attributes:
        fn: the plain function.
        name: for messages.
        output_modes: the reduce operation of each output, nested as the outputs, or one for all.
    """

    def __init__(
        self, home: Callable[[str], Functions], define: Definition | Callable[[Functions], Definition]
    ) -> None:
        """*home* returns the functions of the session, for a verb, or raises NotForked.

        *define* is what the function is, or makes that for a session, as of a graph.
        """
        super().__init__()
        self._find_home = home
        self._define = define
        self._engine: Engine | None = None
        self._out: Destinations | None = None  # of the call that begins
        self._brought = 0  # the thread in which a submitted call runs, for which all was brought
        if isinstance(define, Definition):
            self._take(define)
            with contextlib.suppress(NotForked, SessionClosed):
                self._settle()
        else:
            self._settle()

    def _take(self, definition: Definition) -> None:
        """Become what *definition* says, as far as that needs no session."""
        fn = definition.fn
        if not callable(fn):
            raise InvalidType(f"function() takes a callable, got {fn!r}, a {type(fn).__name__}.")
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Function) else fn
        self.name = definition.name or name_of(self.fn)
        alone = definition.target is not None and not isinstance(definition.target, list | tuple)
        modes = only_one if alone and definition.outputs is DEFAULT else definition.outputs
        self.output_modes = check_modes(modes)
        self._definition = definition
        self._placed = definition.placed
        self._binder = Binder(
            self.fn, definition.inputs, definition.bcast_inputs, self.name, unsplit=alone
        )
        functools.update_wrapper(self, self.fn, updated=())

    def _settle(self) -> None:
        """Belong to the current session.  Raises: NotForked; UsageError if this cannot belong to it."""
        home = self._find_home(getattr(self, "name", "function"))
        home.engine.require_ready()
        if not isinstance(self._define, Definition):
            self._take(self._define(home))
        definition = self._definition
        ranks = home.variables.targets.ranks(definition.target)
        checked = home.variables.check_updates(definition.updates)
        sliced = home.variables.check_sliceable(definition.sliceable_shareds)
        for variable in (*(each for each, _ in checked), *sliced):
            check_there(variable, variable.called(), ranks or home.engine.everyone.ranks)
        modes = for_workers(self.output_modes)
        self._join(home, FunctionSpec(self.name, self.fn, modes, checked, definition.finish))
        self._engine = home.engine
        self._bridge = definition.bridge
        self.lane = None if ranks is None else home.engine.channel.lane(ranks)
        self._planner = Planner(
            home, self._binder, self.spec, self.output_modes, self.number, sliced, self.lane
        )

    def _settled(self) -> Engine:
        """The engine of the session that this belongs to."""
        if self._engine is None or self._engine.state is State.CLOSED:
            self._settle()
        assert self._engine is not None
        return self._engine

    @property
    def update_modes(self) -> tuple[str, ...]:
        """The operations by which the new values of ``updates=`` accumulate over slices."""
        self._settled()
        return tuple(op for _, op in self.spec.updates)

    def __repr__(self) -> str:
        return f"<synkro.Function {self.name!r}, outputs={self.output_modes!r}>"

    def __reduce__(self) -> Any:
        return _plain, (self.fn,)

    def __copy__(self) -> Function:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Function:
        """The same of a copy of the object, if it is a method, as in a copy of an estimator."""
        if not isinstance(self._define, Definition):
            return self
        return Function(self._find_home, replace(self._define, fn=copy.deepcopy(self.fn, memo)))

    # ── calling ──────────────────────────────────────────────────────────────────────────────────

    @operation(unbroken=False)  # its arguments may be made by other calls
    def __call__(
        self,
        *args: Any,
        output_subset: Sequence[Any] | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | str = 1,
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
                itself changes it changes once for each piece.  ``"auto"``: in as many pieces as fit the
                caches, by the sizes of the inputs alone, so that equal calls give equal bits; in one
                where pieces would show, in ``outputs=None`` and ``updates=``.  Collectives are refused.
            progress: show a bar over the slices, by tqdm if that is installed; where there is no
                terminal and no notebook, a line now and then.  A slice counts when all ranks have
                computed theirs.

        Raises: UsageError for what cannot be run, before any worker is woken, and OutputError for
        results that do not fit ``outputs=``; WorkerError, WorkerDied, CallTimeout, SessionError.
        """
        engine = self._engine
        if engine is None or engine.state is _CLOSED:
            engine = self._settled()
        lane = self.lane
        if lane is not None and not engine.lock._is_owned():  # type: ignore[attr-defined]
            options = {"output_subset": output_subset, "batch": batch, "batch_s": batch_s}
            options |= {"num_slices": num_slices, "progress": progress}
            return engine.beside(lane, functools.partial(self, *args, **options, **kwargs))
        calls = engine.calls
        with engine.lock:
            if engine.turns.line:
                engine.turns.land()
            if calls:
                check_alone(engine, sys._getframe(1), self)
            calls.append(self)
            try:
                engine.rouse()
                trace = engine.trace
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
        num_slices: int | str,
        output_subset: Sequence[Any] | None,
        progress: bool,
    ) -> Any:
        out, self._out = self._out, None
        if self._placed is not None and output_subset is not None:
            whole = self._call(args, kwargs, batch, batch_s, num_slices, None, progress)
            return take_subset(tuple(output_subset), whole, "outputs=")
        if self.lane is None:
            planned = self._planner.planned(args, kwargs, batch, batch_s, num_slices, output_subset)
            watch = self._watch
            assigned: Sequence[Assigned] = ()
            if watch is None or not watch.same() or self._home.settings_changed():
                assigned = self._bring()
        else:
            planned = self._home.engine.turns.widening(
                lambda: self._planned_apart(args, kwargs, batch, batch_s, num_slices, output_subset)
            )
            assigned = ()
        targets = None if out is None else planned.opened(out, (args, kwargs))
        if not progress:
            return self._run(planned, None, assigned, targets)
        plan = planned.plan
        slices = [min(plan.slices, stop - start) for start, stop in plan.spans]
        lane = self.lane
        bar = self._home.progress(self.name, slices, "slice", Phase.RUNNING, Phase.MERGING, lane=lane)
        with bar as on_tick:
            return self._run(planned, on_tick, assigned, targets)

    def _planned_apart(self, *call: Any) -> Planned:
        """The plan of a call on some ranks, after all ranks have what the function uses."""
        planned = self._planner.planned(*call)
        assigned = self._bring()
        if assigned:
            assert self._watch is not None
            nothing = pickle.dumps(Release(), 5)
            with self._home.objects.assigning(self._watch, assigned, nothing) as payload:
                self._home.engine.perform(payload, ())
        return planned

    def _bring(self, view: Look | None = None) -> Sequence[Assigned]:
        return () if self._brought == threading.get_ident() else super()._bring(view)

    @contextlib.contextmanager
    def _bridged(self) -> Iterator[None]:
        """Bring the shared variables of a graph to the workers before the block, and back after it."""
        if self._bridge is None:
            yield
            return
        engine = self._settled()
        with engine.lock:
            engine.turns.land()
            engine.require_ready()
            engine.settle()
            with self._bridge:
                yield

    @operation(unbroken=True)
    def _run(
        self,
        planned: Planned,
        on_tick: Callable[[], None] | None = None,
        assigned: Sequence[Assigned] = (),
        targets: OpenTargets | None = None,
    ) -> Any:
        engine: Any = self._engine
        watch: Any = self._watch
        try:
            if assigned:
                with self._home.objects.assigning(watch, assigned, planned.payload) as payload:
                    replies = engine.perform(payload, planned.segments, on_tick)
            else:
                replies = engine.perform(planned.payload, planned.segments, on_tick, None, self.lane)
        except WorkerError:
            watch.look_at_all()  # before the next call the program may mend, or import, anything
            raise
        if self.lane is not None:
            replies = dict(zip(self.lane.ranks, replies, strict=True))
        if not planned.known:
            self._planner.remember(planned)
        result = planned.result(replies, targets)
        return result if self._placed is None else self._placed.outputs(result)

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call it in the background: a future of what the call returns or raises.

        Submitted calls run in the order submitted; those that have not begun when the session is closed
        are cancelled (``concurrent.futures.CancelledError``), or, where they were about to begin, raise
        ``SessionClosed``.  Arrays and lists are copied now, and the function sees its globals as they
        are now; variables and ``Data`` are read when the call runs, so do not write to them before the
        future is done.  A function that the workers do not have yet is sent first, which waits for the
        call that is running.

        Nothing else waits for submitted calls: a plain call, a collective, ``get_value``, ``set_value``
        and ``save`` may overtake them.  At the end of the program, also after an exception, those that
        have not begun still run.
        """
        return self.submit_as(self, args, kwargs)

    def submit_as(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Future[Any]:
        """``submit``, where *call* makes the call: this, or this with options."""
        named = {name: _snapshot(value) for name, value in kwargs.items()}
        given = tuple(map(_snapshot, args))
        engine = self._settled()
        if self._watch is None:
            engine.turns.run(frozenset(), lambda: engine.turns.widening(self._bring))
        assert self._watch is not None
        self._watch, view = self._home.objects.view(self, self._watch)
        later = functools.partial(self._run_submitted, call, engine, view, given, named)
        lane = self.lane or engine.everyone
        return self._home.submit(lane.ranks, later)

    def _run_submitted(
        self,
        call: Callable[..., Any],
        engine: Engine,
        view: Look,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """The call, of what its globals were when it was submitted."""
        given, named = (_arrived(each, self.name) for each in (args, kwargs))
        later = functools.partial(self._call_as_it_was, call, engine, view, given, named)
        if self.lane is not None:
            return engine.beside(self.lane, later)
        with engine.lock:
            engine.turns.land()
            return later()

    def _call_as_it_was(
        self, call: Callable[..., Any], engine: Engine, view: Look, args: Any, kwargs: Any
    ) -> Any:
        engine.require_ready()
        engine.turns.widening(lambda: self._bring(view))
        self._brought = threading.get_ident()
        try:
            return call(*args, **kwargs)
        finally:
            self._brought = 0

    def call_within(
        self, seconds: float | None, args: Any, kwargs: Any, out: Destinations | None
    ) -> Any:
        """Call it; it may take *seconds*, or, with None, as long as all others; outputs go to *out*."""
        engine = self._settled()

        def call() -> Any:
            with engine.turns.limited(seconds):
                self._out = out
                try:
                    return self(*args, **kwargs)
                finally:
                    self._out = None

        lane = self.lane
        return call() if lane is None else engine.beside(lane, call)

    def options(self, *, timeout: float | None = None, out: Any = None, **unknown: Any) -> Options:
        """The function with options of its calls: ``f.options(timeout=2.0)(x)``, or ``….submit(x)``.

        Args:
            timeout: seconds that a call may take; None for what ``fork(timeout=)`` says.
            out: where outputs go that are gathered: an array, a ``Data``, a memory-mapped array or a
                zarr array of their shape and dtype, which the call returns; of several outputs a dict,
                tuple or list, nested as they are, with None for those that come back as usual.

        Raises: InvalidType, InvalidValue.
        """
        return options_of(self, timeout, out, unknown, self._placed is not None)

    def check(self, *args: Any, batch: Any = None, **kwargs: Any) -> Any:
        """Call it, and compare the result with that of the plain function, run once on the same rows.

        The plain function runs on the master rank, on all rows; variables, objects that functions use
        and random generators are put back before the call.  The arguments are those of a call.

        Returns the result of the call.

        Raises: OutputError for an output that differs by more than rounding; UsageError for a function
        that uses collectives or draws from ``rng()``; as a call.
        """
        engine = self._settled()
        if self._placed is not None:
            raise UsageError(
                f"check() compares calls whose rows are split over ranks; the graph of {self.name!r} "
                f"runs once, over its devices: compare with its as_serial()."
            )
        inputs = {name: value for name, value in kwargs.items() if name not in RESERVED}
        if kwargs.get("batch_s") is not None:
            raise InvalidValue("check() compares calls without batch_s=.")
        lane = self.lane
        master = self._home.variables.collectives.master_rank if lane is None else lane.ranks[0]
        with engine.lock:
            engine.turns.land()
            if self._bring() and self._watch is not None:
                self._bring(self._watch.look())
            with self._home.objects.preserved(self) as put_back:
                subset = kwargs.get("output_subset")
                plan = self._planner.planned(args, inputs, batch, None, 1, subset, alone=master)
                try:
                    with self._bridged():
                        plain = self._run(plan)
                except WorkerError as error:
                    raise_refusal(error)
                    raise
                put_back()
                result = self(*args, batch=batch, **kwargs)
        modes = self.output_modes
        if subset is not None and isinstance(modes, tuple | list | dict):
            modes = take_subset(tuple(subset), modes, "outputs=")
        compare(self.name, modes, result, plain)
        return result

    def as_serial(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plain function once, in this process, on whole arrays; returns what it returns.

        ``Data`` are read-only in it, as on the workers.
        """
        self._settled()
        leaves, form = self._planner.arguments.opened(self._binder.bind(args, kwargs))
        with self._bridged():
            return run_alone(self.spec, leaves, form, tuple(kwargs), self._home.variables.rng)

    as_theano = as_serial

    def placement(self) -> PlacementTable:
        """Which operations of a placed graph run where, and what moves between devices: a table.

        Its lines have an ``operation``, a ``device`` (a list, where each of several computes it for
        itself; of a transfer the pair of devices) and ``nbytes``: what it moved in the last call.

        Raises: UsageError for another function.
        """
        self._settled()
        if self._placed is None:
            raise UsageError(
                f"placement() is for graphs of PyTensor with placed variables or transfers; the "
                f"function {self.name!r} runs on its ranks as a whole."
            )
        return self._placed.placement(self._home.variables.targets.each)

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
        engine = self._settled()
        return _inputs(engine, self.fn, self._binder.bind(args, kwargs), force_cast, oversize, minibatch)


def _inputs(
    engine: Engine, fn: Any, bound: Sequence[Bound], force_cast: bool, oversize: float, minibatch: Any
) -> Any:
    """``Data`` for the arguments of *fn*, with the types that it wants: one, or a tuple of them."""
    types = getattr(fn, "input_types", {})
    made = tuple(
        make_data(
            engine,
            each.value,
            dtype=types[each.name].dtype if each.name in types else None,
            force_cast=force_cast,
            oversize=oversize,
            minibatch=flag,
            name=each.name,
        )
        for each, flag in zip(bound, _minibatch_flags(minibatch, bound, name_of(fn)), strict=True)
    )
    return made[0] if len(made) == 1 else made


def _minibatch_flags(given: Any, bound: Sequence[Bound], name: str) -> list[bool]:
    """Whether each argument is a minibatch; *given* is a flag each, or one for the scattered."""
    if not isinstance(given, list | tuple):
        flag = checked_bool(given, "minibatch")
        return [flag and not each.broadcast for each in bound]
    if len(given) != len(bound):
        raise InvalidValue(
            f"minibatch= has {counted(len(given), 'flag')} for the "
            f"{counted(len(bound), 'argument')} of the function {name!r}: give one each, or "
            f"one for all."
        )
    return [checked_bool(flag, f"each flag of minibatch= for {name!r}") for flag in given]


def _snapshot(argument: Any) -> Any:
    """A copy of *argument* for a later call: the caller may go on writing to the original."""
    leaves, tree = flatten(
        argument, lambda value: type(value) in (dict, list) or isinstance(value, tuple)
    )
    return unflatten(tree, map(_copied, leaves))


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


def _arrived(arguments: Any, name: str) -> Any:
    """*arguments* of the function *name*, with results in the place of futures, after a wait for them.

    Raises: InvalidValue for the future of a call that failed, or was cancelled.
    """
    leaves, tree = flatten(
        arguments, lambda value: type(value) in (dict, list) or isinstance(value, tuple)
    )
    for index, leaf in enumerate(leaves):
        if is_future(leaf):
            leaves[index] = result_of(leaf, f"the function {name!r}")
    return unflatten(tree, iter(leaves))


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def name_of(fn: Any) -> str:
    """What a function is called in messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return str(getattr(fn, "__name__", type(fn).__name__))
