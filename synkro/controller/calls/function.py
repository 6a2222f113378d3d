"""``Function``: one array function, run on all ranks at once.

plan     what every rank will do, in ``planner``: every error of use arises there
run      one command to all workers
collect  merge the outputs of the ranks, in ``results.collector``
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar

from ... import errors
from ...ipc.channel import Lane, OnTick
from ...messages import FunctionSpec, Phase, Release
from ...plan.binding import RESERVED, Binder, Bound
from ...plan.call import CallPlan
from ...plan.outputs import DEFAULT, check_modes, for_workers, modes_of, only_one, take_subset
from ...values.arrays import checked_bool, checked_seconds
from ..data.data import make_data
from ..engine.engine import Engine, State
from ..engine.nesting import check_alone, check_not_handling, operation
from ..objects.comparison import Assigned
from ..results.collector import Collection
from ..results.targets import Destinations, OpenTargets
from ..variables.mirror import Bridge
from ..variables.shared import check_there
from .check import compare, preserved, raise_refusal
from .distribution import SentFunction, Services
from .planner import Planned, Planner, Request, arrived, snapshot
from .replay import remembered
from .serial import run_alone

if TYPE_CHECKING:
    from concurrent.futures import Future

    from typing_extensions import Never, Self

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


P = ParamSpec("P")
R = TypeVar("R")

_PUBLIC = (
    *("fn", "name", "output_modes", "update_modes", "submit", "options", "check", "as_serial"),
    *("as_theano", "placement", "build_inputs"),
)


class Function(SentFunction, Generic[P, R]):
    """A function that runs on all ranks at once; made by ``function()``.

    For type checkers: *P* are the parameters of the plain function, and *R* is what a call returns.

    It works in the session that was current when it was made; if there was none, or that one was
    closed, in the current one.  Inside other functions, on the workers, it is the plain function again.

    Attributes:
        fn: the plain function.
        name: for messages.
        output_modes: the reduce operation of each output, nested as the outputs, or one for all.
    """

    def __init__(
        self, find: Callable[[str], Services], define: Definition | Callable[[Services], Definition]
    ) -> None:
        """*find* returns the services of the session, for a verb, or raises NotForked.

        *define* is what the function is, or makes that for a session, as of a graph.
        """
        super().__init__()
        self._find = find
        self._define = define
        self._engine: Engine | None = None
        if isinstance(define, Definition):
            self._take(define)
            with contextlib.suppress(errors.NotForked, errors.SessionClosed):
                self._settle()
        else:
            self._settle()

    def _take(self, definition: Definition) -> None:
        """Become what *definition* says, as far as that needs no session."""
        fn = definition.fn
        if not callable(fn):
            raise errors.InvalidType(f"function() takes a callable, got {errors.shortened(fn)}.")
        check_returns(fn, "function")
        self.fn: Callable[..., Any] = fn.fn if isinstance(fn, Function) else fn
        self.name: str = errors.named(definition.name or name_of(self.fn))
        alone = definition.target is not None and not isinstance(definition.target, list | tuple)
        modes = only_one if alone and definition.outputs is DEFAULT else definition.outputs
        self.output_modes: Any = check_modes(modes)
        self._definition = definition
        self._placed = definition.placed
        self._binder = Binder(
            self.fn, definition.inputs, definition.bcast_inputs, self.name, unsplit=alone
        )
        functools.update_wrapper(self, self.fn, updated=())

    def _settle(self) -> None:
        """Belong to the current session.  Raises: NotForked; UsageError if this cannot belong to it."""
        services = self._find(getattr(self, "name", "function"))
        engine, variables = services.engine, services.variables
        engine.require_ready()
        if not isinstance(self._define, Definition):
            self._take(self._define(services))
        definition = self._definition
        ranks = variables.targets.ranks(definition.target)
        checked = variables.check_updates(definition.updates)
        sliced = variables.check_sliceable(definition.sliceable_shareds)
        for variable in (*(each for each, _ in checked), *sliced):
            check_there(variable, variable.called(), ranks or engine.everyone.ranks)
        modes = for_workers(self.output_modes)
        self._join(services, FunctionSpec(self.name, self.fn, modes, checked, definition.finish))
        self._engine, self._variables, self._services = engine, variables, services
        self._bridge, self._warned = definition.bridge, False
        self.lane: Lane | None = None if ranks is None else engine.channel.lane(ranks)
        self._planner = Planner(services, self, self._binder.bind, sliced)

    def _settled(self) -> Engine:
        """The engine of the session that the function belongs to."""
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

    def __dir__(self) -> list[str]:
        return [*_PUBLIC, "__call__", "__doc__", "__name__", "__signature__", "__wrapped__"]

    def __reduce__(self) -> Any:
        return _plain, (self.fn,)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Function[P, R]:
        """A function of a copy of the object, if this one is a method, as in a copy of an estimator."""
        if not isinstance(self._define, Definition):
            return self
        return Function(self._find, replace(self._define, fn=copy.deepcopy(self.fn, memo)))

    # ── calling ──────────────────────────────────────────────────────────────────────────────────

    def __call__(
        self,
        *args: Any,
        output_subset: Sequence[Any] | None = None,
        batch: Any = None,
        batch_s: Any = None,
        num_slices: int | str = 1,
        progress: bool = False,
        **kwargs: Any,
    ) -> R:
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
                itself changes it changes once for each piece.  ``"auto"``: in pieces of at least 2 MB
                of input rows, by sizes and the number of workers alone, so that equal calls give equal
                bits; in one where pieces would show, in ``outputs=None`` and ``updates=``.  With
                ``"auto"``, not with a number, collectives are refused.
            progress: show a bar over the slices, by tqdm if that is installed; where there is no
                terminal and no notebook, a line now and then.  A slice counts when all ranks have
                computed theirs.

        Raises: UsageError for what cannot be run, before any worker is woken, and OutputError for
        results that do not fit ``outputs=``; WorkerError, WorkerDied, CallTimeout, SessionError.
        """
        request = Request(args, kwargs, batch, batch_s, num_slices, output_subset, progress)
        try:
            made: R = self.call_as(request)
        except BaseException as error:
            raise errors.folded(error)  # noqa: B904  it is the same one
        return made

    @operation(unbroken=False)  # its arguments may be made by other calls
    def call_as(self, request: Request, engine: Engine | None = None) -> Any:
        """Make the call of a *request* in its turn, in the session of *engine*, or else the current."""
        if engine is None:
            engine = self._engine
            if engine is None or engine.state is _CLOSED:
                engine = self._settled()
        lane = self.lane
        if lane is not None and not engine.turns.inside:
            return engine.turns.run(lane.members, functools.partial(self.call_as, request, engine))
        calls = engine.calls
        check_not_handling()
        with engine.lock:
            if engine.turns.line:
                engine.turns.wait_for_all()
            if calls:
                check_alone(engine, sys._getframe(1), self)
            calls.append(self)
            try:
                engine.wake_early()
                trace, bridge = engine.trace, self._bridge
                if trace is None and bridge is None and request.limit is None:
                    return self._made(request)
                traced = trace.call(self.name, self.number) if trace else contextlib.nullcontext()
                with engine.turns.limited(request.limit), traced, self._bridged():
                    if bridge is not None:
                        bridge.hand_out()
                    return self._made(request)
            except errors.WorkerError as error:
                raise remembered(error, self._services, self, self._planner.again(request))  # noqa: B904
            finally:
                calls.pop()

    def _made(self, request: Request) -> Any:
        if self._placed is not None and request.output_subset is not None:
            whole = self._made(replace(request, output_subset=None))
            return take_subset(tuple(request.output_subset), whole, "outputs=")
        if self.lane is None:
            planned = self._planner.planned(request)
            news = self._has_news() or request.view is not None
            assigned = self._bring(request.view) if news else ()
        else:
            assigned, news = (), self._has_news() or request.view is not None
            planned = self._services.engine.turns.widening(lambda: self._planned_apart(request, news))
        targets, plan = None, planned.plan
        if request.out is not None:
            given, outputs = (request.args, request.kwargs), self._services.outputs
            targets = request.out.opened(outputs, self.name, self.output_modes, plan, given)
            if planned.collection is not None:
                planned.collection.foresee(targets)
        if not request.progress:
            return self._run(planned, None, assigned, targets)
        slices = [min(plan.slices, stop - start) for start, stop in plan.spans]
        bar = self._distribution.progress(
            self.name, slices, "slice", Phase.RUNNING, Phase.MERGING, lane=self.lane
        )
        with bar as on_tick:
            return self._run(planned, on_tick, assigned, targets)

    def _has_news(self) -> bool:
        """Whether the workers lack something that the function uses; it counts calls, too."""
        watch = self._watch
        return watch is None or not watch.same() or self._distribution.settings_changed()

    def _planned_apart(self, request: Request, news: bool) -> Planned:
        """The plan of a call on some ranks, after all ranks have what the function uses, if there is
        *news* of that."""
        planned = self._planner.planned(request)
        assigned = self._bring(request.view) if news else ()
        if assigned:
            assert self._watch is not None
            with self._objects.assigning(self._watch, assigned, pickle.dumps(Release(), 5)) as payload:
                self._services.engine.perform(payload, ())
        return planned

    @contextlib.contextmanager
    def _bridged(self) -> Iterator[None]:
        """Bring the shared variables of a graph to the workers before the block, and back after it."""
        if self._bridge is None:
            yield
            return
        engine = self._settled()
        with engine.lock:
            engine.wait_until_ready()
            engine.settle()
            with self._bridge:
                yield

    @operation(unbroken=True)
    def _run(
        self,
        planned: Planned,
        on_tick: OnTick = None,
        assigned: Sequence[Assigned] = (),
        targets: OpenTargets | None = None,
    ) -> Any:
        replacement = self._services.replacement
        if not replacement.always:
            replacement.note_call()
            return self._ran(planned, on_tick, assigned, targets)
        return replacement.call(self, functools.partial(self._ran, planned, on_tick, assigned, targets))

    def _ran(
        self,
        planned: Planned,
        on_tick: OnTick,
        assigned: Sequence[Assigned],
        targets: OpenTargets | None,
    ) -> Any:
        """The result of a call."""
        engine: Any = self._engine
        watch: Any = self._watch
        try:
            if assigned:
                with self._objects.assigning(watch, assigned, planned.payload) as payload:
                    replies = engine.perform(payload, planned.segments, on_tick)
            else:
                replies = engine.perform(planned.payload, planned.segments, on_tick, None, self.lane)
        except errors.WorkerError:
            watch.look_at_all()  # before the next call the program may mend, or import, anything
            raise
        if self.lane is not None:
            replies = dict(zip(self.lane.ranks, replies, strict=True))
        if not planned.known:
            self._planner.remember(planned)
        collection = planned.collection
        if collection is None or collection.replies != replies:
            collection = planned.collect(self._collected(planned.plan, replies))
        result = collection.result(targets)
        return result if self._placed is None else self._placed.outputs(result)

    def _collected(self, plan: CallPlan, replies: Any) -> Collection:
        """What makes results of *replies*; it warns, once, of outputs that look like rows."""
        home, keep, load = self._services.outputs, self._variables.keep, self._objects.load
        collection = Collection(home, self.name, self.output_modes, plan, replies, keep, load)
        warning = "" if self._warned else collection.warning(hasattr(self.fn, "input_types"))
        if warning:
            self._warned = True
            errors.warn(warning)
        return collection

    def submit(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Call the function in the background: a future of what the call returns or raises.

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
        return self.submit_as(args, kwargs)

    def submit_as(self, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any) -> Future[Any]:
        """``submit``, of a request that is made *how* ``Request.of`` says."""
        given, by_name = tuple(map(snapshot, args)), {n: snapshot(v) for n, v in kwargs.items()}
        engine = self._settled()
        if self._watch is None:
            engine.turns.run(frozenset(), lambda: engine.turns.widening(self._bring))
        assert self._watch is not None
        self._watch, view = self._objects.view(self, self._watch)

        def call() -> Any:
            now = (arrived(each, self.name) for each in (given, by_name))
            return self.call_as(Request.of(*now, view=view, **how), engine)

        return self._services.background.submit((self.lane or engine.everyone).ranks, call)

    def options(
        self, *, timeout: float | None = None, out: Any = None, **unknown: Never
    ) -> Options[P, R]:
        """The function with options of its calls: ``f.options(timeout=2.0)(x)``, or ``….submit(x)``.

        Args:
            timeout: seconds that a call may take; None for what ``fork(timeout=)`` says.
            out: where outputs go that are gathered: an array, a ``Data``, a memory-mapped array or a
                zarr array of their shape and dtype, which the call returns; of several outputs a dict,
                tuple or list, nested as they are, with None for those that come back as usual.

        Raises: InvalidType, InvalidValue.
        """
        where = {name: f"options(…)(x, {name}=…), as an argument of the call" for name in RESERVED}
        for name in unknown:
            errors.check_keywords("options()", [name], ["timeout", "out"], where.get(name, ""))
        seconds = None if timeout is None else checked_seconds(timeout, "timeout")
        if out is not None and self._placed is not None:
            raise errors.InvalidValue(
                f"out= takes the rows of all ranks, and the graph of {self.name!r} runs once, over its "
                f"devices: take the result, and then target[...] = result."
            )
        return Options(self, seconds, None if out is None else Destinations(out))

    def check(self, *args: Any, batch: Any = None, **kwargs: Any) -> R:
        """Compare the result of a call with that of the plain function, run once on the same rows.

        The plain function runs on the master rank, on all rows; variables, objects that functions use
        and random generators are put back before the call.  The arguments are those of a call; *batch*
        selects rows as there.

        Returns the result of the call.

        Raises: OutputError for an output that differs by more than rounding; UsageError for a function
        that uses collectives or draws from ``rng()``; as a call.
        """
        engine = self._settled()
        if self._placed is not None:
            raise errors.UsageError(
                f"check() compares calls whose rows are split over ranks; the graph of {self.name!r} "
                f"runs once, over its devices: compare with its as_serial()."
            )
        request = Request.of(args, {"batch": batch, **kwargs})
        if request.batch_s is not None:
            raise errors.InvalidValue("check() compares calls without batch_s=.")
        lane = self.lane
        master = self._variables.collectives.master_rank if lane is None else lane.ranks[0]
        with engine.lock:
            engine.turns.wait_for_all()
            if self._bring() and self._watch is not None:
                self._bring(self._watch.comparison.look())
            with preserved(engine, self) as put_back:
                planned = self._planner.planned(plain := replace(request, num_slices=1, alone=master))
                try:
                    with self._bridged():
                        expected = self._run(planned)
                except errors.WorkerError as error:
                    raise_refusal(error)
                    raise remembered(error, self._services, self, self._planner.again(plain))  # noqa: B904
                put_back()
                result: R = self.call_as(request)
        compare(self.name, modes_of(request.output_subset, self.output_modes), result, expected)
        return result

    def as_serial(self, *args: P.args, **kwargs: P.kwargs) -> Any:
        """Run the plain function once, in this process, on whole arrays; returns what it returns.

        ``Data`` are read-only in it, as on the workers.
        """
        self._settled()
        leaves, form = self._planner.arguments.opened(self._binder.bind(args, kwargs))
        with self._bridged():
            return run_alone(self.spec, leaves, form, tuple(kwargs), self._variables.rng)

    as_theano = as_serial

    def placement(self) -> PlacementTable:
        """Which operations of a placed graph run where, and what moves between devices: a table.

        Its lines have an ``operation``, a ``device`` (a list, where each of several computes it for
        itself; of a transfer the pair of devices) and ``nbytes``: what it moved in the last call.

        Raises: UsageError for another function.
        """
        self._settled()
        if self._placed is None:
            raise errors.UsageError(
                f"placement() is for graphs of PyTensor with placed variables or transfers; the "
                f"function {self.name!r} runs on its ranks as a whole."
            )
        return self._placed.placement(self._variables.targets.each)

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
        bound, types = self._binder.bind(args, kwargs), getattr(self.fn, "input_types", {})
        flags = _minibatch_flags(minibatch, bound, name_of(self.fn))
        dtypes = [types[each.name].dtype if each.name in types else None for each in bound]
        make = functools.partial(make_data, engine, force_cast=force_cast, oversize=oversize)
        made = tuple(
            make(each.value, dtype=dtype, minibatch=flag, name=each.name)
            for each, flag, dtype in zip(bound, flags, dtypes, strict=True)
        )
        return made[0] if len(made) == 1 else made


def _minibatch_flags(given: Any, bound: Sequence[Bound], name: str) -> list[bool]:
    """Whether each argument is a minibatch; *given* is a flag each, or one for the scattered."""
    if not isinstance(given, list | tuple):
        flag = checked_bool(given, "minibatch")
        return [flag and not each.broadcast for each in bound]
    if len(given) != len(bound):
        raise errors.InvalidValue(
            f"minibatch= has {errors.counted(len(given), 'flag')} for the "
            f"{errors.counted(len(bound), 'argument')} of the function {name!r}: give one each, or "
            f"one for all."
        )
    return [checked_bool(flag, f"each flag of minibatch= for {name!r}") for flag in given]


def _plain(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn


def name_of(fn: Any) -> str:
    """What a function is called in messages."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return errors.named(str(getattr(fn, "__name__", type(fn).__name__)))


def check_returns(fn: Callable[..., Any], verb: str) -> None:
    """Raises: InvalidType if *fn* returns no result: it is a coroutine, or a generator."""
    forms = fn, getattr(fn, "__call__", None)  # noqa: B004  the method, of an object that is called
    if any(map(inspect.iscoroutinefunction, forms)):
        kind = "async"
    elif any(map(inspect.isgeneratorfunction, forms)) or any(map(inspect.isasyncgenfunction, forms)):
        kind = "a generator function"
    else:
        return
    raise errors.InvalidType(
        f"{verb}() takes a function that returns its result; {name_of(fn)!r} is {kind}: call it in a "
        f"function that returns what it makes, such as a list."
    )


@dataclass(frozen=True)
class Options(Generic[P, R]):
    """A function, to be called with options; made by ``Function.options``.

    Attributes:
        function: the function.
        timeout: seconds that a call may take; None for what ``fork(timeout=)`` says.
        out: where gathered outputs go; None for new memory.
    """

    function: Function[P, R]
    timeout: float | None
    out: Destinations | None = None

    def __reduce__(self) -> Any:
        return self.function.__reduce__()  # on the workers it is the plain function

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Options[P, R]:
        return Options(copy.deepcopy(self.function, memo), self.timeout, self.out)

    @property
    def name(self) -> str:
        """What the function is called in messages."""
        return self.function.name

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(
                f"options are of calls, f.options(…)(x) and f.options(…).submit(x), and have no "
                f"{name!r}: use the function without them, f.{name}."
            )

    def options(self, **later: Any) -> Options[P, R]:
        """The function with these options and its own, of which the later ones win."""
        new = self.function.options(**later)
        timeout = new.timeout if "timeout" in later else self.timeout
        return Options(self.function, timeout, new.out if "out" in later else self.out)

    def __call__(self, *args: Any, **kwargs: Any) -> R:
        """Call the function; arguments, result and errors are those of a plain call."""
        request = Request.of(args, kwargs, limit=self.timeout, out=self.out)
        try:
            made: R = self.function.call_as(request)
        except BaseException as error:
            raise errors.folded(error)  # noqa: B904  it is the same one
        return made

    def submit(self, *args: Any, **kwargs: Any) -> Future[R]:
        """Call the function in the background, as ``Function.submit``; the time counts from when the
        call runs."""
        return self.function.submit_as(args, kwargs, limit=self.timeout, out=self.out)
