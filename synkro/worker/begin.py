"""The first that a worker runs: it takes hold of the main process, and imports all else only then."""

from __future__ import annotations

import json

from ..ipc.process import hold_on_to


def main(argument: str) -> None:
    """Be the worker that ``ipc.process`` has started with this *argument*."""
    rank, hosts, (lifeline, *fds) = json.loads(argument)
    hold_on_to(lifeline)
    from .loop import run  # noqa: PLC0415  it imports NumPy, which takes long on a busy machine

    run(rank, [range(*ranks) for ranks in hosts], fds)
