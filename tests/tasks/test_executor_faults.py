"""What becomes of an ``Executor`` when its workers die, or the program is interrupted, or ends."""

import concurrent.futures
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

import synkro as synk
from support.inside import in_phase
from support.programs import PATHS
from support.waiting import Watch, gone, wait_until
from synkro import CallTimeout, WorkerDied
from synkro.messages import Phase

pytestmark = pytest.mark.long


def square(x):
    return x * x


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def leave():
    os._exit(3)


class AtPickling:
    """Kills whoever pickles it."""

    def __reduce__(self):
        kill()


class AtUnpickling:
    """Kills whoever unpickles it."""

    def __reduce__(self):
        return kill, ()


def in_background(die):
    """Die a moment after the task has ended."""
    threading.Timer(0.05, die).start()


def pids(executor):
    """The processes of its workers, which need not know a task for that."""
    return executor._pool._session.pids


def kill_idle(executor):
    """Kill a worker that has not had a task."""
    assert wait_until(in_phase(executor._pool._session, Phase.TAKING, 0))
    os.kill(pids(executor)[0], signal.SIGKILL)


DEATHS = {
    "a crash": lambda executor: executor.submit(crash),
    "a kill": lambda executor: executor.submit(kill),
    "an exit": lambda executor: executor.submit(leave),
    "while a task is unpickled": lambda executor: executor.submit(id, AtUnpickling()),
    "while a result is pickled": lambda executor: executor.submit(AtPickling),
    "in a chunk": lambda executor: executor.submit(lambda: [square(1), leave()]),
}
IDLE = {
    "between tasks": lambda executor: executor.submit(in_background, kill).result(),
    "before the first": kill_idle,
}


# ── it breaks, as the standard library's does ────────────────────────────────────────────────────────


@pytest.mark.parametrize("death", DEATHS)
def test_a_death_breaks_it(death):
    with synk.Executor(2) as executor, Watch():
        before = executor.submit(square, 3)
        assert before.result() == 9
        sleeping = executor.submit(time.sleep, 100)
        fatal = DEATHS[death](executor)
        waiting = [executor.submit(square, n) for n in range(20)]
        with pytest.raises(BrokenProcessPool, match=r"in an Executor, the worker of rank . .pid"):
            fatal.result()
        assert isinstance(fatal.exception().__cause__, WorkerDied)
        with pytest.raises(BrokenProcessPool, match="retries="):
            sleeping.result()
        for future in waiting:  # those that were done before it have their results
            with contextlib.suppress(BrokenProcessPool):
                future.result()
        with pytest.raises(concurrent.futures.BrokenExecutor):
            executor.submit(square, 3)


@pytest.mark.parametrize("retries", [None, 1], ids=["it breaks", "it is healed"])
@pytest.mark.parametrize("death", IDLE)
def test_an_idle_worker_dies(death, retries):
    with synk.Executor(1, **({"retries": 1} if retries else {})) as executor, Watch():
        (pid,) = pids(executor)
        IDLE[death](executor)
        assert wait_until(lambda: gone(pid))
        if retries:
            assert executor.submit(square, 3).result() == 9
            assert executor.submit(os.getpid).result() != pid
        else:
            with pytest.raises(BrokenProcessPool, match="in an Executor, the worker of rank 0 "):
                executor.submit(square, 3).result()


def test_a_death_while_it_shuts_down():
    executor = synk.Executor(2)
    fatal = executor.submit(lambda: time.sleep(0.2) or kill())
    with Watch():
        executor.shutdown()
        with pytest.raises(BrokenProcessPool):
            fatal.result()


# ── or is healed ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("death", DEATHS)
def test_another_worker_takes_the_place_of_a_dead_one(death):
    with synk.Executor(2, retries=1) as executor, Watch():
        first = [executor.submit(square, n) for n in range(20)]
        fatal = DEATHS[death](executor)
        last = [executor.submit(square, n) for n in range(20)]
        with pytest.raises(WorkerDied, match=r"tried 2 times, the worker of rank . .*taken its place"):
            fatal.result()
        assert [future.result() for future in first + last] == [n * n for n in range(20)] * 2


def test_tasks_whose_workers_die_are_done_again(tmp_path):
    array = np.zeros(1 << 18)

    def work(n, array):
        array += 1  # which the next try does not see
        if n % 10 == 3 and not (tmp_path / str(n)).exists():
            (tmp_path / str(n)).touch()
            kill()
        return n + array.sum()

    with synk.Executor(2, retries=1) as executor:
        futures = [executor.submit(work, n, array) for n in range(200)]
        assert [future.result() for future in futures] == [n + (1 << 18) for n in range(200)]
    assert not array.any()


def test_a_task_that_is_done_again_has_its_settings(tmp_path):
    """It ran first under those of its ``submit()``, and other tasks have brought others since."""
    log = logging.getLogger("tests.tried_again")
    tried, go_on = tmp_path / "tried", tmp_path / "go_on"

    def work():
        first, _ = not tried.exists(), tried.touch()
        while first and not go_on.exists():
            time.sleep(0.01)
        if first:
            raise ValueError("once")
        return log.isEnabledFor(logging.DEBUG)

    log.setLevel(logging.ERROR)
    try:
        with synk.Executor(1, retries=1) as executor:
            future = executor.submit(work)
            log.setLevel(logging.DEBUG)
            later = executor.submit(lambda: log.isEnabledFor(logging.DEBUG))
            wait_until(later.running)  # it was given to the worker, to come next
            go_on.touch()
            assert (future.result(), later.result()) == (False, True)
            assert type(executor.submit(lambda: 1 // 0).exception()) is ZeroDivisionError
    finally:
        log.setLevel(logging.NOTSET)


def test_a_task_that_takes_too_long_is_ended():
    with synk.Executor(2, item_timeout=1) as executor, Watch():
        late = executor.submit(time.sleep, 100)
        assert [executor.submit(square, n).result() for n in range(9)] == [n * n for n in range(9)]
        with pytest.raises(CallTimeout, match=r"in an Executor at sleep\(100\), the task took longer"):
            late.result()
        assert executor.submit(square, 3).result() == 9


# ── the program ──────────────────────────────────────────────────────────────────────────────────────

HEAD = """
import atexit, concurrent.futures, os, signal, sys, threading, time
import numpy as np
import synkro as synk

def say(*words):
    print(*words, flush=True)

def square(x):
    return x * x
"""


@pytest.fixture
def program(tmp_path):
    """Start a program; it has a process group of its own."""
    started = []

    def start(text, *arguments):
        (tmp_path / "program.py").write_text(HEAD + text)
        pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        command = [sys.executable, tmp_path / "program.py", *arguments]
        environment = {**os.environ, **PATHS}
        started.append(
            subprocess.Popen(command, env=environment, text=True, start_new_session=True, **pipes)
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def said(process):
    """The lines that a program prints, which ends well and has nothing to complain of."""
    out, err = process.communicate(timeout=60)
    assert (err, process.returncode) == ("", 0)
    return out.splitlines()


@pytest.mark.parametrize("where", ["with", "result", "exit"])
def test_ctrl_c_ends_tasks_at_once(program, where):
    texts = {
        "with": "with synk.Executor(2) as executor:\n    {}\n    time.sleep(100)",
        "result": "executor = synk.Executor(2)\n{}\nfuture.result()",
        "exit": "executor = synk.Executor(2)\n{}",
    }
    task = "future = executor.submit(lambda: (say(os.getpid()), time.sleep(100)))"
    process = program(texts[where].format(task))
    pid = int(process.stdout.readline())
    with Watch():
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert "KeyboardInterrupt" in err
    assert "Exception ignored" not in err
    ends = (0,) if where == "exit" else (-signal.SIGINT, 130)
    assert process.returncode in ends
    assert wait_until(lambda: gone(pid))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_workers_end_with_a_program_that_is_killed(program, number):
    process = program("""
executor = synk.Executor(2)
executor.submit(lambda: (say(os.getpid()), time.sleep(100)))
time.sleep(100)
""")
    pid = int(process.stdout.readline())
    os.kill(process.pid, number)
    process.wait()
    with Watch():
        assert wait_until(lambda: gone(pid))


PROGRAMS = {
    "it waits for its tasks": (
        """
executor = synk.Executor(2)
for n in range(4):
    executor.submit(lambda: (time.sleep(0.2), say("done")))
""",
        ["done"] * 4,
    ),
    "submit after the end": (
        """
@atexit.register
def last():
    try:
        executor.submit(square, 3)
    except RuntimeError as error:
        say("cannot schedule new futures after shutdown" in str(error))
executor = synk.Executor(1)
say(executor.submit(square, 3).result())
""",
        ["9", "True"],
    ),
    "globals that the initializer sets": (
        """
state, table = None, {}

def prepare(value):
    global state, late
    state = late = value
    table["squares"] = [square(n) for n in range(value)]

class Model:
    def __call__(self, n):
        return state + late + table["squares"][n]

def work(n):
    table[n] = n
    return state, late, Model()(n), sorted(map(str, table))

with synk.Executor(2, initializer=prepare, initargs=(9,)) as executor:
    for n in range(6):
        say(*executor.submit(work, n).result()[:3])
    say(*executor.map(Model(), range(3)))
say(state, table)
""",
        [*[f"9 9 {18 + n * n}" for n in range(6)], "18 19 22", "None {}"],
    ),
    "classes that the initializer changes": (
        """
class Model:
    path, loaded = "none", None

    @classmethod
    def load(cls, path):
        cls.path, cls.loaded = path, [len(path)]

def work(n):
    Model.loaded.append(n)
    return Model.path, len(Model.loaded)

with synk.Executor(1, Model.load, ("weights",)) as executor:
    for n in range(3):
        say(*executor.submit(work, n).result())
    say(*next(executor.map(work, range(1))))
say(Model.path, Model.loaded)
""",
        ["weights 2", "weights 3", "weights 4", "weights 5", "none None"],
    ),
    "functions and classes of unusual kinds": (
        """
import dataclasses, functools, operator

@functools.lru_cache(maxsize=50)
def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)

@dataclasses.dataclass(slots=True)
class Slotted:
    x: int

class Model:
    @functools.cache
    def twice(self, n):
        return 2 * n

    @functools.cached_property
    def size(self):
        return 7

def work(n):
    return Slotted(n), Model().twice(n), Model().size, fibonacci(n)

with synk.Executor(1) as executor:
    for n in (10, 20):
        say(*executor.submit(work, n).result())
    say(executor.submit(fibonacci, 30).result(), fibonacci.cache_info().currsize)
    say(executor.submit(functools.lru_cache(square), 3).result())
    say(executor.submit(operator.attrgetter("x"), Slotted(5)).result())
""",
        ["Slotted(x=10) 20 7 55", "Slotted(x=20) 40 7 6765", "832040 0", "9", "5"],
    ),
    "objects come back as the program's own": (
        """
import collections, dataclasses, enum, pickle

class Color(enum.Enum):
    RED = 1

Pair = collections.namedtuple("Pair", "a b")

@dataclasses.dataclass
class Point:
    x: float
    seen: list = dataclasses.field(default_factory=list)
    made = 0

class Odd(Exception):
    pass

def work(n):
    Point.made += 1
    return Color(n), Pair(n, n), Point(n), Odd(n)

def fail():
    raise Odd("it is")

with synk.Executor(2) as executor:
    for _ in range(3):
        color, pair, point, odd = executor.submit(work, 1).result()
        assert color is Color.RED
        assert type(pair) is Pair and type(point) is Point and type(odd) is Odd
        assert point == Point(1) and Point.made == 0
    try:
        executor.submit(fail).result()
    except Odd as error:
        say(error, "program.py" in str(error.__cause__))
""",
        ["it is True"],
    ),
    "of many threads none is left": (
        """
def work(n):
    with synk.Executor(1) as executor:
        assert list(executor.map(square, range(n))) == [k * k for k in range(n)]

threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
executor = synk.Executor(1)
executor.submit(square, 1).result()
executor.shutdown()
del executor
before = len(os.listdir("/proc/self/fd")), threading.active_count()
for _ in range(5):
    with synk.Executor(1) as executor:
        executor.submit(square, 1).result()
del executor
say(before == (len(os.listdir("/proc/self/fd")), threading.active_count()))
""",
        ["True"],
    ),
    "in a child": (  # which calls the script __mp_main__, if it is no fork
        """
import multiprocessing

class Point:
    def __init__(self, x):
        self.x = x

def doubled(point):
    return Point(square(point.x))

def child(queue):
    with synk.Executor(1) as executor:
        found = executor.submit(doubled, Point(3)).result()
        queue.put((type(found) is Point, found.x, *executor.map(lambda n: square(n), [1, 2])))

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    say(*queue.get(timeout=50))
    process.join()
""",
        ["True 9 1 4"],
    ),
}


@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        *[(what, []) for what in PROGRAMS if what != "in a child"],
        *[("in a child", [how]) for how in ("spawn", "forkserver", "fork")],
    ],
)
def test_what_a_program_says(program, what, arguments):
    text, lines = PROGRAMS[what]
    assert said(program(text, *arguments)) == lines
