"""Facts about this machine and installation, for bug reports and for a first look."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import shutil
import subprocess
import sys
from pathlib import Path

from ..devices import gpus
from ..devices.cpu import THREAD_VARIABLES
from ..hosts.pool import gpu_versions
from ..machine import available_cores, available_memory, cpu_name, readable_bytes, start
from ..memory.keeper import SHM_FOLDER

_NEEDED = ("numpy", "cloudpickle")
_EXTRAS = (
    *("posix_ipc", "cupy", "pytensor", "jax", "torch", "numba", "mpi4py", "h5py", "zarr", "ml_dtypes"),
    *("matplotlib", "tqdm"),
)
_PATIENCE = 60.0  # seconds that an import may take


def facts() -> dict[str, dict[str, str]]:
    """Facts by name, by title."""
    return {
        "Versions": _versions(),
        "Extras": _extras(),
        "Processor and memory": _machine(),
        "GPUs": _gpus(),
        "Settings": _settings(),
    }


def _versions() -> dict[str, str]:
    found = {"synkro": importlib.import_module("synkro").__version__}
    found["Python"] = f"{platform.python_version()} ({sys.executable})"
    found |= {name: importlib.metadata.version(name) for name in _NEEDED}
    found["Linux"] = platform.release()
    return found


def _extras() -> dict[str, str]:
    """The versions of optional packages, each imported in a process of its own, all at once."""
    code = "import importlib, sys; print(getattr(importlib.import_module(argument), '__version__', '?'))"
    children = {name: start(code, name) for name in _EXTRAS}
    return {name: _outcome(name, child) for name, child in children.items()}


def _outcome(name: str, child: subprocess.Popen[bytes]) -> str:
    try:
        out, err = child.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return f"does not come up within {_PATIENCE:g} s"
    if not child.returncode:
        return out.decode().splitlines()[-1]
    last = (err.decode().strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    absent = f"No module named '{name}'" in last
    return "not installed" if absent else f"installed, but does not work: {last}"


def _machine() -> dict[str, str]:
    cores, usable = len(os.sched_getaffinity(0)), available_cores()
    quota = "" if usable == cores else f"; {cores} without the quota of the control group"
    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    try:
        space = shutil.disk_usage(SHM_FOLDER)
        shared = f"{readable_bytes(space.free)} of {readable_bytes(space.total)} free in {SHM_FOLDER}"
    except OSError as error:
        shared = f"none ({error})"
    return {
        "processor": cpu_name(),
        "cores": f"{usable} usable of {os.cpu_count()}{quota}",
        "NUMA nodes": str(nodes),
        "memory": f"{readable_bytes(available_memory())} available",
        "shared memory": f"{shared}; what does not fit there goes into anonymous files",
        "open files": f"at most {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}",
    }


def _gpus() -> dict[str, str]:
    seen = gpus.visible()
    if not seen.gpus:
        return {"none": seen.reason}
    nccl = gpu_versions(seen)["NCCL"] if seen.nccl else "not found"
    return {
        f"cuda:{gpu.index}": f"{gpu.name}, {readable_bytes(gpu.nbytes)}, PCI {gpu.address}"
        for gpu in seen.gpus
    } | {"NCCL": nccl}


def _settings() -> dict[str, str]:
    names = ("SYNKRO_DEVICES", "SYNKRO_TRACE", "CUDA_VISIBLE_DEVICES", *THREAD_VARIABLES)
    found = {name: os.environ[name] for name in names if name in os.environ}
    return found or {"environment": "nothing that concerns Synkro is set"}
