"""How fast are shuffled rows picked out of a large array?

100 000 rows of 100 float32 (40 MB) out of 1 GB, by a new shuffled array of indices in every call.

Floor: every picked row is read once and written once, 80 MB, at random places: 400-byte pieces, two
pages' translations each.  Synkro moves besides the indices, 0.8 MB, into shared memory, and its workers
take their halves at the same time; so two workers can at best be twice as fast as one process.

Peers: ``numpy.take(x, indices, axis=0)`` in one process, on ordinary memory, which may consist of huge
pages; the same followed by the function; and the same into a buffer that is used again and again
(``out=``, ``mode="clip"``), which spares fresh pages.
"""

from __future__ import annotations

import numpy as np

import synkro
from synkro.machine import readable_bytes

from .common import Report, Side, main, paired

COLUMNS = 100


def column_sum(rows):
    return rows[:, 0].sum()


def ask(report: Report, runs: int, nbytes: int, batch: int) -> None:
    count = nbytes // (4 * COLUMNS)
    rng = np.random.default_rng(0)

    def indices():
        return (rng.choice(count, batch, replace=False),)

    with synkro.Session(2, verbose=False) as session:
        x = session.data(shape=(count, COLUMNS), dtype="float32")
        x[...] = np.arange(count, dtype=np.float32)[:, None] % 1000
        plain = x[:].copy()
        buffer = np.empty((batch, COLUMNS), np.float32)
        picked = session.function(column_sum, outputs="sum")
        nothing = session.function(lambda rows: None, outputs=[])
        (chosen,) = indices()
        assert np.isclose(picked(x, batch=chosen), column_sum(plain[chosen]), rtol=1e-4)

        samples = paired(
            [
                Side("Synkro, rows[:, 0].sum()", lambda i: picked(x, batch=i), prepare=indices),
                Side("Synkro, outputs=[]", lambda i: nothing(x, batch=i), prepare=indices),
                Side("np.take", lambda i: np.take(plain, i, axis=0), prepare=indices),
                Side(
                    "np.take, rows[:, 0].sum()",
                    lambda i: column_sum(np.take(plain, i, axis=0)),
                    prepare=indices,
                ),
                Side(
                    "np.take into a buffer",
                    lambda i: np.take(plain, i, axis=0, out=buffer, mode="clip"),
                    prepare=indices,
                ),
            ],
            runs,
        )
        best = min(float(np.median(samples[name])) for name in ("np.take", "np.take into a buffer"))
        floor = {"floor: half of np.take": [best / 2]}
        report.table(f"{batch} shuffled rows out of {readable_bytes(nbytes)}", samples | floor)
        for peer, mine, target in (
            ("np.take", "Synkro, outputs=[]", 1.7),
            ("np.take, rows[:, 0].sum()", "Synkro, rows[:, 0].sum()", 1.7),
            ("np.take into a buffer", "Synkro, outputs=[]", None),
        ):
            report.ratio(f"{peer} ÷ {mine}", samples[peer], samples[mine], at_least=target)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 40, "nbytes": 1 << 30, "batch": 100_000},
        quick={"runs": 8},
        smoke={"runs": 2, "nbytes": 1 << 22, "batch": 1000},
    )
