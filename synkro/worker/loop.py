"""The worker's loop: receive a command, do it, reply; until the command Exit, or a signal, ends it."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import mmap
import os
import pickle
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import cloudpickle

from .. import here
from ..comms.hosts import HostsCommunicator
from ..comms.shm import ShmCommunicator
from ..errors import CollectiveError, UsageError
from ..ipc.block import AREA
from ..ipc.descriptors import Descriptors, Inherited
from ..ipc.listener import Listener
from ..ipc.process import give_up, hold_on_to, spelled
from ..machine import importing
from ..memory.interrupts import atomic
from ..messages import (
    Ack,
    Assign,
    Call,
    Deliver,
    Exit,
    Failed,
    Indirect,
    Phase,
    Reduce,
    Reply,
    Store,
    TooLong,
)
from ..packing.exceptions import kinds, packed
from ..packing.tracebacks import TEXT_LIMIT, sent
from ..values.cache import Cache
from .rank import Rank, end_as_child
from .terminal import refuse_questions


def main(argument: str) -> None:
    """Be the worker that ``ipc.process`` has started with this *argument*."""
    *position, rest = argument.split(" ", 3)
    rank, size, hosts = int(position[0]), int(position[1]), spelled(position[2])
    sock, lifeline, *listed = map(int, rest.split())
    block, arena, wake_workers, wakes_main, wakes, wake_relay = Inherited.of(listed)
    hold_on_to(lifeline)
    if sys.version_info >= (3, 14):  # a stack in C would push all else out of WorkerDied's last lines
        faulthandler.enable(c_stack=False)
    else:
        faulthandler.enable()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True)
    refuse_questions()
    memory = memoryview(mmap.mmap(block, os.fstat(block).st_size))
    os.close(block)
    listener = Listener(memory, rank, size, wakes_main, wake_workers)
    descriptors = Descriptors(socket.socket(fileno=sock))
    end = rank, size, arena, wakes, listener.answered
    comm = HostsCommunicator(*end, hosts, wake_relay) if len(hosts) > 1 else ShmCommunicator(*end)
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
        self._rank.close()

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
                with contextlib.suppress(ValueError):  # the function has closed it
                    sys.stdout.flush()
        except BaseException as error:
            if self._rank.forked:
                end_as_child(error)
            self._interruptible = False
            self._prepared.clear()  # an interrupt may have left one of them half-changed
            self._leave_if_lost(error)
            try:
                return self._failure(error)
            except Exception:  # of the error's own methods
                return self._failure(
                    RuntimeError(f"a {type(error).__name__}, which cannot be looked at")
                )

    def _leave_if_lost(self, error: BaseException) -> None:
        """End the process if *error* has made its device useless, whose results would be wrong."""
        try:
            what = self._rank.device.lost(error)
        except Exception as another:
            what = f"{type(another).__name__}: {another}"
        if what is not None:
            where = f" in the function {self._rank.function!r}" if self._rank.function else ""
            give_up(f"rank {self._rank.number} lost its GPU{where}: {what}")

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
        return self._do(command)

    def _do(self, command: bytes) -> Reply | None:
        action = self._prepared.get(command)
        return action() if action is not None else self._first_time(command)

    def _first_time(self, payload: bytes) -> Reply | None:
        command = pickle.loads(payload)
        match command:
            case Assign():
                self._rank.belongings.assign(command.entries)
                return self._do(command.then)
            case Indirect():
                return self._first_time(self._rank.array(command.region).tobytes())
            case Deliver():
                _, last = self._last
                row = self._rank.array(command.region)[self._rank.number]
                row[: len(last)] = memoryview(last)
                return Ack()
            case Exit():
                return None
        action = self._rank.action(command)
        if isinstance(command, Call | Store | Reduce):
            self._prepared[payload] = action
        return action()

    def _encoded(self, reply: Reply) -> bytes:
        if reply is not self._last[0]:
            self._last = (reply, cloudpickle.dumps(reply))
        payload = self._last[1]
        return payload if len(payload) <= AREA else pickle.dumps(TooLong(len(payload)))

    def _failure(self, error: BaseException) -> Failed:
        rank = self._rank
        parts = sent(error)
        traceback.clear_frames(error.__traceback__)  # do not keep the function's arrays alive
        return Failed(
            function=rank.function,
            summary=_summary(error) + rank.device.advice(error, rank.function is not None),
            traceback=parts,
            pickled=packed(error),
            kinds=kinds(error),
            usage=isinstance(error, UsageError) and not rank.in_function,
            strays=isinstance(error, CollectiveError) and error.strays,
            item=rank.item,
        )

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._listener.unwanted():
            return  # it was meant for the last command, and comes late
        if self._interruptible and atomic.depth:
            atomic.interrupt()
        elif self._interruptible and not importing(frame):  # in an import the next interrupt counts
            raise KeyboardInterrupt


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "(its text could not be made)"
    return f"{type(error).__name__}: {text}"[-TEXT_LIMIT:]
