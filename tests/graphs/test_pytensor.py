"""Graphs of PyTensor: the classic form of function(), and shared variables that are variables here."""

import threading
from collections import OrderedDict

import numpy as np
import pytest

import synkro as synk
from support.leftovers import children
from support.streams import default_updates, random_draw
from support.waiting import wait_until
from synkro import extensions as ext
from synkro.controller.calls import forms
from synkro.controller.engine.engine import Engine
from synkro.controller.variables.collectives import Collectives
from synkro.errors import InvalidIndex, InvalidValue
from synkro.extensions import train, updates
from synkro.machine import announcing

pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")
T = pytensor.tensor

from synkro.graphs.graph import Graph  # noqa: E402

pytestmark = pytest.mark.pymc

ROWS = np.random.default_rng(0).standard_normal((101, 4))


@pytest.fixture(scope="module")
def workers():
    before = children()
    with synk.Session(2, verbose=False, timeout=100) as session:
        yield session
    assert wait_until(lambda: children() <= before)


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """Python's own loops: what numba compiles takes seconds a graph; one test below waits for that."""
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


@pytest.fixture(autouse=True)
def current(workers, monkeypatch):
    """The module functions are the workers'; they stay for the next test."""
    monkeypatch.setattr(synk.here, "session", workers)


def test_the_introductory_program_compiled():
    with pytensor.config.change_flags(mode="Mode"):
        x, y = T.matrix("x"), T.vector("y")
        f = synk.function(inputs=[x], bcast_inputs=[y], outputs=T.mean(x.dot(y), axis=0))
    answers = ROWS.dot(np.arange(4.0)).mean()
    assert np.allclose(f(ROWS, np.arange(4.0)), answers)
    assert np.allclose(f(ROWS, np.arange(4.0), num_slices=2), answers)


def test_the_introductory_program():
    x, y = T.matrix("x"), T.vector("y")
    z = T.mean(x.dot(y), axis=0)
    f_th = pytensor.function(inputs=[x, y], outputs=z)
    f = synk.function(inputs=[x], bcast_inputs=[y], outputs=z)
    synk.distribute()
    x_dat, y_dat = ROWS.astype("float32"), np.arange(4, dtype="float32")
    assert np.allclose(f(synk.data(x_dat), synk.data(y_dat)), f_th(x_dat, y_dat))
    assert np.allclose(f(x=x_dat, y=y_dat), f_th(x_dat, y_dat))
    assert np.allclose(f(x_dat, y_dat, num_slices=7, batch=slice(0, 60, 2)), f_th(x_dat[:60:2], y_dat))
    assert np.allclose(f.as_theano(x_dat, y_dat), f_th(x_dat, y_dat))
    one, two = f.build_inputs(x_dat, y_dat)
    assert (one.dtype, two.ndim) == (np.float64, 1)
    assert np.allclose(f(one, two), f_th(x_dat, y_dat))


def test_a_compilation_is_told_by_the_name_of_its_outputs(capsys):
    x, y = T.matrix("x"), T.vector("y")
    loss = x.dot(y).sum()
    with synk.Session(1) as session:
        assert session.function([x], (loss, "sum"), [y]).name == "graph of x"
        assert session.function([x], (loss, "sum"), [y], name="mine").name == "mine"
        loss.name = "loss"
        assert session.function([x], [(loss, "sum"), x], [y]).name == "loss, x"
    printed = capsys.readouterr().err
    assert "Synkro compiled the graph 'loss, x' (" in printed
    assert "compiling" not in printed


def test_a_long_compilation_is_announced(capsys, monkeypatch):
    said = threading.Event()
    compiled = Graph.compiled

    def long(*args):
        assert said.wait(60)
        return compiled(*args)

    def impatient(say, text):
        return announcing(lambda text: (say(text), said.set()), text, 0.0)

    monkeypatch.setattr(Graph, "compiled", long)
    monkeypatch.setattr(forms, "announcing", impatient)
    x = T.vector("x")
    with synk.Session(1) as session:
        session.function([x], x.sum(), name="f")
    printed = capsys.readouterr().err
    assert printed.count("Synkro is compiling the graph 'f'...\nSynkro compiled the graph 'f' (") == 1


def test_unknown_keywords_are_called_unknown():
    x = T.vector("x")
    with pytest.raises(synk.InvalidType, match=r"unknown keyword output=: did you mean outputs=\?"):
        synk.function([x], output=x.sum())


def test_outputs_in_all_their_forms():
    x = T.matrix("x")
    f = synk.function(inputs=[x], outputs=[(x.sum(axis=0), "sum"), x.mean(), (x * 2, "gather")])
    total, mean, doubled = f(ROWS)
    assert np.allclose(total, ROWS.sum(axis=0))
    assert np.allclose(mean, ROWS.mean())
    assert np.array_equal(doubled, ROWS * 2)
    assert synk.function(inputs=[x], outputs=(x.max(), "max"))(ROWS) == ROWS.max()
    assert f.output_modes == ["sum", "mean", "gather"]
    (alone,) = f(ROWS, output_subset=[1], batch=slice(10, 40), num_slices=2)
    assert np.allclose(alone, ROWS[10:40].mean())
    (alone,) = synk.function([x], [x.mean()])(ROWS)
    assert np.allclose(alone, ROWS.mean())
    assert synk.function(inputs=x, outputs=(x.sum(), None))(ROWS[:2])[0] == pytest.approx(ROWS[0].sum())


def test_nothing_scattered_nothing_broadcast_no_outputs():
    w = pytensor.shared(np.zeros(3), name="w")
    f = synk.function(updates=[(w, w + 1)], name="count")
    assert f() is None
    assert f() is None
    assert w.get_value().tolist() == [2, 2, 2]
    y = T.scalar("y")
    assert synk.function(bcast_inputs=[y], outputs=y * 2)(3.0) == 6


def test_shared_variables_go_both_ways_and_are_one_in_all_functions():
    x, w = T.matrix("x"), pytensor.shared(np.zeros(4), name="w")
    add = synk.function(inputs=[x], outputs=[], updates=OrderedDict([(w, w + x.sum(axis=0))]))
    show = synk.function(outputs=(w, None))
    add(ROWS)
    ours = [part.sum(axis=0) for part in np.array_split(ROWS, 2)]
    assert np.allclose(w.get_value(), ours[0])  # the master rank's
    assert np.allclose(synk.gather(w), ours)
    synk.all_reduce(w, op="sum")
    assert np.allclose(w.get_value(), ROWS.sum(axis=0))
    assert np.allclose(show(), [ROWS.sum(axis=0)] * 2)
    w.set_value(np.ones(4))
    assert np.array_equal(show(), np.ones((2, 4)))
    serial = pytensor.function([], [], updates=[(w, w * 3)])
    serial()  # in the main process alone
    assert np.array_equal(show(), np.full((2, 4), 3.0))


@pytest.mark.parametrize("slices", [1, 5])
def test_updates_are_computed_from_the_old_values_and_merged(slices):
    x, w, n = T.matrix("x"), pytensor.shared(np.ones(4)), pytensor.shared(np.float64(10))
    f = synk.function(
        inputs=[x], outputs=w.sum(), updates=[(w, x.mean(axis=0) * n), (n, n * 0 + x.shape[0], "sum")]
    )
    assert f(ROWS, num_slices=slices) == 4
    mine = ROWS[:51]
    assert np.allclose(w.get_value(), mine.mean(axis=0) * 10)
    assert n.get_value() == 51
    assert f.update_modes == ("mean", "sum")


def test_sliceable_shareds_and_batch_s():
    rows = pytensor.shared(np.zeros((0, 4)), name="rows")
    synk.scatter(rows, ROWS)
    f = synk.function(outputs=rows.mean(axis=0), sliceable_shareds=[rows])
    assert np.allclose(f(), ROWS.mean(axis=0))
    assert np.allclose(f(num_slices=4), ROWS.mean(axis=0))
    assert np.allclose(f(batch_s=[[3, 1], [7]]), ROWS[[3, 1, 51 + 7]].mean(axis=0))
    by_place = synk.function([], (rows, "gather"), None, None, None, [rows])
    chosen = [*range(3, 9), *range(54, 60)]
    assert np.array_equal(by_place(batch_s=slice(3, 9), num_slices=3), ROWS[chosen])


@pytest.mark.parametrize("listed", [False, True])
def test_a_shared_variable_can_be_sliceable_for_a_python_function(listed):
    rows = pytensor.shared(np.arange(6.0))
    sliceable = [rows] if listed else rows
    f = synk.function(synk.rank, outputs=None, sliceable_shareds=sliceable, name="f")
    assert f(batch_s=[[0, 3], [5]]) == [0, 1]
    with pytest.raises(InvalidIndex, match="batch_s has the index 6"):
        f(batch_s=[6])


def test_givens():
    x, y = T.matrix("x"), T.matrix("y")
    f = synk.function(inputs=[y], outputs=(x.sum(), "sum"), givens={x: y * 2})
    assert np.allclose(f(ROWS), ROWS.sum() * 2)
    w = pytensor.shared(ROWS[0])
    g = synk.function(inputs=[y], outputs=y.dot(x[0]).mean(), givens=[(x, w.dimshuffle("x", 0))])
    assert np.allclose(g(ROWS), ROWS.dot(ROWS[0]).mean())


def test_keywords_go_to_pytensor():
    x, y = T.fmatrix("x"), T.vector("y")
    f = synk.function(
        inputs=[x],
        bcast_inputs=[y],
        outputs=x.sum(),
        on_unused_input="ignore",
        allow_input_downcast=True,
        mode="FAST_COMPILE",
    )
    assert np.isclose(f(ROWS, np.ones(2)), ROWS[:51].sum() * 51 / 101 + ROWS[51:].sum() * 50 / 101)


X, Y, W = T.fmatrix("x"), T.fvector("y"), pytensor.shared(np.zeros(3, "float32"), name="W")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda f: f([X], X.sum(), [X]), "x is listed twice"),
        (lambda f: f([X, Y], X.sum()), "do not fit its graph: .*on_unused_input"),
        (lambda f: f([X], X.dot(Y)), "do not fit its graph"),
        (lambda f: f([X, W], X.dot(W)), "shared variable W is listed as an input"),
        (lambda f: f([X, "y"], X.sum()), "are its variables.*'y'"),
        (lambda f: f([X], [X.sum(), 3]), "an output of a graph is .* got 3"),
        (lambda f: f([X], (X.sum(), "avrage")), "avrage"),
        (lambda f: f([X], X.sum(), updates=[(X, X)]), "changes shared variables"),
        (lambda f: f([X], updates=[(W, W), (W, W + 1)]), "W twice"),
        (lambda f: f([X], updates=[(W, X)]), "new value .* W is of another type"),
        (lambda f: f([X], updates=[(W,)]), "takes pairs"),
        (lambda f: f([X], X.sum(), sliceable_shareds=[W]), "does not use"),
        (lambda f: f([X], X.sum(), givens={"x": X}), "givens= replaces"),
        (lambda f: f([X], W.sum(), givens={W: X}), "givens= of .* 'graph of x' .*another type.*Vector"),
        (lambda f: f(lambda x: x, givens={}), "givens=, which is for graphs"),
        (lambda f: f(lambda x: x, mode="FAST_RUN"), "mode=, which is for graphs"),
    ],
)
def test_what_is_no_graph_is_refused_in_words(made, message):
    with pytest.raises(synk.UsageError, match=message):
        made(synk.function)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            ROWS,
            np.ones(4, "f4"),
            "'x' .* holds float32, and a cast of float64 .* allow_input_downcast=True",
        ),
        (ROWS.astype("f4"), np.ones((4, 4), "f4"), "'y' .* has 1 dimension in the graph, got 2"),
        (ROWS.astype("f4")[:, 0], np.ones(4, "f4"), "'x' .* has 2 dimensions in the graph, got 1"),
    ],
)
def test_inputs_of_another_type_are_named(x, y, message):
    f = synk.function(inputs=[X], bcast_inputs=[Y], outputs=X.dot(Y).mean())
    with pytest.raises(synk.UsageError, match=message):
        f(x, y)
    with pytest.raises(synk.UsageError, match=r"float32 in the graph, got float64.*force_cast=True"):
        f(synk.data(ROWS), np.ones(4, "f4"))


def test_what_is_set_counts_on_all_ranks_whatever_the_master_rank_holds():
    x, bad = T.matrix("x"), pytensor.shared(0)
    count = synk.function([x], updates=[(bad, bad + T.lt(x[:, 0], 0).sum())])
    rows = np.vstack([np.ones((50, 4)), -np.ones((3, 4)), np.ones((47, 4))])  # on rank 1
    for _ in range(3):
        bad.set_value(0)
        count(rows)
        assert synk.gather(bad).tolist() == [0, 3]
    bad.set_value(bad.get_value())
    assert synk.gather(bad).tolist() == [0, 0]


def test_updates_of_a_sliced_variable_are_refused_for_some_of_its_rows():
    s = pytensor.shared(np.zeros((1, 2)), name="s")
    f = synk.function([], updates=[(s, s * 2)], sliceable_shareds=[s])
    table = np.arange(24.0).reshape(12, 2)
    synk.scatter(s, table)
    f()
    assert np.array_equal(synk.gather(s, 0), table * 2)
    for options in ({"num_slices": 3}, {"batch_s": [0, 2]}):
        with pytest.raises(
            InvalidValue, match=r"'graph' changes all rows of .* num_slices= or batch_s="
        ):
            f(**options)
    assert np.array_equal(synk.gather(s, 0), table * 2)


# ── random streams, and default updates ──────────────────────────────────────────────────────────────


def noise(seed):
    """A random stream, and a function that draws as many numbers from it as its argument has."""
    x = T.matrix("x")
    rng = pytensor.shared(np.random.default_rng(seed), name="stream")
    following, draw = random_draw(T.random.normal, size=x.shape, rng=rng)
    return rng, synk.function([x], (draw, "gather"), updates={rng: following})


def test_each_rank_draws_from_its_own_part_of_a_stream():
    rng, f = noise(3)
    draws = [f(ROWS), f(ROWS, num_slices=3), f(ROWS[:1]), f(ROWS)]
    assert [draw.shape for draw in draws] == [(101, 4), (101, 4), (1, 4), (101, 4)]
    assert len(np.unique(np.concatenate(draws))) == 4 * 304
    assert np.array_equal(noise(3)[1](ROWS), draws[0])
    assert not np.array_equal(noise(4)[1](ROWS), draws[0])
    rng.set_value(np.random.default_rng(3))  # begins anew
    assert np.array_equal(f(ROWS), draws[0])
    rng.set_value(np.random.default_rng(3))
    assert np.array_equal(f(ROWS), draws[0])


def test_a_stream_in_this_process_is_that_of_pytensor():
    rng, f = noise(3)
    first, second = f.as_theano(ROWS), f.as_theano(ROWS)
    stream = np.random.default_rng(3)
    assert np.array_equal(first, stream.normal(size=ROWS.shape))
    assert np.array_equal(second, stream.normal(size=ROWS.shape))
    assert rng.get_value().normal() == stream.normal()  # it goes on from there in other functions
    assert len(np.unique([first, second, f(ROWS)])) == 3 * 404


def test_parts_never_come_again(workers):
    """Whatever the main process draws, or another session has: 200 numbers a rank are new each time."""
    rng, f = noise(5)
    x = T.vector("x")
    following, one = random_draw(T.random.normal, rng=rng)
    alone = pytensor.function([], one, updates={rng: following})
    draws = [f(ROWS), [[float(alone())]], f(ROWS), f.as_serial(ROWS[:1]), f(ROWS)]
    with synk.Session(2, verbose=False) as other:
        following, many = random_draw(T.random.normal, size=x.shape, rng=rng)
        draws.append([other.function([x], (many, "gather"), updates={rng: following})(ROWS[:, 0])])
    drawn = np.concatenate([np.ravel(draw) for draw in draws])
    assert len(np.unique(drawn)) == len(drawn)


def test_streams_with_updates_and_without():
    x = T.matrix("x")
    rng = pytensor.shared(np.random.default_rng(0))
    following, draw = random_draw(T.random.uniform, size=x.shape, rng=rng)
    going = synk.function([x], (draw, "gather"), updates={rng: following})
    still = synk.function([x], (draw, "gather"))
    assert not np.array_equal(going(ROWS), going(ROWS))
    assert np.array_equal(still(ROWS), still(ROWS))
    w = pytensor.shared(np.zeros(4))
    both = synk.function([x], (draw, "gather"), updates=[(w, w + x.mean(axis=0)), (rng, following)])
    assert not np.array_equal(both(ROWS), both(ROWS, num_slices=2))
    assert np.allclose(synk.gather(w), [2 * part.mean(axis=0) for part in (ROWS[:51], ROWS[51:])])


def test_dropout_trains():
    x, t, w = T.matrix("x"), T.vector("t"), pytensor.shared(np.zeros(4))
    rng = pytensor.shared(np.random.default_rng(1))
    following, kept = random_draw(T.random.bernoulli, 0.9, size=x.shape, rng=rng)
    with default_updates():
        rng.default_update = following
    loss = (((x * kept / 0.9).dot(w) - t) ** 2).mean()
    step = train.make_train_function(loss, [w], x, t, updates.adam, 0.1)
    answers = ROWS @ [1.0, -2, 3, 0.5]
    losses = [step(ROWS, answers) for _ in range(100)]
    assert len(set(losses)) == 100
    assert losses[-1] < losses[0] / 2


def test_streams_of_every_kind_and_where_they_are_refused():
    rng = pytensor.shared(np.random.Generator(np.random.MT19937(0)), name="twister")
    following, draw = random_draw(T.random.normal, size=(3,), rng=rng)
    f = synk.function(outputs=(draw, None), updates={rng: following})
    assert len(np.unique([f(), f()])) == 12
    with pytest.raises(synk.InvalidType, match=r"a collective takes variables that hold arrays; stream"):
        synk.broadcast(noise(0)[0])
    with pytest.raises(
        synk.InvalidType, match=r"an input of the function 'graph of r' is .*only dense tensors"
    ):
        synk.function([rng.type("r")], outputs=T.constant(1.0))


def test_default_updates_count():
    x, count = T.vector("x"), pytensor.shared(0.0, name="count")
    with default_updates():
        count.default_update = count + 1
    f = synk.function([x], x.sum() * 0 + count)
    f_th = pytensor.function([x], x.sum() * 0 + count)
    assert [float(f(np.ones(4))) for _ in range(3)] == [0, 1, 2]
    assert count.get_value() == 3
    assert [float(f_th(np.ones(4))) for _ in range(2)] == [3, 4]
    assert f(np.ones(4)) == 5
    still = synk.function([x], x.sum() * 0 + count, no_default_updates=True)
    assert still(np.ones(4)) == still(np.ones(4)) == 6
    other = synk.function([x], x.sum() * 0 + count, updates=[(count, count + 10)])
    assert [float(other(np.ones(4))) for _ in range(2)] == [6, 16]


def test_inputs_may_be_wrapped_in_in():
    x, y = T.fmatrix("x"), T.fvector()
    x_in, y_in = pytensor.In(x, borrow=True, allow_downcast=True), pytensor.In(y, name="y")
    f = synk.function([x_in], x.dot(y).mean(), [y_in])
    with pytest.raises(synk.InvalidType, match=r"'y' .* holds float32, and a cast of float64"):
        f(ROWS, y=np.ones(4))
    assert np.allclose(f(ROWS, y=np.ones(4, "f4")), ROWS.sum(axis=1).mean(), atol=1e-5)
    w = pytensor.shared(np.zeros(4, "f4"))
    with pytest.raises(synk.NotAvailable, match=r"has In\(y, implicit=…\): use a shared variable"):
        synk.function([x, pytensor.In(y, name="y", value=w)], x.dot(y).mean())


def test_outputs_may_be_wrapped_in_out():
    x = T.matrix("x")
    total, mean = pytensor.Out(x.sum(), borrow=True), pytensor.Out(x.mean(axis=0))
    assert np.allclose(synk.function([x], mean)(ROWS), ROWS.mean(axis=0))
    found = synk.function([x], [(total, "sum"), mean])(ROWS)
    assert np.allclose(found[0], ROWS.sum())
    assert np.allclose(found[1], ROWS.mean(axis=0))


def test_a_value_that_did_not_reach_the_workers_is_sent_again(workers, monkeypatch):
    w = pytensor.shared(np.zeros(2), name="w")
    show = synk.function(outputs=(w, None))
    show()
    w.set_value(np.ones(2))

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Collectives, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            show()
    assert np.array_equal(show(), np.ones((2, 2)))


def failing_on_the_last_rank(name, **options):
    """A graph that counts up w, and fails on a rank that sees the row 100."""
    x = T.dvector("x")
    w = pytensor.shared(np.zeros(2), name="w")
    checked = pytensor.raise_op.assert_op(x.sum(), T.lt(x.max(), 100))
    return w, synk.function(inputs=[x], outputs=checked, updates=[(w, w + x.size)], name=name, **options)


def test_updates_are_made_on_all_ranks_or_on_none():
    w, f = failing_on_the_last_rank("count")
    with pytest.raises(synk.WorkerError, match="'count'"):
        f(np.arange(101.0))
    np.testing.assert_array_equal(synk.gather(w), np.zeros((2, 2)))
    f(np.arange(100.0))
    np.testing.assert_array_equal(synk.gather(w), np.full((2, 2), 50))


def test_what_is_set_after_a_failed_call_counts(workers, monkeypatch):
    w, f = failing_on_the_last_rank("count")
    f(np.arange(10.0))
    backup = w.get_value()

    really_perform = Engine.perform

    def interrupted(*args, **kwargs):
        really_perform(*args, **kwargs)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:  # too late: the ranks have counted on
        patch.setattr(Engine, "perform", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(np.arange(10.0))
    assert synk.get_value(0, w).tolist() == w.get_value().tolist() == [10, 10]  # came here since
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "perform", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f(np.arange(10.0))
    w.set_value(backup)
    assert synk.gather(w).tolist() == [[5, 5]] * 2
    w.set_value(np.zeros(2))
    f(np.arange(10.0))
    w.set_value(-np.zeros(2))
    w.set_value(np.array([-0.0, 0.0]))
    assert np.signbit(synk.get_value(1, w)).tolist() == [True, False]


def test_threads_may_set_and_use_variables_at_once():
    x = T.dvector("x")
    v, w = pytensor.shared(np.zeros(2), name="v"), pytensor.shared(np.zeros(()), name="w")
    f = synk.function(inputs=[x], outputs=x.sum() + w, updates=[(w, w + 1)])
    f(ROWS[:, 0])
    ended = threading.Event()

    def reduce():
        while not ended.is_set():
            v.set_value(v.get_value() + 1)
            synk.all_reduce(v)

    other = threading.Thread(target=reduce)
    other.start()
    try:
        for number in range(100):
            w.set_value(np.array(float(number)))
            assert f(np.zeros(4)) == number
            assert w.get_value() == number + 1
    finally:
        ended.set()
        other.join()


def test_making_a_function_computes_nothing(workers):
    seen = []

    class Watched(pytensor.graph.op.Op):
        __props__ = ()
        itypes = otypes = (T.dmatrix,)

        def perform(self, node, inputs, outputs):
            seen.append(inputs[0].shape)
            outputs[0][0] = inputs[0]

        def infer_shape(self, *given):  # the graph too, before version 3.3
            return given[-1]

    x = T.dmatrix("x")
    synk.function(inputs=[x], outputs=Watched()(x).sum())
    assert set(seen) == {(0, 0)}


def test_shapes_that_the_graph_fixes():
    x, y = T.tensor("x", shape=(None, 3), dtype="float64"), T.tensor("y", shape=(1, 3), dtype="float64")
    f = synk.function(inputs=[x], bcast_inputs=[y], outputs=x.sum() + y.sum())
    assert f(np.ones((4, 3)), np.ones((1, 3))) == 9
    with pytest.raises(InvalidValue, match=r"'x' .*shape \(any, 3\) in the graph, got .*\(4, 2\)"):
        f(np.ones((4, 2)), np.ones((1, 3)))
    with pytest.raises(InvalidValue, match=r"'y' .*shape \(1, 3\) in the graph"):
        f(np.ones((4, 3)), synk.data(np.ones((2, 3))))
    with pytest.raises(InvalidValue, match=r"input y .*scattered by rows.*fixes their number"):
        synk.function(inputs=[y], outputs=y.sum())


# ── training ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("make", "slices"), [(lambda p, r: ext.sgd(p, r), 1), (lambda p, r: ext.adam(p, r), 3)]
)
def test_a_training_step_of_a_graph_is_the_serial_one(make, slices):
    x, t = T.matrix("x"), T.vector("t")
    w, b = pytensor.shared(np.zeros(4), name="w"), pytensor.shared(0.0, name="b")
    loss = ((x.dot(w) + b - t) ** 2).mean()
    rate = pytensor.shared(0.1)
    train = ext.make_train_function(loss, [w, b], x, t, make([w, b], rate))
    v, c = synk.shared(np.zeros(4)), synk.shared(0.0)

    def loss_and_grad(x, t):
        error = x @ v.value + c.value - t
        return (error**2).mean(), [2 * x.T @ error / len(x), 2 * error.mean()]

    plain = ext.make_train_function(loss_and_grad, [v, c], make([v, c], 0.1))
    targets = ROWS @ np.arange(4.0) + 1
    rng = np.random.default_rng(1)
    for size in [*rng.integers(1, 101, 20), 1]:  # also fewer rows than ranks
        batch = rng.permutation(101)[:size]
        got = train(ROWS, targets, batch=batch, num_slices=slices)
        np.testing.assert_allclose(got, plain.as_serial(ROWS[batch], targets[batch]))
        np.testing.assert_allclose(w.get_value(), v.get_value())
        np.testing.assert_allclose(b.get_value(), c.get_value())
    assert all(np.array_equal(one, w.get_value()) for one in synk.gather(w))
    rate.set_value(0.0)
    before = w.get_value()
    train(ROWS, targets)
    np.testing.assert_allclose(w.get_value(), before)
    w.set_value(np.ones(4))  # reaches the workers with the next call
    error = ROWS @ np.ones(4) + b.get_value() - targets
    np.testing.assert_allclose(train(ROWS, targets), (error**2).mean())
    train.as_serial(ROWS, targets)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda x, w, loss: (loss, [w], x), "last argument must be an update rule"),
        (lambda x, w, loss: (x, [w], x, ext.sgd([w])), "float without dimensions"),
        (lambda x, w, loss: (loss, [w], ext.sgd([w])), "do not fit its graph"),
        (lambda x, w, loss: (lambda x: x, [w], x, ext.sgd([w])), "named, in inputs="),
        (lambda x, w, loss: (x.sum(), [w], x, ext.sgd([w])), "does not depend on the parameter w"),
    ],
)
def test_what_is_no_training_step_is_refused_in_words(made, message):
    x, w = T.matrix("x"), pytensor.shared(np.zeros(4), name="w")
    with pytest.raises(synk.UsageError, match=message):
        ext.make_train_function(*made(x, w, (x.dot(w) ** 2).mean()))


@pytest.mark.parametrize("bcast", [[], ["v"]], ids=["scattered", "broadcast"])
def test_a_shared_variable_is_no_argument(bcast):
    """A function of Python would make a graph of it."""
    w = pytensor.shared(np.ones(4), name="w")
    f = synk.function(lambda v: v.sum(), outputs="sum", bcast_inputs=bcast)
    x = T.vector("x")
    for name, call in {"v": f, "x": synk.function([x], x.sum())}.items():
        with pytest.raises(synk.InvalidType, match=f"'{name}' .* is a shared .*: give its values"):
            call(w)
