"""A worker has no terminal: what would ask there says what to do instead, and lines end with tasks."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from typing import Any, NoReturn

from .. import here
from ..errors import UsageError


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


def refuse_questions() -> None:
    """Make ``breakpoint()``, ``pdb.set_trace()`` and ``input()`` raise a UsageError in this process.

    PYTHONBREAKPOINT may still name another debugger, or none (0).
    """
    sys.breakpointhook = _breakpoint
    sys.stdin = _NoInput(sys.stdin.buffer)


def _breakpoint(*args: Any, **kwargs: Any) -> Any:
    if os.environ.get("PYTHONBREAKPOINT") in (None, "", "pdb.set_trace"):
        _refuse("breakpoint()")
    return sys.__breakpointhook__(*args, **kwargs)


class _NoInput(io.TextIOWrapper):
    """A standard input that nobody can write to; it has ended for those who read it as a file."""

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override]  # input() and pdb call it
        _refuse("a debugger, or input(),")


def _refuse(what: str) -> NoReturn:
    how = "as f.as_serial(…), with the same arguments"
    if here.rank is not None and here.rank.item is not None:
        how = "itself, without map(), with the item"
    raise UsageError(
        f"{what} was called in a worker, which has no terminal: call the function {how}: it runs in "
        f"your own process then, where a debugger stops."
    )
