"""What the workers print, brought to the user, each line with the rank before it; and what they log.

What faulthandler writes to stderr when a worker crashes is held back: ``WorkerDied`` tells it, once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import selectors
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from .logs import Asked, LogHandling, LogReceiver, Warnings

TAIL_LINES = 40
"""Lines of each worker's stderr that are kept for the message about its death."""

_DUMP_LINES = 200  # that are held back at most
_FATAL = "Fatal Python error: "
_DUMPED = re.compile(
    rf"$|{_FATAL}|(Current t|T)hread |  (File \"|\.\.\.|<)|(Extension modules|Python .*): "
)
_CHUNK = 1 << 16
_ROUNDS = 10_000  # of reading what is there, until somebody who waits for all of it is told
_HANDLING = 1.0  # seconds that a call waits for handlers of what was logged in it


@dataclass(eq=False)
class _Stream:
    """One worker's stdout or stderr: splits what comes into lines.

    Attributes:
        before: says what is written before each line of a rank.
        hold: takes lines that are to come later, and returns whether they are.
        tail: the last lines that were passed on.
        dump: the lines of a crash that are held back; none for long, unless the worker ends.
    """

    rank: int
    target: str
    before: Callable[[int], str]
    hold: Callable[[_Stream, Sequence[str]], bool]
    ended: threading.Event = field(default_factory=threading.Event)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    dump: list[str] = field(default_factory=list)
    _rest: bytes = b""

    def feed(self, chunk: bytes) -> None:
        """Pass on the whole lines; an empty *chunk* is the end."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if not chunk and self._rest:
            lines.append(self._rest)
        text = [line.decode(errors="replace") for line in lines]
        self.pass_on([*self._sifted(text)] if self.target == "stderr" else text)

    def take_prompt(self) -> str:
        """The line that has not ended, which is a question; it counts as passed on."""
        prompt, self._rest = self._rest.decode(errors="replace"), b""
        return f"[rank {self.rank}] {prompt}"

    def _sifted(self, lines: Sequence[str]) -> Iterator[str]:
        """*lines* without those of a crash; with them where others follow: it was a child's crash."""
        for line in lines:
            crash = _DUMPED.match(line) if self.dump else line.startswith(_FATAL)
            if crash and len(self.dump) < _DUMP_LINES:
                self.dump.append(line)
            else:
                yield from self.dump
                self.dump.clear()
                yield line

    def pass_on(self, text: Sequence[str]) -> None:
        """Write lines to the user's stream."""
        self.tail.extend(text)
        if text and not self.hold(self, text):
            before = self.before(self.rank)
            stream = getattr(sys, self.target)  # the present one: a notebook replaces it
            with contextlib.suppress(Exception):  # the user closed it, or put something odd there
                stream.write("".join(f"{before}{line}\n" for line in text))
                stream.flush()


Sink = Callable[[tuple[int, str, bytes]], None]
Printed = Callable[[], tuple[int, str, bytes] | None]


class Question(NamedTuple):
    """What a rank *asked* the user, after this *prompt*."""

    rank: int
    asked: Asked
    prompt: str


class OutputPump:
    """A thread that reads all pipes of all workers of a session, also those of other hosts.

    Attributes:
        asking: an eventfd that is readable when workers ask something.
    """

    def __init__(self, sink: Sink | None = None) -> None:
        """*sink* gets what comes, in the place of the user: a rank, "stdout", "stderr" or "log", and
        bytes; none at the end."""
        self._sink = sink
        self._anonymous = False
        self._selector = selectors.DefaultSelector()
        self._streams: dict[tuple[int, str], _Stream] = {}
        self._warnings = Warnings()
        self._handling = LogHandling()
        self._pipes: list[BinaryIO] = []
        self._logs: set[int] = set()  # the descriptors of those that are of logs
        self._wake = -1  # the eventfd by which the thread hears that somebody waits for it
        self.asking: int = -1
        self._questions: deque[Question] = deque()
        self._held: list[tuple[_Stream, Sequence[str]]] | None = None  # lines, while the user types
        self._lock = threading.Lock()  # of the next three
        self._thread = self._new_thread()
        self._runs = False  # whether the thread reads, and will look once more
        self._waiting: list[threading.Event] = []  # those who wait until all is read that is there
        self._closes = False  # whether nobody will have it read any more
        self._told = False  # whether an error tells how a worker has ended

    def add(self, rank: int, stdout: BinaryIO, stderr: BinaryIO, log: BinaryIO) -> None:
        """Watch the pipes of a worker; the pump closes them at their end."""
        with self._lock:
            self._pipes = [pipe for pipe in self._pipes if not pipe.closed]
            streams = self._new_streams(rank)
            pairs: Any = zip((stdout, stderr, log), streams, strict=True)
            self._logs.add(log.fileno())
            for pipe, stream in pairs:
                self._pipes.append(pipe)
                read = functools.partial(self._read, pipe, stream)
                self._selector.register(pipe, selectors.EVENT_READ, read)
            if self._thread.ident is not None and not self._runs:  # it has ended with the others
                self._thread = self._new_thread()
                self._begin()

    def hear(self, ranks: Sequence[int], source: int, printed: Printed) -> None:
        """Hear of *ranks* of other hosts, when the descriptor *source* is readable: *printed* takes what
        a *sink* there got; None if that is for nobody here.  Call it before ``start``."""
        found = {(rank, each.target): each for rank in ranks for each in self._new_streams(rank)}
        take = functools.partial(self._take, source, printed, found)
        self._selector.register(source, selectors.EVENT_READ, take)

    def _new_streams(self, rank: int) -> tuple[_Stream, _Stream, LogReceiver]:
        """The streams of a new worker: stdout, stderr, and its log."""
        stdout, stderr = (_Stream(rank, name, self._before, self._hold) for name in ("stdout", "stderr"))
        self._streams |= {(rank, "stdout"): stdout, (rank, "stderr"): stderr}
        ask = functools.partial(self._ask, stdout)
        log = LogReceiver(rank, self._warnings, stderr.pass_on, ask, self._handling)
        return stdout, stderr, log

    def _ask(self, stdout: _Stream, asked: Asked) -> None:
        self._questions.append(Question(stdout.rank, asked, stdout.take_prompt()))
        os.eventfd_write(self.asking, 1)

    def question(self, rank: int | None) -> Question | None:
        """The next thing that a worker asks, or that of *rank*, if there is something."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.asking)
        question = next((each for each in (*self._questions,) if rank in (None, each.rank)), None)
        if question is not None:
            self._questions.remove(question)
        return question

    @contextlib.contextmanager
    def silent(self) -> Iterator[None]:
        """A block in which the user types: what workers print meanwhile comes after it."""
        with self._lock:
            self._held = []
        try:
            yield
        finally:
            with self._lock:
                held, self._held = self._held or [], None
            for stream, text in held:
                stream.pass_on(text)

    def _hold(self, stream: _Stream, text: Sequence[str]) -> bool:
        """Whether lines are held back now: they come later."""
        with self._lock:
            if self._held is None:
                return False
            self._held.append((stream, text))
            return True

    def be_anonymous(self) -> None:
        """Do not write from now on of which rank a line is."""
        self._anonymous = True

    def _before(self, rank: int) -> str:
        return "" if self._anonymous else f"[rank {rank}] "

    def start(self) -> None:
        """Begin to read.  Raises: OSError."""
        with self._lock:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self.asking = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            self._selector.register(self._wake, selectors.EVENT_READ)
            self._begin()

    def _begin(self) -> None:
        self._runs = True
        self._thread.start()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._run, name="synkro-output", daemon=True)

    def _run(self) -> None:
        while self._goes_on():
            if self._wake in self._read_ready(None):
                self._finish_reading()
        with self._lock:
            if self._closes:  # nobody has waited for so long
                self._give_back()

    def _read_ready(self, timeout: float | None) -> Set[int]:
        """Read each pipe that is ready now, or within a *timeout*, once; returns what was ready.

        Logs come last: of a question that is there, the text was written before.
        """
        ready = {key.fd: key for key, _ in self._selector.select(timeout)}
        for fd, key in sorted(ready.items(), key=lambda pair: pair[0] in self._logs):
            if fd != self._wake:
                key.data()
        return ready.keys()

    def _goes_on(self) -> bool:
        with self._lock:
            self._runs = len(self._selector.get_map()) > 1 or bool(self._waiting)
            return self._runs

    def _read(self, pipe: BinaryIO, stream: _Stream | LogReceiver) -> None:
        try:
            chunk = os.read(pipe.fileno(), _CHUNK)
        except ConnectionResetError:  # said once of a worker that has left something unread
            return
        self._feed(stream, chunk)
        if not chunk:
            self._selector.unregister(pipe)
            self._logs.discard(pipe.fileno())
            pipe.close()

    def catch_up(self) -> None:
        """Wait until what workers have written by now is handed over, unless handlers take long."""
        done = threading.Event()
        with self._lock:
            if not self._runs or threading.current_thread() is self._thread:
                return
            self._waiting.append(done)
            os.eventfd_write(self._wake, 1)
        start = time.monotonic()
        if done.wait(_HANDLING):
            self._handling.wait(start + _HANDLING - time.monotonic())

    def _finish_reading(self) -> None:
        """Read all that is there, and tell who waits for that."""
        os.eventfd_read(self._wake)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for _ in range(_ROUNDS):  # not for ever, where a worker goes on writing
            if self._read_ready(0) <= {self._wake}:
                break
        for done in waiting:
            done.set()

    def _feed(self, stream: _Stream | LogReceiver, chunk: bytes) -> None:
        if self._sink is None:
            stream.feed(chunk)
        else:
            self._sink((stream.rank, stream.target, chunk))
        if not chunk:
            stream.ended.set()

    def _take(
        self, source: int, printed: Printed, streams: dict[tuple[int, str], _Stream | LogReceiver]
    ) -> None:
        try:
            said = printed()
        except (EOFError, OSError):
            self._selector.unregister(source)
            for stream in streams.values():
                stream.ended.set()
        else:
            if said is not None:
                rank, target, chunk = said
                self._feed(streams[rank, target], chunk)

    def await_end(self, rank: int, patience: float) -> None:
        """Wait until all of a dead worker's stderr has come, at most *patience* seconds."""
        self._streams[rank, "stderr"].ended.wait(patience)

    def stderr_tail(self, rank: int) -> str:
        """The last lines of a dead worker's stderr."""
        stream = self._streams[rank, "stderr"]
        self._told = True
        return "\n".join([*stream.tail, *stream.dump]).strip("\n")

    def close(self, patience: float) -> None:
        """Wait until all that the ended workers left in their pipes has been written.

        Where a child of a worker still holds a pipe, the wait ends after *patience* seconds.
        """
        if self._thread.ident is not None:
            self._thread.join(patience)
        self._handling.close(patience)
        if not self._told:
            for stream in self._streams.values():
                stream.pass_on(stream.dump)
        with self._lock:
            self._closes = True
            if not (self._runs and self._thread.is_alive()):
                self._give_back()

    def _give_back(self) -> None:
        """Close all descriptors, once."""
        for pipe in self._pipes:
            pipe.close()
        self._selector.close()
        for fd in (self._wake, self.asking):
            if fd != -1:
                os.close(fd)
        self._wake = self.asking = -1
