"""What a host says of itself, and where two of them differ."""

from __future__ import annotations

import os
import platform
import socket
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple

from ..devices.gpus import Visible
from ..machine import available_cores
from .protocol import Hail

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
