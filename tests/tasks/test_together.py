"""Values that hold little are pickled as one, and nobody can tell: each task has its own."""

import collections
import copy
import dataclasses
import enum
import functools
import gc
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import synkro as synk
from synkro.packing.together import Together
from synkro.worker.copying import Copier

pytestmark = pytest.mark.counted_once  # the queue lives as long as the session


class Point:
    """Of a class of the script, which travels by value."""

    def __init__(self, x=0, y=0.0):
        self.x, self.y = x, y

    def __eq__(self, other):
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = object.__hash__


@dataclasses.dataclass
class Trade:
    name: str
    price: float


class Named(collections.namedtuple("Named", "x y")):
    pass


class Color(enum.Enum):
    RED = 1


def marked(value):
    """What a task makes of an item: a change that is seen where another one has the same object."""
    if isinstance(value, list):
        value.append("seen")
    elif isinstance(value, dict):
        value["seen"] = len(value)
    elif isinstance(value, set):
        value.add("seen")
    elif isinstance(value, Point):
        value.x = (value.x, "seen")
    return value


def serially(task, items):
    return [task(copy.deepcopy(item)) for item in items]


def assert_same(found, expected):
    assert list(map(type, found)) == list(map(type, expected))
    assert found == expected


# ── in maps ──────────────────────────────────────────────────────────────────────────────────────────

numbers = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.binary(max_size=9)
scalars = numbers | st.text(max_size=80) | st.integers(0, 9).map(np.int16) | st.just("long " * 200)
flat = (
    st.lists(scalars, max_size=4)
    | st.dictionaries(numbers | st.text(max_size=3), scalars, max_size=4)
    | st.sets(st.integers(), max_size=3)
    | st.tuples(scalars, scalars)
    | st.builds(Point, scalars, scalars)
    | st.builds(Point, st.lists(st.floats(allow_nan=False), max_size=30), st.builds(Point, scalars))
    | st.fixed_dictionaries({"count": st.integers(), "values": st.lists(st.integers(), max_size=3)})
    | st.builds(Trade, st.text(max_size=5), st.floats(allow_nan=False))
)
deep = st.recursive(
    scalars,
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
)
any_value = (
    scalars | flat | deep | st.lists(flat, max_size=2) | st.builds(Point, flat) | st.just(Color.RED)
)


@given(st.lists(any_value, min_size=1, max_size=6), st.integers(1, 30), st.booleans())
def test_any_items_and_results(two, kinds, times, many):
    """Some of them are one object, and some equal ones are not."""
    items = [copy.deepcopy(kind) if many else kind for _ in range(times) for kind in kinds]
    assert_same(synk.map(marked, items), serially(marked, items))


alike = st.lists(st.builds(dict, a=st.integers()), min_size=1, max_size=40)


@given(st.lists(flat, min_size=1, max_size=40) | alike, st.data())
def test_several_of_each(two, items, data):
    """Also where tasks next to each other have one object, in different places."""
    others = data.draw(st.lists(flat, min_size=len(items), max_size=len(items)))

    def both(one, other):
        return [marked(one), other, one is other]

    for second in (others, items, items[::-1], items[1:]):
        expected = [both(*copy.deepcopy(pair)) for pair in zip(items, second, strict=False)]
        assert synk.map(both, items, second) == expected


@pytest.mark.parametrize("make", [lambda n: {"n": n}, lambda n: [n], Point, lambda n: Trade("n", n)])
def test_a_result_is_what_it_was_when_its_task_ended(two, make):
    """Also if it is one object for all tasks, which each changes."""

    @functools.cache
    def place():
        return make(0)

    def filled(number):
        found = place()
        if isinstance(found, list | dict):
            found["n" if isinstance(found, dict) else 0] = number
        else:
            setattr(found, "x" if isinstance(found, Point) else "price", number)
        return found

    assert_same(synk.map(filled, range(300)), [make(n) for n in range(300)])


def test_what_a_task_makes_of_its_item_does_not_stay(two):
    """An item is gone when its task has ended, though others have come with it."""

    class Estimator:
        def __init__(self, depth):
            self.depth = depth

    @functools.cache
    def living():
        return weakref.WeakSet()

    def fitted(estimator):
        estimator.model = Point()
        gc.collect()
        living().add(estimator.model)
        return len(living())

    found = synk.map(fitted, [Estimator(depth) for depth in range(200)])
    assert max(found) <= 2  # with the one before it


def test_more_classes_than_a_head_has():
    classes = [type(f"Kind{n}", (), {}) for n in range(20)]
    items = [cls() for cls in classes * 40]
    for number, item in enumerate(items):
        item.number = number
    with synk.Session(2, verbose=False) as session:
        found = session.map(lambda item: item, items)
    assert [type(item) for item in found] == classes * 40
    assert [item.number for item in found] == list(range(800))


class _Said:
    """Instances of classes below say of themselves what pickle, or the class, does with them."""

    def __init__(self, x):
        self.x = x


class Reduced(_Said):
    def __reduce__(self):
        return type(self), (self.x + 1,)


class Stated(_Said):
    def __getstate__(self):
        return {"x": -self.x}


class Restored(_Said):
    def __setstate__(self, state):
        self.x = state["x"] * 2


class Made(_Said):
    def __new__(cls, x=0):
        made = super().__new__(cls)
        made.made = True
        return made


class Looked(_Said):
    def __getattribute__(self, name):
        return {} if name == "__dict__" else super().__getattribute__(name)


class Hidden(_Said):
    @property
    def __dict__(self):
        return {}


class Boxed(dict):
    def __init__(self, x):
        self["x"] = self.x = x


SAYING = [Reduced, Stated, Restored, Made, Boxed, lambda x: Named(x, [x])]


@pytest.mark.parametrize("kind", SAYING)
def test_classes_that_say_how_they_travel(two, kind):
    """As by ``copy``, once on the way there, and once on the way back."""

    def seen(item):
        return item.x

    items = [kind(n) for n in range(100)]
    assert synk.map(seen, items) == [copy.copy(item).x for item in items]
    found = synk.map(lambda item: item, items)
    assert [type(item) for item in found] == [type(item) for item in items]
    assert [item.x for item in found] == [copy.copy(copy.copy(item)).x for item in items]


def test_classes_that_begin_to_say_it(two):
    class Kind:
        def __init__(self, x):
            self.x = x

    items = [Kind(n) for n in range(100)]
    for scale in (1, 2, 5):
        if scale > 1:
            Kind.__getstate__ = lambda self, scale=scale: {"x": self.x * scale}
        assert synk.map(lambda item: item.x, items) == [n * scale for n in range(100)]
        found = synk.map(lambda item: item, items)
        assert [item.x for item in found] == [n * scale * scale for n in range(100)]


# ── by itself ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def together():
    return Together(Copier({}))


class Around:
    """An object that holds itself."""

    def __init__(self):
        self.me = self


def nested(depth):
    value = [1]
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        {(1, 2): 3},
        {(1, "x")},
        [np.zeros(3)],
        Point(lambda: None),
        Point(Color.RED),
        Color.RED,
        np.zeros(3),
        collections.Counter("ab"),
        "x" * 10_000,
        ["x" * 10_000],
        list(range(10_000)),
        [[]] * 2,
        nested(2000),
        Around(),
        lambda: None,
        Named(1, 2),
        *[kind(1) for kind in (*SAYING, Looked, Hidden)],
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_does_not_go_together(together, value):
    assert together.copied(value) is None
    assert together.copied(1, value, 2) is None


@pytest.mark.parametrize(
    "value",
    [[1, "x"], {"x": [1]}, {1.5}, ([1], {}), Point([1]), Trade("x", 1.0), [Point(), [Point(), ()], ()]],
    ids=lambda value: type(value).__name__,
)
def test_a_copy_shares_nothing(together, value):
    (copied,) = together.copied(value)
    assert type(copied) is type(value)
    assert copied == value
    expected = copy.deepcopy(value)
    marked(copied)
    for part in copied if isinstance(copied, list | tuple | set | dict) else vars(copied).values():
        marked(part)
    assert value == expected


def test_one_object_in_two_places_of_a_value(together):
    one, other = [1], [1]
    assert together.copied(one, other) == [one, other]
    assert together.copied(one, one) is None
    assert together.copied(one, [other, [one]]) is None
    for value in (one, (1, 2), "a string"):
        assert together.copied(value) == together.copied(value)  # in two values it may be
    assert together.copied((1, 2), (1, 2)) == [(1, 2)] * 2
