"""What failed in the workers, as the errors that the main process raises."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import (
    CallTimeout,
    RemoteTraceback,
    SynkroError,
    counted,
    raised_in_worker,
    ranks_in_words,
)
from ...messages import Failed, Phase
from ...packing.exceptions import loaded
from ...packing.tracebacks import shown

_DOING = {
    Phase.WAITING: "has not begun",
    Phase.LOADING: "is loading functions",
    Phase.RUNNING: "is running the function, {} done",
    Phase.MERGING: "is handing its outputs over, {} done",
    Phase.STORING: "is storing outputs",
    Phase.REDUCING: "is reducing outputs",
    Phase.TAKING: "waits for an item",
    Phase.TASK: "is running item {}",
}


def first_failure(replies: Sequence[Any], ranks: Sequence[int]) -> tuple[int, Failed]:
    """The failure on the lowest item, or of the lowest of *ranks*, that was not due to another one."""
    answers = zip(ranks, replies, strict=True)
    failures = [(rank, reply) for rank, reply in answers if isinstance(reply, Failed)]
    return min(failures, key=lambda f: (f[1].strays, -1 if f[1].item is None else f[1].item, f[0]))


def worker_error(replies: Sequence[Any], ranks: Sequence[int], where: str = "") -> SynkroError:
    """The exception of the first failure; *where* it was is told after the name of the function."""
    count = sum(isinstance(reply, Failed) for reply in replies)
    rank, first = first_failure(replies, ranks)
    original: BaseException | None = None
    if first.pickled is not None:
        original = loaded(first.pickled)
    if first.usage and isinstance(original, SynkroError):
        return original
    name = f" in the function {first.function!r}" if first.function else ""
    others = f" ({count} ranks failed; this is the first)" if count > 1 else ""
    hint = ""
    if isinstance(original, ValueError) and "read-only" in first.summary:
        hint = " (inputs are read-only inside functions: copy before you write)"
    elif "No matching definition" in first.summary and "readonly" in first.summary:
        hint = " (inputs are read-only inside functions: leave numba's signature out, or copy)"
    kinds = map(loaded, first.kinds)  # the nearest that is known here
    kind = type(original) if original is not None else next(filter(None, kinds), None)
    message = f"rank {rank} failed{name}{where}: {first.summary}{hint}{others}"
    error = raised_in_worker(kind, message, rank, first.function, original)
    error.__cause__ = RemoteTraceback(shown(first.traceback))
    return error


def call_timeout(standing: Mapping[int, tuple[int, int, int]], limit: float) -> CallTimeout:
    """What to raise when ranks have not answered within *limit* seconds.

    *standing* has the pid, the phase and the slices done of each.
    """
    where = "; ".join(
        f"rank {rank} (pid {pid}) "
        f"{_DOING[Phase(phase)].format(done if phase == Phase.TASK else counted(done, 'slice'))}"
        for rank, (pid, phase, done) in standing.items()
    )
    if all(phase == Phase.TAKING for _, phase, _ in standing.values()):
        return CallTimeout(
            f"the map did not end within the timeout of {limit:g} s: the workers wait for items, so the "
            f"time went into the iterables, or into pickling items and results in this process.",
            ranks=tuple(standing),
        )
    return CallTimeout(
        f"no answer within the timeout of {limit:g} s from {ranks_in_words(tuple(standing))}: {where}. "
        f"They were interrupted; the next call waits for them. If stuck, call close() and fork().",
        ranks=tuple(standing),
    )
