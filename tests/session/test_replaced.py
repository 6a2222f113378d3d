"""With ``fork(replace=True)`` a call in which a worker dies has not happened; the session goes on."""

import contextlib
import functools
import gc
import os
import pathlib
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import lasting, running, start
from support.waiting import Watch, interrupted_after, wait_until
from synkro import SessionBroken, WorkerDied, WorkerError, here
from synkro.controller.calls.replacement import Replacement

pytestmark = [pytest.mark.counted_once, pytest.mark.timeout(120)]

LARGE = 1 << 18  # elements of an output that goes through commands of its own


three_forked = lasting(3, replace=True, seed=5)
two_forked = lasting(2, replace=True, seed=5)


class Model:
    def __init__(self):
        self.steps, self.log = 0, {}
        self.weights = np.zeros((2, 3))


def kill(ranks):
    if synk.rank() in ranks:
        os.kill(os.getpid(), signal.SIGKILL)


def check(session, variable, *values):
    """The ranks of the session have these values of a variable, or all of them the one."""
    for rank in range(session.n_parallel):
        expected = values[rank if len(values) > 1 else 0]
        np.testing.assert_array_equal(session.get_value(rank, variable), expected)


def dying(run, *args, idle=None):
    """Have a call end by WorkerDied, which says what becomes of the session.

    With ``idle`` this worker of a session is killed before, between two operations.
    """
    if idle is not None:
        session, rank = idle
        os.kill(session.pids[rank], signal.SIGKILL)
    with Watch(), pytest.raises(WorkerDied, match="taken its place: all is as when") as error:
        run(*args)
    assert "close()" not in str(error.value)
    return error.value


# ── a call ───────────────────────────────────────────────────────────────────────────────────────────

MOMENTS = ["at first", "before", "meeting", "between", "after", "at the end", "apart"]


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_call_has_not_happened(three, moment):
    """Whatever the others had done by then: each rank's variables, objects and random numbers."""
    draw = synk.function(lambda: synk.rng().random(), outputs=None)
    three.reseed(11)
    expected = [draw(), draw()]
    three.reseed(11)
    apart = synk.shared(np.zeros((4, 2)), name="apart")
    alike = synk.shared(np.zeros(3, int), name="alike")
    model = Model()

    def step(x, moment, ranks):
        def kill_at(*moments):
            if moment in moments:
                kill(ranks)

        kill_at("at first")
        drawn = synk.rng().random()
        apart.value += 1 + synk.rank()
        model.steps += 1
        model.weights += model.steps
        model.log[model.steps] = "x"
        kill_at("before")
        if moment == "meeting" and synk.rank() in ranks:
            time.sleep(0.05)
        kill_at("meeting")
        total = synk.all_reduce(x.sum(), op="sum")
        alike.value = alike.value + 1
        kill_at("between")
        synk.barrier()
        kill_at("after")
        if moment == "apart" and synk.rank() not in ranks:
            time.sleep(0.3)
        kill_at("at the end", "apart")
        return total, model.steps, model.weights.copy(), dict(model.log), drawn

    run = synk.function(step, bcast_inputs=["moment", "ranks"], outputs=None)
    x = np.arange(9.0)
    results = [run(x, "", [])]
    for ranks in ([1], [0], [2], [0, 2]):
        died = dying(run, x, moment, ranks)
        assert died.rank in ranks
    results.append(run(x, "", []))
    for number, found in enumerate(results, 1):
        for total, steps, weights, log, _ in found:
            assert (total, steps, log) == (36.0, number, dict.fromkeys(range(1, number + 1), "x"))
            np.testing.assert_array_equal(weights, np.full((2, 3), number * (number + 1) / 2))
    check(three, apart, *[np.full((4, 2), 2.0 * (1 + rank)) for rank in range(3)])
    check(three, alike, [2, 2, 2])
    assert [[each[-1] for each in found] for found in results] == expected


def test_large_outputs(three):
    """Which are stored, and reduced, by commands of their own: the worker is gone before these."""
    w = synk.shared(np.zeros(2))

    def large(x, late):
        w.value += 1
        if late and synk.rank() == 1:
            threading.Timer(0.001 * late, os._exit, [1]).start()
        return np.full(LARGE, x.sum())

    run = synk.function(large, bcast_inputs="late", outputs="sum")
    done = 0
    for late in (0, 1, 2, 5, 20, 50, 0):
        with contextlib.suppress(WorkerDied):
            assert (run(np.arange(6.0), late) == 15).all()
            done += 1
        if late:
            assert wait_until(lambda: len(set(three.pids)) == 3)
            with contextlib.suppress(WorkerDied):  # of a worker that was about to die
                time.sleep(0.1)
                w.get_value()
        check(three, w, [done, done])
    assert done >= 2


@examples(15)
@given(st.data())
def test_any_steps_with_any_deaths(three, data):
    """As in a session in which nobody dies."""
    w, kept = synk.shared(np.zeros(3)), []
    model = Model()

    def step(x, k, ranks, late):
        if not late:
            kill(ranks)
        model.weights *= 2
        model.weights += k
        w.value = np.append(w.value, k) if k % 3 == 0 else w.value + k * (1 + synk.rank())
        synk.barrier()
        kill(ranks)
        return x * k

    gathered = synk.function(step, bcast_inputs=["k", "ranks", "late"], outputs="gather")
    keeping = synk.function(step, bcast_inputs=["k", "ranks", "late"], outputs="keep")
    look = synk.function(lambda: (model.weights, w.value), outputs=None)
    weights, values, x = np.zeros((2, 3)), [np.zeros(3) for _ in range(3)], np.arange(7.0)
    for k in data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6)):
        ranks = data.draw(st.sets(st.integers(0, 2), max_size=2))
        run = data.draw(st.sampled_from([gathered, keeping]))
        if ranks:
            dying(run, x, k, [*ranks], data.draw(st.booleans()))
        out = run(x, k, [], False)
        if run is keeping:
            kept.append((out, x * k))
        else:
            np.testing.assert_array_equal(out, x * k)
        weights = weights * 2 + k
        values = [
            np.append(value, k) if k % 3 == 0 else value + k * (1 + rank)
            for rank, value in enumerate(values)
        ]
        for rank, (there, value) in enumerate(look()):
            np.testing.assert_array_equal(there, weights)
            np.testing.assert_array_equal(value, values[rank])
        for handle, expected in kept:
            np.testing.assert_array_equal(np.asarray(handle), expected)


# ── other operations ─────────────────────────────────────────────────────────────────────────────────


def test_what_other_operations_have_done_stays(three):
    """Variables that were made, written and reduced; functions that came; objects that were pushed."""
    w = synk.shared(np.zeros(2))
    w.set_value([3.0, 4.0])
    other = synk.shared(np.ones(2), target=2)
    model = Model()
    add = synk.function(lambda: w.value.__iadd__(synk.rank()) is None, outputs=None)
    add()
    synk.all_reduce(w, op="sum")
    dying(add, idle=(three, 0))
    check(three, w, [12.0, 15.0])
    np.testing.assert_array_equal(other.get_value(), [1, 1])
    look = synk.function(lambda: model.weights[0, 0], outputs=None)
    assert look() == [0, 0, 0]
    model.weights[:] = 7
    assert look() == [7, 7, 7]
    dying(look, idle=(three, 2))
    assert look() == [7, 7, 7]
    dying(w.get_value, idle=(three, 2))
    np.testing.assert_array_equal(w.get_value(), [12.0, 15.0])
    late = synk.function(lambda: float(model.weights.sum()), outputs=None)
    dying(late, idle=(three, 1))
    assert late() == [42.0] * 3


def test_an_error_of_the_function_ends_a_call(three):
    """What ranks have done before it counts, as ever."""
    w = synk.shared(np.zeros(1))

    def failing(fails):
        w.value += 1
        if fails:
            raise ValueError("odd")

    run = synk.function(failing, bcast_inputs="fails", outputs=[])
    with pytest.raises(WorkerError, match="odd"):
        run(True)
    dying(run, False, idle=(three, 1))
    check(three, w, [1])


def test_maps_in_such_a_session(three):
    w, model = synk.shared(np.zeros(1)), Model()

    def step():
        model.steps += 1
        w.value += 1 + synk.rank()
        return model.steps

    run = synk.function(step, outputs=None)
    assert run() == [1, 1, 1]

    def task(x):
        if x % 10 == 3:
            os._exit(1)
        return x * model.steps

    with pytest.raises(WorkerDied, match=r"at item 3 .* taken its place"):
        synk.map(task, range(10))
    found = synk.map(task, range(40), errors="return")
    assert [x for x, value in enumerate(found) if isinstance(value, WorkerDied)] == [3, 13, 23, 33]
    assert all(value == x for x, value in enumerate(found) if x % 10 != 3)
    assert run() == [2, 2, 2]
    check(three, w, [2], [4], [6])


def draws_or_dies(item):
    item, path = item
    if path and not os.path.exists(path):
        open(path, "x").close()
        os._exit(3)
    return item, synk.rng().random()


def test_a_map_that_ends_by_a_death_draws_the_same_when_it_is_done_again(tmp_path):
    """It has not happened; a map after it has the number that it would have had."""
    found = []
    for path in ("", str(tmp_path / "died")):
        with start(2, replace=True, seed=5) as session:
            maps = []
            for number in range(3):
                items = [(item, path if number == item == 1 else "") for item in range(6)]
                for _ in range(2):
                    with contextlib.suppress(WorkerDied):
                        maps.append(session.map(draws_or_dies, items))
                        break
            found.append(maps)
    assert found[0] == found[1]
    assert len(found[0]) == 3


def test_what_died_says_its_last_words(two):
    def speak(x, fails):
        if fails and synk.rank() == 1:
            print("no seat is free", file=sys.stderr, flush=True)
            os._exit(3)
        return x

    run = synk.function(speak, bcast_inputs="fails", outputs="sum")
    error = dying(run, np.ones(2), True)
    assert error.stderr == "no seat is free"
    assert str(error).endswith("no seat is free")
    assert error.exitcode == 3


class Bomb:
    """Kills whoever unpickles it."""

    def __reduce__(self):
        return os._exit, (7,)


def test_a_death_while_a_function_arrives_is_told(two):
    bomb, x = Bomb(), np.ones(2)
    with (
        Watch(),
        pytest.raises(WorkerDied, match="as it received a function, or what one uses, the") as e,
    ):
        synk.function(lambda x: (bomb, x)[1])(x)
    assert "taken" in str(e.value)
    for retries in (0, 1):
        with Watch(), pytest.raises(WorkerDied, match="as it received a function") as error:
            synk.map(lambda x: (bomb, x)[1], [1, 2, 3], retries=retries)
        assert error.value.results == error.value.finished == []
        assert error.value.pending == [0, 1, 2]
        assert ("happened 5 times in a row" in str(error.value)) == bool(retries)
    assert synk.function(lambda x: x.sum(), outputs="sum")(x) == 2


def test_submitted_calls(three):
    w = synk.shared(np.zeros(1))

    def add(ranks):
        w.value += 1
        synk.barrier()
        kill(ranks)
        return float(w.value[0])

    run = synk.function(add, bcast_inputs="ranks", outputs="mean")
    futures = [run.submit(ranks) for ranks in ([], [1], [], [0], [])]
    found = [future.exception() or future.result() for future in futures]
    assert [value for value in found if not isinstance(value, WorkerDied)] == [1.0, 2.0, 3.0]


def test_killed_at_any_moment(three):
    rng, over = random.Random(8), threading.Event()
    w, model = synk.shared(np.zeros(1000)), Model()

    def killing():
        while not over.wait(rng.uniform(0.1, 1.0)):
            before, steps = three.pids, done
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(before), signal.SIGKILL)
            while (three.pids == before or done == steps) and not over.wait(0.05):
                continue

    def step(x):
        w.value += synk.all_reduce(x.sum(), op="sum")
        model.steps += 1
        synk.barrier()
        return model.steps, float(w.value[-1])

    run = synk.function(step, outputs=None)
    killer, done, x = threading.Thread(target=killing), 0, np.arange(12.0)
    killer.start()
    deadline = time.monotonic() + 8
    try:
        while time.monotonic() < deadline or done <= 10:
            try:
                found = run(x)
            except WorkerDied as died:
                assert "taken" in str(died), died  # noqa: PT017
                continue
            done += 1
            assert found == [(done, done * 66.0)] * 3
    finally:
        over.set()
        killer.join()
    with contextlib.suppress(WorkerDied):
        run(x)


def test_workers_that_are_stuck_are_replaced_too(three):
    """Where the others wait for the dead one in code that cannot be interrupted."""
    w = synk.shared(np.zeros(2))

    def stuck(ranks):
        w.value += 1
        kill(ranks)
        if len(ranks) and synk.rank() == 1:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            time.sleep(1000)
        return 1.0

    run = synk.function(stuck, bcast_inputs="ranks", outputs="sum")
    dying(run, [0])
    assert run([]) == 3
    check(three, w, [1, 1])


# ── where it cannot be ───────────────────────────────────────────────────────────────────────────────


class Part:
    def __init__(self):
        self.k = 0


def test_what_functions_make_by_themselves(two):
    """Containers and objects in others, and attributes of functions: also where all die at once."""
    history, holder, table, w = {}, Part(), [[]], synk.shared(np.zeros(2))

    def step(x, ranks):
        w.value += 1 + synk.rank()
        history.setdefault("loss", []).append((float(x[0]), synk.rank()))
        if not hasattr(holder, "part"):
            holder.part, holder.rows = Part(), np.zeros(2)
        holder.part.k += 1
        holder.rows += 1
        table[0].append(len(table[0]))
        step.calls = getattr(step, "calls", 0) + 1
        synk.barrier()
        kill(ranks)
        return list(history["loss"]), holder.part.k, float(holder.rows[0]), list(table[0]), step.calls

    run = synk.function(step, bcast_inputs="ranks", outputs=None)
    for number in range(4):
        for ranks in ([0, 1], [0], [1])[: number % 4]:
            dying(run, np.full(2, 100.0), ranks)
        count = number + 1
        for rank, found in enumerate(run(np.full(2, float(number)), [])):
            done = [(float(n), rank) for n in range(count)]
            assert found == (done, count, count, [*range(count)], count)
        check(two, w, [count] * 2, [2 * count] * 2)


def test_data_alone_as_arguments(two):
    x = synk.data(np.ones(20))
    total = synk.function(lambda x: x.sum(), outputs="sum")
    assert [total(x), total(x)] == [20, 20]
    for _ in range(2):
        dying(total, x, idle=(two, 0))
        assert [total(x), total(x)] == [20, 20]


def test_variables_that_are_made_meanwhile(two):
    look = synk.function(lambda x: x.sum(), outputs="sum")
    assert look(np.ones(4)) == 4
    synk.shared(np.zeros(3))
    dying(look, np.ones(4), idle=(two, 1))
    dying(synk.shared, np.zeros(3), idle=(two, 0))
    w = synk.shared(np.arange(3.0))
    np.testing.assert_array_equal(w.get_value(), np.arange(3.0))


def test_calls_on_some_ranks():
    with running(2, replace=True) as session:
        w = synk.shared(np.zeros(1))
        f = synk.function(lambda: w.value.__iadd__(1)[0], outputs=None, target=1)
        both = synk.function(lambda: w.value[0], outputs=None)
        assert both() == [0, 0]
        assert f() == [1]
        assert both() == [0, 1]
        for killed in (0, 1):
            dying(both, idle=(session, killed))
            assert both() == [0, 1 + killed]
            assert f() == [2 + killed]
            dying(f, idle=(session, killed))


def test_it_is_off(own):
    """Then a call is one command, and a death ends the session."""
    f = synk.function(lambda x: x.sum(), outputs="sum")
    f(np.arange(4.0))
    channel = own.services.engine.channel
    before = channel.number(0)
    for _ in range(5):
        f(np.arange(4.0))
    assert channel.number(0) - before == 5
    os.kill(own.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="close"):
        f(np.arange(4.0))
    with pytest.raises(SessionBroken):
        f(np.arange(4.0))


@pytest.mark.parametrize("value", [1, "yes", None])
def test_other_values_are_refused(value):
    with pytest.raises(synk.InvalidType, match="replace"):
        synk.Session(2, replace=value, verbose=False)


def test_not_on_gpus_or_hosts():
    class Engine:
        size, has_hosts, on_gpus = 1, False, True

    replacement = Replacement(Engine(), None, None, None, True)
    assert "GPUs" in replacement.refusal
    Engine.has_hosts = True
    assert "hosts" in replacement.refusal


def test_nothing_grows(two):
    w = synk.shared(np.zeros(1 << 17))

    def add(ranks):
        w.value += 1
        synk.barrier()
        kill(ranks)

    run = synk.function(add, bcast_inputs="ranks", outputs=[])

    def held_after(times):
        for _ in range(times):
            dying(run, [0])
            dying(run, [1])
            run([])
        stats = [path.stat() for path in pathlib.Path("/proc/self/fd").iterdir() if path.exists()]
        return len(stats), sum(each.st_blocks for each in stats) * 512

    descriptors, nbytes = held_after(3)
    after, nbytes_after = held_after(5)
    assert after <= descriptors
    assert nbytes_after <= nbytes + (8 << 20)


# ── what a worker that takes a place has ─────────────────────────────────────────────────────────────


def die_idle(session, rank=1):
    """Have an idle worker die, and another one take its place."""
    run = synk.function(os.getpid, outputs=None)
    dying(run, idle=(session, rank))


def dies(way, session, run=None):
    """Rank 1 dies: between calls, in a call of *run*, or in a map."""
    if way == "idle":
        die_idle(session)
    elif way == "map":
        synk.map(lambda x: os._exit(1) if x < 2 else x, range(6), errors="return", chunksize=1)
    else:
        dying(run, True)


@pytest.mark.parametrize("way", ["idle", "map"])
def test_objects_that_the_program_changes_and_changes_back(request, way):
    """All ranks are the same after each: also where one came as it was in between."""
    session = request.getfixturevalue("own" if way == "map" else "two")
    words, array, model = [1], np.zeros(4), Model()
    model.log["k"] = [1]
    large = np.zeros(1 << 20)
    seen = synk.function(
        lambda: (list(words), array.sum(), model.steps, list(model.log["k"]), large[0]), outputs=None
    )
    before = seen()
    words.append(2)
    array[:] = model.steps = large[0] = 7
    model.log["k"] = [2]
    dies(way, session)
    words.pop()
    array[:] = model.steps = large[0] = 0
    model.log["k"] = [1]
    assert seen() == before
    model.log["k"] = [3]
    dies(way, session)
    model.log["k"] = [4]
    found = seen()
    assert [each[3] for each in found] == [[4], [4]]
    assert found[0] == found[1]


class Trainer:
    """Makes what it needs at its first step: two parts share it."""

    def __init__(self):
        self.weights, self.state = None, Part()

    def step(self):
        if self.weights is None:
            self.weights = {"w": np.zeros(2)}
            self.state.optimizer = {"of": self.weights["w"], "momentum": np.zeros(2)}
        momentum = self.state.optimizer["momentum"]
        momentum += 1 + synk.rank()
        self.state.optimizer["of"] += momentum
        return self.weights["w"].tolist()


@pytest.mark.parametrize("way", ["idle", "in a step", "map"])
def test_what_functions_make_is_shared_as_it_was(request, way):
    session = request.getfixturevalue("own" if way == "map" else "two")
    trainer, first, second, array = Trainer(), {}, {}, np.zeros(6)

    def step(die):
        found = trainer.step()
        if "made" not in first:
            first["made"] = second["too"] = [0]
            second["view"] = array[2:4]
        second["too"].append(1)
        second["view"] += 1
        if die and synk.rank() == 1:
            os._exit(1)
        return found, first["made"] is second["too"], list(first["made"]), array.tolist()

    run = synk.function(step, bcast_inputs="die", outputs=None)
    run(False)
    run(False)
    dies(way, session, run)
    for rank, found in enumerate(run(False)):
        assert found == ([6.0 * (1 + rank)] * 2, True, [0, 1, 1, 1], [0, 0, 3, 3, 0, 0])


@pytest.mark.parametrize("way", ["in a step", "map"])
def test_what_the_program_has_dropped_is_not_missed(request, way):
    """What functions have made of it refers to an array that is gone, while dicts are remembered."""
    session = request.getfixturevalue("own" if way == "map" else "two")

    def make_and_drop():
        first, second, array = {}, {}, np.zeros(6)

        def step():
            if "made" not in first:
                first["made"] = second["too"] = [0]
                second["view"] = array[2:4]
            second["view"] += 1

        synk.function(step, outputs=[])()

    def step(die):
        if die and synk.rank() == 1:
            os._exit(1)
        return 1

    run = synk.function(step, bcast_inputs="die", outputs=None)
    run(False)
    make_and_drop()
    gc.collect()
    dies(way, session, run)
    assert run(False) == [1, 1]


def test_what_is_reached_only_there_is_kept(two):
    """A function puts one object into another; what later functions make of it through that counts."""
    inner, outer = [0], {"x": 0}

    def link():
        outer["inner"] = inner

    def append():
        outer["inner"].append(synk.rank())
        return list(outer["inner"])

    synk.function(link, outputs=[])()
    add = synk.function(append, outputs=None)
    add()
    die_idle(two)
    look = synk.function(lambda: (list(inner), outer["inner"] is inner), outputs=None)
    assert look() == [([0, rank], True) for rank in range(2)]
    assert add() == [[0, rank, rank] for rank in range(2)]


class Labelled(np.ndarray):
    """An array with a label, which NumPy does not pickle."""


def test_attributes_of_arrays_and_counters(two):
    labelled, counter = np.zeros(3).view(Labelled), enumerate(range(99))
    labelled.label = {"n": 0}
    inside = [enumerate(range(99), 10)]

    def step():
        labelled[0] += 1
        labelled.label["n"] += 1
        return float(labelled[0]), labelled.label["n"], next(counter)[0], next(inside[0])[0]

    run = synk.function(step, outputs=None)
    run()
    assert run() == [(2.0, 2, 1, 11)] * 2
    die_idle(two)
    assert run() == [(3.0, 3, 2, 12)] * 2


class Careful:
    """Takes a while to pickle on the second worker, if it is told to."""

    slow = 0

    def __init__(self):
        self.count = 0

    def __getstate__(self):
        if Careful.slow and here.rank is not None and here.rank.number == 1:
            time.sleep(Careful.slow)
        return vars(self).copy()


def test_ctrl_c_while_copies_are_kept(two):
    """However often one rank has kept them and the other has not: all are put back alike."""
    one, total = Careful(), synk.shared(np.zeros(1 << 16))

    def step(slow):
        Careful.slow = slow
        one.count += 1
        total.value = total.value + 1
        return one.count, float(total.value[0])

    run = synk.function(step, bcast_inputs="slow", outputs=None)
    run(0.0)
    for _ in range(2):
        with Watch(), pytest.raises(KeyboardInterrupt), interrupted_after(0.4):
            [run(0.8) for _ in range(2)]
    settled = run(0.0)
    assert settled[0] == settled[1]
    die_idle(two, 0)
    (count, summed), other = run(0.0)
    assert (count, summed) == other == (settled[0][0] + 1, settled[0][1] + 1)


class Cached:
    def __init__(self):
        self.x = 1

    @functools.cached_property
    def heavy(self):
        return self.x * 2


def test_classes_with_cached_properties(own):
    cached = Cached()
    assert synk.function(lambda: cached.heavy, outputs=None)() == [2, 2]
    found = synk.map(lambda x: os._exit(1) if x == 3 else x, range(6), errors="return")
    assert [each for each in found if not isinstance(each, WorkerDied)] == [0, 1, 2, 4, 5]
    assert synk.function(lambda: cached.heavy, outputs=None)() == [2, 2]


class Deadly:
    """Kills each worker that gets it when a file is there."""

    def __init__(self, path):
        self.path = path

    def __setstate__(self, state):
        vars(self).update(state)
        if here.rank is not None and os.path.exists(self.path):
            with open(self.path, "a") as file:
                file.write("x")
            os._exit(7)

    def __getstate__(self):
        return vars(self).copy()


def test_five_are_tried_and_no_more(tmp_path):
    path = tmp_path / "begun"
    with running(2, replace=True) as session:
        deadly = Deadly(str(path))
        run = synk.function(lambda: deadly.path and 1, outputs="sum")
        assert run() == 2
        path.touch()
        os.kill(session.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDied, match="could not take its place, 5 times"):
            run()
        assert path.read_text() == "x" * 5
