"""The worker processes of one host, and the descriptors that reach them: started and ended together."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from ..errors import SessionError, SynkroError, WorkerDied, counted
from ..machine import python
from ..memory.arena import arena_file, part_of
from ..memory.interrupts import uninterrupted
from ..memory.mapping import give_back
from ..memory.segment import Segment, descriptors_for
from .block import block_bytes
from .channel import Controller
from .descriptors import Inherited, send_descriptors
from .output import OutputPump, Question, Sink
from .process import BROKEN, ProcessEnd, WorkerProcess, occupy_standard_descriptors, worker_died

SOCKET_PATIENCE = 5.0
"""Seconds that a socket may be full before its worker counts as stuck."""

Environments = Sequence[dict[str, str]]  # of workers, by rank
Note = Callable[[int, str], None]
"""Takes the number of a segment, and what it does: a text in which {} stands for what it holds."""

STDERR = 0.3
"""Seconds that the last lines of a worker that has died may take to come."""

_LAST_WORDS = 1.0  # seconds that the output of ended workers may take to come
_PIECE = 1 << 26  # bytes of an arena that are read at once


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
        sentinels: descriptors that become readable when a process ends.
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
        self._new_worker: Callable[[int], WorkerProcess] | None = None  # of a rank
        self._arena = -1

    def start(self, environments: Environments, board: int, note: Note | None = None) -> Controller:
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

    def _started(self, environments: Environments, board: int) -> Controller:
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
        self._resources.callback(block.close)
        with uninterrupted():
            self._arena = arena_file(board)
            self._resources.callback(os.close, self._arena)
        inherited = Inherited.of([block.fd, self._arena, *eventfds])
        self.share(inherited, board)
        self._resources.callback(self._close_workers)
        of_rank = dict(zip(self.ranks, environments, strict=True))
        self._new_worker = lambda rank: WorkerProcess(rank, hosts, inherited, of_rank[rank])
        for rank in self.ranks:
            with uninterrupted():
                self._workers.append(self._new_worker(rank))
            self._attend(self._workers[-1])
        controller = Controller(block.base.data, size, inherited)
        self._resources.callback(controller.close)
        self._pump.start()
        self.sentinels = [worker.sentinel for worker in self._workers]
        return controller

    def _attend(self, worker: WorkerProcess) -> None:
        worker.socket.settimeout(SOCKET_PATIENCE)
        self._pump.add(worker.rank, worker.stdout, worker.stderr, worker.log)

    def be_anonymous(self) -> None:
        """What the workers print does not say of which rank it is."""
        self._pump.be_anonymous()

    def hear_logs(self) -> None:
        """Hand over what the workers have logged until now."""
        self._pump.catch_up()

    @property
    def asking(self) -> int:
        """A descriptor that is readable when workers ask something."""
        return self._pump.asking

    @property
    def watched(self) -> list[int]:
        """The ``sentinels``, and ``asking``."""
        return [*self.sentinels, self._pump.asking]

    def question(self, rank: int | None) -> Question | None:
        """The next thing that a worker asks, or that of *rank*, if there is something."""
        return self._pump.question(rank)

    def silent(self) -> contextlib.AbstractContextManager[None]:
        """A block in which the user types: what workers print meanwhile comes after it."""
        return self._pump.silent()

    def answer(self, rank: int, number: int, line: str) -> None:
        """Tell a worker what the user has answered to question *number*."""
        with uninterrupted():
            fd = os.memfd_create("answer", os.MFD_CLOEXEC)
            try:
                with open(fd, "wb", closefd=False) as file:
                    file.write(line.encode(errors="surrogateescape"))
                self.pass_descriptors(rank, [(number, fd)])
            finally:
                os.close(fd)

    def bury(self, rank: int) -> None:
        """The worker of *rank*, which has ended, is nobody's concern any more."""
        worker = self._of(rank)
        with uninterrupted():
            self.sentinels.remove(worker.sentinel)
            worker.close()

    def replace(self, rank: int) -> None:
        """Start another worker in the place of that of *rank*, which is buried; what that had in the
        arena is forgotten.

        Raises: SessionError.
        """
        assert self._new_worker is not None
        give_back(self._arena, *part_of(rank))
        try:
            with uninterrupted():
                worker = self._workers[rank - self.ranks.start] = self._new_worker(rank)
                self.sentinels.append(worker.sentinel)
        except (OSError, RuntimeError) as error:
            raise SessionError(
                f"another worker could not be started ({error}){_cure(error)}."
            ) from error
        self._attend(worker)

    def read_arena(self, place: int, nbytes: int) -> Iterator[bytes]:
        """What lies in the arena from *place* on, piece by piece, whoever has put it there."""
        for at in range(place, place + nbytes, _PIECE):
            yield os.pread(self._arena, min(_PIECE, place + nbytes - at), at)

    def _close_workers(self) -> None:
        for worker in self._workers:
            worker.close()

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

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        """Kill the workers of *ranks*, or all."""
        for worker in self._workers:
            if ranks is None or worker.rank in ranks:
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

    def sentinel_of(self, rank: int) -> int:
        """The sentinel of a rank of this host."""
        return self._of(rank).sentinel

    def _of(self, rank: int) -> WorkerProcess:
        return self._workers[rank - self.ranks.start]

    def death(self, sentinel: int) -> WorkerDied:
        """What to raise for the worker whose *sentinel* is ready: how it ended."""
        return self.died(self.end_of(sentinel))

    def died(self, ended: ProcessEnd, at: str = "", cure: str = BROKEN) -> WorkerDied:
        """What to raise for a process that has *ended*; *at* begins the sentence, *cure* is the next."""
        tail = self._pump.stderr_tail(ended.rank)
        return worker_died(ended, tail, self.host_of(ended.rank), at, cure)

    def end_of(self, sentinel: int) -> ProcessEnd:
        """How the worker has ended whose *sentinel* is ready, after its last output has come."""
        dead = next(worker for worker in self._workers if worker.sentinel == sentinel)
        self._pump.await_end(dead.rank, STDERR)
        self._pump.catch_up()
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
