"""The worker's loop: receive a command, do it, reply; until the command Exit, or a signal, ends it.

Log records and warnings go to the main program.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import logging
import mmap
import os
import pickle
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from .. import here, messages
from ..comms.board import board_bytes
from ..comms.hosts import HostsCommunicator
from ..comms.journal import Journal
from ..comms.shm import ShmCommunicator
from ..errors import HOME, OutputError, reason
from ..ipc.block import AREA
from ..ipc.descriptors import Descriptors, Inherited
from ..ipc.listener import Listener
from ..ipc.logs import Logged, LogSender, Told, Warned
from ..machine import importing
from ..memory.interrupts import atomic
from ..messages import Ack, Phase, Reply
from ..packing import settings
from ..packing.pickles import by_themselves, dumped
from ..values.cache import Cache
from .rank import Rank
from .terminal import Questions, ask_by, end_lines, write_lines
from .workspace import end_as_child

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


def run(rank: int, hosts: Sequence[range], fds: Sequence[int]) -> None:
    """Be the worker of *rank*, which is one of those on *hosts*.

    *fds* are its socket, and what it has ``Inherited``.
    """
    size = sum(map(len, hosts))
    sock, *listed = fds
    inherited = Inherited.of(listed)
    if sys.version_info >= (3, 14):  # a stack in C would push all else out of WorkerDied's last lines
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()
    write_lines()
    memory = memoryview(mmap.mmap(inherited.block, os.fstat(inherited.block).st_size))
    os.close(inherited.block)
    listener = Listener(memory, rank, size, inherited)
    descriptors = Descriptors(socket.socket(fileno=sock))
    several = len(hosts) > 1
    arena, wake = inherited.arena, inherited.wake_relay
    sender = LogSender(functools.partial(os.write, sock), listener.note_logged)
    send_logs(sender)
    ask_by(Questions(sender.send, descriptors, listener))
    journal = Journal(arena, board_bytes(size), rank, hosts, wake) if several else None
    kind = HostsCommunicator if several else ShmCommunicator
    comm = kind(rank, size, arena, inherited.wakes, listener.answered, journal)
    Worker(Rank(rank, size, hosts, listener, descriptors, comm), listener).serve()
    descriptors.close()


class Worker:
    """The loop around a rank."""

    def __init__(self, rank: Rank, listener: Listener) -> None:
        self._listener = listener
        self._rank = rank
        self._prepared: Cache[bytes, Callable[[], Reply]] = Cache()
        self._interruptible = False
        self._last: tuple[Reply, bytes] = (Ack(), pickle.dumps(Ack()))  # the last reply, and its pickle
        here.rank = self._rank
        signal.signal(signal.SIGINT, self._on_interrupt)

    def serve(self) -> None:
        while True:
            command, housekeeping = self._listener.receive(Phase.BEGINNING)
            reply = self._answer(command, housekeeping)
            if self._rank.forked:  # what the function brought along has forked, and this is the child
                os._exit(0)
            if reply is None:
                break
            self._listener.reply(self._encoded(reply), Phase.WAITING)
        self._rank.at_close.close()

    def _answer(self, command: bytes, housekeeping: bytes) -> Reply | None:
        """Do the command; returns the reply, or None if this process is to end."""
        try:
            failed = True
            try:
                reply = self._perform(command, housekeeping)
                failed = False
                return reply
            finally:
                self._interruptible = False
                atomic.forget()
                self._rank.end(failed)
                end_lines()
                with contextlib.suppress(ValueError):  # the function has closed it
                    sys.stdout.flush()
        except BaseException as error:
            if self._rank.forked:
                end_as_child(error)
            self._interruptible = False
            self._rank.device.let_inputs_go()  # a second interrupt may have come before it did
            self._prepared.clear()  # an interrupt may have left one of them half-changed
            return self._rank.failure(error)

    def _perform(self, command: bytes, housekeeping: bytes) -> Reply | None:
        rank = self._rank
        rank.attend(self._listener.number)
        if housekeeping:
            self._prepared.clear()  # prepared calls hold views of segments that may have to go
            rank.group.forget()  # so does the last one
            rank.keep_house(pickle.loads(housekeeping))
        self._interruptible = True  # not before: the housekeeping must not be lost
        if self._listener.unwanted():
            raise KeyboardInterrupt
        reply = self._do(command)
        return None if rank.leaves else reply

    def _do(self, command: bytes) -> Reply | None:
        action = self._prepared.get(command)
        return action() if action is not None else self._first_time(command)

    def _first_time(self, payload: bytes) -> Reply | None:
        command = pickle.loads(payload)
        match command:
            case messages.Assign():
                self._rank.objects.assign(command.entries, command.caching)
                return self._do(command.then)
            case messages.Indirect():
                return self._first_time(self._rank.array(command.region).tobytes())
            case messages.Deliver():
                _, last = self._last
                row = self._rank.array(command.region)[self._rank.number]
                row[: len(last)] = memoryview(last)
                return Ack()
            case messages.Exit():
                return None
        action = self._rank.action(command)
        if isinstance(command, messages.Call | messages.Store | messages.Reduce):
            self._prepared[payload] = action
        return action()

    def _encoded(self, reply: Reply) -> bytes:
        if reply is not self._last[0]:
            try:
                self._last = (reply, dumped(reply, there=True))
            except Exception as error:
                self._last = (reply, dumped(self._rank.failure(self._unsendable(error))))
        payload = self._last[1]
        return payload if len(payload) <= AREA else pickle.dumps(messages.TooLong(len(payload)))

    def _unsendable(self, error: Exception) -> OutputError:
        """What to say as the reply cannot be pickled, because of *error*: a dict may have any keys."""
        name = self._rank.function
        what = "a reply" if name is None else f"the result of the function {name!r}"
        return OutputError(
            f"{what} holds outputs under keys that cannot be pickled: {reason(error)}. "
            f"Give names, numbers, or tuples of these as keys, or say outputs=None."
        )

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._listener.unwanted():
            return  # it was meant for the last command, and comes late
        if self._interruptible and atomic.depth:
            atomic.interrupt()
        elif self._interruptible and not importing(frame):  # in an import the next interrupt counts
            raise KeyboardInterrupt
