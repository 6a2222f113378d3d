"""The functions of the module: methods of the current session, and what functions call on a rank.

Nothing is decided in here but where a call goes: to the session that ``fork()`` made, or to the group of
ranks that runs a function.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence  # noqa: F401  of methods
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Concatenate, Final, ParamSpec, TypeVar, cast, overload

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray  # noqa: F401

from . import errors, here
from .controller.calls.check import are_equal
from .controller.calls.forms import MakesFunctions, make_function, teach_transfers
from .controller.calls.function import Function  # noqa: F401
from .controller.calls.replay import debug  # noqa: F401
from .controller.data.attached import Ring
from .controller.data.data import Data, MakesData  # noqa: F401
from .controller.data.stored import StoredData  # noqa: F401
from .controller.engine.engine import State
from .controller.executor.executor import Executor  # noqa: F401
from .controller.session import Session
from .controller.tasks.forms import IteratesTasks, RunsTasks
from .controller.variables.shared import MakesVariables, Shared  # noqa: F401
from .devices.gpus import visible
from .machine import importing
from .memory.ring import RingWriter
from .values.arrays import checked_seconds
from .values.foreign import in_backward
from .worker.group import Group
from .worker.world import OverArrays, World
from .worker.world import split as split_of

if TYPE_CHECKING:
    from .controller.tracing.picture import Timeline  # noqa: F401
    from .worker.workspace import Workspace

teach_transfers()

# ── where we are ─────────────────────────────────────────────────────────────────────────────────────


def current_session(verb: str) -> Session:
    """The session that ``synkro.verb()`` is for.  Raises: NotForked, UsageError."""
    if here.rank is not None:
        raise errors.UsageError(
            f"{verb}() was called inside a worker: a function that runs on the workers is plain array "
            f"code; call Synkro's functions in the main program."
        )
    if here.session is None:
        raise errors.NotForked(
            f"there are no workers yet for {verb}(): call synkro.fork() first. (A Session of your own "
            f"has methods of these names.)"
        )
    return cast("Session", here.session)


def _group() -> Group | None:
    """The ranks of the running call, inside a function; None in the main program."""
    rank = cast("Workspace | None", here.rank)
    if rank is None:
        return cast("Group | None", here.group.get())
    in_function = threading.current_thread() is threading.main_thread() or in_backward()
    if not in_function or os.getpid() != rank.pid:
        raise errors.UsageError(
            "a collective, or rng(), was called from a thread, or a process, that the function has "
            "started: call it from the function itself."
        )
    return rank.group


def current_group(verb: str) -> Group:
    """The ranks of the running call, for ``synkro.verb()``.  Raises: UsageError in the main program."""
    group = _group()
    if group is None:
        raise errors.UsageError(
            f"{verb}() is for use inside a function that runs on the workers; this is the main program."
        )
    return group


P = ParamSpec("P")
Q = ParamSpec("Q")
R = TypeVar("R")


def _without_self(method: Callable[..., Any]) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """*signature* without its types."""
    empty = inspect.Parameter.empty
    return inspect.Signature([p.replace(annotation=empty) for p in signature.parameters.values()])


def _taking(
    method: Callable[Concatenate[Any, P], Any], returns: str | None = None
) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a function the signature of *method*, without ``self``, and its docstring if it has none.

    *returns* is what the function returns, if not the same.
    """
    signature = _without_self(method)
    signature = signature.replace(return_annotation=returns or signature.return_annotation)

    def taking(function: Callable[..., R]) -> Callable[P, R]:
        function.__dict__["__signature__"] = signature
        function.__doc__ = function.__doc__ or method.__doc__
        return function

    return taking


def _forwarded(
    method: Callable[Concatenate[Any, P], R], current: Callable[[str], Any] = current_session
) -> Callable[P, R]:
    """A function of the module that calls *method* of the *current* session, or group of ranks."""
    name = method.__name__

    @_taking(method)
    def forward(*args: Any, **kwargs: Any) -> R:
        try:
            try:
                return method(current(name), *args, **kwargs)
            except (TypeError, errors.NotForked):
                check_arguments(name, inspect.signature(forward), args, kwargs)
                raise
        except BaseException as error:
            raise errors.folded(error)  # noqa: B904  it is the same one

    forward.__name__ = forward.__qualname__ = name
    return forward


def check_arguments(
    name: str, signature: inspect.Signature, args: Any, kwargs: Any, form: str = ""
) -> None:
    """Raises: InvalidType for arguments that the function *name* does not take; *form* says which."""
    parameters = signature.parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        errors.check_keywords(f"{name}()", kwargs, parameters, f"use it {form}." if form else "")
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = f": use it {form}" if form else ""
        raise errors.InvalidType(f"{name}() {errors.cut(str(error))}{hint}.") from None


# ── functions that are methods of the current session ────────────────────────────────────────────────


@_taking(Session.__init__, returns="int")
def fork(*args: Any, **kwargs: Any) -> int:
    """Start one worker process a device; returns their number.

    With the same arguments again it does nothing, but for *seed*, which then seeds the generators anew.
    Calls from several threads are served one after the other.

    Args:
        n_parallel: how many; None, or -1, for one a device.
        use_gpu: False for CPUs, as ``devices="cpu"``.
        master_rank: the root of collectives that have one.
        profile_workers: let each worker write a profile of itself (``cProfile``) when it ends, to
            a new file in the working directory, whose name a status line tells.
        devices: None for all visible GPUs, if CuPy can use any, else for the available CPU cores;
            ``"cpu"`` or ``"cuda"`` for all of one kind; a list of device names, such as
            ``["cuda:0", "cuda:1"]`` (one may be named more than once; ``"cpu1"`` stays on the second
            core); or a map of context names, such as ``"dev0->cuda0;dev1->cuda1"``.  The environment
            variable ``SYNKRO_DEVICES`` speaks where this is None, and ``CUDA_VISIBLE_DEVICES`` says
            which GPUs there are.
        threads_per_worker: threads of BLAS and OpenMP in each worker; None for cores ÷ workers, or
            what the environment says (OMP_NUM_THREADS and the like).
        start_timeout: seconds that the workers have to come up, and before them the hosts.
        timeout: seconds that every later call may take; None for as long as it needs.
        seed: of the workers' random generators, an int: of ``rng()``, and of ``random``,
            ``numpy.random`` and PyTorch, each rank its own; None for a fresh one.
        preallocate: the fraction of its GPU's memory, from 0 to 1, that each worker takes at once for
            CuPy's pool; None to take memory as it is needed.
        verbose: print status lines to stderr.
        hosts: several machines: names, each perhaps with its number of ranks, as in
            ``["h1", "h2:4"]``, the path of a hostfile, ``"slurm"`` or ``"pbs"`` in a job of theirs,
            or ``"mpi"`` if mpiexec or srun has started ``python -m synkro.hosts prog.py``.  None for
            those that the environment variable SYNKRO_HOSTS names, or this machine.  Ranks fill the
            hosts in their order; *devices* are those of each.  It needs MPI (``pip install mpi4py
            mpich``), and the same environment on all hosts.
        launcher: what reaches the hosts: ``"ssh"``, ``"slurm"``, or the path of a program that is called
            as ssh is.
        host_timeout: seconds after which a host of which nothing is heard is lost.
        trusted_network: rows, which nobody unpickles, go from host to host without digests: faster, and
            whoever can change what passes between the hosts can change results.
        python: the path of the Python that workers are, of this program's version; None for the
            program's own.  Frozen programs have none.
        replace: replace workers that die: the call in which one dies raises WorkerDied, and then all
            is as when the last call had ended: functions, objects, variables, and the state of
            ``rng()`` on each rank, the new one's, too.  It costs a command a call, and copies of what
            has changed: of variables, and of arrays and objects that functions use.
        initializer: a function that each worker calls first, with *initargs*, and a worker that takes
            the place of another, too: it opens a connection or a log file, say.  Globals that it
            assigns are each worker's own, and functions find them there.  It uses no collectives.
        initargs: its arguments.

    Raises: UsageError if there is a session with other arguments already, or for arguments that cannot
    be; WorkerError if the initializer fails; WorkerDied if a worker ends while it starts; CallTimeout;
    NotAvailable; SessionError if hosts cannot work together.
    """
    teach_transfers()
    signature = inspect.signature(fork)
    check_arguments("fork", signature, args, kwargs)
    given = signature.bind(*args, **kwargs)
    given.apply_defaults()
    asked = {n: value for n, value in given.arguments.items() if n not in ("seed", "verbose")}
    with _turn:
        current: Session | None = here.session
        if current is not None:
            if current.state is State.READY:
                _check_alike(asked)
                if given.arguments["seed"] is not None:
                    current.reseed(given.arguments["seed"])
                return current.n_parallel
            current.close()
        here.session = made = Session(*args, **kwargs)
        here.asked = asked
        return made.n_parallel


_turn = threading.RLock()
"""Held by the thread whose ``fork()`` starts workers: others wait, and find them."""


def _in_forked_child() -> None:
    global _turn  # noqa: PLW0603  a thread that the child does not have may hold the parent's
    _turn = threading.RLock()


os.register_at_fork(after_in_child=_in_forked_child)


def _check_alike(asked: dict[str, Any]) -> None:
    """Raises: UsageError if *asked* are other arguments than those of the last ``fork()``."""
    other = [name for name, value in asked.items() if not are_equal(here.asked.get(name), value)]
    if other:
        raise errors.UsageError(
            f"fork() was called already, with another {other[0]}=, and its workers are running: call "
            f"close() first, or make a second Session."
        )


def close() -> None:
    """End the workers of ``fork()``, if there are any.  It is also called at exit."""
    if here.session is not None or here.rank is not None:
        current_session("close").close()


def get_n_gpu() -> int:
    """How many GPUs ``fork()`` would use: those that CuPy can use, and CUDA_VISIBLE_DEVICES shows."""
    return len(visible().gpus)


data: MakesData = _forwarded(cast("Any", Session.data))
attach: Final = _forwarded(Session.attach)
_made_ring: Final = _forwarded(Session.ring)


@overload
def ring(
    shm_name: str,
    slots: int,
    shape: Any,
    dtype: DTypeLike | None = ...,
    timeout: float | None = ...,
    any_owner: bool = ...,
) -> Ring: ...


@overload
def ring(
    shm_name: str,
    slots: None = ...,
    shape: None = ...,
    dtype: None = ...,
    timeout: float | None = ...,
    any_owner: bool = ...,
) -> RingWriter: ...


def ring(
    shm_name: str,
    slots: int | None = None,
    shape: Any = None,
    dtype: DTypeLike | None = None,
    timeout: float | None = None,
    any_owner: bool = False,
) -> Ring | RingWriter:
    """A ring of slots in shared memory, through which one program hands frames over to another.

    The program that reads makes it, after ``fork()``, with all arguments: ``for frame in ring:
    f(frame)``.  The program that writes opens it, without workers: ``with ring("/frames") as frames:
    frames.write(array)``.  It may be in another language: docs/howto/named_memory.md has the layout.

    Args:
        shm_name: the memory's name, such as ``"/frames"``.
        slots: how many frames may wait.
        shape, dtype: those of a frame; by default of float64.
        timeout: seconds that the next frame, or a free slot, may take; None for as long as it takes.
        any_owner: for the writer: also open a ring that belongs to another user, or that other users can
            write.

    Raises: InvalidType, InvalidValue if the name is in use, or, for the writer, if there is no such
    ring, or if others than this user and root may have written it; SharedMemoryError; NotAvailable
    without posix_ipc.
    """
    if slots is None and shape is None and dtype is None:
        return RingWriter(shm_name, timeout, any_owner)
    if slots is None or shape is None:
        raise errors.InvalidValue(
            "ring() takes slots= and shape= in the program that reads, and neither in the one that "
            "writes."
        )
    if any_owner:
        raise errors.InvalidValue(
            "any_owner= is for the program that opens a ring: the one that reads makes it, for its user."
        )
    return _made_ring(shm_name, slots, shape, np.float64 if dtype is None else dtype, timeout)


@_taking(Session._function)
def _function(*args: Any, **kwargs: Any) -> Any:
    if here.rank is not None:  # the module is imported by a worker, where functions are plain
        return _plain(*args, **kwargs)
    try:
        return make_function(lambda verb: current_session(verb).services, *args, **kwargs)
    except BaseException as error:
        raise errors.folded(error)  # noqa: B904  it is the same one


_function.__name__ = _function.__qualname__ = "function"
function: MakesFunctions = cast("MakesFunctions", _function)


def _plain(fn: Any = None, *args: Any, **kwargs: Any) -> Any:
    """What ``function()`` is in a module that a worker imports: nothing.

    Raises: UsageError elsewhere.
    """
    if not importing(sys._getframe()) or not (fn is None or callable(fn)):
        current_session("function")  # raises UsageError
    return fn if callable(fn) else lambda fn: fn


distribute: Final = _forwarded(Session.distribute)
shared: MakesVariables = _forwarded(cast("Any", Session.shared))
place: Final = _forwarded(Session.place)
transfer: Final = _forwarded(Session.transfer)
set_value: Final = _forwarded(Session.set_value)
get_value: Final = _forwarded(Session.get_value)
get_lengths: Final = _forwarded(Session.get_lengths)
get_shapes: Final = _forwarded(Session.get_shapes)
push: Final = _forwarded(Session.push)
fetch: Final = _forwarded(Session.fetch)
save: Final = _forwarded(Session.save)
load: Final = _forwarded(Session.load)
map: RunsTasks = _forwarded(cast("Any", Session.map))
imap: IteratesTasks = _forwarded(cast("Any", Session.imap))
summary: Final = _forwarded(Session.summary)
plot_timeline: Final = _forwarded(Session.plot_timeline)


def as_completed(futures: Iterable[Future[R]], timeout: float | None = None) -> Iterator[Future[R]]:
    """The *futures* of submitted calls, each as soon as its call is over.

    It is ``concurrent.futures.as_completed``, and takes what that takes: futures of several functions
    and sessions, and of other executors.  What has ended already comes first.

    Args:
        futures: what ``f.submit(…)`` has returned; several times the same counts once.
        timeout: seconds that all of them may take; None for as long as they need.

    Raises: InvalidType for what is no future; TimeoutError from the iterator.
    """
    several = list(futures) if isinstance(futures, Iterable) else [None]
    if not all(isinstance(future, Future) for future in several):
        raise errors.InvalidType(
            f"as_completed() takes a list of the futures that submit() returns; got "
            f"{errors.shortened(futures)}."
        )
    seconds = None if timeout is None else checked_seconds(timeout, "timeout")
    return concurrent.futures.as_completed(several, seconds)


@contextlib.contextmanager
@_taking(Session.trace)
def trace(*args: Any, **kwargs: Any) -> Iterator[None]:
    with current_session("trace").trace(*args, **kwargs):
        yield


# ── collectives: of the main program over variables, and inside functions over arrays ────────────────


def _in_two_places(
    method: Callable[Concatenate[Session, Q], Any], inside: Callable[Concatenate[Group, Any, P], Any]
) -> OverArrays[P, Q]:
    """A function of the module: *method* of the session or, inside a function, *inside* of its ranks."""
    name = method.__name__
    signatures = [_without_self(form) for form in (method, inside)]
    places = ("in the main program", "inside a function")
    where = [f"{p}, as ``{name}{_bare(form)}``" for p, form in zip(places, signatures, strict=True)]

    def collective(*args: Any, **kwargs: Any) -> Any:
        group = _group()
        try:
            try:
                if group is not None:
                    return inside(group, *args, **kwargs)
                return method(current_session(name), *args, **kwargs)
            except (TypeError, errors.NotForked):
                place = int(group is not None)
                check_arguments(name, signatures[place], args, kwargs, where[place])
                raise
        except BaseException as error:
            raise errors.folded(error)  # noqa: B904  it is the same one

    collective.__name__ = collective.__qualname__ = name
    collective.__dict__["__signature__"] = signatures[0]
    collective.__doc__ = "\n\n".join(
        f"{place[0].upper()}{place[1:]}:\n\n{inspect.getdoc(form)}"
        for place, form in zip(where, (method, inside), strict=True)
    )
    return cast("OverArrays[P, Q]", collective)


broadcast: Final = _in_two_places(Session.broadcast, Group.broadcast)
scatter: Final = _in_two_places(Session.scatter, Group.scatter)
gather: Final = _in_two_places(Session.gather, Group.gather)
all_gather: Final = _in_two_places(Session.all_gather, Group.all_gather)
reduce: Final = _in_two_places(Session.reduce, Group.reduce)
all_reduce: Final = _in_two_places(Session.all_reduce, Group.all_reduce)


# ── inside functions only ────────────────────────────────────────────────────────────────────────────


def rank() -> int:
    """Which of the ranks that take part in the call this is: 0 … ``size()`` - 1."""
    return current_group("rank").in_call[0]


def size() -> int:
    """How many ranks take part in the call: all of them, unless there are fewer rows than ranks.

    In the main program, the number of workers.
    """
    group = _group()
    return current_session("size").n_parallel if group is None else group.in_call[1]


def host() -> int:
    """The number of this worker's host: its place in ``Session.hosts``, 0 where there is one."""
    return current_group("host").where[0]


def local_rank() -> int:
    """Which of its host's workers this is: 0 … ``local_size()`` - 1, whoever takes part in the call."""
    return current_group("local_rank").where[1]


def local_size() -> int:
    """How many workers this worker's host has."""
    return current_group("local_size").where[2]


def rng() -> np.random.Generator:
    """This worker's random generator, independent of the others', reproducible with ``fork(seed=)``.

    It is kept from call to call.  The states are spawned from one seed, as NumPy's SeedSequence does.
    """
    return current_group("rng").rng


def rows() -> NDArray[np.int64]:
    """The indices of the rows that the function sees, among all rows of the scattered inputs.

    With ``batch=`` they are those of the rows that it selects, in its order; with ``num_slices=`` those
    of the running slice.  An array of int64, a new one each time; it costs nothing where it is not used.

    Raises: UsageError in the main program, and in a call without scattered inputs.
    """
    return current_group("rows").rows()


def _over_arrays(function: Callable[Concatenate[Any, P], Any]) -> OverArrays[P, P]:
    return cast("OverArrays[P, P]", function)


reduce_scatter: Final = _over_arrays(_forwarded(Group.reduce_scatter, current_group))
all_to_all: Final = _over_arrays(_forwarded(Group.all_to_all, current_group))
exchange: Final = _over_arrays(_forwarded(Group.exchange, current_group))
send: Final = _forwarded(Group.send, current_group)
recv: Final = _forwarded(Group.recv, current_group)


def split(color: int | None) -> World | None:
    """The world of the ranks that have the same *color*, an int: each has collectives of its own.

    All ranks of the call call it.  ``world.rank()`` and ``world.size()`` count within the world, and
    ``world.all_reduce(x)`` and all other collectives are of its ranks alone.  It lasts until the call
    ends.  A rank whose color is None gets None.  As MPI's ``Comm_split``, without keys.

    Raises: InvalidType; UsageError in the main program.
    """
    return split_of(current_group("split"), color)


def xp() -> Any:
    """The array module of this worker: CuPy on a GPU, NumPy on a CPU and in the main program.

    Functions that take their array functions from it run on both.
    """
    group = _group()
    return np if group is None else group.device.xp


def barrier() -> None:
    """Wait until all ranks that take part in the call are here."""
    current_group("barrier").barrier()
