"""The functions of the module: each is sent to the current session.

Nothing is decided in here but which session that is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from numpy.typing import ArrayLike, DTypeLike

from . import world
from .data import Data
from .engine import State
from .errors import NotAvailable, NotForked, UsageError
from .replica import Replica
from .session import Session


def fork(
    n_parallel: int | None = None,
    *,
    devices: str | Sequence[str] | None = None,
    master_rank: int = 0,
    threads_per_worker: int | None = None,
    start_timeout: float = 60.0,
    timeout: float | None = None,
    seed: int | None = None,
    profile_workers: bool = False,
    verbose: bool = True,
) -> int:
    """Start one worker process a device; returns their number.

    Args:
        n_parallel: how many; None for one a device.
        devices: None or ``"cpu"`` for the available CPU cores; a list of device names, such as
            ``["cpu", "cpu"]`` (``"cpu1"`` stays on the second core); or a map of context names, such
            as ``"dev0->cpu;dev1->cpu"``.  The environment variable ``SYNKRO_DEVICES`` speaks where
            this is None.
        master_rank: the root of collectives that have one.
        threads_per_worker: threads of BLAS and OpenMP in each worker; None for cores ÷ workers, or
            what the environment says (OMP_NUM_THREADS and the like).
        start_timeout: seconds that the workers have to come up.
        timeout: seconds that every later call may take; None for as long as it needs.
        verbose: print status lines to stderr.

    Raises: UsageError if there is a session already, or for arguments that cannot be; WorkerDied if a
    worker ends while it starts; CallTimeout; NotAvailable.
    """
    current = world.current
    if isinstance(current, Session):
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
        profile_workers=profile_workers,
        verbose=verbose,
    )
    world.current = session
    return session.n_parallel


def close() -> None:
    """End the workers of ``fork()``, if there are any.  It is also called at exit."""
    if world.current is not None:
        _session("close").close()


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
    return _session("data").data(value, var, dtype, ndim, shape, minibatch, force_cast, oversize, name)


def function(
    fn: Callable[..., Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    outputs: Any = "mean",
    bcast_inputs: str | Sequence[str] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    name: str | None = None,
) -> Any:
    """A function that runs on all workers at once; without *fn*, a decorator that makes one.

    Args:
        fn: any callable over arrays that cloudpickle takes.
        inputs: names of the parameters whose rows are scattered; by default all but bcast_inputs.
        outputs: ``"mean"``, ``"sum"``, ``"prod"``, ``"max"``, ``"min"``: reduced over the ranks, a mean
            weighted by rows; ``"gather"``: concatenated along axis 0 in the order of the rows; None:
            the list of every rank's (and slice's) value; ``[]``: nothing is returned.  One for all, or
            nested as the function's result, one for each.
        bcast_inputs: names of the parameters that every rank sees whole.
        name: for messages; by default the function's own.

    Inputs are read-only inside the function.

    Raises: InvalidType, InvalidValue; NotAvailable; NotForked.
    """
    return _session("function").function(
        fn, inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, name
    )


def distribute() -> None:
    """Send all functions that the workers do not have yet, pickled together.

    What they share in this process (an array that two of them use) they share on every worker.  A
    function that was not distributed is sent alone, at its first call.

    Raises: InvalidType for a function that cannot be pickled; WorkerError if a worker cannot load it.
    """
    _session("distribute").distribute()


def _session(verb: str) -> Session:
    here = world.current
    if here is None:
        raise NotForked(f"there are no workers yet for {verb}(): call synkro.fork() first.")
    if isinstance(here, Replica):
        raise UsageError(
            f"{verb}() was called inside a worker: a function that runs on the workers is plain array "
            f"code; call Synkro's functions in the main program."
        )
    session: Session = here
    return session


def _later(name: str) -> Callable[..., NoReturn]:
    """A public function that is promised, but not built yet."""

    def unavailable(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotAvailable(f"synkro.{name}() is not available yet in this version of Synkro.")

    unavailable.__name__ = unavailable.__qualname__ = name
    unavailable.__doc__ = "Not available yet."
    return unavailable


shared = _later("shared")
broadcast = _later("broadcast")
scatter = _later("scatter")
gather = _later("gather")
all_gather = _later("all_gather")
reduce = _later("reduce")
all_reduce = _later("all_reduce")
set_value = _later("set_value")
get_value = _later("get_value")
get_lengths = _later("get_lengths")
get_shapes = _later("get_shapes")
rank = _later("rank")
size = _later("size")
rng = _later("rng")
reduce_scatter = _later("reduce_scatter")
all_to_all = _later("all_to_all")
send = _later("send")
recv = _later("recv")
barrier = _later("barrier")
