"""The workers of several hosts, as the main process and as leaders see them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from typing import Any

from ..comms.journal import reserve_journals
from ..errors import HostLost, WorkerDied, ranks_in_words
from ..ipc.channel import Controller
from ..ipc.crew import STDERR, Crew, Note
from ..ipc.descriptors import Inherited, send_descriptors
from ..ipc.process import worker_died
from ..machine import readable_bytes
from .cluster import BEGINNING, Cluster
from .janitor import ENDED, NO_MEMORY, UNHEARD
from .orders import Begin, Begun, Died, Interrupt, Missing, Printed, Pushing, Silent

_DYING = 1.0  # seconds until mpiexec has said which of its processes has ended
_AFTER = re.compile(
    r"occurred in Socket closed\n.*reported by process \[\d+,(\d+)\]|\[\[\d+,\d+\],(\d+)\]\S+ peer: "
)
"""How Open MPI says that a process ends as it misses another: that one's end may be heard later."""
_UNREACHED = re.compile(r"Remote (?:host|daemon): +(?:\S+ on node )?([^\s.]+)")
"""How its mpiexec names a host that it does not reach any more."""


class _JournalingCrew(Crew):
    """Those of one host, which write down what those of others have to know."""

    def share(self, inherited: Inherited, board: int) -> None:
        reserve_journals(inherited.arena, board, self.ranks, sum(map(len, self.hosts)))


class LeaderCrew(_JournalingCrew):
    """Those of a leader's host.

    Attributes:
        inherited: duplicates of what they inherit.
    """

    inherited: Inherited

    def share(self, inherited: Inherited, board: int) -> None:
        super().share(inherited, board)
        self.inherited = Inherited.of(list(map(os.dup, inherited.listed())))


class _Printed:
    """What comes from the gateway for the user to read; of it, ``recv`` returns what workers print."""

    def __init__(self, cluster: Cluster, note: Note | None) -> None:
        self._cluster = cluster
        self._note = note
        self.fileno = cluster.printed.fileno

    def recv(self) -> Printed | None:
        said = self._cluster.printed.recv()
        match said:
            case Printed():
                return said
            case Missing(host, segment) if self._note is not None:
                has_not = f"{self._cluster.hosts[host]} does not have the file of {{}}"
                self._note(segment, f"{has_not}: what is read of it is sent there")
            case Pushing(host, segment, nbytes) if self._note is not None:
                name, size = self._cluster.hosts[host], readable_bytes(nbytes)
                self._note(segment, f"pushing {size} of {{}} to {name}…")
        return None


class ClusterCrew(_JournalingCrew):
    """Those of all hosts: the main process's own, and by the gateway the others."""

    def __init__(self, cluster: Cluster, hosts: Sequence[range], host_timeout: float) -> None:
        """*hosts* are the ranks of each of the processes of MPI's, the first of which is here.

        *host_timeout*: seconds after which a host of which nothing is heard is lost.
        """
        super().__init__(hosts)
        self._host_timeout = host_timeout
        self._cluster = cluster
        self._resources.callback(cluster.close)
        self._pids: dict[int, int] = {}
        self._passed: Sequence[tuple[int, int]] = ()
        self._begin: Begin | None = None

    def start(
        self, environments: Sequence[dict[str, str]], board: int, note: Note | None = None
    ) -> Controller:
        cluster = self._cluster
        size = sum(map(len, self.hosts))
        self._begin = Begin(size, tuple(self.hosts), board, tuple(environments), self._host_timeout)
        others = [rank for ranks in self.hosts[1:] for rank in ranks]
        self._pump.hear(others, _Printed(cluster, note))
        controller = super().start([environments[rank] for rank in self.ranks], board)
        begun: list[Begun] = self._heard()
        for name, ranks, each in zip(cluster.hosts[1:], self.hosts[1:], begun, strict=True):
            if each.problem:
                raise RuntimeError(f"on {name}: {each.problem}")
            self._pids |= dict(zip(ranks, each.pids, strict=True))
        self.sentinels += [cluster.gateway.fileno(), cluster.sentinel]
        return controller

    def _heard(self) -> Any:
        patience = self._cluster.left(BEGINNING)
        if not self._cluster.gateway.poll(patience):
            raise RuntimeError(f"the hosts took more than {round(patience, 1):g} s")
        try:
            said = self._cluster.gateway.recv()
        except (EOFError, OSError):
            raise RuntimeError(self._cluster.last_words(_DYING) + self._cluster.log()) from None
        if (end := self._end_told(said)) is not None:
            raise end
        return said

    def share(self, inherited: Inherited, board: int) -> None:
        super().share(inherited, board)
        numbered = [(-1 - place, fd) for place, fd in enumerate(inherited.listed())]
        send_descriptors(self._cluster.descriptors, numbered)
        self._cluster.gateway.send(self._begin)

    @property
    def pids(self) -> tuple[int, ...]:
        pids = self._pids | dict(zip(self.ranks, super().pids, strict=True))
        return tuple(pids[rank] for rank in sorted(pids))

    def host_of(self, rank: int) -> str:
        at = next(number for number, ranks in enumerate(self.hosts) if rank in ranks)
        return self._cluster.hosts[at]

    def interrupt(self, ranks: Sequence[int]) -> None:
        super().interrupt([rank for rank in ranks if rank in self.ranks])
        others = tuple(rank for rank in ranks if rank not in self.ranks)
        if others:
            with contextlib.suppress(OSError):
                self._cluster.gateway.send(Interrupt(others))

    def kill(self) -> None:
        super().kill()
        self._cluster.kill()

    def pass_descriptors(self, rank: int, numbered: Sequence[tuple[int, int]]) -> None:
        if rank in self.ranks:
            super().pass_descriptors(rank, numbered)
        elif numbered != self._passed:  # else the gateway has them, for another rank
            self._passed = numbered
            with contextlib.suppress(OSError):  # the gateway's end shows
                send_descriptors(self._cluster.descriptors, numbered)

    def death(self, sentinel: int) -> WorkerDied:
        cluster = self._cluster
        if sentinel not in (cluster.gateway.fileno(), cluster.sentinel):
            ended = self.end_of(sentinel)
            return worker_died(ended, self._pump.stderr_tail(ended.rank), cluster.hosts[0])
        with contextlib.suppress(EOFError, OSError):
            said = cluster.gateway.recv() if cluster.gateway.poll() else None
            if (end := self._end_told(said)) is not None:
                return end
        return self._why_all_ended()

    def _end_told(self, said: Any) -> WorkerDied | None:
        """What to raise for what the gateway has *said*, if that is that somebody has ended."""
        if isinstance(said, Died):
            rank = said.ended.rank
            self._pump.await_end(rank, STDERR)
            return worker_died(said.ended, self._pump.stderr_tail(rank), self.host_of(rank))
        return self._lost(said.host, self._silent) if isinstance(said, Silent) else None

    def _why_all_ended(self) -> HostLost:
        """What to raise, as mpiexec has ended, by what it has printed."""
        cluster = self._cluster
        words = cluster.last_words(_DYING)
        if UNHEARD in words:
            return self._lost(0, self._silent)
        for at, said in enumerate(cluster.said):
            begin = re.escape(NO_MEMORY.format(pid=said.pid, name=said.name))
            if why := re.search(f"{begin}(.*)", words):
                return self._lost(at, f"memory ran out there, as {why[1].rstrip('.')}")
        number = self._first_to_end(words)
        how = re.search(r"EXIT STRING: (.*)", words)
        if number is None:
            return self._lost(None, f"mpiexec ended{f': {words}' if words else ', and said nothing'}")
        return self._lost(number, f"its process of MPI's ended{f' ({how[1]})' if how else ''}")

    def _first_to_end(self, words: str) -> int | None:
        """Which of the processes that was, by the *words* of all; None: nobody knows."""
        said, unreached = self._cluster.said, _UNREACHED.search(words)
        after = {int(one or other) for one, other in _AFTER.findall(words)}
        for number, each in enumerate(said):
            if unreached and each.name.partition(".")[0] == unreached[1]:
                return number
        ends = [words.find(ENDED.format(pid=each.pid, name=each.name)) for each in said]
        first = [number for number, at in enumerate(ends) if at >= 0 and number not in after]
        return min(first, key=ends.__getitem__, default=None)

    @property
    def _silent(self) -> str:
        return f"nothing was heard of it for {self._host_timeout:g} s (host_timeout=)"

    def _lost(self, number: int | None, why: str) -> HostLost:
        """What to raise for host *number* of the processes; None: nobody knows which it was."""
        names, ranks = self._cluster.hosts, () if number is None else tuple(self.hosts[number])
        name = None if number is None else names[number]
        whose = f" ({ranks_in_words(ranks)})" if ranks else ""
        lost = f"the host {name}{whose} is lost" if name else f"the hosts {', '.join(names)} are lost"
        return HostLost(
            f"{lost}: {why}. Call close() and then fork() to go on; all Data keep their contents."
            f"{self._cluster.log()}",
            name,
            ranks,
        )

    def release(self) -> None:
        super().release()
        self._cluster.release()
