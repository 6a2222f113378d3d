"""The CPU as a device: arrays stay where they are."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..values.arrays import Array
from ..values.foreign import is_on_gpu
from .base import Device, Source


class CpuDevice(Device):
    """NumPy on the host's memory; inputs are read-only views, nothing is copied."""

    xp = np

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def adopt(self, value: Any) -> Array | None:
        if is_on_gpu(value) and callable(getattr(value, "get", None)):
            array: Array = value.get()  # CuPy's: a function may compute on a GPU of its own choice
            return array
        return None

    def owns(self, array: Array) -> bool:
        return array.base is None

    def beside(self, array: Array, other: Array) -> Array:
        return array

    def stow(self, array: Array) -> Array:
        copy: Array = array.copy()
        return copy

    def assign(self, target: Array, source: Any) -> None:
        target[...] = source

    def take(self, array: Array, indices: NDArray[np.int64]) -> Array:
        # The main process has checked the indices; "clip" spares a second check and a buffer.
        return np.take(array, indices, axis=0, mode="clip")

    def feed(self, pieces: Sequence[Sequence[Any]]) -> Generator[list[Any], None, None]:
        for values in pieces:
            yield [self._fed(value) if isinstance(value, Source) else value for value in values]

    def _fed(self, source: Source) -> Array:
        return source.array if source.indices is None else self.take(source.array, source.indices)

    def copy_out(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        for target, source in pairs:
            target[...] = source


THREAD_VARIABLES = (
    "OMP_NUM_THREADS",  # the next four libraries fall back on it
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
"""Environment variables that limit how many threads libraries start."""


ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(64 << 20)}
"""The thresholds that glibc's malloc reaches by itself when a process frees big arrays (mallopt(3)).
Without them a fresh worker gives temporary arrays back to the kernel; the next call faults them in."""


def thread_caps(threads: int, environment: dict[str, str], forced: bool) -> dict[str, str]:
    """The variables that keep BLAS and OpenMP to *threads* threads a worker.

    Unless *forced*, those that the user has set in *environment* stay; OMP_NUM_THREADS then also holds
    for the libraries that fall back on it.
    """
    if forced:
        return dict.fromkeys(THREAD_VARIABLES, str(threads))
    wanted = ("NUMBA_NUM_THREADS",) if "OMP_NUM_THREADS" in environment else THREAD_VARIABLES
    return {name: str(threads) for name in wanted if name not in environment}
