"""The hosts of a session and their workers, as the main process and as leaders see them.

What a host says of itself, and where two of them differ.
"""

from __future__ import annotations

import abc
import contextlib
import os
import platform
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from typing import Any, Final, NamedTuple

from ..comms.journal import reserve_journals
from ..devices.gpus import PATIENCE as LOOKING
from ..devices.gpus import Visible, showing, visible
from ..errors import HostLost, SessionError, WorkerDied, ranks_in_words
from ..ipc.channel import Controller
from ..ipc.descriptors import Inherited, send_descriptors
from ..ipc.pool import STDERR, Environments, Note, WorkerPool
from ..ipc.process import ProcessEnd
from ..machine import available_cores, readable_bytes, search_path
from . import protocol
from .cleanup import ENDED, NO_MEMORY, UNHEARD
from .names import clean
from .protocol import Hail
from .seals import ForgedError, SilenceError

_COMPARED = ("synkro", "numpy", "cloudpickle")
_MISSING = "none"


class Hello(NamedTuple):
    """What one host says of itself.

    Attributes:
        name: what the host calls itself.
        pid: the process that says so.
        versions: of Python, of the packages that have to agree, and of MPI.
        folder: where it stands; empty if the main process's folder is not there.
        cores: how many are usable.
    """

    name: str
    pid: int
    versions: dict[str, str]
    folder: str
    cores: int


def hello(hail: Hail, mpi: str) -> Hello:
    """What this host says of itself, which from now on imports what the main process does; *mpi* is the
    library between the hosts."""
    sys.path[:], folder = hail.path, hail.folder
    try:
        os.chdir(folder)
    except OSError:
        folder = ""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = {"Python": python, **{name: _version(name) for name in _COMPARED}, "MPI": mpi}
    return Hello(socket.gethostname(), os.getpid(), versions, folder, available_cores())


def _version(package: str) -> str:
    module = sys.modules.get(package)
    try:
        return str(getattr(module, "__version__", "") or version(package))
    except PackageNotFoundError:
        return _MISSING


def differences(hosts: Sequence[str], said: Sequence[Hello], folder: str) -> list[str]:
    """Where a host differs from the first, which stands in *folder*: sentences, each with its cure."""
    found = []
    for host, each in zip(hosts[1:], said[1:], strict=True):
        found += _unlike(host, "here", said[0].versions, each.versions)
        if not each.folder:
            found.append(f"{host} has no folder {folder}: make it there, or start where all hosts are.")
    return found


def unlike_gpus(hosts: Sequence[str], seen: Sequence[Visible]) -> list[str]:
    """Where a host's CuPy or NCCL differs from that of the first with GPUs: sentences, each with its
    cure."""
    versions = [(host, gpu_versions(each)) for host, each in zip(hosts, seen, strict=True) if each.gpus]
    if not versions:
        return []
    (first, ours), *others = versions
    return [each for host, theirs in others for each in _unlike(host, f"{first} has", ours, theirs)]


def gpu_versions(seen: Visible) -> dict[str, str]:
    """The versions of what a host uses its GPUs by."""
    major, rest = divmod(seen.nccl, 10_000)
    nccl = f"{major}.{rest // 100}.{rest % 100}" if seen.nccl else _MISSING
    return {"CuPy": seen.cupy, "NCCL": nccl}


def _unlike(host: str, we: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What to say where *theirs*, the versions of a *host*, are not *ours*."""
    pairs = [(name, mine, theirs.get(name, _MISSING)) for name, mine in ours.items()]
    unlike = [f"{name} {other} ({we} {mine})" for name, mine, other in pairs if mine != other]
    return [f"{host} has {', '.join(unlike)}: install the same versions there."] if unlike else []


PATIENCE = 20.0
"""Seconds until all processes have begun MPI, and for an answer."""

BEGINNING = 60.0
"""Seconds until hosts have begun all that they have to, unless somebody says otherwise."""

ENDS = b"ends"
"""The message with which the gateway gets its ends of the sockets."""

_DYING = 1.0  # seconds until mpiexec has said which of its processes has ended
_AFTER = re.compile(
    r"occurred in Socket closed\n.*reported by process \[\d+,(\d+)\]|\[\[\d+,\d+\],(\d+)\]\S+ peer: "
)
"""How Open MPI says that a process ends as it misses another: that one's end may be heard later."""
_UNREACHED = re.compile(r"Remote (?:host|daemon): +(?:\S+ on node )?([^\s.]+)")
"""How Open MPI's mpiexec names a host that it does not reach any more."""
_GREETED = "HYD_pmcd_pmiserv_proxy_init_cb"
"""What hydra names where it does not take a process for one of its own."""


class MpiHosts(abc.ABC):
    """The processes of MPI's of a session, as the main process sees them: by the gateway.

    Attributes:
        hosts: those of the processes; the first is this machine.
        places: for each host that was asked for, its place in ``hosts``.
        said: what each has said of itself.
        seconds: how long it took until all were there.
        gateway: the connection to the gateway.
        printed: the connection by which it tells what workers print.
        descriptors: the socket by which it gets descriptors.
        sentinel: a descriptor that becomes readable when the processes end.
        secret: whether the key of the session, and the environment, went another way than by MPI.
        environment: the main process's, without what mpiexec or srun have told it alone.
    """

    hosts: Sequence[str]
    places: Sequence[int]
    sentinel: int
    secret: bool
    _held: int  # a descriptor that only the main process may have: a lifeline, or a lock

    def __init__(self, seconds: float) -> None:
        """All hosts have to begin within *seconds*."""
        self._since = time.monotonic()
        self._until = self._since + seconds
        self.environment: Final = clean(os.environ)

    def left(self, most: float) -> float:
        """Seconds to wait for hosts that begin: *most*, or those that are left of all."""
        return max(0.0, min(most, self._until - time.monotonic()))

    def _meet(
        self, connected: socket.socket, undo: contextlib.ExitStack, lifeline: Sequence[int] = ()
    ) -> None:
        """Greet the gateway, which gets its ends of the sockets, and hear who is there."""
        printed, theirs = (Connection(each.detach()) for each in socket.socketpair())
        self.printed: Connection[Any, Any] = undo.enter_context(printed)
        descriptors, received = socket.socketpair()
        self.descriptors: socket.socket = undo.enter_context(descriptors)
        with theirs, received:
            socket.send_fds(connected, [ENDS], [theirs.fileno(), received.fileno(), *lifeline])
        self.gateway: Connection[Any, Any] = undo.enter_context(Connection(connected.detach()))
        environment = None if self.secret else self.environment
        self.gateway.send(protocol.Hail(os.getcwd(), tuple(search_path()), environment))
        self._await(self.gateway.fileno())
        self.said: list[Hello] = self.heard()

    def _settle(self, undo: contextlib.ExitStack) -> None:
        """All are there; what *undo* does is done at the end of the session.

        Raises: SessionError if the hosts cannot work together.
        """
        if wrong := differences(self.hosts, self.said, os.getcwd()):
            raise SessionError(listed(wrong))
        self._undo = undo.pop_all()
        self.seconds: float = time.monotonic() - self._since

    @property
    def way(self) -> str:
        """How the hosts talk, and how they were reached, in words."""
        return self.said[0].versions["MPI"]

    @abc.abstractmethod
    def _await(self, fd: int) -> None:
        """Wait until *fd* is readable.  Raises: SessionError if the processes end, or it takes long."""

    def unknown(self, environment: Mapping[str, str]) -> dict[str, str]:
        """What *environment* has that other hosts do not know: it travels in the clear."""
        known = self.environment
        return {name: value for name, value in environment.items() if known.get(name) != value}

    def log(self) -> str:
        """The sentence that says where all is kept that the processes have said; empty if it is not."""
        return ""

    @abc.abstractmethod
    def last_words(self, patience: float = 0.0) -> str:
        """Why the processes have ended, after waiting *patience* seconds for their end."""

    def heard(self) -> Any:
        """What the gateway says next.  Raises: SessionError if the processes have ended."""
        try:
            return self.gateway.recv()
        except (EOFError, OSError):
            words = self.last_words(_DYING)
            raise SessionError(f"the processes of MPI's have ended: {words}{self.log()}") from None

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
            self.gateway.send(protocol.AskGpus(showing()))
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

    def close(self) -> None:
        """End the session, and give everything back."""
        with contextlib.suppress(OSError):
            self.gateway.send(protocol.End())
        self._undo.close()

    def release(self) -> None:
        """In a fork of the main process: the processes are the parent's; let go of them."""
        self._undo.pop_all()
        os.close(self.sentinel)
        os.close(self._held)
        for connection in (self.gateway, self.printed, self.descriptors):
            connection.close()


def listed(wrong: Sequence[str]) -> str:
    """What is wrong with hosts, as the text of an error."""
    return "\n".join(["the hosts cannot work together:", *(f"- {each}" for each in wrong)])


def stranger(words: str) -> str:
    """Who has ended MPICH's mpiexec, by its last *words*: empty if that was none but its own."""
    if _GREETED not in words:
        return ""
    return (
        "somebody who is none of its processes has connected to mpiexec's port, and has said what one "
        "says there (a replayed handshake), which ends mpiexec; look for who is on the network"
    )


class LeaderPool(WorkerPool):
    """The workers of a leader's host, which write down what those of others have to know.

    Attributes:
        inherited: duplicates of what the workers inherit.
    """

    def share(self, inherited: Inherited, board: int) -> None:
        reserve_journals(inherited.arena, board, self.ranks, sum(map(len, self.hosts)))
        self.inherited: Inherited = Inherited.of(list(map(os.dup, inherited.listed())))


class HostsPool(WorkerPool):
    """The workers of all hosts: the main process's own, and by the gateway the others."""

    def __init__(
        self, mpi: MpiHosts, hosts: Sequence[range], host_timeout: float, trusted: bool
    ) -> None:
        """*hosts* are the ranks of each of the processes of MPI's, the first of which is here.

        *host_timeout*: seconds after which a host of which nothing is heard is lost.  Rows need no
        digests if the network is *trusted*.
        """
        super().__init__(hosts)
        # what leaders hear first; the rest is known when the workers start
        self._begin = protocol.Begin(tuple(hosts), 0, (), host_timeout, trusted)
        self._mpi = mpi
        self._resources.callback(mpi.close)
        self._pids: dict[int, int] = {}
        self._passed: Sequence[tuple[int, int]] = ()

    def start(self, environments: Environments, board: int, note: Note | None = None) -> Controller:
        mpi = self._mpi
        beyond = tuple(map(mpi.unknown, environments))
        self._begin = self._begin._replace(board=board, environments=beyond)
        others = [rank for ranks in self.hosts[1:] for rank in ranks]
        self._pump.hear(others, mpi.printed.fileno(), partial(self._printed, note))
        controller = super().start([environments[rank] for rank in self.ranks], board)
        begun: list[protocol.Begun] = self._heard()
        for name, ranks, each in zip(mpi.hosts[1:], self.hosts[1:], begun, strict=True):
            if each.problem:
                raise SessionError(f"on {name}: {each.problem}")
            self._pids |= dict(zip(ranks, each.pids, strict=True))
        self.sentinels.extend([mpi.gateway.fileno(), mpi.sentinel])
        return controller

    def _printed(self, note: Note | None) -> protocol.Printed | None:
        """What the gateway says for the user to read next, if workers have printed it; else *note* gets
        it."""
        match said := self._mpi.printed.recv():
            case protocol.Printed():
                return said
            case protocol.Missing(host, segment) if note is not None:
                has_not = f"{self._mpi.hosts[host]} does not have the file of {{}}"
                note(segment, f"{has_not}: what is read of it is sent there")
            case protocol.Pushing(host, segment, nbytes) if note is not None:
                name, size = self._mpi.hosts[host], readable_bytes(nbytes)
                note(segment, f"pushing {size} of {{}} to {name}…")
        return None

    def _heard(self) -> Any:
        patience = self._mpi.left(BEGINNING)
        if not self._mpi.gateway.poll(patience):
            raise SessionError(
                f"the workers of other hosts were not started within {round(patience, 1):g} s: give "
                f"start_timeout= more, or look at what takes long there.{self._mpi.log()}"
            )
        said = self._mpi.heard()
        if (end := self._end_told(said)) is not None:
            raise end
        return said

    def share(self, inherited: Inherited, board: int) -> None:
        reserve_journals(inherited.arena, board, self.ranks, sum(map(len, self.hosts)))
        numbered = [(-1 - place, fd) for place, fd in enumerate(inherited.listed())]
        send_descriptors(self._mpi.descriptors, numbered)
        self._mpi.gateway.send(self._begin)

    @property
    def pids(self) -> tuple[int, ...]:
        pids = self._pids | dict(zip(self.ranks, super().pids, strict=True))
        return tuple(pids[rank] for rank in sorted(pids))

    def host_of(self, rank: int) -> str:
        return self._mpi.hosts[self.host_number(rank)]

    def interrupt(self, ranks: Sequence[int]) -> None:
        super().interrupt([rank for rank in ranks if rank in self.ranks])
        others = tuple(rank for rank in ranks if rank not in self.ranks)
        if others:
            with contextlib.suppress(OSError):
                self._mpi.gateway.send(protocol.Interrupt(others))

    def kill(self, ranks: Sequence[int] | None = None) -> None:
        super().kill(ranks)
        self._mpi.kill()

    def pass_descriptors(self, rank: int, numbered: Sequence[tuple[int, int]]) -> None:
        if rank in self.ranks:
            super().pass_descriptors(rank, numbered)
        elif numbered != self._passed:  # else the gateway has them, for another rank
            self._passed = numbered
            with contextlib.suppress(OSError):  # the gateway's end shows
                send_descriptors(self._mpi.descriptors, numbered)

    def answer(self, rank: int, number: int, line: str) -> None:
        if rank in self.ranks:
            super().answer(rank, number, line)
        else:
            with contextlib.suppress(OSError):  # the gateway's end shows
                self._mpi.gateway.send(protocol.UserAnswer(rank, number, line))

    def death(self, sentinel: int) -> WorkerDied:
        mpi = self._mpi
        if sentinel not in (mpi.gateway.fileno(), mpi.sentinel):
            return super().death(sentinel)
        with contextlib.suppress(EOFError, OSError):
            said = mpi.gateway.recv() if mpi.gateway.poll() else None
            if (end := self._end_told(said)) is not None:
                return end
        return self._why_all_ended()

    def _end_told(self, said: Any) -> WorkerDied | None:
        """What to raise for what the gateway has *said*, if that is that somebody has ended."""
        if isinstance(said, ProcessEnd):
            self._pump.await_end(said.rank, STDERR)
            return self.died(said)
        if isinstance(said, ForgedError):
            one, other = self._mpi.hosts[said.host], self._mpi.hosts[said.at]
            why = f"a message from {one} to {other} {said.what}; look for who is on the network between"
            return self._lost(said.host or said.at, why)
        if isinstance(said, SilenceError):
            where = f" on {self._mpi.hosts[said.at]}" if said.at else ""
            return self._lost(said.host, f"{self._silent}{where}")
        return None

    def _why_all_ended(self) -> HostLost:
        """What to raise, as mpiexec has ended, by what it has printed."""
        mpi = self._mpi
        words = mpi.last_words(_DYING)
        if UNHEARD in words:
            return self._lost(0, self._silent)
        for at, said in enumerate(mpi.said):
            begin = re.escape(NO_MEMORY.format(pid=said.pid, name=said.name))
            if why := re.search(f"{begin}(.*)", words):
                return self._lost(at, f"memory ran out there, as {why[1].rstrip('.')}")
        if somebody := stranger(words):
            return self._lost(None, somebody)
        number = self._first_to_end(words)
        how = re.search(r"EXIT STRING: (.*)", words)
        if number is None:
            return self._lost(None, f"mpiexec ended{f': {words}' if words else ', and said nothing'}")
        return self._lost(number, f"its process of MPI's ended{f' ({how[1]})' if how else ''}")

    def _first_to_end(self, words: str) -> int | None:
        """Which of the processes that was, by the *words* of all; None: nobody knows."""
        said, unreached = self._mpi.said, _UNREACHED.search(words)
        after = {int(one or other) for one, other in _AFTER.findall(words)}
        for number, each in enumerate(said):
            if unreached and each.name.partition(".")[0] == unreached[1]:
                return number
        ends = [words.find(ENDED.format(pid=each.pid, name=each.name)) for each in said]
        first = [number for number, at in enumerate(ends) if at >= 0 and number not in after]
        return min(first, key=ends.__getitem__, default=None)

    @property
    def _silent(self) -> str:
        return f"nothing was heard of it for {self._begin.host_timeout:g} s (host_timeout=)"

    def _lost(self, number: int | None, why: str) -> HostLost:
        """What to raise for host *number* of the processes; None: nobody knows which it was."""
        names, ranks = self._mpi.hosts, () if number is None else tuple(self.hosts[number])
        name = None if number is None else names[number]
        whose = f" ({ranks_in_words(ranks)})" if ranks else ""
        lost = f"the host {name}{whose} is lost" if name else f"the hosts {', '.join(names)} are lost"
        return HostLost(
            f"{lost}: {why}. Call close() and then fork() to go on; all Data keep their contents."
            f"{self._mpi.log()}",
            name,
            ranks,
        )

    def release(self) -> None:
        super().release()
        self._mpi.release()
