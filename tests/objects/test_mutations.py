"""Whatever a program changes in an object that a function uses, directly or through a helper."""

import array
import collections
import dataclasses
import functools
import sys
import types

import numpy as np
import pytest

import synkro as synk
from support.sessions import lasting
from synkro import InvalidValue

pytestmark = pytest.mark.quick

session = lasting(2)


class Box:
    """An instance with any attributes."""

    size = 1

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    @functools.cached_property
    def twice(self):
        return 2 * self.value

    def method(self):
        return self.size


class Slots:
    __slots__ = ("value",)

    def __init__(self):
        self.value = 1


@dataclasses.dataclass(slots=True)
class Record:
    value: float = 1.0


class Own(dict):
    def __init__(self, **entries):
        super().__init__(**entries)
        self.__dict__ = self


class Dotted(dict):
    __getattr__ = dict.__getitem__


def put(holder, key, value):
    holder[key] = value


BY_ONE = (lambda o: setattr(o, "value", o.value + 1), lambda o: o.value)
CASES = {
    "array in a dict": (
        lambda: {"w": np.zeros(2)},
        lambda o: put(o, "w", o["w"] + 1),
        lambda o: o["w"].sum(),
    ),
    "new key": (lambda: {"w": np.zeros(2)}, lambda o: put(o, f"k{len(o)}", np.ones(2)), len),
    "empty dict": (dict, lambda o: put(o, len(o), [1]), len),
    "empty list": (list, lambda o: o.append((1, 2)), len),
    "list of lists": (lambda: [[1]], lambda o: o[0].append(2), lambda o: sum(map(sum, o))),
    "list of arrays": (lambda: [np.ones(2)], lambda o: put(o, 0, o[0] + 1), lambda o: o[0].sum()),
    "many small arrays": (
        lambda: [Box(w=np.ones(2)) for _ in range(10)],
        lambda o: [each.w.__iadd__(1) for each in o],
        lambda o: sum(each.w.sum() for each in o),
    ),
    "set of strings": (lambda: {"a", "b"}, lambda o: o.add(f"c{len(o)}"), len),
    "set of tuples": (set, lambda o: o.add((len(o), "a")), len),
    "counter": (lambda: collections.Counter("aab"), lambda o: o.update("a"), lambda o: o["a"]),
    "default dict": (
        lambda: collections.defaultdict(int),
        lambda o: put(o, len(o), 1),
        lambda o: sum(o.values()),
    ),
    "order": (
        lambda: collections.OrderedDict(a=1, b=2),
        lambda o: o.move_to_end(next(iter(o))),
        lambda o: next(iter(o.values())),
    ),
    "deque": (lambda: collections.deque([1]), lambda o: o.append(2), sum),
    "array.array": (lambda: array.array("d", [1]), lambda o: put(o, 0, o[0] + 1), sum),
    "empty instance": (Box, lambda o: setattr(o, f"k{len(vars(o))}", 1), lambda o: len(vars(o))),
    "child": (
        lambda: Box(child=Box(value=1)),
        lambda o: setattr(o, "child", Box(value=o.child.value + 1)),
        lambda o: o.child.value,
    ),
    "class attribute": (lambda: Box(), lambda o: setattr(Box, "size", Box.size + 1), Box.method),
    "slots": (Slots, *BY_ONE),
    "dataclass": (Record, *BY_ONE),
    "namespace": (lambda: types.SimpleNamespace(value=1), *BY_ONE),
    "dict of its own": (lambda: Own(value=1), lambda o: put(o, "value", o.value + 1), lambda o: o.value),
    "dotted": (lambda: Dotted(value=1), lambda o: put(o, "value", o.value + 1), lambda o: o.value),
    "proxy": (
        lambda: types.MappingProxyType({"a": [1]}),
        lambda o: o["a"].append(1),
        lambda o: len(o["a"]),
    ),
    "objects as keys": (
        lambda: {Box.method: 1, (Box, 2): [3]},
        lambda o: put(o, Box.method, o[Box.method] + 1),
        lambda o: o[Box.method] + len(o),
    ),
    "minus zero": (lambda: {"x": 0.0}, lambda o: put(o, "x", -o["x"]), lambda o: np.copysign(1, o["x"])),
    "type of a key": (lambda: {1: 2}, lambda o: put(o, True, o.pop(1) + 1), lambda o: o[1]),
}


if sys.version_info < (3, 11):  # which cannot pickle it
    del CASES["dotted"]


@pytest.mark.filterwarnings("ignore:.*not all of it is compared")
@pytest.mark.parametrize("through", ["directly", "a helper", "a class", "another object"])
@pytest.mark.parametrize("case", CASES)
def test_it_is_as_here_at_the_next_call(session, case, through):
    make, change, read = CASES[case]
    thing = make()
    size = Box.size

    def helper():
        return read(thing)

    class Reader:
        def go(self):
            return helper()

    holder = [Reader(), (thing,)]
    fn = {
        "directly": lambda: float(read(thing)),
        "a helper": lambda: float(helper()),
        "a class": Reader().go,
        "another object": lambda: float(read(holder[1][0])),
    }[through]
    f = session.function(fn, outputs=None)
    try:
        for _ in range(5):
            assert f() == [read(thing)] * 2
            change(thing)
    finally:
        Box.size = size


# ── who sees what ────────────────────────────────────────────────────────────────────────────────


def test_changed_and_changed_back_between_two_functions(session):
    rate, weights = 1, np.zeros(2)
    f = session.function(lambda: rate + weights[0], outputs="max")
    g = session.function(lambda: rate - weights[0], outputs="max")
    assert (f(), g()) == (1, 1)
    for _ in range(6):
        rate = 2
        weights += 1
        assert f() == 3
        rate = 1
        weights -= 1
        assert g() == 1


def test_after_a_failed_call_what_is_changed_back_is_sent_again(session):
    class Picky:
        def __init__(self, value):
            self.value = value

        def __getstate__(self):
            return {"value": self.value}

        def __setstate__(self, state):
            if state["value"] == 2 and synk.rank() == 1:
                raise RuntimeError("no")
            self.__dict__.update(state)

    one, two = Picky(1), Picky(2)
    now = one
    f = session.function(lambda: now.value, outputs=None)
    assert f() == [1, 1]
    now = two
    with pytest.raises(synk.WorkerError):
        f()
    now = one
    assert f() == [1, 1]


def test_submitted_calls_see_arrays_as_they_were(session):
    weights = np.zeros(2)
    f = session.function(lambda: weights.sum(), outputs="max")
    f()
    futures = []
    for _ in range(4):
        weights += 1
        futures.append(f.submit())
    assert [each.result() for each in futures] == [2, 4, 6, 8]
    assert f() == 8


def test_the_cures_cure(session):
    log = []
    f = session.function(lambda: log.append(1) or len(log), outputs="max")
    assert f() == 1
    log.append(5)
    with pytest.raises(InvalidValue, match="changed here and on the workers"):
        f()
    log = session.fetch(log)
    assert [f(), f()] == [2, 3]
    log = session.fetch(log)
    log.append(7)
    session.push(log)  # a name is bound to it, which no call has seen
    assert f() == 5


def test_push_of_what_holds_what_never_travels_again(session):
    box = Box(dtype=np.dtype("f4"), count=iter(range(3)), value=1, slots=Slots())
    f = session.function(lambda: box.value + box.slots.value + box.twice, outputs="max")
    assert f() == 4
    session.push(box)
    assert f() == 4


def test_fetch_leaves_the_programs_classes_alone(session):
    box = Box(value=1)
    f = session.function(lambda: setattr(type(box), "size", 7) or box.size, outputs="max")
    assert f() == 7
    method = Box.method
    copy = session.fetch(box)
    assert type(copy) is Box
    assert Box.method is method
    assert Box.size == 1


def test_the_args_of_a_workers_exception(session):
    def fail():
        raise KeyError("which", 3)

    with pytest.raises(KeyError) as caught:
        session.function(fail)()
    assert caught.value.args == ("which", 3)
    assert "rank 0 failed in the function 'fail'" in str(caught.value)


def test_a_function_that_lives_on_keeps_its_globals(session):
    def arm():
        Box.hook = lambda self: np.ones(2).sum()

    session.function(arm, outputs=[])()
    box = Box()
    assert session.function(lambda: Box.hook(box), outputs="max")() == 2


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 pickles it")
def test_too_deep(session):
    deep = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(InvalidValue, match="nested too deeply"):
        session.function(lambda: len(deep), outputs="max")()
    while deep:  # freed level by level
        deep = deep[0]
