"""The hosts of a session: found, launched, with their ranks and the devices of these."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

from ...devices.cpu import ALLOCATOR, thread_caps
from ...devices.gpus import Visible, visible
from ...errors import A_LINE, InvalidValue, SynkroError, counted, ranks_in_words, shown
from ...hosts.names import VARIABLE, Host, ranks_of
from ...ipc.pool import WorkerPool
from ...machine import available_cores
from ...values.arrays import checked_bool, checked_seconds
from .choice import VARIABLE as DEVICES
from .choice import Assignment, Room, check_devices, checked_count, choose
from .placement import Placement

if TYPE_CHECKING:
    from ...hosts.pool import MpiHosts


class HostRanks(NamedTuple):
    """A host of a session, and the ranks that run there."""

    name: str
    ranks: range


@dataclass(frozen=True)
class Machines:
    """The machines that ``fork(hosts=…)`` names, or this one alone.

    Attributes:
        hosts: in the order of their ranks.
        cores: how many each host has that are usable.
        assignments: the device of each rank.
        pool: the workers, which have not been started.
        way: how the hosts talk, in words; empty for this machine alone.
        notes: how safe that is.
        look: looks for the GPUs of all hosts.
    """

    hosts: tuple[HostRanks, ...]
    cores: Sequence[int]
    assignments: Sequence[Assignment]
    pool: WorkerPool
    way: str = ""
    notes: Sequence[str] = ()
    look: Callable[[], Visible] = visible

    def environments(self, placement: Placement, threads: int | None, seed: int) -> list[dict[str, str]]:
        """The environments of the workers; each has so many *threads*, or its share of its host's
        cores.  *seed* is that of the hashes of strings, by which sets have one order on all ranks."""
        common = {**ALLOCATOR, **os.environ}
        if not common.get("PYTHONHASHSEED", "").isdecimal():
            common["PYTHONHASHSEED"] = str(seed % (1 << 32))
        found = placement.environments(common)
        for (_, ranks), cores in zip(self.hosts, self.cores, strict=True):
            share = max(1, cores // len(ranks)) if threads is None else threads
            caps = thread_caps(share, common, threads is not None)
            for rank in ranks:
                found[rank] |= caps
        return found

    def lines(self, seconds: float) -> Iterator[str]:
        """The status lines, when they are ready after so many seconds: none for this machine alone."""
        if self.way:
            listed = ", ".join(f"{name} ({ranks_in_words(tuple(ranks))})" for name, ranks in self.hosts)
            yield (
                f"Synkro: {counted(len(self.hosts), 'host')} by {self.way}: {listed}, ready in "
                f"{seconds:.1f} s"
            )
            yield from (f"Synkro: {note}" for note in self.notes)


def machines_of(
    hosts: Any,
    launcher: str | os.PathLike[str] | None,
    host_timeout: float,
    trusted_network: bool,
    start_timeout: float,
    n_parallel: int | None,
    devices: str | Sequence[str] | None,
    environment_value: str | None,
) -> Machines:
    """The hosts and devices that these arguments of ``fork()`` ask for; see ``choose``.

    Raises: InvalidType, InvalidValue; NotAvailable; SessionError if hosts cannot work together.
    """
    host_timeout = checked_seconds(host_timeout, "host_timeout")
    trusted_network = checked_bool(trusted_network, "trusted_network")
    if hosts is None and (value := os.environ.get(VARIABLE)):
        reached_by = launcher, host_timeout, trusted_network, start_timeout
        try:
            return machines_of(value, *reached_by, n_parallel, devices, environment_value)
        except SynkroError as error:
            said = (
                f"{error}\nThe environment variable {VARIABLE} names these hosts: "
                f"{shown(value, A_LINE)}."
            )
            raise type(error)(said) from None
    if hosts is None:
        assignments = choose(n_parallel, devices, environment_value)
        ranks = range(len(assignments))
        return Machines(
            (HostRanks("localhost", ranks),), [available_cores()], assignments, WorkerPool([ranks])
        )
    from ...hosts.launch import reached  # noqa: PLC0415
    from ...hosts.pool import HostsPool  # noqa: PLC0415  for several hosts only

    wanted = checked_count(n_parallel)
    check_devices(devices, environment_value)
    launch, found = reached(
        hosts, launcher, start_timeout, lambda named: _check_counts(named, wanted, devices)
    )
    try:
        rooms = _rooms(launch, found)
        if devices is None and not environment_value:
            devices = "cuda" if all(room.look().gpus for room in rooms) else "cpu"
        most = [len(choose(None, devices, environment_value, room)) for room in rooms]
        _check_ranks(found, most, devices, environment_value)
        ranks_there = ranks_of(found, most, wanted)
        assigned = [
            choose(len(ranks), devices, environment_value, room)
            for ranks, room in zip(ranks_there, rooms, strict=True)
        ]
        by_place = [range(0)] * len(launch.hosts)
        for place, ranks in zip(launch.places, ranks_there, strict=True):
            by_place[place] = ranks
        there = (HostRanks(host.name, ranks) for host, ranks in zip(found, ranks_there, strict=True))
        cores = [room.cores for room in rooms]
        pool = HostsPool(launch, by_place, host_timeout, trusted_network)
        assignments = list(chain.from_iterable(assigned))
        look = partial(_together, rooms)
        notes = _notes(launch, trusted_network)
        return Machines(tuple(there), cores, assignments, pool, launch.way, notes, look)
    except BaseException:
        launch.close()
        raise


def _notes(mpi: MpiHosts, trusted_network: bool) -> list[str]:
    """What to say of the network between hosts."""
    notes = ["MPI has ports open on them while the session lives: trusted networks only"]
    if not mpi.secret:
        notes.append(
            "the key of their digests went over MPI, in the clear: who has heard it can forge messages"
        )
    if trusted_network:
        notes.append("rows between them have no digests (trusted_network=True)")
    return notes


def _check_counts(hosts: Sequence[Host], n_parallel: int | None, devices: Any) -> None:
    """Raises: InvalidValue where numbers contradict each other that are known before hosts are asked."""
    if isinstance(devices, list | tuple):
        _check_ranks(hosts, [len(devices)] * len(hosts), devices, None)
    if all(host.ranks for host in hosts):
        ranks_of(hosts, [0] * len(hosts), n_parallel)


def _check_ranks(
    hosts: Sequence[Host], most: Sequence[int], devices: Any, environment_value: str | None
) -> None:
    """Raises: InvalidValue where devices are listed, and more than the ranks that a host is to have."""
    source = "devices="
    if devices is None:
        devices, source = environment_value, DEVICES
    if isinstance(devices, str) and devices.strip() in ("cpu", "cuda"):
        return  # as many as there are
    for host, listed in zip(hosts, most, strict=True):
        if host.ranks is not None and host.ranks < listed:
            raise InvalidValue(
                f"{source} lists {counted(listed, 'device')} for each host ({shown(devices)}), but "
                f"hosts= gives {host.name} {counted(host.ranks, 'rank')}: list as many devices as "
                f"ranks, or name the host without a number."
            )


def _rooms(mpi: MpiHosts, hosts: Sequence[Host]) -> list[Room]:
    """What each of *hosts* has; they look for their GPUs together, once, when one of them is asked."""
    seen = cache(mpi.look)
    return [
        Room(mpi.said[place].cores, partial(lambda place: seen()[place], place), host.name)
        for host, place in zip(hosts, mpi.places, strict=True)
    ]


def _together(rooms: Sequence[Room]) -> Visible:
    """The GPUs of all hosts; the reason for none is that of the first host without."""
    seen = [room.look() for room in rooms]
    beside = zip(rooms, seen, strict=True)
    reasons = (f"on {room.name} {each.reason}" for room, each in beside if not each.gpus)
    first = next((each for each in seen if each.gpus), seen[0])
    gpus = tuple(gpu for each in seen for gpu in each.gpus)
    installed = any(each.installed for each in seen)
    return replace(first, gpus=gpus, reason=next(reasons, ""), installed=installed)
