"""Synkro runs one array function on all the devices of a machine at once.

The house has floors; a module imports only from lower ones, or from its own folder::

   10  extensions  update rules, and training steps that are one call
       tracing     where the time of the calls of the current session goes
       cli/        python -m synkro: info, doctor and bench
    9  api         fork, close, data, function, distribute …, on the current session
    8  session     Session: an engine with the functions and data that belong to it
    7  function    Function: plan, run, collect
       graphs      functions of PyTensor graphs
       planning    from a function's arguments to the plan of a call
       distribution  the functions of a session, and how they get to the workers
       collect     from all ranks' replies to the user's result
       variables   the variables of a session, and the collectives over them
       shared      Shared: a variable on the workers, as the main process has it
       linked      PyTensor's shared variables, and the worker variables that stand for them
       saving      variables and generators, to a file and back
       alone       a function in the main process by itself
       data        Data: a typed array in shared memory
    6  engine      the workers of a session, and run(command), the only door to them
    5  worker      a worker's loop: receive, do, reply
       replica     what every rank is: its functions, variables, segments; a handler a command
       calling     one call of one function: pieces, outputs, updates
       group       the ranks of a call, as the function that runs on them sees them
       resident    a variable as one rank has it
    4  comms/      reduce operations, and collectives over arrays
       trace       what the main process and every rank did, and when
       timeline    a trace as a file, a table, and a picture
       failures    what failed in the workers, as errors of the main process
       frontends/  a user's function made ready to travel
    3  devices/    what a worker computes on
    2  messages    the commands and replies
       ipc/        shared memory, wake-ups, processes, their output
    1  variable    what every variable is
       arrays      values as arrays that have arithmetic: checks and casts
       plan/       what a call will do: integers in, frozen dataclasses out
    0  errors      every error, drawn as a tree
       machine     usable cores and memory
       foreign     objects of other libraries, told apart without importing them
       owners      whether an object has other owners than the one that asks
       progress    lines of status, and how far long work is
       world       the module-level variables: the current session, or this worker's replica

A call goes down on the left and comes back up on the right::

    function ─ planning ──▶ engine.run ─▶ block ─▶ worker ─▶ replica ─▶ the user's function
    collect ◀── replies ◀── engine ◀─── block ◀── outbox, segments ◀── merged outputs
"""

from .api import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    close,
    data,
    distribute,
    fork,
    function,
    gather,
    get_lengths,
    get_shapes,
    get_value,
    load,
    rank,
    recv,
    reduce,
    reduce_scatter,
    rng,
    save,
    scatter,
    send,
    set_value,
    shared,
    size,
    xp,
)
from .data import Data
from .errors import (
    CallTimeout,
    CollectiveError,
    InternalError,
    InvalidIndex,
    InvalidType,
    InvalidValue,
    NotAvailable,
    NotForked,
    OutputError,
    RemoteTraceback,
    SessionBroken,
    SessionClosed,
    SessionError,
    SharedMemoryError,
    SynkroError,
    UsageError,
    WorkerDied,
    WorkerError,
)
from .function import Function
from .session import Session
from .shared import Shared
from .tracing import plot_timeline, summary, trace

__version__ = "0.1.0"

__all__ = [
    "CallTimeout",
    "CollectiveError",
    "Data",
    "Function",
    "InternalError",
    "InvalidIndex",
    "InvalidType",
    "InvalidValue",
    "NotAvailable",
    "NotForked",
    "OutputError",
    "RemoteTraceback",
    "Session",
    "SessionBroken",
    "SessionClosed",
    "SessionError",
    "Shared",
    "SharedMemoryError",
    "SynkroError",
    "UsageError",
    "WorkerDied",
    "WorkerError",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "barrier",
    "broadcast",
    "close",
    "data",
    "distribute",
    "fork",
    "function",
    "gather",
    "get_lengths",
    "get_shapes",
    "get_value",
    "load",
    "plot_timeline",
    "rank",
    "recv",
    "reduce",
    "reduce_scatter",
    "rng",
    "save",
    "scatter",
    "send",
    "set_value",
    "shared",
    "size",
    "summary",
    "trace",
    "xp",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__", "extensions"]
