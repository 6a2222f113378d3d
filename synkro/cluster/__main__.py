"""``python -m synkro.cluster``: one process of MPI's, which ``cluster.launch`` has started."""

from __future__ import annotations

import os
import socket
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path

from ..ipc.process import hold_on_to
from .janitor import sweep, watch
from .launch import KEY

_MADE = "mpich_shm_"  # by MPICH, in /dev/shm


def main(folder: str, stands: str) -> None:
    """Be the gateway, or the leader of a host."""
    watch(_MADE)
    from . import wire  # noqa: PLC0415  which begins MPI

    try:
        _serve(folder, stands)
    except BaseException:
        traceback.print_exc()
        wire.abort()


def _serve(folder: str, stands: str) -> None:
    text = os.environ.pop(KEY, "") or Path(folder, "key").read_text(encoding="ascii")
    from ..ipc.descriptors import Descriptors  # noqa: PLC0415
    from . import wire  # noqa: PLC0415
    from .gateway import Gateway  # noqa: PLC0415
    from .hello import hello  # noqa: PLC0415
    from .leader import Leader  # noqa: PLC0415

    ends = wire.Wire(bytes.fromhex(text.strip()))
    sweep(_MADE)
    own = hello(stands, wire.library())
    if ends.number != wire.GATEWAY:
        Leader(ends).serve(own)
        return
    with socket.socket(socket.AF_UNIX) as connected:
        connected.connect(str(Path(folder, "gateway")))
        _, (lifeline, printed, descriptors), *_ = socket.recv_fds(connected, 16, 3)
        hold_on_to(lifeline)
        main = Connection(connected.detach())
        received = Descriptors(socket.socket(fileno=descriptors))
        Gateway(ends, main, Connection(printed), received).serve(own)


if __name__ == "__main__":
    main(*sys.argv[1:])
