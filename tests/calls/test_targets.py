"""``target=``: functions on one rank, or on some, beside each other."""

import concurrent.futures
import json
import os
import sys
import time
from collections import Counter

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.inside import in_phase
from support.sessions import LARGE, current, per_rank
from support.together import good, together
from support.waiting import wait_until
from synkro.messages import Phase

pytestmark = pytest.mark.counted_once

X = np.arange(12.0).reshape(6, 2)
FACTOR = 1


@pytest.fixture
def pair(two_forked):
    with current(two_forked):
        yield two_forked
        assert per_rank(lambda: synk.all_reduce(np.ones(2), "sum").tolist() == [2, 2]) == [1] * 2


def meet(path, other):
    """Say that one is there, and wait for the other: a call that runs by itself never returns."""
    path.touch()
    deadline = time.monotonic() + 20
    while not other.exists():
        assert time.monotonic() < deadline, "nobody else is there"
        time.sleep(0.001)
    return synk.rank(), synk.size()


# ── where functions run ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("target", "ranks"),
    [
        (0, [0]),
        (2, [2]),
        ([1], [1]),
        ([0, 2], [0, 2]),
        ((2, 1), [1, 2]),
        ([0, 1, 2], [0, 1, 2]),
        (None, [0, 1, 2]),
    ],
)
def test_a_function_runs_on_the_ranks_that_it_names(target, ranks, three):
    pids = [three.pids[rank] for rank in ranks]
    found = synk.function(lambda: (os.getpid(), synk.rank(), synk.size()), outputs=None, target=target)()
    assert found == [(pid, place, len(ranks)) for place, pid in enumerate(pids)]


def test_names_of_devices_and_of_contexts():
    with synk.Session(devices="left->cpu0;right->cpu1", verbose=False) as session:
        for target, rank in [("left", 0), ("right", 1), ("cpu0", 0), ("cpu:1", 1), (1, 1)]:
            assert session.function(os.getpid, target=target)() == session.pids[rank]
        names = r"and the names left, cpu0, right, cpu1\. Did you mean 'right'"
        with pytest.raises(synk.InvalidValue, match=names):
            session.function(len, target="rigt")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (3, "no rank: this session has 3 ranks, 0 to 2"),
        (-1, "no rank"),
        ("dev0", "names no device of this session"),
        ("cpu", r"a name of the ranks 0, 1, 2: give the number of one(, or give each a name|\.)"),
        ([], "names no rank: name at least one"),
        ([1, 1], "names rank 1 twice"),
        (True, "a target is a context name, a device or a rank"),
        (1.0, "a target is a context name, a device or a rank"),
        ([[0]], "a target is a context name, a device or a rank"),
    ],
)
def test_targets_that_are_none(target, message, three):
    with pytest.raises(synk.UsageError, match=message):
        synk.function(len, target=target)


# ── what they give and take ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "value",
    [
        *(3, 2.5, "text", None, (1, "a"), {"k": [1, 2]}),
        *(np.arange(5), np.ones((3, 2), "f4"), np.arange(1.0 * LARGE), [np.ones(2), np.zeros(3)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_function_on_one_rank_returns_what_it_returns(value, pair):
    got = synk.function(lambda: value, target=1)()
    if isinstance(value, np.ndarray):
        assert got.dtype == value.dtype
        assert np.array_equal(got, value)
    elif isinstance(value, list):
        assert all(map(np.array_equal, got, value))
    else:
        assert got == value
        assert type(got) is type(value)


def test_inputs_arrive_whole_on_one_rank(pair):
    f = synk.function(lambda x, y, *more, label: (x.shape, y.shape, more, label), target=0)
    assert f(X, X[:, 0], label="a") == ((6, 2), (6,), (), "a")
    assert f(X, X[:2], None, {"k": 1}, label=3) == ((6, 2), (2, 2), (None, {"k": 1}), 3)
    g = synk.function(lambda x, y: (x.shape, y.shape), inputs=["x"], target=np.int64(0))
    assert g(X, X[0], batch=2) == ((2, 2), (2,))


def test_slices_on_one_rank_need_an_operation(pair):
    f = synk.function(lambda x: x.sum(), inputs=["x"], target=0)
    with pytest.raises(synk.OutputError, match="one value, and num_slices= made several"):
        f(X, num_slices=2)
    f = synk.function(lambda x: x.sum(), inputs="x", outputs="sum", target=0)
    assert f(X, num_slices=2) == X.sum()
    assert f(X, batch=[1, 3]) == X[[1, 3]].sum()


@examples(40)
@given(data=st.data())
def test_a_world_of_some_ranks_computes_what_one_process_does(data, three_forked):
    op = data.draw(st.sampled_from(["mean", "sum", "max", "min", "prod", "gather"]))
    ranks = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
    rows = data.draw(st.integers(1, 7))
    slices = data.draw(st.integers(1, 3))
    large = data.draw(st.booleans())
    x = np.arange(1.0, rows + 1)
    wide = np.ones(LARGE if large else 2)

    def body(x):
        if op == "gather":
            return x[:, None] * np.ones(5)
        return {"mean": x.mean, "sum": x.sum, "max": x.max, "min": x.min, "prod": x.prod}[op]() * wide

    f = three_forked.function(body, outputs=op, target=ranks)
    expected = body(x)
    got = f(x, num_slices=slices)
    assert got.shape == expected.shape
    assert np.allclose(got, expected, rtol=1e-12)


def test_collectives_span_the_world(three):
    def body():
        mine = np.full(3, float(synk.rank() + 1))
        total = synk.all_reduce(mine, "sum")
        gathered = synk.all_gather(mine[:1])
        return total.tolist(), gathered.ravel().tolist(), synk.broadcast(mine).tolist()

    f = synk.function(body, outputs=None, target=[0, 2])
    assert f() == [([3.0] * 3, [1.0, 2.0], [1.0] * 3)] * 2


def test_rows_generators_and_batches(three):
    f = synk.function(lambda x: synk.rows(), outputs="gather", target=[1, 2])
    assert f(X, batch=[5, 0, 3]).tolist() == [5, 0, 3]
    draw = synk.function(lambda: synk.rng().random(), outputs=None)
    one = synk.function(lambda: synk.rng().random(), target=1)
    three.reseed(5)
    expected = [draw(), draw()]
    three.reseed(5)
    assert [one(), one()] == [each[1] for each in expected]


def test_check_compares_a_function_with_a_target(three):
    f = synk.function(lambda x: x.mean(axis=0), outputs="mean", target=[0, 2])
    assert np.allclose(f.check(X), X.mean(axis=0))
    wrong = synk.function(lambda x: np.median(x), outputs="mean", target=[0, 2])
    with pytest.raises(synk.OutputError):
        wrong.check(np.array([0.0, 0, 100, 1, 2, 50]))
    assert synk.function(lambda x: x.sum(), target=1).check(X) == X.sum()


def test_as_serial_and_the_decorator(pair):
    @synk.function(target=1)
    def f(x):
        return x.sum(), "whole"

    assert f.as_serial(X) == f(X) == (X.sum(), "whole")


def test_a_changed_global_is_seen_on_all_ranks(pair, monkeypatch):
    one = synk.function(lambda: FACTOR, target=1)
    both = synk.function(lambda: FACTOR, outputs=None)
    assert (one(), both()) == (1, [1, 1])
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 2)
    assert (one(), both()) == (2, [2, 2])
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3)
    assert (both(), one()) == ([3, 3], 3)


def test_a_large_object_that_changes_goes_to_all_ranks(pair):
    table = {"a": np.zeros(100_000)}
    one = synk.function(lambda: table["a"].sum(), target=0)
    both = synk.function(lambda: table["a"].sum(), outputs=None)
    assert one() == 0
    table["a"] = np.ones(100_000)
    assert one() == 100_000
    assert both() == [100_000] * 2


def test_variables_are_those_of_the_rank(pair):
    w = synk.shared(np.zeros(2), "w")

    def add(x):
        w.value += x

    synk.function(add, outputs=[], bcast_inputs=["x"], target=1)(np.ones(2))
    assert synk.get_value(0, w).tolist() == [0, 0]
    assert synk.get_value(1, w).tolist() == [1, 1]


# ── at the same time ─────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["submitted", "threads"])
def test_calls_on_different_ranks_run_at_the_same_time(three, tmp_path, how):
    a, b = tmp_path / "a", tmp_path / "b"
    left = synk.function(meet, bcast_inputs=["path", "other"], target=0)
    right = synk.function(meet, bcast_inputs=["path", "other"], outputs=None, target=[1, 2])
    synk.distribute()
    if how == "submitted":
        futures = left.submit(a, b), right.submit(b, a)
        found = [future.result() for future in futures]
    else:
        found = good(together(lambda: left(a, b), lambda: right(b, a)))
    assert found == [(0, 1), [(0, 2), (1, 2)]]


def test_a_trace_has_a_lane_of_the_main_process_for_each_call(pair, tmp_path, capsys):
    a, b, path = tmp_path / "a", tmp_path / "b", tmp_path / "trace.json"
    functions = [
        synk.function(meet, bcast_inputs=["path", "other"], target=rank, name=f"on_{rank}")
        for rank in (0, 1)
    ]
    everywhere = synk.function(lambda x: x.sum(), outputs="sum", name="everywhere")
    synk.distribute()
    with synk.trace(path):
        assert everywhere(X) == X.sum()
        futures = functions[0].submit(a, b), functions[1].submit(b, a)
        assert [future.result() for future in futures] == [(0, 1)] * 2
        assert everywhere(X) == X.sum()
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    shown = [lanes[number] for number in sorted(lanes)]
    assert shown == ["main process", "main 2", "rank 0", "rank 1"]
    calls = [each for each in events if each.get("cat") == "call"]
    assert Counter(each["name"] for each in calls) == {"everywhere": 2, "on_0": 1, "on_1": 1}
    first, second = (each for each in calls if each["name"] != "everywhere")
    assert first["tid"] != second["tid"]
    assert max(first["ts"], second["ts"]) < min(each["ts"] + each["dur"] for each in (first, second))
    for each in events:
        if each.get("cat") == "step" and lanes[each["tid"]] in ("rank 0", "rank 1"):
            at = lanes[each["tid"]].replace("rank ", "on_")
            assert each["args"]["function"] in (at, "everywhere"), each
    steps = [each for each in events if each.get("cat") == "step"]
    names = {each["name"] for each in steps if each["args"]["function"] == "on_1"}
    assert {"plan", "send", "wait", "wake", "compute", "collect"} <= names
    synk.summary()
    table = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    computing = next(
        each["dur"] for each in steps if each["name"] == "compute" and each["args"]["function"] == "on_0"
    )
    of_call = 100 * computing / next(each["dur"] for each in calls if each["name"] == "on_0")
    assert int(table["on_0"][3].rstrip("%")) == pytest.approx(of_call, abs=1)  # of its own rank's time


def test_submitted_calls_keep_their_order_on_the_ranks_that_they_share(three, tmp_path):
    log = tmp_path / "log"

    def write(name, pause):
        time.sleep(pause)
        with open(log, "a") as file:
            file.write(f"{name}{synk.rank()} ")

    on = [
        synk.function(write, bcast_inputs=["name", "pause"], outputs=[], target=rank)
        for rank in range(3)
    ]
    pair = synk.function(write, bcast_inputs=["name", "pause"], outputs=[], target=[0, 1])
    synk.distribute()
    futures = [on[0].submit("a", 0.1), pair.submit("b", 0), on[1].submit("c", 0), on[0].submit("d", 0)]
    futures.append(on[2].submit("e", 0))
    for future in futures:
        future.result()
    found = log.read_text().split()
    assert sorted(found) == ["a0", "b0", "b1", "c0", "d0", "e0"]
    places = {name: found.index(name) for name in found}
    assert places["a0"] < min(places["b0"], places["b1"])
    assert max(places["b0"], places["b1"]) < min(places["c0"], places["d0"])
    assert places["e0"] < places["b0"]


def test_a_call_on_all_ranks_waits_for_those_on_some(pair):
    slow = synk.function(lambda: time.sleep(0.1) or time.monotonic(), target=0)
    both = synk.function(time.monotonic, outputs=None)
    synk.distribute()
    future = slow.submit()
    assert wait_until(in_phase(pair, Phase.RUNNING, 0))
    began = both()
    assert min(began) >= future.result()


def test_futures_are_arguments(pair):
    square = synk.function(lambda x: x * x, target=0)
    add = synk.function(
        lambda pair, one: pair["a"] + pair["b"] + one, bcast_inputs=["pair", "one"], target=1
    )
    first, second = square.submit(np.arange(3.0)), square.submit(np.ones(3))
    third = add.submit({"a": first, "b": second}, one=2.0)
    assert third.result().tolist() == [3.0, 4.0, 7.0]
    others = concurrent.futures.Future()
    fourth = square.submit(others)
    others.set_result(np.array([5.0]))
    assert fourth.result() == [25.0]


def test_the_future_of_a_call_that_failed(pair):
    def fail():
        raise ZeroDivisionError("no")

    future = synk.function(fail, target=0).submit()
    later = synk.function(lambda x: x, target=1).submit(future)
    with pytest.raises(synk.WorkerError, match=r"rank 0\b.* failed"):
        future.result()
    with pytest.raises(synk.InvalidValue, match="the future of a call that failed") as caught:
        later.result()
    assert caught.value.__cause__ is future.exception()
    with pytest.raises(synk.UsageError, match=r"is a future: give its result\(\)"):
        synk.function(lambda x: x, target=0)(later)  # a plain call takes none


@pytest.mark.parametrize("seed", range(6))
def test_random_calls_of_random_ranks(seed, three):
    """From three threads, plain and submitted, with outputs of all sizes: all are right."""
    worlds = [None, 0, 1, 2, [0, 1], [1, 2], [0, 2]]
    functions = [
        synk.function(
            lambda x, size=size: np.full(size, x.sum()),
            target=world,
            **({} if isinstance(world, int) else {"outputs": "sum"}),
        )
        for world in worlds
        for size in (3, LARGE)
    ]
    rng = np.random.default_rng(seed)

    def body(rng):
        def calls():
            waiting = []
            for _ in range(30):
                x = rng.random(int(rng.integers(1, 6)))
                f = functions[rng.integers(len(functions))]
                if rng.random() < 0.5:
                    assert np.allclose(f(x), x.sum())
                else:
                    waiting.append((f.submit(x), x.sum()))
            for future, expected in waiting:
                assert np.allclose(future.result(), expected)

        return calls

    good(together(*[body(each) for each in rng.spawn(3)], seconds=60))
