"""Objects that functions bring along: each lives once on each worker."""

import array
import collections
import functools
import gc
import io
import random
import sys
import types

import numpy as np
import pytest

import synkro as synk
from support.inside import everyone
from support.sessions import lasting, running
from support.waiting import wait_until
from synkro import InvalidType, InvalidValue
from synkro.controller.objects.known import Known
from synkro.controller.objects.registry import KnownById
from synkro.packing.kinds import DICT

pytestmark = pytest.mark.quick

X = np.arange(12.0).reshape(6, 2)

session = lasting(2)


class Model:
    """A model with attributes, and an array that training changes."""

    rate = 1.0

    def __init__(self):
        self.weights = np.zeros(2)
        self.training = True
        self.layers = [np.ones(3), {"bias": np.zeros(1)}]

    def fit(self, x):
        self.weights += x.sum(axis=0)
        return self.training

    def scored(self, x):
        return (x @ self.weights).sum()


class Slotted:
    __slots__ = ("__weakref__", "_hidden", "count")

    def __init__(self):
        self.count = 0
        self._hidden = []


class Stateful:
    """It says itself what pickle takes."""

    def __init__(self):
        self.values, self.cache = [0], object()

    def __getstate__(self):
        return {"values": self.values}

    def __setstate__(self, state):
        self.__init__()
        self.values = state["values"]


# ── recognised ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_function_that_is_sent_later_sees_what_another_has_made(workers):
    model = Model()
    with running(workers) as session:
        fit = session.function(model.fit, outputs=[])
        for _ in range(3):
            fit(X)
        score = session.function(lambda x: model.scored(x), outputs="sum")
        weights = session.function(lambda: model.weights, outputs="sum")
        assert weights().tolist() == (3 * X.sum(axis=0)).tolist()
        spans = np.array_split(X, workers)
        assert score(X) == sum((part @ (3 * part.sum(axis=0))).sum() for part in spans)
        assert model.weights.tolist() == [0, 0]


def test_what_lies_in_an_object_is_recognised_too(session):
    model = Model()
    weights, layer, bias = model.weights, model.layers[0], model.layers[1]
    first = session.function(lambda: model.weights.sum(), outputs=None)
    first()

    def change():
        weights[...] = 7
        layer[...] = 8
        bias["bias"] = 9
        return model.layers[1]["bias"] + model.layers[0][0] + model.weights[0]

    assert session.function(change, outputs=None)() == [24, 24]
    assert first() == [14, 14]


def test_what_holds_known_objects_is_built_of_them(session):
    part = {"n": [0]}
    one = session.function(lambda: part["n"].append(1) or len(part["n"]), outputs=None)
    assert one() == [2, 2]
    whole = [part, (part["n"], part)]
    two = session.function(
        lambda: whole[1][0] is whole[0]["n"] and whole[1][1] is part and len(part["n"]), outputs=None
    )
    assert two() == [2, 2]


@pytest.mark.parametrize(
    "make",
    [
        dict,
        list,
        set,
        bytearray,
        collections.deque,
        collections.OrderedDict,
        lambda: collections.defaultdict(list),
        collections.Counter,
        lambda: np.zeros(3),
        lambda: np.zeros((0, 2), "c16"),
        lambda: np.array([None, "a"]),
        Model,
        Slotted,
        Stateful,
        lambda: slice_like,
        lambda: array.array("d", [1, 2]),
        lambda: types.SimpleNamespace(a=1),
        lambda: np.ma.masked_array([1.0, 2.0], [True, False]),
    ],
)
def test_objects_of_every_kind_keep_their_life(session, make):
    thing = make()
    remember = session.function(lambda: _marks.__setitem__("id", id(thing)), outputs=[])
    same = session.function(lambda: _marks["id"] == id(thing), outputs="min")
    remember()
    assert same()
    again = session.function(lambda: _marks["id"] == id(thing), outputs="min", name="again")
    assert again()


_marks = {}


def slice_like():
    """A function is an object, too."""


def test_an_object_that_was_dropped_is_dropped_on_the_workers(session):
    def living():
        gc.collect()
        return sum(type(each).__name__ == "Model" for each in gc.get_objects())

    count = session.function(living, outputs="max")
    f = session.function(Model().scored, outputs="sum")
    f(X)
    assert count() == 1
    del f
    gc.collect()
    assert count() == 0


def test_a_thousand_objects_are_dropped(session):
    f = session.function(functools.partial(len, [{"a": [i]} for i in range(3000)]), outputs="max")
    assert f() == 3000
    del f
    gc.collect()
    g = session.function(lambda: 1, outputs="sum")
    wait_until(lambda: g() == 2 and not session.services.engine.directory.gone)


# ── changed ──────────────────────────────────────────────────────────────────────────────────────


def test_changed_on_both_sides_it_is_an_error_that_names_it(session):
    memory = np.zeros(1000)

    def write():
        memory[0] += 1

    write = session.function(write, outputs=[], name="write")
    write()
    memory[1] = 5
    read = session.function(lambda: memory[:2], outputs=None, name="read")
    with pytest.raises(
        InvalidValue,
        match=r"the object 'memory', which the function 'write' uses, has changed here and on the "
        r"workers .*synk.push\(memory\).*memory = synk.fetch\(memory\)",
    ):
        read()
    session.push(memory)
    assert [part.tolist() for part in read()] == [[0, 5]] * 2


def test_the_error_names_the_part(session):
    model = Model()
    fit = session.function(model.fit, outputs=[])
    fit(X)
    model.weights[...] = 1
    with pytest.raises(InvalidValue, match=r"the object \(obj\) of 'fit'.*\(in obj.weights\)"):
        session.function(lambda: model.weights, outputs=None)()


def test_changed_alike_on_both_sides_it_is_no_error(session):
    model = Model()
    session.function(lambda: model.weights.__iadd__(1), outputs=[])()
    model.weights += 1
    assert session.function(lambda: model.weights.sum(), outputs="max")() == 2


def test_numbers_and_strings_of_one_object_change_apart(session):
    model = Model()
    fit = session.function(model.fit, outputs="max")
    assert fit(X) == 1
    model.training = False  # while the workers have other weights
    assert fit(X) == 0
    assert session.function(lambda: model.weights.sum(), outputs="sum")() == 2 * X.sum()


def test_what_the_workers_changed_in_a_dict_stays(session):
    counts = {"calls": 0, "limit": 1}

    def call():
        counts["calls"] += 1
        return counts["calls"] * 100 + counts["limit"]

    f = session.function(call, outputs="max")
    assert f() == 101
    counts["limit"] = 2
    assert f() == 202
    assert counts["calls"] == 0


def test_what_cannot_be_changed_there_is_made_anew_in_what_holds_it(session):
    class Stubborn:
        def __init__(self, value):
            self.value = value

        def __reduce__(self):
            return Stubborn, (self.value,)

    stubborn = Stubborn(1)
    holder = [stubborn]
    g = session.function(lambda: holder[0].value, outputs="max")
    for value in (1, 2, 3):
        stubborn.value = value
        h = session.function(lambda: (stubborn.value, holder[0].value), outputs="max")
        assert h() == (value, value)
    assert g() == 3


def test_opaque_objects_change_through_their_state(session):
    class Odd:
        def __init__(self, value):
            self.value = [value]

        def __reduce__(self):
            return Odd, (0,), {"value": list(self.value)}

    odd = Odd(3)
    f = session.function(lambda: odd.value[0], outputs="max")
    assert f() == 3
    odd.value[0] = 4
    assert session.function(lambda: odd.value[0] + 0, outputs="max")() == 4
    assert f() == 4


# ── by hand ──────────────────────────────────────────────────────────────────────────────────────


def test_push_sends_what_it_is_here(session):
    model = Model()
    weights = session.function(lambda: model.weights, outputs=None)
    fit = session.function(model.fit, outputs=[])
    fit(X)
    assert session.push(model) is None
    assert [each.tolist() for each in weights()] == [[0, 0]] * 2
    model.weights[...] = 5
    session.push(model.weights)
    assert [each.tolist() for each in weights()] == [[5, 5]] * 2


def test_push_of_a_dict_takes_away_what_the_workers_have_put_in(session):
    seen = {"here": 1}
    f = session.function(lambda: seen.update(there=2), outputs=[])
    f()
    session.push(seen)
    assert session.function(lambda: len(seen), outputs="max")() == 1


def test_fetch_brings_a_copy(session):
    model = Model()

    def fit(x):
        model.weights[...] = synk.rank() + 1
        model.layers.append(len(x))

    fit = session.function(fit, outputs=[])
    fit(X)
    for rank, options in ((0, {}), (0, {"rank": 0}), (1, {"rank": 1})):
        copy = session.fetch(model, **options)
        assert type(copy) is Model
        assert copy is not model
        assert copy.weights.tolist() == [rank + 1] * 2
        assert copy.layers[-1] == 3
    assert model.weights.tolist() == [0, 0]
    assert session.fetch(model.layers)[-1] == 3


def test_fetch_gets_long_objects(session):
    numbers = list(range(100_000))
    f = session.function(lambda: numbers.reverse(), outputs=[])
    f()
    assert session.fetch(numbers) == numbers[::-1]


@pytest.mark.parametrize("verb", ["push", "fetch"])
def test_what_cannot_be_pushed_or_fetched(session, verb):
    call = getattr(session, verb)
    with pytest.raises(InvalidType, match=rf"{verb}\(\) takes an object that .* got 5, an int"):
        call(5)
    with pytest.raises(
        InvalidValue, match=rf"{verb}\(\) .*they know no list like this one: .*distribute"
    ):
        call([1])


def test_fetch_of_a_rank_that_is_not_there(session):
    log = []
    f = session.function(lambda: len(log), outputs="max")
    f()
    with pytest.raises(InvalidValue, match="rank must be from 0 to 1; got 2"):
        session.fetch(log, rank=2)


# ── what it costs ────────────────────────────────────────────────────────────────────────────────


def test_a_call_sends_nothing_where_nothing_has_changed(session, monkeypatch):
    model, config = Model(), {"a": 1, "b": [2, 3]}
    f = session.function(lambda x: x.sum() * config["a"] + model.weights.sum(), outputs="sum")
    x = session.data(X)
    f(x)
    f(x)
    sent = []
    really = everyone(session).send
    monkeypatch.setattr(everyone(session), "send", lambda *args: sent.append(1) or really(*args))
    f(x)
    assert len(sent) == 1
    config["a"] = 1  # the same
    f(x)
    assert len(sent) == 2
    config["a"] = 2
    assert f(x) == 2 * X.sum()
    assert len(sent) == 3  # with the call


def test_after_a_failure_an_object_comes_whole(session):
    class Fragile:
        def __init__(self, n):
            self.n = n

        def __setstate__(self, state):
            if state["n"] == 2 and synk.rank() == 1:
                raise RuntimeError("not on this rank")
            self.__dict__.update(state)

        def __getstate__(self):
            return dict(self.__dict__)

    holder = {"it": Fragile(1)}
    f = session.function(lambda: holder["it"].n, outputs=None)
    assert f() == [1, 1]
    holder["it"] = Fragile(2)
    with pytest.raises(synk.WorkerError, match=r"not on this rank|main program"):
        f()
    holder["it"] = Fragile(3)
    assert f() == [3, 3]


# ── arrays that change in place ──────────────────────────────────────────────────────────────────


def test_a_small_array_that_changes_in_place_is_new_at_the_next_call(session):
    weights = np.zeros(3)
    f = session.function(lambda x: x.sum() + weights.sum(), outputs="max")
    for turn in range(4):
        assert f(np.zeros(4)) == 3 * turn
        weights += 1
    weights[0] = np.nan
    assert np.isnan(f(np.zeros(4)))


def test_a_large_one_is_new_at_the_second_call_and_later_with_a_warning(session):
    table = np.zeros(100_000)
    f = session.function(lambda: table[0], outputs="max", name="look")
    assert f() == 0
    table += 1
    assert f() == 1  # no call has missed it
    table += 1
    assert f() == 1  # but this one
    with pytest.warns(
        UserWarning, match=r"'table', which the function 'look' uses, .*synk.push\(table\)"
    ):
        assert f() == 2
    table += 1
    assert f() == 2  # as was said
    session.push(table)
    assert f() == 3


def test_what_is_not_compared_at_each_call_is_told_once_for_each_object(capfd):
    table, small = np.zeros(100_000), [1, 2]
    many = [[number] for number in range(300)]  # and 220 of these
    with synk.Session(2, timeout=60) as session:
        capfd.readouterr()
        f = session.function(lambda: table[0] + small[0], outputs="max", name="first")
        g = session.function(lambda: table[1] + len(many), outputs="max", name="second")
        assert [f(), g(), f(), g()] == [1, 300, 1, 300]
        told = [line for line in capfd.readouterr().err.splitlines() if "compared" in line]
    assert told == [
        "Synkro: 'table', which the function 'first' uses, has 800,000 bytes that are not compared at "
        "each call: changes in them reach the workers when you push(table).",
        "Synkro: 'many', which the function 'second' uses, has 520 entries that are not compared at "
        "each call: changes in them reach the workers when you push(many).",
    ]


def test_what_both_have_changed_by_the_second_call_lives_on(session):
    table = np.zeros(100_000)

    def count():
        table[0] += 1
        return table[0]

    f = session.function(count, outputs="max")
    assert f() == 1
    table[1] = 5
    assert [f(), f()] == [2, 3]


# ── random generators ────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "make", [np.random.default_rng, np.random.RandomState, random.Random], ids=lambda make: make.__name__
)
def test_a_generator_that_all_ranks_would_share_is_refused(session, make):
    generator = make()
    words = (
        r"is a random generator \(.*\), and would draw the same numbers on every rank. Use synk.rng\(\)"
    )
    with pytest.raises(InvalidType, match=rf"'generator', which a function brings along, {words}"):
        session.function(lambda: generator.random(), outputs=None)()
    with pytest.raises(InvalidType, match=words):
        session.function(functools.partial(lambda g: g.random(), generator), outputs=None)()
    with pytest.raises(
        InvalidType, match=rf"the argument 'g' of the function 'f' {words}.*bcast_inputs"
    ):
        session.function(lambda x, g: x, bcast_inputs=["g"], name="f")(X, generator)


def test_a_generator_deep_in_an_object_is_warned_of(session):
    class Sampler:
        def __init__(self):
            self.rng = np.random.default_rng(0)

        def draw(self):
            return self.rng.random()

    sampler = Sampler()
    f = session.function(lambda: sampler.draw(), outputs=None)
    with pytest.warns(
        UserWarning, match=r"sampler.rng, .*each rank has a copy .*Draw from synk.rng\(\)"
    ):
        first, second = f()
    assert first == second
    f()  # once


def test_the_generators_of_the_process_are_each_ranks_own(session):
    from random import gauss

    draw = np.random.normal
    f = session.function(lambda: (draw(), gauss(0, 1), random.random()), outputs=None)
    one, other = f()
    assert not set(one) & set(other)


def test_an_interrupt_keeps_no_number_of_what_is_gone():
    """Else an object of later, in the same place, would be sent as a number that nobody knows."""

    def interrupt(frame, event, argument):
        raise KeyboardInterrupt

    numbers, obj = KnownById(), {"a": 1}
    known = Known(1, obj, DICT, "a dict", None)
    numbers.add(known)
    assert numbers.get(id(obj)) == 1
    before = sys.gettrace()
    sys.settrace(interrupt)  # what is written in Python, and runs at its end, is interrupted
    try:
        del known
    finally:
        sys.settrace(before)
    assert numbers.get(id(obj)) is None
    first, second = (Known(number, obj, DICT, "a dict", None) for number in (2, 3))
    numbers.add(first)
    numbers.add(second)
    del first
    assert numbers.get(id(obj)) == 3
    numbers.drop(id(obj))
    assert numbers.get(id(obj)) is None


def test_a_file_in_memory_that_a_function_writes_to(two):
    """Its state says from its first look on that it has attributes: none."""
    memory = io.BytesIO(b"abc")

    def write():
        memory.seek(0, 2)
        memory.write(b"q")
        return memory.getvalue()

    run = synk.function(write, outputs=None)
    for times in range(1, 8):
        assert run() == [b"abc" + b"q" * times] * 2
