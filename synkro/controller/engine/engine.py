"""The engine of a session: its workers, its segments, and ``run``, the only door to the workers.

    run(command)
      settle      answers that an interrupted call left open are waited for first
      send        descriptors of new segments over the sockets, the command through the block
      wait        for all replies and all processes' ends together, until the deadline
      read        a failure becomes an exception, everything else is returned, one reply a rank

Nothing in here knows functions or ``Data``.
"""

from __future__ import annotations

import atexit
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from itertools import count
from typing import Any

from numpy.typing import NDArray

from ...comms.shm import shared_file
from ...errors import CallTimeout, InternalError, SessionBroken, SessionClosed, SessionError
from ...ipc.channel import AREA, Controller, block_bytes
from ...ipc.process import WorkerProcess, occupy_standard_descriptors
from ...memory.departures import Departures
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment
from ...messages import (
    Attach,
    Command,
    Deliver,
    Exit,
    Failed,
    Housekeeping,
    Indirect,
    Phase,
    Release,
    TooLong,
)
from ...plan.call import Access, Region
from ...values.cache import Cache
from ..progress import status_line
from ..tracing.trace import Trace
from .failures import call_timeout, ranks_in_words, worker_died, worker_error
from .output import OutputPump

_GRACE = 1.0  # seconds that a worker has for leaving by itself, and a call for ending before a close
_SOCKET_PATIENCE = 5.0  # seconds that a socket may be full before its worker counts as stuck
_DEPARTURES = 2000  # objects that are gone, of each kind, of which the workers hear at a time
_WORTH_ASKING = 1 << 24  # bytes that the workers are told to give back before memory is asked for
_QUIET = 1.0  # seconds after which a wait for an interrupted call says so, and interrupts it again


class State(Enum):
    """What an engine can do."""

    STARTING = "processes are being started"
    READY = "all workers live; commands are served"
    BROKEN = "a worker died: the others were stopped, only close() is left"
    CLOSED = "no worker, no descriptor is left; Data can still be read"


class Engine:
    """The workers of one session, one a device.

    Attributes:
        size: the number of workers.
        lock: held during a call; whoever makes several commands one call holds it around them.
        trace, marks: what records its calls, or None; where that finds what the workers do.
        at_close: what to do before the workers end, or None.
        open: whether a command may lack answers, as it was interrupted.
        stamps: None, or numbers in shared memory by which workers tell what has changed (``touch``).
        verbose, say: whether status is to be shown; prints a line of it, if so.
    """

    def __init__(
        self,
        environments: Sequence[dict[str, str]],
        timeout: float | None,
        verbose: bool,
    ) -> None:
        """Start a worker with each of *environments*.  They are ready when they answer a command."""
        self.size = len(environments)
        self.lock = threading.RLock()
        self.verbose, self.say = verbose, status_line(verbose)
        self.trace: Trace | None = None
        self.at_close: Callable[[], None] | None = None
        self.stamps: NDArray[Any] | None = None
        self._timeout = timeout
        self._state = State.STARTING
        self._numbers = count(1)
        self._attached: dict[int, int] = {}  # the workers' segments: bytes by number
        self._gone_segments: Departures[int] = Departures()
        self._gone_functions: Departures[int] = Departures()
        self._gone_variables: Departures[int] = Departures()
        self._decoded: Cache[bytes, Any] = Cache()
        self.open = False
        self._begun = False  # whether the workers have answered once: before, SIGINT would kill them
        self._why_broken = ""
        self._pump = OutputPump()
        self._workers: list[WorkerProcess] = []
        self._wake_main = -1
        self._wake_workers = -1
        self._wakes: list[int] = []  # of the ranks, among themselves
        try:
            self._start(environments)
        except (OSError, RuntimeError) as error:
            self.close()
            raise SessionError(
                f"{self.size} workers could not be started ({error}): start fewer, or raise the limits "
                f"of open files (ulimit -n) and processes (ulimit -u)."
            ) from error
        except BaseException:
            self.close()
            raise
        _engines.add(self)

    def _start(self, environments: Sequence[dict[str, str]]) -> None:
        occupy_standard_descriptors()
        with uninterrupted():
            self._wake_main, self._wake_workers = os.eventfd(0), os.eventfd(0)
            self._wakes += [os.eventfd(0) for _ in range(self.size)]
        block = Segment.create(0, block_bytes(self.size))
        arena = shared_file(self.size)
        try:
            self._start_workers(
                environments, (block.fd, arena, self._wake_main, self._wake_workers, *self._wakes)
            )
        finally:
            os.close(arena)
        self._controller = self.marks = Controller(
            block.base.data,
            self._wake_main,
            self._wake_workers,
            [worker.socket for worker in self._workers],
        )
        self._sentinels = [worker.sentinel for worker in self._workers]
        block.close()
        self._pump.start()
        self._state = State.READY

    def _start_workers(self, environments: Sequence[dict[str, str]], shared_fds: Sequence[int]) -> None:
        for rank, environment in enumerate(environments):
            with uninterrupted():
                worker = WorkerProcess(rank, shared_fds, environment, self.size)
                self._workers.append(worker)
            self._pump.add(rank, worker.stdout, worker.stderr)
            worker.socket.settimeout(_SOCKET_PATIENCE)

    # ── what is there ────────────────────────────────────────────────────────────────────────────

    @property
    def state(self) -> State:
        return self._state

    @property
    def pids(self) -> tuple[int, ...]:
        """The process ids of the workers, by rank."""
        return tuple(worker.pid for worker in self._workers)

    def require_ready(self) -> None:
        """Raises: SessionClosed, SessionBroken."""
        if self._state is State.READY:
            return
        if self._state is State.CLOSED:
            raise SessionClosed(
                "this session was closed: call fork() for a new one, and make its functions and "
                "data anew."
            )
        if self._state is State.BROKEN:
            raise SessionBroken(
                f"this session is broken: {self._why_broken} Call close() and then fork() for a "
                f"new one; all Data can still be read."
            )

    # ── segments and functions by number ─────────────────────────────────────────────────────────

    def number(self) -> int:
        """A number that no segment and no function of this session has had."""
        return next(self._numbers)

    def allocate(self, nbytes: int) -> Segment:
        """A new segment of zeroed memory, freed when nothing refers to it any more.

        Raises: SharedMemoryError.
        """
        self.flush_drops()
        return self.adopt(Segment.create(self.number(), nbytes))

    def adopt(self, segment: Segment) -> Segment:
        """Tell the workers when *segment* is gone."""
        self._gone_segments.watch(segment, segment.number)
        return segment

    @property
    def on_gpus(self) -> bool:
        """Whether the workers compute on GPUs."""
        return self.stamps is not None

    def touch(self, segment: Segment) -> None:
        """The contents of *segment* may have changed since the last call.

        Workers on GPUs keep copies of some; several segments may share a number, which only costs.
        """
        if self.stamps is not None:
            self.stamps[segment.number % len(self.stamps)] += 1

    def drop_function_with(self, owner: object, number: int) -> None:
        """Tell the workers that function *number* is gone when *owner* is."""
        self._gone_functions.watch(owner, number)

    def drop_variable_with(self, owner: object, number: int) -> None:
        """Tell the workers that variable *number* is gone when *owner* is."""
        self._gone_variables.watch(owner, number)

    def flush_drops(self) -> None:
        """Before memory is asked for: let the workers give back what they still hold of the freed.

        Of a little they hear with the next command.
        """
        gone = sum(self._attached.get(number, 0) for number in self._gone_segments.payloads())
        if self._state is State.READY and gone >= _WORTH_ASKING:
            self.run(Release())

    # ── run ──────────────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        command: Command | bytes,
        segments: Iterable[tuple[Segment, Access]] = (),
        *,
        on_tick: Callable[[], None] | None = None,
        timeout: float | None = None,
    ) -> list[Any]:
        """Send *command* (an object, or one already pickled) to all ranks; returns their replies.

        *segments* are those that it names.  *timeout*, in seconds, stands in for the session's.

        Raises: WorkerError, OutputError … if a rank failed, WorkerDied, CallTimeout, SessionClosed,
        SessionBroken.
        """
        with self.lock:
            if self.trace is None or self.trace.within:
                return self._run(command, segments, on_tick, timeout)
            name = "transfer" if isinstance(command, bytes) else type(command).__name__.lower()
            with self.trace.call(name):
                return self._run(command, segments, on_tick, timeout)

    def _run(
        self,
        command: Command | bytes,
        segments: Iterable[tuple[Segment, Access]],
        on_tick: Callable[[], None] | None,
        timeout: float | None,
    ) -> list[Any]:
        self.require_ready()
        limit = self._timeout if timeout is None else timeout
        if self.open:
            self.settle(limit)
        deadline = _after(limit)
        payload = command if isinstance(command, bytes) else pickle.dumps(command, 5)
        if len(payload) > AREA // 2:
            payload, segment = self._indirect(payload)
            segments = [*segments, (segment, Access.READ)]
        self.open = True
        try:
            trace = self.trace
            if trace is not None:
                trace.mark("send")
            self._send(payload, segments)
            if trace is not None:
                trace.mark("wait")
            self._wait(deadline, limit, on_tick)
            if trace is not None:
                trace.mark("collect")
        except BaseException:
            self._abandon()
            raise
        self.open = False
        self._begun = True
        return self._read()

    def steps(self, totals: Sequence[int], phases: Sequence[Phase]) -> int:
        """How many steps are done, where rank r has ``totals[r]``, and counts them in these *phases*."""
        done = list(totals)
        waiting = self._controller.unanswered()
        if not waiting:  # whoever has answered may have failed, which is known in a moment
            return 0
        for rank in waiting:
            phase, number = self._controller.whereabouts(rank)
            done[rank] = number if phase in phases else 0
        return sum(done)

    def _indirect(self, payload: bytes) -> tuple[bytes, Segment]:
        """A command that does not fit its place goes through a segment of its own."""
        segment = self.adopt(Segment.create(self.number(), len(payload)))
        segment.base[:] = memoryview(payload)
        region = Region(segment.number, 0, (len(payload),), "|u1")
        return pickle.dumps(Indirect(region), 5), segment

    def _send(self, payload: bytes, segments: Iterable[tuple[Segment, Access]]) -> None:
        new = {s.number: (s, access) for s, access in segments if s.number not in self._attached}
        gone = (self._gone_segments, self._gone_functions, self._gone_variables)
        if not new and not any(gone):
            self._controller.send(payload, b"")
            return
        counts = [min(len(departures), _DEPARTURES) for departures in gone]
        freed, functions, variables = (
            departures.payloads()[:known] for departures, known in zip(gone, counts, strict=True)
        )
        drops = tuple(number for number in freed if number in self._attached)
        attach = tuple(Attach(s.number, s.nbytes, access) for s, access in new.values())
        housekeeping = pickle.dumps(Housekeeping(attach, drops, functions, variables), 5)
        if len(payload) + len(housekeeping) > AREA:
            raise InternalError(f"{len(housekeeping)} bytes of housekeeping do not fit the block.")
        with uninterrupted():  # what is known of the workers stays true
            self._pass_descriptors([(s.number, s.fd) for s, _ in new.values()])
            self._controller.send(payload, housekeeping)
            for number in drops:
                del self._attached[number]
            self._attached |= {number: segment.nbytes for number, (segment, _) in new.items()}
            for departures, known in zip(gone, counts, strict=True):
                departures.forget(known)

    def _pass_descriptors(self, numbered: list[tuple[int, int]]) -> None:
        if not numbered:
            return
        for rank in range(self.size):
            try:
                self._controller.send_descriptors(rank, numbered)
            except TimeoutError:
                raise self._late([rank], _SOCKET_PATIENCE) from None
            except OSError:  # its end is closed: it is dead, or lives without ears
                self._workers[rank].kill()
                self._check_alive([self._sentinels[rank]])

    def _wait(
        self, deadline: float | None, limit: float | None, on_tick: Callable[[], None] | None = None
    ) -> None:
        self._check_alive(self._controller.wait(deadline, self._sentinels, on_tick))
        if deadline is not None and (late := self._controller.unanswered()):
            raise self._late(late, limit or 0.0)

    def _late(self, ranks: list[int], limit: float) -> CallTimeout:
        """What to raise when *ranks* have not answered within *limit* seconds."""
        standing = {
            rank: (self._workers[rank].pid, *self._controller.whereabouts(rank)) for rank in ranks
        }
        return call_timeout(standing, limit)

    def _read(self) -> list[Any]:
        replies = [self._decode(self._controller.reply(rank)) for rank in range(self.size)]
        for reply in replies:
            if isinstance(reply, TooLong):
                replies = self._fetch_long(replies)
                break
        for reply in replies:
            if isinstance(reply, Failed):
                raise worker_error(replies)
        return replies

    def _decode(self, payload: bytes) -> Any:
        """The reply in *payload*: the same object as long as the same bytes keep coming."""
        reply = self._decoded.get(payload)
        if reply is None:
            reply = pickle.loads(payload)
            self._decoded[payload] = reply
        return reply

    def _fetch_long(self, replies: list[Any]) -> list[Any]:
        """Fetch the replies that did not fit their place through a segment with room for them."""
        lengths = [reply.nbytes if isinstance(reply, TooLong) else 0 for reply in replies]
        shape = (self.size, max(lengths))
        segment = self.allocate(shape[0] * shape[1])
        region = Region(segment.number, 0, shape, "|u1")
        self.run(Deliver(region), [(segment, Access.WRITE)])
        rows = segment.array(region)
        return [
            pickle.loads(rows[rank, :length].tobytes()) if length else replies[rank]
            for rank, length in enumerate(lengths)
        ]

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    def _abandon(self) -> None:
        """A call will not be waited for any longer: interrupt who has not answered it."""
        if self._state is State.READY and self._begun:
            self._controller.disclaim()
            self._controller.wake_all()
            for rank in self._controller.unanswered():
                self._workers[rank].interrupt()

    def settle(self, limit: float | None = None) -> None:
        """Wait for the answers to an abandoned call: until they come, it may read its inputs."""
        limit = self._timeout if limit is None else limit
        deadline = _after(limit)
        quiet = True
        while True:
            self._abandon()
            nudge = time.monotonic() + _QUIET
            until = nudge if deadline is None else min(nudge, deadline)
            self._check_alive(self._controller.wait(until, self._sentinels))
            late = self._controller.unanswered()
            if not late:
                self.open = False
                return
            if deadline is not None and time.monotonic() >= deadline:
                raise self._late(late, limit or 0.0)
            if quiet:
                self.say(f"Synkro: waiting for {ranks_in_words(late)} to end an interrupted call…")
                quiet = False

    def _check_alive(self, ready: list[int]) -> None:
        """Raises WorkerDied, and breaks the session, if one of the sentinels is *ready*."""
        if not ready:
            return
        if self._state is not State.READY:  # close() of another thread did this
            self.require_ready()
        dead = self._workers[self._sentinels.index(ready[0])]
        died = worker_died(dead.rank, dead.pid, dead.status(), self._pump.stderr_tail(dead.rank, 0.3))
        self._why_broken = str(died).partition(". ")[0] + "."
        self._state = State.BROKEN
        for worker in self._workers:
            worker.kill()
        raise died

    def close(self) -> None:
        """End the workers and give everything back; the second time it does nothing.

        A call that another thread is in is given a second to end, and fails with SessionClosed.  Ctrl-C
        is put off until it is done.
        """
        with uninterrupted():
            self._close()

    def _close(self) -> None:
        held = self.lock.acquire(timeout=_GRACE)
        try:
            state, self._state = self._state, State.CLOSED
            if state is State.CLOSED:
                return
            _engines.discard(self)
            if self.at_close is not None:
                self.at_close()
            if state is State.READY and held and not self._controller.unanswered():
                self._controller.send(pickle.dumps(Exit(), 5), b"")
                deadline = time.monotonic() + _GRACE
                for worker in self._workers:
                    worker.ended(max(0.0, deadline - time.monotonic()))
            for worker in self._workers:
                worker.kill()
        finally:
            if held:
                self.lock.release()
        with self.lock:  # whoever was in a call has seen the workers die
            for worker in self._workers:
                worker.close()
            self._pump.close(_GRACE)
            for fd in (self._wake_main, self._wake_workers, *self._wakes):
                os.close(fd)
            if state is not State.STARTING:
                self._controller.close()

    def disown(self) -> None:
        """In a fork of the main process: the workers are the parent's; let go of their lifelines."""
        self.lock = threading.RLock()
        self._state = State.CLOSED
        for worker in self._workers:
            worker.release()


_engines: set[Engine] = set()  # those with workers: they live until they are closed, at exit at last


def _in_forked_child() -> None:
    for engine in tuple(_engines):
        engine.disown()
    _engines.clear()


def _at_exit() -> None:
    for engine in tuple(_engines):
        engine.close()


os.register_at_fork(after_in_child=_in_forked_child)
atexit.register(_at_exit)


def _after(limit: float | None) -> float | None:
    """The deadline *limit* seconds from now, on the monotonic clock."""
    return None if limit is None else time.monotonic() + limit
