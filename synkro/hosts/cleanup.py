"""What is left of MPI's processes when they have ended, and who says so and removes it: keepers."""

from __future__ import annotations

import os
import re
import socket
import tempfile
import time
from pathlib import Path

from ..memory.keeper import Keeper, mapped_by, remove_files

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

_COARSE = 0.1  # seconds by which the times of processes and files may be wrong

_READ_AT_ONCE = "hydra_hwloc_xmlfile_"
"""How the name begins of what mpiexec's process on a host makes for those that begin MPI."""


def watch(folder: str = "", ours: bool = True) -> Keeper:
    """When this process ends, however it does, the files in /dev/shm go that MPI has made since what has
    started it began, and the *folder* goes.  If it is *ours*, what has started it also goes, and all is
    said on stderr.

    If it is ours, this process ends, too, if it stands still for longer than it has said by ``beat`` of
    the keeper, or some seconds after what has started it: else a process that is stopped would stay.

    Files that another process has mapped stay.
    """
    parent = os.getppid()
    keeper = Keeper(inherits=True)
    keeper.tell("made", _MADE, _begun(parent))
    for path in _to_read(parent):
        keeper.tell("file", path)
    if folder:
        keeper.tell("folder", folder)
    if ours:
        keeper.tell("line", ENDED.format(pid=os.getpid(), name=socket.gethostname()) + "\n")
        keeper.tell("tied")
    for what, process in (("owner", os.getpid()), ("starter", parent)):
        if process:  # none: it is outside of the container
            fd = os.pidfd_open(process)
            keeper.tell(what, fds=(fd,))
            os.close(fd)
    return keeper


def temporary() -> str:
    """The folder for temporary files; or /tmp where its path is too long for that of a socket, or has
    spaces, quotes or the like, which mpiexec does not hand on as they are."""
    folder = tempfile.gettempdir()
    plain = re.fullmatch(r"[\w/.,:@%+=-]*", folder, re.ASCII)
    return folder if plain and len(folder) <= _LONGEST else "/tmp"


def sweep() -> None:
    """Remove the names of files that MPI has made, where all that need them have them now."""
    remove_files(_to_read(os.getppid()))
    mapped = mapped_by("self").values()
    remove_files([path for path in mapped if os.path.basename(path).startswith(_SHARED_AT_ONCE)])


def _to_read(process: int) -> list[str]:
    """The files that *process*, of mpiexec's, has open for others to read."""
    try:
        opened = [os.readlink(each.path) for each in os.scandir(f"/proc/{process}/fd")]
    except OSError:  # it has gone, or is another user's
        return []
    return [path for path in opened if os.path.basename(path).startswith(_READ_AT_ONCE)]


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
