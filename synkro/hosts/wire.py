"""Messages between hosts, by MPI; no other file imports mpi4py.

A message has a head, an object that is pickled, and loads: bytes that go from memory to memory.  All of
it carries digests under the key of the session (``seals``), so that nothing is unpickled, or believed,
that came from others.  MPI keeps the order of messages from one process to another, and loses none.

MPI wakes nobody: it has to be asked whether something has come.  Whoever waits polls for a moment, and
then sleeps on the sockets that MPI has opened, between looks: those end also where MPI uses no sockets.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import re
import select
import socket
import stat
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("UCX_TCP_RX_SEG_SIZE", "256k")  # fewer calls of the kernel for large messages
from mpi4py import MPI  # which begins MPI, and reads that

from ..ipc.waiting import Condition, Nap, Patience, spin
from . import protocol
from .parcels import CHUNK, STREAMED, Conveyor, Load, Look, add, are_apart, in_chunks
from .protocol import Over
from .seals import CUT, DIGEST_BYTES, LEFT_OUT, LONG, Buffer, ForgedError, LostError, Seals, SilenceError

_HEAD, _BODY, _SEAL, _BEAT = 1, 2, 3, 4  # tags
_POSTED = 64  # chunks that are awaited at the same time

_PARTING = 10.0  # seconds of silence at least, in which the others can end their workers
_IDLE = 10.0  # seconds of silence of the gateway between two sessions
_ABSENT = 1.0  # seconds without a look after which nobody knows what has come meanwhile
_LOOK = 0.1  # and from one look for those of others to the next
_SLOW = 1e5  # bytes a second that the slowest network brings
_SPIN = 500e-6  # seconds to poll before the first nap
_FAST = 1e9  # bytes a second of a network on which naps would take longer than what is awaited
_SHARE = 0.05  # of the time in which there was nothing to do that a nap takes
_LONG_SHARE = 0.4  # the same where sockets say that a message has come
_LOOKS = 3  # in a row
_LOOKS_AT_ALL = 8  # of which one is a look at everything
_NAP = 8e-3  # seconds of the longest nap, where sockets may not say that a message has come
_LONG_NAP = 64e-3  # and where they do
_FDS = 1024  # from here on select() knows no descriptors

Sleeping = Callable[[Nap], object]  # does a nap, unless there is something to do

GATEWAY = 0
"""The number of the process beside the main process."""

BEAT = 1.0
"""Seconds from one beat to the next."""


_KINDS = [kind for kind in vars(protocol).values() if isinstance(kind, type) and issubclass(kind, tuple)]
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}


class Wire:
    """This process's end of the messages between hosts.

    Attributes:
        number, count: which of the processes this is, and how many there are: one a host.
    """

    def __init__(self, key: bytes | None, alive: Callable[[float], object]) -> None:
        """*key* is None if the processes have no other way to agree on one than MPI.

        With each beat of another process than the gateway ``alive(seconds)`` is told when the next comes
        at the latest: while a session lives.  All hear all then, and else the gateway and the others.
        """
        self._comm = MPI.COMM_WORLD
        self._alive = alive
        self.number: int = self._comm.rank
        self.count: int = self._comm.size
        if key is None:
            agreed = bytearray(os.urandom(DIGEST_BYTES))
            self._comm.Bcast([agreed, MPI.BYTE], GATEWAY)
            key = bytes(agreed)
        self._seals = Seals(key, self.number, self.count)
        self._sending: list[tuple[Any, Any]] = []  # requests, and the heads and beats that they send
        self._conveyors: dict[int, Conveyor] = {}  # loads, by process
        self._spare: list[NDArray[np.uint8]] = []
        self._filling = False  # whether loads are on their way
        self._others = set(range(self.count)) - {self.number}
        self._steady = self._others if self.number == GATEWAY else {GATEWAY}  # also without a session
        self._heard = dict.fromkeys(self._steady, time.monotonic())  # when those were heard last
        self._awaited: dict[int, float] = {}  # whose chunk is awaited, and until when it has to come
        self._beaten = self._looked = 0.0
        self._idle = math.inf if self.number == GATEWAY else _IDLE
        self._limit = self._idle
        self._told = math.inf
        self._over: set[int] = set()  # those that are
        self._patience = Patience(_SPIN)
        self._busy = 0.0  # when there was something to do last
        self._eager = 0.0  # until when bytes on their way are polled for
        self._sleep = _Sleep()
        self._buffers: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._wait_until(self._comm.Ibarrier().Test)  # a host that cannot be reached shows here

    def send(self, to: int, head: Any, *loads: Load) -> Condition | None:
        """Send a message; its loads are to stay until ``flush`` says that all is sent.

        Returns what says whether a part of the loads is on its way, if there are any.
        """
        self.sent()  # lets go of what is
        self._begin(self._seals.head(to, pickle.dumps(_plain(head), 5)), to, _HEAD)
        filled = [load for load in loads if any(map(len, load.bodies))]
        if not filled:
            return None
        if to not in self._conveyors:
            self._conveyors[to] = Conveyor(partial(self._begin_chunk, to), self._look, self._spare)
        self._filling = True
        digested = [(load, self._seals.load_to(to) if load.sealed else None) for load in filled]
        return self._conveyors[to].add(digested)

    def tell_all(self, head: Any) -> None:
        """Send a message without loads to each of the others."""
        for other in self._others:
            self.send(other, head)

    def send_last(self, head: Any) -> None:
        """Have the gateway get a message, however the others do.  Raises: LostError."""
        self._listen(self._steady, self._limit)
        self.send(GATEWAY, head)
        request, _ = self._sending[-1]
        self._wait_until(request.Test)

    def _begin(self, message: Buffer, to: int, tag: int) -> None:
        self._expect(len(message))
        self._sending.append((self._comm.Isend([message, MPI.BYTE], to, tag), message))

    def _begin_chunk(self, to: int, chunk: Buffer, is_digest: bool) -> Any:
        self._expect(len(chunk))
        return self._comm.Isend([chunk, MPI.BYTE], to, _SEAL if is_digest else _BODY)

    def _look(self) -> None:
        """Have MPI go on with what travels."""
        self._comm.Iprobe(MPI.ANY_SOURCE, _BEAT)

    def _expect(self, nbytes: int) -> None:
        """*nbytes* are on their way: poll for them as long as a fast network takes."""
        self._eager = max(time.perf_counter(), self._eager) + nbytes / _FAST

    def sent(self) -> bool:
        """Whether all messages are sent, so that what they were made of may change."""
        self._sending = [each for each in self._sending if not each[0].Test()]
        return not self._push() and not self._sending

    def _push(self) -> bool:
        """Have loads go on; returns whether some are on their way."""
        if self._filling:
            self._filling = any([not each.push() for each in self._conveyors.values()])  # noqa: C419  of all
        return self._filling

    def receive(self, of: int = MPI.ANY_SOURCE) -> tuple[int, Any] | None:
        """Who sent the next message, *of* a process if given, and its head; None if there is none.

        Its loads have to be received next, by ``fill`` and ``stream``.  Raises: ForgedError; LostError
        also if that is what it says.
        """
        found = self._taken(of, _HEAD)
        if found is None:
            return None
        source, message = found
        head = _named(*pickle.loads(self._seals.opened(source, message)))
        if isinstance(head, Over):  # perhaps before this process knows that the session ends
            self._over.add(source)
        if isinstance(head, LostError):
            raise head
        return source, head

    def _taken(self, of: int, tag: int) -> tuple[int, memoryview] | None:
        """Who sent the next message with this *tag*, and its bytes; None if there is none."""
        status = MPI.Status()
        if not self._comm.Iprobe(of, tag, status):
            return None
        source = status.Get_source()
        message = memoryview(bytearray(status.Get_count(MPI.BYTE)))
        self._comm.Recv([message, MPI.BYTE], source, tag)
        return source, message

    def live(self, limit: float) -> None:
        """A session lives: from now on all that waits raises SilenceError if one of the others is not
        heard for *limit* seconds.
        """
        self._listen(self._others, limit)

    def _listen(self, others: Iterable[int], limit: float, told: float | None = None) -> None:
        self._heard = dict.fromkeys(others, time.monotonic())
        self._limit, self._told = limit, limit if told is None else told
        self._tell()
        self._sleep.look_for_sockets()

    def part(self, hear: Callable[[Any], None] | None = None) -> None:
        """End a session: nothing that the others have sent is left for the next.

        *hear*, if given, gets the heads of the messages that come before the others are over, too;
        bodies get lost.

        Raises: SilenceError.
        """
        self._listen(self._steady, max(self._limit, _PARTING))
        self._part(self._others, hear)
        self._listen(self._steady, self._idle, math.inf)

    def leave(self) -> None:
        """There will be no other session: the gateway and the leaders have nothing more to say."""
        self._beaten = math.inf  # no beat follows, which nobody would take
        self._part(set(self._heard), None)
        for source in self._heard:
            self._discard(source, _BEAT)

    def _part(self, others: set[int], hear: Callable[[Any], None] | None) -> None:
        silent = set(others)  # those that have not been told

        def parted() -> bool:
            self.beat()
            for other in tuple(silent):
                if other not in self._conveyors or self._conveyors[other].push():  # loads come before it
                    self.send(other, Over())
                    silent.remove(other)
            for source in others - self._over:  # the rest may say what belongs to the next session
                while source not in self._over and (message := self.receive(source)) is not None:
                    if hear is not None:
                        hear(message[1])
                self._discard(source, _BODY)
                self._discard(source, _SEAL)
            return not silent and others <= self._over

        self._wait_until(parted)
        self._over -= others
        self.flush()

    def _discard(self, source: int, tag: int) -> None:
        """Forget what has come from *source* with this *tag*."""
        while self._taken(source, tag) is not None:
            pass

    def beat(self) -> bool:
        """Have loads go on, let the others hear of this process, and hear of them; returns whether a
        second has passed.

        Raises: LostError.
        """
        self._push()
        now = time.monotonic()
        absent = now - self._looked
        if absent < _LOOK:
            return False
        self._looked = now
        if absent > _ABSENT:
            self._heard = dict.fromkeys(self._heard, now)
            self._awaited = {source: until + absent for source, until in self._awaited.items()}
        while (found := self._taken(MPI.ANY_SOURCE, _BEAT)) is not None:
            source, beat = found
            if self._seals.check_beat(source, beat) and not self._comm.Iprobe(source, _HEAD):
                raise ForgedError(source, self.number, LEFT_OUT)
            if source in self._heard:
                self._heard[source] = now
        for other, heard in self._heard.items():
            if now - heard > self._limit:
                raise SilenceError(other, self.number)
            if now > self._awaited.get(other, now) and now - heard < self._limit / 2:
                raise ForgedError(other, self.number, LEFT_OUT)
        if now - self._beaten < BEAT:
            return False
        self._beaten = now
        self._tell()
        self.sent()
        for other in self._heard:
            self._begin(self._seals.beat(other), other, _BEAT)
        return True

    def _tell(self) -> None:
        if self.number != GATEWAY:  # whom the main process ends
            self._alive(self._told)

    def fill(
        self, source: int, bodies: Sequence[Buffer], sealed: bool = True, meanwhile: Look = tuple
    ) -> None:
        """Receive a load of the last message from *source* into memory of its sizes.

        *meanwhile* is done again and again until all is here; it may send.  Raises: ForgedError.
        """
        chunks = in_chunks(Load(bodies, sealed))
        ahead = _POSTED if are_apart(chunks) else 1  # what was shown twice comes twice
        for _ in self._arriving(source, chunks, sealed, ahead, meanwhile):
            pass

    def stream(self, source: int, nbytes: int, sealed: bool = True) -> Iterator[NDArray[np.uint8]]:
        """Receive a load that is streamed: each chunk is there until the next one is asked for.

        Meanwhile the next one is on its way.  After the last one: raises ForgedError.
        """
        if not len(self._buffers):
            # kept, as fresh pages take as long as bytes
            self._buffers = np.empty((STREAMED, CHUNK), np.uint8)
        room, starts = self._buffers, enumerate(range(0, nbytes, CHUNK))
        chunks = [room[number % STREAMED, : min(CHUNK, nbytes - at)] for number, at in starts]
        yield from self._arriving(source, chunks, sealed, STREAMED)

    def _arriving(
        self, source: int, chunks: Sequence[Any], sealed: bool, ahead: int, meanwhile: Look = tuple
    ) -> Iterator[Any]:
        """Receive a load, *ahead* chunks at the same time, and check its digest."""
        if not chunks:
            return
        digest = self._seals.load_from(source) if sealed else None
        self._expect(sum(map(len, chunks)))
        requests = deque(self._comm.Irecv([chunk, MPI.BYTE], source, _BODY) for chunk in chunks[:ahead])
        for number, chunk in enumerate(chunks):
            self._await(requests.popleft(), source, len(chunk), meanwhile)
            if digest is not None:
                add(digest, chunk, self._look)
            yield chunk
            if number + ahead < len(chunks):
                requests.append(self._comm.Irecv([chunks[number + ahead], MPI.BYTE], source, _BODY))
        if digest is not None:
            said = bytearray(DIGEST_BYTES)
            self._await(self._comm.Irecv([said, MPI.BYTE], source, _SEAL), source, len(said), meanwhile)
            self._seals.check_load(source, digest, said)

    def _await(self, request: Any, source: int, nbytes: int, meanwhile: Look) -> None:
        """Wait until a chunk of so many bytes is here.

        Raises: ForgedError if it has others, or does not come while its sender is heard.
        """
        status = MPI.Status()

        def here() -> bool:
            meanwhile()
            return bool(request.Test(status))

        self._awaited = {source: time.monotonic() + self._limit + nbytes / _SLOW}
        try:
            self._wait_until(here)
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            raise ForgedError(source, self.number, LONG) from None
        finally:
            self._awaited = {}
        if source in self._heard:  # beats come behind what is on its way
            self._heard[source] = time.monotonic()
        if status.Get_count(MPI.BYTE) != nbytes:
            raise ForgedError(source, self.number, CUT)

    def next(self) -> tuple[int, Any]:
        """Wait for the next message; returns who sent it, and its head."""
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

    def rest(self, called: Condition, step: Condition, sleeping: Sleeping) -> bool:
        """Wait for a message, until *step* has found something to do, or until the second is over.

        *called* says in no time whether *step* most likely would.  ``sleeping(nap)`` does *nap*, which
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

        def look() -> bool:
            nonlocal looks
            looks += 1
            if not looks % _LOOKS_AT_ALL:
                return news()
            return (called() and stepped()) or self._has_come()

        if not self._patience.poll(look):
            with self._patience:
                self._nap_until(news, sleeping, self._busy)
        return over

    def _has_come(self) -> bool:
        """Whether there is a message.  MPI takes several looks to bring one."""
        for _ in range(_LOOKS):  # noqa: SIM110 - a generator takes longer
            if self._comm.Iprobe(MPI.ANY_SOURCE, _HEAD):
                return True
        return False

    def _wait_until(self, condition: Condition) -> None:
        def holds() -> bool:
            self.beat()
            return condition()

        if not spin(holds, _SPIN):
            self._nap_until(holds, lambda nap: nap([]), time.perf_counter(), busy=True)

    def _nap_until(
        self, condition: Condition, sleeping: Sleeping, since: float, busy: bool = False
    ) -> None:
        """Look for *condition* between naps, as nothing has been done *since*.

        *busy*: bodies of messages are on their way.
        """

        def nap(others: Sequence[int]) -> None:
            now, sending = time.perf_counter(), not self.sent()
            if (busy or sending) and now < self._eager:
                os.sched_yield()
                return
            self._sleep(now - since, others, sending, busy or sending)
            self._sleep.judge(self._has_come, lambda: self._comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG))

        while not condition():
            sleeping(nap)


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
        """Find the sockets that are connected over a network."""
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

    def judge(self, has_come: Condition, anything: Condition) -> None:
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
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            with socket.socket(fileno=os.dup(fd)) as probe:
                return probe.family != socket.AF_UNIX and bool(probe.getpeername())
    return False


def count() -> int:
    """The number of processes that MPI sees."""
    return int(MPI.COMM_WORLD.size)


def library() -> str:
    """The MPI library and its version, in words."""
    first, *_ = MPI.Get_library_version().partition("\n")
    return re.sub(r"\s+", " ", first.replace("Version:", "")).strip(" \0")


def end() -> None:
    """End MPI, in which all processes take part."""
    MPI.Finalize()


def abort() -> None:
    """End all processes at once."""
    MPI.COMM_WORLD.Abort(1)
