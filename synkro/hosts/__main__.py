"""``python -m synkro.hosts prog.py``: a program whose hosts mpiexec, or srun, has started.

::

    srun ─┬─ process 0, the gateway ── starts python prog.py ── fork(hosts="mpi")
          │        └───────────────── socket ─────────────────────────┘
          └─ process 1, the leader of the second host

The program is a process of its own, outside of MPI.  It may open one session after the other.  Ctrl-C,
and what else the launcher signals, reaches it by itself: it is in the process group of process 0, and
mpiexec, srun and terminals signal whole groups.  So the processes of MPI's let SIGINT and SIGTERM pass;
what comes before the program is there, process 0 hands on to it.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .cleanup import temporary, watch
from .joined import GATEWAY
from .names import clean, copies
from .process import meet, work
from .seals import ForgedError, LostError

if TYPE_CHECKING:
    from .gateway import Gateway

_BEGINNING = 120  # seconds until all hosts have begun MPI, which srun may start one after the other
_GRACE = 5.0  # seconds in which the leaders can end their workers after the program

USAGE = """usage: mpiexec -n HOSTS -ppn 1 python -m synkro.hosts PROGRAM.py [ARGUMENT ...]
       srun --ntasks-per-node=1 python -m synkro.hosts PROGRAM.py [ARGUMENT ...]

Runs PROGRAM.py once, on the first host; fork(hosts="mpi") in it starts workers on all hosts.
In the place of PROGRAM.py stands whatever python takes: -m MODULE, -c CODE."""


def main(arguments: list[str]) -> int:
    """Be one of the processes; returns the exit status of the program, or 0."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 2
    passed: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # a handler, which unlike SIG_IGN no child inherits
        signal.signal(number, lambda number, _: passed.append(number))
    signal.alarm(_BEGINNING)
    folder = os.path.join(temporary(), f"synkro-{os.urandom(8).hex()}")
    keeper = watch(folder, ours=False)
    os.mkdir(folder, 0o700)
    status = [0]

    def run(gateway: Gateway) -> None:
        status.append(_run(gateway, arguments, folder, passed))

    work(None, copies(os.environ), keeper, run, {})
    return status[-1]


def _run(gateway: Gateway, arguments: list[str], folder: str, passed: Sequence[int]) -> int:
    """Serve the program's sessions until it ends; returns its exit status.

    It gets the signals that have *passed* before it was there.
    """
    path = str(Path(folder, "gateway"))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    from .wire import BEAT  # noqa: PLC0415  which begins MPI

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen(1)
        environment = clean(os.environ) | {GATEWAY: path}
        program = subprocess.Popen([sys.executable, *flags, *arguments], env=environment)
        ended = os.pidfd_open(program.pid)
        for number in passed:
            program.send_signal(number)
        threading.Thread(target=_bound, args=[program], daemon=True).start()
        heard = [server.fileno(), ended]
        try:
            while ended not in (ready := select.select(heard, [], [], BEAT)[0]):
                gateway.beat()
                if ready:
                    connected, _ = server.accept()
                    meet(gateway, connected)
        except LostError as error:
            if isinstance(error, ForgedError):
                print(f"Synkro: {error}", file=sys.stderr, flush=True)
            server.close()  # there can be no other session
            os._exit(_status(program))  # MPI would wait for the host
    return _status(program)


def _bound(program: subprocess.Popen[bytes]) -> None:
    """However the other hosts do: end some seconds after the program, also where MPI holds on to all."""
    program.wait()
    signal.setitimer(signal.ITIMER_REAL, _GRACE)  # the kernel ends this process


def _status(program: subprocess.Popen[bytes]) -> int:
    """The exit status of a program, as a shell tells it, after its end."""
    code = program.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
