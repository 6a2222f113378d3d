"""``shared(target=)``, kept outputs of functions with a target, and ``transfer``."""

import os

import numpy as np
import pytest

import synkro as synk
from support.sessions import LARGE, current
from support.together import good, together

pytestmark = pytest.mark.counted_once

X = np.arange(12.0).reshape(6, 2)


# ── variables ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("target", "ranks", "shown"),
    [
        ("dev1", (1,), "dev1"),
        (2, (2,), "dev2"),
        (["dev2", 0], (0, 2), ["dev0", "dev2"]),
        (None, (0, 1, 2), None),
    ],
)
def test_a_variable_lives_where_it_was_put(target, ranks, shown, named):
    w = synk.shared(X, "w", target=target)
    assert w.target == shown
    assert w.ranks == ranks
    assert w.shape == (6, 2)
    assert np.array_equal(w.get_value(), X)
    w.set_value(2 * X)
    assert np.array_equal(w.value, 2 * X)
    for rank in range(3):
        if rank in ranks:
            assert np.array_equal(synk.get_value(rank, w), 2 * X)
            synk.set_value(rank, w, X[:1])
            assert synk.get_value(rank, w).shape == (1, 2)
        else:
            with pytest.raises(synk.InvalidValue, match=f"alone, and not on rank {rank}"):
                synk.get_value(rank, w)
            with pytest.raises(synk.InvalidValue, match=f"alone, and not on rank {rank}"):
                synk.set_value(rank, w, X)
    assert synk.get_shapes(w) == [(1, 2)] * len(ranks)
    assert np.array_equal(synk.gather(w), [X[:1]] * len(ranks))


def test_a_session_without_names_calls_its_ranks_by_number(two):
    with current(two):
        assert synk.shared(X, target=1).target == 1


def test_functions_use_variables_where_they_are(named):
    w = synk.shared(np.zeros(2), "w", target="dev1")

    @synk.function(target="dev1", outputs=[])
    def add(x):
        w.value += x.sum(axis=0)

    add(X)
    add(X)
    assert np.array_equal(w.get_value(), 2 * X.sum(axis=0))
    rows = synk.shared(X, "rows", target="dev1")
    assert synk.function(lambda x: x.sum(), target="dev1")(rows) == X.sum()
    assert synk.function(lambda x: x.sum(), bcast_inputs=["x"], target="dev1")(rows) == X.sum()
    assert np.array_equal(synk.function(lambda x: x, "x", target=1)(rows, batch_s=[2, 0]), X[[2, 0]])
    pair = synk.shared(X, "pair", target=[0, 2])
    both = synk.function(lambda x: x, outputs="gather", target=[0, 2])
    assert np.array_equal(both(pair, batch_s=[[0], [3, 1]]), X[[0, 3, 1]])


def test_updates_and_sliced_variables_where_they_are(named):
    w = synk.shared(np.zeros(2), "w", target=["dev0", "dev2"])

    def step(x):
        return x.sum(), [w.value + 1]

    f = synk.function(step, outputs="sum", updates=[w], target=["dev0", "dev2"])
    assert f(X) == X.sum()
    assert [synk.get_value(rank, w).tolist() for rank in (0, 2)] == [[1, 1]] * 2
    rows = synk.shared(X, "rows", target="dev2")
    g = synk.function(lambda: rows.value.sum(), sliceable_shareds=[rows], target="dev2", outputs="sum")
    assert g(num_slices=3) == X.sum()
    for options in ({"updates": [w]}, {"sliceable_shareds": [w]}):
        with pytest.raises(
            synk.InvalidValue, match="is on ranks 0, 2 alone, and the function runs on rank 1"
        ):
            synk.function(step, target=1, **options)


def test_a_function_elsewhere_is_refused_with_the_cure(named):
    w = synk.shared(X, "w", target="dev1")
    message = r"is on rank 1 alone, and .*target='dev1', or give it a copy, by transfer\(0\)"
    for target in (None, "dev0", ["dev0", "dev1"]):
        with pytest.raises(synk.InvalidValue, match=message):
            synk.function(lambda x: x.sum(), outputs="sum", target=target)(w)
        closing = synk.function(lambda: w.value.sum(), outputs="sum", target=target)
        message_there = r"'w' is on rank 1 alone, .*target=1, or give it a copy, by transfer\(0\)"
        with pytest.raises(synk.WorkerError, match=message_there):
            closing()
    assert synk.function(lambda x: x.sum(), target="dev0")(w.transfer("dev0")) == X.sum()


def test_what_all_ranks_do_needs_variables_that_all_have(named):
    one, everywhere = synk.shared(X, "one", target=1), synk.shared(X, "everywhere")
    for collective in (synk.all_reduce, synk.reduce, synk.broadcast, synk.all_gather):
        with pytest.raises(synk.InvalidValue, match=r"variables that all ranks have, and .* 'one'"):
            collective(one)
    with pytest.raises(synk.InvalidValue, match="scatter takes variables that all ranks have"):
        synk.scatter(one, X)
    with pytest.raises(synk.InvalidValue, match=r"on the same ranks, and got .*'one' on rank 1"):
        synk.broadcast([one, everywhere], [X, X])
    synk.broadcast(one, 3 * X)
    assert np.array_equal(one.get_value(), 3 * X)


def test_saved_and_loaded(named, tmp_path):
    one = synk.shared(X, "one", target="dev1")
    pair = synk.shared(X, "pair", target=["dev0", "dev2"])
    synk.set_value(2, pair, 2 * X)
    synk.save(tmp_path / "saved")
    one.set_value(np.zeros((1, 2)))
    pair.set_value(np.zeros((1, 2)))
    synk.load(tmp_path / "saved")
    assert np.array_equal(one.get_value(), X)
    assert [synk.get_value(rank, pair)[-1, -1] for rank in (0, 2)] == [11, 22]
    del pair
    everywhere = synk.shared(X, "pair")
    with pytest.raises(
        synk.InvalidValue, match="2 replicas of the variable 'pair', which is on ranks 0, 1, 2"
    ):
        synk.load(tmp_path / "saved")
    assert np.array_equal(everywhere.get_value(), X)


# ── transfers ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rows", [1, 6, LARGE], ids=str)
@pytest.mark.parametrize("dtype", ["f8", "f4", "i2", "?", "c16"])
def test_transfers_copy_from_rank_to_rank(rows, dtype, named):
    value = np.arange(rows).astype(dtype)
    w = synk.shared(value, target="dev0")
    for target, shown in [("dev2", "dev2"), (1, "dev1"), (None, "dev0"), ("dev0", "dev0")]:
        moved = w.transfer(target)
        assert moved.target == shown
        got = moved.get_value()
        assert got.dtype == value.dtype
        assert np.array_equal(got, value)
    here = synk.transfer(w, "cpu")
    assert type(here) is np.ndarray
    assert np.array_equal(here, value)


def test_a_copy_has_a_life_of_its_own(named):
    w = synk.shared(X, target="dev0")
    copy, other = w.transfer("dev0"), w.transfer("dev1")
    w.set_value(0 * X)
    assert np.array_equal(copy.get_value(), X)
    other.set_value(other.get_value() + 1)
    assert np.array_equal(other.get_value(), X + 1)
    assert np.array_equal(w.get_value(), 0 * X)


def test_transfers_of_what_is_on_several_ranks(named):
    everywhere = synk.shared(X, "everywhere")
    synk.set_value(1, everywhere, 2 * X)
    assert np.array_equal(everywhere.transfer("dev1").get_value(), 2 * X)
    kept = synk.function(lambda x: x, outputs="keep")(X)
    assert np.array_equal(kept.transfer("dev1").get_value(), X)
    assert np.array_equal(kept.transfer("cpu"), X)


def test_transfers_of_arrays_and_data(named):
    assert np.array_equal(synk.transfer(X, "dev2").get_value(), X)
    assert np.array_equal(synk.transfer(synk.data(X), "dev2").get_value(), X)
    assert np.array_equal(synk.transfer(X, "cpu"), X)


@pytest.mark.parametrize(
    ("value", "target", "message"),
    [
        (X, "dev3", r"names no device of this session.*Did you mean 'dev[0-2]'"),
        (X, 3, "is no rank"),
        (X, ["dev0"], "a target is a context name, a device or a rank"),
        ("text", "dev0", "text"),
    ],
    ids=str,
)
def test_wrong_transfers(value, target, message, named):
    with pytest.raises(synk.UsageError, match=message):
        synk.transfer(value, target)


def test_transfers_between_sessions_are_refused(named):
    w = synk.shared(X, "w", target=0)
    with synk.Session(2, verbose=False) as other:
        with pytest.raises(synk.InvalidValue, match="'w' belongs to another session"):
            other.transfer(w, 1)
        with pytest.raises(synk.InvalidType, match="a call submitted in this session"):
            other.transfer(named.function(os.getpid, target=0).submit(), 1)


# ── kept outputs ─────────────────────────────────────────────────────────────────────────────────────


def test_outputs_stay_where_the_function_runs(named):
    f = synk.function(lambda x: (2 * x, x.sum()), outputs=("keep", "sum"), target="dev1")
    kept, total = f(X)
    assert total == X.sum()
    assert kept.target == "dev1"
    assert kept.shape == X.shape
    assert np.array_equal(kept.get_value(), 2 * X)
    assert synk.function(lambda x: x.sum(), target="dev1")(kept) == 2 * X.sum()
    pair = synk.function(lambda x: 3 * x, outputs="keep", target=["dev0", "dev2"])(X)
    assert pair.target == ["dev0", "dev2"]
    assert np.array_equal(pair.get_value(), 3 * X)
    again = synk.function(lambda x: x.sum(), outputs="sum", target=["dev0", "dev2"])
    assert again(pair) == 3 * X.sum()
    with pytest.raises(synk.InvalidValue, match="is on ranks 0, 2 alone"):
        synk.function(lambda x: x.sum(), outputs="sum")(pair)


def test_a_pipeline_of_futures(named):
    first = synk.function(lambda x: x + 1, outputs="keep", target="dev0")
    second = synk.function(lambda x: 2 * x, outputs="keep", target="dev1")
    third = synk.function(lambda x: x.sum(), target="dev2")
    synk.distribute()
    found = []
    for n in range(12):
        ahead = synk.transfer(first.submit(X + n), "dev1")
        found.append(third.submit(synk.transfer(second.submit(ahead), "dev2")))
    assert [future.result() for future in found] == [(2 * (X + n + 1)).sum() for n in range(12)]


def test_a_pipeline_ends_with_its_first_failure(named):
    def fail(x):
        raise ZeroDivisionError("no")

    moved = synk.transfer(synk.function(fail, outputs="keep", target="dev0").submit(X), "dev1")
    last = synk.function(lambda x: x, target="dev1").submit(moved)
    with pytest.raises(synk.InvalidValue, match="got the future of a call that failed"):
        last.result()
    assert synk.transfer(
        synk.function(lambda x: x, outputs="keep", target=0).submit(X), "cpu"
    ).result().shape == (6, 2)


def test_transfers_in_both_directions_at_the_same_time(named):
    """The ranks of a transfer are its own: two of them cannot wait for each other."""
    a, b = synk.shared(np.full(LARGE, 1.0), target=0), synk.shared(np.full(LARGE, 2.0), target=1)

    def move(variable, target):
        def body():
            for _ in range(20):
                assert variable.transfer(target).get_value()[0] == variable.get_value()[0]

        return body

    good(together(move(a, 1), move(b, 0), move(a, 2), move(b, 2), seconds=60))
