"""Functions before workers, and after them: a function belongs to the session that is current."""

import functools

import numpy as np
import pytest

import synkro as synk
from support.leftovers import children
from support.sessions import running
from support.together import together
from synkro import NotForked, SessionClosed, UsageError
from synkro.machine import available_cores

pytestmark = [pytest.mark.long, pytest.mark.quick]

X = np.arange(12.0).reshape(6, 2)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_function_that_was_made_before_fork(workers):
    @synk.function(outputs="sum")
    def total(x):
        return x.sum()

    with pytest.raises(NotForked, match=r"no workers yet for total\(\): call synkro.fork\(\) first"):
        total(X)
    assert total.name == "total"
    assert total.fn(X) == X.sum()
    with running(workers):
        assert total(X) == X.sum()
        synk.distribute()
        assert total(X) == X.sum()


def test_wrong_names_are_found_before_fork():
    with pytest.raises(ValueError, match="has no parameter 'z'"):
        synk.function(lambda x: x, bcast_inputs=["z"])
    with pytest.raises(ValueError, match="unknown operation"):
        synk.function(lambda x: x, outputs="smu")


def test_a_method_is_refused_in_the_class_body_and_works_with_its_object():
    class Model:
        def __init__(self):
            self.weights = np.ones(2)
            self.run = synk.function(self.score, outputs="sum")

        def score(self, x):
            return (x @ self.weights).sum()

        with pytest.raises(
            TypeError, match=r"^score\(self, x\) is a method.*synk.function\(obj.score\)"
        ):
            synk.function(score)

    model = Model()
    with running(2):
        assert model.run(X) == X.sum()
        model.weights = 2 * model.weights
        assert model.run(X) == 2 * X.sum()


def test_a_function_goes_on_after_close_and_fork():
    synk.fork(2, verbose=False)
    scale = {"by": 2}
    f = synk.function(lambda x: x.sum() * scale["by"], outputs="sum")
    assert f(X) == 2 * X.sum()
    synk.close()
    with pytest.raises(SessionClosed, match=r"was closed: call fork\(\)"):
        f(X)
    scale["by"] = 3
    synk.fork(1, verbose=False)
    assert f(X) == 3 * X.sum()
    assert f.submit(X).result() == 3 * X.sum()
    assert f.as_serial(X) == 3 * X.sum()
    assert synk.push(scale) is None


def test_a_function_of_a_session_object_belongs_to_it():
    with synk.Session(1, verbose=False) as session:
        f = session.function(lambda x: x.sum(), outputs="sum")
        assert f(X) == X.sum()
    synk.fork(1, verbose=False)
    with pytest.raises(SessionClosed, match="was closed"):
        f(X)


@pytest.mark.pymc
def test_graphs_go_on_after_close_and_fork():
    pytensor = pytest.importorskip("pytensor", reason="needs PyTensor")
    x = pytensor.tensor.dmatrix("x")
    w = pytensor.shared(np.ones(2), name="w")
    synk.fork(1, verbose=False)
    f = synk.function([x], (x.dot(w).sum(), "sum"))
    assert f(X) == X.sum()
    synk.close()
    w.set_value(np.zeros(2))
    synk.fork(2, verbose=False)
    assert f(X) == 0


def test_fork_again_is_the_running_session():
    assert synk.fork(2, verbose=False) == 2
    pids = synk.here.session.pids
    assert synk.fork(2, verbose=False) == synk.fork(n_parallel=2, verbose=False, timeout=None) == 2
    assert synk.here.session.pids == pids
    with pytest.raises(UsageError, match=r"already, with another n_parallel="):
        synk.fork(1, verbose=False)
    with pytest.raises(UsageError, match=r"already, with another timeout="):
        synk.fork(2, timeout=5, verbose=False)


@pytest.mark.parametrize("sizes", [(2,) * 6, (1, 2, 3)])
def test_forks_of_several_threads_make_one_session(sizes):
    """Those that ask for another number of workers are told."""
    outcomes = together(*[functools.partial(synk.fork, n, devices="cpu", verbose=False) for n in sizes])
    pids = synk.here.session.pids
    assert children() == set(pids)
    made = [outcome for outcome in outcomes if isinstance(outcome, int)]
    others = [outcome for outcome in outcomes if not isinstance(outcome, int)]
    assert made == [len(pids)] * sizes.count(len(pids))
    assert [type(other) for other in others] == [synk.UsageError] * (len(sizes) - len(made))
    assert all("fork() was called already, with another n_parallel=" in str(other) for other in others)


def test_fork_again_with_a_seed_seeds_anew():
    synk.fork(2, seed=3, verbose=False)

    def draws():
        import random

        return np.array([synk.rng().random(), random.random()])

    draw = synk.function(draws, outputs=None)
    first, second = draw(), draw()
    synk.fork(2, seed=3, verbose=False)
    assert np.array_equal([draw(), draw()], [first, second])
    synk.fork(2, verbose=False)  # goes on
    assert not np.isin(np.array(draw()), [first, second]).any()
    synk.fork(2, seed=4, verbose=False)
    assert not np.isin(np.array(draw()), [first, second]).any()


def test_minus_one_is_all_cores():
    assert synk.fork(-1, devices="cpu", verbose=False) == available_cores()


def test_size_is_the_number_of_workers():
    with pytest.raises(NotForked, match=r"no workers yet for size\(\)"):
        synk.size()
    synk.fork(2, verbose=False)
    assert synk.size() == 2
    assert synk.function(lambda: synk.size(), outputs="max")() == 2
