"""A process that says that another one has ended, and removes what it leaves in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from pathlib import Path

from ..memory.segment import SHM_FOLDER

ENDED = "Synkro: process {pid} of MPI's on {name} has ended"
"""What is said on stderr: mpiexec reports the first of the processes, and not the first to end."""


def watch(prefix: str) -> None:
    """When this process ends, however it does, that is said on stderr, and the files in /dev/shm go that
    were made from now on with names of this *prefix*.

    Those that another process has mapped stay.  It has to be called before there are threads.
    """
    line = (ENDED.format(pid=os.getpid(), name=socket.gethostname()) + "\n").encode()
    there = _named(prefix)
    watched, held = os.pipe()  # the kernel closes the end that is held when this process ends
    if os.fork():
        os.close(watched)
        return
    try:
        os.close(held)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.read(watched, 1)
        with contextlib.suppress(OSError):  # nobody reads it any more
            os.write(2, line)
        os.dup2(null, 2)  # whoever reads what this process prints waits for the end of it
        for path in _named(prefix) - there - _mapped():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    finally:
        os._exit(0)


def sweep(prefix: str) -> None:
    """Remove the names of files that this process has mapped: all that need them have them now."""
    for path in _mapped_by("self"):
        if os.path.basename(path).startswith(prefix):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _named(prefix: str) -> set[str]:
    try:
        return {entry.path for entry in os.scandir(SHM_FOLDER) if entry.name.startswith(prefix)}
    except FileNotFoundError:
        return set()


def _mapped() -> set[str]:
    """The files in /dev/shm that a process of this user has mapped."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            found |= _mapped_by(process.name)
    return found


def _mapped_by(process: str) -> set[str]:
    return set(re.findall(rf"{SHM_FOLDER}/\S+", Path("/proc", process, "maps").read_text()))
