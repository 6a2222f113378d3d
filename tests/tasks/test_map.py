"""map and imap: the results in order, of items and results of any kind, whichever worker takes them."""

import collections
import dataclasses
import enum
import functools
import itertools
import math
import mmap
import os
import pathlib
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import counts, running, start, two_mapping
from synkro import InvalidType, InvalidValue, UsageError, WorkerError

pytestmark = pytest.mark.quick


def double(x):
    return x * 2


def lasting(workers):
    """Workers that serve the file, with the queue that the first map of a session makes."""
    with start(workers) as session:
        session.map(double, [0])
        yield session


@pytest.fixture(scope="module", params=counts(1, 3, rarely=[2]))
def forked(request):
    yield from lasting(request.param)


two_forked = two_mapping


@pytest.fixture(scope="module")
def three_forked():
    yield from lasting(3)


@dataclasses.dataclass
class Fit:
    alpha: float
    weights: np.ndarray


# ── what comes back ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("count", [0, 1, 2, 3, 7, 100, 3000])
def test_the_results_are_those_of_the_builtin_in_order(n, count):
    assert synk.map(double, range(count)) == list(map(double, range(count)))
    assert list(synk.imap(double, range(count))) == list(map(double, range(count)))


KINDS = {
    "numbers": [1, 2.5, 1j, 10**30, True, None],
    "strings": ["a", "ä" * 5000, "", "\ud800"],
    "bytes": [b"", b"x" * 100_000],
    "arrays": [np.arange(5), np.zeros((0, 3)), np.ones((300, 200)).T, np.float32(2), np.array(1)],
    "large arrays": [np.arange(200_000.0) + i for i in range(5)],
    "dates, records and objects": [
        np.array(["2026-11-22"], "datetime64[D]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array([{"a": 1}, None], object),
    ],
    "read-only arrays": [np.broadcast_to(1.0, (3, 3)), np.frombuffer(b"12345678")],
    "containers": [{"a": [1, {2, 3}], "b": (None, np.ones(3))}, collections.Counter("aab"), [[[[[1]]]]]],
    "instances": [Fit(0.1, np.arange(3)), Fit(0.2, np.zeros(100_000))],
    "classes and functions": [Fit, double, functools.partial(double, 2), np.sin, math.pi],
    "paths": [pathlib.Path("a/b"), slice(1, 5)],
}


def same(one, other):
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, dict) and not isinstance(one, collections.Counter):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Fit):
        return isinstance(other, Fit) and same(one.weights, other.weights) and one.alpha == other.alpha
    if isinstance(one, functools.partial):
        return same(one.func, other.func) and one.args == other.args
    if one is double:  # it travels by value
        return other.__code__ == one.__code__
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("items", KINDS.values(), ids=KINDS)
def test_items_and_results_are_anything_that_pickles(n, items):
    assert same(items, synk.map(lambda x: x, items))
    assert same([{"x": item} for item in items], list(synk.imap(lambda x: {"x": x}, items)))


RUNS = {
    "numbers": range(10**6),
    "instances": [Fit(k, np.arange(k)) for k in range(500)],
    "large arrays": [np.full(20_000, k) for k in range(9)],  # whose buffers travel apart
    "NumPy's numbers": np.arange(500) / 7,
    "large numbers": [10**k for k in range(500)],
    "short strings": [f"item {k}" for k in range(500)],
    "long strings": ["ab" * k for k in range(500)],
    "arrays": [np.arange(k) for k in range(500)],
    "nothing": [None] * 500,
}


@examples(30)
@given(
    runs=st.lists(st.tuples(st.sampled_from(sorted(RUNS)), st.integers(0, 200)), max_size=6),
    pauses=st.sets(st.integers(0, 1000), max_size=4),
)
def test_items_travel_together_or_alone(three_forked, runs, pauses):
    items = [item for kind, count in runs for item in itertools.islice(RUNS[kind], count)]
    assert same(items, three_forked.map(lambda x: x, items))
    results = []
    for number, result in enumerate(three_forked.imap(lambda x, y: (y, x), items, items)):
        results.append(result)
        if number in pauses:  # what nobody has taken is withdrawn, and offered again
            assert three_forked.map(double, range(40)) == list(range(0, 80, 2))
    assert same(list(zip(items, items, strict=True)), results)


def test_what_a_task_gets_and_returns_is_its_own(n):
    def change(x):
        x["list"].append(1)
        x["array"] += 1
        return x

    item = {"list": [], "array": np.zeros(3)}
    results = synk.map(change, [item] * 10)
    assert same(item, {"list": [], "array": np.zeros(3)})
    assert all(result["list"] == [1] and result["array"].tolist() == [1, 1, 1] for result in results)
    results[0]["array"] += 5
    assert results[1]["array"].tolist() == [1, 1, 1]


def test_several_iterables_end_with_the_shortest(n):
    assert synk.map(lambda a, b: (a, b), "abc", itertools.count()) == [("a", 0), ("b", 1), ("c", 2)]


def test_builtins_methods_and_functions_of_synkro_can_be_mapped(n):
    assert synk.map(math.sqrt, [1, 4, 9]) == [1, 2, 3]
    assert synk.map(str.upper, ["a", "b"]) == ["A", "B"]
    assert synk.map(Fit(2.0, np.ones(2)).__eq__, [1]) == [NotImplemented]
    assert synk.map(synk.function(double, outputs="sum"), [1, 2]) == [2, 4]
    assert synk.map(functools.partial(pow, 2), [1, 2, 3]) == [2, 4, 8]


# ── what all items have in common ────────────────────────────────────────────────────────────────────


def test_common_arguments_are_shared(n):
    table = synk.data(np.arange(10.0))

    def look_up(i, table, scale, names, settings):
        return names[i] + str(table[i] * scale) + settings["unit"]

    common = {"table": table, "scale": 2, "names": list("abc"), "settings": {"unit": "m"}}
    assert synk.map(look_up, range(3), common=common) == ["a0.0m", "b2.0m", "c4.0m"]
    table[:] = table[:] + 1
    assert synk.map(look_up, range(3), common=common) == ["a2.0m", "b4.0m", "c6.0m"]


@pytest.mark.one_host
def test_an_array_in_common_is_one_memory_for_all(n):
    table = np.arange(1 << 20)

    def where(i, table):
        assert not table.flags.writeable
        with open("/proc/self/maps") as maps:
            address = table.__array_interface__["data"][0]
            for line in maps:
                low, high = (int(end, 16) for end in line.split()[0].split("-"))
                if low <= address < high:
                    return line.split()[4]
        return None

    inodes = set(synk.map(where, range(20), common={"table": table}))
    assert len(inodes) == 1
    assert inodes.isdisjoint({"0", None})


def test_what_a_task_changes_of_common_arguments_is_gone_for_the_next(n):
    def grow(i, log, nested):
        log.append(i)
        nested["a"]["b"] = i
        return len(log), sorted(nested["a"])

    common = {"log": ["x"], "nested": {"a": {"c": "d"}}}
    assert synk.map(grow, range(12), common=common) == [(2, ["b", "c"])] * 12


def test_large_arrays_in_what_is_pickled_are_not_copied(n):
    class Table:
        def __init__(self, values):
            self.values = values

    table = Table(np.arange(1 << 18, dtype=float))

    def look(i, table):
        return table.values[i], table.values.flags.writeable

    assert synk.map(look, range(5), common={"table": table}) == [(i, False) for i in range(5)]
    f = synk.function(look, bcast_inputs=["table"], outputs=None)
    assert f(np.arange(6), table)[0][1] is False


def test_a_variable_in_common_is_read(n):
    w = synk.shared(np.arange(3.0), name="w")
    assert synk.map(lambda i, w: w[i], range(3), common={"w": w}) == [0, 1, 2]
    assert synk.map(lambda i: w.value[i], range(3)) == [0, 1, 2]


def test_lists_in_common_stay_lists(n):
    def shapes(i, hidden, nested):
        return [4, *hidden * 1, 1], nested["layers"] * 2, type(nested["range"]), nested["big"].sum()

    nested = {"layers": (1, 2), "range": range(3), "big": np.ones(1 << 18), "name": "x"}
    expected = ([4, 8, 8, 1], (1, 2, 1, 2), range, 1 << 18)
    assert synk.map(shapes, [0], common={"hidden": [8, 8], "nested": nested}) == [expected]


def test_what_has_changed_is_seen_by_the_next_map(n):
    """However large it is: a map sends what has changed of all that its function uses."""

    class Simulation:
        def __init__(self):
            self.field = np.zeros(50_000)
            self.log = list(range(3000))

        def at(self, i):
            return self.field[i] + self.log[i]

    simulation, table = Simulation(), dict.fromkeys(range(1000), 0)
    weights, factor = np.ones(3), 2

    def all_of_it(i):
        return simulation.at(i) + table[i] + factor * weights.sum()

    for step in range(4):
        assert synk.map(simulation.at, range(3)) == [simulation.at(i) for i in range(3)]
        assert synk.map(all_of_it, range(3)) == [all_of_it(i) for i in range(3)]
        simulation.field += step
        simulation.log[1] += step
        table[2] += step
        weights *= 2
        factor += step


# ── imap ─────────────────────────────────────────────────────────────────────────────────────────────


def test_results_come_while_items_are_still_made(n):
    """A generator that needs the first result to go on would wait for ever, were it read to its end."""
    seen = []

    def items():
        yield from range(4 * n)
        while True:
            yield len(seen)

    for result in synk.imap(double, items()):
        seen.append(result)
        if len(seen) == 5000:
            break
    assert seen[: 4 * n] == [2 * i for i in range(4 * n)]
    assert synk.map(double, [1]) == [2]


def test_few_items_are_read_ahead_of_slow_tasks(n, tmp_path):
    read = []

    def items():
        for i in range(1000):
            read.append(i)
            yield i

    def wait(i, folder):
        while not (folder / str(i)).exists():
            time.sleep(0.002)
        time.sleep(0.01)
        return i

    results = synk.imap(wait, items(), common={"folder": tmp_path})
    for i in range(6):
        (tmp_path / str(i)).touch()
        assert next(results) == i
        assert len(read) <= 20 * n
    for i in range(1000):
        (tmp_path / str(i)).touch()
    results.close()
    assert synk.map(double, [4]) == [8]


def test_large_results_do_not_pile_up(two):
    """The program reads slowly; the workers wait with more than a few results."""

    def large(i):
        return np.full(4 << 20, i, np.uint8)  # 4 MB

    read = []

    def items():
        for i in range(200):
            read.append(i)
            yield i

    for number, result in enumerate(synk.imap(large, items())):
        assert {result[0], result[-1]} == {number % 256}
        assert len(read) - number <= 50  # 64 MB, and what is on its way
    assert number == 199


@pytest.mark.one_host
def test_results_that_become_large_do_not_pile_up(two):
    """Many items are on their way when it turns out that their results are large."""
    results = synk.imap(lambda i: np.full(8 << 20, 1, np.uint8) if i > 1500 else i, itertools.count())
    assert list(itertools.islice(results, 1501)) == list(range(1501))
    before, most = resident(), 0
    for _ in range(120):  # 960 MB
        assert next(results)[-1] == 1
        time.sleep(0.005)  # the workers are faster
        most = max(most, resident())
    assert most - before < 400 << 20  # 64 MB, those of each worker, and what was freed late


def resident():
    """The bytes of memory that this process has."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_other_calls_go_on_between_two_results(n):
    f = synk.function(lambda x: x.sum(), outputs="sum")
    w = synk.shared(np.zeros(2), name="w")
    table = {"factor": 1}

    def scaled(x):
        return x * table["factor"]

    total = 0
    for i, result in enumerate(synk.imap(scaled, range(300))):
        assert result == i
        if i % 50 == 0:
            total += f(np.full(6, result))
            w.set_value(np.full(2, i))
            assert synk.map(double, [i]) == [2 * i]
    assert total == 6 * sum(range(0, 300, 50))


def test_two_maps_take_turns(n):
    one, other = synk.imap(double, range(100)), synk.imap(lambda x: -x, itertools.count())
    assert [(next(one), next(other)) for _ in range(100)] == [(2 * i, -i) for i in range(100)]
    assert list(one) == []


def test_items_may_come_from_calls_and_maps(n):
    f = synk.function(lambda x: x.sum(), outputs="sum")
    sums = (f(np.full(6, i)) for i in range(20))
    assert synk.map(double, sums) == [12 * i for i in range(20)]
    assert list(synk.imap(double, synk.imap(double, range(50)))) == [4 * i for i in range(50)]


def test_a_map_that_was_left_ends_by_itself(n):
    done = set()
    for result in synk.imap(lambda x: (x, os.getpid()), itertools.count()):
        done.add(result)
        if len(done) == 10:
            break
    assert synk.map(double, [1, 2]) == [2, 4]
    unread = synk.imap(double, itertools.count())
    assert next(unread) == 0
    del unread
    assert synk.map(double, [1, 2]) == [2, 4]
    never_begun = synk.imap(double, [1])
    del never_begun


def test_another_thread_waits_for_its_turn(n):
    results = []
    results_of_thread = []
    thread = threading.Thread(target=lambda: results_of_thread.extend(synk.map(double, range(500))))
    for result in synk.imap(double, range(500)):
        results.append(result)
        if result == 20:
            thread.start()
    thread.join()
    assert results == results_of_thread == [2 * i for i in range(500)]


# ── random streams ───────────────────────────────────────────────────────────────────────────────────


def test_the_random_stream_of_an_item_is_its_own():
    def draw(i):
        return synk.rng().random(), synk.rng().random()

    found = []
    for workers in (1, 2, 3):
        with running(workers, seed=7):
            found.append((synk.map(draw, range(20)), list(synk.imap(draw, range(20)))))
    assert found[0] == found[1] == found[2]
    first, second = found[0]
    assert len({*itertools.chain(*first), *itertools.chain(*second)}) == 80


def test_a_new_seed_begins_anew_and_a_saved_session_goes_on(two, tmp_path):
    def draw(i):
        return synk.rng().random()

    two.reseed(3)
    first = synk.map(draw, range(5))
    w = synk.shared(np.zeros(2), name="w")
    synk.save(tmp_path / "a")
    second = synk.map(draw, range(5))
    two.reseed(3)
    assert synk.map(draw, range(5)) == first
    two.reseed(4)
    assert synk.map(draw, range(5)) != first
    synk.load(tmp_path / "a")
    assert synk.map(draw, range(5)) == second
    del w


def test_generators_may_be_items(n):
    def streams():
        return [np.random.default_rng(seed) for seed in np.random.SeedSequence(1).spawn(6)]

    expected = [rng.random() for rng in streams()]
    assert synk.map(lambda rng: rng.random(), streams()) == expected


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: synk.map(3, [1]), ["map() takes a function", "got 3"]),
        (lambda: synk.imap(3, [1]), ["map() takes a function", "got 3"]),
        (lambda: synk.map(double), ["got no items"]),
        (lambda: synk.map(double, 5), ["takes iterables", "common="]),
        (lambda: synk.map(double, [1], [2]), ["double(x) cannot be called with 2 arguments"]),
        (lambda: synk.map(double, [1], common={"y": 1}), ["common=", "y="]),
        (lambda: synk.map(double, [1], common=[1]), ["common= takes a dict"]),
        (lambda: synk.map(double, [1], common={1: 1}), ["strings"]),
        (lambda: synk.map(double, [1], comon={}), ["comon", "common"]),
        (lambda: synk.map(double, [1], timeout="a"), ["timeout must be a number"]),
        (lambda: synk.map(double, [1], timeout=0), ["more than 0"]),
        (lambda: synk.map(double, [1], progress=3), ["progress"]),
    ],
)
def test_wrong_arguments_are_told_before_a_worker_runs(three, call, words):
    with pytest.raises(InvalidValue if "more than 0" in words else InvalidType) as error:
        call()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_item_that_does_not_pickle_is_named(n):
    items = [1, 2, threading.Lock(), 4]
    with pytest.raises(InvalidType, match=r"item 2 of map\(\).*lock.*cannot be pickled"):
        synk.map(double, items)
    results = synk.imap(double, items)
    assert [next(results), next(results)] == [2, 4]
    with pytest.raises(InvalidType, match="item 2"):
        next(results)
    assert synk.map(double, [1]) == [2]


def test_collectives_are_refused_in_tasks(n):
    for use in (lambda x: synk.all_reduce(x), lambda x: synk.barrier(), lambda x: synk.broadcast(x)):
        with pytest.raises(UsageError, match="a task used a collective"):
            synk.map(use, [1.0, 2.0])
    assert synk.function(lambda: synk.all_reduce(1.0, "sum"), outputs="max")() == n


def test_variables_cannot_be_assigned_in_tasks(n):
    w = synk.shared(np.zeros(3), name="w")

    def assign(x):
        w.value = np.full(3, x)

    def write(x):
        w[0] = x

    def into(x):
        w.value[0] = x

    for change, error, told in (
        (assign, UsageError, r"a task assigned .*'w'"),
        (write, UsageError, r"a task assigned .*'w'"),
        (into, WorkerError, "read-only"),
    ):
        with pytest.raises(error, match=told):
            synk.map(change, [1.0, 2.0])
    assert w.get_value().tolist() == [0, 0, 0]
    synk.function(into, inputs=[], bcast_inputs=["x"], outputs=[])(2.0)
    assert w.get_value().tolist() == [2, 0, 0]


def test_objects_that_tasks_share_cannot_change(n):
    log, counts, counter, array = [], {}, Scaled(0), np.zeros(3)
    letters = iter("abc" * 100)  # itertools' own pickle up to Python 3.13 only
    numbers = iter(range(100))

    def to_attribute(x):
        counter.scale += 1

    class Counted:
        calls = 0

        def __call__(self, x):
            Counted.calls += 1
            return Counted.calls

    def counted(x):
        counted.calls += 1
        return counted.calls

    counted.calls = 0
    for change, error, told in (
        (lambda x: log.append(x), InvalidValue, "changes '?log"),
        (lambda x: counts.setdefault(x, x), InvalidValue, "changes '?counts"),
        (lambda x: array.put(0, x), WorkerError, "read-only"),
        (to_attribute, InvalidValue, "counter"),
        (lambda x: next(letters), InvalidValue, "changes"),
        (lambda x: next(numbers), InvalidValue, "changes"),
        (Counted(), InvalidValue, "changes"),
        (counted, InvalidValue, "'counted' changes an attribute of counted, at (an )?item"),
    ):
        with pytest.raises(error, match=told):
            synk.map(change, range(3 * n))
    assert (log, counts, counter.scale) == ([], {}, 0)


def test_what_an_object_prepares_at_its_first_use_is_no_change(n):
    class Table:
        def __init__(self, rows):
            self.rows = rows

        @functools.cached_property
        def total(self):
            return sum(self.rows)

    table = Table([1, 2, 3])

    @functools.lru_cache
    def square(x):
        return x * x

    found = synk.map(lambda x: table.total * square(x % 3), range(12))
    assert found == [6 * (x % 3) ** 2 for x in range(12)]


class Scaled:
    """Computes a table when it is first used; its setters forget that."""

    def __init__(self, scale):
        self.scale, self.table, self.rare = scale, None, None

    def set(self, scale):
        self.scale, self.table = scale, None

    @functools.cached_property
    def offset(self):
        return 10 * self.scale

    def at(self, k):
        if self.table is None:
            self.table = np.arange(100) * self.scale
        if k > 10 and self.rare is None:
            self.rare = self.scale
        return float(self.table[k] + self.offset)


gap = 1


@functools.cache
def score(k):
    return k * gap


def scored(k):
    return score(k) + gap


def test_what_tasks_have_prepared_is_forgotten_when_the_program_changes_something(n):
    global gap
    scaled = Scaled(2.0)
    for scale in (3.0, 5.0, 5.0):
        scaled.set(scale)
        scaled.__dict__.pop("offset", None)
        assert synk.map(scaled.at, range(40)) == [k * scale + 10 * scale for k in range(40)]
    for gap in (1, 2, 3):
        score.cache_clear()
        assert synk.map(scored, range(9)) == [k * gap + gap for k in range(9)]
        assert synk.map(score, range(9)) == [k * gap for k in range(9)]


def test_a_memo_stays_where_nothing_changes(n):
    @functools.cache
    def slow(k):
        return os.getpid(), time.monotonic()

    first = dict(synk.map(slow, [1] * 30))
    for pid, made in synk.map(slow, [1] * 30):
        assert first.setdefault(pid, made) == made


@pytest.mark.parametrize("item", [0, 50, 70, 98, 99])
def test_what_any_task_leaves_behind_is_refused(n, item):
    failed = []

    def task(k):
        if k == item:
            failed.append(k)
        return k

    for results in (synk.map, lambda *args: list(synk.imap(*args))):
        with pytest.raises(InvalidValue, match="'task' changes failed"):
            results(task, range(100))


def test_what_is_left_of_an_imap_ends_with_its_session():
    with synk.Session(2, verbose=False) as own:
        rest = own.imap(double, itertools.count())
        next(rest)
    with pytest.raises(synk.SessionClosed):
        list(itertools.islice(rest, 5000))


def test_inside_of_a_worker_there_is_no_map(n):
    with pytest.raises(UsageError, match="inside a worker"):
        synk.map(lambda x: synk.map(double, [x]), [1])


def test_an_enum_comes_back_whatever_functions_named_it(n):
    class Side(enum.Enum):
        LEFT, RIGHT = 0, 1

    synk.map(lambda side: side is Side.LEFT, [Side.LEFT])
    synk.map(lambda x: 1, [3])
    found = synk.map(lambda x: x, [Side.RIGHT, {"side": Side.LEFT}])
    assert found[0] is Side.RIGHT
    assert found[1]["side"] is Side.LEFT


class Stated:
    """Whose state is whole, or it fails."""

    def __init__(self):
        self.fits, self.table = 1, None

    def __getstate__(self):
        return dict(vars(self))

    def __setstate__(self, state):
        self.fits, self.table = state["fits"], state["table"]

    @functools.cached_property
    def extra(self):
        return [self.fits]


def test_a_state_is_set_whole_after_tasks_have_prepared_something(n):
    stated = Stated()

    def task(k):
        stated.table = stated.table or [k]
        return stated.fits

    synk.map(task, range(8))
    synk.function(lambda: setattr(stated, "table", [5]), outputs=[])()
    synk.push(stated)
    assert synk.map(lambda k: stated.table, range(4)) == [None] * 4
    synk.map(task, range(8))
    stated.fits = 3
    assert synk.map(task, range(4)) == [3] * 4


def test_what_is_prepared_here_and_there_is_no_contradiction(n):
    class Graph:
        def __init__(self):
            self.edges = [1]

        @functools.cached_property
        def at(self):
            return {"edges": len(self.edges)}

    graph = Graph()
    assert synk.map(lambda k: graph.at["edges"], range(4)) == [1] * 4
    assert graph.at == {"edges": 1}
    graph.edges.append(2)
    assert synk.map(lambda k: len(graph.edges), range(4)) == [2] * 4
