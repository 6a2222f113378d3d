"""A worker has the main program's terminal: what asks something there asks the user, and lines end with
tasks."""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from ..errors import UsageError
from ..ipc.descriptors import Descriptors
from ..ipc.listener import Listener
from ..ipc.logs import Asked
from ..memory.interrupts import atomic
from ..packing.settings import is_initializing


class _Lines(io.TextIOWrapper):
    """A standard output that knows whether its last line has ended."""

    ended = True

    def write(self, text: str, /) -> int:
        if text:
            self.ended = text.endswith("\n")
            if not self.ended and self not in open_lines:
                open_lines.append(self)
        return super().write(text)


open_lines: list[_Lines] = []
"""Streams whose last line had not ended."""


def write_lines() -> None:
    """Bring each line of what this process prints to the user at once."""
    for name in ("stdout", "stderr"):
        old = getattr(sys, name)
        if isinstance(old, io.TextIOWrapper):
            old.flush()
            encoding, errors, through = old.encoding, old.errors, old.write_through
            new = _Lines(old.detach(), encoding, errors, line_buffering=True, write_through=through)
            setattr(sys, name, new)
            setattr(sys, f"__{name}__", new)


def end_lines() -> None:
    """End the lines that a task, or a call, has left open: what the next one prints stays apart."""
    while open_lines:
        stream = open_lines.pop()
        if not stream.ended:
            with contextlib.suppress(ValueError, OSError):  # the function has closed it
                stream.write("\n")


def end_debugging() -> None:
    """End what debuggers trace, and their handling of SIGINT: what comes after the function is none of
    the user's."""
    bdb = sys.modules.get("bdb") if asking else None
    if bdb is None:
        return
    asking.clear()
    debugger = getattr(signal.getsignal(signal.SIGINT), "__self__", None)
    if isinstance(debugger, bdb.Bdb) and (before := getattr(debugger, _HANDLER, None)) is not None:
        signal.signal(signal.SIGINT, before)
        setattr(type(debugger), _HANDLER, None)
    if isinstance(getattr(sys.gettrace(), "__self__", None), bdb.Bdb):
        sys.settrace(None)


asking: list[int] = []
"""The questions that were asked since: a debugger asks at least one before it goes on."""

_HANDLER = "_previous_sigint_handler"  # where pdb keeps the one in whose place it has put its own


class Questions:
    """What functions ask the user, by debuggers that read lines, and by ``input()``."""

    def __init__(
        self, send: Callable[[Asked], None], descriptors: Descriptors, listener: Listener
    ) -> None:
        """*send* brings a question to the main program, whose answer comes with *descriptors*."""
        self._send = send
        self._descriptors = descriptors
        self._listener = listener
        self._pid = os.getpid()
        self._count = 0

    def ask(self) -> str:
        """The line that the user answers to what was printed last, with its end; empty where there is
        none, and when the call is given up: then a debugger ends.

        Raises: UsageError where nobody waits for the call.
        """
        self._check()
        self._count += 1
        asking.append(self._count)
        number = -self._count  # which no other descriptor has
        try:
            if self._listener.unwanted():
                return ""
            open_lines.clear()  # the answer ends the line
            sys.stdout.flush()
            self._send(Asked(number, self._listener.number))
            while not self._descriptors.has(number):
                select.select([self._descriptors.fileno()], [], [])
                with atomic:
                    self._descriptors.receive()
            fd = self._descriptors.descriptor(number)
            return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="surrogateescape")
        except KeyboardInterrupt:  # which a debugger would take for itself
            return ""
        finally:
            self._descriptors.refuse(number)

    def _check(self) -> None:
        if os.getpid() != self._pid or threading.current_thread() is not threading.main_thread():
            raise UsageError(
                "a debugger, or input(), was called in a thread, or a process, that a function on a "
                "worker has started: only the function itself can ask the user."
            )
        if is_initializing():
            raise UsageError(
                "a debugger, or input(), was called in an initializer, which may run while nobody waits "
                "for it: call it in a function."
            )


class _Asking(io.TextIOWrapper):
    """A standard input whose lines the user types; it has ended for those who read it as a file."""

    def __init__(self, buffer: Any, ask: Callable[[], str]) -> None:
        super().__init__(buffer)
        self._ask = ask

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # input() and pdb call it
        return self._ask()


def ask_by(questions: Questions) -> None:
    """Let ``breakpoint()``, ``pdb.set_trace()`` and ``input()`` ask the user, by *questions*."""
    sys.stdin = _Asking(sys.stdin.buffer, questions.ask)
