"""Graphs of PyTensor over several devices: where operations run, what moves, and equal results."""

from collections import deque

import numpy as np
import pytest

import synkro as synk
from support.sessions import current
from support.streams import random_draw
from synkro import InvalidType, InvalidValue, NotAvailable, NotForked, UsageError
from synkro import extensions as ext

pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")
T = pytensor.tensor

from pytensor.graph.basic import Constant  # noqa: E402

from support.examples import examples, given, st  # noqa: E402
from synkro.comms import board  # noqa: E402
from synkro.graphs import cut as cuts  # noqa: E402
from synkro.graphs.cut import Cut, Receive, Run, Send  # noqa: E402

pytestmark = [pytest.mark.pymc, pytest.mark.counted_once, pytest.mark.usefixtures("named")]

NUMBERS = np.random.default_rng(0)


@pytest.fixture(scope="module", autouse=True)
def interpreted():
    """Python's own loops: what numba compiles takes seconds a graph; one test below waits for that."""
    with pytensor.config.change_flags(mode="FAST_COMPILE"):
        yield


def shared(value, target=None, name=None):
    variable = pytensor.shared(np.array(value), name=name)
    return variable if target is None else synk.place(variable, target)


def matrix(*shape):
    return NUMBERS.standard_normal(shape)


def moves(function):
    """The transfers of a placed graph."""
    return [row.device for row in function.placement() if row.operation.startswith("transfer of")]


# ── the program of the reference ─────────────────────────────────────────────────────────────────────


@pytest.mark.filterwarnings("ignore:PyTensor could not link to a BLAS")  # of PyTensor's, by pip
def test_two_products_on_two_devices():
    with pytensor.config.change_flags(mode="Mode"):  # compiled
        v01, v02 = (shared(matrix(64, 64).astype("float32"), "dev0") for _ in range(2))
        v11, v12 = (shared(matrix(64, 64).astype("float32"), "dev1") for _ in range(2))
        f = synk.function([], [T.dot(v01, v02), T.dot(v11, v12)])
        first, second = f()
    assert first.dtype == second.dtype == np.float32
    np.testing.assert_allclose(first, v01.get_value() @ v02.get_value(), atol=1e-4)
    np.testing.assert_allclose(second, v11.get_value() @ v12.get_value(), atol=1e-4)
    assert sorted(row.device for row in f.placement()) == ["dev0", "dev1"]
    assert moves(f) == []
    alone = f.as_serial()
    np.testing.assert_allclose(alone[0], first, atol=1e-4)


def test_the_explicit_transfers_of_the_reference():
    v = T.fmatrix()
    gv = v.transfer("dev1")
    cv = gv.transfer("cpu")
    f = synk.function([v], [gv + 1, cv * 2])
    rows = matrix(3, 2).astype("float32")
    for got, want in zip(f(rows), (rows + 1, rows * 2), strict=True):
        np.testing.assert_array_equal(got, want)
    assert {row.device for row in f.placement() if row.operation in ("Add", "Mul")} == {"dev1"}


# ── where, and what moves ────────────────────────────────────────────────────────────────────────────


def test_an_operation_runs_where_its_first_placed_input_is():
    x, a, b = T.vector("x"), shared([1.0, 2.0], 1, "a"), shared([3.0, 4.0], 2, "b")
    f = synk.function([x], (x * a) - b)
    np.testing.assert_array_equal(f([10.0, 10.0]), [7, 16])
    assert [(row.operation, row.device, row.nbytes) for row in f.placement()] == [
        ("transfer of b", ("dev2", "dev1"), 16),
        ("Mul", "dev1", 0),
        ("Sub", "dev1", 0),
    ]


def test_a_value_moves_to_a_device_once():
    a, b = shared(2.0, 0, "a"), shared(3.0, 1, "b")
    y = T.sqr(a)
    f = synk.function([], [b * y, b + y, (y.transfer("dev1") - b).transfer("dev2")])
    assert [float(value) for value in f()] == [12, 7, 1]
    assert moves(f) == [("dev0", "dev1"), ("dev1", "dev2")]


def test_what_has_no_place_runs_where_it_is_needed():
    """Instead of moving it: both devices compute it for themselves."""
    x, a, b, free = T.vector("x"), shared(2.0, 0), shared(3.0, 1), shared(10.0)
    y = x + free
    f = synk.function([x], [a * y, b * y, x * 2])
    assert [value.tolist() for value in f([1.0])] == [[22], [33], [2]]
    assert moves(f) == []
    devices = {row.operation: row.device for row in f.placement()}
    assert ["dev0", "dev1"] in [row.device for row in f.placement()]
    assert devices["Add"] == ["dev0", "dev1"]


def test_transfers_to_the_master_rank_and_by_the_function():
    x, a = T.vector("x"), shared([1.0, 2.0], "dev2", "a")
    y = a * x
    f = synk.function([x], [y.transfer(None) + 1, synk.transfer(y, "dev1") + 2, synk.transfer(y, "cpu")])
    assert [value.tolist() for value in f([1.0, 1.0])] == [[2, 3], [3, 4], [1, 2]]
    assert moves(f) == [("dev2", "dev0"), ("dev2", "dev1")]


def test_calls_leave_nothing_to_be_looked_at_again(monkeypatch):
    """What a function holds is compared at each call: what a call moved is no part of it."""
    w, x = shared(matrix(3, 3), "dev0"), T.matrix("x")
    product = synk.function([x], x.dot(w).transfer("dev1") + 1)
    bring, brought = type(product)._bring, []

    def counted(function, *args):
        brought.append(function)
        return bring(function, *args)

    monkeypatch.setattr(type(product), "_bring", counted)
    for rows in range(40):
        product(np.ones((rows, 3)))
    assert len(brought) < 20  # in calls 1, 2, 4, 8 … all is looked at
    assert product.placement()[-2].nbytes == 39 * 3 * 8


def test_the_table_as_text():
    a, b = shared([1.0, 2.0], 1, "a"), shared([3.0, 4.0], 2, "b")
    f = synk.function([], a * b)
    table = f.placement()
    assert repr(table).splitlines() == [
        "operation      device        bytes moved",
        "transfer of b  dev2 -> dev1  ?",
        "Mul            dev1",
    ]
    f()
    assert repr(f.placement()).splitlines()[1] == "transfer of b  dev2 -> dev1  16"


def test_the_table_names_ranks_without_names():
    from synkro.graphs.placed import PlacementRow, PlacementTable

    rows = [PlacementRow("Mul", 0, 0), PlacementRow("transfer of b", (1, 0), 16)]
    assert repr(PlacementTable(rows)).splitlines() == [
        "operation      device  bytes moved",
        "Mul            0",
        "transfer of b  1 -> 0  16",
    ]


def test_a_whole_graph_on_one_device():
    x = T.vector("x")
    f = synk.function([x], (x * 2).sum(), target="dev2")
    assert f([1.0, 2.0]) == 6
    assert {row.device for row in f.placement()} == {"dev2"}


def test_outputs_that_are_not_computed():
    a, x = shared([1.0, 2.0], 1, "a"), T.scalar("x")
    f = synk.function([x], [a, x, T.constant(5.0), a.transfer("dev2")])
    got = f(3.0)
    assert [np.asarray(value).tolist() for value in got] == [[1, 2], 3, 5, [1, 2]]
    assert moves(f) == [("dev1", "dev2")]


@pytest.mark.parametrize("length", [3, 100_000])
def test_outputs_are_arrays_of_their_own(length):
    a, x = shared(np.ones(length), 1, "a"), T.vector("x")
    f = synk.function([x], [a, a, x, x, a + 0])
    for _ in range(2):
        for number, output in enumerate(f(np.ones(length))):
            np.testing.assert_array_equal(output, np.ones(length))
            output += number + 1  # which changes no other


def test_one_of_the_outputs():
    a, b = shared(1.0, 0), shared(2.0, 1)
    f = synk.function([], [a + 1, b + 1, a + b])
    assert f(output_subset=[2, 0]) == [3, 2]
    g = synk.function([], a + 5)
    assert g() == 6


# ── models over several devices ──────────────────────────────────────────────────────────────────────


def network(places):
    """A loss, its inputs and its parameters, of which some have places."""
    x, t = T.matrix("x"), T.vector("t")
    rng = np.random.default_rng(1)
    w1 = shared(rng.standard_normal((4, 6)), places[0], "w1")
    w2 = shared(rng.standard_normal((6, 6)), places[1], "w2")
    w3 = shared(rng.standard_normal(6), places[2], "w3")
    bias = shared(0.5, None, "bias")
    moved = lambda value, place: value if place is None else value.transfer(place)  # noqa: E731
    hidden = T.tanh(moved(T.tanh(x.dot(w1)), places[1]).dot(w2)) + bias
    hidden = moved(hidden, places[2])
    return [x, t], ((hidden.dot(w3) - t) ** 2).mean(), [w1, w2, w3, bias]


ROWS, ANSWERS = matrix(20, 4), matrix(20)


def trained(make, places):
    inputs, loss, params = network(places)
    updates = [(p, p - 0.1 * g) for p, g in zip(params, T.grad(loss, params), strict=True)]
    step = make(inputs, loss, updates=updates)
    losses = [float(step(ROWS, ANSWERS)) for _ in range(5)]
    return losses, [p.get_value() for p in params], step


@pytest.mark.parametrize("places", [("dev0", "dev1", "dev2"), (2, 0, 2), (1, None, 0), (None, None, 2)])
def test_training_is_that_of_one_device(places):
    losses, weights, step = trained(synk.function, places)
    want_losses, want, _ = trained(pytensor.function, (None, None, None))
    np.testing.assert_allclose(losses, want_losses, rtol=1e-12)
    for got, expected in zip(weights, want, strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-10)
    assert losses[-1] < losses[0]
    with pytest.raises(UsageError, match=r"check\(\) compares calls whose rows are split"):
        step.check(ROWS, ANSWERS)


def test_gradients_stay_where_the_weights_are():
    """Only activations and their gradients move, twice each, and the new bias to all others."""
    *_, step = trained(synk.function, ("dev0", "dev1", "dev2"))
    rows = [row for row in step.placement() if row.operation.startswith("transfer of")]
    large = [row.device for row in rows if row.nbytes == ROWS.shape[0] * 6 * 8]
    one, two, three = "dev0", "dev1", "dev2"
    assert sorted(large) == [(one, two), (two, one), (two, three), (three, two)]
    assert all(row.nbytes <= 8 for row in rows if row.device not in large)


def test_values_that_are_set_here_reach_the_device_and_come_back():
    w = shared([1.0, 2.0], "dev1", "w")
    f = synk.function([], w.sum(), updates=[(w, w * 2)])
    assert (f(), f()) == (3, 6)
    w.set_value(np.ones(3))
    assert f() == 3
    assert w.get_value().tolist() == [2, 2, 2]
    assert f.as_serial() == 6
    assert w.get_value().tolist() == [4, 4, 4]
    assert f() == 12


def test_a_variable_without_a_place_is_updated_on_all_ranks():
    free, w = shared(1.0, None, "free"), shared(2.0, "dev1", "w")
    f = synk.function([], [], updates=[(free, free + w)])
    f()
    g = synk.function([], (free + 0.0, None))  # on all ranks
    assert [float(value) for value in g()] == [3, 3, 3]


def test_nothing_is_assigned_where_one_part_fails():
    first, second = shared(np.ones(3), 0, "first"), shared(np.ones((3, 3)), 1, "second")
    x = T.matrix("x")
    f = synk.function([x], [], updates=[(first, first + 1), (second, second.dot(x))])
    with pytest.raises(ValueError, match=r"rank 1 failed in the function"):
        f(np.ones((2, 2)))
    assert first.get_value().tolist() == [1, 1, 1]
    f(np.eye(3))
    assert first.get_value().tolist() == [2, 2, 2]


def test_gradients_of_gradients():
    x, a = T.vector("x"), shared([2.0, 3.0], 1)
    y = ((x * a).transfer("dev2") ** 3).sum()
    twice = T.grad(T.grad(y, x).sum(), x)
    given = np.array([1.0, 2.0])
    want = pytensor.function([x], twice)(given)
    np.testing.assert_allclose(synk.function([x], twice)(given), want)


def test_pytensors_own_functions_know_nothing_of_transfers():
    x = T.vector("x")
    y = (x.transfer("dev1") * 2).sum()
    f = pytensor.function([x], [y, T.grad(y, x)])
    assert [value.tolist() for value in f([1.0, 2.0])] == [6, [2, 2]]
    assert "Transfer" not in str([node.op for node in f.maker.fgraph.apply_nodes])
    plain = pytensor.function([x], y, mode=pytensor.compile.mode.Mode("py", None))
    assert plain([1.0, 2.0]) == 6


SIZES = st.integers(0, 3)
CHOICES = st.lists(
    st.tuples(st.integers(0, 3), SIZES, SIZES, st.integers(-1, 4)), min_size=1, max_size=12
)


@given(CHOICES, st.lists(st.sampled_from([None, 0, 1, 2]), min_size=4, max_size=4))
@examples(15)
def test_random_graphs_are_those_of_one_device(named_forked, choices, places):
    def built(place):
        x = T.vector("x")
        rng = np.random.default_rng(3)
        known = [x, *(shared(rng.standard_normal(3), place(where)) for where in places)]
        for kind, one, other, target in choices:
            a, b = known[-1 - one % len(known)], known[other % len(known)]
            made = [a + b, a * b, T.tanh(a), a.sum() * b][kind]
            known.append(made if target < 0 or target > 2 else made.transfer(target))
        loss = known[-1].sum()
        return x, [*known[5:], loss, T.grad(loss, x, disconnected_inputs="ignore")]

    with current(named_forked):
        x, outputs = built(lambda where: where)
        given_x = np.array([0.5, -1.0, 2.0])
        f = synk.function([x], outputs, on_unused_input="ignore", target=0)
        got = f(given_x)
    x, outputs = built(lambda where: None)
    want = pytensor.function([x], outputs, on_unused_input="ignore")(given_x)
    for one, other in zip(got, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


# ── the cut by itself ────────────────────────────────────────────────────────────────────────────────


def evaluated(places, targets):
    """A stand-in for a compiled function: by the operations' own ``perform``."""

    def program(*values):
        known = dict(zip(places, values, strict=True))

        def value(variable):
            if isinstance(variable, Constant):
                return variable.data
            if variable not in known:
                node, outputs = variable.owner, [[None] for _ in variable.owner.outputs]
                node.op.perform(node, [np.asarray(value(each)) for each in node.inputs], outputs)
                known.update((out, cell[0]) for out, cell in zip(node.outputs, outputs, strict=True))
            return known[variable]

        return [value(target) for target in targets]

    return program


def simulated(cut, values):
    """The values that each rank ends with; ranks wait as on the board."""
    held = {rank: dict(values) for rank in cut.steps}
    todo = {rank: deque(steps) for rank, steps in cut.steps.items()}
    boxes = {(a, b): deque() for a in cut.steps for b in cut.steps}
    moved = True
    while moved:
        moved = False
        for rank, steps in todo.items():
            while steps:
                step = steps[0]
                if isinstance(step, Receive):
                    if not boxes[step.source, rank]:
                        break
                    key, value = boxes[step.source, rank].popleft()
                    assert key == step.key
                    held[rank][key] = value
                elif isinstance(step, Send):
                    if len(boxes[rank, step.to]) == board.SLOTS:
                        break
                    boxes[rank, step.to].append((step.key, held[rank][step.key]))
                else:
                    assert isinstance(step, Run)
                    results = step.program(*[held[rank][key] for key in step.takes])
                    held[rank].update(zip(step.gives, results, strict=True))
                steps.popleft()
                moved = True
    assert not any(todo.values()), "they wait for each other"
    return held


def check_cut(sources, wanted):
    """Each rank that wants a value ends with it: *sources* have places, *wanted* the ranks."""
    assert cuts.SLOTS == board.SLOTS
    cut = Cut(sources, wanted, 0, int, evaluated)
    given = dict(zip(sources, np.arange(1.0, 1 + len(sources)), strict=True))
    start = {cut.key(source): value for source, value in given.items()}
    held = simulated(cut, start)
    want = evaluated(list(given), [variable for variable, _ in wanted])(*given.values())
    for (variable, ranks), end, value in zip(wanted, cut.ends, want, strict=True):
        for rank in (*ranks, end):
            assert held.get(rank, start)[cut.key(variable)] == value


RANKS = 4
PICKS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 40), st.sampled_from([None, *range(RANKS)])),
    min_size=1,
    max_size=60,
)


@given(PICKS, st.lists(st.sampled_from([None, *range(RANKS)]), min_size=1, max_size=8))
@examples(60)
def test_no_cut_makes_ranks_wait_for_ever(picks, places):
    sources = {T.dscalar(f"s{n}"): place for n, place in enumerate(places)}
    known = list(sources)
    for one, other, target in picks:
        made = known[-1 - one % len(known)] + 2.0 * known[other % len(known)]
        known.append(made if target is None else made.transfer(target))
    check_cut(sources, [(each, () if n % 3 else (n % RANKS,)) for n, each in enumerate(known)])


@pytest.mark.parametrize("count", [8, 9, 40])
def test_more_messages_than_a_box_takes(count):
    """One rank has much for another that needs it late, and waits for what depends on a third one."""
    a, b, c = T.dscalar("a"), T.dscalar("b"), T.dscalar("c")
    many = [a + float(number) for number in range(count)]
    late = (many[-1].transfer(2) + c).transfer(1) + b
    last = sum(((late + each.transfer(1)).transfer(1) for each in many), start=late)
    check_cut({a: 0, b: 1, c: 2}, [(last, ())])


@pytest.mark.parametrize("ring", [2, 3])
@pytest.mark.parametrize("counts", [(8,), (9,), (5, 5), (40,), (8, 1, 8), (3, 20, 7)])
def test_ranks_that_have_much_for_each_other_on_a_level(ring, counts):
    """As the running means of a deep network, which have no place: each rank needs all of the other."""
    sources = {T.dscalar(f"s{rank}"): rank for rank in range(ring)}
    begun, sent = list(sources), []
    for count in counts:
        made = [
            [(one * (n + 2.0)).transfer((r + 1) % ring) for n in range(count)]
            for r, one in enumerate(begun)
        ]
        sent += [(each, ((rank + 1) % ring,)) for rank, several in enumerate(made) for each in several]
        begun = [made[rank - 1][0] + 1.0 for rank in range(ring)]  # the others are not needed here
    check_cut(sources, sent)


def test_many_running_means_without_a_place():
    """Each device has half of the layers; every rank needs all means."""
    x, rows = T.matrix("x"), matrix(4, 2)
    weights = [shared(matrix(2, 2), f"dev{n % 2}") for n in range(20)]
    means = [shared(np.zeros(2)) for _ in weights]
    outputs = [T.tanh(x.dot(weight)).mean(axis=0) for weight in weights]
    updates = [(mean, 0.9 * mean + 0.1 * one) for mean, one in zip(means, outputs, strict=True)]
    step = synk.function([x], outputs[-1].sum(), updates=updates)
    step(rows)
    for mean, weight in zip(means, weights, strict=True):
        want = 0.1 * np.tanh(rows @ weight.get_value()).mean(axis=0)
        assert np.allclose(synk.gather(mean), want)


def test_many_variables_change_their_devices():
    known = [shared(float(number), number % 2) for number in range(24)]
    f = synk.function([], [], updates=list(zip(known, known[1:] + known[:1], strict=True)))
    f()
    assert [float(each.get_value()) for each in known] == [*range(1, 24), 0]


def test_a_place_stays_in_the_next_session():
    w, x = pytensor.shared(np.arange(3.0), name="w"), T.vector("x")
    with synk.Session(devices="a->cpu;b->cpu", verbose=False, timeout=60) as first:
        first.place(w, "b")
        with current(first):
            f = synk.function([x], (x * w).sum(), updates=[(w, w + 1)])
            assert f(np.ones(3)) == 3
    with synk.Session(devices="b->cpu;a->cpu", verbose=False, timeout=60) as second, current(second):
        assert f(np.ones(3)) == 6  # the sum of the whole rows, not a mean of the ranks
        assert {row.device for row in f.placement()} == {"b"}
        assert second.get_value(0, w).tolist() == [2, 3, 4]
    with (
        synk.Session(2, devices="cpu", verbose=False, timeout=60) as third,
        current(third),
        pytest.raises(InvalidValue, match=r"w was placed on 'b': target='b' names no device.* Place it"),
    ):
        f(np.ones(3))
    with synk.Session(2, devices="cpu", verbose=False, timeout=60) as last, current(last):
        synk.place(w, 0)
        assert f(np.ones(3)) == 9


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_places():
    w = shared(np.ones(2), name="w")
    with pytest.raises(InvalidValue, match=r"target='dev7' names no device.*Did you mean 'dev"):
        synk.place(w, "dev7")
    with pytest.raises(InvalidValue, match="target=3 is no rank"):
        synk.place(w, 3)
    assert synk.place(w, 1) is w
    assert synk.place(w, "dev1") is w
    with pytest.raises(UsageError, match="w is on rank 1 already: place a variable once"):
        synk.place(w, 0)
    used = shared(np.ones(2), name="used")
    synk.function([], (used.sum(), "sum"))
    with pytest.raises(UsageError, match="used is on all ranks already"):
        synk.place(used, 0)
    for wrong in (
        np.ones(3),
        T.vector("x"),
        synk.shared([1.0]),
        pytensor.shared(np.random.default_rng()),
        pytensor.shared([1, 2]),  # a list, and no array
    ):
        with pytest.raises(InvalidType, match=r"place\(\) takes a shared variable of PyTensor's"):
            synk.place(wrong, 0)


@pytest.mark.parametrize("first", ["Session(2, verbose=False)", "place(w, 0)"])
def test_transfers_are_known_from_then_on(run_python, first):
    """Also where PyTensor comes after Synkro."""
    run_python(f"""
import synkro as synk
if "place" in {first!r}:
    synk.fork(2, verbose=False)
import pytensor
w = pytensor.shared(1.0)
session = synk.{first}
(w * 2).transfer(1)
""")


def test_place_needs_workers(monkeypatch):
    monkeypatch.setattr(synk.here, "session", None)
    with pytest.raises(NotForked, match=r"no workers yet for place\(\)"):
        synk.place(pytensor.shared(1.0), 0)


def test_transfers_to_nowhere():
    x = T.vector("x")
    with pytest.raises(InvalidValue, match="target='nowhere' names no device"):
        synk.function([x], x.transfer("nowhere"))
    with pytest.raises(ValueError, match="Can't transfer to target"):
        x.transfer(2.5)
    with pytest.raises(InvalidValue, match="target='dev9' names no device"):
        synk.function([x], x * 2, target="dev9")


def test_what_a_placed_graph_does_not_have():
    x, t, w = T.matrix("x"), T.vector("t"), shared(np.ones(2), 1, "w")
    rng = pytensor.shared(np.random.default_rng(0))
    y = x.dot(w)
    draw = random_draw(T.random.normal, 0, 1, size=2, rng=rng)[1]
    loss, sgd, f = ((y - t) ** 2).mean(), ext.sgd([w], 0.1), synk.function
    once = "runs once, on whole inputs, and there is nothing to reduce"
    for call, error, says in (
        (lambda: f([x], (y, "sum")), InvalidValue, once),
        (lambda: f([x], [(y, "gather")]), InvalidValue, once),
        (lambda: f([x], [y, (y, None)]), InvalidValue, once),
        (lambda: f([x], y, updates=[(w, w + 1, "max")]), InvalidValue, "there is nothing to reduce"),
        (lambda: f([], draw + w), NotAvailable, "random streams .*, and is placed on devices"),
        (lambda: f([x], y, sliceable_shareds=[w]), InvalidValue, "for graphs whose rows are sliced"),
        (lambda: f([], y), InvalidValue, "x is needed, and is not listed"),
        (lambda: f([x, t], y), InvalidValue, "t is listed, and is not used"),
        (
            lambda: ext.make_train_function(loss, [w], x, t, sgd),
            InvalidValue,
            "make_train_function scatters the rows over all ranks",
        ),
    ):
        with pytest.raises(error, match=says):
            call()
    assert f([x, t], y, on_unused_input="ignore")([[1.0, 2.0]], [0.0]).tolist() == [3]


def test_calls_of_a_placed_graph():
    x, w = T.vector("x"), shared(np.ones(2), 1, "w")
    f = synk.function([x], x + w)
    assert f.submit([1.0, 2.0]).result().tolist() == [2, 3]
    with pytest.raises(InvalidType, match="x"):
        f(["a", "b"])
    with pytest.raises(InvalidValue, match="batch"):
        f([1.0, 2.0], batch=1)
    with pytest.raises(ValueError, match="rank 1 failed in the function"):
        f([1.0, 2.0, 3.0])
    assert f([1.0, 2.0]).tolist() == [2, 3]
    with pytest.raises(UsageError, match=r"placement\(\) is for graphs of PyTensor"):
        synk.function(np.sum).placement()


def test_a_placed_variable_in_collectives():
    w = shared(np.ones(2), 1, "w")
    assert synk.get_value(1, w).tolist() == [1, 1]
    with pytest.raises(InvalidValue, match="is on rank 1 alone"):
        synk.get_value(0, w)
    with pytest.raises(InvalidValue, match="is on rank 1 alone"):
        synk.all_reduce(w)
