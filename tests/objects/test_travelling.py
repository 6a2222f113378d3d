"""Values of users' own kinds: each arrives at the workers as what it is, or is refused by name."""

import array
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import json
import os
import signal
import sys
import time
import types
import typing
import weakref
import xml.etree.ElementTree
from unittest import mock

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.sessions import per_rank
from synkro import InvalidType, InvalidValue, WorkerDied, WorkerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

pytestmark = [pytest.mark.counted_once, pytest.mark.filterwarnings("ignore:.*outputs= was not given")]

X = np.arange(4.0)


class Route(list):
    """A list with a method."""

    def total(self):
        return sum(self)


class Pair(tuple):
    """A tuple with a method."""

    __slots__ = ()

    def first(self):
        return self[0]


class Grid:
    """What can become an array: xarray's, arrow's and astropy's tables can."""

    step = 0.5

    def __array__(self, dtype=None, copy=None):
        return np.arange(3.0)


class dotdict(dict):
    """A dict with attributes, by the usual recipe."""

    __getattr__, __setattr__, __delattr__ = dict.get, dict.__setitem__, dict.__delitem__


class AttrDict(dict):
    """Another one, which raises KeyError for attributes that it lacks."""

    def __getattr__(self, key):
        return self[key]


OTHERS = {
    "deque": lambda: collections.deque([1, 2], 5),
    "list subclass": lambda: Route([1, 2]),
    "tuple subclass": lambda: Pair([1, 2]),
    "__array__": Grid,
    "XML": lambda: xml.etree.ElementTree.fromstring("<a><b/></a>"),
    "struct_time": lambda: time.gmtime(0),
    "stat_result": lambda: os.stat("/"),
    "array.array": lambda: array.array("i", [1, 2]),
    "bytearray": lambda: bytearray(b"ab"),
    "range": lambda: range(1, 3),
    "dict with attributes": lambda: dotdict(rate=2.0),
    "dict that raises": lambda: AttrDict(rate=2.0),
    "mock": mock.MagicMock,
    "set": lambda: {1, 2},
}


def kind(x):
    return type(x).__name__


@pytest.mark.parametrize("made", OTHERS.values(), ids=OTHERS)
class TestWhatIsNoArray:
    def test_arrives_as_what_it_is(self, two, made):
        value = made()
        name = kind(value)
        told = synk.function(lambda x, v: kind(v), outputs=None, bcast_inputs="v")
        assert told(X, value) == told(X, value) == [name] * 2
        assert synk.map(lambda i, v: kind(v), [1], common={"v": value}) == [name]
        assert synk.map(kind, [value]) == [name]
        assert per_rank(lambda: kind(value)) == [name] * 2

    def test_comes_back_as_what_it_is(self, two, made):
        name = kind(made())
        assert kind(synk.map(lambda i: made(), [1])[0]) == name
        assert list(map(kind, per_rank(lambda: made()))) == [name] * 2


def test_methods_of_its_own_work_on_what_arrives(two):
    f = synk.function(lambda x, r, p: r.total() + p.first(), outputs=None, bcast_inputs=["r", "p"])
    assert f(X, Route([1, 2]), Pair([5, 6])) == [8, 8]


@pytest.mark.parametrize("kind", [dotdict, AttrDict])
def test_dicts_with_attributes_are_dicts_everywhere(two, kind):
    f = synk.function(lambda x, c: c["rate"] * x.sum(), outputs="sum", bcast_inputs="c")
    assert f(X, kind(rate=2.0)) == 12.0
    assert synk.map(lambda i, c: c["rate"] * i, [1, 2], common={"c": kind(rate=2.0)}) == [2.0, 4.0]
    assert synk.map(lambda i: kind(rate=i), [1, 2]) == [{"rate": 1}, {"rate": 2}]
    assert synk.function(lambda x: kind(n=len(x)), outputs=None)(X) == [{"n": 2}] * 2
    assert synk.function(lambda d: d["a"].sum(), outputs="sum")(kind(a=X)) == X.sum()


def test_arrays_numbers_and_plain_lists_arrive_as_before(two):
    told = synk.function(lambda x, v: (kind(v), v + v), outputs=None, bcast_inputs="v")
    for value in ([1, 2], (1, 2), np.array([1, 2])):
        for name, twice in told(X, value):
            assert name == "ndarray"
            assert twice.tolist() == [2, 4]
    assert told(X, 2) == [("int", 4)] * 2


# ── what pickle takes for a name ─────────────────────────────────────────────────────────────────────


class Mark:
    """The only one of its kind, which pickle takes for a name."""

    def __init__(self):
        self.rate = 1.0

    def __reduce__(self):
        return "MARK"


MARK = Mark()
UserId = typing.NewType("UserId", int)
P = typing.ParamSpec("P")
INFO = np.finfo("f4")


class Hidden:
    __slots__ = ("__k", "__weakref__", "open")

    def __init__(self, k=1):
        self.__k, self.open = k, 2

    def k(self):
        return self.__k


def of_a_new_type(i: UserId) -> int:
    return UserId(i)


def of_parameters(i: typing.Callable[P, int]) -> int:
    return 2


def with_a_default(i, d=MARK):
    return d is MARK


@pytest.mark.parametrize("task", [of_a_new_type, of_parameters, with_a_default])
def test_a_function_that_names_it_runs(two, task):
    assert synk.map(task, [1, 2]) == [task(1), task(2)]
    assert per_rank(lambda: task(1)) == [task(1)] * 2


def test_what_is_the_only_one_stays_that_on_both_ways(two):
    assert per_rank(lambda: MARK.rate) == [1.0] * 2  # which brings it
    assert synk.map(lambda x: x is MARK, [MARK, Mark()]) == [True, False]
    back = synk.map(lambda i: MARK, [1])
    assert back[0] is MARK
    told = synk.function(lambda v: v is MARK, outputs=None, bcast_inputs="v")
    assert told(MARK) == [True] * 2


def test_and_its_attributes_are_those_of_the_program(two):
    f = synk.function(lambda: MARK.rate, outputs=None)
    assert f() == [1.0] * 2
    MARK.rate = 3.0
    try:
        assert f() == [3.0] * 2
    finally:
        MARK.rate = 1.0


def test_private_slots_and_limits_of_floats(two):
    hidden = Hidden(5)
    assert synk.map(lambda i: hidden.k() + hidden.open + i, [1]) == [8]
    assert synk.map(lambda h: h.k(), [Hidden(7)]) == [7]
    assert synk.map(lambda i: Hidden(i).k(), [3]) == [3]
    assert synk.map(lambda i: float(INFO.eps), [1]) == [float(INFO.eps)]


# ── what cannot be made again ────────────────────────────────────────────────────────────────────────


class Needs:
    """Made from an argument that pickle does not keep."""

    def __new__(cls, a):
        return super().__new__(cls)

    def __init__(self, a):
        self.a = a


def test_what_cannot_be_made_again_is_named(two):
    needs = Needs(3)
    holds = {"inner": [needs]}

    def uses(i):
        return holds["inner"][0].a

    f = synk.function(kind, outputs=None, bcast_inputs="x")
    for use, says in (
        (lambda: synk.map(uses, [1]), "the function 'uses' .*'holds'.*Needs"),
        (lambda: per_rank(uses, 1), "the function 'uses' .*'holds'"),
        (lambda: synk.map(kind, [needs]), "item 0 for the function 'kind'"),
        (lambda: f(needs), "an argument of the function 'kind'"),
    ):
        with pytest.raises(InvalidType, match=rf"{says}.*Give Needs a __reduce__"):
            use()
    assert f(1) == ["int"] * 2


def test_to_look_for_it_changes_no_class_of_the_programs(two):
    class Base:
        made: typing.ClassVar[list] = []

        def go(self):
            return Needs

    thing, needs = Base(), Needs(3)
    before = vars(Base) | {"__slotnames__": []}
    with pytest.raises(InvalidType, match="Needs"):
        synk.map(lambda i: (thing.go(), needs.a), [1])
    assert vars(Base) | {"__slotnames__": []} == before


class Weak:
    """Holds what others hold, and something of its own."""

    instances: typing.ClassVar = weakref.WeakSet()

    def __init__(self):
        self.seen = weakref.WeakKeyDictionary()
        self.named = weakref.WeakValueDictionary()
        self.k = 4

    def see(self, i):
        self.seen[self] = i
        return len(self.seen)

    @functools.singledispatchmethod
    def choose(self, x):
        return "any"

    @choose.register
    def _(self, x: int):
        return "int"


@functools.singledispatch
def chosen(x):
    return "any"


@chosen.register
def _(x: int):
    return "int"


def test_weak_containers_and_functions_chosen_by_type_travel_as_long_as_nobody_uses_them(two):
    weak = Weak()
    assert synk.map(lambda i: weak.k + i, [1]) == [5]
    assert synk.map(lambda w: w.k, [weak]) == [4]
    assert synk.map(lambda i: Weak.__name__, [1]) == ["Weak"]
    uses = {
        "a WeakKeyDictionary": lambda i: weak.see(i),
        "a WeakValueDictionary": lambda i: list(weak.named),
        "a WeakSet": lambda i: len(Weak.instances),
        "'choose' chooses": lambda i: weak.choose(i),
        "'chosen' chooses": lambda i: chosen(i),
    }
    for name, use in uses.items():
        with pytest.raises(InvalidType, match=f"{name}.* does not travel") as raised:
            synk.map(use, [1])
        assert isinstance(raised.value, WorkerError)
    with pytest.raises(InvalidType, match="'choose' chooses a function by the type of its argument"):
        synk.map(weak.choose, [1, 2])
    assert synk.map(lambda i: weak.k + i, [1]) == [5]


def test_those_of_installed_packages_are_imported(two):
    from pkgutil import iter_importer_modules

    def names(folder):
        from importlib.machinery import FileFinder, SourceFileLoader

        finder = FileFinder(folder, (SourceFileLoader, [".py"]))
        return sorted(name for name, _ in iter_importer_modules(finder))

    folder = os.path.dirname(json.__file__)
    assert synk.map(names, [folder]) == [names(folder)]
    assert "decoder" in names(folder)


# ── while tasks run ──────────────────────────────────────────────────────────────────────────────────


class Schema:
    pass


class Point:
    """Prepared when an instance is pickled, as libraries do with their classes."""

    schema = None

    def __getstate__(self):
        Point.schema = Schema()
        return {"a": 1}


def test_an_item_that_changes_its_class_while_it_is_pickled(two):
    for k in (1, 2, 3):
        assert synk.map(lambda p, k=k: (Point is not None) + k, [Point(), Point()]) == [k + 1] * 2
        assert synk.map(lambda p: (Point is not None) + k, [Point()]) == [k + 1]
    with pytest.raises(ZeroDivisionError):
        synk.map(lambda p: Point and 1 / 0, [Point()])
    assert synk.map(lambda p: p.a, [Point()]) == [1]


def test_a_task_may_name_the_builtins(two):
    w = np.zeros(3)
    assert synk.map(lambda i: __builtins__ is not None, [1]) == [True]
    with pytest.raises(ZeroDivisionError):
        synk.map(lambda i: __builtins__ and 1 / i, [0])
    assert synk.function(lambda x: w.sum(), outputs=None)(X) == [0.0] * 2


service = types.SimpleNamespace(fetch=lambda i: i)


def compute(i):
    return service.fetch(i) + 1


def test_mocks_answer_in_tasks_and_note_calls_for_that_map_alone(two):
    with mock.patch.object(service, "fetch", return_value=7) as fetch:
        assert synk.map(compute, range(40)) == [8] * 40
        assert synk.map(compute, range(3)) == [8] * 3
        assert synk.function(compute, outputs=None, bcast_inputs="i")(1) == [8] * 2
        fetch.return_value = 9
        assert synk.map(compute, range(3)) == [10] * 3
        assert fetch.call_count == 0
    assert synk.map(compute, range(3)) == [1, 2, 3]
    with mock.patch("os.getcwd", return_value="/elsewhere"):
        assert synk.map(lambda i: i, [1]) == [1]


class Model:
    def __init__(self):
        self.c, self.cache = 0, {}

    def set(self, c):
        self.c = c
        return self

    def cached(self, i):
        self.cache[i] = i
        return i


def test_what_tasks_may_not_change_is_refused_with_the_item_and_the_cure(two):
    models = {"a": Model()}
    cure = r"Change a copy of it, by copy.copy\(…\) or by scikit-learn's clone\(…\)"
    with pytest.raises(InvalidValue, match=rf"changes models\['a'\], at (an )?item .*\d+.*{cure}"):
        synk.map(lambda c: models["a"].set(c).c, range(1, 9))
    cure = cure.replace("copy.copy", "copy.deepcopy")  # a flat copy would share the cache
    with pytest.raises(InvalidValue, match=rf"changes .*\.cache, at item \d+.*{cure}"):
        synk.map(models["a"].cached, range(9))
    assert synk.map(lambda c: copy.copy(models["a"]).set(c).c, range(1, 9)) == [*range(1, 9)]
    assert synk.map(lambda c: copy.deepcopy(models["a"]).cached(c), range(9)) == [*range(9)]


@pytest.mark.parametrize("verb", ["map", "imap"])
def test_a_worker_that_dies_in_a_map_is_told_with_the_function_and_the_item(own, verb):
    def load(path):
        if path == "file_17.csv":
            os.kill(os.getpid(), signal.SIGKILL)
        return len(path)

    paths = [f"file_{i}.csv" for i in range(60)]
    with pytest.raises(
        WorkerDied, match=r"in a map of the function 'load' at item 17 \('file_17.csv'\), the worker"
    ):
        list(getattr(synk, verb)(load, paths))


# ── modules of packages ──────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import json.tool, logging.handlers, multiprocessing.pool, email.mime.text, concurrent.futures
import xml.etree.ElementTree
import numpy.polynomial.chebyshev
import synkro as synk

def closing():
    import wsgiref.headers as module, wsgiref
    return lambda i: wsgiref.headers.Headers([]).items()

tasks = [
    lambda i: xml.etree.ElementTree.fromstring("<a/>").tag,
    lambda i: logging.handlers.MemoryHandler(3).capacity,
    lambda i: concurrent.futures.Future().done(),
    lambda i: multiprocessing.pool.ThreadPool.__name__,
    lambda i: email.mime.text.MIMEText("x").get_payload(),
    lambda i: numpy.polynomial.chebyshev.chebval(1, [1, 2]),
    closing(),
]
synk.fork(2, verbose=False)
for task in tasks:
    assert synk.map(task, [1]) == [task(1)], task(1)
    assert synk.function(task, outputs=None, bcast_inputs="i")(1) == [task(1)] * 2

import wsgiref
late = synk.function(lambda: wsgiref.util.guess_scheme({}), outputs=None)
try:
    late()
except synk.WorkerError:
    import wsgiref.util
assert late() == ["http"] * 2
del late
assert synk.map(lambda i: wsgiref.util.guess_scheme({}), [1]) == ["http"]
print("fine")
"""


def test_modules_that_the_program_has_imported_of_a_package_are_there(run_python):
    assert run_python(PROGRAM).stdout == "fine\n"


class Told:
    """It says what pickle takes; what it has computed of that is no part of it."""

    def __init__(self):
        self.values, self.notes = [1.0, 2.0], {}

    def __getstate__(self):
        return {"values": self.values, "notes": self.notes}

    def __setstate__(self, state):
        self.values, self.notes = state["values"], state["notes"]

    def change(self, values):
        self.values = values
        self.notes["changed"] = self.notes.get("changed", 0) + 1
        vars(self).pop("total", None)

    @functools.cached_property
    def total(self):
        return sum(self.values)


class Taken(Told):
    """As it, but pickle cannot compare it entry by entry."""

    def __getstate__(self):
        return {"values": list(self.values), "notes": self.notes}

    def __setstate__(self, state):
        self.values, self.notes = list(state["values"]), dict(state["notes"])


class Made(Told):
    """As it, but a function makes it."""

    def __reduce__(self):
        return _made, (type(self), list(self.values), self.notes)


def _made(cls, values, notes):
    made = cls()
    made.values, made.notes = values, dict(notes)
    return made


class Outer(Taken):
    """It holds another one, and copies it when it is made again."""

    def __init__(self):
        super().__init__()
        self.inner = Taken()

    def __getstate__(self):
        return super().__getstate__() | {"inner": self.inner, "at": [1]}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.inner = Taken()
        self.inner.__setstate__(state["inner"].__getstate__())

    def change(self, values):
        self.inner.change(values)

    @property
    def total(self):
        return self.inner.total


@pytest.mark.parametrize("way", ["function", "target", "map"])
@pytest.mark.parametrize("cls", [Told, Taken, Made, Outer])
def test_what_an_object_has_computed_of_its_old_state_goes_with_that(two, cls, way):
    obj = cls()
    held = {"k": [obj]}
    look = lambda *_: (held["k"][0].total, getattr(obj, "inner", obj).notes.get("changed"))  # noqa: E731
    if way == "map":
        run = lambda: synk.map(look, range(4))  # noqa: E731
    else:
        f = synk.function(lambda: str(look()), outputs=None, target=[1] if way == "target" else None)
        run = f
    assert set(map(str, run())) == {"(3.0, None)"}
    for count in range(1, 4):
        obj.change([5.0, count])
        if count > 1 and way != "map":  # at the second call all is looked at
            synk.push(obj)
        assert set(map(str, run())) == {f"({5.0 + count}, {count})"}


RATES = {"rate": 2.0}


class Cached:
    """It has what it computes of a dict, an array and a number."""

    def __init__(self):
        self.weights, self.rates, self.scale = np.ones(3), RATES, 1.0

    @functools.cached_property
    def total(self):
        return float(self.weights.sum() * self.rates["rate"] * self.scale)

    def forget(self):
        vars(self).pop("total", None)


@pytest.mark.parametrize("way", ["function", "map"])
def test_cached_properties_go_with_what_they_were_computed_of(two, way):
    """The program puts away its own; where it has assigned one, that stays."""
    obj, holder = Cached(), {"k": Cached()}
    obj.rates = holder["k"].rates = rates = {"rate": 2.0}
    look = lambda *_: (obj.total, holder["k"].total)  # noqa: E731
    f = synk.function(lambda: np.array(look()), outputs="max")
    run = (lambda: synk.map(look, range(4))[3]) if way == "map" else (lambda: tuple(f()))
    other = synk.function(lambda: rates["rate"], outputs="max")
    assert run() == (6, 6)
    assert other() == 2
    rates["rate"] = 3.0  # which another function brings
    assert other() == 3
    assert run() == (9, 9)
    obj.weights[0] = 2.0
    assert run() == (12, 9)
    holder["k"].scale = 10
    assert run() == (12, 90)
    obj.total = 5.0
    assert run() == (5, 90)
    rates["rate"] = 4.0
    assert run() == (5, 120)
    obj.forget()
    assert run() == (16, 120)
    obj.total, holder["k"] = 7.0, obj
    assert run() == (7, 7)


def test_an_attribute_that_a_class_gets_later_is_seen(two):
    class Config:
        rate = 1.0

    noted = [0]
    f = two.function(lambda: getattr(Config, "momentum", 0.0), outputs=None)
    g = two.function(lambda: len(noted), outputs=None)
    f(), g()
    noted = [2, 3]
    g()  # another function sends something
    Config.momentum = 0.9
    assert f() == [0.9, 0.9]
    Config.double = lambda self: 2
    h = two.function(lambda: Config().double() if hasattr(Config, "double") else 0, outputs=None)
    assert h() == [2, 2]


class Constructed:
    """Made again by its class, of an argument, and then told the rest."""

    def __init__(self, name):
        self.name, self.step = name, 0

    def __reduce__(self):
        return Constructed, (self.name,), {"step": self.step}


def test_what_its_class_makes_of_arguments_arrives_with_all_its_state(two):
    run, error, curve = Constructed("a"), ValueError("one"), np.polynomial.Polynomial([1.0, 2.0])
    f = two.function(lambda: (run.name, run.step, error.args[0], float(curve(1.0))), outputs=None)
    assert f() == [("a", 0, "one", 3)] * 2
    run.step = 1
    two.push(run)
    assert f() == [("a", 1, "one", 3)] * 2
    run.name, error.args, curve.coef = "b", ("two",), np.array([10.0, 2.0])
    for each in (run, error, curve):
        two.push(each)
    assert f() == [("b", 1, "two", 12)] * 2


@dataclasses.dataclass
class Job:
    number: int
    factor = 1

    def run(self):
        return self.number * Job.factor


def test_items_have_the_class_as_it_is_now_whatever_became_of_the_function_that_brought_it(two):
    class Base:
        def name(self):
            return "base"

    class Derived(Base):
        pass

    jobs, derived = [Job(1), Job(2)], Derived()
    assert synk.map(Job.run, jobs) == [1, 2]
    f = two.function(lambda: derived.name(), outputs=None)
    assert f() == ["base"] * 2
    f = None
    assert synk.map(len, ["a"]) == [1]
    Job.factor, Derived.name = 10, lambda self: "derived"
    try:
        assert synk.map(lambda job: job.run(), jobs) == [10, 20]
        run = two.function(lambda job: job.run(), bcast_inputs=["job"], outputs=None)
        assert run(jobs[1]) == [20, 20]
        assert synk.map(lambda each: each.name(), [derived]) == ["derived"]
        Job.factor = 100
        assert run(jobs[1]) == [200, 200]
    finally:
        Job.factor = 1


DEPTH = contextvars.ContextVar("depth", default=0)


def test_values_of_contexts_that_tasks_set_go_with_the_map(two):
    DEPTH.set(5)

    def deeper(k):
        DEPTH.set(k)
        return DEPTH.get()

    assert synk.map(deeper, range(6)) == [*range(6)]
    assert synk.map(lambda k: DEPTH.get(), [1, 2]) == [5, 5]
    assert two.function(lambda: DEPTH.get(), outputs=None)() == [5, 5]


Id, Rate = typing.NewType("Id", int), typing.NewType("Rate", float)
TIMES = 1


@dataclasses.dataclass
class Numbered:
    id: Id

    def times(self):
        return self.id * TIMES


class Rated(typing.NamedTuple):
    rate: Rate
    more: object = None

    def times(self):
        return self.rate * TIMES


@pytest.mark.parametrize("value", [Numbered(2), Rated(2.0), Rated(2.0, [Numbered(2)]), Id, {"k": Id}])
def test_new_types_in_annotations_travel_both_ways(two, value):
    assert synk.map(lambda item: item, [value, value]) == [value, value]
    assert synk.map(lambda item, c: (item, c), [1], common={"c": value}) == [(1, value)]
    f = synk.function(lambda x, v: {"v": v}, bcast_inputs=["v"], outputs=None)
    assert f(X, value) == [{"v": value}, {"v": value}]


def test_their_instances_are_reduced(two):
    assert synk.function(lambda x: Rated(Rate(1), x.sum()), outputs="sum")(X) == (2, 6)


def test_classes_of_items_that_come_back_stay_those_of_the_program(two, monkeypatch):
    methods = Numbered.times, Rated.times
    identity = lambda item: item  # noqa: E731
    found = [*synk.map(identity, [Numbered(2), Rated(2.0)])]
    f = synk.function(lambda x, v: v, bcast_inputs=["v"], outputs=None)
    found += [*f(X, Numbered(2)), *f(X, Rated(2.0))]
    monkeypatch.setitem(globals(), "TIMES", 10)
    assert (Numbered.times, Rated.times) == methods
    assert Numbered.__annotations__["id"] is Id
    assert [each.times() for each in found] == [20] * 6


class Trainer:
    def __init__(self, weight):
        self.weights = np.full(3, float(weight))

    def step(self, x):
        self.weights += x.sum()
        return self.weights.sum()


def test_what_changed_on_both_sides_is_said_where_it_is_used(two):
    trainer = Trainer(0)
    task = lambda item: item + trainer.weights.sum()  # noqa: E731
    assert synk.map(task, range(3)) == [0, 1, 2]
    synk.function(trainer.step, outputs=None)(X)
    trainer.weights += 1
    with pytest.raises(InvalidValue, match="'trainer', which the function '<lambda>' uses, has changed"):
        synk.function(trainer.step, outputs=None)(X)
    fitted = lambda item: item.weights.sum()  # noqa: E731
    assert synk.map(fitted, [Trainer(k) for k in range(3)]) == [0, 3, 6]
    f = synk.function(lambda x, one: one.weights.sum(), bcast_inputs="one", outputs="max")
    assert f(X, Trainer(3)) == 9
    with pytest.raises(InvalidValue, match="'trainer'"):
        synk.map(task, range(3))
    synk.push(trainer)
    assert synk.map(task, range(3)) == [3, 4, 5]


def test_a_function_that_was_dropped_has_a_name_in_that_error(two):
    trainer = Trainer(0)
    synk.function(trainer.step, outputs=None)(X)
    trainer.weights += 1
    with pytest.raises(
        InvalidValue, match=r"the object \(obj\) of 'step', which a function of an earlier call used"
    ):
        synk.function(trainer.step, outputs=None)(X)


class Best:
    """It keeps the best of what it has seen."""

    def __init__(self):
        self.best = None

    def keep(self, number):
        if self.best is None or number > self.best:
            self.best = number
        return self.best


def test_what_a_task_has_set_no_other_sets_again(two):
    with pytest.raises(InvalidValue, match=r"changes keep\.__self__, at "):
        synk.map(Best().keep, range(8))
    assert synk.map(Best().keep, [3] * 8) == [3] * 8


class Child:
    def __init__(self, parent):
        self.parent = weakref.ref(parent)


class Parent:
    def __init__(self):
        self.children = [Child(self)]


class Tone(enum.Enum):
    LOW, HIGH = 1, 2
    DEEP = 1


class Planet(enum.Enum):
    EARTH = (1.0, 2.0)

    def __init__(self, mass, radius):
        self.mass, self.radius = mass, radius


def test_a_weak_reference_is_named_with_the_way_to_it(two):
    parent = Parent()
    with pytest.raises(
        InvalidType, match=r"with parent\.children\[0\]\.parent, <weakref .*weak reference holds"
    ):
        synk.map(lambda item: len(parent.children), [1])


def test_members_of_an_enum_have_their_attributes(two):
    Tone.HIGH.weight = 5
    assert synk.map(lambda item: (Tone.HIGH.weight, Tone["DEEP"] is Tone.LOW), [1]) == [(5, True)]
    assert synk.map(lambda item: item.weight, [Tone.HIGH]) == [5]
    assert synk.map(lambda item: (Planet.EARTH.mass, Planet((1.0, 2.0)).radius), [1]) == [(1.0, 2.0)]


@pytest.mark.parametrize("change", [lambda a: a.__setitem__(0, 5.0), lambda a: a.__iadd__(1.0)])
def test_a_large_array_that_changes_is_said(two, change):
    large = np.zeros((1 << 24) // 8 + 1)
    f = synk.function(lambda: float(large[0]), outputs="max")
    assert [f(), f(), f()] == [0, 0, 0]
    change(large)
    with pytest.warns(UserWarning, match="'large', which the function '<lambda>' uses, changed here"):
        found = [f() for _ in range(6)]
    assert found[-1] == large[0]
