"""What workers log, warn of and ask, brought to the main program.

::

    worker                                                  main process
    ──────                                                  ────────────
    LogSender.send ─▶ [ the socket of the worker ] ─▶ LogReceiver.feed ─▶ handlers of the logger,
                                                                         the filters of warnings,
                                                                         or a prompt

The worker has dropped what the main program's levels and filters leave out.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import struct
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..memory.interrupts import uninterrupted

handling: set[int] = set()
"""The threads that handle records, or warnings, now."""

_HEAD = struct.Struct("=I?")  # the length of a message, and whether it is a question
_ROOM = 1 << 26  # bytes of messages that wait for handlers
_MOST = 1000  # warnings of which is known how often they were shown


class Logged(NamedTuple):
    """A record of a logger's: its attributes, but for the rank."""

    attributes: dict[str, Any]


class Warned(NamedTuple):
    """A warning, and the module and the name of each of its classes, the nearest first.

    *module* is the name of that which has given it, and *call* the number of the call that all ranks do;
    None in a task.
    """

    text: str
    kinds: tuple[tuple[str, str], ...]
    filename: str
    line: int
    module: str | None
    call: int | None


class Asked(NamedTuple):
    """A worker asks the user for a line, in the command of this number; the answer gets *number*, which
    is negative."""

    number: int
    command: int


class Told(NamedTuple):
    """A warning as it was given, and pickled, if that is possible."""

    warned: Warned
    pickled: bytes | None


class LogSender:
    """The end of a worker's, whose threads may all send."""

    def __init__(self, write: Callable[[memoryview], int], tell: Callable[[], None]) -> None:
        """*write* writes some of what it gets, and returns how much; *tell* says that something is
        there."""
        self._write = write
        self._tell = tell
        self._lock = threading.RLock()
        self._waiting: deque[bytes] = deque()
        self._sends = False

    def send(self, message: Logged | Told | Asked) -> None:
        """Raises: what pickling raises; OSError."""
        stream = pickle.dumps(message, 5)
        self._waiting.append(_HEAD.pack(len(stream), isinstance(message, Asked)) + stream)
        with self._lock, uninterrupted():
            if self._sends:  # a signal handler logs in the middle of this
                return
            self._sends = True
            try:
                while self._waiting:
                    rest = memoryview(self._waiting.popleft())
                    while rest:
                        rest = rest[self._write(rest) :]
            finally:
                self._sends = False
            self._tell()


class Warnings:
    """The warnings of all ranks, shown as the main program's filters say.

    What several give in one call is shown as often as one of them gives it.
    """

    def __init__(self) -> None:
        self._counts: dict[Warned, dict[int, int]] = {}
        self._registries: dict[str, dict[Any, Any]] = {}  # what was shown, by file

    def show(self, rank: int, told: Told) -> None:
        """Show a warning that a rank has given, unless it was shown."""
        warned = told.warned
        if not self._is_new(rank, warned):
            return
        made = _made(told)
        kind, where = type(made), (warned.filename, warned.line)
        registry = self._registries.setdefault(warned.filename, {})
        try:
            module = warned.module or warned.filename.removesuffix(".py")  # None would be left out
            warnings.warn_explicit(made, kind, *where, module, registry)
        except kind as error:  # since when it was given, such have become errors
            warnings.showwarning(error, kind, *where)

    def _is_new(self, rank: int, warned: Warned) -> bool:
        """Whether no other rank has given a warning as often in this call; it counts."""
        if warned.call is None:
            return True
        counts = self._counts.pop(warned, {})
        self._counts[warned] = counts  # the last one that is forgotten
        if len(self._counts) > _MOST:
            del self._counts[next(iter(self._counts))]
        before = max(counts.values(), default=0)
        counts[rank] = counts.get(rank, 0) + 1
        return counts[rank] > before


class LogHandling:
    """A thread that hands over what workers have logged: whatever a handler waits for, neither they, nor
    who reads what they say, wait for it."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Callable[[], None], int]] = deque()
        self._nbytes = 0  # of what waits, or is handled
        self._left_out = 0  # for which there was no room
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, hand_over: Callable[[], None], nbytes: int) -> None:
        """Have a message of so many bytes handed over, unless too much waits."""
        with self._changed:
            if self._nbytes and self._nbytes + nbytes > _ROOM:
                self._left_out += 1
                return
            self._waiting.append((hand_over, nbytes))
            self._nbytes += nbytes
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="synkro-logs", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Wait until all is handed over, so many seconds at most."""
        if threading.get_ident() not in handling:
            with self._changed:
                self._changed.wait_for(lambda: not self._nbytes, seconds)

    def close(self, seconds: float) -> None:
        """End the thread when all is handed over; wait for it so many seconds at most."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _run(self) -> None:
        while (first := self._next()) is not None:
            hand_over, nbytes = first
            handling.add(threading.get_ident())
            try:
                hand_over()
            finally:
                handling.discard(threading.get_ident())
                with self._changed:
                    self._nbytes -= nbytes
                    left_out, self._left_out = self._left_out, 0
                    self._changed.notify_all()
                if left_out:
                    print(
                        f"Synkro: {left_out} messages of workers' logs were left out, as a handler of "
                        f"the program's took too long.",
                        file=sys.stderr,
                    )

    def _next(self) -> tuple[Callable[[], None], int] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            return self._waiting.popleft() if self._waiting else None


@dataclass(eq=False)
class LogReceiver:
    """The end of the main process, for one worker.

    Attributes:
        rank: the worker's.
        warnings: hands over what it warns of.
        write: writes lines to the user's stderr, where no handler does.
        ask: has the user asked.
        handling: hands over what it logs.
        target: "log", beside "stdout" and "stderr".
        ended: is set when no more will come.
    """

    rank: int
    warnings: Warnings
    write: Callable[[list[str]], None]
    ask: Callable[[Asked], None]
    handling: LogHandling
    target: str = "log"
    ended: threading.Event = field(default_factory=threading.Event)
    _rest: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> None:
        """Have handed over what has come whole."""
        self._rest += chunk
        while len(self._rest) >= _HEAD.size:
            nbytes, asks = _HEAD.unpack_from(self._rest)
            stop = _HEAD.size + nbytes
            if len(self._rest) < stop:
                break
            stream = bytes(self._rest[_HEAD.size : stop])
            del self._rest[:stop]
            if asks:
                self.ask(pickle.loads(stream))
            else:
                self.handling.put(functools.partial(self._hand_over, stream), nbytes)

    def _hand_over(self, stream: bytes) -> None:
        try:
            message: Logged | Told = pickle.loads(stream)
            if isinstance(message, Logged):
                self._log(message.attributes)
            else:
                self.warnings.show(self.rank, message)
        except BaseException:  # whatever a handler raises: others come by this thread, too
            with contextlib.suppress(Exception):
                self.write(traceback.format_exc().splitlines())

    def _log(self, attributes: dict[str, Any]) -> None:
        import logging  # noqa: PLC0415  it takes a while, and few programs log in workers

        level = logging.getLevelName(attributes["levelno"])  # which the worker may call otherwise
        record = logging.makeLogRecord(attributes | {"levelname": level, "rank": self.rank})
        logger = logging.getLogger(record.name)
        if logger.hasHandlers():
            logger.handle(record)
        elif logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            self.write(logging.Formatter(logging.BASIC_FORMAT).format(record).splitlines())


def _found(kinds: tuple[tuple[str, str], ...]) -> type[Warning]:
    """The nearest class of a warning that this process has."""
    for module, name in kinds:
        found: Any = sys.modules.get(module)
        for part in name.split("."):
            found = getattr(found, part, None)
        if isinstance(found, type) and issubclass(found, Warning):
            return found
    return Warning


def _made(told: Told) -> Warning:
    """The warning: as it was, if its class is here; else its text, in the nearest class that is."""
    kinds, text = told.warned.kinds, told.warned.text
    if told.pickled is not None and kinds[0][0] in sys.modules:
        with contextlib.suppress(Exception):
            found = pickle.loads(told.pickled)
            if (
                isinstance(found, Warning)
                and (type(found).__module__, type(found).__qualname__) == kinds[0]
            ):
                return found
    kind = _found(kinds)
    made = kind.__new__(kind, text)
    made.args = (text,)
    try:
        return made if str(made) == text else Warning(text)
    except Exception:  # its text comes from something else
        return Warning(text)
