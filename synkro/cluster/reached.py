"""Which way the hosts of ``fork(hosts=…, launcher=…)`` are reached."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import InvalidType, InvalidValue
from ..plan.hosts import Host, copies, named
from .cluster import BEGINNING, Cluster
from .joined import Joined
from .launch import Launch
from .mpiexec import best_launcher


def reached(
    hosts: Any,
    launcher: Any,
    seconds: float = BEGINNING,
    check: Callable[[Sequence[Host]], None] | None = None,
) -> tuple[Cluster, tuple[Host, ...]]:
    """The processes of MPI's on the hosts, which have to begin within *seconds*, and who these are.

    Hosts that are to be started are handed to *check* before.

    Raises: InvalidType, InvalidValue; NotAvailable; SessionError if they cannot work together.
    """
    if isinstance(launcher, os.PathLike):
        launcher = os.path.abspath(launcher)
    if launcher is not None and not isinstance(launcher, str):
        raise InvalidType(
            f"launcher= is 'ssh', 'slurm', or the path of a program that is called as ssh is; got "
            f"{launcher!r}."
        )
    if isinstance(hosts, str) and hosts == "mpi":
        if launcher is not None:
            raise InvalidValue(
                f'hosts="mpi" are there already, and launcher={launcher!r} would start some: give one.'
            )
        joined = Joined(seconds)
        return joined, tuple(map(Host, joined.hosts))
    if (count := copies(os.environ)) > 1:
        raise InvalidValue(
            f"mpiexec, or srun, has started {count} copies of this program, and with hosts={hosts!r} "
            f"each would start workers on all hosts. Start one copy; or the hosts themselves, by "
            f'mpiexec -n HOSTS -ppn 1 python -m synkro.cluster prog.py, and say hosts="mpi".'
        )
    found = named(hosts, os.environ)
    if check is not None:
        check(found)
    names = [host.name for host in found]
    return Launch(names, best_launcher(hosts) if launcher is None else launcher, seconds), found
