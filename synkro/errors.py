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
├── WorkerError           an exception in a worker, and of its type; the session stays usable
├── WorkerDied            a worker process is gone; the session is broken
│   └── HostLost          … with all others of its host
├── CallTimeout           some worker, or the other side of a ring, came too late; also a TimeoutError
├── RingBroken            the other side of a ring is gone; also a ConnectionError
├── SharedMemoryError     no memory for a segment; also a MemoryError
├── NotAvailable          not on this machine, or not yet; also a NotImplementedError
└── InternalError         a bug in Synkro

The end of the file has what messages have in common: counts, suggestions, and where warnings point.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import sys
import types
import warnings
from collections.abc import AsyncIterable, Awaitable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

HOME = str(Path(__file__).resolve().parent) + os.sep
"""The folder of the package."""


class SynkroError(Exception):
    """Base of everything that Synkro raises on purpose.

    Attributes:
        results: only where it ended a ``map``, or an ``imap``: the results that were there, and that the
            program did not get.
        finished: … the numbers of their items.
        pending: … the numbers of the items that have no result; of a generator's those that were read.
        item: of the error of a task that was tried again, or is a result: the number of its item.
    """

    results: list[Any]
    finished: list[int]
    pending: list[int]
    item: int


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


class ReplayEnded(CollectiveError):
    """A replay has come to a collective whose result is not known here."""


class SessionError(SynkroError, RuntimeError):
    """There is no session that could serve the call."""


class NotForked(SessionError):
    """No session was started in this process."""


class SessionClosed(SessionError):
    """The session was closed by ``close()``, or belongs to another process."""


class SessionBroken(SessionError):
    """A worker of the session died earlier; ``close()`` and ``fork()`` start anew."""


class RemoteTraceback(Exception):
    """The traceback of a worker's exception, as text: the cause of a ``WorkerError``.

    Attributes:
        began: how the run began that failed, pickled; empty where that is not known.
        summary: the class of the exception, and its text.
        again: runs it once more, in this process, or on the worker; None if that cannot be.
    """

    def __init__(self, text: str, began: bytes = b"", summary: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.began = began
        self.summary = summary
        self.again: Any = None

    def keep(self, again: Any) -> None:
        """Keep what runs the function once more, and takes this."""
        self.again = again

    def __reduce__(self) -> Any:
        return RemoteTraceback, (self.text,)

    def __str__(self) -> str:
        return f"\n{self.text}"


class WorkerError(SynkroError):
    """An exception was raised in a worker.

    It is also of the type of that exception, if one can be made of both, and has its attributes: so
    ``except KeyError`` catches a worker's.

    Attributes:
        rank: the worker's rank (the lowest one, where several failed).
        function: the name of the function that ran, or None.
        original: the worker's own exception, or None where it could not be brought here.
        host: the name of its host, where there are several.
        item: only where it is what became of an item in a map: the number of the item.

    Its ``__cause__`` is the remote traceback.  ``replay()`` runs what failed once more in this process,
    and raises here what it raised on the worker.
    """

    host: str = ""  # of the class: the worker's exception may have one

    def __init__(
        self,
        message: str,
        rank: int = -1,
        function: str | None = None,
        original: BaseException | None = None,
        host: str = "",
    ) -> None:
        Exception.__init__(self, message)  # not that of the worker's exception
        self._message = message
        self.rank = rank
        self.function = function
        self.original = original
        if host:
            self.host = host

    def replay(self) -> Any:
        """Run what failed once more, in this process: it raises here what it raised on the worker.

        The function gets copies of the rows, or of the item, that the worker had, and of all globals,
        objects and variables that it uses, as they are on that worker now; random generators are as
        they were when the call, or the task, began.  Nothing that it changes is changed in the program,
        or on the worker.  ``rank()``, ``size()`` and ``rows()`` are those of the worker; a collective
        returns what it had returned there, if that was small.

        A debugger sees the frames of the function: ``%debug`` in a notebook, ``pdb.pm()``.  If nothing
        is raised, a warning says so, and the result is returned.  On GPUs, which this process never
        touches, the debugger opens on the worker at once, and None is returned.

        Raises: what the function raises; ReplayEnded at a collective whose result is not known;
        UsageError if there is nothing to run, as the session was closed; SessionBroken.
        """
        cause = self.__cause__
        again = cause.again if isinstance(cause, RemoteTraceback) else None
        if again is None:
            raise UsageError(
                "this WorkerError cannot be replayed: no function of this program's own session has "
                "raised it, or it is a copy, or a hundred others have come since."
            )
        try:
            return again(cause, None)
        except BaseException as error:
            raise folded(error)  # noqa: B904  it is the same one

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return Exception.__repr__(self)

    def __setstate__(self, state: dict[str, Any] | None) -> None:
        Exception.__setstate__(self, state)

    def __reduce__(self) -> Any:
        kind = None if type(self) is WorkerError else type(self).__bases__[-1]
        original: Any = self.original
        try:
            copy.copy(original)  # as pickle would do it
        except (Exception, SystemExit):
            original = Parts(original)
        attributes = {name: value for name, value in vars(self).items() if name != "original"}
        return raised_in_worker, (kind, str(self), self.rank, self.function, original), attributes


class WorkerDied(SynkroError):
    """A worker process ended unexpectedly.

    Attributes:
        rank, pid: of the worker.
        ranks: those that are lost: this one, or all of a host.
        host: the name of its host, where there are several.
        exitcode: its exit code, or None if a signal ended it.
        signal: the number of that signal, or None.
        stderr: the last lines that it wrote to stderr.
        item: only where it is what became of an item in a map: the number of the item.
    """

    def __init__(
        self,
        message: str,
        rank: int = -1,
        pid: int = -1,
        exitcode: int | None = None,
        signal: int | None = None,
        stderr: str = "",
        host: str | None = "",
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.ranks: tuple[int, ...] = (rank,)
        self.host = host
        self.pid = pid
        self.exitcode = exitcode
        self.signal = signal
        self.stderr = stderr


class HostLost(WorkerDied):
    """A host is gone, nothing is heard of it any more, or a message from it is not what it has sent.

    Attributes:
        host: its name; None if nobody knows which it was.
    """

    def __init__(self, message: str, host: str | None, ranks: tuple[int, ...]) -> None:
        super().__init__(message, rank=min(ranks, default=-1), host=host)
        self.ranks = ranks


class CallTimeout(SynkroError, TimeoutError):
    """Some ranks did not answer in time, or no frame, or free slot, of a ring came.

    Attributes:
        ranks: the ranks that did not answer.
        hosts: the names of their hosts, one a rank, where there are several.
        item: only where it is what became of an item in a map: the number of the item.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = (), hosts: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.hosts = hosts


class RingBroken(SynkroError, ConnectionError):
    """The program at the other side of a ring is gone; all that it has handed over was delivered."""


class SharedMemoryError(SynkroError, MemoryError):
    """There is not enough memory for a shared-memory segment."""


class NotAvailable(SynkroError, NotImplementedError):
    """Something that is not available on this machine, or not yet in Synkro."""


class InternalError(SynkroError):
    """A bug in Synkro; please report it."""


# ── a worker's error, of the type of the exception there ─────────────────────────────────────────────


def raised_in_worker(
    kind: type | None,
    message: str,
    rank: int,
    function: str | None,
    original: BaseException | Parts | None,
    host: str = "",
) -> WorkerError:
    """A WorkerError that is also a *kind* of exception, with the attributes of the *original*.

    It is a plain one where no type can be both, and for what Python, or Synkro, would take for an end
    of something here: StopIteration, what is no ``Exception``, WorkerDied …
    """
    if isinstance(original, Parts):  # this is a copy
        original = original.error
    both: Any = None if kind is None else _both(kind)
    args = (message,) if original is None else original.args
    for new in () if both is None else (both.__new__, Exception.__new__):
        with contextlib.suppress(Exception):  # it may take what we do not know to make one
            error: WorkerError = new(both, *args)
            if original is not None:
                _copy_attributes(original, error)
            WorkerError.__init__(error, message, rank, function, original, host)
            error.args = args
            return error
    return WorkerError(message, rank, function, original, host)


_ENDS = (StopIteration, StopAsyncIteration, WorkerDied, CallTimeout, SessionError)


@functools.lru_cache(64)
def _both(kind: Any) -> Any:
    """The class of errors that are a WorkerError and of another *kind*, or None."""
    if issubclass(kind, Exception) and not issubclass(kind, _ENDS) and not issubclass(WorkerError, kind):
        with contextlib.suppress(Exception):
            return type(f"WorkerError[{kind.__name__}]", (WorkerError, kind), {"__module__": __name__})
    return None


def _copy_attributes(original: BaseException, error: BaseException) -> None:
    """Copy the attributes of *original* that can be set: its own, and those of its type, as errno."""
    descriptors = (types.MemberDescriptorType, types.GetSetDescriptorType)
    names = [name for name in vars(original) if name[:2] != "__" or name == "__notes__"]
    for cls in type(original).__mro__:
        names += [n for n, what in vars(cls).items() if isinstance(what, descriptors) and n[:2] != "__"]
    for name in names:
        with contextlib.suppress(Exception):
            setattr(error, name, getattr(original, name))


class Parts:
    """Pickles an exception as its class, its args and its attributes.

    That is for one whose constructor takes other arguments than its ``args``.
    """

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return joined, (type(self.error), self.error.args, vars(self.error))


def joined(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    """The exception that ``Parts`` has taken apart."""
    error = kind.__new__(kind, *args)
    vars(error).update(attributes)
    return error


# ── what messages have in common ─────────────────────────────────────────────────────────────────────


def counted(count: int, noun: str) -> str:
    """``counted(1, "worker") == "1 worker"``, and ``counted(2, "worker") == "2 workers"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def there_are(count: int, noun: str) -> str:
    """``there_are(1, "row") == "there is 1 row"``."""
    return f"there {'is' if count == 1 else 'are'} {counted(count, noun)}"


def nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """The name among *known* ones that is most like *name*; None if none is as like."""
    import difflib  # noqa: PLC0415  it takes a while, and few programs need it

    return next(iter(difflib.get_close_matches(name, list(known), 1, cutoff=likeness)), None)


def ranks_in_words(ranks: Sequence[int]) -> str:
    """*ranks* in words, such as "rank 0", and "ranks 0, 1"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


A_LINE = 300
"""Characters of a text of somebody else's that a message shows."""

_SHOWN = 60  # … and of a value, or a name


def cut(text: str, most: int = A_LINE) -> str:
    """*text* in one line, of at most so many characters."""
    begun = " ".join(text[: 4 * most].split())  # blanks may go
    return begun if len(begun) <= most and len(text) <= 4 * most else f"{begun[:most]}…"


def reason(error: BaseException) -> str:
    """The class of *error*, and a line of what it says, without the full stop, in a sentence."""
    return f"{type(error).__name__}: {cut(str(error)).rstrip('.')}"


class LongName(str):
    """A name of the user's that is long, of which messages show the beginning."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(cut(self, _SHOWN))


def named(name: T) -> T | LongName:
    """*name*, as messages are to show it."""
    return LongName(name) if isinstance(name, str) and len(name) > _SHOWN else name


_AN = ("a", "e", "i", "o", "un", "up")
_YET_A = ("eu", "one", "uni")  # as they sound


def with_article(noun: str) -> str:
    """``with_article("list") == "a list"``, and ``with_article("int") == "an int"``."""
    sound = noun.lstrip("_").lower()
    return f"{'an' if sound.startswith(_AN) and not sound.startswith(_YET_A) else 'a'} {noun}"


def shortened(value: Any) -> str:
    """*value* and its type, in a sentence."""
    text, kind = shown(value), _kind_of(value)
    return text if value is None or text == kind else f"{text}, {kind}"


def shown(value: Any, most: int = _SHOWN) -> str:
    """*value* in a sentence; its type where its ``__repr__`` fails."""
    try:
        return line_of(value, most)
    except Exception:  # it is the user's, or nested too deeply
        return _kind_of(value)


def _kind_of(value: Any) -> str:
    return with_article(cut(type(value).__name__, _SHOWN))


def line_of(value: Any, most: int) -> str:
    """At most *most* characters of ``repr(value)``, in one line; no more of a long *value* is looked at.

    Raises: what a ``__repr__`` of the user's does.
    """
    return cut(_begun(value, 4 * most), most)


_BRACKETS: dict[type, str] = {list: "[]", tuple: "()", set: "{}", dict: "{}"}


def _begun(value: Any, most: int) -> str:
    """``repr(value)``, or more than *most* characters of it."""
    kind = type(value)
    if kind in (str, bytes, bytearray):
        return repr(value[: max(most, 0) + 1])
    if kind not in _BRACKETS or not value:
        return repr(value)
    text, end = tuple(_BRACKETS[kind])
    if most < 1:
        return f"{text}…"
    for each in value:
        text += _begun(each, most - len(text))
        if kind is dict:
            text += f": {_begun(value[each], most - len(text))}"
        text += ", "
        if len(text) > most + 2:
            return text
    alone = kind is tuple and len(value) == 1
    return text.removesuffix(" " if alone else ", ") + end


def how_to_await(*values: Any) -> str:
    """What to do about *values* that have to be awaited first, in a sentence; empty if none has."""
    if any(isinstance(value, AsyncIterable) for value in values):
        return "Collect what it yields first, in a coroutine: [x async for x in …]."
    return "Await it first." if any(isinstance(value, Awaitable) for value in values) else ""


def too_deep(called: str, kind: type[UsageError] = InvalidValue) -> UsageError:
    """The error, of a *kind*, for what is *called* so, and nested deeper than Python can follow."""
    return kind(
        f"{called} is nested too deeply to be pickled, or holds itself: give what it is made of, as "
        f"arrays or in a flat list."
    )


def check_keywords(called: str, given: Iterable[str], known: Iterable[str], form: str = "") -> None:
    """Raises: InvalidType for a keyword that *called* does not know, with the nearest of the *known*.

    *form* says how it is to be called.
    """
    known = list(known)
    for name in given:
        if name not in known:
            near = nearest(name, known, 0.75) if len(name) <= _SHOWN else None
            instead = f"did you mean {near}=?" if near else f"it knows {', '.join(known) or 'none'}."
            raise InvalidType(
                f"{called} got the unknown keyword {cut(name, _SHOWN)}=: {form or instead}"
            )


def shows_all_frames() -> bool:
    """Whether tracebacks show the frames of Synkro's own code, too."""
    return os.environ.get("SYNKRO_TRACEBACK") == "full"


def folded(error: BaseException) -> BaseException:
    """*error* with a traceback of the frames of users and libraries alone, where it leaves Synkro.

    All frames stay with SYNKRO_TRACEBACK=full in the environment, and those of an InternalError.
    """
    if isinstance(error, InternalError) or shows_all_frames():
        return error
    entries, entry = list[types.TracebackType](), error.__traceback__
    while entry is not None:
        if not entry.tb_frame.f_code.co_filename.startswith(HOME):
            entries.append(entry)
        entry = entry.tb_next
    shown = None
    for entry in reversed(entries):
        line: int | None = entry.tb_lineno  # None if it was interrupted before its first line
        line = entry.tb_frame.f_code.co_firstlineno if line is None else line
        shown = types.TracebackType(shown, entry.tb_frame, entry.tb_lasti, line)
    return error.with_traceback(shown)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the program: the first one outside of the package."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith(HOME):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
