"""One worker process: start it, watch it, interrupt it, stop it.

A worker is a fresh interpreter (nothing is forked after threads or CUDA have started) that begins in
``synkro.worker.begin``.  It inherits its descriptors and nothing else.

It cannot outlive the main process: the main process holds the write end of a pipe, its *lifeline*,
and the kernel sends the worker a SIGKILL when that end is closed.  That needs no thread, works while
native code holds the interpreter lock, and, unlike PR_SET_PDEATHSIG, does not depend on the thread that
started the worker.  The main process asks for it when it has started the worker, whose interpreter may
take long to begin; and the worker itself, first of all, in case that the main process went before.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO, Final, NamedTuple, NoReturn

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
    _tie(own, os.getpid())
    if select.select([own], [], [], 0)[0]:  # the main process went before the kernel watched for that
        os.kill(os.getpid(), signal.SIGKILL)


def _tie(lifeline: int, pid: int) -> None:
    """Let the kernel kill the process when the other end of its lifeline is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
    fcntl.fcntl(lifeline, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


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
        log: what it sends through the socket; as these.
    """

    def __init__(
        self, rank: int, hosts: Sequence[range], inherited: Inherited, environment: Mapping[str, str]
    ) -> None:
        """Start the worker of *rank*, which is one of those on *hosts*."""
        self.rank = rank
        with contextlib.ExitStack() as undo:
            with contextlib.ExitStack() as theirs:
                lifeline, self._lifeline = os.pipe()
                theirs.callback(os.close, lifeline)
                undo.callback(os.close, self._lifeline)
                own, other = socket.socketpair()
                self.socket: socket.socket = own
                theirs.callback(other.close)
                undo.callback(self.socket.close)
                self.log: BinaryIO = io.FileIO(os.dup(own.fileno()))
                undo.callback(self.log.close)
                fds = [lifeline, other.fileno(), *inherited.listed()]
                self._process = start(
                    "from synkro.worker.begin import main; main(argument)",
                    json.dumps([rank, [(ranks.start, ranks.stop) for ranks in hosts], fds]),
                    fds=fds,
                    environment=environment,
                    alone=True,
                )
                undo.callback(self._process.wait)
                undo.callback(self._process.kill)
                _tie(lifeline, self._process.pid)
            self.sentinel: int = os.pidfd_open(self._process.pid)
            undo.pop_all()
        self.pid: Final = self._process.pid
        self.stdout: BinaryIO = self._process.stdout  # type: ignore[assignment]
        self.stderr: BinaryIO = self._process.stderr  # type: ignore[assignment]

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C would; a worker obeys it only while it does a command."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.sentinel, signal.SIGINT)

    def kill(self) -> None:
        if self.sentinel == -1:  # it has been closed
            return
        try:
            signal.pidfd_send_signal(self.sentinel, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:  # this program has changed its user; the kernel kills it nevertheless
            self._let_go()

    def ended(self, patience: float) -> bool:
        """Whether the process has ended, after waiting *patience* seconds for it."""
        poll = select.poll()
        poll.register(self.sentinel, select.POLLIN)
        return bool(poll.poll(patience * 1000))

    def status(self) -> int | None:
        """The exit code of the ended process, or minus the number of the signal that ended it.

        None where the system has forgotten it, or has told somebody else in this program.
        """
        try:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        except ChildProcessError:
            return None
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def close(self) -> None:
        """Kill the process if it still runs, wait for it, and give its descriptors back."""
        self.kill()
        self._process.wait()
        self.release()

    def _let_go(self) -> None:
        """Let go of the lifeline."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline != -1:
            os.close(lifeline)

    def release(self) -> None:
        """Give the descriptors back without touching the process (in a fork of the main process)."""
        self.socket.close()
        self._let_go()
        with contextlib.suppress(OSError):
            os.close(self.sentinel)
        self.sentinel = -1


class ProcessEnd(NamedTuple):
    """A process that has ended: *status* is its exit code, minus the number of a signal, or None."""

    rank: int
    pid: int
    status: int | None


_HINTS: dict[int, str] = {
    signal.SIGKILL: " (out of memory, perhaps)",
    signal.SIGSEGV: " (a library that wrote to an input, perhaps: these are read-only; copy it first, "
    "with .clone() in PyTorch)",
}


_UNKNOWN = (
    " (how is not known: this program, or what started it, ignores SIGCHLD, or something in it waits "
    "for all processes, as os.wait() does, and the system tells how one has ended only once)"
)


BROKEN = "Call close() and then fork() to go on; all Data keep their contents."
"""What to do where a worker has died, and no other takes its place."""


def worker_died(ended: ProcessEnd, stderr: str, host: str, at: str, cure: str) -> WorkerDied:
    """What to raise for the end of a process; on which *host* it ran is told if there are several.

    *at* begins the sentence, and *cure* is the one after it.
    """
    rank, pid, status = ended
    number = -status if status is not None and status < 0 else None
    if status is None:
        how, hint = "ended", _UNKNOWN
    elif number is None:
        how, hint = f"ended with exit code {status}", ""
    else:
        names = {each.value: each.name for each in signal.Signals}
        how = f"was killed by {names.get(number, f'signal {number}')}"
        hint = _HINTS.get(number, "")
    ending = f" The end of its stderr:\n{stderr}" if stderr else ""
    what = f"the worker of rank {rank} (pid {pid}){f' on {host}' if host else ''} {how}"
    return WorkerDied(
        f"{at}{what}{hint}. {cure}{ending}",
        rank=rank,
        pid=pid,
        exitcode=status if number is None else None,
        signal=number,
        stderr=stderr,
        host=host,
    )
