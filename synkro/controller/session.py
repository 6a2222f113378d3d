"""``Session``: the workers of this process, with the functions and the data that belong to them."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast

from .. import errors, here
from ..machine import choose_python
from ..memory.named import sweep
from ..memory.segment import descriptors_for
from ..messages import Gpus, Start
from ..packing import place
from ..plan.call import Region, aligned
from ..values.arrays import checked_bool, checked_int, checked_seconds
from .calls.background import Background
from .calls.distribution import Distribution, Services
from .calls.forms import MakesFunctions, as_method, make_function, signature_of_function, teach_transfers
from .calls.initializer import checked_initializer, prepared
from .calls.replacement import Replacement
from .data.attached import attach, make_ring
from .data.data import MakesData, make_data
from .engine.engine import Engine, State, end_trace_quietly
from .objects.objects import Objects
from .placement.choice import VARIABLE
from .placement.machines import machines_of
from .placement.placement import Placement, checked_fraction
from .placement.targets import Targets
from .progress import status_line
from .results.transfer import Outputs
from .tasks.forms import IteratesTasks, RunsTasks
from .tasks.maps import Maps
from .tracing.trace import Trace, checked_path, table
from .variables.collectives import Collectives, in_turn
from .variables.registry import Variables
from .variables.shared import MakesVariables

if TYPE_CHECKING:
    from .tracing.picture import Timeline

_OUTBOXES = 1 << 21
"""Bytes of all ranks' outboxes together.  The main process merges outputs that fit into their rank's
outbox; its work grows with the number of ranks.  All ranks together merge larger ones, which takes two
more commands.  ``benchmarks/reduction.py`` measures where the two ways cost the same."""


_traced_sessions = count(1)

TRACE = "SYNKRO_TRACE"
"""The environment variable that names a file for the trace of a whole session."""


Part = TypeVar("Part")
P = ParamSpec("P")
R = TypeVar("R")


def _method(
    part: Callable[[Session], Part], function: Callable[Concatenate[Part, P], R], name: str | None = None
) -> Callable[Concatenate[Session, P], R]:
    """A method of ``Session``: *function* of a *part* of it, with the same signature and docstring."""

    @functools.wraps(function)
    def method(self: Session, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(part(self), *args, **kwargs)
        except BaseException as error:
            raise errors.folded(error)  # noqa: B904  it is the same one

    method.__dict__["__signature__"] = as_method(function)
    method.__name__ = name or function.__name__
    method.__qualname__ = f"Session.{method.__name__}"
    return method


def _variables(session: Session) -> Variables:
    return session.services.variables


def _collectives(session: Session) -> Collectives:
    return session.services.variables.collectives


class Session(contextlib.AbstractContextManager["Session"]):
    """One worker process a device, and all that runs on them.

    It is what ``fork()`` makes and the functions of the module use.  Made by hand it is a context
    manager, closed at the end of its block; several may live side by side.

    Attributes:
        master_rank: the root of collectives that have one.
        services: the parts that its functions use; for Synkro's own extensions.
        maps: what runs its maps; for executors.
        hosts: the name and the ranks of each host.
    """

    def __init__(
        self,
        n_parallel: int | None = None,
        use_gpu: bool = True,
        master_rank: int = 0,
        profile_workers: bool = False,
        *,
        devices: str | Sequence[str] | None = None,
        threads_per_worker: int | None = None,
        start_timeout: float = 60.0,
        timeout: float | None = None,
        seed: int | None = None,
        preallocate: float | None = None,
        verbose: bool = True,
        hosts: str | os.PathLike[str] | Sequence[str] | None = None,
        launcher: str | os.PathLike[str] | None = None,
        host_timeout: float = 10.0,
        trusted_network: bool = False,
        python: str | os.PathLike[str] | None = None,
        replace: bool = False,
        initializer: Callable[..., Any] | None = None,
        initargs: Sequence[Any] = (),
    ) -> None:
        """Start the workers; see ``fork``."""
        _check_place(python)
        teach_transfers()
        place.found()  # which the workers need with the first function
        devices = _checked_devices(devices, use_gpu)
        _check_flags(profile_workers, replace)
        prepare = checked_initializer(initializer, initargs)
        seed = None if seed is None else _seed(seed)
        start_timeout = checked_seconds(start_timeout, "start_timeout")
        timeout = None if timeout is None else checked_seconds(timeout, "timeout")
        threads = _checked_early(threads_per_worker, master_rank, preallocate)
        traced, environment_value = _traced_to(os.environ.get(TRACE)), os.environ.get(VARIABLE)
        asked, began = devices is not None or bool(environment_value), time.monotonic()
        with descriptors_for("the workers could not be started"), contextlib.ExitStack() as undo:
            reached_by = launcher, host_timeout, trusted_network, start_timeout
            machines = machines_of(hosts, *reached_by, n_parallel, devices, environment_value)
            undo.callback(machines.pool.close)
            self.hosts: Final = machines.hosts
            say = status_line(verbose)
            if left := sweep():
                say(f"Synkro: removed {', '.join(left)}: a program that was killed had left that memory")
            placement = Placement(machines.assignments, preallocate, asked, machines.look)
            last_rank = len(machines.assignments) - 1
            self.master_rank: Final = checked_int(master_rank, "master_rank", 0, last_rank)
            for line in placement.before(sum(machines.cores)):
                say(line)
            environments = machines.environments(placement, threads, _seed(seed))
            how = timeout, verbose, bool(placement.gpus)
            self._engine: Engine = Engine(machines.pool, environments, *how)
            undo.callback(self._engine.close)
            problems = self._begin(placement, start_timeout, began, seed, profile_workers, replace)
            self._initializer = prepared(self.services, prepare)
            undo.pop_all()
        self.maps: Final = Maps(self.services)
        lines = machines.lines(time.monotonic() - began)
        for line in (*lines, *placement.after(self.master_rank, *problems)):
            say(line)
        self._trace = None if traced is None else self._engine.start_trace(traced)  # the last one

    def _begin(
        self,
        placement: Placement,
        start_timeout: float,
        began: float,
        seed: int | None,
        profiled: bool,
        replace: bool,
    ) -> tuple[str, str]:
        """Tell the workers who they are; they answer when they have imported all that they need.

        Returns why NCCL does not connect them, or an empty text, and why they do not open each other's
        device memory.
        """
        engine = self._engine
        share = aligned(_OUTBOXES // engine.size)
        segment = engine.allocate(engine.size * share)
        engine.at_close.callback(segment.close)  # until then workers know it, and keep it pinned
        outbox = Region(segment.number, 0, (engine.size, share), "|u1")
        token = os.urandom(8).hex()  # no other session has the same
        gpus, paths = None, None
        versions = None if engine.versions is None else engine.versions.region
        if placement.gpus:
            engine.channel.wait_for_gpus()
            gpus = Gpus(placement.indices, placement.linked, placement.preallocate, placement.near)
        if profiled:
            paths = tuple(
                os.path.abspath(f"synkro-{pid}-{token}-rank{rank}.prof")  # which nobody can guess
                for rank, pid in enumerate(engine.workers.pids)
            )
            engine.say(
                f"Synkro: the workers write profiles when they end: {', '.join(paths)} "
                f"(python -m pstats FILE shows one)"
            )
        cores = tuple(assignment.core for assignment in placement.assignments)
        master = self.master_rank
        seeded, seed = seed is not None, _seed(seed)
        start = Start(token, seed, seeded, master, outbox, cores, gpus, paths, engine.verbose, versions)
        replies = self._ready(start, start_timeout, began)
        problem = placement.problem or replies[0].problem
        outputs = Outputs(engine, segment.array(outbox), bool(placement.gpus) and not problem)
        targets = Targets(placement.assignments, [host.ranks for host in self.hosts])
        variables = Variables(engine, outputs, token, master, seed, targets)
        objects = Objects(engine, master)
        distribution, background = Distribution(engine, objects), Background(engine, variables)
        replacement = Replacement(engine, objects.handover, start, lambda: distribution.sent, replace)
        if replace and replacement.refusal is not None:
            raise errors.NotAvailable(f"{replacement.refusal} Leave replace=True out.")
        engine.guard_by(replacement)
        if replace:
            replacement.keep()
        parts = engine, outputs, variables, objects, distribution, background, replacement
        self.services: Services = Services(*parts)
        return problem, replies[0].apart

    def _ready(self, start: Start, seconds: float, began: float) -> list[Any]:
        """The workers' answers to *start*, for which hosts leave what they have not taken of *seconds*
        since they *began*."""
        left = max(0.1, seconds - (time.monotonic() - began)) if self._engine.has_hosts else seconds
        try:
            return self._engine.run(start, timeout=left)
        except errors.CallTimeout as late:
            raise _not_ready(late, seconds) from None

    # ── lifecycle ────────────────────────────────────────────────────────────────────────────────

    @property
    def n_parallel(self) -> int:
        """The number of workers."""
        return self._engine.size

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers, by rank."""
        return self._engine.workers.pids

    @property
    def state(self) -> State:
        """What the session can do."""
        return self._engine.state

    def close(self) -> None:
        """End the workers.  ``Data`` can still be read.  The second time it does nothing."""
        services = self.services
        services.background.cancel()
        self._engine.close()
        self.maps.close()
        for part in (services.objects, services.outputs, services.variables.collectives):
            part.close()

    def reseed(self, seed: int) -> None:
        """Seed all random generators anew, as ``seed=`` does at the start."""
        self.services.variables.reseed(seed := _seed(seed))
        self.services.replacement.reseed(seed)

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        workers = errors.counted(self.n_parallel, "worker")
        return f"<synkro.Session of {workers}, {self.state.name.lower()}>"

    # ── data and functions ───────────────────────────────────────────────────────────────────────

    data: Final = cast("MakesData", _method(lambda session: session._engine, make_data, "data"))
    attach: Final = _method(lambda session: session._engine, attach)
    ring: Final = _method(lambda s: (s._engine, s.services.background.await_all), make_ring, "ring")

    def _function(self, /, *args: Any, **kwargs: Any) -> Any:
        """A function that runs on all workers at once: of a callable, or of a graph of PyTensor's.

        Of a callable: ``function(fn=None, inputs=None, outputs="mean", bcast_inputs=None, updates=None,
        givens=None, sliceable_shareds=None, name=None, *, target=None)``.  Without *fn* it is a
        decorator.  (The signature that tools show is that of the classic form, below, where *outputs* is
        None, and no operation.)

        Args:
            fn: any callable over arrays that cloudpickle takes.
            inputs: names of the parameters whose rows are scattered; by default all but bcast_inputs,
                and none where *target* is one rank, which gets them whole.
            outputs: ``"mean"``, ``"sum"``, ``"prod"``, ``"max"``, ``"min"``: reduced over the ranks, a
                mean weighted by rows; ``"gather"``: concatenated along axis 0 in the order of the rows,
                lists as lists; None: the list of every rank's (and slice's) value, which may be anything
                that pickles; a function ``op(a, b)``, which merges these here, in their order;
                ``"keep"``: left on the workers, a handle is returned that other functions take as an
                input; ``[]``: nothing is returned.
                One for all, or nested as the function's result, one for each.  Left out, it is "mean",
                with a warning where an output has as many rows on every rank as the rank got; where
                *target* is one rank, it is what the function returned.
            bcast_inputs: names of the parameters that every rank sees whole: anything that pickles.
            updates: worker variables whose new values the function returns beside its outputs, as
                ``(outputs, new_values)``: a list of variables, or of pairs ``(variable, op)`` where *op*
                merges the new values of several slices ("mean" by default, weighted by rows).  They are
                put in place at the end of the call, so that all slices see the old values; each rank's
                in its own replica: to make the ranks agree, use all_reduce in the function.
            sliceable_shareds: worker variables whose rows take part in slicing and in ``batch_s=``:
                inside the function their value is the rows of the running piece.
            name: for messages; by default the function's own.
            target: where it runs: None for all ranks; one rank, by its number or a device that it alone
                is on; or a list of these.

        On CPUs inputs are read-only inside the function.

        Of a graph, in the classic form: ``function(inputs, outputs=None, bcast_inputs=None,
        updates=None, givens=None, sliceable_shareds=None, name=None, **kwargs)``.  *inputs* and
        *bcast_inputs* are lists of its variables; *outputs* one, a pair ``(variable, op)`` or a list of
        them, or None; *updates* a dict or pairs ``(shared variable, new value)``, or triples with the
        operation; *givens* what replaces variables; *sliceable_shareds* shared variables.  All other
        keywords go to ``pytensor.function``: ``mode``, ``on_unused_input``, ``allow_input_downcast`` …

        Raises: InvalidType, InvalidValue; NotAvailable; NotForked.
        """
        return make_function(lambda verb: self.services, *args, **kwargs)

    _function.__dict__["__signature__"] = signature_of_function
    _function.__name__, _function.__qualname__ = "function", "Session.function"
    if TYPE_CHECKING:

        @property
        def function(self) -> MakesFunctions: ...

    else:
        function = _function

    def distribute(self) -> None:
        """Send all functions that the workers do not have yet, pickled together.

        A function that was not distributed is sent alone, at its first call.  What functions share in
        this process (a model that two of them use) they share on every worker.

        Raises: InvalidType for a function that cannot be pickled; InvalidValue for one that binds names
        outside of it, or an object that has changed here and there; WorkerError if a worker cannot load
        it.
        """
        self.services.distribution.distribute()

    map: Final = cast("RunsTasks", _method(lambda session: session.maps, Maps.map))
    imap: Final = cast("IteratesTasks", _method(lambda session: session.maps, Maps.imap))
    push: Final = _method(lambda session: session.services.objects, Objects.push)
    fetch: Final = _method(lambda session: session.services.objects, Objects.fetch)

    @in_turn  # all replicas are of one moment, even if other calls run in the background
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all named variables, of all ranks, and the states of the ranks' generators to a file.

        *path* gets the suffix ``.npz``, if it has another.  The file is complete or not there: a crash
        while it is written leaves an older one of that name as it was.

        Raises: OSError.
        """
        with descriptors_for("the variables could not be saved"):
            from .variables import saving  # noqa: PLC0415  what it imports takes 1 MB in every worker

            saving.save(self.services.variables, path)

    @in_turn
    def load(self, path: str | os.PathLike[str]) -> None:
        """Set all named variables and generators to what ``save(path)`` wrote.

        The session goes on as it would have then.  It needs the same number of workers, and the same
        named variables.

        Raises: InvalidValue if they are not; OSError.
        """
        with descriptors_for("the variables could not be loaded"):
            from .variables import saving  # noqa: PLC0415

            saving.load(self.services.variables, path)

    # ── variables, and the collectives over them ─────────────────────────────────────────────────

    shared: Final = cast("MakesVariables", _method(_variables, Variables.shared))
    place: Final = _method(_variables, Variables.place)
    transfer: Final = _method(lambda session: session.services.background, Background.transfer)
    set_value: Final = _method(_collectives, Collectives.set_value)
    get_value: Final = _method(_collectives, Collectives.get_value)
    get_lengths: Final = _method(_collectives, Collectives.get_lengths)
    get_shapes: Final = _method(_collectives, Collectives.get_shapes)
    broadcast: Final = _method(_collectives, Collectives.broadcast)
    scatter: Final = _method(_collectives, Collectives.scatter)
    gather: Final = _method(_collectives, Collectives.gather)
    all_gather: Final = _method(_collectives, Collectives.all_gather)
    reduce: Final = _method(_collectives, Collectives.reduce)
    all_reduce: Final = _method(_collectives, Collectives.all_reduce)

    @property
    def variables(self) -> Session:
        """The session itself, so ``session.variables.all_reduce(w)`` is ``session.all_reduce(w)``."""
        return self

    # ── where the time goes ──────────────────────────────────────────────────────────────────────

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str] | None = None) -> Iterator[None]:
        """Record what the main process and every rank do in the block, and write it to *path* after it.

        ``with synk.trace("calls.json"): …`` writes a file in the Trace Event Format, which
        https://ui.perfetto.dev and ``chrome://tracing`` open; without *path* the record is kept for
        ``summary()`` and ``plot_timeline()`` only.  One lane shows the main process (plan, send, wait,
        collect), and one each rank: wake, begin; inputs, compute and outputs, once a slice; collective,
        store, reduce; and the wait for slower ranks.  Of each lane the last 200,000 steps are kept.  The
        environment variable ``SYNKRO_TRACE``, a path, traces a whole session, from ``fork()`` to
        ``close()``.

        Raises: InvalidType, InvalidValue for a path that cannot be written, or while another trace goes
        on.
        """
        checked = None if path is None else checked_path(path)
        self._trace = trace = self._engine.start_trace(checked)
        try:
            yield
        except BaseException:
            end_trace_quietly(self._engine, trace)
            raise
        self._engine.end_trace(trace)

    def summary(self) -> None:
        """Print where the time of the traced calls went, a line a function.

        ``compute`` is the function itself; ``transfer`` moves inputs and outputs; ``communication`` is
        collectives, with the waiting in them, and reductions; ``waiting`` is for slower ranks, and
        ``overhead`` all else.  They are shares of the calls' time, as means over the ranks;
        ``imbalance`` is how much more than the mean the slowest rank computed.

        Raises: UsageError if nothing was traced in this session.
        """
        print(table(self._traced()))

    def plot_timeline(self, path: str | os.PathLike[str] | None = None, calls: int = 10) -> Timeline:
        """Draw the last traced *calls*, a lane a rank, and write the picture to *path*, if given.

        The suffix of *path* says as what: PNG, PDF, SVG …

        Returns the figure, a ``matplotlib.figure.Figure``, which a notebook shows where it ends a cell.
        pyplot does not know of it: nothing pops up, and there is nothing to close.

        Raises: UsageError if nothing was traced; InvalidValue for a *path* that cannot be written;
        NotAvailable without matplotlib.
        """
        trace = self._traced()
        checked = None if path is None else checked_path(path)
        count = checked_int(calls, "calls", 1)
        with descriptors_for("the timeline could not be drawn"):
            try:
                from .tracing import picture  # noqa: PLC0415  which needs matplotlib
            except ModuleNotFoundError as error:
                raise errors.NotAvailable(
                    f"plot_timeline() needs matplotlib ({error}): pip install matplotlib."
                ) from None
            return picture.draw(trace, checked, count)

    def _traced(self) -> Trace:
        if self._trace is None or not self._trace.calls:
            last = "" if self._trace is None else ", there was none in its last trace"
            raise errors.UsageError(
                f"no call of this session was traced{last}: make the calls inside `with trace():`, "
                f"after fork(), or set {TRACE} to the path of a file before fork()."
            )
        self._trace.fetch()
        return self._trace


def _checked_early(threads: Any, master_rank: Any, preallocate: Any) -> int | None:
    """How many *threads* a worker has, if that is said; what else is known to be wrong before hosts are
    asked is found here, too.  Raises: InvalidType, InvalidValue.
    """
    checked_int(master_rank, "master_rank", 0)  # and its bound when the ranks are known
    checked_fraction(preallocate)
    return None if threads is None else checked_int(threads, "threads_per_worker", 1)


def _checked_devices(devices: Any, use_gpu: Any) -> Any:
    """Raises: InvalidType; InvalidValue where GPUs are asked for, and not to be used."""
    if checked_bool(use_gpu, "use_gpu"):
        return devices
    if devices is not None:
        raise errors.InvalidValue(
            f"use_gpu=False asks for CPUs; devices={errors.shown(devices)}: give one."
        )
    return "cpu"


def _check_flags(profile_workers: Any, replace: Any) -> None:
    """Raises: InvalidType, InvalidValue where workers cannot write profiles."""
    checked_bool(replace, "replace")
    if checked_bool(profile_workers, "profile_workers") and not os.access(os.curdir, os.W_OK):
        raise errors.InvalidValue(
            f"profile_workers= writes files to the working directory, {os.getcwd()}, which cannot be "
            f"written: change to another."
        )


def _not_ready(late: errors.CallTimeout, seconds: float) -> errors.SynkroError:
    """What to raise where workers have not answered within *seconds* since they were started."""
    who = errors.ranks_in_words(late.ranks)
    cure = "did not answer. Give more, or look at what takes long there"
    if late.hosts:
        where = ", ".join(dict.fromkeys(late.hosts))
        return errors.SessionError(
            f"the hosts and their workers were not ready within {seconds:g} s (start_timeout=): {who} "
            f"on {where} {cure}."
        )
    return errors.CallTimeout(
        f"the workers were not ready within {seconds:g} s (start_timeout=): {who} {cure}: they import "
        f"NumPy, and what sitecustomize and .pth files of their Python name.",
        late.ranks,
    )


def _check_place(python: Any) -> None:
    """Raises: NotAvailable, UsageError, InvalidValue, InvalidType where no workers can be started."""
    if not sys.platform.startswith("linux"):
        raise errors.NotAvailable(f"Synkro runs on Linux only; this is {sys.platform}.")
    if here.rank is not None:
        raise errors.UsageError(
            "a session cannot be started inside a worker: a function that runs on the workers is "
            "plain array code; call fork() and Synkro's functions in the main program."
        )
    choose_python(python)


def _seed(seed: Any) -> int:
    """The entropy of all generators: *seed*, or fresh from the operating system."""
    if seed is None:
        return int.from_bytes(os.urandom(16), "little")
    return checked_int(seed, "seed", 0, instead=", or None")


def _traced_to(path: str | None) -> Path | None:
    """The file for the trace of a whole session: of the second one in a process, with -2 in its name.

    Raises: InvalidValue.
    """
    if not path:
        return None
    try:
        checked = checked_path(path)
    except errors.InvalidValue as error:
        raise errors.InvalidValue(f"{TRACE}: {error}") from None
    number = next(_traced_sessions)
    return checked if number == 1 else checked.with_stem(f"{checked.stem}-{number}")
