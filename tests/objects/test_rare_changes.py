"""Changes that few programs make, each of which a call sees all the same, or refuses."""

import collections
import copy
import enum
import functools
import importlib
import itertools
import re
import sys
import threading
import types

import numpy as np
import pytest

import synkro as synk
from support.inside import everyone
from support.sessions import lasting, running
from synkro import InvalidType

pytestmark = pytest.mark.quick

X = np.ones(4)

session = lasting(2)


@pytest.fixture
def on_workers(session):
    """What a function of no arguments returns there."""
    made = []

    def run(fn):
        if not made or made[-1].fn is not fn:
            made.append(session.function(fn, outputs=None, name="fn"))
        first, second = made[-1]()
        assert np.array_equal(first, second)
        return first

    return run


# ── what a look at it says here, it says there ───────────────────────────────────────────────────────


def the_order_of_a_dict_beside_a_new_key():
    table = {"a": 1, "b": 2}
    yield lambda: next(iter(table.values()))
    table["a"] = table.pop("a")
    table["c"] = 3


def entries_of_a_small_dict():
    config = {"rate": 0.5, "name": "a", "nested": {"deep": 1}, "list": [1, 2]}
    yield lambda: f"{config['rate']} {config.get('name')} {config['nested']['deep']} {config['list']}"
    config["rate"] = 1
    yield
    config["rate"] = 1.0  # equal, and of another type
    yield
    del config["name"]
    config["nested"]["deep"] = True
    config["list"].append(3)
    yield
    config["list"] = [0]
    config["nested"] = {"deep": "new"}
    yield
    config["nested"]["deep"] = "newer"


def nan_as_a_key():
    nan = float("nan")
    table = {nan: 1}
    yield lambda: sum(table.values())
    table[nan] = 2


def a_frozenset_of_objects_as_a_key():
    key = frozenset([types.SimpleNamespace])
    table = {key: 1, frozenset([len]): 1}
    yield lambda: sum(table.values())
    table[key] = 5


def what_contains_itself():
    loop = {"n": 1}
    loop["self"] = loop
    items = [loop]
    items.append(items)
    yield lambda: loop["self"]["self"]["n"] + len(items[1][1])
    loop["n"] = 5


class Slotted:
    __slots__ = ("rate", "unset")


class Both(Slotted):
    """It has a dict beside its slots."""


def slots_that_were_empty(cls):
    model = cls()
    model.rate = 1
    yield lambda: model.rate + getattr(model, "unset", 0)
    model.rate = 5
    yield
    model.unset = 2
    yield
    del model.unset


class Stateful:
    """It says itself what pickle takes."""

    def __init__(self):
        self.values, self.cache = [0], object()

    def __getstate__(self):
        return {"values": self.values}

    def __setstate__(self, state):
        self.__init__()
        self.values = state["values"]


def what_says_its_state_itself():
    made = Stateful()
    yield lambda: made.values
    made.values = [7]


def what_is_new_in_a_class():
    class Base:
        rate = 1

        def step(self):
            return self.rate

    class Model(Base):
        pass

    model = Model()
    yield lambda: model.step() + 10 * Model.rate
    Model.rate = 5
    yield
    Model.step = lambda self: 7
    yield
    del Model.step, Model.rate


def another_class_and_another_dict_of_an_instance():
    class One:
        def go(self):
            return self.rate

    class Two:
        def go(self):
            return 10 * self.rate

    thing = One()
    thing.rate = 1
    yield lambda: thing.go()
    thing.__class__ = Two
    yield
    thing.__dict__ = {"rate": 5}
    yield
    thing.rate = 7


def a_dict_with_attributes(base):
    config = type("Config", (base,), {})(a=1)
    config.path = "x"
    yield lambda: config["a"] + len(config.path)
    config["a"] = 5
    yield
    config.path = "xyz"


def arrays_of_classes_of_their_own():
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    objects = np.array(["a", None], object)
    yield lambda: float(masked.sum()) + len(objects[0])
    masked[0] = 9
    yield
    objects[0] = "abc"


def code_that_is_swapped():
    one, other = 1, [10]

    def helper():
        return one

    def go():
        return other[0]

    yield lambda: helper()
    helper.__code__ = (lambda: one + 1).__code__
    yield
    helper = go
    yield
    other = [20]


def attributes_of_a_function():
    def helper():
        return getattr(helper, "a", 0) * 10 + getattr(helper, "b", 0)

    yield lambda: helper()
    helper.a, helper.b = 1, 2
    yield
    vars(helper).clear()
    helper.b, helper.a = 1, 2


CASES = [
    *(the_order_of_a_dict_beside_a_new_key, entries_of_a_small_dict, nan_as_a_key),
    *(a_frozenset_of_objects_as_a_key, what_contains_itself, what_says_its_state_itself),
    *(what_is_new_in_a_class, another_class_and_another_dict_of_an_instance),
    *(arrays_of_classes_of_their_own, code_that_is_swapped, attributes_of_a_function),
]
OF_CLASSES = [
    *((slots_that_were_empty, cls) for cls in (Slotted, Both)),
    *((a_dict_with_attributes, cls) for cls in (dict, collections.OrderedDict)),
]


@pytest.mark.parametrize(
    "case",
    [*CASES, *(functools.partial(*case) for case in OF_CLASSES)],
    ids=lambda case: getattr(case, "func", case).__name__,
)
def test_a_change_is_seen_at_the_next_call(on_workers, case):
    steps = case()
    look = next(steps)
    seen = look()
    assert on_workers(look) == seen
    for _ in itertools.chain(steps, [None]):
        assert look() != seen
        seen = look()
        assert on_workers(look) == seen


@pytest.mark.parametrize("base", [list, set, collections.deque])
def test_a_sequence_with_attributes(on_workers, session, base):
    Layers = type("Layers", (base,), {"scale": 1})
    layers = Layers([1, 2])
    fn = lambda: sum(layers) * layers.scale  # noqa: E731
    assert on_workers(fn) == 3
    layers.scale = 2
    assert on_workers(fn) == 6
    (layers.add if base is set else layers.append)(3)
    assert on_workers(fn) == 12
    session.push(layers)
    assert on_workers(fn) == 12
    del layers.scale
    assert on_workers(fn) == 6


def test_an_array_that_is_read_only(on_workers, session):
    array = np.arange(3)
    array.flags.writeable = False
    config = {"a": array}
    whole = np.zeros(4)
    view = whole[:2]
    view.flags.writeable = False
    fn = lambda: config["a"].sum() + view.sum()  # noqa: E731
    assert on_workers(fn) == 3
    session.push(config)
    assert on_workers(fn) == 3
    whole[0] = 1
    assert on_workers(fn) == 4


def test_another_shape_of_the_same_array_is_refused(on_workers):
    array = np.arange(6.0)
    fn = lambda: array.ndim  # noqa: E731
    assert on_workers(fn) == 1
    array.resize((2, 3), refcheck=False)
    with pytest.raises(InvalidType, match="has changed in place, from float64 of shape"):
        on_workers(fn)


class Rate(float):
    def __repr__(self):
        return "a rate"


class Mode(str, enum.Enum):
    FAST = "fast"


class Pair(tuple):
    pass


def paired(rate):
    pair = Pair([1])
    pair.rate = rate
    return pair


WORDS = "|".join(f"word{number}" for number in range(40))


@pytest.mark.parametrize(
    ("before", "after", "look"),
    [
        (Rate(1), Rate(2), float),
        (
            re.compile(f"{WORDS}|cat"),
            re.compile(f"{WORDS}|dog"),
            lambda value: bool(value.search("dog")),
        ),
        (frozenset({0.0}), frozenset({-0.0}), lambda value: np.copysign(1, next(iter(value)))),
        (paired(1), paired(2), lambda value: value.rate),
        ("fast", Mode.FAST, lambda value: isinstance(value, Mode)),
        (True, 1, lambda value: isinstance(value, bool)),
        (np.float64(1), np.float64("nan"), np.isnan),
    ],
)
@pytest.mark.parametrize("calls", [1, 14])
def test_equal_or_alike_but_not_the_same(on_workers, before, after, look, calls):
    held = [before]
    fn = lambda: look(held[0])  # noqa: E731
    for _ in range(calls):
        assert on_workers(fn) == look(before)
    held[0] = after
    assert on_workers(fn) == look(after)
    held[0] = before
    assert on_workers(fn) == look(before)


def test_a_small_list_in_an_instance_of_an_installed_class(on_workers):
    for args in (types.SimpleNamespace(sizes=[1, 2]), collections.UserList([[1, 2]])):
        sizes = args.sizes if hasattr(args, "sizes") else args.data[0]
        fn = lambda: sum(args.sizes if hasattr(args, "sizes") else args.data[0])  # noqa: E731
        for _ in range(9):
            assert on_workers(fn) == 3
        sizes.append(3)
        assert on_workers(fn) == 6


def test_a_cache_is_cleared_by_push(on_workers, session):
    rate = [1]

    @functools.lru_cache
    def helper(x):
        return x * rate[0]

    fn = lambda: helper(3)  # noqa: E731
    assert on_workers(fn) == 3
    rate[0] = 2
    helper.cache_clear()
    session.push(helper)
    assert on_workers(fn) == 6


def test_a_module_that_is_imported_anew(on_workers, tmp_path, monkeypatch):
    (tmp_path / "imported_anew.py").write_text("A = 1\ndef helper():\n    return A\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("imported_anew")
    fn = lambda: module.helper()  # noqa: E731
    assert on_workers(fn) == 1
    del sys.modules["imported_anew"]
    module = importlib.import_module("imported_anew")
    module.A = 3
    for _ in range(20):  # what is dropped is tidied up now and then
        assert on_workers(fn) == 3
    del sys.modules["imported_anew"]


# ── methods that are for the program ─────────────────────────────────────────────────────────────────

rng = np.random.default_rng(0)
made = 0


def test_methods_that_no_worker_calls_may_use_what_no_worker_has(session):
    data = session.data(X)

    class Model:
        def __init__(self):
            global made
            made += 1
            self.weights = rng.standard_normal(2)

        def fit(self):
            return self.step(data)

        def score(self, x):
            return self.weights[0] * x.sum()

    model = Model()
    model.step = session.function(model.score, outputs="sum")
    assert model.fit() == model.score(X)
    with pytest.raises(InvalidType, match="'data', which a function brings along, is a Data"):
        session.function(lambda: data[0])()
    model.data = data
    with pytest.raises(InvalidType, match=r"'score.__self__.data', which .* is a Data"):
        model.fit()


def test_a_copy_of_an_object_has_functions_of_its_own():
    class Estimator:
        def __init__(self):
            self.scale = 1
            self.parts = synk.function(self.part, outputs=None)

        def part(self, x):
            return x.sum() * self.scale

        def total(self, x):
            return sum(self.parts(x))

    with running(2):
        one = Estimator()
        assert one.total(X) == 4
        other = copy.deepcopy(one)
        other.scale = 2
        assert (other.total(X), one.total(X), copy.copy(one).total(X)) == (8, 4, 4)
        assert other.parts.submit(X).result() == [4, 4]


def test_a_class_is_not_fetched(session):
    class Counter:
        calls = 0

        def run(self):
            Counter.calls += 1
            return Counter.calls

    f = session.function(Counter().run, outputs="max")
    assert (f(), f()) == (1, 2)
    with pytest.raises(InvalidType, match=r"fetch\(\) takes an object .* got <class "):
        session.fetch(Counter)


# ── in the middle ────────────────────────────────────────────────────────────────────────────────────


def test_ctrl_c_while_a_deletion_is_on_its_way(session):
    class Base:
        rate = 1

    class Model(Base):
        rate = 2

    table = {"rows": [1]}
    f = session.function(lambda: Model.rate + 10 * len(table["rows"]), outputs="max")
    assert f() == 12
    really = everyone(session).send

    def interrupted(*args):
        really(*args)
        raise KeyboardInterrupt

    del Model.rate
    before, table["rows"] = table["rows"], [[number] for number in range(300)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everyone(session), "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            f()
    table["rows"] = before
    assert f() == 11
    assert f() == 11


def test_another_thread_writes_to_an_array_while_it_is_sent(session):
    array = np.zeros(1)
    f = session.function(lambda: array[0], outputs="max")
    g = session.function(lambda: array[0] + 0, outputs="max")
    assert f() == g() == 0
    stop = threading.Event()

    def write():
        while not stop.is_set():
            array[0] += 1

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(50):
            f()
            g()
    finally:
        stop.set()
        thread.join()
    assert f() == g() == array[0]


def test_what_is_only_equal_is_compared_once(session, monkeypatch):
    table = {"a": (1, 2), "b": 1.5}
    f = session.function(lambda: table["a"][0], outputs="max")
    f()
    f()
    table["a"], table["b"] = (1, len("ab")), float("1.5")
    f()
    looks = []
    really = synk.controller.objects.objects.Objects.renew
    monkeypatch.setattr(
        synk.controller.objects.objects.Objects,
        "renew",
        lambda *args: looks.append(1) or really(*args),
    )
    f()
    f()
    assert not looks
