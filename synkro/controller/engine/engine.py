"""The engine of a session: its workers, its segments, and ``run``, the only door to the workers.

    run(command)
      settle      wait for the replies that an interrupted call left open
      send        pass descriptors of new segments over the sockets, the command through the block
      wait        wait for all replies, and for the end of any process, until the deadline
      read        raise an exception for a failure, or return the replies, one a rank

Nothing in here knows functions or ``Data``.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Final, Protocol

from ...comms.board import board_bytes
from ...errors import InvalidValue, SessionBroken, SessionClosed, WorkerDied, ranks_in_words
from ...ipc.channel import Lane, OnTick
from ...ipc.pool import WorkerPool
from ...ipc.process import ProcessEnd
from ...ipc.waiting import Condition, Deadline, clock
from ...machine import disown_in_children
from ...memory.interrupts import uninterrupted
from ...memory.segment import Segment, Versions, undoing
from ...messages import Command, Exit, Release
from ..progress import status_line
from ..tracing.trace import Trace, write
from .directory import Directory
from .nesting import check_alone, check_not_handling, goes_on, operation
from .prompt import Prompt
from .turns import Turns, is_past
from .workers import Post, Segments, Workers

_GRACE = 1.0  # seconds in which a worker can leave by itself, or another thread's call end, at a close
_WORTH_ASKING = 1 << 24  # bytes of freed segments from which on the workers hear of them at once
_NOBODY: frozenset[int] = frozenset()
_QUIET = 1.0  # seconds after which a wait for an interrupted call says so, and interrupts it again


class State(Enum):
    """What an engine can do."""

    STARTING = "processes are being started"
    READY = "all workers live; commands are served"
    BROKEN = "a worker died: the others were stopped, only close() is left"
    CLOSED = "no worker, no descriptor is left; Data can still be read"


_ANEW = "call fork() for a new one, and make data and variables anew."
_CLOSED = f"this session was closed: {_ANEW}"
_PARENTS = f"this session belongs to the parent of this process, which is a fork of that: {_ANEW}"


class OpenCommand(Protocol):
    """What an open command is for: one that goes on while the main process does, too."""

    def pause(self, limit: float | None) -> None:
        """Have all ranks answer, within so many seconds, and take the replies."""

    def lose(self) -> None:
        """The command was given up."""

    def doing(self, ranks: Sequence[int]) -> str:
        """What *ranks* were doing when they ended: the beginning of a sentence."""

    @property
    def outlives(self) -> bool:
        """Whether the command goes on when a worker has died, with another one."""


class Guard(Protocol):
    """Sees to it that workers that die are replaced."""

    @property
    def heals(self) -> bool:
        """Whether workers that die now are to be replaced."""

    def heal(self, ended: Sequence[ProcessEnd]) -> WorkerDied:
        """Replace workers that have died in an operation; returns what to raise."""

    def keep(self) -> None:
        """A command has ended that changes what the ranks have."""


class Engine:
    """The workers of one session, one a device.

    Attributes:
        size: the number of workers.
        on_gpus: whether they compute on GPUs.
        has_hosts: whether some are on other hosts.
        state: what can be done.
        lock: held during a call; a call of several commands holds it around all of them.
        turns: of the operations on some ranks.  One on all of them has to ``wait_for_all`` first.
        channel: the main process's end of it.
        workers: those that die, and those that take their places.
        everyone: the lane of all ranks.
        directory: what the workers know by number.
        calls: has an entry for each operation that goes on; an interrupt may leave one behind.
        trace: what records its calls, or None.
        versions: the versions of segments, for GPUs and for other hosts; None where nobody asks.
        at_close: what is done when the workers are given back.
        interrupted: the ranks whose last command was interrupted, or goes on: their replies may be
            outstanding.
        verbose: whether status lines are shown.
        say: prints a status line, if they are shown.
        wake_early: wakes workers, as a command will follow; raises SessionClosed where there are none.
    """

    def __init__(
        self,
        pool: WorkerPool,
        environments: Sequence[dict[str, str]],
        timeout: float | None,
        verbose: bool,
        on_gpus: bool = False,
    ) -> None:
        """Start *pool*, a worker with each of *environments*: ready is which answers a command.

        Raises: SessionError, SharedMemoryError if they cannot be started; NotAvailable.
        """
        self.size: Final = len(environments)
        self.on_gpus = on_gpus
        self.has_hosts: Final = len(pool.hosts) > 1
        self.lock: Any = threading.RLock()
        self.turns: Turns = Turns(self.lock, self.size, timeout)
        self.verbose: Final = verbose
        self.say: Final = status_line(verbose)
        self.directory: Final = Directory(self.size)
        self.calls: list[object] = []
        self.trace: Trace | None = None
        self.at_close: Final = contextlib.ExitStack()
        self.interrupted: frozenset[int] = _NOBODY
        self._open: OpenCommand | None = None
        self._guard: Guard | None = None
        # whether the workers have replied once; before that, SIGINT kills them; and whether a signal
        # handler has closed it in a call, which gives all back
        self._begun = self._owing = False
        self._why_broken, self._why_closed = "", _CLOSED
        self.wake_early: Callable[[], None] = self.require_ready
        self.state: State = State.STARTING
        self._pool = pool
        self.versions: Versions | None = None
        with undoing(self.close):
            self.channel: Final = pool.start(environments, board_bytes(self.size), self._note)
            self.everyone: Final = self.channel.everyone
            self._post = Post(self._pool, self.channel, self.directory, self.run)
            self._prompt = Prompt(self._pool, self.channel, lambda: self.state is State.READY)
            self.workers: Final = Workers(self._pool, self.channel, self.directory)
            self.wake_early = self.channel.wake_early
            self.state = State.READY
            _engines.add(self)
            if on_gpus or self.has_hosts:
                self.versions = Versions(self.allocate(Versions.NBYTES))

    # ── what is there ────────────────────────────────────────────────────────────────────────────

    def require_ready(self) -> None:
        """Raises: SessionClosed, SessionBroken."""
        if self.state is State.CLOSED:
            raise SessionClosed(self._why_closed)
        if self.state is State.BROKEN:
            raise SessionBroken(
                f"this session is broken: {self._why_broken} Call close() and then fork() for a "
                f"new one; all Data can still be read."
            )

    def wait_until_ready(self) -> None:
        """Wait until no operation on some ranks is left, by ``turns``: all can be used then.

        Raises: as ``require_ready``.
        """
        self.turns.wait_for_all()
        self.require_ready()

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def allocate(self, nbytes: int, called: str = "") -> Segment:
        """A new segment of zeroed memory, freed when nothing refers to it any more.

        Status lines say what it holds as *called*.

        Raises: SharedMemoryError.
        """
        self.release_freed()
        return self.directory.allocate(nbytes, called)

    def _note(self, segment: int, text: str) -> None:
        """Say what a segment does between hosts."""
        self.say(f"Synkro: {text.format(self.directory.called(segment))}")

    def touch(self, segment: Segment) -> None:
        """The contents of *segment* may have changed since the last call."""
        if self.versions is not None:
            self.versions.touch(segment.number)

    def release_freed(self) -> None:
        """Make the workers unmap freed segments, if these are large; called before memory is asked for.

        Of small ones they hear with the next command, as they do where other ranks are in use.
        """
        ready = self.state is State.READY and not self.turns.go_on
        if ready and self.directory.freed >= _WORTH_ASKING:
            self.run(Release())

    # ── run ──────────────────────────────────────────────────────────────────────────────────────

    def run(
        self,
        command: Command | bytes,
        segments: Segments = (),
        *,
        on_tick: OnTick = None,
        timeout: float | None = None,
        lane: Lane | None = None,
    ) -> list[Any]:
        """Send *command* (an object, or one already pickled, which names *segments*) to the ranks of
        *lane*, or to all; returns their replies.

        *timeout*, in seconds, stands in for the session's.

        Raises: WorkerError, OutputError … if a rank failed, WorkerDied, CallTimeout, SessionClosed,
        SessionBroken; NeedsAll.
        """
        if isinstance(command, bytes):
            payload, name = command, "transfer"
        else:
            payload, name = pickle.dumps(command, 5), type(command).__name__.lower()
            segments = self.directory.segments(command)
        check_not_handling()
        with self.lock:
            self.turns.wait_for_all()
            with self.tracing(name):
                replies = self.perform(payload, segments, on_tick, timeout, lane)
            if self._guard is not None and not isinstance(command, bytes) and command.changes:
                self._guard.keep()
            return replies

    @operation(unbroken=True)
    def perform(
        self,
        payload: bytes,
        segments: Segments,
        on_tick: OnTick = None,
        timeout: float | None = None,
        lane: Lane | None = None,
    ) -> list[Any]:
        """``run`` for a pickled command; the caller holds the lock.

        As long as the ranks give the same replies, the same list is returned.
        """
        if self.state is not State.READY:
            self.require_ready()
        lane = self.everyone if lane is None else lane
        turns, trace = self.turns, self.trace
        beside = bool(turns.line) and turns.owns_some(lane.members)
        limit = turns.limit if timeout is None else timeout
        if self.interrupted:
            self.settle(limit)
        deadline = None if limit is None else clock() + limit
        self.interrupted = self.interrupted | lane.members if beside else lane.members
        try:
            if trace is not None:
                trace.mark("send", lane.ranks)
            self._post.send(payload, segments, lane)
            if trace is not None:
                trace.mark("wait")
            wait = functools.partial(lane.wait, deadline, self._pool.watched, on_tick)
            while ready := turns.released(wait) if beside else wait():
                self._check_alive(ready)
            if deadline is not None and (late := lane.unanswered()):
                raise self._post.late(late, limit or 0.0)
            if trace is not None:
                trace.mark("collect")
        except BaseException:
            self._give_up(lane)
            raise
        self.interrupted = self.interrupted - lane.members if beside else _NOBODY
        self._begun = True
        return self._post.read(lane)

    def guard_by(self, guard: Guard) -> None:
        """From now on *guard* replaces workers that die."""
        self._guard = guard

    def run_beside(self, command: Command, ranks: tuple[int, ...]) -> list[Any]:
        """``run`` for *ranks* alone, beside what others do on other ranks."""
        lane = self.channel.lane(ranks)
        return self.turns.run(lane.members, lambda: self.run(command, lane=lane))

    # ── commands that last, while the main process goes on ───────────────────────────────────────

    @operation(unbroken=True)
    def open(self, payload: bytes, segments: Segments, opened: OpenCommand) -> None:
        """Send a command, and go on; the caller holds the lock, and has settled.

        Before any other command *opened* is paused.
        """
        self.interrupted = self.everyone.members
        self._open = opened
        try:
            if self.trace is not None:
                self.trace.mark("send", self.everyone.ranks)
            self._post.send(payload, segments, self.everyone)
        except BaseException:
            self.abandon()
            raise

    @operation(unbroken=True)
    def attend(self, condition: Condition, deadline: Deadline, on_tick: OnTick) -> list[ProcessEnd]:
        """Sleep until *condition* holds, all ranks have answered, or the *deadline* is over.

        Returns the workers that have died, where what is open outlives that.  Raises: WorkerDied.
        """
        trace = self.trace
        try:
            if trace is not None:
                trace.mark("wait")
            ready = self.everyone.wait_for(condition, deadline, self._pool.watched, on_tick)
            if trace is not None:
                trace.mark("collect")
            return self._check_alive(ready)
        except BaseException:
            self.abandon()
            raise

    def break_by(self, died: WorkerDied) -> None:
        """The session is over, as a worker has *died*."""
        if self.state is not State.CLOSED:
            self.state, self._why_broken = State.BROKEN, str(died).partition(". ")[0] + "."
        self._pool.kill()

    def finish(self) -> list[Any]:
        """The replies to the command that was open; Failed among them."""
        self.interrupted, self._open = _NOBODY, None
        return self._post.unpickled(self.everyone)

    def abandon(self, limit: float | None = None) -> None:
        """Give the last command up, and interrupt the ranks that have not answered.

        Raises: CallTimeout if it was given up after *limit* seconds.
        """
        opened, self._open = self._open, None
        if opened is not None:
            opened.lose()
        late = None if limit is None else self._post.late(self.everyone.unanswered(), limit)
        self._give_up(self.everyone)
        if late is not None:
            raise late

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    def _give_up(self, lane: Lane) -> None:
        """Give the last command to *lane* up, after an exception."""
        self._abandon(lane)
        if self._owing:
            self._give_back()

    def _abandon(self, lane: Lane) -> None:
        """Interrupt the ranks of *lane* that have not answered its last command."""
        if self.state is State.READY and self._begun:
            lane.give_up()
            self.channel.wake_all()
            self._pool.interrupt(lane.unanswered())

    @operation(unbroken=True)
    def settle(self, limit: float | None = None) -> None:
        """Wait for the replies to an interrupted call of ranks that the operation owns: until they come,
        it may read its inputs.

        Raises: UsageError if this thread is in the middle of that call; CallTimeout, WorkerDied.
        """
        if self.interrupted.isdisjoint(self.turns.ranks):
            return
        check_alone(self, sys._getframe(1))
        limit = self.turns.limit if limit is None else limit
        if self._open is not None:
            self._open.pause(limit)
        owed = self.interrupted & self.turns.ranks
        if not owed:
            return
        try:
            self._await_all(self.channel.lane(tuple(sorted(owed))), limit)
        except BaseException:
            if self._owing:
                self._give_back()
            raise
        self.interrupted -= owed

    def _await_all(self, lane: Lane, limit: float | None) -> None:
        """Interrupt the ranks that have not answered, and wait for them."""
        deadline = None if limit is None else clock() + limit
        quiet = True
        while True:
            self._abandon(lane)
            nudge = clock() + _QUIET
            until = nudge if deadline is None else min(nudge, deadline)
            wait = functools.partial(
                lane.wait_for, lambda: not lane.unanswered(), until, self._pool.sentinels
            )
            self._check_alive(wait() if self.turns.own is None else self.turns.released(wait))
            late = lane.unanswered()
            if not late:
                return
            if is_past(deadline):
                raise self._post.late(late, limit or 0.0)
            if quiet:
                self.say(f"Synkro: waiting for {ranks_in_words(late)} to end an interrupted call…")
                quiet = False

    def _check_alive(self, ready: list[int]) -> list[ProcessEnd]:
        """The workers whose sentinels are *ready*, if what is open outlives them; what workers ask is
        answered.

        Raises: WorkerDied, and breaks the session, if not.
        """
        ready = self._prompt.answered(ready)
        if not ready:
            return []
        self.require_ready()  # another thread may have called close()
        if self._open is not None and self._open.outlives:
            return [*map(self._pool.end_of, ready)]
        if self._open is None and self._guard is not None and self._guard.heals and self.turns.alone:
            raise self._guard.heal([*map(self._pool.end_of, ready)])
        died = self._pool.death(ready[0])
        if self._open is not None:
            died.args = (f"{self._open.doing(died.ranks)}{died}",)
        self.break_by(died)
        raise died

    # ── traces ───────────────────────────────────────────────────────────────────────────────────

    def start_trace(self, path: Path | None) -> Trace:
        """Record the calls from now on, to be written to *path* at the end, if that is given.

        Raises: InvalidValue while another trace goes on; SessionClosed, SessionBroken.
        """
        with self.lock:
            self.wait_until_ready()
            if self.trace is not None:
                raise InvalidValue(
                    "this session is traced already, and a trace cannot hold another: end the outer "
                    "one first, or leave this one out. (SYNKRO_TRACE, if set, traces all of a session.)"
                )
            self.trace = Trace(self.size, self.channel, path)
            return self.trace

    def tracing(self, name: str, number: int = 0) -> contextlib.AbstractContextManager[None]:
        """Record for a trace that the block is a call of the function *name*, unless it is in one."""
        if self.trace is None or self.trace.within:
            return contextlib.nullcontext()
        return self.trace.call(name, number)

    def end_trace(self, trace: Trace | None) -> None:
        """Record no longer, and write the file; a second time, for None, and in a fork do nothing.

        Raises: InvalidValue if it cannot be written.
        """
        with self.lock:
            self.turns.wait_for_all()
            if trace is None or self.trace is not trace:
                return
            self.trace = None
            trace.end()
        if trace.path is not None:
            write(trace, trace.path)

    @uninterrupted()
    def close(self) -> None:
        """End the workers and give everything back; the second time it does nothing.

        A call of another thread has a second to end; then it fails with SessionClosed.  Ctrl-C is
        deferred until all is closed.
        """
        deadline = clock() + _GRACE
        held = self.lock.acquire(timeout=_GRACE)
        all_over = held and self.turns.wait_for_all(deadline)
        try:
            state, self.state = self.state, State.CLOSED
            if state is not State.CLOSED:
                if all_over:
                    end_trace_quietly(self, self.trace)
                if state is State.READY and all_over and not self.everyone.unanswered():
                    self.everyone.send(pickle.dumps(Exit(), 5), b"")
                    self._pool.ended(_GRACE)
                self._pool.kill()
            elif not self._owing:
                return
        finally:
            if held:
                self.lock.release()
        self._owing = goes_on(self, sys._getframe())
        if not self._owing:
            with self.lock:  # a call of another thread has seen the workers die
                self.turns.wait_for_all()
                end_trace_quietly(self, self.trace)
                self._give_back()

    def _give_back(self) -> None:
        _engines.discard(self)
        self.wake_early = self.require_ready
        self._pool.close()
        self.at_close.close()
        self.versions = None  # which holds memory

    def disown(self) -> None:
        """In a fork of the main process: the workers are the parent's; let go of their lifelines."""
        self.lock = threading.RLock()
        self.turns = Turns(self.lock, self.size, None)
        self.state, self.wake_early = State.CLOSED, self.require_ready
        self._why_closed = _PARENTS
        self.trace = None
        self._pool.release()


def end_trace_quietly(engine: Engine, trace: Trace | None) -> None:
    """``Engine.end_trace``, but print an error instead of raising it."""
    try:
        engine.end_trace(trace)
    except InvalidValue as error:
        print(f"Synkro: {error}", file=sys.stderr)


_engines: set[Engine] = set()  # those with workers, which live until close() or the end of the program


def _at_exit() -> None:
    for engine in tuple(_engines):
        engine.close()


disown_in_children(_engines)
atexit.register(_at_exit)
