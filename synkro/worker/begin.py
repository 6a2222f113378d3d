"""The first that a worker runs: it takes hold of the main process, and imports all else only then."""

from __future__ import annotations

from ..ipc.process import hold_on_to, spelled


def main(argument: str) -> None:
    """Be the worker that ``ipc.process`` has started with this *argument*."""
    rank, size, hosts, lifeline, *fds = argument.split()
    hold_on_to(int(lifeline))
    from .loop import run  # noqa: PLC0415  it imports NumPy, which takes long on a busy machine

    run(int(rank), int(size), spelled(hosts), [*map(int, fds)])
