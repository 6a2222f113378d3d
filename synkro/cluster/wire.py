"""Messages between hosts, by MPI; no other file imports mpi4py.

A message has a head, an object that is pickled, and bodies: bytes that go from memory to memory.  Each
head carries a digest under the key of the session, so that nothing is unpickled that came from others.
MPI keeps the order of messages from one process to another, and loses none.
"""

from __future__ import annotations

import hmac
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mpi4py import MPI  # which begins MPI

from ..errors import InternalError

_HEAD, _BODY, _BEAT = 1, 2, 3  # tags
_CHUNK = 1 << 26  # bytes of one message at most
_DIGEST = "sha256"
_DIGEST_BYTES = 32

_PARTING = 10.0  # seconds of silence at least, in which the others can end their workers
_EACH = 1.0  # seconds from one beat to the next
_LOOK = 0.1  # and from one look for those of others to the next
_SPIN = 300e-6  # seconds to poll before the first nap
_SHARE = 0.05  # of the time since something was new that a nap takes
_LAST_NAP = 1e-3

Buffer = Any  # whatever has contiguous bytes: a memoryview, an array of uint8

GATEWAY = 0
"""The number of the process beside the main process."""


class SilenceError(Exception):
    """Nothing is heard of a *host* any more."""

    def __init__(self, host: int) -> None:
        super().__init__(f"nothing is heard of host {host}")
        self.host = host


class Over(NamedTuple):
    """Nothing of this session follows."""


class Wire:
    """This process's end.

    Attributes:
        number, count: which of the processes this is, and how many there are: one a host.
    """

    def __init__(self, key: bytes | None) -> None:
        """*key* is None if the processes have no other way to agree on one than MPI."""
        self._comm = MPI.COMM_WORLD
        self._key = self._agreed() if key is None else key
        self._sending: list[tuple[Any, Any]] = []  # requests, and what they send
        self.number, self.count = self._comm.rank, self._comm.size
        others = range(1, self.count) if self.number == GATEWAY else [GATEWAY]
        self._heard = dict.fromkeys(others, 0.0)  # when something came last from those that beat
        self._beaten = self._looked = 0.0
        self._limit = math.inf
        self._over: set[int] = set()  # those that are
        self._comm.Barrier()  # a host that cannot be reached shows here

    def _agreed(self) -> bytes:
        key = bytearray(os.urandom(_DIGEST_BYTES))
        self._comm.Bcast([key, MPI.BYTE], GATEWAY)
        return bytes(key)

    def send(self, to: int, head: Any, bodies: Sequence[Buffer] = ()) -> None:
        """Send a message; *bodies* must not change before ``flush`` says that all is sent."""
        self.sent()  # lets go of what is
        payload = pickle.dumps(head, 5)
        sealed = hmac.digest(self._key, payload, _DIGEST) + payload
        self._begin(sealed, to, _HEAD)
        for body in bodies:
            for piece in _pieces(body):
                self._begin(piece, to, _BODY)

    def _begin(self, piece: Buffer, to: int, tag: int) -> None:
        request = self._comm.Isend([piece, MPI.BYTE], to, tag)
        self._sending.append((request, piece))

    def sent(self) -> bool:
        """Whether all messages are sent, so that what they were made of may change."""
        self._sending = [each for each in self._sending if not each[0].Test()]
        return not self._sending

    def receive(self, of: int = MPI.ANY_SOURCE) -> tuple[int, Any] | None:
        """The head of the next message, *of* a process if given, and who sent it; None if there is none.

        Its bodies have to be received next, by ``fill``.
        """
        status = MPI.Status()
        if not self._comm.Iprobe(of, _HEAD, status):
            return None
        source = status.Get_source()
        sealed = bytearray(status.Get_count(MPI.BYTE))
        self._comm.Recv([sealed, MPI.BYTE], source, _HEAD)
        digest, payload = bytes(sealed[:_DIGEST_BYTES]), bytes(sealed[_DIGEST_BYTES:])
        if not hmac.compare_digest(digest, hmac.digest(self._key, payload, _DIGEST)):
            raise InternalError(f"a message that came as from host {source} is not from this session.")
        head = pickle.loads(payload)
        if isinstance(head, Over):  # perhaps before this process knows that the session ends
            self._over.add(source)
        return source, head

    def live(self, limit: float) -> None:
        """From now on this process, and those that it talks to, hear of each other every second.

        If not for *limit* seconds, all that waits raises SilenceError.
        """
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._limit = limit

    def part(self, hear: Callable[[Any], None] | None = None) -> None:
        """End a session: nothing that the others have sent is left for the next; no beats any more.

        *hear*, if given, gets the heads of the messages that come before the others are over, too;
        bodies get lost.

        Raises: SilenceError.
        """
        if self._limit < math.inf:
            self.live(max(self._limit, _PARTING))
        self._part(set(range(self.count)) - {self.number}, hear)
        self._limit = math.inf

    def leave(self) -> None:
        """There will be no other session: the gateway and the leaders have nothing more to say."""
        self._part(set(self._heard), None)
        for source in self._heard:
            self._discard(source, _BEAT)

    def _part(self, others: set[int], hear: Callable[[Any], None] | None) -> None:
        for other in others:
            self.send(other, Over())

        def parted() -> bool:
            self.beat()
            for source in others - self._over:  # the rest may say what belongs to the next session
                while source not in self._over and (message := self.receive(source)) is not None:
                    if hear is not None:
                        hear(message[1])
                self._discard(source, _BODY)
            return others <= self._over

        wait_until(parted)
        self._over -= others
        self.flush()

    def _discard(self, source: int, tag: int) -> None:
        """Forget what has come from *source* with this *tag*."""
        status = MPI.Status()
        while self._comm.Iprobe(source, tag, status):
            lost = bytearray(status.Get_count(MPI.BYTE))
            self._comm.Recv([lost, MPI.BYTE], source, tag)

    def beat(self) -> bool:
        """Let them hear of this process, and hear of them; returns whether a second has passed.

        Raises: SilenceError.
        """
        now = time.monotonic()
        if now - self._looked < _LOOK or self._limit == math.inf:
            return False
        self._looked = now
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _BEAT, status):
            source = status.Get_source()
            self._comm.Recv([bytearray(), MPI.BYTE], source, _BEAT)
            self._heard[source] = now
        for other, heard in self._heard.items():
            if now - heard > self._limit:
                raise SilenceError(other)
        if now - self._beaten < _EACH:
            return False
        self._beaten = now
        for other in self._heard:
            self._begin(memoryview(b""), other, _BEAT)
        return True

    def fill(self, source: int, bodies: Sequence[Buffer]) -> None:
        """Receive the bodies of the last message from *source* into memory of their sizes."""
        pieces = [piece for body in bodies for piece in _pieces(body)]
        requests = [self._comm.Irecv([piece, MPI.BYTE], source, _BODY) for piece in pieces]

        def done() -> bool:
            self.beat()
            return bool(MPI.Request.Testall(requests))

        wait_until(done)

    def next(self) -> tuple[int, Any]:
        """As ``receive``, after waiting for a message."""
        found: list[tuple[int, Any]] = []

        def came() -> bool:
            message = self.receive()
            found.extend([] if message is None else [message])
            return bool(found)

        wait_until(came)
        return found[0]

    def flush(self) -> None:
        """Wait until all messages are sent."""

        def done() -> bool:
            self.beat()
            return self.sent()

        wait_until(done)


def wait_until(condition: Callable[[], bool]) -> None:
    """Poll for a moment, then between naps that grow: what MPI brings wakes nobody."""
    nap = Nap()
    while not condition():
        nap.take(False, time.sleep)


class Nap:
    """Between two looks of a process: the longer nothing is new, the longer it sleeps."""

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def take(self, news: bool, doze: Callable[[float], None]) -> None:
        """After a look that had *news*, or not: look again at once, or *doze* for so many seconds."""
        now = time.perf_counter()
        if news:
            self._since = now
        elif now - self._since < _SPIN:
            os.sched_yield()
        else:
            doze(min((now - self._since) * _SHARE, _LAST_NAP))


def count() -> int:
    """The number of processes that MPI sees."""
    return int(MPI.COMM_WORLD.size)


def library() -> str:
    """The MPI library and its version, in words."""
    first, *_ = MPI.Get_library_version().partition("\n")
    return re.sub(r"\s+", " ", first.replace("Version:", "")).strip(" \0")


def _pieces(body: Buffer) -> list[memoryview]:
    view = memoryview(body).cast("B")
    return [view[start : start + _CHUNK] for start in range(0, len(view), _CHUNK)]


def end() -> None:
    """End MPI, in which all processes take part."""
    MPI.Finalize()


def abort() -> None:
    """End all processes at once."""
    MPI.COMM_WORLD.Abort(1)
