"""On a worker, log records and warnings go to the main program."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from .. import here
from ..errors import HOME
from ..ipc.logs import Logged, LogSender, Told, Warned
from ..packing import settings
from ..packing.pickles import by_themselves

_MOST = 1 << 16  # bytes of a warning with all that it holds


class _ToMain(logging.Handler):
    """Sends records to the main program, prepared as by ``logging.handlers.QueueHandler``.

    What does not pickle is in the text of the message.
    """

    def __init__(self, sender: LogSender) -> None:
        super().__init__()
        self._sender = sender
        self._pid = os.getpid()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            if os.getpid() != self._pid:  # a fork, which does not share the way
                print(logging.Formatter(logging.BASIC_FORMAT).format(record), file=sys.stderr)
                return
            if record.pathname.startswith(HOME) and (frame := _in_the_users(sys._getframe())):
                code = frame.f_code  # stacklevel= would be that of the caller, which there is none of
                name = os.path.basename(code.co_filename)
                place = {"pathname": code.co_filename, "filename": name, "lineno": frame.f_lineno}
                vars(record).update(place, funcName=code.co_name, module=os.path.splitext(name)[0])
            text = self.format(record)
            in_text = dict.fromkeys(("args", "exc_info", "exc_text", "stack_info"))
            attributes = vars(record) | in_text | {"msg": text, "message": text}
            try:
                self._sender.send(Logged(attributes))
            except (pickle.PicklingError, AttributeError, TypeError):  # of the script's
                apart = {name: by_themselves(value) for name, value in attributes.items()}
                self._sender.send(Logged(apart))
        except Exception:
            self.handleError(record)


def _in_the_users(frame: FrameType | None) -> FrameType | None:
    """The nearest frame that is of code of the user's, or of a library's."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(HOME) or frame.f_globals.get("__name__") in _NOT_THEIRS
    ):
        frame = frame.f_back
    return frame


_NOT_THEIRS = ("logging", "warnings", "_py_warnings")


def _module_at(filename: str, line: int, frame: FrameType | None) -> str | None:
    """The name of the module whose code stands there now: that of *frame*, or of a caller of it."""
    while frame is not None:
        if frame.f_lineno == line and frame.f_code.co_filename == filename:
            return frame.f_globals.get("__name__")
        frame = frame.f_back
    return None


def _configured(handler: logging.Handler, usual: Callable[..., None]) -> Callable[..., None]:
    """``logging.basicConfig``, which does nothing where there is a handler: to an initializer ours is
    none."""

    @functools.wraps(usual)
    def configure(**options: Any) -> None:
        if not settings.is_initializing():
            usual(**options)
            return
        logging.root.removeHandler(handler)
        try:
            usual(**options)
        finally:
            logging.root.addHandler(handler)

    return configure


def send_logs(sender: LogSender) -> None:
    """Send what this process logs from now on, and what it warns of."""
    logging.root.addHandler(handler := _ToMain(sender))
    logging.basicConfig = _configured(handler, logging.basicConfig)
    pid = os.getpid()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: Any = None,
        line: str | None = None,
    ) -> None:
        if file is None and os.getpid() == pid:
            kinds = tuple((kind.__module__, kind.__qualname__) for kind in category.__mro__)
            if filename.startswith(HOME) and (frame := _in_the_users(sys._getframe())):
                filename, lineno = frame.f_code.co_filename, frame.f_lineno
            module = _module_at(filename, lineno, sys._getframe(1))
            rank = here.rank
            call = None if rank is None or rank.item is not None else rank.epoch
            pickled = None
            with contextlib.suppress(Exception):
                pickled = pickle.dumps(by_themselves(message), 5)
            warned = Warned(str(message), kinds, filename, lineno, module, call)
            sender.send(Told(warned, pickled if pickled is None or len(pickled) <= _MOST else None))
        else:
            text = warnings.formatwarning(message, category, filename, lineno, line)
            print(text, end="", file=file or sys.stderr)

    warnings.showwarning = show
