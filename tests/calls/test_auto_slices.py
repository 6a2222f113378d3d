"""``num_slices="auto"``: as many pieces as fit the caches, by sizes alone."""

import numpy as np
import pytest

import synkro as synk
from support.examples import given, st
from support.sessions import lasting, running
from synkro import InvalidValue, WorkerError, extensions
from synkro.plan.split import PIECE_BYTES, PIECE_ROWS, fitting_slices, split

session = lasting(2)

ROWS = 2 * (3 * PIECE_ROWS + 5)
X = np.random.default_rng(0).standard_normal((ROWS, PIECE_BYTES // PIECE_ROWS // 8))


def pieces(x):
    """The number of rows of the piece."""
    return np.array([len(x)])


@pytest.mark.quick
@given(rows=st.integers(1, 10**8), ranks=st.integers(1, 8), row_bytes=st.integers(0, 10**5))
def test_pieces_are_neither_short_nor_longer_than_they_have_to_be(rows, ranks, row_bytes):
    spans = split(0, rows, ranks)
    count = fitting_slices(spans, row_bytes)
    assert count >= 1
    longest = spans[0][1]
    if count > 1:
        assert longest // count >= PIECE_ROWS
        assert longest * row_bytes // count >= PIECE_BYTES
    short = longest // (count + 1) < PIECE_ROWS
    assert short or longest * row_bytes // (count + 1) < PIECE_BYTES


def test_large_calls_are_cut_and_small_ones_are_not(session):
    f = session.function(pieces, outputs="gather")
    lengths = f(X, num_slices="auto")
    assert len(lengths) == 6
    assert lengths.sum() == ROWS
    assert min(lengths) >= PIECE_ROWS
    assert len(f(X[:2000], num_slices="auto")) == 2
    assert len(f(X, batch=slice(2000), num_slices="auto")) == 2
    assert len(f(X[:, :2].copy(), num_slices="auto")) == 2
    assert len(f(X)) == 2


def test_rows_that_the_workers_hold_count_as_well(session):
    kept = session.function(lambda x: x, outputs="keep")(X)
    assert len(session.function(pieces, outputs="gather")(kept, num_slices="auto")) == 6
    w = session.shared(X)
    f = session.function(lambda: pieces(w.value), outputs="gather", sliceable_shareds=w)
    assert len(f(num_slices="auto")) == 2 * (ROWS // PIECE_ROWS)


def test_equal_calls_give_equal_bits():
    found = []
    for _ in range(2):
        with running(2) as session:
            x = session.data(X.astype("f4"))
            f = session.function(lambda x: np.exp(x).sum(axis=0), outputs="sum")
            found += [f(x, num_slices="auto"), f(x, num_slices="auto"), f(x[:], num_slices="auto")]
    for other in found:
        assert other.tobytes() == found[0].tobytes()
    np.testing.assert_allclose(found[0], np.exp(X).sum(axis=0), rtol=1e-4)


@pytest.mark.parametrize(
    ("fn", "outputs"),
    [
        (lambda x: x.mean(axis=0), "mean"),
        (lambda x: (x**2).sum(axis=0), "sum"),
        (lambda x: x.max(axis=0), "max"),
        (lambda x: np.sign(x[:, 0]).astype("i1"), "gather"),
        (lambda x: {"n": len(x), "m": x.mean()}, {"n": "sum", "m": "mean"}),
        (lambda x: [len(x)], lambda a, b: [a[0] + b[0]]),
    ],
)
def test_results_are_those_of_one_piece(session, fn, outputs):
    f = session.function(fn, outputs=outputs)
    got, want = f(X, num_slices="auto"), f(X)
    if isinstance(want, dict):
        got, want = [[*result.values()] for result in (got, want)]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_check_takes_it(session):
    f = session.function(lambda x: (x**2).sum(axis=0), outputs="sum")
    np.testing.assert_array_equal(f.check(X, num_slices="auto"), f(X, num_slices="auto"))


def test_values_that_are_listed_are_those_of_the_ranks(session):
    f = session.function(lambda x: (len(x), x[0, 0]), outputs=(None, "max"))
    lengths, _ = f(X, num_slices="auto")
    assert lengths == [ROWS // 2, ROWS // 2]
    assert session.function(len, outputs=None)(X, num_slices="auto") == [ROWS // 2, ROWS // 2]


def test_updates_are_computed_from_all_rows_of_a_rank(session):
    w = session.shared(0.0)
    f = session.function(lambda x: (len(x), [np.sqrt(len(x))]), outputs="sum", updates=[w])
    assert f(X, num_slices="auto") == ROWS
    assert w.value == np.sqrt(ROWS / 2)


@pytest.mark.parametrize("rows", [100, ROWS])
def test_collectives_are_refused_also_where_there_is_one_piece(session, rows):
    f = session.function(lambda x: x.sum() - synk.all_reduce(x.sum(), "sum"), outputs="sum")
    with pytest.raises(
        WorkerError, match=r'all_reduce\(\) was called in a call with num_slices="auto"'
    ) as e:
        f(X[:rows], num_slices="auto")
    assert isinstance(e.value, InvalidValue)
    assert np.isclose(f(X[:rows]), -X[:rows].sum())


def test_steps_that_reduce_at_their_end_are_not():
    losses = []
    for num_slices in (1, "auto"):
        with running(2):
            w = synk.shared(np.zeros(X.shape[1]))
            rule = extensions.adam([w])

            def loss(x, w=w):
                error = x @ w.value - 1
                return (error**2).mean(), [2 * x.T @ error / len(x)]

            train = extensions.make_train_function(loss, [w], rule)
            losses.append([train(X, num_slices=num_slices) for _ in range(3)] + [*w.value])
    np.testing.assert_allclose(*losses, rtol=1e-10)
