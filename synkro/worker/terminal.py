"""A worker has no terminal: what would ask there says what to do instead."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

from ..errors import UsageError


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
    raise UsageError(
        f"{what} was called in a worker, which has no terminal: call the function as f.as_serial(…), "
        f"with the same arguments: it runs in your own process then, where a debugger stops."
    )
