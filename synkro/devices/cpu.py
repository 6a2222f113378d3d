"""The CPU as a device: arrays stay where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Device


class CpuDevice(Device):
    """NumPy on the host's memory; inputs are read-only views, nothing is copied."""

    @property
    def xp(self) -> Any:
        return np

    def to_device(self, array: NDArray[Any]) -> NDArray[Any]:
        return array

    def to_host(self, array: Any) -> Any:
        return array


_THREAD_VARIABLES = (
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)  # each of these libraries looks at OMP_NUM_THREADS where its own is not set


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""Where glibc's malloc ends up by itself in a process that has freed big arrays (mallopt(3)).  A fresh
worker would give each temporary array back to the kernel, and fault it in again in the next call."""


def thread_caps(threads: int, environment: dict[str, str], forced: bool) -> dict[str, str]:
    """The variables that keep BLAS and OpenMP to *threads* threads a worker.

    What the user has set in *environment* wins, unless *forced*: an OMP_NUM_THREADS of theirs also
    speaks for the libraries that fall back on it.
    """
    wanted = ["OMP_NUM_THREADS", *_THREAD_VARIABLES, "NUMBA_NUM_THREADS"]
    if forced:
        return dict.fromkeys(wanted, str(threads))
    if "OMP_NUM_THREADS" in environment:
        wanted = ["NUMBA_NUM_THREADS"]
    return {name: str(threads) for name in wanted if name not in environment}
