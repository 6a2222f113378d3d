"""A way into a failure: what failed on a worker runs once more in the program."""

import copy
import functools
import gc
import os
import pickle
import random
import sys
import threading
import traceback
import types
import weakref

import numpy as np
import pytest

import synkro as synk
from calls import test_prompt
from support.sessions import two_mapping
from support.together import good, together
from support.waiting import Watch

workers, typing = two_mapping, test_prompt.user
quick = pytest.mark.quick


class Odd(Exception):
    """The program's own."""


class Model:
    """Counts its calls, on the class and on itself."""

    calls = 0

    def __init__(self, scale):
        self.scale = scale
        self.seen = []

    def step(self, x):
        Model.calls += 1
        self.seen.append(len(x))
        return risky(x) * self.scale


def risky(x):
    if np.min(x) < 0:
        raise Odd("negative")
    return x


def failure(call, *args, **kwargs):
    """The WorkerError of a call."""
    with pytest.raises(synk.WorkerError) as caught:
        call(*args, **kwargs)
    return caught.value


def frames(error):
    """The frames of an exception, by the name of their functions."""
    return {frame.f_code.co_name: frame for frame, _ in traceback.walk_tb(error.__traceback__)}


def replayed(error):
    """The exception of a replay, and its frames."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  whatever the test is about
        error.replay()
    return caught.value, frames(caught.value)


@pytest.fixture
def nothing_last(monkeypatch):
    """The interpreter keeps no last error, neither before the test nor after it."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):
        monkeypatch.setattr(sys, name, None, raising=False)
        monkeypatch.delattr(sys, name)


@pytest.fixture
def user(nothing_last, typing):
    """What the user types at the prompt."""
    return typing


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────


@quick
def test_the_rows_of_the_rank(workers):
    def work(x, y):
        low, place = x.min(), (synk.rank(), synk.size(), synk.host(), synk.local_rank())
        rows = synk.rows()
        return risky(x).sum() + y + low + len(rows) + len(place)

    f = workers.function(work, bcast_inputs="y", outputs="sum")
    x = np.array([1.0, 2, 3, 4, -5, 6])
    error = failure(f, workers.data(x), 7)
    assert error.rank == 1
    again, found = replayed(error)
    assert type(again) is Odd
    assert str(again) == "negative"
    inside = found["work"].f_locals
    assert np.array_equal(inside["x"], [4, -5, 6])
    assert (inside["y"], inside["low"]) == (7, -5)
    assert np.array_equal(inside["rows"], [3, 4, 5])
    assert inside["place"] == (1, 2, 0, 1)
    assert list(found)[-2:] == ["work", "risky"]
    assert np.array_equal(x, [1.0, 2, 3, 4, -5, 6])


def test_selected_rows_slices_and_targets(workers):
    def work(x):
        rows = synk.rows()
        return risky(x).sum() + rows.sum()

    x = np.array([1.0, 2, -3, 4, 5, 6, 7, 8])
    f = workers.function(work, outputs="sum")
    _, found = replayed(failure(f, x, batch=[7, 2, 0, 1]))
    assert np.array_equal(found["work"].f_locals["rows"], [7, 2])
    _, found = replayed(failure(f, x, num_slices=4))
    assert np.array_equal(found["work"].f_locals["rows"], [2])
    alone = workers.function(work, outputs="sum", target=1)
    _, found = replayed(failure(alone, x))
    assert len(found["work"].f_locals["x"]) == 8


def test_what_the_rank_has_now_and_nothing_changes_here(workers, capfd):
    model, table, count = Model(3), {"calls": 0}, types.SimpleNamespace(n=0)
    w = workers.shared(np.zeros(2), name="w")

    def work(x):
        table["calls"] += 1
        count.n += 1
        w.value = w.value + 1
        return model.step(x)

    f = workers.function(work)
    x = np.array([1.0, -1])
    f(np.abs(x))
    error = failure(f, x)
    capfd.readouterr()
    _, found = replayed(error)
    step = found["step"].f_locals["self"]
    assert (step.seen, step.scale) == ([1, 1, 1], 3)
    assert type(step).calls == 3
    work_of = found["work"]
    assert work_of.f_locals["table"] == {"calls": 3}
    assert np.array_equal(work_of.f_locals["w"].value, [3, 3])
    assert (model.seen, Model.calls, table, count.n) == ([], 0, {"calls": 0}, 0)
    assert np.array_equal(workers.function(lambda: w.value[0], outputs=None)(), [2, 2])
    told = capfd.readouterr().err
    assert "on rank 1 this is what 'work', before it failed, or earlier calls have made of it" in told
    for name in ("'table'", "'count'", "'model.seen'", "'Model'", "the variable 'w'"):
        assert name in told
    _, found = replayed(error)
    assert found["work"].f_locals["table"] == {"calls": 3}


def test_globals_of_a_script(run_python):
    done = run_python(
        """
import traceback, numpy as np, synkro as synk

limit = 3

class Broken(ValueError):
    pass

class Part:
    def __init__(self):
        self.n = 0

    def check(self, x):
        self.n += 1
        if self.n + limit > 4:
            raise Broken(self.n)
        return x.sum()

part = Part()
synk.fork(2, verbose=False)
f = synk.function(lambda x: part.check(x), outputs="sum")
f(np.ones(2))
try:
    f(np.ones(2))
except Broken as error:
    failed = error
try:
    failed.replay()
except Broken as error:
    print(type(error) is Broken, error, part.n)
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    print(frame.f_locals["self"].n, frame.f_globals["limit"])
"""
    )
    assert done.stdout.splitlines() == ["True 3 0", "3 3"]
    assert "Synkro: 'part': on rank 0 this is what '<lambda>'" in done.stderr


def test_functions_and_classes_of_a_module_of_ones_own(workers, tmp_path, monkeypatch):
    (tmp_path / "replayed_module.py").write_text(
        "import threading\n"
        "lock, seen = threading.Lock(), []\n"
        "class Row:\n"
        "    def __init__(self, x):\n"
        "        self.x = x\n"
        "def work(x):\n"
        "    with lock:\n"
        "        seen.append(len(x))\n"
        "    row = Row(x)\n"
        "    raise ValueError(len(seen))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import replayed_module

    def work(x):
        return replayed_module.work(x)

    def imports(x):
        import replayed_module as found

        return found.work(x)

    for function in (work, imports):
        error = failure(workers.function(function), np.ones(2))
        for _ in range(2):
            again, found = replayed(error)
            assert again.args == (error.args[0] + 1,)
        assert replayed_module.seen == []
        assert sys.modules["replayed_module"] is replayed_module
        assert type(found["work"].f_locals["row"]).__name__ == "Row"
    monkeypatch.delitem(sys.modules, "replayed_module")


def test_what_cannot_be_copied_is_said_where_it_is_used(workers):
    made = []

    def work(x, how):
        if not made:
            made.append(each for each in range(100))
        if how == "next":
            next(made[0])
        elif how == "with":
            with made[0]:
                pass
        elif how == "attribute":
            made[0].send(None)
        raise ValueError("at the end")

    f = workers.function(work, bcast_inputs="how", outputs=[])
    again, _ = replayed(failure(f, np.ones(2), "not"))
    assert str(again) == "at the end"
    for how in ("next", "with", "attribute"):
        again, _ = replayed(failure(f, np.ones(2), how))
        assert "cannot be copied" in str(again)


def test_locks_are_new_ones(workers):
    made = {}

    def work(x):
        if not made:
            made.update(lock=threading.Lock(), many=threading.Condition(), own=threading.local())
            made["own"].count = 5
        with made["lock"], made["many"]:
            made["own"].count += 1
            raise ValueError(made["own"].count)

    for count in (6, 7):
        error = failure(workers.function(work, outputs=[]), np.ones(2))
        assert error.args == (count,)
        again, _ = replayed(error)
        assert again.args == (count + 1,)


def test_random_generators_are_as_when_the_run_began(workers):
    """Also in methods and libraries, and for the second of two normal numbers, which NumPy keeps."""

    class Draws:
        def numbers(self):
            return np.random.standard_normal(), random.gauss(0, 1), random.sample(range(100), 3)

    source = Draws()

    def work(x):
        drawn = synk.rng().normal(), random.random(), np.random.rand(), np.random.normal()
        if np.any(x == 2):
            raise ValueError(drawn, source.numbers(), np.random.permutation(5).tolist())

    f = workers.function(work, outputs=[])
    f(np.zeros(2))
    state = random.getstate(), np.random.get_state()[1].tolist()
    first, second, third = (failure(f, np.full(2, 2)) for _ in range(3))
    later = failure(f, np.arange(8), num_slices=4)  # in the third slice
    of_task = failure(workers.map, work, range(4))
    assert first.args != second.args
    for error in (second, first, second, third, later, of_task):
        again, _ = replayed(error)
        assert again.args == error.args
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state


def test_arguments_that_have_fewer_rows_now(workers):
    items = list(range(-3, 5))

    def work(x):
        if x.max() > 3:
            raise ValueError("large")
        return x.sum()

    f = workers.function(work, outputs="sum")
    error, sliced = failure(f, items), failure(f, items, num_slices=4)
    del items[1:]
    with pytest.raises(synk.InvalidValue, match="has no rows any more"):
        error.replay()
    with pytest.raises(synk.InvalidValue, match="fewer"):
        sliced.replay()


def test_settings_of_an_initializer():
    with synk.Session(1, verbose=False, initializer=np.seterr, initargs=("raise",)) as session:
        f = session.function(lambda x: 1 / x, outputs="gather")
        again, _ = replayed(failure(f, np.zeros(2)))
        assert type(again) is FloatingPointError
    assert np.geterr()["divide"] == "warn"


def test_generators_in_objects(workers):
    class Sampler:
        def __init__(self):
            self.rng = None

        def draw(self):
            if self.rng is None:
                self.rng = np.random.default_rng(synk.rank())
            return self.rng.normal()

    sampler = Sampler()

    def work(x):
        if x[0]:
            raise ValueError(sampler.draw())
        return sampler.draw()

    f = workers.function(work)
    f(np.zeros(2))
    again, _ = replayed(failure(f, np.ones(2)))
    assert isinstance(again.args[0], float)


# ── collectives ──────────────────────────────────────────────────────────────────────────────────────


def test_collectives_give_what_they_gave(workers):
    w = workers.shared(np.ones(3), name="w")

    def work(x):
        total = synk.all_reduce(x.sum(), op="sum")
        parts = synk.all_gather(x[:1])
        both = synk.all_reduce({"a": synk.rank(), "b": x[:2]}, op="max")
        parts[:] = 0  # what was kept is a copy
        synk.barrier()
        w.value = w.value * (1 + synk.rank())
        synk.all_reduce(w, op="sum")
        if synk.rank() == 1:
            raise ValueError(total, both["a"], both["b"].tolist(), w.value.tolist())
        return total

    error = failure(workers.function(work), np.arange(6.0))
    again, found = replayed(error)
    assert again.args[:3] == error.args[:3] == (15.0, 1, [3.0, 4.0])
    assert again.args[3] == error.args[3]
    assert isinstance(found["work"].f_locals["total"], float)


def test_a_replay_ends_at_what_is_not_known(workers):
    def large(x):
        every = synk.all_gather(np.ones(10_000))
        raise ValueError(len(every))

    again, found = replayed(failure(workers.function(large), np.ones(2)))
    assert isinstance(again, synk.ReplayEnded)
    assert "the replay ends at all_gather()" in str(again)
    assert "large" in found

    def goes_on(x):
        if synk.rank() == 1:
            raise ValueError("before")
        return synk.all_reduce(x)

    again, _ = replayed(failure(workers.function(goes_on), np.ones(2)))
    assert str(again) == "before"

    seen = []

    def another_way(x):
        seen.append(1)
        if len(seen) > 1:
            synk.barrier()
        synk.all_reduce(1)
        raise ValueError("after")

    again, _ = replayed(failure(workers.function(another_way), np.ones(2)))
    assert "the run that failed did all_reduce() here" in str(again)

    def worlds(x):
        world = synk.split(synk.rank())
        raise ValueError(world.size())

    again, _ = replayed(failure(workers.function(worlds), np.ones(2)))
    assert "the replay ends at split()" in str(again)


# ── tasks ────────────────────────────────────────────────────────────────────────────────────────────


def task(item, scale=1):
    drawn = synk.rng().normal(), random.random()
    if item == 3:
        raise Odd(item * scale, drawn)
    return item


TASKS = {
    "map": lambda workers: failure(workers.map, task, range(6), common={"scale": 5}),
    "returned": lambda workers: workers.map(task, [1, 3, 2, 3], [5] * 4, errors="return")[3],
    "tried again": lambda workers: workers.map(task, [3], [5], errors="return", retries=1)[0],
    "imap": lambda workers: failure(list, workers.imap(task, iter(range(6)), iter([5] * 6))),
}


@pytest.mark.parametrize("how", [pytest.param("map", marks=quick), "returned", "tried again", "imap"])
def test_a_task_on_its_item(workers, how):
    error = TASKS[how](workers)
    again, found = replayed(error)
    assert type(again) is Odd
    assert again.args == error.args
    assert again.args[0] == 15
    assert found["task"].f_locals["item"] == 3


def test_items_of_classes_and_arrays(workers):
    error = failure(workers.map, lambda m: m.step(np.array([-1.0])), [Model(2)])
    again, found = replayed(error)
    assert type(again) is Odd
    assert found["step"].f_locals["self"].scale == 2
    error = failure(workers.map, risky, [np.full(100_000, -1.0)])
    _, found = replayed(error)
    assert found["risky"].f_locals["x"].shape == (100_000,)


def test_tasks_of_an_executor(user, capfd):
    with synk.Executor(1) as executor:
        error = executor.submit(task, 3, scale=2).exception()
        other = executor.submit(lambda: Model(2).step(np.array([-1.0]))).exception()
        assert type(error) is Odd
        user.lines = ["p item, scale", "q"]
        synk.debug(error)
    assert "3, 2" in capfd.readouterr().out
    user.lines = ["p drawn", "q"]
    synk.debug(error)  # it needs no workers
    assert str(error.args[1]) in capfd.readouterr().out
    for _ in range(2):
        synk.debug(other)
    assert Model.calls == 0
    with synk.Executor(1, initializer=risky, initargs=(1,)) as executor:
        error = executor.submit(risky, -1).exception()
    user.lines = ["q"]
    synk.debug(error)
    assert "what the initializer of the Executor has set is on its workers" in capfd.readouterr().err


# ── debug() ──────────────────────────────────────────────────────────────────────────────────────────


@quick
def test_debug_opens_pdb_at_the_line(workers, user, capfd):
    f = workers.function(risky, outputs="sum")
    user.lines = ["p x", "u", "q"]
    try:
        f(np.array([1.0, -2]))
    except synk.WorkerError:
        synk.debug()
    said = capfd.readouterr().out
    assert "Odd: negative" in said
    assert f"> {__file__}" in said
    assert "array([-2.])" in said
    assert user.asked[0] == "(Pdb) "
    assert type(sys.last_value) is Odd


def test_debug_finds_the_failure(workers, user):
    error = failure(workers.function(risky, outputs="sum"), np.array([1.0, -2]))
    sys.last_value = error
    synk.debug()
    other = RuntimeError("of another kind")
    other.__cause__ = error
    synk.debug(other)
    try:
        1 / 0
    except ZeroDivisionError:
        synk.debug()  # the last failure of a function that there is
    assert len(user.asked) == 3


def test_the_prompt_stands_where_the_rank_stood(workers, user, capfd):
    def work(x):
        total = x.sum()
        if total < 0:
            raise ValueError("negative")
        return total

    f = workers.function(work)
    error = failure(f, np.array([1.0, -2]))
    user.lines = ["p synk.rank(), synk.size(), synk.rows()", "p np.isnan(x), Model.__name__", "q"]
    synk.debug(error)
    said = capfd.readouterr().out
    assert "(1, 2, array([1]))" in said
    assert "(array([False]), 'Model')" in said  # which the function does not use
    with pytest.raises(synk.UsageError):
        synk.rank()


class Falsy(ValueError):
    """Is false."""

    def __bool__(self):
        return False


def leaves(x):
    sys.exit(3)


def is_falsy(x):
    raise Falsy("falsy")


def chained(x):
    try:
        risky(x)
    except Odd as error:
        raise RuntimeError("of another") from error


@pytest.mark.parametrize(
    ("fn", "text"),
    [(leaves, "SystemExit: 3"), (is_falsy, "Falsy: falsy"), (chained, "RuntimeError: of")],
)
def test_debug_enters_whatever_failed(workers, user, capfd, fn, text):
    error = failure(workers.function(fn, outputs=[]), np.array([-1.0, -1]))
    synk.debug(error)
    assert text in capfd.readouterr().out
    if fn is chained:
        assert type(replayed(error)[0].__cause__) is Odd


def test_debug_without_a_failure(workers, nothing_last):
    gc.collect()  # errors of other tests
    with pytest.raises(synk.UsageError, match="found no failure"):
        synk.debug()
    with pytest.raises(synk.InvalidType, match=r"debug\(\) takes an exception"):
        synk.debug(3)
    with pytest.raises(synk.UsageError, match=r"got ValueError.*knows of no run of a function"):
        synk.debug(ValueError("of the program"))


# ── what becomes of it ───────────────────────────────────────────────────────────────────────────────


def test_a_failure_that_does_not_come_again(workers, tmp_path):
    (tmp_path / "there").touch()

    def work(x, path):
        if path.exists():
            raise ValueError("it is there")
        return x.sum()

    f = workers.function(work, outputs="sum", bcast_inputs="path")
    error = failure(f, np.ones(4), tmp_path / "there")
    (tmp_path / "there").unlink()
    with pytest.warns(UserWarning, match=r"did not come again: 'work' has returned .*it is there"):
        assert error.replay() == 2


@pytest.mark.parametrize(("kind", "told"), [(ValueError, "ValueError: 1"), (KeyError, "KeyError: 1")])
def test_another_failure_than_there(workers, capfd, kind, told):
    seen = []

    def work(x):
        seen.append(1)
        raise (kind if len(seen) == 1 else KeyError)(len(seen))

    again, _ = replayed(failure(workers.function(work), np.ones(2)))
    assert (type(again), again.args) == (KeyError, (2,))
    assert f"Synkro: on rank 0 it was {told}\n" in capfd.readouterr().err


def test_after_the_session_there_is_nothing_to_run():
    with synk.Session(1, verbose=False) as session:
        error = failure(session.map, risky, [-1])
        other = failure(session.function(risky), np.array([-1.0]))
    for each in (error, other):
        with pytest.raises(synk.UsageError, match="the session is closed"):
            each.replay()


def test_after_a_worker_has_died():
    with synk.Session(2, verbose=False) as session:
        error = failure(session.map, risky, [-1])
        with pytest.raises(synk.WorkerDied):
            session.map(lambda _: os.kill(os.getpid(), 9), [0])
        with pytest.raises(synk.SessionBroken):
            error.replay()


def test_copies_cannot_be_replayed(workers):
    error = failure(workers.map, risky, [-1])
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        with pytest.raises(synk.UsageError, match="cannot be replayed"):
            other.replay()


def test_of_many_failures_the_last_hundred_are_kept(workers):
    items = [np.full(3, -1.0) for _ in range(300)]
    found = workers.map(risky, items, errors="return")
    with pytest.raises(synk.UsageError, match="a hundred others"):
        found[0].replay()
    again, _ = replayed(found[-1])
    assert type(again) is Odd


def test_arguments_are_let_go_with_the_error(workers):
    class Array(np.ndarray):
        """One of which there can be weak references."""

    x = np.full(4, -1.0).view(Array)
    there = weakref.ref(x)
    f = workers.function(risky, outputs="max", bcast_inputs="x")
    error = failure(f, x)
    del x
    assert there() is not None
    del error
    gc.collect()
    f(np.ones(4))
    assert there() is None


def test_ctrl_c_in_a_replay(workers, tmp_path):
    (tmp_path / "first").touch()

    def work(x, path):
        if not path.exists():
            raise KeyboardInterrupt
        raise ValueError("there")

    f = workers.function(work, bcast_inputs="path", outputs=[])
    error = failure(f, np.ones(2), tmp_path / "first")
    (tmp_path / "first").unlink()
    with Watch(), pytest.raises(KeyboardInterrupt):
        error.replay()
    assert workers.map(abs, [-1]) == [1]
    with pytest.raises(synk.UsageError):
        synk.rank()


def test_a_replay_in_another_thread(workers):
    error = failure(workers.map, task, range(6))
    assert good(together(*[lambda: replayed(error)[0].args] * 3)) == [error.args] * 3


def closing_over(factor):
    return lambda x: risky(x * factor)


@pytest.mark.parametrize(
    "fn",
    [functools.partial(risky), Model(2).step, closing_over(3), risky],
    ids=["partial", "method", "closure", "plain"],
)
def test_calls_checks_and_submitted_calls_of_any_function(workers, fn):
    f, x = workers.function(fn, name="it"), np.array([1.0, -1])
    for error in (failure(f, x), failure(f.check, x), f.submit(x).exception()):
        again, found = replayed(error)
        assert type(again) is Odd
        assert "risky" in found
