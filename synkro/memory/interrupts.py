"""Ctrl-C, deferred while steps belong together or a resource has no owner yet."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Final


class Atomic:
    """Steps of a worker that belong together: an interrupt among them is deferred until after them.

    The worker's handler of SIGINT reads ``depth``, and calls ``interrupt``.

    Attributes:
        depth: how many blocks of such steps are under way, one within the other.
        due: whether an interrupt waits for the end of the steps.
    """

    def __init__(self) -> None:
        self.depth: int = 0
        self.due: bool = False

    def interrupt(self) -> None:
        """An interrupt has come among the steps: it is due after them."""
        self.due = True

    def forget(self) -> None:
        """No interrupt is due any more."""
        self.due = False

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1
        if self.due and not self.depth:
            self.due = False
            raise KeyboardInterrupt


atomic: Final = Atomic()


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT to the end of the block; Python delivers it to the main thread only."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    late: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: late.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if late:
            handler(*late[0])
