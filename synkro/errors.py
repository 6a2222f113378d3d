"""Every error that Synkro raises on purpose, drawn as a tree.

SynkroError
├── UsageError            a call that makes no sense; mostly found before any worker is woken
│   ├── InvalidValue      … also a ValueError
│   ├── InvalidType       … also a TypeError
│   ├── InvalidIndex      … also an IndexError
│   ├── OutputError       what a function returned does not fit its ``outputs=``; a ValueError
│   └── CollectiveError   the ranks did not do the same in a collective; also a RuntimeError
├── SessionError          there is no session to serve the call; also a RuntimeError
│   ├── NotForked         nobody called fork() yet
│   ├── SessionClosed     you closed it
│   └── SessionBroken     it broke: a worker died earlier
├── WorkerError           an exception in a worker; the session stays usable
├── WorkerDied            a worker process is gone; the session is broken
├── CallTimeout           some worker did not answer in time; also a TimeoutError
├── SharedMemoryError     no memory for a segment; also a MemoryError
├── NotAvailable          not on this machine, or not yet; also a NotImplementedError
└── InternalError         a bug in Synkro
"""

from __future__ import annotations

import sys
import warnings


class SynkroError(Exception):
    """Base of everything that Synkro raises on purpose."""


class UsageError(SynkroError):
    """A call that makes no sense; the message says what was expected, what came and what to do."""


class InvalidValue(UsageError, ValueError):
    """A value that is out of range or has the wrong form."""


class InvalidType(UsageError, TypeError):
    """An argument of a wrong type, or the wrong number or names of arguments."""


class InvalidIndex(UsageError, IndexError):
    """A row selection that reaches outside of the rows."""


class OutputError(UsageError, ValueError):
    """A function's result does not fit its ``outputs=``, or differs between ranks or slices."""


class CollectiveError(UsageError, RuntimeError):
    """A collective in which not all ranks took part, or in which their arguments did not fit.

    Attributes:
        strays: whether the failure of another rank was the cause; that one is reported then.
    """

    def __init__(self, message: str, strays: bool = False) -> None:
        super().__init__(message)
        self.strays = strays


class SessionError(SynkroError, RuntimeError):
    """There is no session that could serve the call."""


class NotForked(SessionError):
    """No session was started in this process."""


class SessionClosed(SessionError):
    """The session was closed by ``close()``, or belongs to another process."""


class SessionBroken(SessionError):
    """A worker of the session died earlier; ``close()`` and ``fork()`` start anew."""


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as text: the cause of a ``WorkerError``."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n{self.text}"


class WorkerError(SynkroError):
    """An exception was raised in a worker.

    Attributes:
        rank: the worker's rank (the lowest one, where several failed).
        function: the name of the function that ran, or None.
        original: the worker's own exception, or None where it could not be brought here.
    Its ``__cause__`` is the remote traceback.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        function: str | None = None,
        original: BaseException | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.function = function
        self.original = original


class WorkerDied(SynkroError):
    """A worker process ended unexpectedly.

    Attributes:
        rank, pid: of the worker.
        exitcode: its exit code, or None if a signal ended it.
        signal: the number of that signal, or None.
        stderr: the last lines that it wrote to stderr.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        pid: int = -1,
        exitcode: int | None = None,
        signal: int | None = None,
        stderr: str = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal
        self.stderr = stderr


class CallTimeout(SynkroError, TimeoutError):
    """Some ranks did not answer in time.

    Attributes:
        ranks: the ranks that did not answer.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class SharedMemoryError(SynkroError, MemoryError):
    """There is not enough memory for a shared-memory segment."""


class NotAvailable(SynkroError, NotImplementedError):
    """Something that is not available on this machine, or not yet in Synkro."""


class InternalError(SynkroError):
    """A bug in Synkro; please report it."""


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program that called Synkro: the first frame outside of the package."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "synkro":
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
