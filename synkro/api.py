"""The functions of the module: each is sent to the current session.

Nothing is decided in here but which session that is.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from . import here
from .controller.data import Data
from .controller.engine.engine import State
from .controller.session import Session
from .controller.variables.shared import Shared
from .errors import InvalidType, NotForked, UsageError
from .worker.group import Group


def fork(
    n_parallel: int | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    master_rank: int = 0,
    threads_per_worker: int | None = None,
    start_timeout: float = 60.0,
    timeout: float | None = None,
    seed: int | None = None,
    preallocate: float | None = None,
    profile_workers: bool = False,
    verbose: bool = True,
) -> int:
    """Start one worker process a device; returns their number.

    Args:
        n_parallel: how many; None for one a device.
        devices: None for all visible GPUs, if CuPy can use any, else for the available CPU cores;
            ``"cpu"`` or ``"cuda"`` for all of one kind; a list of device names, such as
            ``["cuda:0", "cuda:1"]`` (one may be named more than once; ``"cpu1"`` stays on the second
            core); or a map of context names, such as ``"dev0->cuda0;dev1->cuda1"``.  The environment
            variable ``SYNKRO_DEVICES`` speaks where this is None, and ``CUDA_VISIBLE_DEVICES`` says
            which GPUs there are.
        master_rank: the root of collectives that have one.
        threads_per_worker: threads of BLAS and OpenMP in each worker; None for cores ÷ workers, or
            what the environment says (OMP_NUM_THREADS and the like).
        start_timeout: seconds that the workers have to come up.
        timeout: seconds that every later call may take; None for as long as it needs.
        seed: of the workers' random generators (``rng()``), an int; None for a fresh one.
        preallocate: the fraction of its GPU's memory, from 0 to 1, that each worker takes at once for
            CuPy's pool; None to take memory as it is needed.
        profile_workers: let each worker write a profile of itself (``cProfile``) when it ends, to
            ``synkro-<pid>-rank<r>.prof`` in the working directory.
        verbose: print status lines to stderr.

    Raises: UsageError if there is a session already, or for arguments that cannot be; WorkerDied if a
    worker ends while it starts; CallTimeout; NotAvailable.
    """
    current = here.session
    if current is not None:
        if current.state is State.READY:
            raise UsageError(
                f"fork() was called already, and {current.n_parallel} workers are running: call "
                f"close() first, or make a second Session."
            )
        current.close()
    session = Session(
        n_parallel,
        devices=devices,
        master_rank=master_rank,
        threads_per_worker=threads_per_worker,
        start_timeout=start_timeout,
        timeout=timeout,
        seed=seed,
        preallocate=preallocate,
        profile_workers=profile_workers,
        verbose=verbose,
    )
    here.session = session
    return session.n_parallel


def close() -> None:
    """End the workers of ``fork()``, if there are any.  It is also called at exit."""
    if here.session is not None or here.rank is not None:
        current_session("close").close()


def data(
    value: ArrayLike | None = None,
    var: Any = None,
    dtype: DTypeLike | None = None,
    ndim: int | None = None,
    shape: Any = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1,
    name: str | None = None,
) -> Data:
    """An array in shared memory, an input of functions.

    Args:
        value: its contents, of any shape.  A memory-mapped array (``np.load(…, mmap_mode="r")``,
            ``np.memmap``) is not copied: the workers map the same file, and the Data is read-only.
        var: something with a ``dtype`` and an ``ndim`` (and perhaps a ``name``) to take them from.
        dtype: bool, an integer, float or complex type; by default the value's, or float64.
        ndim, shape: the number of dimensions, or all lengths, of one without a value: zeros.
        minibatch: it holds just the rows of a batch: ``batch=`` is relative to its lowest index.
        force_cast: allow casts that lose information.
        oversize: how much more memory to take than is needed now, from 1 to 2.
        name: for messages.

    Raises: InvalidType, InvalidValue; SharedMemoryError.
    """
    return current_session("data").data(
        value, var, dtype, ndim, shape, minibatch, force_cast, oversize, name
    )


def function(
    fn: Callable[..., Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    outputs: Any = "mean",
    bcast_inputs: str | Sequence[str] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    name: str | None = None,
    **options: Any,
) -> Any:
    """A function that runs on all workers at once; without *fn*, a decorator that makes one.

    Args:
        fn: any callable over arrays that cloudpickle takes.
        inputs: names of the parameters whose rows are scattered; by default all but bcast_inputs.
        outputs: ``"mean"``, ``"sum"``, ``"prod"``, ``"max"``, ``"min"``: reduced over the ranks, a mean
            weighted by rows; ``"gather"``: concatenated along axis 0 in the order of the rows; None:
            the list of every rank's (and slice's) value; ``"keep"``: left on the workers, a handle is
            returned that other functions take as an input; ``[]``: nothing is returned.  One for all, or
            nested as the function's result, one for each.
        bcast_inputs: names of the parameters that every rank sees whole.
        updates: worker variables whose new values the function returns beside its outputs, as
            ``(outputs, new_values)``: a list of variables, or of pairs ``(variable, op)`` where *op*
            merges the new values of several slices ("mean" by default, weighted by rows).  They are
            put in place at the end of the call, so that all slices see the old values; each rank's in
            its own replica: to make the ranks agree, use all_reduce in the function.
        sliceable_shareds: worker variables whose rows take part in slicing and in ``batch_s=``:
            inside the function their value is the rows of the running piece.
        name: for messages; by default the function's own.

    Inputs are read-only inside the function.

    The classic form has no *fn* but the variables of a PyTensor graph: lists of them as *inputs* and
    *bcast_inputs*; one, a pair ``(variable, op)`` or a list of them as *outputs*; *updates*, a dict or
    pairs ``(shared variable, new value)``, or triples with the operation; *givens*; shared variables as
    *sliceable_shareds*.  *options* go to ``pytensor.function``: ``mode``, ``on_unused_input``,
    ``allow_input_downcast`` …

    Raises: InvalidType, InvalidValue; NotAvailable; NotForked.
    """
    return current_session("function").function(
        fn, inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, name, **options
    )


def distribute() -> None:
    """Send all functions that the workers do not have yet, pickled together.

    What they share in this process (an array that two of them use) they share on every worker.  A
    function that was not distributed is sent alone, at its first call.

    Raises: InvalidType for a function that cannot be pickled; WorkerError if a worker cannot load it.
    """
    current_session("distribute").distribute()


def shared(value: ArrayLike, name: str | None = None) -> Shared:
    """A variable with a replica on every rank, which functions read and write.

    Inside a function ``w.value`` is this rank's replica, an array: ``w[...] -= g`` writes into it (also
    where it was read before), ``w.value = new`` replaces it.  Nothing is synchronized by itself.  Ranks
    without rows (where a call has fewer rows than ranks) do not run, so their replicas stay as they are.

    Args:
        value: its first contents, on every rank; bools, integers, floats or complex numbers.
        name: for messages, and for ``save`` and ``load``.

    Raises: InvalidType; SharedMemoryError; NotForked.
    """
    return current_session("shared").shared(value, name)


# ── collectives: of the main process over variables, and inside functions over arrays ────────────────


def broadcast(value: Any, values: Any = None, *, root: int | None = None) -> Any:
    """The same value on every rank.

    In the main process, ``broadcast(variables, values=None)`` writes *values* (arrays or ``Data``, one a
    variable) to all replicas, or without them the master rank's replica to the others.

    Inside a function, ``broadcast(x, *, root=None)`` returns the root's *x* on every rank; what the
    others give does not matter.  The root is the master rank by default.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        _inside_only("broadcast", values=values)
        return group.broadcast(value, root)
    _main_only("broadcast", root=root)
    return current_session("broadcast").variables.broadcast(value, values)


def scatter(value: Any, values: Any = None, batch: Any = None, *, root: int | None = None) -> Any:
    """Rows, split over the ranks as evenly as can be, the first ranks having one more.

    In the main process, ``scatter(variables, values, batch=None)`` makes each replica its rank's rows of
    *values*, or of the rows of them that *batch* selects.  Ranks may get none.

    Inside a function, ``scatter(x, *, root=None)`` returns this rank's rows of the root's *x*.

    Raises: InvalidType, InvalidValue, InvalidIndex; CollectiveError.
    """
    if (group := _group()) is not None:
        _inside_only("scatter", values=values, batch=batch)
        return group.scatter(value, root)
    _main_only("scatter", root=root)
    return current_session("scatter").variables.scatter(value, values, batch)


def gather(value: Any, nd_up: int | None = None, *, root: int | None = None) -> Any:
    """The values of all ranks, in their order.

    In the main process, ``gather(variables, nd_up=1)`` returns the replicas stacked along a new first
    axis (``nd_up=1``: they need the same shape) or concatenated along the first (``nd_up=0``: they may
    differ in their rows).

    Inside a function, ``gather(x, root=None)`` gives the arrays of all ranks to the root, concatenated
    (``nd_up=0``, the default; numbers become rows) or stacked, and None to the others.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        return group.gather(value, root, nd_up or 0)
    _main_only("gather", root=root)
    return current_session("gather").variables.gather(value, 1 if nd_up is None else nd_up)


def all_gather(value: Any, nd_up: int | None = None) -> Any:
    """The values of all ranks on every rank, concatenated along axis 0 in the order of the ranks.

    In the main process, ``all_gather(variables)`` makes every replica the concatenation of all.

    Inside a function, ``all_gather(x)`` returns it; ``nd_up=1`` stacks along a new axis instead.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        return group.all_gather(value, nd_up or 0)
    _main_only("all_gather", nd_up=nd_up)
    return current_session("all_gather").variables.all_gather(value)


def reduce(
    value: Any, op: str = "mean", in_place: bool = True, *, root: int | None = None, weight: Any = None
) -> Any:
    """The values of all ranks as one, on one rank.

    In the main process, ``reduce(variables, op="mean", in_place=True)`` makes the master rank's replica
    the plain mean, "sum", "prod", "max" or "min" of all, or returns that with ``in_place=False``.

    Inside a function, ``reduce(x, op="mean", *, root=None, weight=None)`` returns it on the root, and
    None on the others; *weight* as in ``all_reduce``.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        _inside_only("reduce", in_place=None if in_place is True else in_place)
        return group.reduce(value, op, root, weight)
    _main_only("reduce", root=root, weight=weight)
    return current_session("reduce").variables.reduce(value, op, in_place)


def all_reduce(value: Any, op: str = "mean", *, weight: Any = None) -> Any:
    """The values of all ranks as one, on every rank; floats always in the order of the ranks.

    In the main process, ``all_reduce(variables, op="mean")`` makes every replica the plain mean, "sum",
    "prod", "max" or "min" of all.

    Inside a function, ``all_reduce(x, op="mean", weight=None)`` returns it, for an array, a number, or
    tuples, lists and dicts of them in one go; a worker variable is reduced in place.  In a mean, a
    rank's value counts *weight* times: with ``weight=len(rows)`` the mean is exact for ranks with
    different numbers of rows.  The mean of integers is float64; sums of float16 accumulate in float32.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        return group.all_reduce(value, op, weight)
    _main_only("all_reduce", weight=weight)
    return current_session("all_reduce").variables.all_reduce(value, op)


def set_value(rank: int, variables: Any, values: Any, batch: Any = None) -> None:
    """Write *values*, or the rows of them that *batch* selects, to the replicas of one *rank*."""
    current_session("set_value").variables.set_value(rank, variables, values, batch)


def get_value(rank: int, variables: Any) -> Any:
    """The replica of one *rank*: an array, or a list of them for several variables."""
    return current_session("get_value").variables.get_value(rank, variables)


def get_lengths(variables: Any) -> Any:
    """The number of rows of each rank's replica: a list, or a list of lists for several variables."""
    return current_session("get_lengths").variables.get_lengths(variables)


def get_shapes(variables: Any) -> Any:
    """The shape of each rank's replica: a list, or a list of lists for several variables."""
    return current_session("get_shapes").variables.get_shapes(variables)


def save(path: str | os.PathLike[str]) -> None:
    """Write all named variables, of all ranks, and the states of the ranks' generators to a file.

    *path* gets the suffix ``.npz``, if it has another.  The file is complete or not there: a crash while
    it is written leaves an older one of that name as it was.

    Raises: OSError.
    """
    current_session("save").save(path)


def load(path: str | os.PathLike[str]) -> None:
    """Set all named variables and generators to what ``save(path)`` wrote; the session goes on as then.

    The session needs the same number of workers and the same named variables.

    Raises: InvalidValue if they are not; OSError.
    """
    current_session("load").load(path)


def unused_name(label: str) -> str:
    """*label*, with a number behind it if variables in use are named by it already."""
    return current_session("shared").variables.unused_name(label)


def worker_variable(variable: Any) -> Any:
    """The worker variable that stands for a shared variable of PyTensor's."""
    return current_session("shared").variables.check(variable, "a parameter")


def name_variable(variable: Any, text: str) -> None:
    """Name a variable that has no name."""
    current_session("shared").variables.name(variable, text)


# ── inside functions only ────────────────────────────────────────────────────────────────────────────


def rank() -> int:
    """Which of the ranks that take part in the call this is: 0 … ``size()`` - 1."""
    place: int = _inside("rank").rank
    return place


def size() -> int:
    """How many ranks take part in the call: all of them, unless there are fewer rows than ranks."""
    count: int = _inside("size").size
    return count


def rng() -> np.random.Generator:
    """This worker's random generator, independent of the others', reproducible with ``fork(seed=)``.

    It is kept from call to call.  The states are spawned from one seed, as NumPy's SeedSequence does.
    """
    generator: np.random.Generator = _inside("rng").rng
    return generator


def reduce_scatter(value: Any, op: str = "mean", *, weight: Any = None) -> Any:
    """This rank's rows of what ``all_reduce`` would return: those that ``scatter`` would give it."""
    return _inside("reduce_scatter").reduce_scatter(value, op, weight)


def all_to_all(value: Any) -> Any:
    """The rows that all ranks have for this one, in the order of the ranks.

    Each rank's rows are split over the ranks as ``scatter`` splits them.
    """
    return _inside("all_to_all").all_to_all(value)


def send(value: Any, to: int) -> None:
    """Send an array to another rank, which receives it with ``recv``; in order, without waiting for it.

    Only after 8 arrays that were not yet received does it wait.
    """
    _inside("send").send(value, to)


def recv(source: int) -> Any:
    """Wait for the next array that the rank *source* sends to this one."""
    return _inside("recv").recv(source)


def xp() -> Any:
    """The array module of this worker: CuPy on a GPU, NumPy on a CPU and in the main program.

    Functions that take their array functions from it run on both.
    """
    group = _group()
    return np if group is None else group.device.xp


def barrier() -> None:
    """Wait until all ranks that take part in the call are here."""
    _inside("barrier").barrier()


# ── where the time goes ──────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Record what the main process and every rank do in the block, and write it to *path* after it.

    ``with synk.trace("calls.json"): …`` writes a file in the Trace Event Format, which
    https://ui.perfetto.dev and ``chrome://tracing`` open; without *path* the record is kept for
    ``summary()`` and ``plot_timeline()`` only.  One lane shows the main process (plan, send, wait,
    collect), and one each rank: wake, begin; inputs, compute and outputs, once a slice; collective,
    store, reduce; and the wait for slower ranks.  Of each lane the last 200,000 steps are kept.  The
    environment variable ``SYNKRO_TRACE``, a path, traces a whole session, from ``fork()`` to
    ``close()``.

    Raises: InvalidType, InvalidValue for a path that cannot be written, or while another trace goes on.
    """
    with current_session("trace").trace(path):
        yield


def summary() -> None:
    """Print where the time of the traced calls went, a line a function.

    ``compute`` is the function itself; ``transfer`` moves inputs and outputs; ``communication`` is
    collectives, with the waiting in them, and reductions; ``waiting`` is for slower ranks, and
    ``overhead`` all else.  They are shares of the calls' time, as means over the ranks; ``imbalance`` is
    how much more than the mean the slowest rank computed.

    Raises: UsageError if nothing was traced in this session.
    """
    current_session("summary").summary()


def plot_timeline(path: str | os.PathLike[str], calls: int = 10) -> None:
    """Draw the last traced *calls* as a picture (PNG, PDF, SVG … by *path*'s suffix), a lane a rank.

    Raises: UsageError if nothing was traced; InvalidValue for a *path* that cannot be written;
    NotAvailable without matplotlib.
    """
    current_session("plot_timeline").plot_timeline(path, calls)


# ── where we are ─────────────────────────────────────────────────────────────────────────────────────


def current_session(verb: str) -> Session:
    """The session that ``synkro.verb()`` is for.  Raises: NotForked, UsageError."""
    if here.rank is not None:
        raise UsageError(
            f"{verb}() was called inside a worker: a function that runs on the workers is plain array "
            f"code; call Synkro's functions in the main program."
        )
    if here.session is None:
        raise NotForked(
            f"there are no workers yet for {verb}(): call synkro.fork() first. (A Session of your own "
            f"has methods of these names.)"
        )
    return here.session


def _group() -> Group | None:
    """The ranks of the running call, inside a function; None in the main program."""
    if here.rank is None:
        return here.group.get()
    if threading.current_thread() is not threading.main_thread() or os.getpid() != here.rank.pid:
        raise UsageError(
            "a collective was called from a thread, or a process, that the function has started: call "
            "it from the function itself."
        )
    return here.rank.group


def _inside(verb: str) -> Group:
    group = _group()
    if group is None:
        raise UsageError(
            f"{verb}() is for use inside a function that runs on the workers; this is the main program."
        )
    return group


def _inside_only(verb: str, **given: Any) -> None:
    """Raises: InvalidType for arguments that have a meaning in the main program only."""
    for name, value in given.items():
        if value is not None:
            raise InvalidType(
                f"{verb}() got {name}={value!r} inside a function, where it takes an array, and the "
                f"root by name: {verb}(x, root=…)."
            )


def _main_only(verb: str, **given: Any) -> None:
    """Raises: InvalidType for arguments that have a meaning inside functions only."""
    for name, value in given.items():
        if value is not None:
            raise InvalidType(
                f"{verb}({name}=) is for use inside functions; in the main program {verb}() takes "
                f"worker variables."
            )
