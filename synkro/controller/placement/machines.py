"""The hosts of a session: found, launched, with their ranks and the devices of these."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

from ...devices.cpu import ALLOCATOR, thread_caps
from ...errors import NotAvailable, counted, ranks_in_words
from ...ipc.crew import Crew
from ...machine import available_cores
from ...plan.hosts import VARIABLE, ranks_of
from .choice import Assignment, choose
from .placement import Placement


class HostRanks(NamedTuple):
    """A host of a session, and the ranks that run there."""

    name: str
    ranks: range


class Machines:
    """Those that ``fork(hosts=…)`` names, or this machine alone.

    Attributes:
        hosts: in the order of their ranks.
        assignments: the device of each rank.
        crew: the workers, which have not been started.
    """

    def __init__(
        self,
        hosts: Sequence[HostRanks],
        cores: Sequence[int],
        assignments: Sequence[Assignment],
        crew: Crew,
        way: str = "",
    ) -> None:
        """*cores* are those of each host; *way* says how they talk, in words."""
        self.hosts = tuple(hosts)
        self.assignments = assignments
        self.crew = crew
        self._cores = cores
        self._way = way

    def environments(self, placement: Placement, threads: int | None) -> list[dict[str, str]]:
        """Those of the workers; each has so many *threads*, or its share of its host's cores."""
        common = {**ALLOCATOR, **os.environ}
        found = placement.environments(common)
        for (_, ranks), cores in zip(self.hosts, self._cores, strict=True):
            share = max(1, cores // len(ranks)) if threads is None else threads
            caps = thread_caps(share, common, threads is not None)
            for rank in ranks:
                found[rank] |= caps
        return found

    @property
    def cores(self) -> int:
        """The usable ones of all hosts."""
        return sum(self._cores)

    def lines(self, seconds: float) -> Iterator[str]:
        """The status lines, when they are ready after so many seconds: none for this machine alone."""
        if self._way:
            listed = ", ".join(f"{name} ({ranks_in_words(tuple(ranks))})" for name, ranks in self.hosts)
            yield (
                f"Synkro: {counted(len(self.hosts), 'host')} by {self._way}: {listed}, ready in "
                f"{seconds:.1f} s"
            )
            yield ("Synkro: MPI has ports open on them while the session lives: trusted networks only")


def machines_of(
    hosts: Any,
    launcher: str | None,
    host_timeout: float,
    n_parallel: int | None,
    devices: str | Sequence[str] | None,
    environment_value: str | None,
) -> Machines:
    """The hosts and devices that these arguments of ``fork()`` ask for; see ``choose``.

    Raises: InvalidType, InvalidValue; NotAvailable; SessionError if hosts cannot work together.
    """
    hosts = os.environ.get(VARIABLE) or None if hosts is None else hosts
    if hosts is None:
        assignments = choose(n_parallel, devices, environment_value)
        ranks = range(len(assignments))
        return Machines([HostRanks("localhost", ranks)], [available_cores()], assignments, Crew([ranks]))
    from ...cluster.crew import ClusterCrew  # noqa: PLC0415  for several hosts only
    from ...cluster.reached import reached  # noqa: PLC0415

    launch, found = reached(hosts, launcher)
    try:
        cores = [launch.said[place].cores for place in launch.places]
        rooms = [len(choose(None, devices, environment_value, each)) for each in cores]
        wanted = None if n_parallel == -1 else n_parallel
        ranks_there = ranks_of(found, rooms, wanted)
        assigned = [
            choose(len(ranks), devices, environment_value, each)
            for ranks, each in zip(ranks_there, cores, strict=True)
        ]
        assignments = list(chain.from_iterable(assigned))
        if any(assignment.gpu is not None for assignment in assignments):
            raise NotAvailable(
                'GPUs over several hosts are not there yet: say devices="cpu", or leave hosts= out.'
            )
        by_place = [range(0)] * len(launch.hosts)
        for place, ranks in zip(launch.places, ranks_there, strict=True):
            by_place[place] = ranks
        there = [HostRanks(host.name, ranks) for host, ranks in zip(found, ranks_there, strict=True)]
        return Machines(
            there, cores, assignments, ClusterCrew(launch, by_place, host_timeout), launch.way
        )
    except BaseException:
        launch.close()
        raise
