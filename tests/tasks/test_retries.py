"""Tasks that fail are tried again, or have their exception for a result; what is there is not lost."""

import contextlib
import functools
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.sessions import two_mapping
from support.waiting import Watch, wait_until
from synkro import (
    CallTimeout,
    InvalidType,
    InvalidValue,
    OutputError,
    UsageError,
    WorkerDied,
    WorkerError,
)
from synkro.controller.objects.values import Values

pytestmark = pytest.mark.quick


two_forked = two_mapping


def tries(folder, item):
    """How often this was called for an item, this time included."""
    with open(f"{folder}/{item}", "ab") as file:
        file.write(b".")
        return file.tell()


class Odd(Exception):
    def __init__(self, item, why):
        super().__init__(item, why)
        self.item, self.why = item, why


# ── errors="return" ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("make", [list, iter])
def test_an_exception_is_the_result_of_its_item(two, results, make):
    def task(x):
        if x % 7 == 3:
            raise Odd(x, "three")
        return x

    found = results(task, make(range(500)), errors="return")
    assert [x for x in range(500) if x % 7 != 3] == [x for x in found if not isinstance(x, Odd)]
    for x, error in enumerate(found):
        if x % 7 == 3:
            assert isinstance(error, WorkerError)
            assert error.item == x
            assert error.why == "three"
            assert f"in the function 'task' at item {x} ({x}): Odd: " in str(error)
            assert "raise Odd" in str(error.__cause__)
    found = synk.imap(task, make(range(500)), errors="return", ordered=False)
    assert sorted(each.item if isinstance(each, Odd) else each for each in found) == list(range(500))


def test_all_tasks_may_fail_and_with_any_items(two, results):
    def task(x):
        if isinstance(x, np.ndarray):
            return x.sum()
        raise ValueError(len(x)) if len(x) > 1 else SystemExit(len(x))

    items = ["a", np.ones(50_000), "ccc", {}, np.ones(3), b"", [1, 2]]
    found = results(task, items, errors="return")
    kinds = [WorkerError, np.float64, ValueError, WorkerError, np.float64, WorkerError, ValueError]
    assert all(map(isinstance, found, kinds))
    assert found[1] == 50_000
    assert found[4] == 3
    assert "SystemExit: 1" in str(found[0])
    assert all(isinstance(each, ValueError) for each in results(task, ["aa"] * 100, errors="return"))


def test_what_cannot_be_a_result_is_told_in_its_place(two, results):
    class Refusing:
        def __reduce__(self):
            return refuse, ()

    def task(x):
        return [x, lambda: x, Refusing(), threading.Lock()][x % 4] if x < 40 else x

    found = results(task, range(80), errors="return")
    for x, each in enumerate(found):
        if x >= 40 or x % 4 == 0:
            assert each == x
        elif x % 4 == 1:
            assert each() == x
        else:
            assert isinstance(each, OutputError)
            assert f"item {x}" in str(each)


def refuse(*parts):
    raise ArithmeticError("not to be made again")


def test_a_large_result_that_cannot_be_made_again_is_one_result(two, results):
    class Large:
        def __reduce__(self):
            return refuse, (np.ones(50_000), np.ones(60_000))

    found = results(lambda x: Large() if x % 3 == 1 else np.full(50_000, x), range(9), errors="return")
    assert len(found) == 9
    for x, each in enumerate(found):
        assert isinstance(each, OutputError) if x % 3 == 1 else each[-1] == x


def test_collectives_in_tasks_are_told_in_their_place(two):
    def task(x):
        return synk.all_reduce(np.ones(1), "sum") if x == 1 else x

    found = synk.map(task, range(3), errors="return", retries=5)
    assert found[::2] == [0, 2]
    assert isinstance(found[1], UsageError)


def test_what_tasks_must_not_change_ends_the_map(two, results):
    seen = {}

    def task(x):
        seen[x] = x
        raise ValueError(x)

    with pytest.raises(InvalidValue, match="the function 'task' changes seen"):
        results(task, range(30), errors="return")


def test_items_that_cannot_be_sent_end_the_map_with_what_was_done(two):
    items = [-1, -2, -3, -4, -5, sys._getframe(), -6]
    for each, left in ((items, [5, 6]), (iter(items), [5, 6]), ((item for item in items), [5])):
        with pytest.raises(InvalidType, match="item 5 of map") as error:
            synk.map(abs, each, errors="return")
        assert kept(error.value) == {number: number + 1 for number in range(5)}
        assert error.value.pending == left


# ── retries ──────────────────────────────────────────────────────────────────────────────────────────


@examples(20)
@given(
    fails=st.lists(st.integers(0, 4), max_size=60),
    retries=st.integers(0, 3),
    chunksize=st.sampled_from([None, 1, 7]),
)
def test_a_task_is_tried_as_often_as_is_said(two, tmp_path_factory, fails, retries, chunksize):
    folder = str(tmp_path_factory.mktemp("tries"))

    def task(number, fails, folder):
        if (count := tries(folder, number)) <= fails:
            raise Odd(number, count)
        return number, count, float(synk.rng().random())

    numbers = range(len(fails))
    options = {"retries": retries, "errors": "return", "chunksize": chunksize}
    found = synk.map(task, numbers, fails, common={"folder": folder}, **options)
    for number, (each, count) in enumerate(zip(found, fails, strict=True)):
        if count > retries:
            assert each.why == retries + 1
            often = f", tried {retries + 1} times" * (retries > 0)
            assert f"at item {number} (({number}, {count})){often}: Odd" in str(each)
        else:
            assert each[:2] == (number, count + 1)


def test_another_try_has_the_item_and_the_numbers_of_the_first(two, results, tmp_path):
    def task(item, folder):
        drawn = float(synk.rng().random())
        item["seen"].append(drawn)
        if tries(folder, item["name"]) < 3:
            raise OSError("not yet")
        return item["seen"], drawn

    items = [{"name": str(number), "seen": []} for number in range(20)]
    found = results(task, items, common={"folder": str(tmp_path)}, retries=2)
    assert all(seen == [drawn] for seen, drawn in found)
    assert len({drawn for _, drawn in found}) == 20


def test_when_the_last_try_has_failed_the_map_ends(two, results, tmp_path):
    def task(x, folder):
        tries(folder, x)
        if x == 5:
            raise KeyError(x)
        return x

    told = r"in the function 'task' at item 5 \(5\), tried 4 times: KeyError"
    with pytest.raises(KeyError, match=told) as error:
        results(task, range(200), common={"folder": str(tmp_path)}, retries=3)
    assert isinstance(error.value, WorkerError)
    assert "raise KeyError" in str(error.value.__cause__)
    assert os.path.getsize(tmp_path / "5") == 4
    assert 5 not in error.value.finished
    assert 5 in error.value.pending


def test_an_error_of_use_is_not_tried_again(two, results, tmp_path):
    def task(x, folder):
        tries(folder, x)
        return synk.all_reduce(x, "sum")

    with pytest.raises(UsageError, match="a task used a collective"):
        results(task, [1], common={"folder": str(tmp_path)}, retries=3, item_timeout=60)
    assert os.path.getsize(tmp_path / "1") == 1


@pytest.mark.parametrize("ordered", [True, False])
def test_a_task_that_another_call_has_paused_is_tried_again(two, tmp_path, ordered):
    total = synk.function(lambda x: x.sum(), outputs="sum")

    def task(x, folder):
        if x % 3 == 0 and tries(folder, x) < 3:
            raise OSError(x)
        return x

    options = {"common": {"folder": str(tmp_path)}, "retries": 2, "ordered": ordered}
    found = []
    for value in synk.imap(task, range(60), **options):
        found.append(value)
        assert total(np.ones(4)) == 4
    assert (found if ordered else sorted(found)) == list(range(60))


@pytest.mark.parametrize(
    ("option", "value", "what"),
    [
        *[("retries", value, "retries") for value in (-1, 1.5, "two")],
        ("errors", "ignore", 'errors= is "raise" or "return"; got \'ignore\''),
        ("errors", None, "errors="),
    ],
)
def test_other_values_are_refused(two, results, option, value, what):
    with pytest.raises(UsageError, match=what):
        results(abs, [1], **{option: value})


# ── what is there when a map ends by an error ────────────────────────────────────────────────────────


def kept(error, got=(), of=None):
    """The results that *error* has, by item, after a look that it tells of each item but those *got*.

    *of* are the items, if *error* has to tell of all that are in it.
    """
    assert of is None or {*got, *error.finished, *error.pending} == {*of}
    assert len(error.results) == len(error.finished)
    assert len({*error.finished, *error.pending}) == len(error.finished) + len(error.pending)
    assert not {*got} & {*error.finished, *error.pending}
    return dict(zip(error.finished, error.results, strict=True))


@pytest.mark.parametrize("run", [synk.map, synk.imap, functools.partial(synk.imap, ordered=False)])
def test_an_exception_has_the_results_that_the_program_did_not_get(two, run):
    def task(x):
        if x == 77:
            raise ValueError(x)
        return x * x

    got = []
    with pytest.raises(ValueError, match="item 77") as error:
        got.extend(run(task, range(300)))
    got = [round(value**0.5) for value in got]
    assert all(value == x * x for x, value in kept(error.value, got, range(300)).items())
    assert 77 in error.value.pending


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit, ValueError])
def test_items_that_were_read_are_pending_whatever_ends_their_generator(two, end):
    def items():
        yield from range(50)
        raise end

    with pytest.raises(end) as error:
        synk.map(abs, items())
    kept(error.value, of=range(50))
    assert synk.map(abs, [-1]) == [1]


def test_of_a_generator_those_that_were_read_are_pending(two):
    read = []

    def items():
        for x in range(10_000):
            read.append(x)
            yield x
        raise AssertionError

    with pytest.raises(ZeroDivisionError) as error:
        synk.map(lambda x: 1 // (x - 20), items())
    kept(error.value, of=read)
    with pytest.raises(ZeroDivisionError) as error:
        synk.map(int, (1 // (x - 20) for x in range(30)))
    assert kept(error.value) == {x: 1 // (x - 20) for x in range(20)}
    assert error.value.pending == []


def test_a_timeout_has_the_results(own):
    def task(x):
        time.sleep(60 if x == 3 else 0)
        return x

    with Watch(), pytest.raises(CallTimeout) as error:
        synk.map(task, range(10), timeout=0.5, chunksize=1)
    there = kept(error.value, of=range(10))
    assert 3 not in there
    assert {0, 1, 2} <= there.keys()
    assert synk.map(abs, [-1]) == [1]


def test_ctrl_c_has_the_results(own, tmp_path):
    def task(x):
        if x == 500:
            (tmp_path / "there").touch()
            time.sleep(60)
        return x

    def interrupt():
        wait_until((tmp_path / "there").exists)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with Watch(), pytest.raises(KeyboardInterrupt) as error:
        synk.map(task, range(1000))
    thread.join()
    assert all(x == value for x, value in kept(error.value, of=range(1000)).items())
    assert synk.map(abs, [-1]) == [1]


@pytest.mark.parametrize("options", [{}, {"retries": 2}], ids=str)
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSEGV, None], ids=str)
def test_a_worker_that_dies_takes_no_result_along(own, end, options):
    def task(x):
        if x == 500:
            time.sleep(0.05)  # results that are there are handed over meanwhile
            os._exit(3) if end is None else os.kill(os.getpid(), end)
        return np.full(1000, x) if x % 10 == 0 else x

    with Watch(), pytest.raises(WorkerDied, match="at item 500") as error:
        synk.map(task, range(1000), **options)
    there = kept(error.value, of=range(1000))
    assert 500 in error.value.pending
    assert all(np.all(value == x) for x, value in there.items())
    assert len(there) > 100
    assert ("close()" in str(error.value)) == (not options)


def test_the_error_of_another_map_does_not_take_results(two):
    """The results of a map that has ended come from it, also when another one runs."""
    failing = synk.imap(lambda x: 1 // (x - 3), range(8))
    assert [next(failing) for _ in range(3)] == [-1, -1, -1]
    with contextlib.closing(synk.imap(abs, range(100))) as other:
        assert next(other) == 0
        with pytest.raises(ZeroDivisionError) as error:
            next(failing)
        kept(error.value, range(3))
        assert list(other) == list(range(1, 100))


class Telling(Exception):
    results = "its own"

    def pending(self):
        return "its own"


def test_an_exception_of_a_call_has_its_own_attributes(two):
    def fail(x):
        raise Telling(x)

    with pytest.raises(Telling) as error:
        synk.function(fail)(np.ones(3))
    assert error.value.results == error.value.pending() == "its own"
    with pytest.raises(Telling) as error:
        synk.map(fail, [1, 2])
    assert error.value.results == []
    assert error.value.pending == [0, 1]


class Mark:
    def __init__(self, number):
        self.number = number


@pytest.mark.parametrize("make", [list, iter, lambda items: (item for item in items)], ids="lig")
def test_a_task_that_fails_while_items_are_pickled(two, monkeypatch, results, make):
    """The batch that is being sent then is not sent under the numbers of another one."""
    engine, settle = two._engine, Values.settle

    def late(self):
        wait_until(lambda: len(engine.everyone.unanswered()) < engine.size, 0.3)
        settle(self)

    def task(item):
        if item[0] == 0:
            raise ValueError
        return item[0]

    items = [(number, Mark(number) if number % 5 == 4 else None) for number in range(40)]
    monkeypatch.setattr(Values, "settle", late)
    for _ in range(5):
        with pytest.raises(ValueError, match="item 0") as error:
            results(task, make(items))
        assert all(number == result for number, result in kept(error.value).items())
        assert {*error.value.finished, *error.value.pending} >= {0, 1}
