"""Cores, memory, names of processor and machine, new files, forks, and interpreters like this one."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableSet, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from .errors import InvalidType, InvalidValue, NotAvailable

_CGROUP = Path("/sys/fs/cgroup")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def _cgroup_folders(controller: str) -> Iterator[Path]:
    """This process's cgroup folders (v2, or v1's *controller*), innermost first.

    Inside a container the path in ``/proc/self/cgroup`` may not exist; the root holds the limits then.
    """
    for line in (_read(Path("/proc/self/cgroup")) or "").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            root = _CGROUP
        elif controller in names.split(","):
            root = _CGROUP / controller
        else:
            continue
        folder = root / path.lstrip("/")
        while folder != root:
            yield folder
            folder = folder.parent
        yield root


def _cpu_quota() -> float | None:
    """The tightest CPU quota over this process, in cores; None if there is none."""
    quotas = []
    for folder in _cgroup_folders("cpu"):
        v2 = (_read(folder / "cpu.max") or "max").split()
        if v2[0] != "max":
            quotas.append(int(v2[0]) / int(v2[1]))
        quota = int(_read(folder / "cpu.cfs_quota_us") or -1)
        if quota > 0:
            quotas.append(quota / int(_read(folder / "cpu.cfs_period_us") or 100_000))
    return min(quotas, default=None)


def available_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the cgroup's CPU quota."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return cores if quota is None else max(1, min(cores, int(quota)))


def available_memory() -> int:
    """Bytes that could be allocated now without swapping: MemAvailable, cut by cgroup limits."""
    lines = (_read(Path("/proc/meminfo")) or "").splitlines()
    bounds = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for folder in _cgroup_folders("memory"):
        for limit_file, usage_file, cache_key in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, usage = _read(folder / limit_file), _read(folder / usage_file)
            if limit is None or usage is None or limit.strip() == "max":
                continue
            stat = (_read(folder / "memory.stat") or "").split()
            cache = int(stat[stat.index(cache_key) + 1]) if cache_key in stat else 0
            bounds.append(int(limit) - int(usage) + cache)
    return max(0, min(bounds)) if bounds else 2**63


def cpu_name() -> str:
    """The processor's model name, or its architecture where the kernel does not tell."""
    for line in (_read(Path("/proc/cpuinfo")) or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return os.uname().machine


def machine_id() -> str:
    """What no other machine is called while this one runs: its name may be another one's, too."""
    return f"{os.uname().nodename} {_read(Path('/proc/sys/kernel/random/boot_id')) or ''}".strip()


def readable_bytes(count: float) -> str:
    """A number of bytes for people: ``readable_bytes(1536) == "1.5 KB"`` (units of 1024)."""
    for unit in ("bytes", "KB", "MB", "GB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TB"


@contextlib.contextmanager
def announcing(say: Callable[[str], None], text: str, seconds: float = 2.0) -> Iterator[None]:
    """Say *text* once, if the block has not ended after so many seconds."""
    timer = threading.Timer(seconds, say, [text])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class _Chosen(NamedTuple):
    """The Python that ``fork(python=…)`` has named, and where it finds modules."""

    path: str
    finds: list[str]


_chosen: _Chosen | None = None

_WAY = (
    f"give fork(python=…) the path of a Python {sys.version_info[0]}.{sys.version_info[1]} that has "
    f"Synkro, and what your functions import"
)
_SAYS = """
import importlib.util, json, sys
finds = [*filter(None, sys.path)]
sys.path += sys.argv[1:]
needed = "synkro", "numpy", "cloudpickle"
lacks = [name for name in needed if importlib.util.find_spec(name) is None]
print(json.dumps([sys.version_info[:2], finds, lacks]))
"""
_SAYING = 60.0  # seconds


def choose_python(path: Any) -> None:
    """Start all interpreters from *path* from now on; where it is None, from this program's own.

    Raises: InvalidType, InvalidValue if it is none; NotAvailable if this program has none.
    """
    global _chosen  # noqa: PLW0603  this process starts interpreters from one Python
    if path is None:
        _own()
        _chosen = None
    elif isinstance(path, str | os.PathLike):
        _chosen = _asked(os.path.abspath(path))
    else:
        raise InvalidType(f"python= is the path of a Python; got a {type(path).__name__}.")


def _asked(path: str) -> _Chosen:
    asked = f"python={path!r}"
    try:
        done = subprocess.run(
            [path, "-c", _SAYS, *_absolute(sys.path)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SAYING,
            check=True,
        )
        version, finds, lacks = json.loads(done.stdout)
        if not all(isinstance(each, str) for each in [*finds, *lacks]) or len(version) != 2:
            raise ValueError
    except OSError as error:
        raise InvalidValue(f"{asked} cannot be started ({error.strerror}): {_WAY}.") from None
    except (subprocess.SubprocessError, ValueError, TypeError):
        raise InvalidValue(f"{asked} does not answer as a Python does: {_WAY}.") from None
    if tuple(version) != sys.version_info[:2]:
        found = ".".join(map(str, version))
        raise InvalidValue(f"{asked} is of version {found}, and functions travel within one: {_WAY}.")
    if lacks:
        raise InvalidValue(f"{asked} has no {' and no '.join(lacks)}: {_WAY}.")
    return _Chosen(path, finds)


def python() -> str:
    """The path of the program from which interpreters are started.

    Raises: NotAvailable where that would be no Python, as in a frozen program, which would begin again.
    """
    return _own() if _chosen is None else _chosen.path


def _own() -> str:
    path = sys.executable
    if getattr(sys, "frozen", False):
        raise NotAvailable(
            f"this program is frozen, and would start itself, {path}, in the place of workers: {_WAY}."
        )
    if path and any(map(_PYTHON.search, map(os.path.basename, (path, os.path.realpath(path))))):
        if os.access(path, os.X_OK):
            return path
        why = "is not there, or cannot be started"
    else:
        why = "is not called as a Python is"
    raise NotAvailable(f"workers are started from sys.executable, and {path!r} {why}: {_WAY}.")


_PYTHON = re.compile("python|pypy|graalpy", re.IGNORECASE)


def search_path() -> list[str]:
    """``sys.path``, absolute; of a working directory that was deleted nothing can be imported.

    What another Python finds by itself comes first.
    """
    first = [] if _chosen is None else _chosen.finds
    return [*first, *_absolute([entry for entry in sys.path if entry not in first])]


def _absolute(paths: Sequence[str]) -> list[str]:
    try:
        folder = Path.cwd()
    except OSError:
        return [path for path in paths if Path(path).is_absolute()]
    return [str(folder / path) for path in paths]


_OPENED = 7  # descriptors that Popen opens: an input, two pipes, and one for errors of the start


def start(
    code: str,
    argument: str = "",
    *,
    fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
    alone: bool = False,
) -> subprocess.Popen[bytes]:
    """Run *code* in a fresh interpreter like this one, whose output goes to pipes.

    It has the same flags and ``sys.path``; the code finds *argument* under this name.  It inherits the
    descriptors *fds*, and *environment* in place of this one.  Ctrl-C at the terminal does not reach
    what runs *alone*.

    Raises: NotAvailable; OSError.
    """
    # where too few are left, Popen does not close those it has opened
    with contextlib.ExitStack() as room:
        for _ in range(_OPENED):
            room.enter_context(open(os.devnull, "rb"))
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -O, -W, -X …
    begin = "import sys; argument, *sys.path = sys.argv[1:]; del sys.argv[1:]; "
    return subprocess.Popen(
        [python(), *flags, "-c", begin + code, argument, *search_path()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=fds,
        env=environment,
        start_new_session=alone,
    )


def unlinked(path: str, flags: int) -> int:
    """An opener of files in folders that others write to: no link is followed, and nobody else reads it.

    With mode ``"x"`` the file is a new one: what somebody has put there is an error.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def disown_in_children(owned: MutableSet[Any]) -> None:
    """In a fork of this process *owned* gets empty, and each of its objects ``disown()``: it is the
    parent's."""

    def disown() -> None:
        for each in tuple(owned):
            each.disown()
        owned.clear()

    os.register_at_fork(after_in_child=disown)


def importing(frame: FrameType | None) -> bool:
    """Whether *frame* runs inside an import: an interrupt would leave the library unusable."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
