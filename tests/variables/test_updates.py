"""``updates=``: new values of variables, merged over slices and applied once."""

import numpy as np
import pytest

import synkro as synk
from support.arrays import OPS, check, replicas
from synkro import InvalidType, InvalidValue, OutputError, UsageError, WorkerError

pytestmark = pytest.mark.counted_once


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("slices", [1, 2, 3])
def test_updates_are_merged_over_slices_and_applied_once(n, op, slices):
    x = np.random.default_rng(1).standard_normal((7 * n + 1, 2))
    w = synk.shared(np.array([1.0, 2.0]), "w")
    seen = synk.shared(0.0)

    def step(x):
        seen.value = max(float(seen.value), float(np.abs(w.value - [1, 2]).max()))
        new = {"mean": x.mean, "sum": x.sum, "prod": x.prod, "max": x.max, "min": x.min}[op](axis=0)
        return x.sum(), [new + 0 * w.value]

    f = synk.function(step, outputs="sum", updates=[(w, op)])
    assert f.update_modes == (op,)
    assert np.isclose(f(x, num_slices=slices), x.sum())
    assert not synk.gather(seen).any()  # every slice saw the old value
    for replica, rows in zip(replicas(w, n), np.array_split(x, n), strict=True):
        want = getattr(rows, op)(axis=0)
        assert np.allclose(replica, want, rtol=1e-12)


def test_an_update_without_slices_is_simply_the_new_value(n):
    total, last, name = synk.shared(0), synk.shared(np.zeros(1, "f4")), synk.shared([True])

    def step(x):
        return x.sum(), (total.value + len(x), x, [False])

    f = synk.function(step, outputs="sum", updates=[total, (last, "avg"), (name, "max")])
    x = np.arange(3.0 * n)
    assert f(x) == x.sum()
    assert f(x) == x.sum()
    assert synk.gather(total).tolist() == [6] * n
    check(synk.gather(last, nd_up=0), x.astype("f4"))
    assert not synk.gather(name).any()


def test_one_update_needs_no_list(two):
    w = synk.shared(1.0)
    f = synk.function(lambda x: (x.sum(), w.value * 2), outputs="sum", updates=[w])
    assert f(np.ones(4)) == 4
    assert f(np.ones(4)) == 4
    assert synk.gather(w).tolist() == [4, 4]


def test_updates_of_a_function_without_outputs(two):
    w = synk.shared(0.0)
    f = synk.function(lambda x: (None, [w.value + x.sum()]), outputs=[], updates=[(w, "sum")])
    assert f(np.arange(4.0)) is None
    assert synk.gather(w).tolist() == [1, 5]


def test_updates_with_an_output_subset(n):
    w = synk.shared(0.0)
    f = synk.function(
        lambda x: ((x.sum(), x.max(), x.min()), [w.value + 1]),
        outputs=("sum", "max", "min"),
        updates=[(w, "max")],
    )
    x = np.arange(4.0 * n)
    assert list(f(x, output_subset=[1])) == [4 * n - 1]
    assert list(f(x, output_subset=[2, 0], num_slices=2)) == [0, x.sum()]
    assert synk.gather(w).tolist() == [2] * n


def test_updates_serially(n):
    w = synk.shared(np.zeros(2))
    f = synk.function(lambda x: (x.sum(), [w + x.mean(axis=0)]), outputs="sum", updates=[w])
    x = np.arange(8.0 * n).reshape(-1, 2)
    assert f.as_serial(x) == x.sum()
    assert f.as_serial(x) == x.sum()
    for replica in replicas(w, n):
        check(replica, 2 * x.mean(axis=0))


def test_updates_of_ranks_without_rows_stay_as_they_are(n):
    w = synk.shared(0.0)
    f = synk.function(lambda x: (x.sum(), [x[0]]), outputs="sum", updates=[w])
    assert f(np.array([5.0])) == 5
    assert synk.gather(w).tolist() == [5] + [0] * (n - 1)


def test_a_failed_call_applies_no_update(two):
    w = synk.shared(1.0)

    def step(x):
        if x[0] == 2:  # rank 0, slice 2
            raise ValueError("enough")
        return x.sum(), [w.value + 1]

    f = synk.function(step, outputs="sum", updates=[w])
    with pytest.raises(WorkerError, match="enough"):
        f(np.arange(8.0), num_slices=4)
    assert synk.get_value(0, w) == 1


def test_an_update_that_is_refused_leaves_all_as_they_were(two):
    fine, other = synk.shared(1.0), synk.shared([1, 2], "other")
    f = synk.function(lambda: (0.0, [fine + 1, np.ones(2)]), updates=[fine, other])
    with pytest.raises((WorkerError, UsageError), match="'other' holds int64, got float64"):
        f()
    assert synk.gather(other).tolist() == [[1, 2], [1, 2]]
    assert synk.gather(fine).tolist() == [1, 1]


@pytest.mark.parametrize("op", ["mean", "max"])
@pytest.mark.parametrize("slices", [1, 3])
def test_updates_are_rounded_to_what_the_variable_holds(two, op, slices):
    w = synk.shared(np.zeros(2, "f2"))
    f = synk.function(lambda x: (x.sum(), [x.max(axis=0)]), outputs="sum", updates=[(w, op)])
    f(np.full((12, 2), 1 / 3), num_slices=slices)
    check(w.value, np.full(2, 1 / 3, "f2"))


@pytest.mark.parametrize("slices", [1, 2])
def test_updates_of_integers(two, slices):
    """A mean over slices that is an integer is put in place, as that of a collective is."""
    count, flag = synk.shared(np.array([3, 4], "i4")), synk.shared(False)
    f = synk.function(lambda x: (x.sum(), [count + 1, True]), outputs="sum", updates=[count, flag])
    assert f(np.ones(8), num_slices=slices) == 8
    check(synk.gather(count), np.array([[4, 5], [4, 5]], "i4"))
    assert synk.gather(flag).tolist() == [True, True]


def test_writing_serially_writes_all_replicas(n):
    w = synk.shared(np.zeros(2))

    def run(x):
        w[...] += x.sum()
        w.value = w.value * 2
        return x.max()

    assert synk.function(run, outputs="max").as_serial(np.arange(3.0)) == 2
    for replica in replicas(w, n):
        check(replica, [6.0, 6.0])


def test_updates_that_cannot_be(two):
    w = synk.shared(np.zeros(2), "w")
    with pytest.raises(InvalidValue, match="updates= names a variable twice"):
        synk.function(lambda: 0, updates=[w, (w, "sum")])
    with pytest.raises(InvalidValue, match="op='gather' is no reduce operation"):
        synk.function(lambda: 0, updates=[(w, "gather")])
    with pytest.raises(InvalidType, match="updates= takes a list"):
        synk.function(lambda: 0, updates="w")
    for value, message in [
        (lambda: 3.0, "'step' has updates=, so it returns two things"),
        (lambda: (1.0, [1.0, 2.0]), "'step' returned 2 new values for the 1 variable in updates="),
    ]:
        with pytest.raises(OutputError, match=message):
            synk.function(value, updates=[w], name="step")()
    for value in (np.zeros((2, 2)), np.array([1j, 2])):
        with pytest.raises((WorkerError, UsageError), match="'w'"):
            synk.function(lambda value=value: (1.0, [value]), updates=[w])()
    assert not synk.gather(w).any()
