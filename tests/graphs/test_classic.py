"""Programs in the style of Synkhronos, by position and by name, beside plain functions of PyTensor."""

from functools import partial

import numpy as np
import pytest

import synkro as synk
from support.streams import random_draw
from synkro.errors import InvalidType, InvalidValue
from synkro.extensions import train, updates

pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")
T = pytensor.tensor

pytestmark = [pytest.mark.counted_once, pytest.mark.pymc]

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((120, 4))  # both two and three workers have the same numbers of rows
ANSWERS = ROWS @ [1.0, -2.0, 0.5, 3.0] + 0.7
RULES = {
    updates.sgd: {"learning_rate": 0.05},
    updates.momentum: {"learning_rate": 0.05, "momentum": 0.8},
    updates.nesterov_momentum: {"learning_rate": 0.05},
    updates.adagrad: {"learning_rate": 0.5},
    updates.rmsprop: {"learning_rate": 0.05, "rho": 0.8},
    updates.adadelta: {},
    updates.adam: {"learning_rate": 0.05, "beta1": 0.8},
    updates.adamax: {"learning_rate": 0.05},
}


@pytest.fixture(scope="module", params=[2, 3])
def n(request):
    """So many workers, which ``fork`` has started by its classic arguments."""
    with pytensor.config.change_flags(mode="FAST_COMPILE"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(synk.here, "session", None)
        if request.param > 2:
            with pytest.warns(RuntimeWarning, match="they will take turns"):
                assert synk.fork(request.param, False, request.param - 1, verbose=False) == request.param
        else:
            assert synk.fork(request.param, use_gpu=False, master_rank=1, verbose=False) == request.param
        yield request.param
        synk.close()


def model():
    """The loss of a linear model: its inputs, its parameters and the loss."""
    x, t = T.matrix("x"), T.vector("t")
    w = pytensor.shared(np.zeros(4), name="w")
    b = pytensor.shared(0.0, name="b")
    return x, t, [w, b], T.mean((x.dot(w) + b - t) ** 2)


# ── functions ────────────────────────────────────────────────────────────────────────────────────────


def test_data_by_position_and_by_name(n):
    x = T.fmatrix("x")
    by_place = synk.data(ROWS, x, None, None, None, True, True, 1.5, "rows")
    by_name = synk.data(
        value=ROWS,
        var=x,
        dtype=None,
        ndim=None,
        shape=None,
        minibatch=True,
        force_cast=True,
        oversize=1.5,
    )
    empty = synk.data(None, None, "int32", None, (3, 2))
    assert (by_place.name, by_name.name, empty.name) == ("rows", "x", None)
    assert (empty.dtype, empty.shape) == (np.int32, (3, 2))
    for data in (by_place, by_name):
        assert (data.dtype, data.minibatch, data.alloc_size) == (np.float32, True, 720)
        assert np.array_equal(data, ROWS.astype("f4"))
    by_place.set_value(input_data=ROWS[:5], force_cast=True, oversize=2)
    assert by_place.shape == (5, 4)


def test_givens_put_data_into_a_graph(n):
    x, t, _, loss = model()
    s_x, s_t = pytensor.shared(ROWS[:1]), pytensor.shared(ANSWERS[:1])
    f = synk.function([], loss, givens=[(x, s_x), (t, s_t)], sliceable_shareds=[s_x, s_t])
    synk.scatter([s_x, s_t], [ROWS, ANSWERS])
    f_th = pytensor.function([x, t], loss)
    assert synk.get_lengths(s_x) == [120 // n] * n
    assert np.allclose(f(num_slices=3), f_th(ROWS, ANSWERS))


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("nccl", [True, False])
def test_collectives_by_position_and_by_name(n, nccl):
    """Of variables that no function uses, too."""
    s, m = pytensor.shared(np.zeros(2), name="s"), pytensor.shared(np.zeros((1, 2)))
    table = np.arange(4.0 * n).reshape(2 * n, 2)
    synk.scatter(m, table)
    synk.scatter(shared_vars=m, values=table, batch=slice(None))
    assert np.array_equal(synk.gather(m, 0, nccl), table)
    assert np.array_equal(synk.gather(shared_vars=m, nd_up=1, nccl=nccl), table.reshape(n, 2, 2))
    assert synk.get_shapes(m) == synk.get_shapes(shared_vars=m) == [(2, 2)] * n
    assert synk.get_lengths([m, m][:1]) == [[2] * n]
    for rank in range(n):
        synk.set_value(rank, s, np.array([rank, 1.0]))
    assert synk.get_value(1, s).tolist() == synk.get_value(rank=1, shared_vars=s).tolist() == [1, 1]
    mean = [(n - 1) / 2, 1]
    assert np.allclose(synk.reduce(s, "avg", False, nccl), mean)
    assert np.allclose(synk.reduce(shared_vars=s, in_place=False, nccl=nccl), mean)
    assert np.allclose(synk.reduce(s, "max", False), [n - 1, 1])
    synk.reduce(s, "sum", True, nccl)
    assert np.allclose(synk.get_value(n - 1, s), np.array(mean) * n)
    synk.set_value(n - 1, s, np.array([n - 1.0, 1.0]))
    synk.all_reduce(s, "avg", nccl)
    assert np.allclose(synk.gather(s), [mean] * n)
    synk.set_value(rank=1, shared_vars=s, values=np.zeros(2))
    synk.all_reduce(shared_vars=s, op="max", nccl=nccl)
    assert np.allclose(synk.gather(s), [mean] * n)
    synk.set_value(n - 1, s, np.array([5.0, 6.0]))
    synk.broadcast(s, None, nccl)
    assert np.allclose(synk.gather(s), [[5, 6]] * n)
    synk.broadcast([s, m], values=[np.ones(2), table], nccl=nccl)
    synk.all_gather(m, nccl)
    assert np.array_equal(synk.get_value(0, m), np.concatenate([table] * n))
    synk.broadcast(m, table[:1])
    synk.all_gather(shared_vars=m, nccl=nccl)
    assert np.array_equal(m.get_value(), np.repeat(table[:1], n, axis=0))


def test_nccl_is_true_or_false(n):
    s = pytensor.shared(np.zeros(2))
    for call in (
        lambda: synk.broadcast(s, nccl="no"),
        lambda: synk.broadcast(s, np.ones(2), nccl=None),
        lambda: synk.gather(s, nccl=0),
        lambda: synk.reduce(s, in_place=False, nccl=1),
        lambda: synk.all_reduce(s, nccl=2.0),
        lambda: synk.all_gather(s, nccl=[]),
    ):
        with pytest.raises(InvalidType, match="nccl must be True or False; got"):
            call()


def test_a_collective_inside_a_function_has_its_own_form(n):
    def inside(x):
        mine = np.array([synk.rank(), 1.0])
        return (
            synk.all_reduce(mine, "sum", weight=None),
            synk.broadcast(mine, root=n - 1),
            synk.all_gather(mine, 1),
            synk.gather(mine, nd_up=1, root=0) is None,
        )

    total, last, stacked, none = zip(*synk.function(inside, outputs=None)(ROWS), strict=True)
    assert np.array_equal(total, [[n * (n - 1) / 2, n]] * n)
    assert np.array_equal(last, [[n - 1, 1]] * n)
    assert np.array_equal(stacked[0], [[rank, 1] for rank in range(n)])
    assert list(none) == [False] + [True] * (n - 1)
    for wrong in (lambda x: synk.broadcast(x, x), lambda x: synk.all_reduce(x, nccl=True)):
        with pytest.raises(synk.WorkerError, match=r"use it inside a function, as ``\w+\(value, "):
            synk.function(wrong, outputs=[])(ROWS)


# ── training ─────────────────────────────────────────────────────────────────────────────────────────


def check_steps(rule, batches, losses, params):
    """They are those of serial steps, by plain functions of PyTensor; all ranks have the same."""
    x, t, own, loss = model()
    of_gradient, of_params, _ = rule(loss, own, **RULES[rule])
    f_gradient = pytensor.function([x, t], loss, updates=of_gradient)
    f_params = pytensor.function([], [], updates=of_params)
    for batch, found in zip(batches, losses, strict=True):
        np.testing.assert_allclose(found, f_gradient(ROWS[batch], ANSWERS[batch]))
        f_params()
    for param, value in zip(params, own, strict=True):
        np.testing.assert_allclose(param.get_value(), value.get_value())
        assert all(np.array_equal(one, param.get_value()) for one in synk.gather(param))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_three_functions_of_a_step(n, rule):
    batches = [RNG.permutation(120)[: 12 * k] for k in (1, 3, 2, 5, 1, 10)]
    x, t, params, loss = model()
    of_gradient, of_params, gradient = rule(loss, params, **RULES[rule])
    f_gradient = synk.function([x, t], outputs=loss, updates=of_gradient)
    f_params = synk.function([], updates=of_params)
    synk.distribute()
    synk.broadcast(params)
    x_data, t_data = f_gradient.build_inputs(ROWS, ANSWERS)
    losses = []
    for batch in batches:
        losses.append(f_gradient(x_data, t_data, batch=batch))
        synk.all_reduce(gradient)
        f_params()
    check_steps(rule, batches, losses, params)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_training_function_is_exact_for_any_number_of_rows(n, rule):
    batches = [RNG.permutation(120)[:size] for size in (1, 7, 120, 2, 31, 50)]
    x, t, params, loss = model()
    step = train.make_train_function(loss, params, x, t, rule, **RULES[rule])
    x_data, t_data = synk.data(ROWS), synk.data(ANSWERS)
    losses = [step(x_data, t_data, batch) for batch in batches]
    check_steps(rule, batches, losses, params)


def test_a_rule_of_the_users_own(n):
    """In the classic form, with a variable of the gradient for each parameter."""

    def clipped(loss, params, rate, most=1.0):
        held = [pytensor.shared(np.zeros_like(p.get_value())) for p in params]
        of_gradient = list(zip(held, T.grad(loss, params), strict=True))
        of_params = [(p, p - rate * T.clip(g, -most, most)) for p, g in zip(params, held, strict=True)]
        return of_gradient, of_params, held

    x, t, params, loss = model()
    rate = pytensor.shared(0.1)
    step = train.make_train_function(loss, params, x, t, clipped, rate, most=0.5)
    w, b = np.zeros(4), 0.0
    for batch in (slice(0, 31), slice(31, 120), slice(1)):
        rows, answers = ROWS[batch], ANSWERS[batch]
        error = rows @ w + b - answers
        assert np.allclose(step(ROWS, ANSWERS, batch=batch, num_slices=2), (error**2).mean())
        w = w - 0.1 * np.clip(2 * rows.T @ error / len(rows), -0.5, 0.5)
        b = b - 0.1 * np.clip(2 * error.mean(), -0.5, 0.5)
        assert np.allclose(params[0].get_value(), w)
        assert np.allclose(params[1].get_value(), b)
    rate.set_value(0.0)  # reaches the workers with the next step
    step(ROWS, ANSWERS)
    assert np.allclose(params[0].get_value(), w)


def test_a_step_is_made_on_all_ranks_or_on_none(n):
    class Picky(pytensor.graph.op.Op):
        """The same numbers, but on rank 1, while the flag says so."""

        itypes = otypes = (T.dvector,)
        __props__ = ()

        def perform(self, node, inputs, outputs):
            if synk.rank() == 1 and flag.value:
                raise MemoryError
            outputs[0][0] = inputs[0].copy()

    def picky(loss, params):
        of_gradient, of_params, gradient = updates.momentum(loss, params, 0.1)
        return of_gradient, [(p, Picky()(new)) if p is w else (p, new) for p, new in of_params], gradient

    flag = synk.shared(0)
    x, t, (w, _), loss = model()
    loss = T.mean((x.dot(w) - t) ** 2)
    step = train.make_train_function(loss, [w], x, t, picky)
    step(ROWS, ANSWERS)
    before = w.get_value()
    flag.set_value(1)
    with pytest.raises(synk.WorkerError, match=r"rank 1 .*MemoryError"):
        step(ROWS, ANSWERS)
    assert np.array_equal(synk.gather(w), [before] * n)
    flag.set_value(0)
    step(ROWS, ANSWERS)
    assert all(np.array_equal(one, w.get_value()) for one in synk.gather(w))


def test_parameters_of_single_precision(n):
    x, t = T.fmatrix("x"), T.fvector("t")
    w = pytensor.shared(np.zeros(4, "float32"))
    loss = T.mean((x.dot(w) - t) ** 2)
    step = train.make_train_function(loss, [w], x, t, updates.adam, learning_rate=0.1)
    losses = [step(ROWS.astype("f4"), ANSWERS.astype("f4")) for _ in range(50)]
    assert w.get_value().dtype == np.float32
    assert losses[-1] < losses[0] / 2


def test_what_is_no_step_is_refused_in_words(n):
    x, t, params, loss = model()

    def noisy(loss, params):
        rng = pytensor.shared(np.random.default_rng(0))
        following, draw = random_draw(T.random.normal, rng=rng)
        of_gradient, of_params, gradient = updates.sgd(loss, params, 0.1)
        return of_gradient, [(p, new + draw) for p, new in of_params] + [(rng, following)], gradient

    def without(loss, params):
        return [(params[1], params[1] + 1)], [], params[1]

    made, sgd = partial(train.make_train_function, loss, params, x, t), updates.sgd
    for call, error, says in (
        (
            lambda: made(synk.extensions.sgd, 0.1),
            InvalidType,
            r"update_rule must be a function of .*updates\.sgd; got <class",
        ),
        (lambda: made(lambda *_: []), InvalidType, "an update rule returns three things"),
        (lambda: made(noisy), InvalidValue, "the rule draws random numbers for the parameters"),
        (lambda: made(without), InvalidValue, "the rule has no updates of parameters"),
        (
            lambda: updates.adam(loss, params, "fast"),
            InvalidType,
            "rate must be a number .*; got 'fast'",
        ),
        (lambda: updates.adam(loss, [params[0]] * 2), InvalidValue, "params names w twice"),
        (lambda: sgd(loss, [x], 0.1), InvalidType, "params must be a list of shared variables"),
        (lambda: sgd(loss, [], 0.1), InvalidValue, "params is empty"),
        (lambda: sgd(x, params, 0.1), InvalidType, "the loss must be a float without dimensions"),
    ):
        with pytest.raises(error, match=says):
            call()


def test_get_n_gpu_needs_no_workers(monkeypatch):
    monkeypatch.setattr(synk.here, "session", None)
    assert synk.get_n_gpu() == 0
    with pytest.raises(InvalidValue, match=r"use_gpu=False asks for CPUs; devices='cuda': give one\."):
        synk.fork(2, False, devices="cuda")
