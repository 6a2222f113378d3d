"""Where the time of calls goes: the trace of the current session, as a file, a table and a picture."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from .api import current_session


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Record what the main process and every rank do in the block, and write it to *path* after it.

    ``with synk.trace("calls.json"): …`` writes a file in the Trace Event Format, which
    https://ui.perfetto.dev and ``chrome://tracing`` open; without *path* the record is kept for
    ``summary()`` and ``plot_timeline()`` only.  One lane shows the main process (plan, send, wait,
    collect), and one each rank: wake, begin; inputs, compute and outputs, once a slice; collective,
    store, reduce; and the wait for slower ranks.  Of each lane the last 200,000 steps are kept.  The
    environment variable ``SYNKRO_TRACE``, a path, traces a whole session, from ``fork()`` to
    ``close()``.

    Raises: InvalidType, InvalidValue for a path that cannot be written, or while another trace goes on.
    """
    with current_session("trace").trace(path):
        yield


def summary() -> None:
    """Print where the time of the traced calls went, a line a function.

    ``compute`` is the function itself; ``transfer`` moves inputs and outputs; ``communication`` is
    collectives, with the waiting in them, and reductions; ``waiting`` is for slower ranks, and
    ``overhead`` all else.  They are shares of the calls' time, as means over the ranks; ``imbalance`` is
    how much more than the mean the slowest rank computed.

    Raises: UsageError if nothing was traced in this session.
    """
    current_session("summary").summary()


def plot_timeline(path: str | os.PathLike[str], calls: int = 10) -> None:
    """Draw the last traced *calls* as a picture (PNG, PDF, SVG … by *path*'s suffix), a lane a rank.

    Raises: UsageError if nothing was traced; InvalidValue for a *path* that cannot be written;
    NotAvailable without matplotlib.
    """
    current_session("plot_timeline").plot_timeline(path, calls)
