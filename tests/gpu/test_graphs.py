"""Graphs of PyTensor on GPUs, where JAX compiles them."""

import numpy as np
import pytest

import synkro as synk
from synkro import extensions as ext
from synkro.errors import InvalidValue, NotAvailable

pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")
T = pytensor.tensor

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore:Skipping Assert")]

ROWS = np.random.default_rng(0).standard_normal((101, 4))


@pytest.fixture
def session(machine):
    machine.needs_jax()
    with machine.session() as session:
        synk.here.session = session
        yield session
        synk.here.session = None


def test_outputs_and_updates_with_slices(session):
    x, y = T.dmatrix("x"), T.dscalar("y")
    w = pytensor.shared(np.ones(4), "w")
    outputs = [x.dot(w).mean() * y, (x.max(axis=0), "max")]
    f = session.function(inputs=[x], bcast_inputs=[y], outputs=outputs, updates=[(w, w * 0.5)])
    for slices in (1, 3):
        before = w.get_value()
        mean, largest = f(ROWS, 2.0, num_slices=slices)
        np.testing.assert_allclose(mean, 2 * (ROWS @ before).mean())
        np.testing.assert_array_equal(largest, ROWS.max(axis=0))
        np.testing.assert_allclose(w.get_value(), before * 0.5)
    before = w.get_value()
    np.testing.assert_allclose(f.as_serial(ROWS, 2.0)[0], 2 * (ROWS @ before).mean())


def test_a_training_step(session):
    x, y = T.dmatrix("x"), T.dvector("y")
    w = pytensor.shared(np.zeros(4), "w")
    targets = ROWS @ np.arange(4.0)
    loss = ((x.dot(w) - y) ** 2).mean()
    train = ext.make_train_function(loss, [w], x, y, ext.sgd([w], 0.1))
    losses = [float(train(ROWS, targets)) for _ in range(100)]
    assert losses[0] == pytest.approx((targets**2).mean())
    np.testing.assert_allclose(w.get_value(), np.arange(4.0), atol=1e-3)


def test_types_are_those_of_the_graph(session):
    x = T.fmatrix("x")
    f = session.function(inputs=[x], outputs=(x.sum(), "sum"), allow_input_downcast=True)
    assert f(ROWS) == pytest.approx(ROWS.sum(), rel=1e-4)


def test_what_jax_cannot_compile_is_refused(session):
    x = T.dmatrix("x")
    with pytest.raises(NotAvailable, match=r"mode='NUMBA': leave that out"):
        session.function(inputs=[x], outputs=x.sum(), mode="NUMBA")

    class Odd(pytensor.graph.op.Op):
        __props__ = ()
        itypes = otypes = (T.dmatrix,)

        def perform(self, node, inputs, outputs):
            outputs[0][0] = inputs[0] + 1

        def infer_shape(self, fgraph, node, shapes):
            return shapes

    stream = pytensor.shared(np.random.default_rng(0))
    _, draw = T.random.normal(size=x.shape, rng=stream, return_next_rng=True)
    with pytest.raises(NotAvailable, match=r"'noise' has random streams .* CPU workers only"):
        session.function(inputs=[x], outputs=(x + draw).sum(), name="noise")
    with pytest.raises(NotAvailable, match=r"'odd' uses Odd.*cannot compile with JAX"):
        session.function(inputs=[x], outputs=Odd()(x).sum(), name="odd")
    with pytest.raises(InvalidValue, match="do not fit its graph"):
        session.function(inputs=[x, T.dvector("y")], outputs=x.sum())


def test_a_graph_over_two_ranks(session):
    """On the ranks of the session, which may be one: then nothing moves."""
    last = session.n_parallel - 1
    x, t = T.dmatrix("x"), T.dvector("t")
    w = session.place(pytensor.shared(ROWS[:4].copy(), "w"), 0)
    v = session.place(pytensor.shared(np.ones(4), "v"), last)
    hidden = T.tanh(x.dot(w)).transfer(last)
    loss = ((hidden.dot(v) - t) ** 2).mean()
    updates = [(each, each - 0.1 * T.grad(loss, each)) for each in (w, v)]
    step = session.function([x, t], loss, updates=updates)
    begun = w.get_value(), v.get_value()
    losses = [float(step(ROWS, ROWS[:, 0])) for _ in range(5)]
    trained = w.get_value(), v.get_value()
    w.set_value(begun[0])
    v.set_value(begun[1])
    alone = pytensor.function([x, t], loss, updates=updates, mode="FAST_COMPILE")
    np.testing.assert_allclose(losses, [float(alone(ROWS, ROWS[:, 0])) for _ in range(5)])
    np.testing.assert_allclose(trained[0], w.get_value())
    np.testing.assert_allclose(trained[1], v.get_value())
    assert any(row.operation.startswith("transfer of") for row in step.placement()) == bool(last)
