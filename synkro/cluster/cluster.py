"""The processes of MPI's on all hosts, as the main process sees them: by a connection to the gateway."""

from __future__ import annotations

import abc
import contextlib
import os
import socket
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from ..devices.gpus import PATIENCE as LOOKING
from ..devices.gpus import Visible, showing, visible
from ..errors import SessionError
from ..machine import search_path
from .hello import Hello, differences, unlike_gpus
from .questions import Hail, Look

PATIENCE = 20.0
"""Seconds until all processes have begun MPI, and for an answer."""

BEGINNING = 60.0
"""Seconds until hosts have begun all that they have to, unless somebody says otherwise."""

ENDS = b"ends"
"""The message with which the gateway gets its ends of the sockets."""


class Cluster(abc.ABC):
    """Those of a session.

    Attributes:
        hosts: those of the processes; the first is this machine.
        places: which of them each is that was asked for.
        said: what each has said of itself.
        seconds: how long it took until all were there.
        gateway: the connection to the gateway.
        printed: the one by which it tells what workers print.
        descriptors: the socket by which it gets descriptors.
        sentinel: a descriptor that becomes readable when the processes end.
    """

    hosts: Sequence[str]
    places: Sequence[int]
    said: list[Hello]
    seconds: float
    gateway: Connection
    printed: Connection
    descriptors: socket.socket
    sentinel: int
    _until: float
    _undo: contextlib.ExitStack

    def left(self, most: float) -> float:
        """Seconds to wait for hosts that begin: *most*, or those that are left of all."""
        return max(0.0, min(most, self._until - time.monotonic()))

    def _meet(
        self, connected: socket.socket, undo: contextlib.ExitStack, lifeline: Sequence[int] = ()
    ) -> None:
        """Greet the gateway, which gets its ends of the sockets, and hear who is there."""
        printed, theirs = (Connection(each.detach()) for each in socket.socketpair())
        self.printed = undo.enter_context(printed)
        self.descriptors, received = socket.socketpair()
        undo.enter_context(self.descriptors)
        with theirs, received:
            socket.send_fds(connected, [ENDS], [theirs.fileno(), received.fileno(), *lifeline])
        self.gateway = undo.enter_context(Connection(connected.detach()))
        self.gateway.send(Hail(os.getcwd(), tuple(search_path())))
        self._await(self.gateway.fileno())
        try:
            self.said = self.gateway.recv()
        except EOFError:
            raise SessionError(
                f"the processes of MPI's have ended: {self.last_words(1)}{self.log()}"
            ) from None

    def _compare(self) -> None:
        """Raises: SessionError if the hosts cannot work together."""
        wrong = differences(self.hosts, self.said, os.getcwd())
        if wrong:
            raise SessionError(listed(wrong))

    @property
    def way(self) -> str:
        """How the hosts talk, and how they were reached, in words."""
        return self.said[0].versions["MPI"]

    @abc.abstractmethod
    def _await(self, fd: int) -> None:
        """Wait until *fd* is readable.  Raises: SessionError if the processes end, or it takes long."""

    def log(self) -> str:
        """The sentence that says where all is kept that the processes have said; empty if it is not."""
        return ""

    @abc.abstractmethod
    def last_words(self, patience: float = 0.0) -> str:
        """Why the processes have ended, after waiting *patience* seconds for their end."""

    def ask(self, question: Any) -> Any:
        """The gateway's answer.

        Raises: TimeoutError; EOFError if the processes have ended.
        """
        self.gateway.send(question)
        if not self.gateway.poll(PATIENCE):
            raise TimeoutError
        return self.gateway.recv()

    def look(self) -> list[Visible]:
        """The GPUs of each host; they all look for them at the same time.

        Raises: SessionError if they do not answer, or cannot compute together.
        """
        try:
            self.gateway.send(Look(showing()))
            own = visible()
            if not self.gateway.poll(self.left(LOOKING + PATIENCE)):
                raise SessionError("the hosts did not say which GPUs they have.")
            seen = [own, *self.gateway.recv()]
        except (EOFError, ConnectionError):
            raise SessionError(f"the processes of MPI's have ended: {self.last_words(1)}") from None
        if wrong := unlike_gpus(self.hosts, seen):
            raise SessionError(listed(wrong))
        return seen

    @abc.abstractmethod
    def kill(self) -> None:
        """End the workers at once."""

    @abc.abstractmethod
    def close(self) -> None:
        """End the session, and give everything back."""

    def release(self) -> None:
        """In a fork of the main process: the processes are the parent's; let go of them."""
        self._undo.pop_all()
        os.close(self.sentinel)
        for connection in (self.gateway, self.printed, self.descriptors):
            connection.close()


def listed(wrong: Sequence[str]) -> str:
    """What is wrong with hosts, as the text of an error."""
    return "\n".join(["the hosts cannot work together:", *(f"- {each}" for each in wrong)])
