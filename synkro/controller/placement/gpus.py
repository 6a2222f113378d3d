"""Which GPUs there are.  The main process never touches them: another process looks for them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...machine import start

_PATIENCE = 60.0  # seconds that CUDA may take to come up
_ENDING = 5.0  # seconds that a killed process may take to end
_INSUFFICIENT = "cudaErrorInsufficientDriver"
_SEVERAL_RANKS = 23_000
"""NCCL's version from which on ranks may share a GPU."""

_INSTALL = (
    "pip install 'cupy-cuda12x[ctk]>=13' 'nvidia-nccl-cu12>=2.20', or for CUDA 13 "
    "'cupy-cuda13x[ctk]>=14' 'nvidia-nccl-cu13>=2.27'"
)

_CROWD = 2
"""Ranks that may share a GPU: kernels of more need not run at once, and may wait for each other."""

SOCKETS = "SYNKRO_NCCL_SOCKETS"
"""Set to 1, it lets ranks that share a GPU use an older NCCL, over loopback sockets.  For tests."""


@dataclass(frozen=True)
class Gpu:
    """A visible GPU: its index among them, its name, PCI address, and memory in bytes."""

    index: int
    name: str
    address: str
    nbytes: int


@dataclass(frozen=True)
class Visible:
    """The GPUs that this process may use, NCCL's version (0: none), or a *reason* for no GPU."""

    gpus: tuple[Gpu, ...]
    nccl: int
    reason: str
    installed: bool = True
    """Whether CuPy is installed."""


def visible() -> Visible:
    """The GPUs that CuPy finds in a process like this one."""
    try:
        found = importlib.util.find_spec("cupy") is not None
    except (ImportError, ValueError):
        found = False
    if not found:
        return Visible((), 0, f"CuPy is not installed ({_INSTALL})", installed=False)
    return _look(tuple(sys.path), tuple(sorted(os.environ.items())))


@functools.lru_cache(8)
def _look(path: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Visible:
    code = "from synkro.devices.cuda import describe; describe()"
    process = start(code, environment=dict(environment), alone=True)
    try:
        said, errors = process.communicate(timeout=_PATIENCE)
    except subprocess.TimeoutExpired:
        return Visible((), 0, f"CUDA did not come up within {_PATIENCE:g} s")
    finally:
        _end(process)
    if process.returncode:
        last = (errors.decode().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
        return Visible((), 0, f"CuPy cannot be used ({last})")
    told = json.loads(said.splitlines()[-1])
    if "reason" in told:
        if told["reason"].startswith(_INSUFFICIENT):
            return Visible((), 0, _why_no_driver(*told["versions"]))
        shown = dict(environment).get("CUDA_VISIBLE_DEVICES")
        hint = "" if shown is None else f", and CUDA_VISIBLE_DEVICES is {shown!r}"
        return Visible((), 0, f"CUDA finds no GPU ({told['reason']}{hint})")
    gpus = tuple(Gpu(index, **properties) for index, properties in enumerate(told["gpus"]))
    return Visible(gpus, told["nccl"], "" if gpus else "CUDA finds no GPU")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process; one that is stuck in a driver may never end."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDING)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def _why_no_driver(driver: int, runtime: int) -> str:
    """Why CUDA finds the driver insufficient; both are versions of CUDA, *driver* 0 if there is none."""
    if not driver:
        return (
            f"CuPy finds no CUDA driver ({_INSUFFICIENT}: install NVIDIA's, or start the container with "
            f"the GPUs, such that nvidia-smi shows them)"
        )
    has, needs = (f"{version // 1000}.{version % 1000 // 10}" for version in (driver, runtime))
    return (
        f"the CUDA driver is too old for CuPy ({_INSUFFICIENT}: it is of CUDA {has}, CuPy of {needs}; "
        f"update the driver, or install the CuPy for its version)"
    )


def why_not_nccl(gpus: Sequence[Gpu], version: int, environment: Mapping[str, str]) -> str:
    """Why NCCL cannot connect ranks on these GPUs, one for each rank; an empty text if it can."""
    if not version:
        return "CuPy finds no NCCL (pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13)"
    crowd = max(Counter(gpu.address for gpu in gpus).values())
    if crowd > 1 and version < _SEVERAL_RANKS and not environment.get(SOCKETS):
        number = f"{version // 10_000}.{version % 10_000 // 100}"
        return f"NCCL {number} takes one rank a GPU, 2.30 takes two"
    if crowd > _CROWD:
        return f"NCCL may lock up with more than two ranks on one GPU, and one has {crowd}"
    return ""


def nccl_environment(gpus: Sequence[Gpu], version: int, rank: int) -> dict[str, str]:
    """The environment variables that NCCL needs on *rank* (its user guide, "Environment Variables").

    NCCL's ranks find each other through sockets, which stay on the loopback interface.
    """
    wanted = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_COMM_BLOCKING": "1",
        "NCCL_RUNTIME_CONNECT": "0",  # connect at the start, in a thread that can be abandoned
    }
    if len({gpu.address for gpu in gpus}) == len(gpus):
        return wanted
    wanted["NCCL_NVLS_ENABLE"] = "0"
    if version >= _SEVERAL_RANKS:
        return {**wanted, "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    return {  # each rank is a host of its own
        **wanted,
        "NCCL_HOSTID": f"synkro-{rank}",
        "NCCL_NET": "Socket",
        "NCCL_IB_DISABLE": "1",
        "NCCL_MNNVL_ENABLE": "0",
    }
