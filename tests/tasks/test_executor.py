"""``synk.Executor``: a future for each task."""

import asyncio
import concurrent.futures.process
import dataclasses
import functools
import gc
import importlib
import itertools
import multiprocessing
import os
import pickle
import threading
import time
import weakref

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.examples import examples, given, st
from support.together import good, together
from support.waiting import Watch, wait_until
from synkro import InvalidType, InvalidValue, SessionClosed
from synkro.values.arrays import same_bits as same

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def executor():
    with synk.Executor(2) as executor:
        yield executor


@dataclasses.dataclass
class Point:
    """A class of the program's, with state of its own."""

    x: float
    y: float = 0.0

    def norm(self):
        return (self.x**2 + self.y**2) ** 0.5


class Odd(Exception):
    def __init__(self, item, why):
        super().__init__(item, why)
        self.item, self.why = item, why


def square(x):
    return x * x


# ── results ──────────────────────────────────────────────────────────────────────────────────────────


def test_it_is_an_executor_of_the_standard_library(executor):
    assert isinstance(executor, concurrent.futures.Executor)
    futures = [executor.submit(square, n) for n in range(20)]
    assert all(type(future) is concurrent.futures.Future for future in futures)
    found = [future.result() for future in concurrent.futures.as_completed(futures)]
    assert sorted(found) == [n * n for n in range(20)]
    done, others = concurrent.futures.wait(futures)
    assert len(done) == 20
    assert not others
    assert executor.submit(divmod, 17, 5).result() == (3, 2)
    assert executor.submit(sorted, [2, 3, 1], reverse=True).result() == [3, 2, 1]
    assert repr(executor) == "<synkro.Executor of 2 workers, ready>"


def test_functions_of_any_kind(executor):
    factor = 3
    assert executor.submit(lambda x: factor * x, 14).result() == 42
    assert executor.submit(functools.partial(square, 5)).result() == 25
    assert executor.submit(Point(3.0, 4.0).norm).result() == 5.0
    assert executor.submit(Point, 1, y=2).result() == Point(1, 2)
    assert type(executor.submit(Point, 1).result()) is Point
    assert executor.submit(np.add, np.ones(3), 1).result().tolist() == [2, 2, 2]


AGAIN = {
    "what it uses": (
        """
import numpy as np

scale = 1

def helper(x):
    return x

def work(x=1, y=2):
    return scale, helper(x), y, float(len(np.ones(3))), getattr(work, "calls", 0)
""",
        ("", (1, 1, 2, 3.0, 0)),
        ("scale = 5", (5, 1, 2, 3.0, 0)),
        ("def helper(x):\n    return 7", (5, 7, 2, 3.0, 0)),
        ("helper.__code__ = (lambda x: 8).__code__", (5, 8, 2, 3.0, 0)),
        ("work.__defaults__ = (1, 4)", (5, 8, 4, 3.0, 0)),
        ("import functools as np", AttributeError("functools")),
        ("import numpy as np; work.calls = 3", (5, 8, 4, 3.0, 3)),
        ("len = lambda _: 9.0", (5, 8, 4, 9.0, 3)),
        ("scale = seen = []", ([], 8, 4, 9.0, 3)),
        ("seen.append(1)", ([1], 8, 4, 9.0, 3)),
    ),
    "names and annotations": (
        "def work(x: int = 0):\n    return work.__name__, work.__doc__, work.__annotations__",
        ("", ("work", None, {"x": int})),
        ("work.__name__, work.__doc__ = 'another', 'is'", ("another", "is", {"x": int})),
        ("work.__annotations__['return'] = tuple", ("another", "is", {"x": int, "return": tuple})),
        ("work.__annotations__['x'] = float", ("another", "is", {"x": float, "return": tuple})),
    ),
    "globals in the body of a class": (  # which reads them by another instruction than functions do
        "def work():\n    class Made:\n        x: int = rate\n    return Made.x",
        ("import threading; __annotations__ = {'rate': threading.Lock()}; rate = 3", 3),
        ("rate = 4", 4),
        ("rate = 5", 5),
    ),
    "methods of builtin objects": (
        "numbers = [1]; count = numbers.count\ndef work():\n    return count(1)",
        ("", 1),
        ("numbers.append(1)", 2),
        ("numbers.append(1)", 3),
    ),
}


@pytest.mark.parametrize("what", AGAIN)
def test_functions_that_come_again_are_as_they_are_now(executor, what):
    """What is kept of their pickles does not serve when something has changed."""
    names = {"__name__": "typed_by_hand"}
    source, *changes = AGAIN[what]
    exec(source, names)
    for change, expected in changes:
        exec(change, names)
        for _ in range(3):
            future = executor.submit(names["work"])
            if isinstance(expected, Exception):
                with pytest.raises(type(expected), match=str(expected)):
                    future.result()
            else:
                assert future.result() == expected


def test_what_a_task_changes_is_thrown_away(executor):
    names, array = ["a"], np.zeros(1 << 18)

    def change(names, array):
        names.append("b")
        array += 1
        LEFT.append(1)
        return names, array.sum(), len(LEFT)

    for _ in range(4):  # the array is copied for the first task, and mapped by the others
        assert executor.submit(change, names, array).result() == (["a", "b"], 1 << 18, 1)
    assert names == ["a"]
    assert not array.any()
    assert LEFT == []


LEFT = []


def test_map(executor):
    assert list(executor.map(square, range(100))) == [n * n for n in range(100)]
    assert list(executor.map(pow, [2, 3], [5, 2, 9])) == [32, 9]
    assert executor.starmap(pow, [(2, 5), (3, 2)]) == [32, 9]
    assert executor.starmap(square, zip(range(100)), chunksize=9) == [n * n for n in range(100)]


def test_map_reads_no_further_than_buffersize(executor):
    read = []

    def items():
        for number in itertools.count():
            read.append(number)
            yield number

    results = executor.map(square, items(), buffersize=5)
    assert len(read) == 5
    assert [next(results) for _ in range(10)] == [n * n for n in range(10)]
    assert len(read) == 15
    results.close()


def test_map_is_not_waited_for_beyond_its_timeout(executor, tmp_path):
    results = executor.map(lambda n: n or wait_until((tmp_path / "go").exists), [1, 2, 0], timeout=0.3)
    with Watch():
        assert [next(results), next(results)] == [1, 2]
        with pytest.raises(concurrent.futures.TimeoutError):
            next(results)
    (tmp_path / "go").touch()


@examples(30)
@given(
    items=st.lists(st.one_of(st.integers(), st.floats(allow_nan=False), st.text(), st.binary())),
    size=st.integers(1, 9),
)
def test_map_is_exact(executor, items, size):
    assert list(executor.map(lambda x: (x, [x]), items, chunksize=size)) == [(x, [x]) for x in items]


@pytest.mark.parametrize("dtype", ["?", "i1", ">i4", "f8", "c16", "U5", "M8[ns]", "O"])
def test_arrays_small_and_large(executor, dtype):
    for shape in [(), (0, 3), (7,), (300, 700)]:
        array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        for given_ in (array, array[..., ::-1] if shape else array, np.asfortranarray(array)):
            for _ in range(3):
                got = executor.submit(lambda x: (x, x.flags.f_contiguous), given_).result()
                contiguous = given_.flags.forc and dtype != "O"  # else NumPy makes it native
                assert (same if contiguous else np.array_equal)(got[0], given_)


def test_an_array_that_changes_between_tasks(executor):
    array = np.zeros(1 << 18)
    for number in range(12):
        if number % 3:
            array[number] = number
        assert executor.submit(np.sum, array).result() == array.sum()
        view = array[: 1 << 17]
        assert executor.submit(np.sum, view).result() == view.sum()


def test_an_array_that_many_tasks_have_lies_in_memory_once(executor):
    """Else 40 tasks would have 40 copies, of 80 MB together with what they return."""
    array = np.arange(1 << 18, dtype=float)
    futures = [executor.submit(_mapped, array) for _ in range(40)]
    assert sum(future.result() for future in futures) >= 38
    partial = functools.partial(_mapped, array)
    assert all(executor.map(lambda fn, _: fn(), itertools.repeat(partial), range(3)))
    assert all(executor.map(lambda _, array=array: _mapped(array), range(3)))


def _mapped(array):
    """Whether an array lies in a file that another process has made."""
    address = array.__array_interface__["data"][0]
    with open("/proc/self/maps") as maps:
        for line in maps:
            low, high = (int(part, 16) for part in line.split()[0].split("-"))
            if low <= address < high:
                return line.split()[4] != "0" and "rw-p" in line
    return False


def test_views_of_other_dtypes_of_the_same_memory(executor):
    records = np.zeros(1 << 17, [("x", "f8"), ("y", "f8")])
    records["x"] = 1.5
    described = np.arange(1 << 18, dtype=np.dtype("f8", metadata={"unit": "m"}))
    for _ in range(3):
        for array in (records, records.view([("p", "i8"), ("q", "i8")]), records.view("M8[s]")):
            assert same(executor.submit(lambda x: x, array).result(), array)
        assert executor.submit(lambda x: x.dtype.metadata, described).result() == {"unit": "m"}


def test_threads_that_submit_one_new_array(executor):
    """Each of them pickles it: one copy is made, and stays."""
    for number in range(30):
        array, start = np.full(1 << 18, number), threading.Barrier(4)

        def work(array=array, start=start):
            start.wait()
            return list(executor.map(lambda _, array=array: array.sum(), range(2)))

        assert together(*[work] * 4) == [[number << 18] * 2] * 4


def test_attributes_and_read_only_arrays(executor):
    class Length(np.ndarray):
        """An array with an attribute."""

    length = np.ones(3).view(Length)
    length.unit = "m"
    assert executor.submit(lambda x: x.unit, length).result() == "m"
    fixed = np.ones(1 << 18)
    fixed.flags.writeable = False
    for _ in range(3):
        assert not executor.submit(lambda x: x.flags.writeable, fixed).result()


def test_what_is_remembered_of_arrays_goes_with_them(executor):
    array = np.arange(1 << 18, dtype=float)
    for _ in range(3):
        executor.submit(np.sum, array).result()
    before = len(os.listdir("/proc/self/fd"))
    del array
    assert wait_until(lambda: gc.collect() >= 0 and len(os.listdir("/proc/self/fd")) < before)


def test_memory_mapped_files_are_mapped_and_not_written_to(executor, tmp_path):
    written = np.memmap(tmp_path / "x", float, "w+", shape=(50, 4))
    written[:] = np.arange(200.0).reshape(50, 4)
    turned = np.memmap(tmp_path / "x", float, "r", shape=(50, 4), order="F")
    for array in (written, written[3:7], turned):
        got, kind = executor.submit(lambda x: (np.array(x), type(x).__name__), array).result()
        assert same(got, np.array(array))
        assert kind == "memmap"
    assert executor.submit(lambda x: x.__setitem__(0, -1.0), written).result() is None
    assert written[0, 0] == 0
    private = np.memmap(tmp_path / "x", float, "c", shape=(50, 4))
    private[0, 0] = 7
    assert executor.submit(lambda x: x[0, 0], private).result() == 7
    (tmp_path / "x").rename(tmp_path / "y")
    assert executor.submit(np.sum, written).result() == written.sum()
    busy = [executor.submit(time.sleep, 0.2) for _ in range(4)]
    waits = executor.submit(np.sum, written)
    (tmp_path / "y").unlink()
    assert waits.result() == written.sum()
    assert all(future.result() is None for future in busy)


def test_data_stay_where_they_are_and_are_read_only(executor):
    with synk.Session(1, devices="cpu", verbose=False) as session:
        data = session.data(np.arange(1000.0))
        assert executor.submit(lambda x: x[::2].sum(), data).result() == data[::2].sum()
        assert executor.submit(lambda x: type(x) is np.ndarray, data).result()
        with pytest.raises(ValueError, match="read-only"):
            executor.submit(lambda x: x.__setitem__(0, 1), data).result()
        data[0] = 5
        assert executor.submit(np.max, {"x": data}["x"]).result() == 999
        assert executor.submit(lambda both: both["x"][0], {"x": data}).result() == 5
        frame = data[10:20]
        assert executor.submit(np.sum, frame).result() == np.arange(10, 20).sum()


def test_variables_are_refused_by_name(executor):
    with synk.Session(1, devices="cpu", verbose=False) as session:
        weights = session.shared(np.ones(3), name="weights")
        with pytest.raises(InvalidType, match=r"'weights' is a variable of a session.*get_value\(\)"):
            executor.submit(np.sum, weights).result()
        with pytest.raises(InvalidType, match="'weights' is a variable"):
            list(executor.map(lambda _: weights, range(3)))
        assert executor.submit(np.sum, weights.get_value()).result() == 3


def test_proxies_of_a_manager(executor):
    with multiprocessing.get_context("spawn").Manager() as manager:
        seen, queue, lock = manager.dict(), manager.Queue(), manager.Lock()

        def note(number):
            with lock:
                seen[number] = os.getpid()
            queue.put(number)

        list(executor.map(note, range(10)))
        assert sorted(seen.keys()) == list(range(10))
        assert sorted(queue.get() for _ in range(10)) == list(range(10))
    multiprocessing.resource_tracker._resource_tracker._stop()


# ── errors ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_exception_is_the_function_s_own(executor):
    def fail(item):
        raise Odd(item, "why not")

    future = executor.submit(fail, 3)
    error = future.exception()
    assert type(error) is Odd
    assert (error.item, error.why) == (3, "why not")
    assert 'raise Odd(item, "why not")' in str(error.__cause__)
    assert __file__ in str(error.__cause__)
    with pytest.raises(Odd):
        future.result()
    assert executor.submit(square, 2).result() == 4


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException])
def test_exceptions_that_are_none_of_exception(executor, kind):
    def fail():
        raise kind("as it is")

    assert type(executor.submit(fail).exception()) is kind
    assert executor.submit(square, 2).result() == 4


def test_what_map_raises_comes_in_its_place(executor):
    results = executor.map(lambda n: 1 // (n - 3), range(9))
    assert [next(results) for _ in range(3)] == [-1, -1, -1]
    with pytest.raises(ZeroDivisionError):
        next(results)
    with pytest.raises(StopIteration):
        next(results)


def test_what_does_not_pickle(executor):
    lock = threading.Lock()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'"):
        executor.submit(id, lock).result()
    with pytest.raises(TypeError, match=r"cannot pickle '_thread.lock'"):
        executor.submit(lambda: threading.Lock()).result()
    with open(__file__) as file, pytest.raises(TypeError, match="send its path"):
        executor.submit(id, file).result()
    with pytest.raises(TypeError, match=r"lock"):
        list(executor.map(lambda _, lock=lock: lock, range(3)))
    assert executor.submit(square, 2).result() == 4


class Made:
    """Of a function and its arguments, where it is unpickled."""

    def __init__(self, *parts):
        self.parts = parts

    def __reduce__(self):
        fn, *args = self.parts
        return fn, tuple(args)


def unloadable():
    """It is unpickled nowhere but where it was made."""

    def load(pid):
        if os.getpid() != pid:
            raise RuntimeError("not here")

    return Made(load, os.getpid())


def _raise(kind):
    raise kind


def test_callbacks_that_raise(executor, tmp_path, capfd):
    gate = tmp_path / "gate"
    future = executor.submit(lambda: wait_until(gate.exists))  # a callback of what is done runs here
    future.add_done_callback(lambda _: _raise(SystemExit))
    gate.touch()
    assert executor.submit(square, 3).result() == 9
    assert wait_until(lambda: "SystemExit" in capfd.readouterr().err)


line = None


def connect():
    """A line that serves twice."""
    global line
    line = []


def use(again):
    global line
    if len(line) == 2 and again:
        connect()
    elif len(line) == 2:
        line = []
    line.append(1)
    return len(line)


def test_what_tasks_assign_to_names_of_the_initializer_stays():
    with synk.Executor(1, initializer=connect) as executor:
        assert list(executor.map(use, [False] * 6)) == [1, 2] * 3
        assert list(executor.map(use, [True] * 6)) == [1, 2] * 3
    assert line is None


rates = None  # a module, in the next test


def test_what_modules_that_go_by_value_have_now(executor, tmp_path, monkeypatch):
    """No pickle of a function is kept that has a value of theirs."""
    (tmp_path / "rates_of_tests.py").write_text("rate = 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("rates_of_tests")
    monkeypatch.setitem(globals(), "rates", module)

    def now():
        return rates.rate

    cloudpickle.register_pickle_by_value(module)
    try:
        for number in range(5):
            module.rate = number
            assert executor.submit(now).result() == number
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def test_exceptions_of_pythons_own_modules(executor):
    def fails():
        import sqlite3

        sqlite3.connect(":memory:").execute("select nope")

    with pytest.raises(Exception, match="no such column") as info:
        executor.submit(fails).result()
    assert type(info.value).__name__ == "OperationalError"


def test_what_does_not_unpickle_fails_alone(executor):
    futures = [executor.submit(square, 2), executor.submit(id, unloadable()), executor.submit(square, 3)]
    assert futures[0].result() == 4
    with pytest.raises(RuntimeError, match="not here"):
        futures[1].result()
    assert futures[2].result() == 9
    with pytest.raises(synk.OutputError, match=r"of unloadable\(\) cannot be unpickled here"):
        executor.submit(unloadable).result()
    for kind in (SystemExit, KeyboardInterrupt):
        with pytest.raises(synk.OutputError, match=kind.__name__):
            executor.submit(Made, _raise, kind).result()
    assert executor.submit(square, 2).result() == 4


async def later():
    return 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda it: it.submit(3), InvalidType, r"submit\(\) takes a function, and its arguments; got 3"),
        (lambda it: it.map([1], 2), InvalidType, r"map\(\) takes a function"),
        (lambda it: it.starmap([1], []), InvalidType, r"starmap\(\) takes a function"),
        (lambda it: it.map(square, [1], chunksize=0), InvalidValue, "chunksize"),
        (lambda it: it.map(square, [1], buffersize="all"), InvalidType, "buffersize"),
        (lambda it: it.submit(id, it.submit(id, 2)).result(), InvalidType, "a future: pass its result"),
        (lambda it: it.submit(later), InvalidType, "is async: submit a plain function"),
        (lambda it: synk.Executor(0), InvalidValue, "max_workers must be greater than 0; got 0"),
        (lambda it: synk.Executor("two"), InvalidType, "max_workers .* int of 1 or more; got 'two'"),
        (lambda it: synk.Executor(1, 3), InvalidType, "initializer= takes a function; got 3"),
        (lambda it: synk.Executor(1, print, 3), TypeError, "'int' object is not iterable"),
        (lambda it: synk.Executor(1, retries=-1), InvalidValue, "retries"),
        (lambda it: pickle.loads(pickle.dumps(it)), InvalidType, "cannot be copied"),
    ],
)
def test_arguments_of_the_executor_itself(executor, call, error, message):
    with pytest.raises(error, match=message):
        call(executor)


# ── the initializer ──────────────────────────────────────────────────────────────────────────────────


table = None
known = {}


def prepare(value):
    global table
    table = value
    known["pid"] = os.getpid()


def look():
    return table, known.get("pid") == os.getpid()


def test_what_the_initializer_sets_is_what_tasks_find():
    with synk.Executor(2, initializer=prepare, initargs=({"a": np.ones(3)},)) as executor:
        for found, same_process in executor.map(lambda _: look(), range(20)):
            assert found["a"].tolist() == [1, 1, 1]
            assert same_process
    assert table is None


def test_what_the_initializer_only_reads_is_the_program_s():
    names = {"__name__": "typed_by_hand"}
    exec(_TYPED, names)
    with synk.Executor(1, names["begin"]) as executor:
        assert executor.submit(names["work"]).result() == (10, 1, "old", 1)
        exec("scale = 5\ndef helper():\n    return 'new'\n", names)
        assert executor.submit(names["work"]).result() == (10, 5, "new", 2)


_TYPED = """
scale, table, seen = 1, None, []

def helper():
    return "old"

def begin():
    global table
    table = 10 * scale
    helper()
    seen.clear()

def work():
    seen.append(1)
    return table, scale, helper(), len(seen)
"""


def test_each_worker_is_prepared_once(tmp_path):
    def begin(folder):
        (folder / str(os.getpid())).open("a").write(".")

    with synk.Executor(2, begin, (tmp_path,), max_tasks=3) as executor:
        pids = set(executor.map(lambda _: time.sleep(0.01) or os.getpid(), range(20)))
    assert {path.name for path in tmp_path.iterdir()} >= set(map(str, pids))
    assert len(pids) > 4
    assert {path.read_text() for path in tmp_path.iterdir()} == {"."}


def test_an_initializer_that_fails_breaks_the_executor():
    def begin():
        raise ValueError("no licence")

    with synk.Executor(2, begin) as executor:
        with pytest.raises(concurrent.futures.process.BrokenProcessPool, match="ValueError: no licence"):
            executor.submit(square, 2).result()
        with pytest.raises(concurrent.futures.BrokenExecutor, match="initializer has failed"):
            executor.submit(square, 2)
        assert "broken" in repr(executor)


# ── the end ──────────────────────────────────────────────────────────────────────────────────────────


def test_after_shutdown_there_are_no_more_tasks():
    executor = synk.Executor(2)
    futures = [executor.submit(square, n) for n in range(50)]
    executor.shutdown()
    assert [future.result() for future in futures] == [n * n for n in range(50)]
    with pytest.raises(SessionClosed, match="cannot schedule new futures after shutdown"):
        executor.submit(square, 2)
    with pytest.raises(RuntimeError, match="cannot schedule new futures"):
        list(executor.map(square, [2]))
    executor.shutdown()
    assert repr(executor) == "<synkro.Executor of 2 workers, closed>"


def test_futures_that_are_cancelled(tmp_path):
    def wait(_):
        (tmp_path / "begun").touch()
        assert wait_until((tmp_path / "go").exists)

    with synk.Executor(1) as executor, Watch():
        first = executor.submit(wait, 0)
        assert wait_until((tmp_path / "begun").exists)
        futures = [executor.submit(square, n) for n in range(100)]
        assert not first.cancel()
        assert futures[-1].cancel()
        assert futures[-1].cancelled()
        (tmp_path / "go").touch()
        assert [future.result() for future in futures[:-1]] == [n * n for n in range(99)]
        with pytest.raises(concurrent.futures.CancelledError):
            futures[-1].result()


def test_no_more_tasks_are_taken_than_are_needed(tmp_path):
    """Also after very short ones: the others can be cancelled."""

    def wait():
        assert wait_until((tmp_path / "go").exists)

    with synk.Executor(2) as executor, Watch():
        for future in [executor.submit(square, n) for n in range(500)]:
            future.result()
        futures = [executor.submit(wait) for _ in range(40)]
        assert wait_until(futures[1].running)
        assert sum(future.cancel() for future in futures) >= 36
        (tmp_path / "go").touch()
    assert all(future.done() for future in futures)


def test_cancelling_many_while_tasks_are_taken():
    executor = synk.Executor(2)
    futures = [executor.submit(square, n) for n in range(50_000)]
    executor.shutdown(cancel_futures=True)
    assert all(future.done() for future in futures)
    with pytest.raises(SessionClosed):
        executor.submit(square, 3)


def test_shutdown_that_cancels(tmp_path):
    def wait(_):
        assert wait_until((tmp_path / "go").exists)

    executor = synk.Executor(1)
    futures = [executor.submit(wait, n) for n in range(60)]
    executor.shutdown(wait=False, cancel_futures=True)
    (tmp_path / "go").touch()
    with Watch():
        executor.shutdown()
    assert futures[0].result() is None
    assert sum(future.cancelled() for future in futures) >= 58
    assert all(future.done() for future in futures)


def test_an_executor_that_is_dropped_ends():
    before = set(threading.enumerate())
    executor = synk.Executor(1)
    future = executor.submit(square, 3)
    pid = executor.submit(os.getpid).result()
    del executor
    gc.collect()
    with Watch():
        assert future.result() == 9
        assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"))
        assert wait_until(lambda: before.issuperset(threading.enumerate()))


def test_nothing_is_kept_of_a_task_that_has_ended(executor):
    point = Point(1)
    gone = weakref.ref(point)
    executor.submit(point.norm).result()
    del point
    assert wait_until(lambda: gone() is None)


def test_kill_workers():
    executor = synk.Executor(2)
    futures = [executor.submit(time.sleep, 100) for _ in range(9)]
    with Watch():
        executor.kill_workers()
        for future in futures:
            with pytest.raises((concurrent.futures.BrokenExecutor, concurrent.futures.CancelledError)):
                future.result()
        executor.shutdown()


# ── in company ───────────────────────────────────────────────────────────────────────────────────────


def test_several_executors_and_a_session_side_by_side(executor):
    with synk.Session(1, devices="cpu", verbose=False) as session, synk.Executor(1) as other:
        total = session.function(lambda x: x.sum(), outputs="sum")
        futures = [(executor.submit(square, n), other.submit(square, -n)) for n in range(20)]
        assert total(np.ones(5)) == 5
        assert session.map(square, range(9)) == [n * n for n in range(9)]
        assert all(a.result() == b.result() == n * n for n, (a, b) in enumerate(futures))


def test_many_threads_submit(executor):
    def work(first):
        return [executor.submit(square, n).result() for n in range(first, first + 50)]

    found = good(together(*(functools.partial(work, 50 * n) for n in range(8))))
    assert list(itertools.chain(*found)) == [n * n for n in range(400)]


def test_tasks_that_callbacks_submit(executor):
    done = threading.Event()
    found = []

    def follow(future):
        found.append(future.result())
        if len(found) == 5:
            done.set()
        else:
            executor.submit(square, found[-1] + 1).add_done_callback(follow)

    executor.submit(square, 1).add_done_callback(follow)
    assert done.wait(15)
    assert found == [1, 4, 25, 676, 458329]


def test_asyncio(executor):
    async def main():
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor, square, n) for n in range(20)))

    assert asyncio.run(main()) == [n * n for n in range(20)]


def test_inside_a_worker_tasks_run_one_after_the_other(executor):
    def nested(number):
        with synk.Executor(4) as inner:
            results = list(inner.map(lambda x: (x + number, os.getpid()), range(3)))
            return results, os.getpid(), inner.submit(lambda: 1 // 0).exception()

    results, pid, error = executor.submit(nested, 10).result()
    assert results == [(10, pid), (11, pid), (12, pid)]
    assert type(error) is ZeroDivisionError
    assert executor.submit(lambda: list(executor.map(square, range(4)))).result() == [0, 1, 4, 9]


def test_as_serial():
    def train(x):
        with synk.Executor(2, initializer=prepare, initargs=(5,)) as inner:
            return [*inner.map(square, x)], inner.starmap(pow, [(2, 3)])

    with synk.Session(1, devices="cpu", verbose=False) as session:
        function = session.function(train, outputs=None)
        assert function.as_serial(np.arange(4)) == ([0, 1, 4, 9], [8])


def test_prints_of_tasks_have_no_rank_before_them(executor, capfd):
    said = []
    executor.submit(print, "from a task").result()
    assert wait_until(lambda: said.append(capfd.readouterr().out) or "from a task" in "".join(said))
    assert "[rank" not in "".join(said)


def test_more_workers_than_cores_are_no_reason_to_warn():
    with synk.Executor(len(os.sched_getaffinity(0)) + 1) as executor:
        assert executor.submit(square, 3).result() == 9


def test_a_fork_of_the_program_has_no_workers(executor):
    executor.submit(square, 3).result()
    pid = os.fork()
    if not pid:
        try:
            executor.submit(square, 3)
        except SessionClosed as error:
            os._exit(0 if "fork" in str(error) else 1)
        finally:
            os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert executor.submit(square, 3).result() == 9


def test_random_numbers_follow_the_seed():
    def draw(_):
        return float(synk.rng().random()), float(np.random.random())

    found = []
    for _ in range(2):
        with synk.Executor(1, seed=5) as executor:
            found.append(list(executor.map(draw, range(5))))
    assert found[0] == found[1]
    assert len(set(found[0])) == 5
