"""Tasks travel in batches, and nobody can tell: long ones among short ones, and what items share."""

import abc
import dataclasses
import functools
import gc
import itertools
import os
import random
import threading
import typing

import numpy as np
import pytest

import synkro as synk
from support.waiting import Watch, wait_until
from synkro.ipc.queue import Batch, Ticket

pytestmark = pytest.mark.counted_once  # the queue lives as long as the session


class Individual:
    """Of a class of the script, which travels by value."""

    def __init__(self, genes):
        self.genes = genes
        self.fitness = None

    def __eq__(self, other):
        return vars(self) == vars(other)

    __hash__ = None


def same(x):
    return x


# ── long tasks among short ones ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("place", [0, 3, 250, 499])
def test_others_do_what_waits_behind_a_task(two, tmp_path, results, place):
    """The task at one place ends when all others have: also those of its own batch."""

    def task(number):
        if number == place:
            return wait_until(lambda: len(list(tmp_path.iterdir())) == 499)
        (tmp_path / str(number)).touch()
        return True

    with Watch():
        assert results(task, range(500)) == [True] * 500


@pytest.mark.parametrize("place", [0, 350])
def test_results_leave_while_another_task_runs_on(two, tmp_path, place):
    """A bar, too, shows what has ended, and not only whole batches."""

    def task(number):
        return wait_until((tmp_path / "go").exists) if number == place else number

    with Watch():
        results = synk.imap(task, range(400), ordered=False)
        found = [next(results) for _ in range(399)]
        assert sorted(found) == [number for number in range(400) if number != place]
        (tmp_path / "go").touch()
        assert list(results) == [True]


@pytest.mark.parametrize("places", [(0, 1, 2), (10, 5000, 9998), (9996, 9997, 9998)])
def test_long_tasks_among_many_short_ones_run_beside_each_other(two, tmp_path, places):
    def task(number):
        if number in places:
            (tmp_path / str(number)).touch()
            assert wait_until(lambda: len(list(tmp_path.iterdir())) > 1)
        return number

    with Watch():
        assert synk.map(task, range(9999)) == list(range(9999))


# ── in any order ─────────────────────────────────────────────────────────────────────────────────────


def test_any_order_ends_as_the_order_of_items_does(two):
    def task(number):
        if number == 300:
            raise KeyError("three hundred")
        return number

    results = synk.imap(task, range(2000), ordered=False)
    found = []
    with pytest.raises(KeyError, match=r"at item 300 \(300\)"):
        found.extend(results)
    assert len(found) == len(set(found))
    assert 300 not in found
    closed = synk.imap(same, itertools.count(), ordered=False)
    next(closed)
    closed.close()
    assert list(closed) == []
    assert sorted(synk.imap(same, range(50), ordered=False)) == list(range(50))
    with pytest.raises(synk.InvalidType, match="ordered"):
        synk.imap(same, [1], ordered="yes")


def test_in_order_the_first_item_that_fails_is_told(two, tmp_path):
    """What comes before it has been done, also where another item failed sooner."""

    def task(number):
        if number == 40:
            assert wait_until((tmp_path / "200").exists)
        if number == 200:
            (tmp_path / "200").touch()
        if number in (40, 200):
            raise ValueError(number)
        return number

    results, found = synk.imap(task, range(400)), []
    with Watch(), pytest.raises(ValueError, match="at item 40 "):
        found.extend(results)
    assert found == list(range(40))
    assert list(results) == []


# ── what items and results share ─────────────────────────────────────────────────────────────────────


def test_a_generator_may_fill_one_object_again_and_again(two, results):
    def items():
        memory = np.zeros(3)
        for number in range(500):
            memory[:] = number
            yield memory

    found = results(lambda array: float(array.sum()), items())
    assert found == [3.0 * number for number in range(500)]


def test_a_result_is_what_it_was_when_its_task_ended(two):
    @functools.cache
    def memory():
        return np.empty(3)

    def filled(number):
        memory()[:] = number
        return memory()

    assert [each.tolist() for each in synk.map(filled, range(200))] == [[n] * 3 for n in range(200)]


# ── classes of the program ───────────────────────────────────────────────────────────────────────────


def test_instances_come_back_as_what_they_were(two):
    def evaluated(individual):
        individual.fitness = sum(individual.genes)
        return individual

    items = [Individual([float(n)] * 5) for n in range(300)]
    found = synk.map(evaluated, items)
    assert all(type(each) is Individual for each in found)
    assert [each.fitness for each in found] == [5.0 * n for n in range(300)]
    assert all(each.fitness is None for each in items)


def test_a_class_travels_once(two):
    def identity(item):
        return synk.rank(), id(type(item))

    class Local(Individual):
        pass

    for cls in (Individual, Local):
        items = [cls(n) for n in range(200)]
        found = {*synk.map(identity, items), *synk.map(identity, items)}
        assert len(found) == len({rank for rank, _ in found})  # one class a worker


def test_more_classes_than_are_compared(two):
    classes = [type(f"Kind{n}", (), {"number": n}) for n in range(60)]
    for _ in range(2):
        assert synk.map(lambda item: item.number, [cls() for cls in classes]) == list(range(60))


class Slotted:
    __slots__ = ("__hidden", "x")

    def __init__(self, x):
        self.x, self.__hidden = x, -x

    @property
    def hidden(self):
        return self.__hidden


@dataclasses.dataclass(slots=True)
class Record:
    x: int
    values: list


def test_instances_with_slots_have_them_on_the_workers_and_come_back(two):
    def seen(item):
        return item, hasattr(item, "__dict__")

    for found, has_dict in synk.map(seen, [Slotted(n) for n in range(20)]):
        assert (type(found), found.hidden, has_dict) == (Slotted, -found.x, False)
    records = [Record(n, [n]) for n in range(20)]
    assert synk.map(seen, records) == [(record, False) for record in records]
    f = synk.function(lambda x: Record(int(x.sum()), []), outputs=None)
    assert f(np.ones(4)) == [Record(2, []), Record(2, [])]


# ── whose error it is ────────────────────────────────────────────────────────────────────────────────


def _not_here():
    raise RuntimeError("not here")


class OnlyThere:
    def __reduce__(self):
        return _not_here, ()


def test_items_and_results_that_do_not_travel_are_no_failures_of_the_function(two):
    with pytest.raises(synk.InvalidType, match=r"item 9 .*cannot be made again on a worker") as caught:
        synk.map(same, [[k] for k in range(9)] + [OnlyThere()])
    assert type(caught.value) is synk.InvalidType

    def lazy(k):
        return (n for n in [k]) if k == 9 else k

    with pytest.raises(
        synk.OutputError, match=r"function 'lazy' for item 9, .*cannot be pickled"
    ) as told:
        synk.map(lazy, range(10))
    assert type(told.value) is synk.OutputError


# ── what items rely on ───────────────────────────────────────────────────────────────────────────────


class Rated:
    factor = 1

    def __init__(self, x):
        self.x = x

    def value(self):
        return self.x * rate * self.factor


rate = 1


@pytest.fixture
def rates(monkeypatch):
    """Sets the rate."""
    monkeypatch.setitem(globals(), "rate", 1)
    return lambda value: globals().update(rate=value)


@pytest.mark.parametrize("kind", [Rated, lambda x: [Rated(x)], lambda x: {"x": Rated(x)}])
def test_what_the_program_changes_during_a_map_reaches_no_task(two, rates, monkeypatch, kind):
    """Whatever items are: all that the function and their classes use is as it was at first."""

    def task(item):
        item = item if isinstance(item, Rated) else next(iter(item.values() if "x" in item else item))
        return item.value() * rate

    found = []
    for result in synk.imap(task, [kind(n) for n in range(1000)]):
        found.append(result)
        rates(100)
        monkeypatch.setattr(Rated, "factor", 7)
    assert found == list(range(1000))
    rates(3)
    assert synk.map(task, [kind(n) for n in range(9)]) == [63 * n for n in range(9)]


def test_nor_by_a_generator_or_by_another_map(two, rates):
    def items():
        for n in range(200):
            rates(n)
            yield Rated(1)

    assert synk.map(lambda item: rate, items()) == [1] * 200 or not rates(1)
    rates(1)
    results = synk.imap(lambda n: n * rate, range(500))
    assert next(results) == 0
    rates(5)
    assert synk.map(lambda item: item.genes, [Individual(n) for n in range(9)]) == list(range(9))
    whole = synk.function(lambda item: item.genes, bcast_inputs="item", outputs=None)
    assert whole(Individual(4)) == [4, 4]
    assert list(results) == list(range(1, 500))


class Sharing:
    seen = []  # noqa: RUF012
    memo = {}  # noqa: RUF012

    def __init__(self, x):
        self.x = x

    def listed(self):
        self.seen.append(self.x)
        return len(self.seen)

    def noted(self):
        self.memo[self.x] = 1
        return len(self.memo)

    def default(self, held=[]):
        held.append(self.x)
        return len(held)

    def logged(self):
        log.append(self.x)
        return len(log)


log = []


class Inheriting(Sharing):
    pass


@pytest.mark.parametrize("cls", [Sharing, Inheriting])
@pytest.mark.parametrize("method", ["listed", "noted", "default", "logged"])
@pytest.mark.parametrize("way", [list, iter, "nested", "common"])
def test_tasks_may_not_change_what_the_class_of_an_item_has(two, cls, method, way):
    items = [cls(n) for n in range(30)]
    told = pytest.raises(synk.InvalidValue, match=r"changes (Sharing\.(seen|memo|default)|log)")
    for _ in range(2):
        with told:
            if way == "common":
                synk.map(lambda n, one: getattr(one, method)(), range(30), common={"one": items[0]})
            elif way == "nested":
                synk.map(lambda pair: getattr(pair[1], method)(), [[n, items[n]] for n in range(30)])
            else:
                synk.map(lambda item: getattr(item, method)(), way(items))
    assert (Sharing.seen, Sharing.memo, log) == ([], {}, [])
    seen = synk.function(lambda: len(Sharing.seen) + len(Sharing.memo) + len(log), outputs=None)
    assert seen() == [0, 0]


def test_tasks_may_not_change_the_class_of_their_items(two):
    class Counted:
        count = 0

    def counted(item):
        type(item).count += 1
        return type(item).count

    items = [Counted() for _ in range(100)]
    with pytest.raises(synk.InvalidValue, match=r"changes the class Counted, at (an )?item"):
        synk.map(counted, items)
    assert Counted.count == 0
    assert synk.map(lambda item: item.count, items) == [0] * 100


def test_a_class_that_is_in_common_may_not_be_changed(two):
    def counted(n, cls):
        cls.count = n
        return cls.count

    Counting = type("Counting", (), {"count": 0})
    with pytest.raises(synk.InvalidValue, match="changes the class Counting"):
        synk.map(counted, range(30), common={"cls": Counting})


def late():
    """Of a class that no worker has."""

    class Late:
        pass

    return Late()


def stuck_or_dead(x):
    if x == "stuck":
        wait_until(lambda: False, 20)
    if x == "die":
        wait_until(lambda: False, 0.2)
        os._exit(3)


def test_the_timeout_holds_while_a_class_waits_to_be_sent(two, results):
    with Watch(), pytest.raises(synk.CallTimeout, match="is running item 0"):
        results(stuck_or_dead, ["stuck", [late()]], timeout=0.5)
    assert synk.map(same, range(9)) == list(range(9))


@pytest.mark.parametrize(
    ("each", "first", "options", "error", "told"),
    [
        ("map", "die", {}, synk.WorkerDied, "at item 0"),
        ("imap", "die", {}, synk.WorkerDied, "at item 0"),
        ("map", "stuck", {"timeout": 0.5}, synk.CallTimeout, r"timeout of 0\.5 s"),
    ],
)
def test_a_session_may_end_while_a_class_waits_to_be_sent(each, first, options, error, told):
    ended = pytest.raises(error, match=told)
    with synk.Session(2, verbose=False, **options) as session, Watch(), ended:
        list(getattr(session, each)(stuck_or_dead, [first, [late()]]))


def test_what_another_function_uses_is_no_matter_of_a_map(two):
    state = 1
    other = synk.function(lambda x: x * state, bcast_inputs="x", outputs=None)
    assert other(1) == [1, 1]
    results = synk.imap(lambda item: item.x, [Rated(n) for n in range(500)])
    next(results)
    state = threading.Lock()
    assert list(results) == list(range(1, 500))
    state = 2
    assert other(1) == [2, 2]


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, StopIteration])
@pytest.mark.parametrize("each", ["map", "imap"])
def test_what_would_end_something_here_is_an_exception_of_the_worker(two, each, kind):
    """It comes after the results before it."""

    def task(n):
        if n == 300:
            raise kind("here")
        return n

    found = []
    with pytest.raises(synk.WorkerError, match=f"at item 300 .*{kind.__name__}"):
        found.extend(getattr(synk, each)(task, range(1000)))
    assert found == list(range(300 * (each == "imap")))


# ── what the program sees ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("way", ["close", "break", "failure"])
def test_a_generator_of_items_is_closed_with_the_iterator(two, way):
    closed = []

    def items():
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    results = two.imap(lambda n: 1 // (n - 99), items())
    next(results)
    if way == "close":
        results.close()
    elif way == "failure":
        with pytest.raises(ZeroDivisionError):
            list(results)
    else:
        del results
    gc.collect()
    assert closed
    assert synk.map(same, range(9)) == list(range(9))


VIEWS = {
    "a part": lambda a: a[8:56, 8:56],
    "every other": lambda a: a[::2, ::2],
    "backwards": lambda a: a[::-1],
    "a column": lambda a: a[:, 2],
    "real parts": lambda a: (a + 1j).real,
    "another order": lambda a: a.astype(">f8")[:, ::2],
    "transposed": lambda a: a.T,
    "repeated": lambda a: np.broadcast_to(a[0], (64, 64)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_of_arrays_are_read_and_not_written_to(two, view):
    held = view(np.arange(4096.0).reshape(64, 64))
    box = Box(held)
    for task in (lambda n: held.sum() + n, functools.partial(lambda a, n: a.sum() + n, held), box.total):
        assert two.map(task, range(4)) == [held.sum() + n for n in range(4)]

    def written(n):
        held[...] = n

    with pytest.raises(ValueError, match="read-only"):
        two.map(written, range(4))
    assert two.map(lambda n: held.sum() + n, range(4)) == [held.sum() + n for n in range(4)]
    assert two.function(lambda: held.sum(), outputs=None)() == [held.sum()] * two.n_parallel


class Box:
    def __init__(self, held):
        self.held = held

    def total(self, n):
        return self.held.sum() + n


@pytest.mark.parametrize("part", [lambda t, i: t[i], lambda t, i: t, lambda t, i: t[:, i]])
def test_results_may_be_written_to_whatever_they_are_a_part_of(two, part):
    table = np.arange(20.0).reshape(4, 5)
    for task, common in (
        (lambda i: part(table, i), {}),
        (lambda i, table: part(table, i), {"table": table}),
    ):
        found = two.map(task, range(3), common=common)
        for i, each in enumerate(found):
            assert np.array_equal(each, part(table, i))
            each += 1


@pytest.mark.parametrize("kind", [np.random.default_rng, np.random.RandomState, random.Random])
def test_tasks_may_not_draw_from_what_an_object_holds(two, kind):
    class Option:
        def __init__(self, generator):
            self.generator = generator

        def price(self, strike):
            draw = getattr(self.generator, "random", None) or self.generator.random_sample
            return strike + float(draw())

        def strike(self, strike):
            return strike

    option = Option(kind(0))
    with pytest.warns(UserWarning, match="is a random generator"):
        assert synk.map(option.strike, range(9)) == list(range(9))
    for _ in range(2):
        with pytest.raises(synk.InvalidValue, match=r"draws from .*generator, at .*synk\.rng\(\)"):
            synk.map(option.price, range(9))
    assert synk.map(option.strike, range(9)) == list(range(9))


class Plugin:
    found = []  # noqa: RUF012

    def __init_subclass__(cls, tag=None, **kwargs):
        super().__init_subclass__(**kwargs)
        Plugin.found.append((cls.__name__, tag))

    def names(self):
        return list(Plugin.found)


class Gray(Plugin, tag="g"):
    pass


class Dark(Gray):
    pass


class Meta(abc.ABCMeta):
    registry = []  # noqa: RUF012
    count = 0

    def __new__(cls, name, bases, namespace, **kwargs):
        made = super().__new__(cls, name, bases, namespace)
        cls.registry.append(name)
        made.place = len(cls.registry)
        return made

    def __init__(cls, *args):
        super().__init__(*args)
        Meta.count += 1

    def __call__(cls, *args):
        made = super().__call__(*args)
        made.called = True
        return made


class Counted(metaclass=Meta):
    @abc.abstractmethod
    def names(self): ...


class Whole(Counted):
    def names(self):
        return Meta.registry[:], Meta.count, type(self).place, Whole().called, isinstance(self, Counted)


@pytest.mark.parametrize("kinds", [[Gray, Dark, Gray], [Whole]], ids=["base", "metaclass"])
def test_classes_that_are_registered_are_so_once_on_the_workers(two, kinds):
    def names(item):
        return item.names()

    for _ in range(2):
        items = [kind() for kind in kinds]
        assert synk.map(names, items) == [*map(names, items)]
        kinds = [*kinds, type(kinds[0])("Later", (kinds[-1],), {})]
    total = synk.function(lambda: (len(Plugin.found), len(Meta.registry)), outputs=None)
    assert total() == [(len(Plugin.found), len(Meta.registry))] * 2


T = typing.TypeVar("T")


class Marked(typing.NamedTuple):
    number: int


class Boxed(typing.Generic[T]):
    def __init__(self, held):
        self.held = held


class Double(Boxed[int], Plugin, tag="d"):
    pass


@typing.runtime_checkable
class Held(typing.Protocol):
    held: int


@pytest.mark.parametrize("kind", [Marked, Boxed, Double, Boxed[float]])
def test_classes_with_bases_that_are_none(two, kind):
    def seen(item):
        return item, isinstance(item, Held), len(Plugin.found)

    for found, held, count in synk.map(seen, [kind(n) for n in range(9)]):
        assert type(found) is type(kind(0))
        assert (held, count) == (kind is not Marked, len(Plugin.found))


@pytest.mark.parametrize("way", [list, iter])
def test_a_class_that_cannot_be_sent_is_told_as_the_item(two, way):
    class Locked:
        lock = threading.Lock()

    with pytest.raises(synk.InvalidType, match=r"item 0 of map\(\), .*Locked object.*lock"):
        synk.map(same, way([Locked(), Locked()]))
    assert synk.map(same, [1, 2]) == [1, 2]


def test_results_of_a_class_that_cannot_be_sent(two):
    def made(n):
        class Locked:
            lock = threading.Lock()

        return Locked() if n == 40 else n

    with pytest.raises(synk.OutputError, match=r"for item 40, .*a Locked, cannot be pickled"):
        synk.map(made, range(100))
    assert synk.map(same, [[1], {"x": 2}]) == [[1], {"x": 2}]


@pytest.mark.parametrize("chunksize", [None, 2])
def test_items_that_go_together_among_others(two, chunksize):
    items = [n if n % 3 else np.full(3, n) if n % 2 else [n] for n in range(9000)]
    found = synk.map(same, items, chunksize=chunksize)
    assert list(map(type, found)) == list(map(type, items))
    assert all(np.array_equal(one, other) for one, other in zip(found, items, strict=True))


def test_a_run_that_was_interrupted_is_not_handed_over_late():
    """The thread that looks at runs may be slow: the map, and the next one's beginning, went before."""
    from synkro.worker.tasks import Tasks, _Run

    class Untouched:
        def __getattr__(self, name):
            raise AssertionError(name)

    tasks = object.__new__(Tasks)
    tasks._lock, tasks._taker, tasks._listener = threading.Lock(), Untouched(), Untouched()
    run = tasks._run = _Run(Ticket(0, 0, 4), Batch(0, None), 1, None)
    tasks._let_go()
    tasks._hand_over_late(run)
    tasks._run = run
    with pytest.raises(AssertionError, match="is_dry"):
        tasks._hand_over_late(run)
