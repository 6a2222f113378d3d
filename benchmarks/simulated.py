"""Hosts made of namespaces of this machine, for programs that ask what several hosts cost.

They are those of ``tests/support/hosts.py``, which needs root.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import synkro

from . import peers
from .common import ROOT

NAMES = ("h1", "h2", "h3")
_GROUPS = Path("/sys/fs/cgroup/cpu")  # of the first version of control groups
_LAUNCHER = "BENCHMARK_LAUNCHER"
"""The variable with the program that reaches the hosts, for a process on the first one."""


def on_first_host(module: str) -> None:
    """Go on, if this process is on the first host; else make the hosts, run *module* there, and exit."""
    if _LAUNCHER in os.environ:
        return
    sys.path.insert(0, str(ROOT / "tests"))
    from support.hosts import Hosts

    hosts = Hosts(Path(tempfile.mkdtemp()), NAMES)
    with _in_one_group():
        try:
            hosts.start()
            command = hosts.on(NAMES[0], sys.executable, "-m", module, *sys.argv[1:])
            environment = {**os.environ, _LAUNCHER: str(hosts.launcher)}
            status = subprocess.run(command, check=False, env=environment).returncode
        finally:
            hosts.stop()
    sys.exit(status)


@contextlib.contextmanager
def _in_one_group() -> Iterator[None]:
    """This process, and all that it starts, are one group for the scheduler, as in a job or a container.

    Outside of those Linux groups processes by the terminal session that each began in (autogroup), and
    a process that yields its core to one of another group goes on all the same.  Here the processes of
    all hosts, and those of the peers, share the cores.
    """
    group = _GROUPS / "synkro-hosts"
    autogroup = Path("/proc/sys/kernel/sched_autogroup_enabled")
    if not (autogroup.exists() and autogroup.read_text().strip() == "1"):
        yield
        return
    try:
        group.mkdir(exist_ok=True)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        print(f"  the hosts' processes are in groups of their own, which slows calls ({error})")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            (_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            group.rmdir()


def address(number: int) -> str:
    """That of a host."""
    return f"10.77.0.{number + 1}"


def elsewhere(*command: str) -> subprocess.Popen[bytes]:
    """Start *command* on the second host, in this folder."""
    line = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(command)}"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    return subprocess.Popen([os.environ[_LAUNCHER], NAMES[1], line], **quiet)


def session(ranks: Sequence[int], **options: Any) -> synkro.Session:
    """Workers on hosts, so many on each; on one host no MPI takes part."""
    if len(ranks) == 1:
        return synkro.Session(devices=["cpu"] * ranks[0], verbose=False, **options)
    names = [f"{name}:{count}" for name, count in zip(NAMES, ranks, strict=False)]
    launcher = os.environ[_LAUNCHER]
    return synkro.Session(hosts=names, launcher=launcher, devices="cpu", verbose=False, **options)


@contextlib.contextmanager
def flat(ranks: Sequence[int]) -> Iterator[peers.Peer]:
    """Ranks of MPI's on hosts, as many on each."""
    reach = ["-launcher", "ssh", "-launcher-exec", os.environ[_LAUNCHER]]
    where = ["-hosts", ",".join(NAMES[: len(ranks)]), "-ppn", str(ranks[0])]
    peer = peers.Peer("mpi", sum(ranks), [*reach, *where])
    try:
        yield peer
    finally:
        peer.close()
