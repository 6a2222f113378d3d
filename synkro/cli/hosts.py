"""Checks that hosts can work together."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from itertools import combinations

from ..errors import SynkroError
from ..hosts.launch import reached
from ..hosts.pool import MpiHosts, gpu_versions
from ..hosts.protocol import Distance, Distances, Reach
from .doctor import Finding

_FAR = 1e-3  # seconds for a message from which on calls are slow
_NARROW = 1e8  # bytes a second up to which rows are slow
_APART = 0.1  # seconds between clocks from which on logs cannot be compared

CHECKS = 9
"""The number of findings if all hosts are there."""


def findings(hosts: str, launcher: str | None) -> Iterator[Finding]:
    """All checks, one after the other, for the *hosts* of ``fork(hosts=…)``, reached by *launcher*."""
    try:
        launch, _ = reached(hosts, launcher)
    except SynkroError as error:
        yield Finding("hosts", "failure", str(error))
        return
    with contextlib.closing(launch):
        first, *others = launch.hosts
        names = ", ".join(launch.hosts)
        yield Finding("hosts", "ok", f"{names} by {launch.way}, in {launch.seconds:.1f} s")
        same = ", ".join(f"{name} {version}" for name, version in launch.said[0].versions.items())
        yield Finding("versions", "ok", f"the same on all: {same}")
        pairs = zip(launch.hosts, launch.said, strict=True)
        yield Finding("cores", "ok", ", ".join(f"{host} has {said.cores}" for host, said in pairs))
        yield _gpus(launch)
        yield _ports(launch)
        with _file() as path:
            distances: list[Distance] = launch.ask(Distances(path))
        yield from _between(first, dict(zip(others, distances, strict=True)), path)


@contextlib.contextmanager
def _file() -> Iterator[str]:
    """A file in the working directory; or, if that is read-only, one that is there already."""
    try:
        with tempfile.NamedTemporaryFile(dir=".", prefix=".synkro-") as file:
            yield os.path.abspath(file.name)
    except OSError:
        yield next(iter(entry.path for entry in os.scandir(os.getcwd())), os.getcwd())


def _gpus(launch: MpiHosts) -> Finding:
    """The GPUs that each host has, and by what it uses them."""
    name = "GPUs"
    try:
        seen = launch.look()
    except SynkroError as error:
        return Finding(name, "failure", str(error))
    if not any(each.installed for each in seen):
        return Finding(name, "ok", "none: CuPy is not installed on any")
    said, without = [], []
    for host, each in zip(launch.hosts, seen, strict=True):
        if each.gpus:
            count = Counter(gpu.name for gpu in each.gpus)
            listed = ", ".join(f"{count[gpu]} {gpu}" for gpu in count)
            versions = ", ".join(f"{name} {version}" for name, version in gpu_versions(each).items())
            said.append(f"{host} has {listed} ({versions})")
        else:
            said.append(f"{host} has none: {each.reason}")
            without.append(host)
    mend = f"mend {', '.join(without)}, or leave it out."
    remedy = f"Where nobody asks for GPUs, all compute on CPUs: {mend}"
    return _judged(name, 0 < len(without) < len(seen), "; ".join(said), remedy)


def _ports(launch: MpiHosts) -> Finding:
    """Whether all hosts reach each other: the gateway has reached all of them, and they each other."""
    name = "ports"
    for one, other in combinations(range(1, len(launch.hosts)), 2):
        with contextlib.suppress(TimeoutError):
            launch.ask(Reach(one, other))
            continue
        says = f"{launch.hosts[one]} does not reach {launch.hosts[other]}"
        return Finding(name, "failure", says, "Open the ports between them, in the firewall of both.")
    return Finding(
        name, "ok", "every host reaches every other; MPI's are open to all: trusted networks only"
    )


def _between(first: str, distances: dict[str, Distance], path: str) -> Iterator[Finding]:
    """What lies between the *first* host and each of the others."""
    far = any(each.latency > _FAR for each in distances.values())
    took = [f"to {host} {1e6 * each.latency:.0f} us" for host, each in distances.items()]
    yield _judged("latency", far, f"from {first} {', '.join(took)}", "Put the hosts into one network.")
    narrow = any(each.bandwidth < _NARROW for each in distances.values())
    width = [f"to {host} {each.bandwidth / 1e9:.2g} GB/s" for host, each in distances.items()]
    remedy = "Rows will travel slowly: use a faster network, or load them on each host."
    yield _judged("bandwidth", narrow, f"from {first} {', '.join(width)}", remedy)
    apart = any(abs(each.ahead) > _APART for each in distances.values())
    ahead = [f"{h} is {1e3 * each.ahead:+.2g} ms ahead of {first}" for h, each in distances.items()]
    remedy = "Let chrony or ntpd set them: else the logs of hosts cannot be compared."
    yield _judged("clocks", apart, "; ".join(ahead), remedy)
    without = [host for host, each in distances.items() if not each.sees]
    says = f"{', '.join(without)} sees no {path}" if without else f"all see {os.path.dirname(path)}"
    remedy = "Files have to be copied there, or read here."
    yield _judged("shared file system", bool(without), says, remedy)


def _judged(check: str, wrong: bool, says: str, remedy: str) -> Finding:
    """A warning with a remedy, if something is *wrong*."""
    return Finding(check, "warning", says, remedy) if wrong else Finding(check, "ok", says)
