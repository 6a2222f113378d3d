"""A process that cleans up when another one, its *owner*, has ended.

It runs beside its owner, whose end it cannot miss: its standard input is a socket to it, which the
kernel closes, however the owner ends.  It is run as a file of its own, so it imports nothing of
Synkro's, and takes some megabytes::

    the owner  ── a name of shared memory ──▶  remove it at the end
               ── forget that name ─────────▶
               ── a folder ─────────────────▶  remove it at the end
               ── a group of processes ─────▶  kill it at the end
               ── files that MPI makes ─────▶  remove them at the end
               ── a sign of life ───────────▶  kill the owner if no other follows in time
               ── the end ──────────────────▶  do all that, and end

With a name comes the descriptor of its file, which shares the owner's lock: a name is locked until it is
removed.
"""

from __future__ import annotations

import contextlib
import marshal
import math
import os
import select
import signal
import socket
import time

TYPE_CHECKING = False  # without typing, whose import takes long
if TYPE_CHECKING:
    from typing import Any

SHM_FOLDER = "/dev/shm"
MAGIC = b"SYNKSHM\0"
TAIL_BYTES = 192
"""The last bytes of a segment, which begin with MAGIC, the version, and what it holds."""

COMPANIONS = (".free", ".full")
"""What the names of a ring's two semaphores end with."""

_RING = 1  # what it holds, where that is a ring
_LONGEST = 1 << 16  # bytes of a message
_GRACE = 3.0  # seconds in which what has started the owner can end by itself, and the owner after it
_MARGIN = 1.0  # seconds in which others can see first that the owner stands still


class Keeper:
    """This process's keeper."""

    def __init__(self, inherits: bool = False) -> None:
        """Start the keeper.  Raises: OSError.

        If it *inherits* this process's stderr, it may write there.  It then has all descriptors that a
        child inherits, such as a socket of MPI's launcher: that sees the end of this process when the
        keeper has done its work.
        """
        import subprocess  # noqa: PLC0415  which the keeper itself does not need

        from ..machine import python  # noqa: PLC0415

        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with other:
                self._process = subprocess.Popen(
                    [python(), "-I", "-S", __file__],
                    stdin=other.fileno(),
                    stdout=subprocess.DEVNULL,
                    stderr=None if inherits else subprocess.DEVNULL,
                    close_fds=not inherits,
                    cwd="/",
                    start_new_session=True,
                )
        except BaseException:
            self._socket.close()
            raise

    def tell(self, what: str, *values: object, fds: tuple[int, ...] = ()) -> None:
        """Have the keeper do something at the end: ``_Task.hear`` says what there is.

        Raises: OSError if the keeper was killed.
        """
        message: Any = (what, *values)
        socket.send_fds(self._socket, [marshal.dumps(message)], list(fds))

    def forget(self, name: str) -> None:
        """Let a name be."""
        with contextlib.suppress(OSError):
            self.tell("forget", name)

    def beat(self, seconds: float) -> None:
        """This process lives, and will say so again in so many seconds: else it is killed.

        If there are none, what has started it goes with it in any case.
        """
        with contextlib.suppress(OSError):  # nobody listens any more
            self._socket.send(marshal.dumps(("beat", seconds)), socket.MSG_DONTWAIT)

    def exits(self) -> None:
        """This process ends by an exit: mpiexec may let the others be, so what has started this process,
        if that is to go with it, is ended and does not end by itself."""
        with contextlib.suppress(OSError):
            self.tell("exits")

    def close(self) -> None:
        """Let the keeper do what it was told to do at the end, and end."""
        self._socket.close()
        self._process.wait()

    def disown(self) -> None:
        """In a fork of this process: the keeper is the parent's."""
        self._socket.close()
        self._process.poll()  # which says that it is no child


# ── what is removed ──────────────────────────────────────────────────────────────────────────────────


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
        remove_files(companions(name))  # first: they are found by the name of the ring
    try:
        os.unlink(path)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return True


def remove_files(paths: list[str]) -> None:
    """Remove the files that there are, and that this user may remove."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def remove_made(beginnings: tuple[str, ...], since: float) -> None:
    """Remove the files in /dev/shm whose names begin so, if they were made *since* a time, in seconds
    since the epoch, and no process of this user has mapped them."""
    mapped: set[str] = set()
    for process in os.listdir("/proc"):
        if process.isdecimal():
            mapped |= mapped_by(process).keys()
    for name in os.listdir(SHM_FOLDER):
        if name.startswith(beginnings):
            with contextlib.suppress(FileNotFoundError, PermissionError):
                found = os.stat(f"{SHM_FOLDER}/{name}")
                device = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x}"
                if found.st_ctime >= since and f"{device} {found.st_ino}" not in mapped:
                    os.unlink(f"{SHM_FOLDER}/{name}")


def mapped_by(process: str) -> dict[str, str]:
    """The files in /dev/shm that a process has mapped, by device and inode as in /proc/PID/maps: in a
    container another file can have the name.  None of a process of another user."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
        for line in maps:
            if f" {SHM_FOLDER}/" in line:
                _, _, _, device, inode, path, *_ = line.split()
                found[f"{device} {inode}"] = path
    return found


# ── the keeper's own process ─────────────────────────────────────────────────────────────────────────


class _Task:
    """What is to be done when the owner has ended."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._paths: dict[str, list[str]] = {"folder": [], "file": []}
        self._group = 0
        self._line = b""
        self._made: tuple[tuple[str, ...], float] | None = None
        self._owner = self._starter = -1  # descriptors of the owner, and of what has started it
        self._tied = False  # whether the owner goes with that
        self._goes = False  # whether that goes with the owner
        self._exits = False  # whether the owner, where it ends, does so by an exit
        self._orphan = False
        self._until = math.inf  # when the owner has to have said again that it lives

    def wait(self, owner: socket.socket) -> bool:
        """Wait for something; returns whether the owner has not ended."""
        heard = [owner.fileno()]
        if self._tied and not self._orphan and self._starter >= 0:
            heard.append(self._starter)
        patience = None if math.isinf(self._until) else max(0.0, self._until - time.monotonic())
        ready, _, _ = select.select(heard, [], [], patience)
        if owner.fileno() in ready:
            try:
                message, fds, _, _ = socket.recv_fds(owner, _LONGEST, 1)
            except OSError:
                return False
            if message:
                self.hear(marshal.loads(message), fds)
            return bool(message)
        if ready:
            self._orphan, self._until = True, time.monotonic() + _GRACE
        else:
            _kill(self._owner)
            self._until = math.inf
        return True

    def hear(self, said: Any, fds: list[int]) -> None:
        """What the owner says, which may come with a descriptor.

        That of a ``name`` is its file; that of ``owner`` and ``starter`` a process.  A ``line`` is
        written to stderr, ``made`` is what ``remove_made`` takes, and a ``group`` is killed; 0 is none.
        """
        match said:
            case "name", str(name):
                (self._names[name],) = fds
            case "forget", str(name) if name in self._names:
                os.close(self._names.pop(name))
            case "folder" | "file" as what, str(path):
                self._paths[what].append(path)
            case "group", int(number):
                self._group = number
            case "line", str(text):
                self._line = text.encode()
            case "made", tuple(beginnings), float(since):
                self._made = beginnings, since
            case "owner", *_:
                (self._owner,) = fds
            case "starter", *_:
                (self._starter,) = fds
            case "tied", *_:
                self._tied = self._goes = True
            case "exits", *_:
                self._exits = True
            case "beat", float() | int() as seconds:
                self._goes = self._goes or seconds <= 0
                self._exits = self._exits or seconds <= 0
                if self._tied and not self._orphan:
                    self._until = time.monotonic() + seconds + _MARGIN

    def end(self) -> None:
        """The owner has ended: clean up."""
        if self._group:
            with contextlib.suppress(OSError):
                os.killpg(self._group, signal.SIGKILL)
        with contextlib.suppress(OSError):  # nobody listens any more
            os.write(2, self._line)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 2)  # whoever reads what the owner prints waits for the end of it
        for name, fd in self._names.items():
            remove(name, fd)
        remove_files(self._paths["file"])
        if self._made is not None:
            remove_made(*self._made)
        if self._paths["folder"]:
            import shutil  # noqa: PLC0415  which takes long

            for folder in self._paths["folder"]:
                shutil.rmtree(folder, ignore_errors=True)
        if self._starter >= 0 and self._goes:
            if not self._exits:
                _close_all_but(self._starter)  # by which that sees the end of the owner
            if not select.select([self._starter], [], [], _GRACE)[0]:
                _kill(self._starter)  # if not SLURM's, who sees it in another way


def _close_all_but(fd: int) -> None:
    """Close what this process has inherited, and all else but *fd* and the standard streams."""
    for each in map(int, os.listdir("/proc/self/fd")):
        if each > 2 and each != fd:
            with contextlib.suppress(OSError):  # that of the list
                os.close(each)


def _kill(process: int) -> None:
    with contextlib.suppress(OSError):  # it has ended, or is another user's
        signal.pidfd_send_signal(process, signal.SIGKILL)


def main() -> None:
    """Be the process that cleans up."""
    owner, task = socket.socket(fileno=0), _Task()
    while task.wait(owner):
        pass
    task.end()


if __name__ == "__main__":
    main()
