"""Do calls on different devices run at the same time, and what does a pipeline over two of them gain?

1. Two products of square float32 matrices that lie on the workers, one pair on each, by ``submit``:
   beside the same two calls one after the other, and beside one worker that computes both.  Floor: the
   longer one, half of the time.  A call costs the main process some 50 us more, in threads.  Predicted:
   1.9.
2. A network cut into two halves, one on each worker, over 20 batches: the outputs of the first half stay
   on its worker, move to the other one, and go into the second half.  Floor of n batches: n + 1 times
   the longer half, so 40 / 21 = 1.9 times as fast as one half after the other.  A batch takes six
   commands, most of them to workers that sleep: 2 ms, and more where the cores are busy, of some 50 ms
   that a half takes.  Predicted: 1.8.
3. A graph of PyTensor with two products of square float32 matrices, as in Theano's guide to several
   GPUs: its variables on two workers, beside all on one, and beside PyTensor's own function here.
   Floor: half of the time.  Both bring two results here (32 MB, 10 ms), and look whether the variables
   have changed here (15 ms), of 350 ms.  Predicted: 1.85.

Peers: the same calls without ``submit``; two threads in one process, one BLAS thread each, for which
NumPy's products let go of the interpreter lock.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

import synkro

from .common import Report, Side, main, paired

DEVICES = "dev0->cpu;dev1->cpu"


def products(report: Report, runs: int, width: int) -> None:
    rng = np.random.default_rng(0)
    matrices = [rng.random((width, width), np.float32) for _ in range(4)]
    with synkro.Session(devices=DEVICES, threads_per_worker=1, verbose=False) as session:

        def product(target, pair):
            v, w = (session.shared(matrix, target=target) for matrix in pair)

            def trace_of_product():
                return np.trace(v.value @ w.value)

            return session.function(trace_of_product, target=target)

        left, right = product("dev0", matrices[:2]), product("dev1", matrices[2:])
        other = product("dev0", matrices[2:])
        session.distribute()

        def at_once():
            return [future.result() for future in (left.submit(), right.submit())]

        assert at_once() == [left(), right()] == [left(), other()]
        with threadpool_limits(1), ThreadPoolExecutor(2) as pool:
            sides = [
                Side("two devices, submitted", at_once),
                Side("two devices, one after the other", lambda: (left(), right())),
                Side("one device", lambda: (left(), other())),
                Side(
                    "two threads of one process",
                    lambda: list(pool.map(np.dot, matrices[::2], matrices[1::2])),
                ),
            ]
            samples = paired(sides, runs)
    report.table(f"two products of {width} x {width} float32", samples)
    submitted = samples["two devices, submitted"]
    for name, values in samples.items():
        if values is not submitted:
            least = None if name == "two threads of one process" else 1.8
            report.ratio(f"two products: {name} ÷ submitted", values, submitted, at_least=least)


def pipeline(report: Report, runs: int, width: int, rows: int, count: int) -> None:
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((rows, width), np.float32) for _ in range(count)]
    with synkro.Session(devices=DEVICES, threads_per_worker=1, verbose=False) as session:
        layers = [
            [
                session.shared(
                    rng.standard_normal((width, width), np.float32) / width**0.5, target=target
                )
                for _ in range(3)
            ]
            for target in ("dev0", "dev1")
        ]

        def half(layers):
            def forward(x):
                for layer in layers:
                    x = np.tanh(x @ layer.value)
                return x

            return forward

        front = session.function(half(layers[0]), outputs="keep", target="dev0")
        back = session.function(half(layers[1]), target="dev1")
        session.distribute()

        def flowing():
            futures = [back.submit(session.transfer(front.submit(x), "dev1")) for x in batches]
            return [future.result() for future in futures]

        def one_by_one():
            return [back(front(x).transfer("dev1")) for x in batches]

        for one, other in zip(flowing(), one_by_one(), strict=True):
            assert np.array_equal(one, other)
        samples = paired([Side("submitted", flowing), Side("one after the other", one_by_one)], runs)
    report.table(f"{count} batches of {rows} x {width} float32 through two halves", samples)
    report.ratio(
        "pipeline: one after the other ÷ submitted",
        samples["one after the other"],
        samples["submitted"],
        at_least=1.7,
    )


def graph(report: Report, runs: int, width: int) -> None:
    import pytensor
    import pytensor.tensor as pt

    rng = np.random.default_rng(0)
    matrices = [rng.random((width, width), np.float32) for _ in range(4)]

    def variables():
        return [pytensor.shared(matrix) for matrix in matrices]

    def products(v01, v02, v11, v12):
        return [pt.dot(v01, v02), pt.dot(v11, v12)]

    with synkro.Session(devices=DEVICES, threads_per_worker=1, verbose=False) as session:

        def placed(*targets):
            given = [session.place(v, target) for v, target in zip(variables(), targets, strict=True)]
            return session.function([], products(*given))

        two = placed("dev0", "dev0", "dev1", "dev1")
        one = placed("dev0", "dev0", "dev0", "dev0")
        serial = pytensor.function([], products(*variables()))
        session.distribute()
        for left, middle, right in zip(two(), one(), serial(), strict=True):
            assert np.array_equal(left, middle)
            assert np.allclose(left, right)
        with threadpool_limits(1):
            sides = [
                Side("two devices", two),
                Side("one device", one),
                Side("PyTensor, in one process", serial),
            ]
            samples = paired(sides, runs)
    report.table(f"a graph of two products of {width} x {width} float32", samples)
    report.ratio("graph: one device ÷ two", samples["one device"], samples["two devices"], at_least=1.8)
    report.ratio(
        "graph: PyTensor in one process ÷ two devices",
        samples["PyTensor, in one process"],
        samples["two devices"],
    )


def ask(report: Report, runs: int, product: int, width: int, rows: int, count: int) -> None:
    products(report, runs, product)
    pipeline(report, runs, width, rows, count)
    graph(report, runs, product)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 15, "product": 2048, "width": 1024, "rows": 512, "count": 20},
        quick={"runs": 5},
        smoke={"runs": 1, "product": 64, "width": 16, "rows": 8, "count": 3},
    )
