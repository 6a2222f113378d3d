"""A process that says that another one has ended, and removes the files that MPI has made for it."""

from __future__ import annotations

import contextlib
import math
import os
import re
import select
import shutil
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..memory.keeper import SHM_FOLDER

ENDED = "Synkro: process {pid} of MPI's on {name} has ended"
"""What is said on stderr: mpiexec reports the first of the processes, and not the first to end."""

HAS_ENDED = re.compile(ENDED.format(pid=r"\d+", name=r"(\S+)").encode())
"""What is looked for in what was said on stderr: it has the name of the host."""

NO_MEMORY = "Synkro: process {pid} of MPI's on {name} ends: "
"""What is said on stderr where memory runs out; the error follows."""

UNHEARD = "Synkro: the main process's host is not heard"
"""What is said on stderr by the process of another host, which ends therefore."""

_LONGEST = 80  # bytes of a folder's path: that of a socket in one of its folders has at most 107

_MADE = ("mpich_shm_", "sm_segment.", "ucx_shm_", "vader_segment.")
"""How the names begin of what MPI makes in /dev/shm."""

_SHARED_AT_ONCE = "mpich_shm_"  # which all that need them have mapped when MPI has begun

_GRACE = 3.0  # seconds in which mpiexec's process on a host can end by itself, if it hears of anything

_MARGIN = 1.0  # seconds in which others can see first that a process stands still

_SECONDS = struct.Struct("=d")

_COARSE = 0.1  # seconds by which the times of processes and files may be wrong

_READ_AT_ONCE = "hydra_hwloc_xmlfile_"
"""How the name begins of what mpiexec's process on a host makes for those that begin MPI."""


def watch(folder: str = "", ours: bool = True) -> int:
    """When this process ends, however it does, the files in /dev/shm go that MPI has made since what has
    started it began, and the *folder* goes.  If it is *ours*, what has started it also goes, and all is
    said on stderr.

    If it is ours, this process ends, too, if it stands still for longer than it has said by ``tell``, or
    some seconds after what has started it: else a process that is stopped would stay.

    Files that another process has mapped stay.  It has to be called before there are threads.

    Returns a descriptor for ``tell``.
    """
    line = (ENDED.format(pid=os.getpid(), name=socket.gethostname()) + "\n").encode()
    parent = os.getppid()
    since = _begun(parent)
    read = _to_read(parent)
    starter = os.pidfd_open(parent) if parent else None  # none: it is outside of the container
    itself = os.pidfd_open(os.getpid())
    watched, held = os.pipe()  # the kernel closes the end that is held when this process ends
    if os.fork():
        for fd in (watched, itself, *([] if starter is None else [starter])):
            os.close(fd)
        os.set_blocking(held, False)
        return held
    try:
        os.close(held)
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        goes = _await_end(watched, itself, starter, ours) or ours
        if ours:
            with contextlib.suppress(OSError):  # nobody listens any more
                os.write(2, line)
        os.dup2(null, 2)  # whoever reads what this process prints waits for the end of it
        _remove(read)
        mapped = _mapped()
        made = [path for path in Path(SHM_FOLDER).glob("*") if path.name.startswith(_MADE)]
        for path in made:
            with contextlib.suppress(FileNotFoundError, PermissionError):
                found = path.stat()
                device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
                if found.st_ctime >= since and f"{device} {found.st_ino}" not in mapped:
                    path.unlink()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if goes and starter is not None and not select.select([starter], [], [], _GRACE)[0]:
            # not SLURM's, who sees the end of this one
            signal.pidfd_send_signal(starter, signal.SIGKILL)
    finally:
        os._exit(0)


def tell(held: int, seconds: float) -> None:
    """This process lives, and will say so again in so many seconds; if there are none, what has started
    it goes with it in any case.  *held* is what ``watch`` has returned.
    """
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(held, _SECONDS.pack(seconds))


def _await_end(watched: int, itself: int, starter: int | None, ours: bool) -> bool:
    """Wait until a process has ended, or end *itself* where it stands still, if it is *ours*.

    Returns whether it has said that what has started it goes in any case.
    """
    goes, until = False, math.inf
    heard = [watched] if starter is None or not ours else [watched, starter]
    orphan = False
    while True:
        patience = None if math.isinf(until) else max(0.0, until - time.monotonic())
        ready, _, _ = select.select(heard, [], [], patience)
        if watched in ready:
            said = os.read(watched, _SECONDS.size)
            if not said:
                return goes
            (seconds,) = _SECONDS.unpack(said)
            goes = goes or seconds <= 0
            if ours and not orphan:
                until = time.monotonic() + seconds + _MARGIN
        elif ready:
            heard, orphan = [watched], True
            until = time.monotonic() + _GRACE
        else:
            signal.pidfd_send_signal(itself, signal.SIGKILL)
            until = math.inf


def temporary() -> str:
    """The folder for temporary files; or /tmp where its path is too long for that of a socket, or has
    spaces, quotes or the like, which mpiexec does not hand on as they are."""
    folder = tempfile.gettempdir()
    plain = re.fullmatch(r"[\w/.,:@%+=-]*", folder, re.ASCII)
    return folder if plain and len(folder) <= _LONGEST else "/tmp"


def sweep() -> None:
    """Remove the names of files that MPI has made, where all that need them have them now."""
    _remove(_to_read(os.getppid()))
    mapped = _mapped_by("self").values()
    _remove([path for path in mapped if os.path.basename(path).startswith(_SHARED_AT_ONCE)])


def _to_read(process: int) -> list[str]:
    """The files that *process*, of mpiexec's, has open for others to read."""
    try:
        opened = [os.readlink(each.path) for each in os.scandir(f"/proc/{process}/fd")]
    except OSError:  # it has gone, or is another user's
        return []
    return [path for path in opened if os.path.basename(path).startswith(_READ_AT_ONCE)]


def _remove(paths: Sequence[str]) -> None:
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _begun(process: int) -> float:
    """When a *process* began, in seconds since the epoch; where it cannot be seen, when this one did."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:  # another user's, as SLURM's, or outside of the container
        text = Path("/proc/self/stat").read_text()
    *_, fields = text.rpartition(")")
    ticks = int(fields.split()[19])
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + ticks / os.sysconf("SC_CLK_TCK") - _COARSE


def _mapped() -> set[str]:
    """The files in /dev/shm that a process of this user has mapped, by device and inode as in
    /proc/PID/maps: in a container another file can have the name."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # of another user, or gone
            found |= _mapped_by(process.name).keys()
    return found


def _mapped_by(process: str) -> dict[str, str]:
    """The files in /dev/shm that a process has mapped, by device and inode."""
    return dict(
        re.findall(rf"(\w+:\w+ \d+) +({SHM_FOLDER}/\S+)", Path("/proc", process, "maps").read_text())
    )
