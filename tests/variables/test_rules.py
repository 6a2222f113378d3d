"""Update rules and training steps, against the formulas written out and run serially."""

import numpy as np
import pytest

import synkro as synk
from synkro import extensions as ext
from synkro.errors import InvalidType, InvalidValue

pytestmark = pytest.mark.counted_once

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((67, 4))
TARGETS = ROWS @ np.array([1.0, -2.0, 0.5, 3.0]) + 0.7 + 0.1 * RNG.standard_normal(67)


def rules():
    """Each rule: what makes it, and the serial formula as ``(state, gradient, time) -> step``."""

    def sgd(s, g, t):
        return -0.05 * g

    def momentum(s, g, t):
        s["v"] = 0.9 * s.get("v", 0) - 0.05 * g
        return s["v"]

    def nesterov(s, g, t):
        s["v"] = 0.9 * s.get("v", 0) - 0.05 * g
        return 0.9 * s["v"] - 0.05 * g

    def adagrad(s, g, t):
        s["a"] = s.get("a", 0) + g * g
        return -0.5 * g / np.sqrt(s["a"] + 1e-6)

    def rmsprop(s, g, t):
        s["a"] = 0.9 * s.get("a", 0) + 0.1 * g * g
        return -0.05 * g / np.sqrt(s["a"] + 1e-6)

    def adadelta(s, g, t):
        s["a"] = 0.95 * s.get("a", 0) + 0.05 * g * g
        u = g * np.sqrt(s.get("d", 0) + 1e-6) / np.sqrt(s["a"] + 1e-6)
        s["d"] = 0.95 * s.get("d", 0) + 0.05 * u * u
        return -u

    def adam(s, g, t):
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["v"] = 0.999 * s.get("v", 0) + 0.001 * g * g
        rate = 0.05 * np.sqrt(1 - 0.999**t) / (1 - 0.9**t)
        return -rate * s["m"] / (np.sqrt(s["v"]) + 1e-8)

    def adamax(s, g, t):
        s["m"] = 0.9 * s.get("m", 0) + 0.1 * g
        s["u"] = np.maximum(0.999 * s.get("u", 0), abs(g))
        return -0.05 / (1 - 0.9**t) * s["m"] / (s["u"] + 1e-8)

    return [
        pytest.param(lambda p: ext.sgd(p, 0.05), sgd, id="sgd"),
        pytest.param(lambda p: ext.momentum(p, 0.05), momentum, id="momentum"),
        pytest.param(lambda p: ext.nesterov_momentum(p, 0.05), nesterov, id="nesterov"),
        pytest.param(lambda p: ext.adagrad(p, 0.5), adagrad, id="adagrad"),
        pytest.param(lambda p: ext.rmsprop(p, 0.05), rmsprop, id="rmsprop"),
        pytest.param(lambda p: ext.adadelta(p), adadelta, id="adadelta"),
        pytest.param(lambda p: ext.adam(p, 0.05), adam, id="adam"),
        pytest.param(lambda p: ext.adamax(p, 0.05), adamax, id="adamax"),
    ]


def gradients(x, y, w, b):
    """Of the mean squared error of a linear model."""
    residual = x @ w + b - y
    return (residual**2).mean(), [2 * x.T @ residual / len(x), np.asarray(2 * residual.mean())]


def serial(step, batches):
    params, state, losses = np.zeros(5), {}, []
    for time, rows in enumerate(batches, 1):
        loss, parts = gradients(ROWS[rows], TARGETS[rows], params[:4], params[4])
        losses.append(loss)
        params = params + step(state, np.concatenate([parts[0], parts[1].reshape(1)]), time)
    return params, losses


def training(make):
    """Two parameters, and a step that trains them by the rule that *make* makes for them."""
    w, b = synk.shared(np.zeros(4), name="w"), synk.shared(0.0, name="b")

    def loss_and_grad(x, y):
        return gradients(x, y, w.value, b.value)

    return w, b, ext.make_train_function(loss_and_grad, [w, b], make([w, b]))


def trained(make, batches, **options):
    w, b, train = training(make)
    x, y = synk.data(ROWS), synk.data(TARGETS)
    losses = [train(x, y, batch=rows, **options) for rows in batches]
    for variable in (w, b):
        replicas = synk.gather(variable)
        assert all(np.array_equal(replicas[0], replica) for replica in replicas)
    return np.append(w.get_value(), b.get_value()), losses


@pytest.mark.parametrize(("make", "step"), rules())
def test_steps_are_those_of_the_formula(n, make, step):
    rng = np.random.default_rng(1)
    batches = [rng.permutation(67)[: rng.integers(1, 23)] for _ in range(40)]
    params, losses = trained(make, batches)
    want, want_losses = serial(step, batches)
    np.testing.assert_allclose(params, want, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-9)


def test_slices_make_one_step(n):
    rng = np.random.default_rng(2)
    batches = [rng.permutation(67)[: rng.integers(5, 40)] for _ in range(30)]
    whole, _ = trained(lambda p: ext.adam(p, 0.05), batches)
    sliced, _ = trained(lambda p: ext.adam(p, 0.05, name="other"), batches, num_slices=3)
    np.testing.assert_allclose(sliced, whole, rtol=1e-9)


def test_rows_that_the_workers_hold(two):
    w, b = synk.shared(np.zeros(4)), synk.shared(0.0)
    x, y = synk.shared(np.zeros((0, 4))), synk.shared(np.zeros(0))
    synk.scatter([x, y], [ROWS, TARGETS])

    def loss_and_grad():
        return gradients(x.value, y.value, w.value, b.value)

    rule = ext.momentum([w, b], 0.05)
    train = ext.make_train_function(loss_and_grad, [w, b], rule, sliceable_shareds=[x, y])
    batches = []
    rng = np.random.default_rng(3)
    for _ in range(20):
        mine = [rng.permutation(34)[:5], rng.permutation(33)[:3]]
        train(batch_s=mine)
        batches.append(np.concatenate([mine[0], 34 + mine[1]]))

    def step(s, g, t):
        s["v"] = 0.9 * s.get("v", 0) - 0.05 * g
        return s["v"]

    want, _ = serial(step, batches)
    np.testing.assert_allclose(np.append(w.get_value(), b.get_value()), want, rtol=1e-9)


def test_as_serial_makes_the_same_step(two):
    w, b, train = training(lambda p: ext.adam(p, 0.1))
    losses = [train(ROWS, TARGETS), train.as_serial(ROWS, TARGETS), train(ROWS, TARGETS)]
    params = np.append(w.get_value(), b.get_value())
    again, again_losses = trained(lambda p: ext.adam(p, 0.1), [slice(None)] * 3)
    np.testing.assert_allclose(losses, again_losses)
    np.testing.assert_allclose(params, again)


def test_a_learning_rate_that_changes(two):
    rate = synk.shared(0.1)
    w, _, train = training(lambda p: ext.sgd(p, rate))
    train(ROWS, TARGETS)
    before = w.get_value()
    rate.set_value(0.0)
    train(ROWS, TARGETS)
    np.testing.assert_array_equal(w.get_value(), before)


def test_bad_input(two):
    w, counter = synk.shared(np.zeros(4)), synk.shared(0)
    with pytest.raises(InvalidType, match="must be floats"):
        ext.sgd([counter])
    with pytest.raises(InvalidType, match="at least one"):
        ext.sgd([])
    with pytest.raises(InvalidType, match="made by shared"):
        ext.sgd([3.0])
    with pytest.raises(InvalidValue, match=r"'sgd.*learning_rate=synkro\.shared\(0\.01\)"):
        ext.sgd([w]).learning_rate = 0.1
    with pytest.raises(InvalidType, match="must be an update rule"):
        ext.make_train_function(gradients, [w], ext.sgd)
    with pytest.raises(InvalidValue, match="other parameters"):
        ext.make_train_function(gradients, [synk.shared(1.0)], ext.sgd([w]))
    train = ext.make_train_function(lambda x: (x.mean(), [np.zeros(3)]), [w], ext.sgd([w]))
    with pytest.raises(synk.WorkerError, match=r"shapes \[\(3,\)\].*\[\(4,\)\]"):
        train(ROWS)
