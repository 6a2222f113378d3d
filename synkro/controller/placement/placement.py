"""Where the workers of a session run: their devices, their environments, and status lines.

What NCCL needs to connect ranks on GPUs, and where it cannot, is a part of that.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from ...devices.gpus import Gpu, Visible, visible
from ...errors import InvalidType, InvalidValue, counted, shown
from .choice import Assignment

_SEVERAL_RANKS = 23_000
"""NCCL's version from which on ranks may share a GPU."""

_CROWD = 2
"""Ranks that may share a GPU: kernels of more need not run at once, and may wait for each other."""

SOCKETS = "SYNKRO_NCCL_SOCKETS"
"""Set to 1, it lets ranks that share a GPU use an older NCCL, over loopback sockets.  For tests."""


def why_not_nccl(gpus: Sequence[Gpu], version: int, environment: Mapping[str, str]) -> str:
    """Why NCCL cannot connect ranks on these GPUs, one for each rank; an empty text if it can."""
    if not version:
        return "CuPy finds no NCCL (pip install nvidia-nccl-cu12, or nvidia-nccl-cu13 for CUDA 13)"
    crowd = max(Counter(gpu.place for gpu in gpus).values())
    if crowd > 1 and version < _SEVERAL_RANKS and not environment.get(SOCKETS):
        number = f"{version // 10_000}.{version % 10_000 // 100}"
        return f"NCCL {number} takes one rank a GPU, 2.30 takes two"
    if crowd > _CROWD:
        return f"NCCL may lock up with more than two ranks on one GPU, and one has {crowd}"
    return ""


def nccl_environment(gpus: Sequence[Gpu], version: int, rank: int) -> dict[str, str]:
    """The environment variables that NCCL needs on *rank* (its user guide, "Environment Variables").

    NCCL's ranks find each other through sockets, which stay on the loopback interface of one machine.
    """
    wanted = {
        "NCCL_COMM_BLOCKING": "1",
        "NCCL_RUNTIME_CONNECT": "0",  # connect at the start, in a thread that can be abandoned
    }
    if len({gpu.machine for gpu in gpus}) == 1:
        wanted["NCCL_SOCKET_IFNAME"] = "lo"
    if len({gpu.place for gpu in gpus}) == len(gpus):
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


_MB = 1 << 20

PATHS = "SYNKRO_GPU_PATHS"
"""Set to ``new``, it lets ranks open each other's device memory, which was not tried on a GPU yet."""


class Placement:
    """The devices of a session, one a rank.

    Attributes:
        assignments: the device of each rank.
        gpus: the GPU of each rank; empty on CPUs.
        indices: the index of each rank's GPU among the visible ones; empty on CPUs.
        preallocate: the fraction of a GPU's memory that its worker takes at once, or None.
        problem: why NCCL cannot connect the ranks, or an empty text.
    """

    def __init__(
        self,
        assignments: Sequence[Assignment],
        preallocate: float | None,
        asked: bool = True,
        look: Callable[[], Visible] | None = None,
    ) -> None:
        """*asked* says whether the user has chosen the devices; *look* looks for the GPUs of all hosts.

        Raises: InvalidType, InvalidValue if *preallocate* is no fraction, or the devices are CPUs.
        """
        self.assignments: Final = tuple(assignments)
        self.gpus: tuple[Gpu, ...] = tuple([each.gpu for each in assignments if each.gpu is not None])
        self.indices: Final = tuple(gpu.index for gpu in self.gpus)
        self.preallocate: Final = checked_fraction(preallocate, bool(self.gpus))
        self._look = look or visible
        crowd = max(Counter(gpu.place for gpu in self.gpus).values(), default=0)
        if self.preallocate is not None and self.preallocate * crowd > 1:
            raise InvalidValue(
                f"preallocate={self.preallocate:g} is what each worker takes of its GPU, and {crowd} "
                f"workers share one: give at most {1 / crowd:.2g}."
            )
        self.problem: str = ""
        self._asked = asked
        if len(self.gpus) > 1:
            self.problem = why_not_nccl(self.gpus, self._look().nccl, os.environ)

    @property
    def linked(self) -> bool:
        """Whether NCCL is to connect the ranks."""
        return len(self.gpus) > 1 and not self.problem

    @property
    def near(self) -> bool:
        """Whether the ranks are to open each other's device memory; they can on one machine only."""
        chosen = os.environ.get(PATHS) == "new"
        return chosen and len(self.gpus) > 1 and len({gpu.machine for gpu in self.gpus}) == 1

    def environments(self, common: Mapping[str, str]) -> list[dict[str, str]]:
        """The environment of each worker: *common*, and on GPUs variables that it does not set.

        With these NCCL serves the ranks, and JAX sees only the worker's own GPU and takes memory as it
        needs it.
        """
        if not self.gpus:
            return [dict(common) for _ in self.assignments]
        version = self._look().nccl
        return [
            {
                "JAX_CUDA_VISIBLE_DEVICES": str(gpu.index),
                "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
                **nccl_environment(self.gpus, version, rank),
                **common,
            }
            for rank, gpu in enumerate(self.gpus)
        ]

    def before(self, cores: int) -> Iterator[str]:
        """The status lines before the workers start; there are so many *cores*."""
        count = len(self.assignments)
        if not self.gpus:
            if not self._asked and self._look().installed:
                yield f"Synkro uses CPUs, as {self._look().reason}"
            workers, found = counted(count, "worker"), counted(cores, "detected CPU core")
            yield f"Synkro attempting to use {workers} on {found}..."
            return
        found = counted(len({gpu.place for gpu in self._look().gpus}), "detected GPU")
        yield f"Synkro attempting to use {len({gpu.place for gpu in self.gpus})} of {found}..."
        if self.preallocate is not None:
            for assignment in self.assignments:
                assert assignment.gpu is not None
                total = assignment.gpu.nbytes // _MB
                part = int(total * self.preallocate)
                yield f"Preallocating {part}/{total} MB ({self.preallocate:.3f}) on {assignment.device}"

    def after(self, master_rank: int, problem: str, apart: str) -> Iterator[str]:
        """The status lines when they have started.

        *problem* says why NCCL does not connect them, *apart* why they do not open each other's memory.
        """
        for rank, assignment in enumerate(self.assignments):
            if assignment.name is not None:
                yield f"Mapped name {assignment.name} to {assignment}"
            elif self.gpus:
                yield f"Rank {rank} is on {assignment}"
        if problem:
            what = "outputs are" if self.near and not apart else "outputs and variables are"
            yield f"Synkro: {what} reduced through host memory, as {problem}"
        if apart:
            yield f"Synkro: messages go from GPU to GPU through host memory, as {apart}"
        kind = "GPU" if self.gpus else "CPU"
        workers = counted(len(self.assignments), f"{kind} worker")
        yield f"Synkro: {workers} initialized, master rank: {master_rank}"


def checked_fraction(preallocate: Any, on_gpus: bool = True) -> float | None:
    """Raises: InvalidType, InvalidValue unless *preallocate* is None, or a fraction, for workers
    *on_gpus*."""
    if preallocate is None:
        return None
    wrong = f"preallocate must be a fraction of a GPU's memory, from 0 to 1; got {shown(preallocate)}."
    if isinstance(preallocate, bool) or not isinstance(preallocate, int | float):
        raise InvalidType(wrong)
    if not 0 <= preallocate <= 1:
        raise InvalidValue(wrong)
    if not on_gpus:
        raise InvalidValue("preallocate= is for GPUs, and the workers are on CPUs: leave it out.")
    return float(preallocate) or None
