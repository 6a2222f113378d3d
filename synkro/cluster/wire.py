"""Messages between hosts, by MPI; no other file imports mpi4py.

A message has a head, an object that is pickled, and bodies: bytes that go from memory to memory.  Each
head carries a digest under the key of the session, so that nothing is unpickled that came from others.
MPI keeps the order of messages from one process to another, and loses none.

MPI wakes nobody: it has to be asked whether something has come.  Whoever waits polls for a moment, and
then sleeps on the sockets that MPI has opened, between looks: those end also where MPI uses no sockets.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import math
import os
import pickle
import re
import select
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256k")  # fewer calls of the kernel for large messages
from mpi4py import MPI  # which begins MPI, and reads that

from ..errors import InternalError
from ..ipc.waiting import Patience, spin
from ..plan.split import Span
from . import orders, questions

_HEAD, _BODY, _BEAT = 1, 2, 3  # tags
_CHUNK = 1 << 26  # bytes of one message at most
_PIECE = 1 << 21  # bytes of one of a stream, which stay in a cache until they are used
_DIGEST_BYTES = 32

_PARTING = 10.0  # seconds of silence at least, in which the others can end their workers
_IDLE = 10.0  # seconds of silence of the gateway between two sessions
_ABSENT = 1.0  # seconds without a look after which nobody knows what has come meanwhile
_LOOK = 0.1  # and from one look for those of others to the next
_SPIN = 500e-6  # seconds to poll before the first nap
_FAST = 1e9  # bytes a second of a network on which naps would take longer than what is awaited
_SHARE = 0.05  # of the time in which there was nothing to do that a nap takes
_LONG_SHARE = 0.4  # the same where sockets say that a message has come
_LOOKS = 3  # in a row
_GLANCES = 8  # of which one is a look at everything
_NAP = 8e-3  # seconds of the longest nap, where sockets may not say that a message has come
_LONG_NAP = 64e-3  # and where they do
_FDS = 1024  # from here on select() knows no descriptors

Buffer = Any  # whatever has contiguous bytes: a memoryview, an array of uint8

GATEWAY = 0
"""The number of the process beside the main process."""

BEAT = 1.0
"""Seconds from one beat to the next."""


class SilenceError(Exception):
    """Nothing is heard of a *host* any more."""

    def __init__(self, host: int) -> None:
        super().__init__(f"nothing is heard of host {host}")
        self.host = host


class Over(NamedTuple):
    """Nothing of this session follows."""


_KINDS = [
    kind
    for names in (vars(orders), vars(questions), {"Over": Over})
    for kind in names.values()
    if isinstance(kind, type) and issubclass(kind, tuple)
]
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


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
        self._heard = dict.fromkeys(others, time.monotonic())  # when those that beat were heard last
        self._beaten = self._looked = 0.0
        self._idle = math.inf if self.number == GATEWAY else _IDLE
        self._limit = self._idle
        self._over: set[int] = set()  # those that are
        self._patience = Patience(_SPIN)
        self._busy = 0.0  # when there was something to do last
        self._eager = 0.0  # until when bytes on their way are polled for
        self._sleep = _Sleep()
        self._pieces: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._wait_until(self._comm.Ibarrier().Test)  # a host that cannot be reached shows here

    def _agreed(self) -> bytes:
        key = bytearray(os.urandom(_DIGEST_BYTES))
        self._comm.Bcast([key, MPI.BYTE], GATEWAY)
        return bytes(key)

    def send(self, to: int, head: Any, bodies: Sequence[Buffer] = ()) -> list[Any]:
        """Send a message; *bodies* must not change before ``flush`` says that all is sent.

        Returns what is true as long as a part of the bodies is on its way, for each part.
        """
        self.sent()  # lets go of what is
        payload = pickle.dumps(_plain(head), 5)
        sealed = self._digest(payload) + payload
        self._begin(sealed, to, _HEAD)
        return [self._begin(piece, to, _BODY) for body in bodies for piece in _pieces(body)]

    def _digest(self, payload: bytes) -> bytes:
        return hashlib.blake2b(payload, key=self._key, digest_size=_DIGEST_BYTES).digest()

    def _begin(self, piece: Buffer, to: int, tag: int) -> Any:
        self._expect(len(piece))
        request = self._comm.Isend([piece, MPI.BYTE], to, tag)
        self._sending.append((request, piece))
        return request  # which is false when it has been seen to be done

    def _expect(self, nbytes: int) -> None:
        """So many bytes are on their way: poll for them as long as a fast network takes."""
        self._eager = max(time.perf_counter(), self._eager) + nbytes / _FAST

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
        if not hmac.compare_digest(digest, self._digest(payload)):
            raise InternalError(f"a message that came as from host {source} is not from this session.")
        head = _named(*pickle.loads(payload))
        if isinstance(head, Over):  # perhaps before this process knows that the session ends
            self._over.add(source)
        return source, head

    def live(self, limit: float) -> None:
        """From now on all that waits raises SilenceError if one of those that this process talks to is
        not heard for *limit* seconds.
        """
        self._heard = dict.fromkeys(self._heard, time.monotonic())
        self._limit = limit
        self._sleep.look_for_sockets()

    def part(self, hear: Callable[[Any], None] | None = None) -> None:
        """End a session: nothing that the others have sent is left for the next.

        *hear*, if given, gets the heads of the messages that come before the others are over, too;
        bodies get lost.

        Raises: SilenceError.
        """
        self.live(max(self._limit, _PARTING))
        self._part(set(range(self.count)) - {self.number}, hear)
        self.live(self._idle)

    def leave(self) -> None:
        """There will be no other session: the gateway and the leaders have nothing more to say."""
        self._beaten = math.inf  # no beat follows, which nobody would take
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

        self._wait_until(parted)
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
        absent = now - self._looked
        if absent < _LOOK:
            return False
        self._looked = now
        if absent > _ABSENT:
            self._heard = dict.fromkeys(self._heard, now)
        status = MPI.Status()
        while self._comm.Iprobe(MPI.ANY_SOURCE, _BEAT, status):
            source = status.Get_source()
            self._comm.Recv([bytearray(), MPI.BYTE], source, _BEAT)
            self._heard[source] = now
        for other, heard in self._heard.items():
            if now - heard > self._limit:
                raise SilenceError(other)
        if now - self._beaten < BEAT:
            return False
        self._beaten = now
        self.sent()
        for other in self._heard:
            self._begin(memoryview(b""), other, _BEAT)
        return True

    def fill(
        self, source: int, bodies: Sequence[Buffer], meanwhile: Callable[[], object] = tuple
    ) -> None:
        """Receive the bodies of the last message from *source* into memory of their sizes.

        *meanwhile* is done again and again until all are here; it may send.
        """
        pieces = [piece for body in bodies for piece in _pieces(body)]
        self._expect(sum(map(len, pieces)))
        requests = [self._comm.Irecv([piece, MPI.BYTE], source, _BODY) for piece in pieces]

        def filled() -> bool:
            meanwhile()
            return bool(MPI.Request.Testall(requests))

        self._wait_until(filled)

    def stream(self, source: int, nbytes: int) -> Iterator[NDArray[np.uint8]]:
        """Receive what ``in_pieces`` has cut: each piece is there until the next one is asked for.

        Meanwhile the next one is on its way.
        """
        if not len(self._pieces):
            self._pieces = np.empty((2, _PIECE), np.uint8)  # kept, as fresh pages take as long as bytes
        pieces = [self._pieces[n % 2, : stop - start] for n, (start, stop) in enumerate(cuts(nbytes))]
        self._expect(nbytes)
        requests = [self._comm.Irecv([piece, MPI.BYTE], source, _BODY) for piece in pieces[:2]]
        for number, piece in enumerate(pieces):
            self._wait_until(requests[number].Test)
            yield piece
            if number + 2 < len(pieces):
                requests.append(self._comm.Irecv([pieces[number + 2], MPI.BYTE], source, _BODY))

    def next(self) -> tuple[int, Any]:
        """As ``receive``, after waiting for a message."""
        found: list[tuple[int, Any]] = []

        def came() -> bool:
            message = self.receive()
            found.extend([] if message is None else [message])
            return bool(found)

        self._wait_until(came)
        return found[0]

    def flush(self) -> None:
        """Wait until all messages are sent."""
        self._wait_until(self.sent)

    def rest(
        self,
        called: Callable[[], bool],
        step: Callable[[], bool],
        dozing: Callable[[Callable[[list[int]], object]], object],
    ) -> bool:
        """Wait for a message, until *step* has found something to do, or until the second is over.

        *called* says in no time whether *step* most likely would.  ``dozing(doze)`` does *doze*, which
        gets descriptors that end it when one is readable.
        Returns whether a second is over.  Raises: SilenceError.
        """
        over, looks = False, 0

        def news() -> bool:
            nonlocal over
            over = self.beat()
            return over or self._has_come() or stepped()

        def stepped() -> bool:
            if step():
                self._busy = time.perf_counter()
                return True
            return False

        def glance() -> bool:
            nonlocal looks
            looks += 1
            if not looks % _GLANCES:
                return news()
            return (called() and stepped()) or self._has_come()

        if not self._patience.poll(glance):
            with self._patience:
                self._nap_until(news, dozing, self._busy)
        return over

    def _has_come(self) -> bool:
        """Whether there is a message.  MPI takes several looks to bring one."""
        for _ in range(_LOOKS):  # noqa: SIM110 - a generator takes longer
            if self._comm.Iprobe(MPI.ANY_SOURCE, _HEAD):
                return True
        return False

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        def holds() -> bool:
            self.beat()
            return condition()

        if not spin(holds, _SPIN):
            self._nap_until(holds, lambda doze: doze([]), time.perf_counter(), busy=True)

    def _nap_until(
        self,
        condition: Callable[[], bool],
        dozing: Callable[[Callable[[list[int]], object]], object],
        since: float,
        busy: bool = False,
    ) -> None:
        """Look for *condition* between naps, as nothing has been done *since*.

        *busy*: bodies of messages are on their way.
        """

        def doze(others: Sequence[int]) -> None:
            now, sending = time.perf_counter(), not self.sent()
            if (busy or sending) and now < self._eager:
                os.sched_yield()
                return
            self._sleep(now - since, others, sending, busy or sending)
            self._sleep.judge(self._has_come, lambda: self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG))

        while not condition():
            dozing(doze)


def _plain(head: Any) -> tuple[Any, ...]:
    """*head* in a form that is quickly pickled: a named tuple as its kind's number and fields."""
    kind = _NUMBERS.get(type(head))
    return (-1, head) if kind is None else (kind, *head)


def _named(kind: int, *fields: Any) -> Any:
    """What ``_plain`` has been made of."""
    return fields[0] if kind < 0 else _KINDS[kind](*fields)


class _Sleep:
    """Sleeps on the sockets that MPI has opened.

    Each message that a socket announces makes the next naps longer; each that comes unannounced, as MPI
    has other ways, makes them shorter again.
    """

    def __init__(self) -> None:
        self._sockets: list[int] = []
        self._in_vain = False  # whether they ended the last sleep, perhaps for nothing
        self._over = False  # whether nothing did
        self._longest = _NAP

    def look_for_sockets(self) -> None:
        """Find those that are connected over a network."""
        with contextlib.suppress(OSError):  # too many files are open
            self._sockets = [int(fd) for fd in os.listdir("/proc/self/fd") if _is_connected(int(fd))]

    def __call__(self, waited: float, others: Sequence[int], sending: bool, busy: bool) -> None:
        """Sleep until one of *others* is readable, or something has come by a socket, or can be sent
        if something is being sent; at most for a share of the seconds *waited* until now, and no longer
        than the longest nap.

        Unless it is *busy*, sockets that have ended the last sleep do not end the next: it may have
        been for nothing that MPI reads.
        """
        listens = busy or not self._in_vain
        sockets = self._sockets if listens else []
        reads, writes = [*others, *sockets], sockets if sending else []
        self._over = False
        if max(reads, default=0) >= _FDS:
            time.sleep(min(waited * _SHARE, _NAP))
            return
        try:
            announced = listens and self._longest > _NAP
            nap = min(waited * _LONG_SHARE, self._longest) if announced else min(waited * _SHARE, _NAP)
            ready, writable, _ = select.select(reads, writes, [], nap)
        except OSError:  # MPI has closed one, whose other end is gone
            self.look_for_sockets()
            return
        self._over = listens and not ready and not writable
        self._in_vain = bool(writable) or any(fd in sockets for fd in ready)

    def judge(self, has_come: Callable[[], bool], anything: Callable[[], bool]) -> None:
        """Learn from what ended the last sleep.

        *has_come* asks for messages, *anything* for beats, too.
        """
        if self._over and self._longest > _NAP and has_come():
            self._longest /= 2
        elif self._in_vain and self._longest < _LONG_NAP and anything():
            self._longest = min(2 * self._longest, _LONG_NAP)


def _is_connected(fd: int) -> bool:
    """Whether *fd* is a socket of TCP's that is connected."""
    with contextlib.suppress(OSError):
        probe = socket.socket(fileno=os.dup(fd))
        with probe:
            return probe.family != socket.AF_UNIX and bool(probe.getpeername())
    return False


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


def cuts(nbytes: int) -> Iterator[Span]:
    """The pieces of so many bytes in a stream."""
    return ((start, min(start + _PIECE, nbytes)) for start in range(0, nbytes, _PIECE))


def in_pieces(body: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
    """*body*, as ``Wire.stream`` receives it."""
    return [body[start:stop] for start, stop in cuts(len(body))]


def end() -> None:
    """End MPI, in which all processes take part."""
    MPI.Finalize()


def abort() -> None:
    """End all processes at once."""
    MPI.COMM_WORLD.Abort(1)
