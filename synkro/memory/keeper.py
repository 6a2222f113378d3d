"""A process that removes names of shared memory when the program that has made them has ended.

It runs beside that program, which it cannot miss the end of: its standard input is a socket to it, which
the kernel closes, however the program ends.  It is run as a file of its own, so it imports nothing of
Synkro's, and takes some megabytes::

    the program  ── a name, and its descriptor ──▶  remember it
                 ── a name ─────────────────────▶  forget it
                 ── the end ────────────────────▶  remove what it remembers, and end

The descriptors share the program's locks: a name is locked until it is removed.
"""

from __future__ import annotations

import contextlib
import os
import socket

SHM_FOLDER = "/dev/shm"
MAGIC = b"SYNKSHM\0"
TAIL_BYTES = 192
"""The last bytes of a segment, which begin with MAGIC, the version, and what it holds."""

COMPANIONS = (".free", ".full")
"""What the names of a ring's two semaphores end with."""

_RING = 1  # what it holds, where that is a ring


def companions(name: str) -> list[str]:
    """The files of a ring's semaphores, as sem_open(3) names them."""
    return [f"{SHM_FOLDER}/sem.{name.lstrip('/')}{end}" for end in COMPANIONS]


def tail_of(fd: int) -> bytes:
    """The last bytes of a segment; none of a shorter one."""
    nbytes = os.fstat(fd).st_size
    return os.pread(fd, TAIL_BYTES, nbytes - TAIL_BYTES) if nbytes >= TAIL_BYTES else b""


def remove(name: str, fd: int) -> bool:
    """Remove a name, if it is still that of the open file, whose lock the caller holds.

    Returns whether the file has that name no more; where this user may not remove it, it has.
    """
    path = SHM_FOLDER + name
    with contextlib.suppress(FileNotFoundError):  # then those of the semaphores may be left
        if not os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(fd)):
            return True
    if int.from_bytes(tail_of(fd)[12:16], "little") == _RING:
        for semaphore in companions(name):  # first: they are found by the name of the ring
            with contextlib.suppress(OSError):  # somebody else's in its place stays
                os.unlink(semaphore)
    try:
        os.unlink(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def main() -> None:
    """Be the process that removes names when the program has ended."""
    program = socket.socket(fileno=0)
    names: dict[str, int] = {}
    while True:
        try:
            message, fds, _, _ = socket.recv_fds(program, 4096, 1)
        except OSError:
            message = b""
        if not message:
            break
        name = os.fsdecode(message)
        if fds:
            names[name] = fds[0]
        elif name in names:
            os.close(names.pop(name))
    for name, fd in names.items():
        remove(name, fd)


if __name__ == "__main__":
    main()
