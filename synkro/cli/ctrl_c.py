"""Ctrl-C for a command: whenever it comes, the process ends with status 130 and without a traceback.

``python -m synkro`` imports the package first, and in it this module before all others.  Until
``__main__`` begins, and after its work, there is nothing to clean up, and the process just ends.  In
between the first Ctrl-C is a ``KeyboardInterrupt``, and others are ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NoReturn

STATUS = 128 + signal.SIGINT
"""The exit status of a command that was interrupted, as a shell reports it."""

_came: list[int] = []  # the first Ctrl-C, if there was one

_SOON = 0.01  # seconds until an interrupt comes again


def status_of(command: Callable[[], int]) -> Any:
    """Run *command*; returns the exit status.  Afterwards Ctrl-C ends the process, or is ignored."""
    try:
        interrupt_once()
        try:
            status: Any = command()
        except SystemExit as left:
            status = left.code
        end_at_once()
    except BaseException as error:
        if not (_came or isinstance(error, KeyboardInterrupt)):
            raise
        # NumPy's import in C makes an ImportError of one
        exec("")  # Python would die of one that came in an exec(), as of a dataclass: this forgets it
        return STATUS
    return status


def end_at_once() -> None:
    """From here on Ctrl-C ends the process."""
    _handle(lambda number, frame: os._exit(STATUS))


def interrupt_once() -> None:
    """From here on the first Ctrl-C is a ``KeyboardInterrupt``, and all others are ignored."""
    sys.unraisablehook = _unheard
    _handle(_interrupt)


def _handle(handler: Any) -> None:
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell ignores it for background jobs
        signal.signal(signal.SIGINT, handler)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _came.append(number)
    raise KeyboardInterrupt


def _unheard(lost: sys.UnraisableHookArgs) -> None:
    """Handle an exception that was lost in a finalizer: an interrupt is raised again a moment later."""
    if issubclass(lost.exc_type, KeyboardInterrupt):
        signal.signal(signal.SIGALRM, _interrupt)
        signal.setitimer(signal.ITIMER_REAL, _SOON)
    else:
        sys.__unraisablehook__(lost)


def _is_the_command() -> bool:
    """Whether this is ``python -m synkro``, which still looks for its ``__main__``."""
    options = zip(sys.orig_argv[1:], sys.orig_argv[2:], strict=False)
    module = next((name for option, name in options if option[:1] == "-" and option[-1:] == "m"), "")
    return sys.argv[:1] == ["-m"] and module == "synkro"


if _is_the_command():
    end_at_once()
