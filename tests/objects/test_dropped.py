"""What a function trained that nobody holds lives on the workers as long as the program's object."""

import functools
import gc
import random
import weakref

import numpy as np
import pytest

import synkro as synk
from support.sessions import counts, per_rank
from synkro import InvalidValue

pytestmark = pytest.mark.counted_once


class Net:
    rate = 1.0

    def __init__(self):
        self.history = []
        self.params = {"a": np.zeros(3)}

    def step(self):
        self.rate += 1.0
        self.history.append(self.rate)
        self.params["a"] = self.params["a"] + 1


class Slotted:
    __slots__ = ("n",)

    def __init__(self):
        self.n = 0


class Node:
    def __init__(self, parent=None):
        self.parent, self.children = parent, []
        if parent is not None:
            parent.children.append(self)


def test_instances_arrays_and_containers_go_on_with_what_they_have_become(two):
    net, state, log, array, slotted = Net(), {"n": np.zeros(2), "k": 0}, [], np.zeros(4), Slotted()

    def train():
        net.step()
        state["n"] = state["n"] + 1
        state["k"] += 1
        log.append(len(log))
        array[...] += 1
        slotted.n += 1

    for _ in range(3):
        synk.function(train, outputs=[])()
    got = per_rank(
        lambda: (
            *(net.rate, net.history, net.params["a"].tolist(), state["n"].tolist(), state["k"], log),
            *(array.tolist(), slotted.n, type(net) is Net),
        )
    )
    want = (4.0, [2.0, 3.0, 4.0], [3.0] * 3, [3.0] * 2, 3, [0, 1, 2], [3.0] * 4, 3, True)
    assert got == [want] * 2
    assert synk.fetch(net).rate == 4.0
    assert synk.fetch(state)["k"] == 3
    assert (net.rate, state["k"], log) == (1.0, 0, [])


def test_what_the_program_changes_meanwhile_arrives(two):
    net, state = Net(), {"k": 0, "l": [1]}
    per_rank(lambda: net.step())
    per_rank(lambda: state["l"].append(2))
    net.rate, state["k"], state["new"] = 50.0, 9, "x"
    assert (
        per_rank(lambda: (net.rate, net.history, state))
        == [(50.0, [2.0], {"k": 9, "l": [1, 2], "new": "x"})] * 2
    )
    net.history = ["mine"]
    assert per_rank(lambda: (net.rate, net.history)) == [(50.0, ["mine"])] * 2
    synk.push(net)
    assert per_rank(lambda: net.params["a"].tolist()) == [[0.0] * 3] * 2


def test_another_object_under_the_name_is_another_object(two):
    net = Net()
    for _ in range(3):
        per_rank(lambda: net.step())
        net = Net()
        assert per_rank(lambda: (net.rate, net.history)) == [(1.0, [])] * 2


def test_a_new_dict_in_the_place_of_another_is_as_it_is_here(two):
    net = Net()
    for _ in range(5):
        net.params = {"a": np.zeros(3)}
        assert per_rank(lambda: net.params["a"][0]) == [0.0] * 2
        per_rank(lambda: net.step())


def test_what_both_have_changed_is_refused_as_ever(two):
    net = Net()
    per_rank(lambda: net.history.append(1))
    net.history.append(2)
    with pytest.raises(InvalidValue, match=r"changed here and on the workers"):
        per_rank(lambda: net.history)
    synk.push(net)
    assert per_rank(lambda: net.history) == [[2]] * 2


def test_classes_and_what_they_count(two):
    class Counter:
        count = 0

        @classmethod
        def add(cls):
            cls.count += 1
            return cls.count

        @staticmethod
        def one():
            return 1

        @property
        def twice(self):
            return 2 * self.count

    assert per_rank(lambda: Counter.add()) == [1] * 2
    assert per_rank(lambda: Counter.add() + Counter.one()) == [3] * 2
    assert per_rank(lambda: Counter().twice) == [4] * 2


def test_objects_know_each_other_as_before(two):
    root = Node()
    child = Node(root)
    per_rank(lambda: setattr(child, "seen", 1))
    assert (
        per_rank(lambda: (root.children[0] is child, child.parent is root, child.seen))
        == [(True, True, 1)] * 2
    )


def test_nothing_is_held_that_the_program_has_dropped(two):
    left = []

    def once(turn):
        net, root, data = Net(), Node(), np.zeros(1000)
        Node(root)
        net.tree = {"root": root}
        assert per_rank(lambda: (net.rate, len(root.children), data[0])) == [(1.0, 1, 0.0)] * 2
        if turn % 2:
            per_rank(lambda: net.step())
        left.extend(map(weakref.ref, (net, root, data)))

    for turn in range(30):
        once(turn)
    gc.collect()
    assert sum(each() is not None for each in left) == 0


def test_dicts_and_lists_by_themselves_are_kept_up_to_a_bound(two):
    first = {"n": 0}
    per_rank(lambda: first.update(n=1))
    for _ in range(99):
        other = {"n": 0}
        per_rank(lambda: other["n"])
    assert per_rank(lambda: first["n"]) == [1] * 2
    for _ in range(101):
        other = {"n": 0}
        per_rank(lambda: other["n"])
    assert per_rank(lambda: first["n"]) == [0] * 2


# ── random programs, in which the workers change nothing ─────────────────────────────────────────────


class Thing:
    kind = "thing"

    def __init__(self):
        self.n = 0

    @property
    def twice(self):
        return 2 * self.n


class MyDict(dict):
    """Has attributes."""


def described(roots):
    """All that *roots* hold, and which of it is the same object."""
    seen = {}

    def told(obj):
        if isinstance(obj, tuple):
            return ("tuple", [told(each) for each in obj])
        if isinstance(obj, functools.partial):
            return ("partial", told(obj.args))
        if not isinstance(obj, dict | list | np.ndarray | Thing | Slotted):
            return (type(obj).__name__, obj)
        if id(obj) in seen:
            return seen[id(obj)]
        seen[id(obj)] = len(seen)
        if isinstance(obj, np.ndarray):
            return obj.tolist()
        if isinstance(obj, dict):
            own = sorted(getattr(obj, "__dict__", {}).items())
            return (type(obj).__name__, [(key, told(each)) for key, each in obj.items()], own)
        if isinstance(obj, list):
            return [told(each) for each in obj]
        if isinstance(obj, Thing):
            held = [(name, told(each)) for name, each in sorted(vars(obj).items())]
            return (obj.kind, obj.twice, held)
        return ("slotted", told(obj.n))

    return [told(root) for root in roots]


class Program:
    """A program that changes objects, and what refers to what, at random."""

    MAKES = (
        dict,
        list,
        Thing,
        Slotted,
        MyDict,
        lambda: np.zeros(3),
        lambda: {"a": [1]},
        lambda: [Thing()],
    )

    def __init__(self, random):
        self.random = random
        self.objects = [random.choice(self.MAKES)() for _ in range(3)]

    def some(self):
        return self.random.choice(self.objects)

    def value(self):
        way = self.random.randrange(8)
        if way < 3:
            return self.random.choice([0, 1, 2.5, "s", None, True])
        if way < 5:
            return self.some()
        if way == 5:
            return (
                (1, self.some()) if self.random.random() < 0.5 else functools.partial(max, self.some())
            )
        self.objects.append(self.random.choice(self.MAKES)())
        return self.objects[-1]

    def step(self):
        obj, value, random = self.some(), self.value(), self.random.random()
        key = self.random.choice("abc")
        if isinstance(obj, dict):
            if random < 0.2:
                obj.pop(key, None)
            else:
                obj[key] = value
            if isinstance(obj, MyDict) and random > 0.8:
                obj.tag = random
        elif isinstance(obj, list):
            if obj and random < 0.5:
                obj[0] = value
            else:
                obj.append(value)
            del obj[5:]
        elif isinstance(obj, np.ndarray):
            obj[0] += 1
        elif random < 0.5 or isinstance(obj, Slotted):
            obj.n = value if isinstance(obj, Slotted) else obj.n + 1
        else:
            setattr(obj, key, value)
        if len(self.objects) > 4 and random < 0.2:
            self.objects.pop(0)
        if random < 0.05:
            Thing.kind = f"thing {random}"


@pytest.mark.parametrize("seed", counts(*range(6), rarely=range(6, 60)))
def test_a_new_function_sees_all_as_it_is_in_the_program(two, seed):
    program = Program(random.Random(seed))
    held = []
    for _ in range(40):
        for _ in range(program.random.randrange(4)):
            program.step()
        function = about(program.some(), program.some())
        want = function()
        if program.random.random() < 0.3:
            assert synk.map(lambda i, function=function: function(), [0]) == [want]
            continue
        made = synk.function(function, outputs=None)
        assert made() == [want] * 2
        if program.random.random() < 0.2:
            held.append((made, function))
        if held and program.random.random() < 0.5:
            made, function = program.random.choice(held)
            assert made() == [function()] * 2


def about(one, other):
    return lambda: described([one, other])
