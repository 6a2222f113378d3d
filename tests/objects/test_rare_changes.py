"""Changes that few programs make, each of which a call sees all the same, or refuses."""

import collections
import copy
import enum
import functools
import importlib
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


def test_the_order_of_a_dict_beside_a_new_key(on_workers):
    table = {"a": 1, "b": 2}
    fn = lambda: next(iter(table.values()))  # noqa: E731
    assert on_workers(fn) == 1
    table["a"] = table.pop("a")
    table["c"] = 3
    assert on_workers(fn) == 2


def test_nan_as_a_key(on_workers):
    nan = float("nan")
    table = {nan: 1}
    fn = lambda: sum(table.values())  # noqa: E731
    assert on_workers(fn) == 1
    table[nan] = 2
    assert on_workers(fn) == 2


def test_a_frozenset_of_objects_as_a_key(on_workers):
    key = frozenset([types.SimpleNamespace])
    table = {key: 1, frozenset([len]): 1}
    fn = lambda: sum(table.values())  # noqa: E731
    assert on_workers(fn) == 2
    table[key] = 5
    assert on_workers(fn) == 6


def test_slots_beside_a_dict_and_slots_that_were_empty(on_workers):
    class Base:
        __slots__ = ("rate", "unset")

    class Model(Base):
        pass

    for cls in (Base, Model):
        model = cls()
        model.rate = 1
        fn = lambda: model.rate + getattr(model, "unset", 0)  # noqa: E731
        assert on_workers(fn) == 1
        model.rate = 5
        assert on_workers(fn) == 5
        model.unset = 2
        assert on_workers(fn) == 7
        del model.unset
        assert on_workers(fn) == 5


def test_what_is_new_in_a_class(on_workers):
    class Base:
        rate = 1

        def step(self):
            return self.rate

    class Model(Base):
        pass

    model = Model()
    fn = lambda: model.step()  # noqa: E731
    assert on_workers(fn) == 1
    Model.rate = 5
    assert on_workers(fn) == 5
    Model.step = lambda self: 7
    assert on_workers(fn) == 7
    del Model.step, Model.rate
    assert on_workers(fn) == 1


def test_another_class_and_another_dict_of_an_instance(on_workers):
    class One:
        def go(self):
            return self.rate

    class Two:
        def go(self):
            return 10 * self.rate

    thing = One()
    thing.rate = 1
    fn = lambda: thing.go()  # noqa: E731
    assert on_workers(fn) == 1
    thing.__class__ = Two
    assert on_workers(fn) == 10
    thing.__dict__ = {"rate": 5}
    assert on_workers(fn) == 50
    thing.rate = 7
    assert on_workers(fn) == 70


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


@pytest.mark.parametrize("base", [dict, collections.OrderedDict])
def test_a_dict_with_attributes(on_workers, base):
    class Config(base):
        pass

    config = Config(a=1)
    config.path = "x"
    fn = lambda: config["a"] + len(config.path)  # noqa: E731
    assert on_workers(fn) == 2
    config["a"] = 5
    assert on_workers(fn) == 6
    config.path = "xyz"
    assert on_workers(fn) == 8


def test_arrays_of_classes_of_their_own(on_workers):
    masked = np.ma.masked_array([1.0, 2.0], [False, True])
    objects = np.array(["a", None], object)
    fn = lambda: float(masked.sum()) + len(objects[0])  # noqa: E731
    assert on_workers(fn) == 2
    masked[0] = 9
    assert on_workers(fn) == 10
    objects[0] = "abc"
    assert on_workers(fn) == 12


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


def test_code_that_is_swapped(on_workers):
    one, other = 1, [10]

    def helper():
        return one

    def go():
        return other[0]

    fn = lambda: helper()  # noqa: E731
    assert on_workers(fn) == 1
    helper.__code__ = (lambda: one + 1).__code__
    assert on_workers(fn) == 2
    helper = go
    assert on_workers(fn) == 10
    other = [20]
    assert on_workers(fn) == 20


def test_attributes_of_a_function(on_workers):
    def helper():
        return getattr(helper, "a", 0) * 10 + getattr(helper, "b", 0)

    fn = lambda: helper()  # noqa: E731
    assert on_workers(fn) == 0
    helper.a, helper.b = 1, 2
    assert on_workers(fn) == 12
    vars(helper).clear()
    helper.b, helper.a = 1, 2
    assert on_workers(fn) == 21


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
