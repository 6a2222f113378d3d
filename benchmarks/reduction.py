"""What does it cost to reduce an output over two workers, and from which size on should all ranks do it?

Floor: every rank copies its output into shared memory (2 × size moved), then reads half of both and
writes half of the result (1.5 × size).  Synkro's result is a view of that; no further copy is needed.

Peer: a bare all-reduce from and to private memory, of two processes that only do this: each copies its
array into shared memory, barrier, adds its half of both into one shared result, barrier, copies the
result to private memory, barrier.  They poll at their barriers and time themselves, so that neither a
main process nor a wake-up is in it.  (Plain stores and loads as barriers: right on x86, not on ARM.)

The second part measures both ways of Synkro at each size, in two sessions: with outboxes that every
output fits into, so that the main process merges, and with none; where they cost the same they cross.
"""

from __future__ import annotations

import contextlib
import math

import numpy as np

import synkro
import synkro.controller.session
from synkro.machine import readable_bytes

from .bare import BareAllReduce
from .common import Report, Samples, Side, main, paired


def held(count):
    """A function that returns an array of *count* ones, made once on each worker."""
    box = []

    def output():
        if not box:
            box.append(np.ones(count, np.float32))
        return box[0]

    return output


def held_for_rows(count):
    output = held(count)
    return lambda x: output()


def against_bare(report: Report, bare: BareAllReduce, sizes: list[int], runs: int) -> None:
    curves: Samples = {}
    for nbytes in sizes:
        count, size = nbytes // 4, readable_bytes(nbytes)
        calls = min(200, max(3, (1 << 25) // nbytes))
        with synkro.Session(2, verbose=False) as session:
            total = session.function(held(count), outputs="sum")
            average = session.function(held(count), outputs="mean")
            uneven = session.function(held_for_rows(count), outputs="mean")
            rows = session.data(np.zeros(3))
            assert (total() == 2).all()
            assert np.allclose(uneven(rows), 1)
            samples = paired(
                [
                    Side("Synkro, sum", total, calls, warm=2),
                    Side("Synkro, mean", average, calls, warm=2),
                    Side("Synkro, mean of 2 + 1 rows", lambda f=uneven, x=rows: f(x), calls, warm=2),
                    *(
                        Side(
                            f"floor: bare, {op}",
                            lambda n=count, mean=op == "mean", k=calls: bare.seconds(n, mean, k),
                            warm=1,
                            own_clock=True,
                        )
                        for op in ("sum", "mean")
                    ),
                ],
                runs,
            )
        curves |= {f"{name}, {size}": found for name, found in samples.items()}
        target = 1.3 if nbytes == 1 << 26 else None
        for op in ("sum", "mean"):
            report.ratio(
                f"Synkro ÷ bare, {op}, {size}",
                samples[f"Synkro, {op}"],
                samples[f"floor: bare, {op}"],
                at_most=target,
            )
    report.table("outputs of two workers reduced, by their size", curves, x="bytes")


def session_with(outboxes: int) -> synkro.Session:
    """A session whose workers leave outputs in outboxes of *outboxes* bytes together."""
    usual = synkro.controller.session._OUTBOXES
    synkro.controller.session._OUTBOXES = outboxes
    try:
        return synkro.Session(2, verbose=False)
    finally:
        synkro.controller.session._OUTBOXES = usual


def crossing(report: Report, sizes: list[int], runs: int) -> None:
    with contextlib.ExitStack() as stack:
        by_main = stack.enter_context(session_with(4 * max(sizes)))
        by_ranks = stack.enter_context(session_with(128))
        medians = []
        curves: Samples = {}
        for nbytes in sizes:
            calls = min(200, max(5, (1 << 25) // nbytes))
            merged, reduced = (s.function(held(nbytes // 4), outputs="sum") for s in (by_main, by_ranks))
            assert (merged() == 2).all() and (reduced() == 2).all()  # noqa: PT018
            samples = paired(
                [
                    Side("merged by the main process", merged, calls, warm=5),
                    Side("reduced by all ranks", reduced, calls, warm=5),
                ],
                runs,
            )
            size = readable_bytes(nbytes)
            curves |= {f"{name}, {size}": found for name, found in samples.items()}
            medians.append([float(np.median(values)) for values in samples.values()])
    report.table("who reduces a sum, by its size", curves, x="bytes")
    ratios = [main_way / ranks_way for main_way, ranks_way in medians]
    dearer = [index for index, ratio in enumerate(ratios) if ratio <= 1]  # where main is the cheaper
    if not dearer or dearer[-1] + 1 == len(sizes):
        report.note("the two ways do not cross at these sizes")
        return
    low = dearer[-1]
    share = -math.log(ratios[low]) / (math.log(ratios[low + 1]) - math.log(ratios[low]))
    report.figure("they cost the same at", sizes[low] * (sizes[low + 1] / sizes[low]) ** share, "bytes")
    share = readable_bytes(synkro.controller.session._OUTBOXES // 2)
    report.note(f"outboxes hold {share} a rank of two")


def ask(
    report: Report, runs: int, sizes: list[int], crossing_runs: int, crossing_sizes: list[int]
) -> None:
    bare = BareAllReduce(max(sizes))  # before anything has threads
    try:
        against_bare(report, bare, sizes, runs)
    finally:
        bare.close()
    crossing(report, crossing_sizes, crossing_runs)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={
            "runs": 20,
            "sizes": [1 << n for n in (10, 14, 17, 20, 22, 24, 26, 28)],
            "crossing_runs": 20,
            "crossing_sizes": [1 << n for n in range(12, 26)],
        },
        quick={"runs": 5, "crossing_runs": 5},
        smoke={
            "runs": 2,
            "sizes": [1 << 10, 1 << 18],
            "crossing_runs": 2,
            "crossing_sizes": [1 << 12, 1 << 17, 1 << 22],
        },
    )
