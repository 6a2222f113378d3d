"""A function reads what its globals, cells and defaults are now; it may not bind them itself."""

import functools
import threading
import types

import numpy as np
import pytest
from hypothesis import example

import synkro as synk
from support.examples import examples, given, st
from support.inside import everyone
from support.sessions import lasting, running
from synkro import InvalidType, InvalidValue

pytestmark = pytest.mark.quick

X = np.arange(12.0).reshape(6, 2)

session = lasting(2)

scale = 1.0
table = np.ones(2)


def helper(x):
    return x.sum() * scale


def total(x):
    return helper(x) + 0 * table.sum()


@pytest.fixture(autouse=True)
def as_before():
    names = dict(globals())
    yield
    for name in globals().keys() - names.keys():
        del globals()[name]
    globals().update(names)


def set_global(name, value):
    globals()[name] = value


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_global_that_is_bound_anew_is_new_at_the_next_call(workers):
    with running(workers) as session:
        f = session.function(total, outputs="sum")
        kind = session.function(lambda: np.asarray(scale).dtype.num, outputs="max")
        assert f(X) == X.sum()
        for value in (2.0, 3, 1.0, 1, np.float32(0.5), np.float32(1), True, 1j, 7.0):
            set_global("scale", value)
            assert f(X) == X.sum() * value
            assert kind() == np.asarray(value).dtype.num
        set_global("scale", 1.0)
        set_global("helper", lambda x: -x.sum())
        assert f(X) == -X.sum()


@pytest.mark.parametrize(
    ("name", "fn", "before"),
    [("unknown", lambda x: unknown(x), None), ("len", lambda x: len(x), 6)],  # noqa: F821
    ids=["unknown", "builtin"],
)
def test_a_name_that_is_defined_later_and_deleted(session, name, fn, before):
    f = session.function(fn, outputs="sum")

    def is_as_before():
        if before is not None:
            return f(X) == before
        with pytest.raises(synk.WorkerError, match="NameError: name 'unknown' is not defined"):
            f(X)
        return True

    assert is_as_before()
    set_global(name, lambda x: 100)
    assert f(X) == 200
    del globals()[name]
    assert is_as_before()


def test_a_cell_that_is_bound_anew_or_later(session):
    rate, model = 0.5, {"w": np.ones(2)}

    def inner(x):
        return (x @ model["w"]).sum() * rate

    f, g = session.function(inner, outputs="sum"), session.function(lambda x: later(x), outputs="sum")
    assert f(X) == X.sum() * 0.5
    with pytest.raises(synk.WorkerError, match="later"):
        g(X)
    rate, later = 2, lambda x: x.sum()
    assert f(X) == X.sum() * 2
    assert g(X) == X.sum()
    model = {"w": np.zeros(2)}
    assert f(X) == 0


def test_defaults_and_code_that_are_set_anew_as_by_autoreload(session):
    def power(x, *, n=1):
        return (x**n).sum()

    def root(x, k=1):
        return (x / k).sum()

    f, g = session.function(power, outputs="sum"), session.function(root, outputs="sum")
    assert (f(X), g(X)) == (X.sum(), X.sum())
    power.__kwdefaults__ = {"n": 2}
    root.__defaults__ = (2,)
    assert (f(X), g(X)) == ((X**2).sum(), X.sum() / 2)
    root.__code__ = (lambda x, k: x.sum() * scale * k).__code__
    assert g(X) == X.sum() * 2


def test_submitted_calls_see_what_was_there_when_they_were_submitted(session):
    config = {"add": 0.0}
    f = session.function(lambda x: x.sum() * scale + config["add"], outputs="sum")
    g = session.function(lambda x: x.sum() * scale, outputs="sum")
    g(X)
    gate = threading.Event()
    hold = session.services.background.submit((0, 1), gate.wait)
    futures = []
    for value in (1.0, 2.0, 3.0):
        set_global("scale", value)
        config["add"] = value
        futures.append(f.submit(X))
    set_global("scale", 10.0)
    config["add"] = 0.0
    gate.set()
    hold.result()
    assert [each.result() for each in futures] == [X.sum() * v + 2 * v for v in (1, 2, 3)]
    assert g(X) == f(X) == X.sum() * 10


def test_a_value_that_cannot_be_sent_is_named(session):
    f = session.function(total, outputs="sum")
    assert f(X) == X.sum()
    set_global("scale", threading.Lock())
    with pytest.raises(
        InvalidType, match=r"test_globals.scale, a lock, cannot be pickled, and an import"
    ):
        f(X)
    set_global("scale", 2.0)
    assert f(X) == 2 * X.sum()


def test_only_the_value_travels(session, monkeypatch):
    f = session.function(total, outputs="sum")
    f(X)
    sizes = []
    really = everyone(session).send
    monkeypatch.setattr(
        everyone(session), "send", lambda *args: sizes.append(len(args[0])) or really(*args)
    )
    set_global("scale", 2.5)
    assert f(X) == 2.5 * X.sum()
    assert len(sizes) == 1  # with the call
    assert sizes[0] < 1000


def test_recursive_decorated_and_wrapped_helpers(session):
    @synk.function
    def double(x):
        return 2 * x

    def power(x, n):
        return x if n == 0 else power(double(x), n - 1)

    one, other = functools.partial(lambda: scale), functools.lru_cache(lambda: scale)

    def running_sum(x):
        total = 0

        def add(value):
            nonlocal total  # a name of the function's own
            total += value

        for row in x:
            add(power(row, 3).sum() * one() * other())
        return total

    assert session.function(running_sum, outputs="sum")(X) == 8 * X.sum()


# ── any order of assignments and calls ───────────────────────────────────────────────────────────────

VALUES = (0.5, 2, np.ones(2), None)  # the same objects again and again
config = {"a": 1.0, "b": 2.0}
settings = types.SimpleNamespace(a=1.0)


def as_number(value):
    return -1.0 if value is None else float(np.asarray(value, float).sum())


def fields():
    return [*(as_number(config.get(key, 5)) for key in "abc"), as_number(settings.a)]


def first(fail):
    numbers = [as_number(scale), *fields()]
    if fail:
        raise ArithmeticError
    return np.array(numbers)


def second():
    return np.array([as_number(scale), as_number(config.get("a", 5)), as_number(settings.a)])


ACTIONS = st.one_of(
    st.tuples(st.just("global"), st.sampled_from(VALUES)),
    st.tuples(st.sampled_from(["a", "c"]), st.sampled_from(VALUES)),
    st.tuples(st.just("attribute"), st.sampled_from(VALUES)),
    st.tuples(st.just("delete"), st.sampled_from(["a", "b", "c"])),
    st.tuples(st.just("first"), st.just(False)),
    st.tuples(st.just("second"), st.none()),
    st.tuples(st.just("fail"), st.none()),
    st.tuples(st.just("interrupt"), st.booleans()),
)


TAKEN_BACK = [
    *(("global", 0.5), ("first", False), ("second", None)),
    *(("global", 2), ("first", False), ("global", 0.5), ("second", None)),
]


@example(actions=TAKEN_BACK)
@examples(150)
@given(actions=st.lists(ACTIONS, min_size=3, max_size=25))
def test_any_order_of_assignments_and_calls(session, actions):
    set_global("config", {"a": 1.0, "b": 2.0})
    set_global("settings", types.SimpleNamespace(a=1.0))
    f = session.function(first, bcast_inputs="fail", outputs="max")
    g = session.function(second, outputs="max")
    for action, value in actions:
        match action:
            case "global":
                set_global("scale", value)
            case "attribute":
                settings.a = value
            case "delete":
                config.pop(value, None)
            case "first":
                assert np.array_equal(f(False), first(False))
            case "second":
                assert np.array_equal(g(), second())
            case "fail":
                with pytest.raises(ArithmeticError):
                    f(True)
            case "interrupt":
                interrupt(session, f, sent=value)
            case key:
                config[key] = value
    assert np.array_equal(f(False), first(False))
    assert np.array_equal(g(), second())


def interrupt(session, f, *, sent):
    """A call of f that is interrupted before it is *sent*, or when it has been."""
    really = everyone(session).send

    def send(*args):
        if sent:
            really(*args)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(everyone(session), "send", send)
        with pytest.raises(KeyboardInterrupt):
            f(False)


# ── what binds by itself ─────────────────────────────────────────────────────────────────────────


def counting(x):
    global scale
    scale += 1
    return x.sum()


def forgetting():
    global scale
    del scale


def calls_counting(x):
    return counting(x)


class Counter:
    def go(self, x):
        return counting(x)


@pytest.mark.parametrize("fn", [counting, forgetting, calls_counting, Counter().go])
def test_code_that_binds_a_global_is_refused(session, fn):
    with pytest.raises(
        InvalidValue,
        match=r"'(counting|forgetting)', which is to run on the workers, assigns to 'scale', a name "
        r"outside of it .*return it\. .*scale = synk.shared\(…\): assign to scale.value",
    ):
        session.function(fn, outputs=[])(*[X] * (fn is not forgetting))


def test_code_that_binds_a_cell_is_refused(session):
    n = 0

    def count():
        nonlocal n
        n += 1

    def through():
        def inner():
            nonlocal n
            n += 1

        inner()

    for fn in (count, through):
        with pytest.raises(InvalidValue, match=r"assigns to 'n', a name outside of it"):
            session.function(fn, outputs=[])()
    assert n == 0


def test_code_of_other_globals(session):
    names = {"k": 3}
    exec("def f(x):\n    return x.sum() * k\n", names)
    f = session.function(names["f"], outputs="sum")
    assert f(X) == 3 * X.sum()
    names["k"] = 4
    assert f(X) == 4 * X.sum()
    assert isinstance(names["f"], types.FunctionType)


CHANGED = {"rate": 1.0, "table": np.zeros(3)}
RATE = 1.0


@pytest.mark.parametrize("target", [None, 1, [0, 1]], ids=str)
def test_what_changes_between_distribute_and_the_first_call_is_seen(session, target, monkeypatch):
    monkeypatch.setitem(CHANGED, "rate", 1.0)

    def used():
        return RATE, CHANGED["rate"], float(CHANGED["table"][0])

    CHANGED["table"][0] = 0
    f = session.function(used, target=target, **({} if target == 1 else {"outputs": None}))
    other = session.function(used, target=0)
    session.distribute()
    set_global("RATE", 2.0)
    CHANGED["rate"], CHANGED["table"][0] = 3.0, 4.0
    assert (f() if target == 1 else f()[0]) == (2.0, 3.0, 4.0)
    assert other() == (2.0, 3.0, 4.0)
