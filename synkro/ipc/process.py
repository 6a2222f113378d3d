"""One worker process: start it, watch it, interrupt it, stop it.

A worker is a fresh interpreter (nothing is forked after threads or CUDA have started) that begins in
``synkro.worker.loop``.  It inherits its descriptors and nothing else.

It cannot outlive the main process: the main process holds the write end of a pipe, its *lifeline*,
and the worker asks the kernel for a SIGKILL to itself when that end is closed.  That needs no thread,
works while native code holds the interpreter lock, and, unlike PR_SET_PDEATHSIG, does not depend on
the thread that started the worker.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO, NamedTuple, NoReturn

from ..errors import WorkerDied
from ..machine import start
from .descriptors import Inherited

_STANDARD = 2  # the last of the standard descriptors
_F_SETSIG = 10  # Linux; the standard library has no name for it


def give_up(why: str) -> NoReturn:
    """In the worker: end at once, from any thread, without cleaning up; WorkerDied will say *why*."""
    print(f"Synkro: {why}", file=sys.stderr, flush=True)
    os._exit(1)


def hold_on_to(lifeline: int) -> None:
    """In the worker: be killed by the kernel when the main process lets go of the lifeline."""
    own = os.open(f"/proc/self/fd/{lifeline}", os.O_RDONLY | os.O_CLOEXEC)  # with a signal of its own
    os.close(lifeline)
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(own, select.POLLIN)
    if poll.poll(0):  # the main process went before the kernel watched for that
        os.kill(os.getpid(), signal.SIGKILL)


def occupy_standard_descriptors() -> None:
    """Open the null device in the place of a closed standard input, output or error.

    Else a descriptor of ours could be 0, 1 or 2, and workers could not inherit it.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= _STANDARD:
        os.set_inheritable(fd, True)
    os.close(fd)


class WorkerProcess:
    """A worker's process, its lifeline, its sentinel, its socket and its pipes.

    Attributes:
        pid, sentinel: the process, and a descriptor that becomes readable when it ends.
        socket: where it receives descriptors.
        stdout, stderr: the read ends of its pipes; whoever reads them closes them.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hosts: Sequence[range],
        inherited: Inherited,
        environment: Mapping[str, str],
    ) -> None:
        """Start that of *rank*, one of *size*, which are distributed over *hosts*."""
        self.rank = rank
        with contextlib.ExitStack() as undo:
            with contextlib.ExitStack() as theirs:
                lifeline, self._lifeline = os.pipe()
                theirs.callback(os.close, lifeline)
                undo.callback(os.close, self._lifeline)
                self.socket, other = socket.socketpair()
                theirs.callback(other.close)
                undo.callback(self.socket.close)
                fds = [other.fileno(), lifeline, *inherited.listed()]
                self._process = start(
                    "from synkro.worker.loop import main; main(argument)",
                    f"{rank} {size} {_spelled(hosts)} {' '.join(map(str, fds))}",
                    fds=fds,
                    environment=environment,
                    alone=True,
                )
            undo.callback(self._process.wait)
            undo.callback(self._process.kill)
            self.sentinel = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self.pid = self._process.pid
        self.stdout: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self.stderr: BinaryIO = self._process.stderr  # type: ignore[assignment]

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C would; a worker obeys it only while it does a command."""
        self._signal(signal.SIGINT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.sentinel, number)

    def ended(self, patience: float) -> bool:
        """Whether the process has ended, after waiting *patience* seconds for it."""
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(patience * 1000))

    def status(self) -> int:
        """The exit code of the ended process, or minus the number of the signal that ended it."""
        return self._process.wait()

    def close(self) -> None:
        """Kill the process if it still runs, wait for it, and give its descriptors back."""
        self.kill()
        self._process.wait()
        self.release()

    def release(self) -> None:
        """Give the descriptors back without touching the process (in a fork of the main process)."""
        self.socket.close()
        for fd in (self._lifeline, self.sentinel):
            with contextlib.suppress(OSError):
                os.close(fd)
        self._lifeline = self.sentinel = -1


def _spelled(hosts: Sequence[range]) -> str:
    return ",".join(f"{ranks.start}-{ranks.stop}" for ranks in hosts)


def spelled(hosts: str) -> list[range]:
    """In the worker: the ranks of each host, as they came in its argument."""
    return [range(*map(int, ranks.split("-"))) for ranks in hosts.split(",")]


class ProcessEnd(NamedTuple):
    """A process that has ended: *status* is its exit code, or minus the number of a signal."""

    rank: int
    pid: int
    status: int


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, perhaps)",
    signal.SIGSEGV: " (inputs are read-only: a library that writes to one without checking ends the "
    "worker like this; copy the input first, with .clone() in PyTorch)",
}


def worker_died(ended: ProcessEnd, stderr: str, host: str = "") -> WorkerDied:
    """What to raise for the end of a process; on which *host* it ran is told if there are several."""
    rank, pid, status = ended
    how = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
    hint = _HINTS.get(-status, "")
    ending = f" The end of its stderr:\n{stderr}" if stderr else ""
    what = f"the worker of rank {rank} (pid {pid}){f' on {host}' if host else ''} {how}"
    return WorkerDied(
        f"{what}{hint}. Call close() and then fork() to go on; all Data keep their contents.{ending}",
        rank=rank,
        pid=pid,
        exitcode=None if status < 0 else status,
        signal=-status if status < 0 else None,
        stderr=stderr,
        host=host,
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
