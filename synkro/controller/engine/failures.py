"""What failed in the workers, as the errors that the main process raises."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ... import errors
from ...messages import Failed, Phase
from ...packing.failures import shown, unpickled
from ...values.foreign import is_outcome

_DOING = {
    Phase.WAITING: "has not begun",
    Phase.LOADING: "is loading functions",
    Phase.RUNNING: "is running the function, {} done",
    Phase.MERGING: "is handing its outputs over, {} done",
    Phase.STORING: "is storing outputs",
    Phase.REDUCING: "is reducing outputs",
    Phase.TAKING: "waits for an item",
    Phase.TASK: "is running item {}",
    Phase.LEAVING: "ends, as another one is to take its place",
}


def first_failure(replies: Sequence[Any], ranks: Sequence[int]) -> tuple[int, Failed]:
    """The failure on the lowest item, or of the lowest of *ranks*, that was not due to another one."""
    answers = zip(ranks, replies, strict=True)
    failures = [(rank, reply) for rank, reply in answers if isinstance(reply, Failed)]
    return min(failures, key=lambda f: (f[1].strays, -1 if f[1].item is None else f[1].item, f[0]))


def worker_error(
    replies: Sequence[Any], ranks: Sequence[int], host_of: Callable[[int], str], where: str = ""
) -> BaseException:
    """The exception of the first failure; *where* it was is told after the name of the function.

    What pytest.skip(), pytest.fail() and the like raise is that itself: no ``except`` is to catch it.

    *host_of* tells the name of a rank's host, where there are several.
    """
    count = sum(isinstance(reply, Failed) for reply in replies)
    rank, first = first_failure(replies, ranks)
    original: BaseException | None = None if first.pickled is None else unpickled(first.pickled)
    if first.usage and isinstance(original, errors.SynkroError):
        return original
    trace = errors.RemoteTraceback(shown(first.traceback), first.began, first.summary)
    if original is not None and is_outcome(original):
        original.__cause__ = trace
        return original
    name = f" in the function {first.function!r}" if first.function else ""
    others = f" ({count} ranks failed; this is the first)" if count > 1 else ""
    hint = ""
    if isinstance(original, ValueError) and "read-only" in first.summary:
        hint = " (inputs are read-only inside functions: copy before you write)"
    elif "No matching definition" in first.summary and "readonly" in first.summary:
        hint = " (inputs are read-only inside functions: leave numba's signature out, or copy)"
    elif isinstance(original, OSError) and original.errno in (errno.EMFILE, errno.ENFILE):
        hint = (
            " (the worker has no descriptor left: close what functions open there, or raise the limit, "
            "ulimit -n, before fork())"
        )
    kinds = map(unpickled, first.kinds)  # the nearest that is known here
    kind = type(original) if original is not None else next(filter(None, kinds), None)
    host = host_of(rank)
    at = f" ({host})" if host else ""
    message = f"rank {rank}{at} failed{name}{where}: {first.summary}{hint}{others}"
    error = errors.raised_in_worker(kind, message, rank, first.function, original, host)
    error.__cause__ = trace
    return error


class Late(NamedTuple):
    """A rank that has not answered: its phase, and the slices done, or the item.

    *host* is empty where there is one host.
    """

    rank: int
    pid: int
    host: str
    phase: int
    done: int

    def __str__(self) -> str:
        at = f"{self.host}, " if self.host else ""
        done = self.done if self.phase == Phase.TASK else errors.counted(self.done, "slice")
        return f"rank {self.rank} ({at}pid {self.pid}) {_DOING[Phase(self.phase)].format(done)}"


def call_timeout(standing: Sequence[Late], limit: float) -> errors.CallTimeout:
    """What to raise when ranks have not answered within *limit* seconds."""
    ranks = tuple(each.rank for each in standing)
    hosts = tuple(each.host for each in standing if each.host)
    message = (
        f"no answer within the timeout of {limit:g} s from {errors.ranks_in_words(ranks)}: "
        f"{'; '.join(map(str, standing))}. "
        f"They were interrupted; the next call waits for them. If stuck, call close() and fork()."
    )
    if all(each.phase == Phase.TAKING for each in standing):
        message = (
            f"the map did not end within the timeout of {limit:g} s: the workers wait for items, so the "
            f"time went into the iterables, or into pickling items and results in this process."
        )
    return errors.CallTimeout(message, ranks, hosts)
