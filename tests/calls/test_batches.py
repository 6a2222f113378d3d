"""``batch=``: which rows of its inputs a call is about."""

import numpy as np
import pytest

from support.arrays import alike
from support.sessions import lasting
from synkro import InvalidValue

pytestmark = pytest.mark.quick  # on every Python version

X = np.arange(21.0).reshape(7, 3)
Y = np.array([1.0, -2.0, 3.0])

session = lasting(2)


@pytest.mark.parametrize(  # others: test_exact.py
    "batch",
    [np.int32(5), slice(-3, None), [6, 0, 0, -1], (2, 1), [True, False] * 3 + [True], range(2, 5)],
)
@pytest.mark.parametrize("slices", [1, 2])
def test_every_kind_of_batch(session, batch, slices):
    index = slice(batch) if np.ndim(batch) == 0 and not isinstance(batch, slice) else batch
    rows = X[np.asarray(index) if not isinstance(index, slice) else index]
    f = session.function(lambda x, z: [x, z, x.mean(axis=0)], outputs=["gather", "gather", "mean"])
    g = session.function(lambda x, y: x + y.sum(), bcast_inputs="y", outputs="gather")
    x, z = session.data(X), session.data(np.arange(7))
    alike(f(x, z, batch=batch, num_slices=slices), [rows, rows[:, 0] / 3, rows.mean(axis=0)])
    assert np.array_equal(g(x, Y, batch=batch, num_slices=slices), rows + Y.sum())


def test_other_indices_of_the_same_number_are_not_mixed_up(session):
    f = session.function(lambda x: x, outputs="gather")
    x = session.data(X)
    for index in ([0, 1, 2], [3, 4, 5], session.data([6, 5, 6]), [0, 1, 2]):
        assert np.array_equal(f(x, batch=index), X[np.asarray(index)])


@pytest.mark.parametrize(
    ("batch", "rows"),
    [
        (slice(3, 6), [3, 4, 5]),
        (slice(2, 7, 2), [2, 4, 6]),
        (slice(6, 2, -1), [6, 5, 4, 3]),
        ([5, 3, 3, 4], [5, 3, 3, 4]),
        (np.arange(7) > 3, [4, 5, 6]),
        (4, [0, 1, 2, 3]),
    ],
)
@pytest.mark.parametrize("whole", [True, False])
def test_minibatches_are_in_the_order_of_the_batch(session, batch, rows, whole):
    """With a whole input beside it, and alone; rows that it has beyond the batch are not used."""
    mini = session.data(np.concatenate([X[rows], X[:2]]), minibatch=True)
    if whole:
        f = session.function(lambda x, m: (x, m), outputs="gather")
        alike(f(session.data(X), mini, batch=batch), (X[rows], X[rows]))
    else:
        f = session.function(lambda m: m, outputs="gather")
        assert np.array_equal(f(mini, batch=batch), X[rows])


def test_a_minibatch_without_batch_is_an_input_like_any_other(session):
    mini = session.data(X, minibatch=True)
    assert np.array_equal(session.function(lambda m: m, outputs="gather")(mini), X)


def test_a_minibatch_too_short_for_its_batch(session):
    f = session.function(lambda x, m: m, outputs="gather", name="f")
    mini = session.data(X[:2], minibatch=True)
    for batch, count in ((slice(3, 6), 3), (slice(0, 7, 2), 4), ([1, 1, 4], 3), (X[:, 0] >= 0, 7)):
        with pytest.raises(InvalidValue, match=f"'m' of the function 'f' has 2 rows.*names {count}"):
            f(X, mini, batch=batch)
