"""Status lines, and how far long work is.

On a terminal or in a notebook that is a bar (by tqdm), elsewhere a line every few seconds.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from typing import Any

from ..errors import counted

_EVERY = 5.0  # seconds between two lines, where there is no bar


class Progress(contextlib.AbstractContextManager["Progress"]):
    """How far work of so many steps is.

    It is a context manager; the work ends with its block.  Work that ends before its *patience* shows
    nothing.
    """

    def __init__(self, what: str, total: int | None, unit: str, patience: float = 0.0) -> None:
        """*what* names the work, *unit* one of its *total* steps (None: not
        known); *patience* is in seconds."""
        self._what, self._total, self._unit = what, total, unit
        self._done = self._shown = 0
        self._next = time.monotonic() + max(patience, _EVERY)
        self._quiet = patience > 0
        self._say = status_line(True)
        self._bar = _bar(what, total, unit, patience)

    def reach(self, done: int) -> None:
        """*done* steps are done; a number below the last one changes nothing."""
        done = max(done, self._done)
        if self._bar is not None:
            self._bar.update(done - self._done)
        elif done > self._done and time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._line(done)
        self._done = done

    def print(self, text: str) -> None:
        """Print *text* to standard output, above the bar."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def _line(self, done: int) -> None:
        self._quiet = False
        self._shown = done
        total = self._total
        count = counted(done, self._unit) if total is None else f"{done} of {counted(total, self._unit)}"
        self._say(f"Synkro: {self._what}: {count}")

    def __exit__(self, kind: object, *_: object) -> None:
        """Show how far the work came, if no error ended the block, and, with patience, if anything was
        shown."""
        if self._bar is not None:
            self._bar.close()
        elif kind is None and not self._quiet and self._shown < self._done:
            self._line(self._done)


def _bar(what: str, total: int | None, unit: str, patience: float) -> Any:
    """A bar where it can be drawn: None without a terminal or a notebook, or without tqdm."""
    if sys.stderr is None or not (sys.stderr.isatty() or "ipykernel" in sys.modules):
        return None
    try:
        from tqdm.auto import tqdm  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    return tqdm(total=total, desc=what, unit=unit, delay=patience)


def status_line(verbose: bool) -> Callable[[str], None]:
    """A printer of status lines to stderr, or a silent one."""

    def say(text: str) -> None:
        if verbose and sys.stderr is not None:  # None would mean standard output
            with contextlib.suppress(Exception):
                print(text, file=sys.stderr, flush=True)

    return say
