"""The hosts of a session: found, launched, and their ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from ...devices.cpu import ALLOCATOR, thread_caps
from ...ipc.crew import Crew
from ...machine import available_cores
from ...plan.hosts import named, ranks_of
from .placement import Placement


class Machines:
    """Those that ``fork(hosts=…)`` names, or this machine alone.

    Attributes:
        names: of the hosts, in the order of their ranks.
        ranks: those of each.
        cores: the usable ones of each.
        crew: the workers, which have not been started.
    """

    def __init__(self, names: Sequence[str], ranks: Sequence[range], cores: Sequence[int], crew: Crew):
        self.names, self.ranks, self.cores, self.crew = names, ranks, cores, crew

    def environments(self, placement: Placement, threads: int | None) -> list[dict[str, str]]:
        """Those of the workers; each has so many *threads*, or its share of its host's cores."""
        common = {**ALLOCATOR, **os.environ}
        found = placement.environments(common)
        for ranks, cores in zip(self.ranks, self.cores, strict=True):
            share = max(1, cores // len(ranks)) if threads is None else threads
            caps = thread_caps(share, common, threads is not None)
            for rank in ranks:
                found[rank] |= caps
        return found

    @property
    def size(self) -> int:
        """The number of all ranks."""
        return self.ranks[-1].stop


def this_machine(count: int) -> Machines:
    """The one with *count* workers."""
    return Machines(["localhost"], [range(count)], [available_cores()], Crew([range(count)]))


def launched(hosts: Any, launcher: str | None, host_timeout: float, n_parallel: int | None) -> Machines:
    """Those of ``hosts=``.

    Raises: InvalidType, InvalidValue; NotAvailable; SessionError if they cannot work together.
    """
    from ...cluster.crew import ClusterCrew  # noqa: PLC0415  for several hosts only
    from ...cluster.launch import Launch  # noqa: PLC0415

    found = named(hosts, os.environ)
    launch = Launch([host.name for host in found], launcher or "ssh")
    try:
        cores = [launch.said[place].cores for place in launch.places]
        ranks = ranks_of(found, cores, n_parallel)
        by_place = [range(0)] * len(launch.hosts)
        for place, each in zip(launch.places, ranks, strict=True):
            by_place[place] = each
        crew = ClusterCrew(launch, by_place, host_timeout)
        return Machines([host.name for host in found], ranks, cores, crew)
    except BaseException:
        launch.close()
        raise
