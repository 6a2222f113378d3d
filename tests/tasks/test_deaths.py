"""A worker that dies in a map is replaced: its item is tried again, and each result comes once."""

import contextlib
import ctypes
import mmap
import os
import random
import resource
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import running, two_mapping
from support.waiting import Watch, wait_until
from synkro import CallTimeout, InvalidType, InvalidValue, WorkerDied, WorkerError

pytestmark = [pytest.mark.counted_once, pytest.mark.timeout(120)]

two_forked = two_mapping

WAYS = ["SIGKILL", "SIGSEGV", "crash", 3, 0]


def die(way):
    if isinstance(way, int):
        os._exit(way)
    if way == "crash":
        ctypes.string_at(0)
    os.kill(os.getpid(), getattr(signal, way))


def first(folder, item):
    """Whether this is asked for an item for the first time."""
    try:
        open(f"{folder}/{item}", "x").close()
    except FileExistsError:
        return False
    return True


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_the_item_is_tried_again(two, results, tmp_path, way):
    def task(x):
        if x in (5, 40, 41) and first(tmp_path, x):
            die(way)
        return [x] * x if x % 3 == 0 else x

    before = two.pids
    with Watch():
        found = results(task, range(60), retries=1)
    assert found == [[x] * x if x % 3 == 0 else x for x in range(60)]
    assert two.pids != before
    assert synk.map(abs, [-1]) == [1]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_it_is_a_result_that_says_what_it_died_of(two, results, way):
    def fragile(x):
        if x == 17:
            die(way)
        return -x

    found = results(fragile, range(30), retries=1, errors="return")
    died = found.pop(17)
    assert found == [-x for x in range(30) if x != 17]
    assert type(died) is WorkerDied
    for said in ("in a map of the function 'fragile' at item 17 (17), tried 2 times", "taken its place"):
        assert said in str(died)
    assert "close()" not in str(died)
    number = {"SIGKILL": 9, "SIGSEGV": 11, "crash": 11}.get(way)
    assert (died.signal, died.exitcode) == (number, way if number is None else None)
    assert died.rank in (0, 1)
    assert died.pid not in two.pids
    assert ("string_at" in died.stderr) == (way == "crash")


def test_it_ends_the_map_and_not_the_session(two, results):
    def task(x):
        if x == 7:
            time.sleep(0.05)  # results that are there are handed over meanwhile
            die("SIGKILL")
        return x

    with pytest.raises(WorkerDied, match=r"at item 7 \(7\), tried 3 times") as error:
        results(task, range(20), retries=2)
    assert 7 in error.value.pending
    assert error.value.results == error.value.finished
    assert synk.map(abs, [-1, -2]) == [1, 2]
    f = synk.function(lambda x: x.sum(), outputs="sum")
    assert f(np.arange(5.0)) == 10


@examples(30)
@given(st.data())
def test_every_result_comes_once(two, data):
    """Whatever dies, and however items travel; random numbers are as they would have been."""
    count = data.draw(st.integers(1, 80))
    fatal = data.draw(st.dictionaries(st.integers(0, count - 1), st.sampled_from(WAYS), max_size=3))
    failing = data.draw(st.sets(st.integers(0, count - 1), max_size=3)) - fatal.keys()
    options = {
        "chunksize": data.draw(st.sampled_from([None, 1, 5, 1000])),
        "retries": data.draw(st.integers(0, 1)),
        "max_tasks": data.draw(st.sampled_from([None, None, 7])),
    }
    ordered = data.draw(st.sampled_from([None, True, False]))

    def calm(x):
        return x, synk.rng().random(), "x" * (20 * x * x if x % 7 == 0 else 3)

    def task(x):
        found = calm(x)
        if x in fatal:
            die(fatal[x])
        if x in failing:
            raise KeyError(x)
        return found

    two.reseed(4)
    items = range(count) if data.draw(st.booleans()) else (x for x in range(count))
    if ordered is None:
        found = synk.map(task, items, errors="return", **options)
    else:
        found = list(synk.imap(task, items, errors="return", ordered=ordered, **options))
    two.reseed(4)
    expected = synk.map(calm, range(count))
    assert len(found) == count
    good = [value for value in found if not isinstance(value, Exception)]
    assert sorted(good) == [each for each in expected if each[0] not in fatal.keys() | failing]
    assert sum(isinstance(value, WorkerDied) for value in found) == len(fatal)
    assert sum(isinstance(value, KeyError) for value in found) == len(failing)
    if ordered is not False:
        assert good == sorted(good)


def test_workers_may_be_killed_at_any_moment(two):
    """From outside: before, between and within tasks, and while others take the places of the dead."""
    rng, over = random.Random(3), threading.Event()

    def kill():
        while not over.wait(rng.uniform(0.1, 1.5)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(two.pids), signal.SIGKILL)

    def task(x):
        time.sleep(0.002)
        return [x] * (x % 50)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        found = synk.map(task, range(1500), retries=50)
    finally:
        over.set()
        killer.join()
    assert found == [[x] * (x % 50) for x in range(1500)]


def test_a_checkpoint_keeps_what_the_others_have_done(two, tmp_path):
    def task(x, folder):
        with open(f"{folder}/ran-{x}", "a") as file:
            file.write(".")
        if x == 30 and not os.path.exists(f"{folder}/mended"):
            time.sleep(0.05)
            die("SIGKILL")
        return x * x

    options = {"common": {"folder": str(tmp_path)}, "checkpoint": tmp_path / "run.synk"}
    found = synk.map(task, range(40), errors="return", **options)
    assert isinstance(found[30], WorkerDied)
    (tmp_path / "mended").touch()
    assert synk.map(task, range(40), **options) == [x * x for x in range(40)]
    assert [x for x in range(40) if (tmp_path / f"ran-{x}").stat().st_size > 1] == [30]


# ── steps between which a worker may die ─────────────────────────────────────────────────────────────

_STEPS = ["take", "batch", "hold", "give", "written", "given", "put_back", "advance"]


@pytest.mark.parametrize("step", _STEPS)
@pytest.mark.parametrize("errors", ["raise", "return"])
def test_a_worker_may_die_between_any_two_steps(two, tmp_path, step, errors):
    """What a dead worker has drawn or given, and not noted, is neither lost nor done twice."""

    def task(x):
        if x == 20 and first(tmp_path, "patched"):
            from synkro.ipc import queue

            after = {"written": (queue, "_wrote"), "given": (queue.Taker, "give")}
            where, name = after.get(step, (queue.Taker, step))
            usual = getattr(where, name)

            def dying(*args):
                if step in after:
                    usual(*args)
                os._exit(1)

            setattr(where, name, dying)
        if x % 10 == 3 and first(tmp_path, f"odd-{x}"):
            raise ValueError(x)
        time.sleep(0.001)
        return x

    found = synk.map(task, range(200), retries=3, errors=errors, chunksize=8)
    assert found == list(range(200))


def test_workers_that_die_again_and_again_end_the_map(own, tmp_path):
    """Of no item: before they take one."""

    class Deadly:
        def __setstate__(self, state):
            if (tmp_path / "deadly").exists():
                os._exit(4)

    deadly = Deadly()
    deadly.some = "state"

    def task(x):
        assert deadly
        if x == 3:
            (tmp_path / "deadly").touch()
            os._exit(1)
        return x

    with Watch(), pytest.raises(WorkerDied, match="could not take its place"):
        synk.map(task, range(10), retries=5)
    with pytest.raises(synk.SessionBroken):
        synk.map(abs, [1])


# ── item_timeout ─────────────────────────────────────────────────────────────────────────────────────


def forever(x):
    if x == 4:
        time.sleep(1000)
    return x


def forever_in_c(x):
    if x == 4:
        sum(range(10**13))  # which holds the interpreter's lock
    return x


@pytest.mark.parametrize("task", [forever, forever_in_c])
def test_a_task_that_takes_too_long_is_ended(two, results, task):
    with Watch():
        found = results(task, range(10), item_timeout=0.3, errors="return", retries=1)
    late = found.pop(4)
    assert found == [x for x in range(10) if x != 4]
    assert type(late) is CallTimeout
    name = task.__name__
    said = f"in a map of the function '{name}' at item 4 (4), tried 2 times, the task took longer"
    assert said in str(late)
    assert "item_timeout=" in str(late)
    with pytest.raises(CallTimeout, match="at item 4") as error:
        results(task, range(10), item_timeout=0.3)
    assert 4 in error.value.pending
    assert synk.map(abs, [-1]) == [1]


def test_tasks_that_take_a_while_are_not_ended(two, tmp_path):
    """Nor is an item that is tried again on the same worker: a try has a time of its own."""

    def task(x):
        time.sleep(0.4 if x % 4 == 0 else 0.001)
        return x

    def again(x):
        time.sleep(0.6)
        if first(tmp_path, x):
            raise ValueError(x)
        return x

    before = two.pids
    assert synk.map(task, range(12), item_timeout=30) == list(range(12))
    assert synk.map(again, range(3), retries=1, item_timeout=5) == [0, 1, 2]
    assert two.pids == before


def full_of(megabytes):
    """Many bytes, in a process that may have some more than it has, but not twice as many."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * mmap.PAGESIZE + (300 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    return np.ones(megabytes << 20, np.uint8)


def test_a_result_for_which_there_is_no_memory_is_that_items_failure(own, results):
    """The others are there, also those that have run after it."""
    found = results(full_of, [1, 200, 2, 1], errors="return", retries=1)
    assert [each.nbytes >> 20 for each in found if isinstance(each, np.ndarray)] == [1, 2, 1]
    assert isinstance(found[1], MemoryError)
    assert found[1].item == 1
    assert "RLIMIT_AS" in str(found[1])
    with pytest.raises(MemoryError, match=r"at item 1 \(200\)"):
        results(full_of, [1, 200, 2], retries=1)


REFUSED = {
    "item_timeout": [0, -1, float("nan"), float("inf"), "3", [1], True],
    "max_tasks": [0, -1, 1.5, "3", True],
    "chunksize": [0, -1, 1.5, "many"],
}


@pytest.mark.parametrize("option", REFUSED)
def test_other_values_are_refused(two, option):
    for value in REFUSED[option]:
        with pytest.raises((InvalidType, InvalidValue), match=option):
            synk.map(abs, [1], **{option: value})


# ── max_tasks ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("most", [1, 3, 10])
def test_workers_begin_anew_after_so_many_tasks(two, results, most):
    def task(x):
        return x, os.getpid()

    found = results(task, range(25), max_tasks=most)
    assert [x for x, _ in found] == list(range(25))
    pids = [pid for _, pid in found]
    assert max(map(pids.count, pids)) <= most
    assert len(set(pids)) >= 25 / most
    assert synk.map(abs, [-1]) == [1]


def test_a_worker_that_leaves_writes_what_it_has_printed(own, capfd):
    said = []
    assert synk.map(lambda x: print(f"task {x}"), range(6), max_tasks=2) == [None] * 6

    def all_came():
        said.append(capfd.readouterr().out)
        return all(f"task {x}" in "".join(said) for x in range(6))

    assert wait_until(all_came)


# ── what the new worker has ──────────────────────────────────────────────────────────────────────────


def fragile(x):
    if x == 3:
        os._exit(1)
    return x


def lose_both():
    """Have another worker in the place of each."""

    def fatal(item):
        time.sleep(0.2)  # so that both workers have one
        os._exit(1)

    found = synk.map(fatal, range(2), errors="return", chunksize=1)
    assert {each.rank for each in found} == {0, 1}


def test_variables_are_those_of_the_rank(two):
    """Also where ranks differ, of other shapes, and where the last copy was the dead one's."""
    alike = synk.shared(np.arange(5.0), name="alike")
    apart = synk.shared(np.zeros((2, 3), np.int16), name="apart")
    here = synk.shared(np.ones(3), target=1)
    grown = synk.shared(np.zeros(1), name="grown")

    def change(x):
        alike.value[0] += 1
        apart.value += synk.rank() + 1
        grown.value = np.arange(4.0 + 3 * synk.rank())
        return x * 2

    rows = synk.function(change, outputs="keep")(np.arange(100.0))
    lose_both()
    for rank in range(2):
        np.testing.assert_array_equal(two.get_value(rank, alike), [1, 1, 2, 3, 4])
        np.testing.assert_array_equal(two.get_value(rank, apart), np.full((2, 3), rank + 1))
        np.testing.assert_array_equal(two.get_value(rank, grown), np.arange(4.0 + 3 * rank))
    np.testing.assert_array_equal(here.get_value(), np.ones(3))
    np.testing.assert_array_equal(np.asarray(rows), np.arange(100.0) * 2)
    np.testing.assert_array_equal(synk.map(lambda k: alike.value[k], range(5)), [1, 1, 2, 3, 4])


def test_functions_and_inputs_are_there(two):
    data = synk.data(np.arange(50.0))
    scale = [2.0]
    mean = synk.function(lambda x: x.mean() * scale[0])
    total = synk.function(lambda x, k: (x * k).sum(), outputs="sum", bcast_inputs="k")
    assert (mean(data), total(data, 3)) == (49.0, 3675.0)
    lose_both()
    assert (mean(data), total(data, 3)) == (49.0, 3675.0)
    scale[0] = 4.0
    data[:] += 1
    assert (mean(data), total(data, 3)) == (102.0, 3825.0)


class Counter:
    def __init__(self):
        self.count, self.seen = 0, {}
        self.rows = np.zeros(4)


def test_objects_are_as_functions_had_made_them(two):
    """If all ranks had made the same of them."""
    counter, listed = Counter(), [1]

    def count(x):
        counter.count += 1
        counter.seen[counter.count] = "a"
        counter.rows += 2
        listed.append(counter.count)

    run = synk.function(count, outputs=[])
    look = synk.function(lambda: (counter.count, counter.seen, counter.rows, listed), outputs=None)
    for _ in range(3):
        run(np.arange(4.0))
    lose_both()
    for count_, seen, rows, there in look():
        assert (count_, seen, there) == (3, {1: "a", 2: "a", 3: "a"}, [1, 1, 2, 3])
        np.testing.assert_array_equal(rows, np.full(4, 6.0))
    run(np.arange(4.0))
    assert [each[0] for each in look()] == [4, 4]


def test_objects_that_differ_by_rank_stay_different(two):
    counter = Counter()

    def count(x):
        counter.count += synk.rank()
        counter.seen.setdefault("made here", []).append(synk.rank())

    synk.function(count, outputs=[])(np.arange(4.0))
    lose_both()
    look = synk.function(lambda: (counter.count, counter.seen), outputs=None)
    assert look() == [(0, {"made here": [0]}), (1, {"made here": [1]})]


def test_what_the_program_makes_of_them_later_counts(two):
    """Of objects that functions had changed before, and a map had kept."""
    counter = Counter()

    def count(x):
        counter.count += 1
        counter.rows += 1

    def task(x):
        return counter.count + float(counter.rows[0]) + fragile(x)

    synk.function(count, outputs=[])(np.arange(4.0))
    assert synk.map(task, range(3), retries=1) == [2, 3, 4]
    counter.count, counter.rows = 100, np.full(4, 1000.0)
    two.push(counter)
    for _ in range(2):
        found = synk.map(task, range(40), errors="return", chunksize=1)
        assert isinstance(found.pop(3), WorkerDied)
        assert found == [1100.0 + x for x in range(40) if x != 3]
    lose_both()
    assert synk.map(task, range(3)) == [1100, 1101, 1102]


def test_what_cannot_be_pickled_is_told(own):
    holder = Counter()

    def hold(x):
        holder.lock = threading.Lock()

    synk.function(hold, outputs=[])(np.arange(4.0))
    with pytest.raises(WorkerDied, match=r"made of .holder. cannot be pickled") as error:
        synk.map(fragile, range(5), errors="return")
    assert "close()" in str(error.value)
    with pytest.raises(synk.SessionBroken):
        synk.map(abs, [1])


def test_a_worker_may_have_died_before_the_map(two, results):
    assert results(abs, [-1], retries=1) == [1]  # since the last call
    for kill in (0, 1):
        os.kill(two.pids[kill], signal.SIGKILL)
        assert results(abs, [-1, -2], retries=1) == [1, 2]
    run = synk.imap(abs, [-1, -2], errors="return")
    os.kill(two.pids[0], signal.SIGKILL)
    assert list(run) == [1, 2]


def test_a_worker_that_died_with_what_calls_had_made_is_told(own):
    w = synk.shared(np.zeros(2))
    synk.function(lambda: w.value.__iadd__(1)[0], outputs="sum")()
    os.kill(own.pids[0], signal.SIGKILL)
    with pytest.raises(WorkerDied, match="no copies were kept"):
        synk.map(abs, [-1, -2], retries=1)
    with pytest.raises(synk.SessionBroken):
        synk.map(abs, [1])


def test_ctrl_c_while_a_worker_is_replaced(two):
    """It comes when that is done, and the session goes on."""

    def interrupted(x):
        if x == 3:
            os.kill(os.getppid(), signal.SIGINT)
        return fragile(x)

    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            synk.map(interrupted, range(6), retries=3)
        assert synk.map(abs, [-1], retries=1) == [1]  # where the interrupt came first


def test_what_the_program_changes_meanwhile_does_not_reach_the_new_worker(two):
    table = np.arange(10.0)
    factor = {"k": 1}

    def task(x):
        if x == 60:
            os._exit(1)
        time.sleep(0.001)
        return table[x % 10] * factor["k"]

    found = []
    for value in synk.imap(task, range(100), errors="return"):
        found.append(value)
        if len(found) == 3:
            table[:] = -1
            factor["k"] = 100
    died = found.pop(60)
    assert isinstance(died, WorkerDied)
    assert found == [float(x % 10) for x in range(100) if x != 60]


def test_random_numbers_of_ranks_go_on(two):
    draw = synk.function(lambda: synk.rng().random(), outputs=None)
    two.reseed(9)
    expected = [draw() for _ in range(4)]
    two.reseed(9)
    found = [draw(), draw()]
    lose_both()
    assert [*found, draw(), draw()] == expected


def test_calls_between_results_go_on(two):
    total = synk.function(lambda x: x.sum(), outputs="sum")
    kept = synk.shared(np.zeros(2), name="kept")

    def add():
        kept.value += 1

    more = synk.function(add, outputs=[])

    def task(x):
        if x % 20 == 11:
            os._exit(1)
        return x

    for number, value in enumerate(synk.imap(task, range(100), errors="return")):
        assert isinstance(value, WorkerDied) if number % 20 == 11 else value == number
        if number % 10 == 0:
            assert total(np.arange(10.0)) == 45
            more()
    for rank in range(2):
        np.testing.assert_array_equal(two.get_value(rank, kept), [10, 10])


def test_a_worker_alone_is_replaced(tmp_path, monkeypatch, capfd):
    """And there is one profile, that of the worker which took its place."""
    monkeypatch.chdir(tmp_path)
    with running(1, profile_workers=True) as session:
        w = synk.shared(np.arange(3.0))
        before = session.pids
        found = synk.map(fragile, range(6), errors="return")
        assert isinstance(found.pop(3), WorkerDied)
        assert found == [0, 1, 2, 4, 5]
        assert session.pids != before
        np.testing.assert_array_equal(w.get_value(), np.arange(3.0))
    assert len([*tmp_path.glob("synkro-*.prof")]) == 1


def test_nothing_grows(two):
    """Not of the arena's file either, where dead workers had blocks."""

    def task(x):
        return np.zeros(1 << 18) if fragile(x) != 3 else None

    def held():
        descriptors = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        stats = [os.stat(path) for path in descriptors if os.path.exists(path)]
        return len(stats), sum(each.st_blocks for each in stats) * 512

    def lose(times):
        for _ in range(times):
            assert isinstance(synk.map(task, range(6), errors="return")[3], WorkerDied)

    lose(2)
    descriptors, nbytes = held()
    lose(6)
    assert held()[0] <= descriptors
    assert held()[1] <= nbytes + (16 << 20)


def test_an_exception_and_a_death_of_one_item(two, tmp_path):
    def task(x, folder):
        if x == 3:
            if first(folder, "a"):
                raise ValueError(x)
            if first(folder, "b"):
                os._exit(1)
        return x

    assert synk.map(task, range(6), common={"folder": str(tmp_path)}, retries=2) == list(range(6))
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises((WorkerDied, WorkerError), match="tried 2 times"):
        synk.map(task, range(6), common={"folder": str(tmp_path)}, retries=1)
