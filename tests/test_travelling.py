"""Values of users' own kinds: each arrives at the workers as what it is, or is refused by name."""

import array
import collections
import copy
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

    with pytest.raises(
        InvalidType, match=r"the function 'uses' .*'holds'.*Needs.*Give Needs a __reduce__"
    ):
        synk.map(uses, [1])
    with pytest.raises(InvalidType, match=r"the function 'uses' .*'holds'.*Give Needs a __reduce__"):
        per_rank(uses, 1)
    with pytest.raises(InvalidType, match=r"item 0 for the function 'kind'.*Give Needs a __reduce__"):
        synk.map(kind, [needs])
    f = synk.function(kind, outputs=None, bcast_inputs="x")
    with pytest.raises(
        InvalidType, match=r"an argument of the function 'kind'.*Give Needs a __reduce__"
    ):
        f(needs)
    assert f(1) == ["int"] * 2


def test_to_look_for_it_changes_no_class_of_the_programs(two):
    class Base:
        made: typing.ClassVar[list] = []

        def go(self):
            return Needs

    before = dict(vars(Base))
    thing, needs = Base(), Needs(3)
    with pytest.raises(InvalidType, match="Needs"):
        synk.map(lambda i: (thing.go(), needs.a), [1])
    assert {k: v for k, v in vars(Base).items() if k != "__slotnames__"} == {
        k: v for k, v in before.items() if k != "__slotnames__"
    }


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
    with pytest.raises(InvalidValue, match=rf"changes .*\.cache, at item \d+.*{cure}"):
        synk.map(models["a"].cached, range(9))
    assert synk.map(lambda c: copy.copy(models["a"]).set(c).c, range(1, 9)) == [*range(1, 9)]


@pytest.mark.parametrize("verb", ["map", "imap"])
def test_a_worker_that_dies_in_a_map_is_told_with_the_function_and_the_item(own, verb):
    def load(path):
        if path == "file_17.csv":
            os.kill(os.getpid(), signal.SIGKILL)
        return len(path)

    paths = [f"file_{i}.csv" for i in range(60)]
    with pytest.raises(
        WorkerDied, match=r"in a map of the function 'load', at item 17 \('file_17.csv'\), the worker"
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
