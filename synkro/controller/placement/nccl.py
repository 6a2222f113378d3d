"""What NCCL needs to connect ranks on GPUs, and where it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ...devices.gpus import Gpu

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
