"""A process that removes what another one leaves in /dev/shm, however that ends."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from ..memory.segment import SHM_FOLDER


def watch(prefix: str) -> None:
    """From now on the files of names with this *prefix* that are made here go when this process ends.

    Those that another process has mapped stay.  It has to be called before there are threads.
    """
    there = _named(prefix)
    watched, held = os.pipe()  # the kernel closes the end that is held when this process ends
    if os.fork():
        os.close(watched)
        return
    try:
        os.close(held)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for standard in range(3):  # whoever reads what this process prints waits for the end of it
            os.dup2(null, standard)
        os.read(watched, 1)
        for path in _named(prefix) - there - _mapped():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
    finally:
        os._exit(0)


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
            found |= set(re.findall(rf"{SHM_FOLDER}/\S+", (process / "maps").read_text()))
    return found
