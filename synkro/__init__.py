"""Synkro runs one array function on all the devices of a machine at once.

The first folder of a path says in which process a line runs: ``controller/`` in the user's process,
``worker/`` in a worker, everything below them in both.  The house has floors; a module imports only
from lower floors, or from its own folder::

   10  extensions/  update rules, and training steps that are one call
       cli/         python -m synkro: info, doctor and bench
    9  api          fork, close, data, function, distribute …, on the current session
    8  controller/  THE USER'S PROCESS: sessions, functions, variables, results, the engine
    7  worker/      A WORKER PROCESS: its loop, its rank, one call of one function
       cluster/     several hosts: a process of MPI's on each
    6  comms/       reduce operations, and collectives over arrays
    5  devices/     what a worker computes on
       packing/     a user's function made ready to travel
       graphs/      graphs of PyTensor, as functions
       ipc/         commands and replies, and worker processes
       storage/     arrays in files: read by rows, and written as results
    4  messages     the commands and replies
       memory/      shared memory, and what becomes of it
    3  plan/        what a call will do: integers in, immutable records out
    2  values/      arrays, variables, and objects of other libraries
    1  here         the current session, or the rank that this process is
    0  errors       every error, drawn as a tree; warnings at the user's line
       machine      usable cores and memory

A call goes down on the left and comes back up on the right::

    function ─ planner ──▶ engine.run ─▶ block ─▶ loop ─▶ rank ─▶ call ─▶ the user's function
    collector ◀─ replies ◀── engine ◀─── block ◀── outbox, segments ◀── merged outputs
"""

from typing import TYPE_CHECKING, Any

import synkro.cli.ctrl_c  # noqa: F401  first of all: what follows takes a while

from .errors import (
    CallTimeout,
    CollectiveError,
    HostLost,
    InternalError,
    InvalidIndex,
    InvalidType,
    InvalidValue,
    NotAvailable,
    NotForked,
    OutputError,
    RemoteTraceback,
    RingBroken,
    SessionBroken,
    SessionClosed,
    SessionError,
    SharedMemoryError,
    SynkroError,
    UsageError,
    WorkerDied,
    WorkerError,
)

if TYPE_CHECKING:
    from .api import (
        all_gather,
        all_reduce,
        all_to_all,
        attach,
        barrier,
        broadcast,
        close,
        data,
        distribute,
        exchange,
        fetch,
        fork,
        function,
        gather,
        get_lengths,
        get_n_gpu,
        get_shapes,
        get_value,
        host,
        imap,
        load,
        local_rank,
        local_size,
        map,
        place,
        plot_timeline,
        push,
        rank,
        recv,
        reduce,
        reduce_scatter,
        ring,
        rng,
        rows,
        save,
        scatter,
        send,
        set_value,
        shared,
        size,
        split,
        summary,
        trace,
        transfer,
        xp,
    )
    from .controller.calls.function import Function
    from .controller.data import Data
    from .controller.foreign import Ring
    from .controller.session import Session
    from .controller.stored import StoredData
    from .controller.variables.shared import Shared
    from .memory.ring import RingWriter
    from .worker.world import World

__version__ = "0.1.0"

__all__ = [
    "CallTimeout",
    "CollectiveError",
    "Data",
    "Function",
    "HostLost",
    "InternalError",
    "InvalidIndex",
    "InvalidType",
    "InvalidValue",
    "NotAvailable",
    "NotForked",
    "OutputError",
    "RemoteTraceback",
    "Ring",
    "RingBroken",
    "RingWriter",
    "Session",
    "SessionBroken",
    "SessionClosed",
    "SessionError",
    "Shared",
    "SharedMemoryError",
    "StoredData",
    "SynkroError",
    "UsageError",
    "WorkerDied",
    "WorkerError",
    "World",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "attach",
    "barrier",
    "broadcast",
    "close",
    "data",
    "distribute",
    "exchange",
    "fetch",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_n_gpu",
    "get_shapes",
    "get_value",
    "host",
    "imap",
    "load",
    "local_rank",
    "local_size",
    "map",
    "place",
    "plot_timeline",
    "push",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "ring",
    "rng",
    "rows",
    "save",
    "scatter",
    "send",
    "set_value",
    "shared",
    "size",
    "split",
    "summary",
    "trace",
    "transfer",
    "xp",
]


def __getattr__(name: str) -> Any:
    """Load all of it when something of it is used first, as many workers, and the processes of MPI's,
    never do."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import api  # noqa: PLC0415

    globals().update({each: getattr(api, each) for each in __all__ if each not in globals()})
    return globals()[name]


def __dir__() -> list[str]:
    return [*__all__, "__version__", "extensions"]
