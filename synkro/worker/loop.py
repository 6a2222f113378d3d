"""The worker's loop: receive a command, do it, reply; until the command Exit, or a signal, ends it."""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import mmap
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType

from .. import here, messages
from ..comms.board import board_bytes
from ..comms.hosts import HostsCommunicator
from ..comms.journal import Journal
from ..comms.shm import ShmCommunicator
from ..errors import OutputError, reason
from ..ipc.block import AREA
from ..ipc.descriptors import Descriptors, Inherited
from ..ipc.listener import Listener
from ..ipc.logs import LogSender
from ..machine import importing
from ..memory.interrupts import atomic
from ..messages import Ack, Phase, Reply
from ..packing.pickles import dumped
from ..values.cache import Cache
from .logs import send_logs
from .rank import Rank
from .terminal import Questions, ask_by, end_lines, write_lines
from .workspace import end_as_child


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
