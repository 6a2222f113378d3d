"""``f.check``: a call beside the plain function on the same rows."""

import copy
import random
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest

import synkro as synk
from support.sessions import lasting, running
from synkro import InvalidValue, OutputError, UsageError, WorkerError

pytestmark = pytest.mark.quick

X = np.random.default_rng(0).standard_normal((101, 3))

session = lasting(2)


RIGHT = [
    (lambda x: x.mean(axis=0), "mean"),
    (lambda x: x.sum(axis=0), "sum"),
    (lambda x: x.max(), "max"),
    (lambda x: x * 2, "gather"),
    (lambda x: x * 2, "keep"),
    (lambda x: None, []),
    (lambda x: (x.sum(), {"m": x.mean(0), "n": len(x)}), ("sum", {"m": "mean", "n": "sum"})),
    (lambda x: (x > 0).sum(), "sum"),
    (lambda x: np.where(x > 0, np.nan, x).max(axis=0), "max"),
    (lambda x: x.astype("c8").sum(), "sum"),
]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_what_is_right_comes_back(workers):
    with running(workers) as session:
        for fn, outputs in RIGHT:
            f = session.function(fn, outputs=outputs)
            got, want = f.check(X), f(X)
            if outputs == "keep":
                got, want = got.get_value(), want.get_value()
            np.testing.assert_equal(got, want)


def test_options_of_a_call(session):
    f = session.function(lambda x: (x.mean(axis=0), x.sum()), outputs=("mean", "sum"))
    rows = [5, 3, 99, 7, 7]
    got = f.check(X, batch=rows, num_slices=2, output_subset=[1])
    assert got == (pytest.approx(X[rows].sum()),)
    with pytest.raises(InvalidValue, match="without batch_s="):
        f.check(X, batch_s=3)


@pytest.mark.parametrize(
    ("fn", "outputs", "why"),
    [
        (lambda x: x.std(axis=0), "mean", "a standard deviation, a median or a ratio of sums is none"),
        (lambda x: x.sum() + 1, "sum", "a constant, say, is added by every rank"),
        (lambda x: x.argmax(), "max", "the place of a maximum is none"),
        (lambda x: x.argmin(), "min", "the place of a minimum is none"),
        (lambda x: x - x.mean(axis=0), "gather", "a mean over rows that is subtracted"),
        (lambda x: np.sort(x[:, 0]), "gather", "a sort, say"),
        (lambda x: (0 * x + 1).prod() + 1, "prod", "no product"),
    ],
)
def test_what_is_wrong_is_named(session, fn, outputs, why):
    f = session.function(fn, outputs=outputs, name="wrong")
    with pytest.raises(
        OutputError,
        match=rf"check\(\): output of the function 'wrong', reduced by '{outputs}', differs from the "
        rf"plain function's on the same rows, by up to .* instead of .*Perhaps .*{why}",
    ):
        f.check(X)


def test_what_cannot_be_compared_is_refused(session):
    with pytest.raises(InvalidValue, match=r"outputs=None, the list of every rank's value"):
        session.function(lambda x: x.sum(), outputs=None).check(X)
    for fn, what in (
        (lambda x: synk.all_reduce(x.sum()), "uses collectives"),
        (lambda x: x.sum() + synk.rng().normal(), r"draws from rng\(\)"),
    ):
        f = session.function(fn)
        with pytest.raises(UsageError, match=rf"check\(\) compares .*this function {what}"):
            f.check(X)
        f(X)  # as ever


def test_variables_objects_and_generators_are_put_back_in_between(session):
    w = session.shared(np.zeros(3))
    log, counts = [], {"calls": 0}
    array = np.zeros(2)

    def step(x):
        w.value += x.sum(axis=0)
        log.append(len(x))
        counts["calls"] += 1
        array[0] += 1
        return random.random() * 0 + w.value

    f = session.function(step, outputs="sum")
    np.testing.assert_allclose(f.check(X), X.sum(axis=0))
    assert session.fetch(log) == [51]
    assert session.fetch(counts) == {"calls": 1}
    assert session.fetch(array).tolist() == [1, 0]
    np.testing.assert_allclose(w.get_value(), X[:51].sum(axis=0))
    u = session.shared(0.0)
    session.function(lambda x: (x.sum(), [u.value + 1]), outputs="sum", updates=[u]).check(X)
    assert u.get_value() == 1


def test_after_a_failure_all_is_as_before(session):
    log = []

    def fail(x):
        log.append(1)
        if len(x) == len(X):
            raise RuntimeError("only whole")
        return x.sum()

    f = session.function(fail, outputs="sum")
    f(X)
    with pytest.raises(WorkerError, match="only whole"):
        f.check(X)
    assert session.fetch(log) == [1]
    assert f(X) == pytest.approx(X.sum())


# ── objects ──────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Fit:
    total: float
    parts: dict
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Slotted:
    total: float


class Pair(NamedTuple):
    total: float
    fit: Fit


class Plain:
    """It has no ``__eq__``."""

    def __init__(self, total, below=None):
        self.total, self.below = total, below


class Cached(Plain):
    """Its equality leaves an attribute out."""

    def __init__(self, total):
        super().__init__(1, total)

    def __eq__(self, other):
        return self.total == other.total

    __hash__ = None


class Closed:
    """Nothing of it can be compared."""

    __slots__ = ()


def added(a, b):
    """Two objects as one, whose floats are the sums, in another order than in the plain function."""
    if isinstance(a, int | float | np.ndarray):
        return a + b
    if isinstance(a, dict):
        return {key: added(a[key], b[key]) for key in a}
    if isinstance(a, tuple):
        return type(a)(*map(added, a, b))
    if isinstance(a, Closed) or a is None:
        return a
    if isinstance(a, Slotted):
        return Slotted(a.total + b.total)
    new = copy.copy(a)
    vars(new).update({name: added(value, vars(b)[name]) for name, value in vars(a).items()})
    return new


OBJECTS = [
    lambda x: Fit(x.sum() / 3, {"mean": x.sum(axis=0), "n": len(x)}),
    lambda x: Slotted(x.sum() / 3),
    lambda x: Pair(x.sum() / 3, Fit(x.sum() / 7, {"more": Plain(x.sum() / 9)})),
    lambda x: Plain(x.sum() / 3, Plain(x.sum() / 7)),
    lambda x: {"plain": Plain(x.sum() / 3), "closed": Closed()},
]


@pytest.mark.parametrize("fn", OBJECTS)
def test_objects_are_compared_by_what_they_hold(session, fn):
    f = session.function(fn, outputs=added, name="f")
    f.check(X)
    wrong = session.function(lambda x: added(fn(x), fn(x * len(x))), outputs=added, name="wrong")
    with pytest.raises(
        OutputError, match=r"output(\['\w+'\]|\[\d\])+ of the function 'wrong', .* by up"
    ):
        wrong.check(X)


BIG = np.array([2**60, 1, 2, 3])
OTHER_KEYS = "the call returns a dict .*the plain function a dict"


def first(a, b):
    return a


@pytest.mark.parametrize(
    ("fn", "outputs", "args", "message"),
    [
        (lambda x: {"sum": x.sum(), "off": x.std() / 999}, "mean", [X], r"output\['sum'\]"),  # the worst
        (
            lambda x: {"good": x.mean(), "bad": x.std()},
            "mean",
            [X],
            r"output\['bad'\] of the function 'f'",
        ),
        (lambda x: x.sum() + len(x) // 4, "sum", [BIG], "differs"),
        (lambda: 3, "sum", [], "by up to 3: 6 instead of 3"),
        (lambda x: x.sum(axis=0), "gather", [X], r"it has the shape \(6,\) instead of \(3,\)"),
        (lambda x: {f"n{len(x) // 60}": 1.0}, "sum", [X], OTHER_KEYS),
        (lambda x: Fit(1, {"a" if len(x) < 60 else "b": 1}), first, [X], OTHER_KEYS),
        (
            lambda x: Plain(1) if len(x) < 60 else Slotted(1),
            first,
            [X],
            "it is <.*Plain object .* instead of .*Slotted",
        ),
        (lambda x: {str(len(x))}, first, [X], r"it is {'51'} instead of {'101'}"),
    ],
)
def test_what_differs_is_told(session, fn, outputs, args, message):
    f = session.function(fn, outputs=outputs, name="f")
    with pytest.raises(OutputError, match=message):
        f.check(*args)


def test_what_is_exact_without_rows_or_equal_as_it_says_itself(session):
    assert session.function(lambda x: x.sum(), outputs="sum").check(BIG) == 2**60 + 6
    assert session.function(lambda: 3, outputs="max").check() == 3
    session.function(lambda x: Cached(len(x)), outputs=first).check(X)


def test_objects_that_hold_themselves_are_compared(session):
    def ring(x):
        plain = Plain(x.sum() / 3)
        plain.below = {"up": plain}
        return plain

    def first(a, b):
        a.total += b.total
        return a

    session.function(ring, outputs=first).check(X)
