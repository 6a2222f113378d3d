"""A worker's exception, its classes and its traceback, on their way to the main process.

A worker has no source of what was typed into a notebook or at a prompt; the main process has.  So the
worker sends the parts of the traceback, as ``traceback.TracebackException`` has them, and the main
process puts the missing lines in and formats them.  Frames of Synkro itself are folded to one line.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import linecache
import os
import pickle
import stat
import sys
import traceback
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

from ..errors import HOME, Parts, joined, shows_all_frames
from ..values.foreign import is_outcome
from .pickles import Loader, dumped

_LIMIT = 1 << 16  # bytes that a pickled exception may have

TEXT_LIMIT = 20_000
"""Characters of a text that travel, or are shown, from its end."""

_SENT_LIMIT = 1 << 20  # bytes of a traceback's parts, which are more than those of its text
_COLUMNS = ("end_lineno", "colno", "end_colno")  # attributes of a frame, which Python 3.10 has not


# ── in the worker ──────────────────────────────────────────────────────────────────────────────────────


def pickled(error: BaseException) -> bytes | None:
    """The exception, pickled; None if it cannot be unpickled again, or is too long."""
    for form in (_Outcome(error),) if is_outcome(error) else (error, Parts(error)):
        try:
            data: bytes = dumped(form, there=True)
            again = _Familiar(data).load()
        except BaseException:
            continue
        if type(again) is type(error) and len(data) <= _LIMIT:
            return data
    return None


class _Outcome(Parts):
    """Pickles an exception of pytest's, whose class says of itself that it is a builtin."""

    def __reduce__(self) -> Any:
        return _outcome, (type(self.error).__name__, self.error.args, vars(self.error))


def _outcome(name: str, args: tuple[Any, ...], attributes: dict[str, Any]) -> Any:
    return joined(getattr(sys.modules["_pytest.outcomes"], name), args, attributes)


def kinds(error: BaseException) -> tuple[bytes, ...]:
    """The classes of the exception, the nearest first, each pickled by itself."""
    found = []
    for kind in type(error).__mro__[: -len(BaseException.__mro__)]:
        with contextlib.suppress(BaseException):
            found.append(dumped(kind, there=True))
    return tuple(found)


def sent(error: BaseException) -> bytes:
    """The traceback of *error*, with those of its causes and of its group, ready to travel."""
    trace = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    try:
        stream = io.BytesIO()
        _TracePickler(stream, 5).dump(trace)
        if stream.tell() <= _SENT_LIMIT:
            return stream.getvalue()
    except Exception:  # a chain of a thousand exceptions
        stream.close()
    return pickle.dumps("".join(trace.format())[-TEXT_LIMIT:])


class _TracePickler(pickle.Pickler):
    """Pickles what a traceback shows of objects, and no objects of the user's."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, traceback.StackSummary):
            kept: dict[Any, Any] = {}  # a recursion repeats its frames: they travel once
            parts = [_parts(frame) for frame in obj]
            return _stack, ([kept.setdefault(part, part) for part in parts],)
        if isinstance(obj, type) and issubclass(obj, BaseException) and obj.__module__ != "builtins":
            return _named, (obj.__module__, obj.__qualname__, issubclass(obj, SyntaxError))
        if isinstance(obj, traceback.TracebackException | type | FunctionType):
            return NotImplemented
        return str, (_text(obj),)  # a note may be any object


def _parts(frame: Any) -> tuple[Any, ...]:
    """What a frame shows; its text, a line of source or several, is None where this process has none."""
    columns = [getattr(frame, name, None) for name in _COLUMNS]
    text = frame.line and getattr(frame, "_lines" if hasattr(frame, "_lines") else "_line")
    return (frame.filename, frame.lineno, frame.name, text or None, *columns)


def _text(obj: object) -> str:
    try:
        return str(obj)
    except Exception:
        return f"<unprintable {type(obj).__name__} object>"


# ── in the main process ────────────────────────────────────────────────────────────────────────────────


def unpickled(data: bytes) -> Any:
    """The exception, or the class, in *data*; None if its modules are not imported here."""
    with contextlib.suppress(Exception):
        return _Familiar(data).load()
    return None


class _Familiar(Loader):
    """Loads an exception only if its modules are imported here already, or are Python's.

    An error of CuPy's would otherwise import CuPy, and so CUDA, into the main process.
    """

    def find_class(self, module: str, name: str) -> Any:
        if module not in sys.modules and module.partition(".")[0] not in sys.stdlib_module_names:
            raise ImportError(f"{module} is not imported here")
        return super().find_class(module, name)


def shown(parts: bytes) -> str:
    """The text of a traceback that a worker has *sent*."""
    trace = pickle.loads(parts)
    text = trace if isinstance(trace, str) else "".join(trace.format())
    return text[-TEXT_LIMIT:]


def _named(module: str, name: str, of_syntax: bool) -> type:
    """A stand-in for the class of an exception, which need not be imported here."""
    bases = (SyntaxError if of_syntax else Exception,)
    return type(name, bases, {"__module__": module, "__qualname__": name})


def _stack(frames: list[tuple[Any, ...]]) -> traceback.StackSummary:
    made = {frame: _frame(*frame) for frame in frames}
    return _Folded([made[frame] for frame in frames])


def _frame(filename: str, lineno: int | None, name: str, text: str | None, *columns: Any) -> Any:
    if text is None and lineno is not None:
        linecache.checkcache(filename)
        if not linecache.getline(filename, lineno):
            text, columns = _typed(filename, lineno, name), ()
    options = dict(zip(_COLUMNS, columns, strict=False)) if sys.version_info >= (3, 11) else {}
    return traceback.FrameSummary(filename, lineno, name, lookup_line=False, line=text, **options)


class _Folded(traceback.StackSummary):
    """A stack in which each run of frames of Synkro is one line, unless there are no others."""

    def format(self, **options: Any) -> Any:
        runs = [(ours, list(run)) for ours, run in itertools.groupby(self, _is_ours)]
        for ours, run in runs:
            if ours and len(runs) > 1 and not shows_all_frames():
                yield f"  ... {len(run)} frame{'s' * (len(run) > 1)} of Synkro ...\n"
            else:
                yield from traceback.StackSummary.from_list(run).format(**options)


def _is_ours(frame: Any) -> bool:
    return str(frame.filename).startswith(HOME)


def _typed(filename: str, lineno: int, name: str) -> str:
    """A line of a program that has no file, and that Python does not keep; empty if it is not known."""
    source, code = _program(filename)
    if code is not None and _has(code, name, lineno):
        return source.splitlines()[lineno - 1]
    return ""


@functools.cache
def _program(filename: str) -> tuple[str, CodeType | None]:
    """The program, if it came by ``python -c`` or, out of a file, by standard input; its code."""
    try:
        if filename == "<string>" and "-c" in sys.orig_argv:
            source = sys.orig_argv[sys.orig_argv.index("-c") + 1]
        elif filename == "<stdin>" and stat.S_ISREG(os.fstat(0).st_mode):
            source = Path("/proc/self/fd/0").read_text()
        else:
            return "", None
        return source, compile(source, filename, "exec", dont_inherit=True)
    except Exception:
        return "", None


def _has(code: CodeType, name: str, lineno: int) -> bool:
    """Whether a function of this *name* has this line, in *code* or in what it defines."""
    if code.co_name == name and any(line == lineno for _, _, line in code.co_lines()):
        return True
    inner = (each for each in code.co_consts if isinstance(each, CodeType))
    return any(_has(each, name, lineno) for each in inner)
