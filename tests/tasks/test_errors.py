"""What maps say of what cannot be done, and what the workers have after a map that failed."""

import os
import sys
import time

import numpy as np
import pytest

import synkro as synk
from support.waiting import wait_until
from synkro import CallTimeout, InvalidValue, OutputError, UsageError
from synkro.controller.engine.failures import Late, call_timeout
from synkro.messages import Phase

pytestmark = [pytest.mark.long, pytest.mark.counted_once]


def double(x):
    return x * 2


class Broken(Exception):
    """It cannot be made again of its args alone."""

    def __init__(self, path, line):
        super().__init__(f"{path}:{line}")
        self.path, self.line = path, line


class Mended(Broken):
    def __reduce__(self):
        return type(self), (self.path, self.line)


@pytest.mark.parametrize("wrapped", [lambda error: error, lambda error: [error]])
def test_an_exception_that_is_returned_says_what_its_class_needs(two, results, wrapped):
    def caught(kind, item):
        try:
            if item == 3:
                raise kind("b.csv", item)
        except Broken as error:
            return wrapped(error)
        return item

    advice = r"return repr\(error\), or give Broken a __reduce__ with all that its __init__ takes"
    with pytest.raises(OutputError, match=rf"item 3 of map\(\) .*{advice}"):
        results(lambda item: caught(Broken, item), range(8))
    with pytest.raises(OutputError, match=advice):
        synk.function(lambda x: caught(Broken, 3), outputs=None)(np.ones(4))
    mended = results(lambda item: caught(Mended, item), range(8))[3]
    error = mended[0] if isinstance(mended, list) else mended
    assert (error.path, error.line, str(error)) == ("b.csv", 3, "b.csv:3")


COUNT = 0


def counting(item):
    global COUNT
    COUNT += item
    return COUNT


@pytest.mark.parametrize(
    ("task", "common", "advice"),
    [
        (counting, {}, r"assigns to 'COUNT', .* would not see it: return it\."),
        (lambda item, r: r.random(), {"r": np.random.default_rng(0)}, r"pass a seed .*common= of a map"),
    ],
)
def test_what_tasks_may_not_do_has_an_advice(two, results, task, common, advice):
    with pytest.raises(UsageError, match=advice):
        results(task, range(3), common=common)


def test_a_global_data_is_to_come_by_common(two, results):
    data = synk.data(np.ones(3))
    with pytest.raises(UsageError, match=r"in a map by common=\{'data': data\}"):
        results(lambda item: item * data.sum(), range(3))
    assert results(lambda item, data: item * data.sum(), range(3), common={"data": data}) == [0, 3, 6]


def test_imap_has_the_arrays_of_its_beginning_and_data_as_they_are(two):
    array, data = np.zeros(2), synk.data(np.zeros(2))

    def task(item, given, data):
        return given[0], data[0], array[0]

    results = synk.imap(task, range(3000), common={"given": array, "data": data})
    assert next(results) == (0, 0, 0)
    array[0] = data[0] = 1
    seen = list(results)
    assert {(given, used) for given, _, used in seen} == {(0, 0)}
    assert seen[-1] == (0, 1, 0)


def test_a_function_with_a_target_is_no_task(two):
    with pytest.raises(synk.InvalidValue, match=r"has a target=: pass the plain function, double\.fn"):
        synk.map(synk.function(double, target=1), [1])


def test_an_interrupt_after_a_result_was_taken_loses_none_silently(two, monkeypatch):
    """One that comes when the lock of the readers is given back."""

    class Lock:
        def __enter__(self):
            pass

        def __exit__(self, *error):
            raise KeyboardInterrupt

    results = synk.imap(double, range(10))
    assert next(results) == 0
    monkeypatch.setattr(results, "_reading", Lock())
    with pytest.raises(KeyboardInterrupt):
        next(results)
    monkeypatch.undo()
    with pytest.raises(synk.UsageError, match="was interrupted"):
        next(results)


def test_nothing_comes_after_close(two):
    results = synk.imap(double, range(100))
    assert next(results) == 0
    there = results._map._collected._runs
    assert wait_until(lambda: sum(len(run) for run, _ in there.values()) > 1 or next(results) is None)
    results.close()
    assert list(results) == []


class Blind(Exception):
    def __getattribute__(self, name):
        raise RuntimeError("no")


def test_an_exception_that_cannot_be_looked_at(two):
    def fail(x):
        raise Blind

    with pytest.raises(synk.WorkerError, match="Blind"):
        synk.map(fail, [1])
    assert synk.map(double, [1]) == [2]


def test_a_child_that_a_task_forks_ends_as_it_does_elsewhere(own):
    def task(how):
        child = os.fork()
        if not child:
            how()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert synk.map(task, [sys.exit, lambda: sys.exit(3), lambda: 1 / 0]) == [0, 3, 1]


def test_slow_items_are_not_the_workers_fault():
    waiting, busy = Late(0, 7, "", Phase.TAKING, 0), Late(1, 8, "", Phase.TASK, 3)
    assert "went into the iterables" in str(call_timeout([waiting, waiting], 0.2))
    assert "rank 1 (pid 8) is running item 3" in str(call_timeout([waiting, busy], 0.2))
    there = call_timeout([waiting._replace(host="h1"), busy._replace(host="h2")], 0.2)
    assert "rank 1 (h2, pid 8) is running item 3" in str(there)
    assert there.hosts == ("h1", "h2")


class Counting:
    """Something with all kinds of parts that a task may change."""

    def __init__(self):
        self.n, self.memo, self.past, self.scale, self.lazy = 1, {}, [], np.ones(3), None


CHANGES = {
    "attribute": lambda thing, k: setattr(thing, "n", thing.n + 1),
    "dict": lambda thing, k: thing.memo.setdefault(k, 1),
    "list": lambda thing, k: thing.past.append(k),
    "array": lambda thing, k: setattr(thing, "scale", thing.scale * 2),
    "lazy": lambda thing, k: setattr(thing, "lazy", k),
}


@pytest.mark.parametrize("how", ["raises", "refused", "late"])
@pytest.mark.parametrize("way", CHANGES)
def test_after_a_map_that_failed_the_workers_have_what_they_had(two, way, how):
    thing, change = Counting(), CHANGES[way]

    def task(k):
        change(thing, k)
        if how == "raises" or way == "lazy":
            raise ValueError(k)
        if how == "late":
            time.sleep(30)

    error = CallTimeout if how == "late" and way != "lazy" else ValueError
    train = synk.function(lambda: thing.past.append("trained"), outputs=[])
    train()
    with pytest.raises(error):
        synk.map(task, range(8), timeout=0.5 if how == "late" else None)
    found = synk.map(lambda k: (thing.n, thing.memo, thing.past, sum(thing.scale), thing.lazy), range(6))
    assert found == [(1, {}, ["trained"], 3.0, None)] * 6


@pytest.mark.libraries
def test_after_a_map_that_failed_tables_and_tensors_hold_what_they_held(two):
    pd, torch = pytest.importorskip("pandas"), pytest.importorskip("torch")
    table, tensor = pd.DataFrame({"a": [1, 2]}), torch.zeros(3)

    def task(k):
        table["b"] = [k, k]
        tensor.add_(1)
        raise ValueError(k)

    with pytest.raises(ValueError, match="item"):
        synk.map(task, range(4))
    assert synk.map(lambda k: (table.shape, float(tensor.sum())), range(4)) == [((2, 1), 0.0)] * 4
    table["c"] = [1, 1]
    tensor.add_(1)
    assert synk.map(lambda k: (table.shape, float(tensor.sum())), range(4)) == [((2, 2), 3.0)] * 4


def test_an_estimator_that_a_map_has_fitted_in_vain_is_as_it_was(two):
    SGDClassifier = pytest.importorskip("sklearn.linear_model").SGDClassifier
    x, y = np.random.default_rng(0).standard_normal((40, 3)), np.arange(40) % 2
    model = SGDClassifier(random_state=0).fit(x, y)
    before = model.coef_.tolist()

    def task(k):
        model.partial_fit(x * k, y)
        raise ValueError(k)

    with pytest.raises(ValueError, match="item"):
        synk.map(task, [2, 3, 4])
    assert synk.map(lambda k: model.coef_.tolist(), range(3)) == [before] * 3


def test_sets_of_strings_have_one_order_on_all_ranks():
    names, found = {f"name {k}" for k in range(50)}, []
    for _ in range(2):
        with synk.Session(2, verbose=False, seed=3) as session:
            found += session.function(lambda: list(set(names)), outputs=None)()
    assert found == [found[0]] * 4


def test_tasks_do_not_get_their_ranks_rows_of_a_kept_output(two):
    kept = two.function(lambda x: x * 2, outputs="keep")(np.arange(4.0))
    for task, items in ((lambda k: kept.value.sum(), [1, 2]), (lambda k: k.value.sum(), [kept])):
        with pytest.raises(InvalidValue, match="a task used a kept output"):
            two.map(task, items)
    assert two.function(lambda k: k.sum(), outputs="sum")(kept) == 12
    assert two.map(lambda k: k.sum(), [np.asarray(kept)]) == [12]
