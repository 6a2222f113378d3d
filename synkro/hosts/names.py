"""Which hosts a user has named, and how many ranks each has."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..errors import A_LINE, InvalidType, InvalidValue, counted, shown

VARIABLE = "SYNKRO_HOSTS"
"""The environment variable that stands for ``hosts=``."""

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Za-z:.%]+\]")
_SLOTS = re.compile(r"slots\s*=\s*(\d+)$")
_SPAN = re.compile(r"(\d+)(?:-(\d+))?$")

_SCHEDULERS = {
    "slurm": ("SLURM_JOB_NODELIST", "a job of SLURM's, by srun, sbatch or salloc"),
    "pbs": ("PBS_NODEFILE", "a job of PBS's, by qsub"),
}


class Host(NamedTuple):
    """A host, and how many ranks it is to have; None: one a device."""

    name: str
    ranks: int | None = None


def named(hosts: Any, environment: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts that ``hosts=`` names: ``["h1", "h2:4"]``, the path of a hostfile, "slurm" or "pbs".

    In a text names are separated by commas.  A hostfile has a name in each line, perhaps with a number
    of ranks: ``h1``, ``h1:4`` (MPICH) or ``h1 slots=4`` (Open MPI); ``#`` begins a comment.

    Raises: InvalidType, InvalidValue.
    """
    if isinstance(hosts, os.PathLike):
        return _of_file(os.fspath(hosts))
    if isinstance(hosts, str):
        if hosts in _SCHEDULERS:
            return _of_scheduler(hosts, environment)
        if os.path.isfile(hosts):
            return _of_file(hosts)
        if os.path.isdir(hosts) and os.sep in hosts:
            raise InvalidValue(f"hosts={shown(hosts, A_LINE)} is a folder: give the path of a hostfile.")
        if os.sep in hosts:
            raise InvalidValue(f"hosts={shown(hosts, A_LINE)}: there is no such hostfile.")
        hosts = [name.strip() for name in hosts.split(",")]
    if not isinstance(hosts, Sequence | Iterator) or isinstance(hosts, bytes):
        raise InvalidType(
            f'hosts must be a list of names, such as ["h1", "h2:4"], the path of a hostfile, "slurm", '
            f'"pbs" or "mpi"; got {shown(hosts, A_LINE)}.'
        )
    found = tuple(_host(text, f"hosts={shown(hosts, A_LINE)}") for text in hosts)
    if not found:
        raise InvalidValue("hosts= names no host: leave it out to use this machine alone.")
    return found


def _host(text: Any, where: str) -> Host:
    """A name, with ``:4`` behind it or without."""
    if not isinstance(text, str):
        raise InvalidType(
            f"{where}: the name of a host is a text, such as 'h2' or 'h2:4'; got {shown(text)}."
        )
    match = re.fullmatch(rf"({_NAME.pattern})(?::(.*))?", text.strip())
    if match is None:
        raise InvalidValue(f"{where}: {shown(text)} is no name of a host: expected 'h2', or 'h2:4'.")
    name, ranks = match.groups()
    if ranks is None:
        return Host(name)
    if not re.fullmatch("[0-9]{1,6}", ranks) or int(ranks) == 0:
        raise InvalidValue(
            f"{where}: {shown(text)} asks for {shown(ranks)} ranks on {name}: give 1 or more, or leave "
            f"it out for one a device."
        )
    return Host(name, int(ranks))


# ── files and schedulers ─────────────────────────────────────────────────────────────────────────────


def _of_file(path: str) -> tuple[Host, ...]:
    """A host in several lines has as many ranks as these say together, or one for each of them."""
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidValue(f"the hostfile {shown(path, A_LINE)} cannot be read: {error}.") from None
    found: dict[str, list[int | None]] = {}
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if text:
            host = _of_line(text, f"line {number} of the hostfile {shown(path, A_LINE)}")
            found.setdefault(host.name, []).append(host.ranks)
    if not found:
        raise InvalidValue(f"the hostfile {shown(path, A_LINE)} names no host.")
    return tuple(
        Host(name, each[0] if len(each) == 1 else sum(1 if ranks is None else ranks for ranks in each))
        for name, each in found.items()
    )


def _of_line(text: str, where: str) -> Host:
    name, *rest = text.split(maxsplit=1)
    host = _host(name, where)
    if not rest:
        return host
    slots = _SLOTS.match(re.sub(r"\s+max[-_]slots\s*=\s*\d+$", "", rest[0]))
    if slots is None or host.ranks is not None or int(slots[1]) == 0:
        raise InvalidValue(
            f"{where}: {shown(text)} is not understood: expected 'h2', 'h2:4' or 'h2 slots=4'."
        )
    return Host(host.name, int(slots[1]))


def _of_scheduler(kind: str, environment: Mapping[str, str]) -> tuple[Host, ...]:
    variable, job = _SCHEDULERS[kind]
    value = environment.get(variable, "")
    if not value:
        raise InvalidValue(
            f'hosts="{kind}", but {variable} is not set: this is not {job}. Start the program in one, '
            f"or name the hosts."
        )
    if kind == "slurm":
        return tuple(map(Host, expanded(value)))
    return tuple(Host(host.name) for host in _of_file(value))


def expanded(nodes: str) -> list[str]:
    """The names in a list of SLURM's, such as ``"a[1-3,07]-ib,b"``.

    Raises: InvalidValue.
    """
    entries = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", nodes)  # cut at the commas outside of brackets
    return [name for entry in entries for name in _names(entry, nodes)]


def _names(entry: str, nodes: str) -> Iterator[str]:
    texts, spans = re.split(r"\[[^\]]*\]", entry), re.findall(r"\[([^\]]*)\]", entry)
    for numbers in product(*[list(_numbers(span, nodes)) for span in spans]):
        name = "".join(text + number for text, number in zip(texts, [*numbers, ""], strict=True)).strip()
        if not _NAME.fullmatch(name):
            raise InvalidValue(f"the list of nodes {shown(nodes)} is not understood, at {shown(entry)}.")
        yield name


def _numbers(spans: str, nodes: str) -> Iterator[str]:
    for span in spans.split(","):
        match = _SPAN.match(span.strip())
        if match is None:
            raise InvalidValue(f"the list of nodes {shown(nodes)} is not understood, at {shown(span)}.")
        first, last = match[1], match[2] or match[1]
        for number in range(int(first), int(last) + 1):
            yield str(number).zfill(len(first))


_COPIES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")


def copies(environment: Mapping[str, str]) -> int:
    """How many processes like this one mpiexec or srun has started, if one of them has."""
    found = [environment.get(name, "") for name in _COPIES]
    return max([int(value) for value in found if value.isdecimal()], default=1)


_INHERITED = (  # by a program that mpiexec or srun has started: they would confuse ours
    *("PMI", "PMIX", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_", "OMPI_", "PRTE_"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
)
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "PMIX_MCA_")  # a user's, which a launcher sets, too


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """*environment* without what mpiexec, or srun, has told this process alone."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(_SETTINGS) or not name.startswith(_INHERITED)
    }


# ── ranks over hosts ─────────────────────────────────────────────────────────────────────────────────


def ranks_of(hosts: Sequence[Host], devices: Sequence[int], n_parallel: int | None) -> tuple[range, ...]:
    """The ranks of each host, which they fill in their order; *devices* says how many each could have.

    Raises: InvalidValue if the numbers contradict each other.
    """
    rooms = [host.ranks or count for host, count in zip(hosts, devices, strict=True)]
    wanted = sum(rooms) if n_parallel is None else n_parallel
    listed = ", ".join(f"{host.name} has {room}" for host, room in zip(hosts, rooms, strict=True))
    if all(host.ranks for host in hosts) and wanted != sum(rooms):
        raise InvalidValue(
            f"n_parallel={n_parallel}, but hosts= asks for {counted(sum(rooms), 'rank')} ({listed}): "
            f"give one of the two."
        )
    if wanted > sum(rooms):
        raise InvalidValue(
            f"n_parallel={n_parallel}, but the hosts have {counted(sum(rooms), 'device')} ({listed}): "
            f"give fewer, or say how many each is to have, by 'h2:4'."
        )
    found: list[range] = []
    for room in rooms:
        start = found[-1].stop if found else 0
        found.append(range(start, min(start + room, wanted)))
    if empty := [host.name for host, ranks in zip(hosts, found, strict=True) if not ranks]:
        raise InvalidValue(
            f"n_parallel={n_parallel} leaves no rank for {', '.join(empty)}, as ranks fill the hosts in "
            f"their order ({listed}): name fewer hosts, or say how many ranks each has, by 'h2:4'."
        )
    return tuple(found)
