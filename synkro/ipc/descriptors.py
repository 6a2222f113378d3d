"""Descriptors that other processes get: inherited, or through a socket, each with a number."""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from typing import NamedTuple

_FD = struct.Struct("i")
_MAX_DESCRIPTORS = 250  # a Unix socket takes at most 253 in a message


class Inherited(NamedTuple):
    """What all workers of a host inherit.

    Attributes:
        block, arena: memory, where commands are, and where ranks meet.
        wake_workers: the eventfd on which all workers sleep that have no command.
        wakes_main: the eventfds on which the main process sleeps, by the first rank that it waits for.
        wakes: the eventfds on which ranks sleep in collectives, by rank.
        wake_relay: the eventfd on which the relay of the host sleeps.
    """

    block: int
    arena: int
    wake_workers: int
    wakes_main: tuple[int, ...]
    wakes: tuple[int, ...]
    wake_relay: int

    @staticmethod
    def count(size: int) -> int:
        """How many descriptors there are, of *size* ranks."""
        return 4 + 2 * size

    @classmethod
    def of(cls, listed: Sequence[int]) -> Inherited:
        """The descriptors that ``listed`` has listed."""
        block, arena, wake_workers, *wakes, wake_relay = listed
        size = len(wakes) // 2
        return cls(block, arena, wake_workers, tuple(wakes[:size]), tuple(wakes[size:]), wake_relay)

    def listed(self) -> list[int]:
        """All descriptors, in one list."""
        block, arena, wake_workers, wakes_main, wakes, wake_relay = self
        return [block, arena, wake_workers, *wakes_main, *wakes, wake_relay]


def send_descriptors(sock: socket.socket, numbered: Sequence[tuple[int, int]]) -> None:
    """Pass descriptors, as pairs ``(number, fd)``."""
    for first in range(0, len(numbered), _MAX_DESCRIPTORS):
        some = numbered[first : first + _MAX_DESCRIPTORS]
        message = struct.pack(f"<{1 + len(some)}q", len(some), *(number for number, _ in some))
        socket.send_fds(sock, [message], [fd for _, fd in some])


class Descriptors:
    """Descriptors that arrive at the end of a socket, and are kept until they are released."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received: dict[int, int] = {}
        self._unwanted: set[int] = set()  # those that were released before they could be received

    def close(self) -> None:
        """Let go of the socket, when none will come any more, and of what was not released."""
        self._socket.close()
        for fd in self._received.values():
            os.close(fd)
        self._received.clear()

    def descriptor(self, number: int) -> int:
        """The descriptor that was passed under *number*, open until ``release(number)``.

        Raises: OSError if this process cannot open so many files; later it can be asked for again.
        """
        while number not in self._received:
            self.receive()
        return self._received[number]

    def receive(self) -> None:
        """Wait for some descriptors, and take them.  Raises: as ``descriptor``."""
        # a look first: where there is no place for the descriptors, the message stays in the socket
        room = socket.CMSG_LEN(_MAX_DESCRIPTORS * _FD.size)
        head, control, _, _ = self._socket.recvmsg(8, room, socket.MSG_PEEK)
        fds = [fd for _, _, data in control for (fd,) in _FD.iter_unpack(data)]
        if len(head) < 8:
            raise EOFError("the main process closed the socket")
        count = struct.unpack("<q", head)[0]
        if len(fds) < count:
            for fd in fds:
                os.close(fd)
            raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: an input cannot be mapped")
        body = b""
        while len(body) < 8 * (1 + count):
            body += self._socket.recv(8 * (1 + count) - len(body))
        for name, fd in zip(struct.unpack_from(f"<{count}q", body, 8), fds, strict=True):
            if name in self._received:
                os.close(self._received[name])
            if name in self._unwanted:
                self._unwanted.remove(name)
                os.close(fd)
            else:
                self._received[name] = fd

    def take(self, number: int) -> int:
        """The descriptor that was passed under *number*, which is the caller's from now on."""
        fd = self.descriptor(number)
        del self._received[number]
        return fd

    def has(self, number: int) -> bool:
        """Whether the descriptor with this *number* has come."""
        return number in self._received

    def fileno(self) -> int:
        """The socket, which is readable when some have come."""
        return self._socket.fileno()

    def refuse(self, number: int) -> None:
        """Close what was passed under *number*, or will be."""
        if self.has(number):
            self.release(number)
        else:
            self._unwanted.add(number)

    def release(self, number: int) -> None:
        """Close the descriptor that was passed under *number*: later, if it cannot be received now."""
        try:
            os.close(self.take(number))
        except OSError as error:
            if error.errno != errno.EMFILE:
                raise
            self._unwanted.add(number)
