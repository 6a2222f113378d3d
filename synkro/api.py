"""The functions of the module: methods of the current session, and what functions call on a rank.

Nothing is decided in here but where a call goes: to the session that ``fork()`` made, or to the group of
ranks that runs a function.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence  # noqa: F401  a name in the signatures of methods
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, DTypeLike  # noqa: F401

from . import here
from .controller.data import Data  # noqa: F401
from .controller.engine.engine import State
from .controller.session import Session
from .controller.variables.shared import Shared  # noqa: F401
from .errors import InvalidType, NotForked, UsageError
from .worker.group import Group

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


P = ParamSpec("P")
R = TypeVar("R")


def _taking(
    method: Callable[Concatenate[Session, P], Any], returns: str | None = None
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of *method*, without ``self``, and its docstring if it has none.

    *returns* is what the function returns, if not the same.
    """
    signature = inspect.signature(method)
    signature = signature.replace(
        parameters=list(signature.parameters.values())[1:],
        return_annotation=returns or signature.return_annotation,
    )

    def taking(function: Callable[..., R]) -> Callable[P, R]:
        function.__dict__["__signature__"] = signature
        function.__doc__ = function.__doc__ or method.__doc__
        return function

    return taking


def _forwarded(method: Callable[Concatenate[Session, P], R]) -> Callable[P, R]:
    """A function of the module that calls *method* of the current session."""

    @_taking(method)
    def forward(*args: Any, **kwargs: Any) -> R:
        _check_arguments(forward, args, kwargs)
        return method(current_session(method.__name__), *args, **kwargs)

    forward.__name__ = forward.__qualname__ = method.__name__
    return forward


def _check_arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> None:
    """Raises: TypeError, in the name of *function*, for arguments that it does not take."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"{function.__name__}() {error}") from None


# ── functions that are methods of the current session ────────────────────────────────────────────────


@_taking(Session.__init__, returns="int")
def fork(*args: Any, **kwargs: Any) -> int:
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
    _check_arguments(fork, args, kwargs)
    current = here.session
    if current is not None:
        if current.state is State.READY:
            raise UsageError(
                f"fork() was called already, and {current.n_parallel} workers are running: call "
                f"close() first, or make a second Session."
            )
        current.close()
    here.session = Session(*args, **kwargs)
    return here.session.n_parallel


def close() -> None:
    """End the workers of ``fork()``, if there are any.  It is also called at exit."""
    if here.session is not None or here.rank is not None:
        current_session("close").close()


data = _forwarded(Session.data)
function = _forwarded(Session.function)
distribute = _forwarded(Session.distribute)
shared = _forwarded(Session.shared)
set_value = _forwarded(Session.set_value)
get_value = _forwarded(Session.get_value)
get_lengths = _forwarded(Session.get_lengths)
get_shapes = _forwarded(Session.get_shapes)
save = _forwarded(Session.save)
load = _forwarded(Session.load)
summary = _forwarded(Session.summary)
plot_timeline = _forwarded(Session.plot_timeline)


@contextlib.contextmanager
@_taking(Session.trace)
def trace(*args: Any, **kwargs: Any) -> Iterator[None]:
    with current_session("trace").trace(*args, **kwargs):
        yield


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
    return _session("broadcast", root=root).broadcast(value, values)


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
    return _session("scatter", root=root).scatter(value, values, batch)


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
    return _session("gather", root=root).gather(value, 1 if nd_up is None else nd_up)


def all_gather(value: Any, nd_up: int | None = None) -> Any:
    """The values of all ranks on every rank, concatenated along axis 0 in the order of the ranks.

    In the main process, ``all_gather(variables)`` makes every replica the concatenation of all.

    Inside a function, ``all_gather(x)`` returns it; ``nd_up=1`` stacks along a new axis instead.

    Raises: InvalidType, InvalidValue; CollectiveError.
    """
    if (group := _group()) is not None:
        return group.all_gather(value, nd_up or 0)
    return _session("all_gather", nd_up=nd_up).all_gather(value)


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
    return _session("reduce", root=root, weight=weight).reduce(value, op, in_place)


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
    return _session("all_reduce", weight=weight).all_reduce(value, op)


# ── inside functions only ────────────────────────────────────────────────────────────────────────────


def rank() -> int:
    """Which of the ranks that take part in the call this is: 0 … ``size()`` - 1."""
    return _inside("rank").rank


def size() -> int:
    """How many ranks take part in the call: all of them, unless there are fewer rows than ranks."""
    return _inside("size").size


def rng() -> np.random.Generator:
    """This worker's random generator, independent of the others', reproducible with ``fork(seed=)``.

    It is kept from call to call.  The states are spawned from one seed, as NumPy's SeedSequence does.
    """
    return _inside("rng").rng


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


# ── inside a function, or in the main process ─────────────────────────────────────────────────────────


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


def _session(verb: str, **given: Any) -> Session:
    """The current session.  Raises: InvalidType for arguments with a meaning inside functions only."""
    for name, value in given.items():
        if value is not None:
            raise InvalidType(
                f"{verb}({name}=) is for use inside functions; in the main program {verb}() takes "
                f"worker variables."
            )
    return current_session(verb)
