"""The worker processes of one host, and the descriptors that reach them: started and ended together."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from ..errors import SessionError, SynkroError, WorkerDied, counted
from ..machine import python
from ..memory.arena import arena_file
from ..memory.interrupts import uninterrupted
from ..memory.segment import Segment, descriptors_for
from .block import block_bytes
from .channel import Controller
from .descriptors import Inherited, send_descriptors
from .output import OutputPump, Sink
from .process import ProcessEnd, WorkerProcess, occupy_standard_descriptors, worker_died

SOCKET_PATIENCE = 5.0
"""Seconds that a socket may be full before its worker counts as stuck."""

Note = Callable[[int, str], None]
"""Takes the number of a segment, and what it does: a text in which {} stands for what it holds."""

STDERR = 0.3
"""Seconds that the last lines of a worker that has died may take to come."""

_LAST_WORDS = 1.0  # seconds that the output of ended workers may take to come


def _cure(error: Exception) -> str:
    """What to do about *error*, which came as processes and threads were started."""
    if not isinstance(error, OSError) or error.errno in (errno.EAGAIN, errno.ENOMEM):
        return ": start fewer, or raise the limit of processes (ulimit -u)"
    if error.filename is None:
        return ""
    return f": they are started from {python()}, and fork(python=…) names another Python"


class WorkerPool:
    """The worker processes of one host, which are some of the ranks of a session, one after the other.

    Attributes:
        hosts: the ranks of each host of the session.
        ranks: those on this one.
        sentinels: in the order of *ranks*, descriptors that become readable when a process ends.
    """

    def __init__(self, hosts: Sequence[range], here: int = 0, sink: Sink | None = None) -> None:
        """The workers of ``hosts[here]``; *hosts* are the ranks of each host.

        *sink*, if given, gets what the workers print, in the place of the user.
        """
        self.hosts = hosts
        self.ranks: Final = hosts[here]
        self.sentinels: list[int] = []
        self._workers: list[WorkerProcess] = []
        self._pump = OutputPump(sink)
        self._resources = contextlib.ExitStack()

    def start(
        self, environments: Sequence[dict[str, str]], board: int, note: Note | None = None
    ) -> Controller:
        """Start a worker with each of *environments*; returns the controller of their channel.

        *board* is the number of bytes where they meet.  *note*, if given, is told what segments do
        between hosts.

        Raises: SessionError, SharedMemoryError if they cannot be started; NotAvailable.
        """
        what = f"{counted(len(self.ranks), 'worker')} could not be started"
        try:
            with descriptors_for(what):
                return self._started(environments, board)
        except SynkroError:
            raise
        except (OSError, RuntimeError) as error:
            raise SessionError(f"{what} ({error}){_cure(error)}.") from error

    def _started(self, environments: Sequence[dict[str, str]], board: int) -> Controller:
        occupy_standard_descriptors()
        hosts = sorted(filter(None, self.hosts), key=lambda ranks: ranks.start)
        size = sum(map(len, hosts))
        eventfds = []
        with uninterrupted():
            for _ in range(Inherited.count(size) - 2):
                eventfds.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                self._resources.callback(os.close, eventfds[-1])
        self._resources.callback(self._pump.close, _LAST_WORDS)
        block = Segment.create(0, block_bytes(size))
        arena = arena_file(board)
        inherited = Inherited.of([block.fd, arena, *eventfds])
        try:
            self.share(inherited, board)
            for rank, environment in zip(self.ranks, environments, strict=True):
                with uninterrupted():
                    worker = WorkerProcess(rank, hosts, inherited, environment)
                    self._workers.append(worker)
                    self._resources.callback(worker.close)
                self._pump.add(rank, worker.stdout, worker.stderr)
                worker.socket.settimeout(SOCKET_PATIENCE)
        finally:
            os.close(arena)
        controller = Controller(block.base.data, size, inherited)
        self._resources.callback(controller.close)
        block.close()
        self._pump.start()
        self.sentinels = [worker.sentinel for worker in self._workers]
        return controller

    def share(self, inherited: Inherited, board: int) -> None:
        """The workers will get these descriptors; *board* is the number of bytes where they meet."""

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids, in the order of ``ranks``."""
        return tuple(worker.pid for worker in self._workers)

    def host_number(self, rank: int) -> int:
        """The number of a rank's host."""
        return next(number for number, ranks in enumerate(self.hosts) if rank in ranks)

    def host_of(self, rank: int) -> str:
        """The name of a rank's host; empty if there is one host."""
        return ""

    def interrupt(self, ranks: Sequence[int]) -> None:
        """Send SIGINT to *ranks*, as Ctrl-C would."""
        for rank in ranks:
            self._of(rank).interrupt()

    def kill(self) -> None:
        """Kill all workers."""
        for worker in self._workers:
            worker.kill()

    def pass_descriptors(self, rank: int, numbered: Sequence[tuple[int, int]]) -> None:
        """Pass descriptors to a worker, as pairs ``(number, fd)``; kill it if it cannot be reached.

        Raises: TimeoutError if it does not take them.
        """
        try:
            send_descriptors(self._of(rank).socket, numbered)
        except TimeoutError:
            raise
        except OSError:  # its end of the socket is closed: it is dead, or has closed it by mistake
            self._of(rank).kill()

    def _of(self, rank: int) -> WorkerProcess:
        return self._workers[rank - self.ranks.start]

    def death(self, sentinel: int) -> WorkerDied:
        """What to raise for the worker whose *sentinel* is ready: how it ended."""
        return self._died(self.end_of(sentinel))

    def _died(self, ended: ProcessEnd) -> WorkerDied:
        tail = self._pump.stderr_tail(ended.rank)
        return worker_died(ended, tail, self.host_of(ended.rank))

    def end_of(self, sentinel: int) -> ProcessEnd:
        """How the worker has ended whose *sentinel* is ready, after its last output has come."""
        dead = next(worker for worker in self._workers if worker.sentinel == sentinel)
        self._pump.await_end(dead.rank, STDERR)
        return ProcessEnd(dead.rank, dead.pid, dead.status())

    def ended(self, patience: float) -> None:
        """Wait until all processes have ended, at most *patience* seconds."""
        deadline = time.monotonic() + patience
        for worker in self._workers:
            worker.ended(max(0.0, deadline - time.monotonic()))

    def close(self) -> None:
        """Kill what still runs, and give everything back."""
        self._resources.close()

    def release(self) -> None:
        """In a fork of the main process: the workers are the parent's; let go of their lifelines."""
        for worker in self._workers:
            worker.release()
