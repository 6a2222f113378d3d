"""Synkro runs one array function on all the devices of a machine at once.

The first folder of a path says in which process a line runs: ``controller/`` in the user's process,
``worker/`` in a worker, everything below them in both.  The house has floors; a module imports only
from lower floors, or from its own folder::

   10  extensions/  update rules, and training steps that are one call
       cli/         python -m synkro: info, doctor and bench
       cluster      the former name of python -m synkro.hosts
    9  api          fork, close, data, function, distribute …, on the current session
    8  controller/  THE USER'S PROCESS: sessions, functions, variables, results, the engine
    7  worker/      A WORKER PROCESS: its loop, its rank, one call of one function
       hosts/       several hosts: a process of MPI's on each
    6  comms/       reduce operations, and collectives over arrays
    5  devices/     what a worker computes on
       packing/     a user's function made ready to travel
       graphs/      graphs of PyTensor, as functions
       ipc/         commands and replies, and worker processes
       storage/     arrays in files: read by rows, and written as results
    4  messages/    the commands and replies
       memory/      shared memory, and what becomes of it
    3  plan/        what a call will do: integers in, immutable records out
    2  values/      arrays, variables, and objects of other libraries
    1  here         the current session, or the rank that this process is
       machine      usable cores and memory, and the Python that workers are
       plugs        what happens when another library is imported
    0  errors       every error, drawn as a tree; warnings at the user's line

A call goes down on the left and comes back up on the right::

    function ─ planner ──▶ engine.run ─▶ block ─▶ loop ─▶ rank ─▶ call ─▶ the user's function
    collector ◀─ replies ◀── engine ◀─── block ◀── outbox, segments ◀── merged outputs
"""

import importlib
from typing import TYPE_CHECKING, Any

import synkro.cli.ctrl_c  # noqa: F401  first of all: what follows takes a while

from . import errors, plugs

if TYPE_CHECKING:
    from .api import *
    from .controller.calls.function import Function
    from .controller.calls.replay import debug
    from .controller.data.attached import Ring
    from .controller.data.data import Data
    from .controller.data.stored import StoredData
    from .controller.executor.executor import Executor
    from .controller.session import Session
    from .controller.variables.shared import Shared
    from .errors import *
    from .memory.ring import RingWriter
    from .worker.world import World

__version__ = "0.2.0"

__all__ = ["Session", "close", "fork", "get_n_gpu"]
__all__ += ["Data", "Ring", "RingWriter", "StoredData", "attach", "data", "ring"]
__all__ += ["Executor", "Function", "as_completed", "distribute", "fetch", "function"]
__all__ += ["imap", "map", "push", "transfer"]
__all__ += ["Shared", "get_lengths", "get_shapes", "get_value", "load", "place", "save", "set_value"]
__all__ += ["all_gather", "all_reduce", "broadcast", "gather", "reduce", "scatter", "shared"]
__all__ += ["World", "all_to_all", "barrier", "exchange", "recv", "reduce_scatter", "send", "split"]
__all__ += ["host", "local_rank", "local_size", "rank", "rng", "rows", "size", "xp"]
__all__ += ["debug", "plot_timeline", "summary", "trace"]
__all__ += ["InvalidIndex", "InvalidType", "InvalidValue", "OutputError", "SynkroError", "UsageError"]
__all__ += ["CallTimeout", "CollectiveError", "InternalError", "NotAvailable", "SharedMemoryError"]
__all__ += ["NotForked", "RingBroken", "SessionBroken", "SessionClosed", "SessionError"]
__all__ += ["HostLost", "RemoteTraceback", "ReplayEnded", "WorkerDied", "WorkerError"]


if not TYPE_CHECKING:  # which would take each name for one of these

    def __getattr__(name: str) -> Any:
        """A public name, when it is used first: an error, or all of ``api``, which many workers, and the
        processes of MPI's, never load."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        home = errors if hasattr(errors, name) else importlib.import_module(".api", __name__)
        value = globals()[name] = getattr(home, name)
        return value


def _backend(**options: Any) -> Any:
    """joblib's backend "synkro"."""
    return importlib.import_module(".controller.executor.joblib", __name__).Backend(**options)


plugs.when_imported(
    "joblib.parallel", lambda joblib: joblib.register_parallel_backend("synkro", _backend)
)


def __dir__() -> list[str]:
    return [*__all__, "__version__", "extensions"]
