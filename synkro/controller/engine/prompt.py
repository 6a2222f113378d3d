"""The terminal, or the notebook, of the main program, for workers that ask something."""

from __future__ import annotations

import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ...ipc.channel import Controller
from ...ipc.output import Question
from ...ipc.pool import WorkerPool
from ...ipc.waiting import standing_still

_INPUT = input  # this one, which a notebook replaces
_LOOK = 0.1  # seconds between two looks whether a line is still wanted
_turn = threading.RLock()  # of the threads that ask the user something
_STAYS = 0.3  # seconds that the user waits for the same rank, before another one asks


@dataclass(eq=False)
class Prompt:
    """Has the user answer what the workers of a session ask: a debugger, or ``input()``, in a function.

    The other ranks wait meanwhile, and no time limit counts.
    """

    _pool: WorkerPool
    _channel: Controller
    _goes_on: Callable[[], bool]  # whether the session does

    def answered(self, ready: list[int]) -> list[int]:
        """Answer what is asked, by the thread that waits for a call; returns the others of the
        descriptors that are *ready*.  Raises: KeyboardInterrupt."""
        if self._pool.asking not in ready:
            return ready
        with _turn:
            last = None
            while (question := self._next(last)) is not None:
                last, asked, _ = question
                if self._channel.is_doing(last, asked.command):
                    with self._pool.silent():
                        line = _answered(question, self._goes_on)
                    if self._goes_on():
                        self._pool.answer(last, asked.number, line)
        return [fd for fd in ready if fd != self._pool.asking]

    def _next(self, rank: int | None) -> Question | None:
        """The next question: if there is one soon, that of the *rank* which asked the last one."""
        end = time.monotonic() + _STAYS
        while rank is not None and (left := end - time.monotonic()) > 0:
            if (question := self._pool.question(rank)) is not None:
                return question
            select.select([self._pool.asking], [], [], min(left, _STAYS))
        return self._pool.question(None)


def _answered(question: Question, wanted: Callable[[], bool]) -> str:
    """What the user has answered, with the end of the line; empty where there is nobody, and as soon as
    it is not *wanted* any more."""
    with standing_still():
        try:
            aside = threading.current_thread() is not threading.main_thread() and input is _INPUT
            if aside and sys.stdin.isatty():  # Ctrl-C interrupts the main thread alone
                return _line(question.prompt, wanted)
            return f"{input(question.prompt)}\n"
        except Exception as error:  # there is no input, or it has ended; a notebook may forbid it
            if not isinstance(error, EOFError):
                print(f"Synkro: {question.prompt.strip()} gets no answer: {error}", file=sys.stderr)
            return ""


def _line(prompt: str, wanted: Callable[[], bool]) -> str:
    """The next line of the terminal; empty at its end, and when it is not *wanted* any more."""
    print(prompt, end="", flush=True)
    while wanted():
        if select.select([sys.stdin.fileno()], [], [], _LOOK)[0]:
            return sys.stdin.readline()
    return ""
