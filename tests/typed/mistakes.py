"""Mistakes, one a line, that type checkers are to refuse; nobody runs them."""

import numpy as np
from numpy.typing import NDArray

import synkro as synk

x = np.ones(8)


def loss(x: NDArray[np.float64], scale: float = 1.0) -> float:
    return float(x.sum()) * scale


def counted(words: synk.Data[np.int64]) -> None: ...


rows = synk.data(x)
total = synk.function(loss, outputs="sum")
session = synk.Session(2)

synk.fork("two")
synk.fork(devcies="cpu")
synk.fork(timeout="60")
synk.function(loss, outpts="sum")
synk.function(loss, outputs="average")
synk.function(loss, bcast_inputs=3)
synk.function(loss, name=7)
synk.function(8)
total.nonsense
total.options(timeot=2)
total.options(timeout="2")
total.options(timeout=2).nonsense
total(x, num_slices=None)
total(x, progress="yes")
number: int = total(x)
total.as_serial(x, sclae=2.0)
total.submit(x).reslt()
synk.map(loss, [x], chunksiz=3)
synk.map(loss, [x], retries="2")
synk.map(loss, [x], errors="ignore")
synk.map(loss, [x], timeout="5")
synk.map(3, [x])
names: list[str] = synk.map(loss, [x])
synk.imap(loss, [x], ordered="no")
synk.nothing
synk.data(x, nam="x")
synk.data(x).mean()
synk.data(np.arange(10.0)).nonsense
synk.shared(x, name=3)
synk.shared(x).nonsense
synk.all_reduce(x, oop="sum")
synk.exchange(x)
counted(rows)
session.functoin(loss)
session.map(loss, 3)
synk.as_completed([3])
synk.rank(1)
synk.send(x, "one")
synk.save(3)
