"""Which GPUs there are.  The main process never touches them: another process looks for them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from ..machine import machine_id, start

PATIENCE = 60.0
"""Seconds that CUDA may take to come up."""

_ENDING = 5.0  # seconds that a killed process may take to end
_INSUFFICIENT = "cudaErrorInsufficientDriver"
_INSTALL = (
    "pip install 'cupy-cuda12x[ctk]>=13' 'nvidia-nccl-cu12>=2.20', or for CUDA 13 "
    "'cupy-cuda13x[ctk]>=14' 'nvidia-nccl-cu13>=2.27'"
)


@dataclass(frozen=True)
class Gpu:
    """A visible GPU: its index among them, its name, PCI address, memory in bytes, and its machine."""

    index: int
    name: str
    address: str
    nbytes: int
    machine: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Where the GPU is: no other one is there."""
        return self.machine, self.address


@dataclass(frozen=True)
class Visible:
    """The GPUs that a process may use, versions of NCCL (0: none) and CuPy; or a *reason* for no GPU."""

    gpus: tuple[Gpu, ...]
    nccl: int
    reason: str
    installed: bool = True
    """Whether CuPy is installed."""
    cupy: str = ""


_SHOWING = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")


def showing() -> dict[str, str]:
    """The variables of this process's environment that tell CUDA which GPUs to show."""
    return {name: os.environ[name] for name in _SHOWING if name in os.environ}


def visible(shown: Mapping[str, str] | None = None) -> Visible:
    """The GPUs that CuPy finds in a process like this one.

    What is *shown* elsewhere, as ``showing`` tells, is shown here, unless this process says otherwise.
    """
    found = None
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec("cupy")
    if found is None:
        return Visible((), 0, f"CuPy is not installed ({_INSTALL})", installed=False)
    return _look(tuple(sys.path), tuple(sorted({**(shown or {}), **os.environ}.items())))


@functools.lru_cache(8)
def _look(path: tuple[str, ...], environment: tuple[tuple[str, str], ...]) -> Visible:
    code = "from synkro.devices.cuda import describe; describe()"
    process = start(code, environment=dict(environment), alone=True)
    try:
        said, errors = process.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return Visible((), 0, f"CUDA did not come up within {PATIENCE:g} s")
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
    machine = machine_id()
    gpus = tuple(Gpu(index, **each, machine=machine) for index, each in enumerate(told["gpus"]))
    return Visible(gpus, told["nccl"], "" if gpus else "CUDA finds no GPU", cupy=told["cupy"])


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
