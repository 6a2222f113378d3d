"""A map with a checkpoint goes on after anything, and gives what it would have given."""

import contextlib
import dataclasses
import errno
import itertools
import os
import random
import resource
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import synkro as synk
from support.sessions import running, two_mapping
from support.waiting import wait_until
from synkro import InvalidType, InvalidValue, WorkerDied
from synkro.values.arrays import same_bits as same

pytestmark = pytest.mark.quick


two_forked = two_mapping


@pytest.fixture(params=["map", "imap", "in any order"])
def results(request):
    """What gives the results of a map; those of ``imap`` may come in any order."""

    def run(fn, *iterables, **options):
        if request.param == "map":
            return synk.map(fn, *iterables, **options)
        ordered = request.param == "imap"
        found = list(synk.imap(fn, *iterables, ordered=ordered, **options))
        return found if ordered else sorted(found)

    return run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "run.synk"


def output(*command, **environment):
    """What Python prints for this command."""
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def count(folder, item):
    """Note a call for an item; returns how many there were."""
    with open(f"{folder}/{item}", "ab") as file:
        file.write(b".")
        return file.tell()


def calls(folder):
    """How often a task ran, by item."""
    return {int(file.name): file.stat().st_size for file in folder.iterdir() if file.name.isdigit()}


# ── what is done is not done again ───────────────────────────────────────────────────────────────────


def test_what_is_done_is_not_done_again(two, results, tmp_path, path):
    def task(x, folder):
        count(folder, x)
        if x == 150 and not os.path.exists(f"{folder}/fixed"):
            raise KeyError(x)
        return x, float(synk.rng().random())

    def run():
        return results(task, range(300), common={"folder": str(tmp_path)}, checkpoint=path)

    with pytest.raises(KeyError, match="at item 150") as error:
        run()
    assert error.value.pending
    done = calls(tmp_path)
    (tmp_path / "fixed").touch()
    found = run()
    assert [x for x, _ in found] == list(range(300))
    again = calls(tmp_path)
    assert again[150] == 2
    assert sum(again.values()) - 300 <= 60  # those that had no result when the map ended
    assert run() == found
    assert run() == found
    assert calls(tmp_path) == again
    assert len({drawn for _, drawn in found}) == 300
    assert done.keys() < again.keys()


@pytest.mark.parametrize("make", [list, iter, tuple])
def test_items_of_any_kind(two, results, path, make):
    items = [1, "a", 2.5, b"x" * 100, (1, {"k": {"x", "y"}}), np.arange(40_000.0), np.arange(6), [], {}]
    items += [Setting(3, {"a", "b"}), print, len, Setting]

    def task(number, item):
        return number, repr(item)[:50]

    seen = [results(task, range(len(items)), make(items), checkpoint=path) for _ in range(3)]
    assert [number for number, _ in seen[0]] == list(range(len(items)))
    assert seen[0] == seen[1] == seen[2]


@dataclasses.dataclass
class Setting:
    alpha: float
    names: set = dataclasses.field(default_factory=set)


def test_results_of_any_kind_come_back(two, path):
    def task(x):
        kinds = [x, None, np.full(30_000, x), {"x": {x}}, Setting(x), lambda: x, "s" * 100_000]
        return kinds[x % len(kinds)]

    for _ in range(2):
        for x, found in enumerate(synk.map(task, range(70), checkpoint=path)):
            expected = task(x)
            assert type(found) is type(expected)
            if x % 7 == 2:
                assert same(found, expected)
            elif x % 7 == 5:
                assert found() == x
            else:
                assert found == expected


def test_items_that_are_added_run(two, results, path):
    def task(x):
        return x * 2

    for length in (0, 3, 100, 100, 250, 20):
        assert results(task, range(length), checkpoint=path) == [2 * x for x in range(length)]


def test_a_part_of_imap_that_was_left(two, tmp_path, path):
    def task(x, folder):
        count(folder, x)
        return x

    for got in (30, 50, 10, 201):  # at last to its end
        results = synk.imap(task, range(200), common={"folder": str(tmp_path)}, checkpoint=path)
        with contextlib.closing(results) as found:
            assert list(itertools.islice(found, got)) == list(range(200))[:got]
    assert calls(tmp_path).keys() == set(range(200))
    assert sum(calls(tmp_path).values()) < 800  # some ran that were not handed over


def test_failures_are_tried_again_and_not_kept(two, tmp_path, path):
    def task(x, folder):
        if (tries := count(folder, x)) <= x:
            raise ValueError(tries)
        return x, tries

    options = {"common": {"folder": str(tmp_path)}, "checkpoint": path, "errors": "return"}
    for run in range(1, 6):
        found = synk.map(task, range(5), **options)
        for x, each in enumerate(found):
            assert each == (x, x + 1) if x < run else isinstance(each, ValueError)
    assert calls(tmp_path) == {x: x + 1 for x in range(5)}


def test_all_numbers_are_those_of_the_first_run(path):
    def draw(x):
        if x == 50:
            raise KeyError(x)
        return float(synk.rng().random())

    for workers, seed in ((2, 3), (1, 4)):
        with running(workers, seed=seed) as session, pytest.raises(KeyError) as error:
            session.map(draw, range(100), checkpoint=path)
    there = dict(zip(error.value.finished, error.value.results, strict=True))
    with running(2, seed=3) as session:
        expected = session.map(lambda x: float(synk.rng().random()), range(100))
    assert there == {number: expected[number] for number in there}
    assert len(there) > 10


# ── other functions, and other items ─────────────────────────────────────────────────────────────────


SCALE = {"a": 1}


def scaled(x):
    return x * SCALE["a"]


def other_scaled(x):
    return 1 + x * SCALE["a"]


def renamed(x):
    return 1 + x * SCALE["a"]


renamed.__name__ = renamed.__qualname__ = "scaled"


@pytest.mark.parametrize(
    ("fn", "items", "scale", "what"),
    [
        (other_scaled, range(5), 1, "of a map of 'scaled', and this"),
        (renamed, range(5), 1, "of another 'scaled': its code changed since"),
        (scaled, range(5), 2, "of another 'scaled': SCALE changed since"),
        (scaled, [0, 1, 3], 1, "result of another item 2 than"),
        (scaled, iter("abc"), 1, "result of another item 0 than"),
    ],
)
def test_what_is_another_map_is_told(two, path, monkeypatch, fn, items, scale, what):
    assert synk.map(scaled, range(5), checkpoint=path) == list(range(5))
    monkeypatch.setitem(SCALE, "a", scale)
    with pytest.raises(InvalidValue, match=what):
        synk.map(fn, items, checkpoint=path)
    monkeypatch.setitem(SCALE, "a", 1)
    assert synk.map(scaled, range(5), checkpoint=path) == list(range(5))


def test_what_items_have_in_common_is_told_by_name(two, path):
    def task(x, table, k):
        return float(table.sum()) + k + x

    data = synk.data(np.ones(5))
    assert synk.map(task, [1, 2], common={"table": data, "k": 1}, checkpoint=path) == [7, 8]
    for table in (data, np.ones(5)):
        with contextlib.suppress(InvalidValue):
            assert synk.map(task, [1, 2], common={"table": table, "k": 1}, checkpoint=path) == [7, 8]
    with pytest.raises(InvalidValue, match=r"another 'task': common=\{'k': …\} changed since"):
        synk.map(task, [1, 2], common={"table": data, "k": 2}, checkpoint=path)
    data[0] = 7
    with pytest.raises(InvalidValue, match=r"common=\{'table': …\} changed since"):
        synk.map(task, [1, 2], common={"table": data, "k": 1}, checkpoint=path)


# ── files ────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("contents", [b"hello", b"\x93NUMPY", b"Synkro checkpoint 9\n" + bytes(50)])
def test_a_file_of_another_kind_is_left_alone(two, path, contents):
    path.write_bytes(contents)
    os.chmod(path, 0o600)
    with pytest.raises(InvalidValue, match="is no checkpoint of this version"):
        synk.map(abs, [1], checkpoint=path)
    assert path.read_bytes() == contents


def test_files_that_others_can_write_are_refused(two, path):
    synk.map(abs, [1], checkpoint=path)
    assert path.stat().st_mode & 0o777 == 0o600
    for mode in (0o620, 0o602):
        os.chmod(path, mode)
        with pytest.raises(InvalidValue, match="others can write it"):
            synk.map(abs, [1], checkpoint=path)
    os.chmod(path, 0o644)
    assert synk.map(abs, [1], checkpoint=path) == [1]


def test_what_is_no_file_is_refused(two, tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path, error, told in (
        (tmp_path / "nowhere" / "x", OSError, "nowhere"),
        (tmp_path, OSError, str(tmp_path)),
        (tmp_path / "pipe", InvalidValue, "takes the path of a file"),
        (3.5, InvalidType, "takes the path of a file"),
    ):
        with pytest.raises(error, match=told):
            synk.map(abs, [1], checkpoint=path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_files_of_another_user_are_refused(two, path):
    synk.map(abs, [1], checkpoint=path)
    os.chown(path, 12345, -1)
    with pytest.raises(InvalidValue, match="belongs to another user"):
        synk.map(abs, [1], checkpoint=path)


def test_two_maps_do_not_write_to_one_file(two, path):
    with contextlib.closing(synk.imap(abs, range(10), checkpoint=path)) as first:
        assert next(first) == 0
        with pytest.raises(InvalidValue, match="another map, perhaps of another program"):
            synk.map(abs, range(10), checkpoint=path)
    assert synk.map(abs, range(10), checkpoint=path) == list(range(10))


@pytest.mark.parametrize("bit", range(0, 8 * 40, 7))
def test_no_bit_of_the_first_record_makes_results_those_of_another_map(two, path, bit):
    def run(scale, items):
        return synk.map(lambda x: x * scale, items, checkpoint=path)

    assert run(10, range(6)) == [0, 10, 20, 30, 40, 50]
    whole = bytearray(path.read_bytes())
    whole[20 + bit // 8] ^= 1 << bit % 8
    path.write_bytes(whole)
    for length in (1, 6):
        with pytest.raises(InvalidValue, match="is damaged"):
            run(11, range(length))


def test_what_was_cut_off_does_not_come_back(two, path):
    """Small records in the place of a large one leave nothing of it behind them."""

    def task(x):
        return np.arange(20_000.0) if x == 0 and large[0] else x

    large = [True]
    assert len(synk.map(task, [0], checkpoint=path)[0]) == 20_000
    path.write_bytes(path.read_bytes()[:-1000])
    for _ in range(3):
        assert len(synk.map(task, [0, 1, 2], checkpoint=path)[0]) == 20_000
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2])
    assert synk.map(task, [5, 6], checkpoint=path.with_name("other")) == [5, 6]
    for _ in range(3):
        assert synk.map(task, [0, 1, 2], checkpoint=path)[1:] == [1, 2]


def test_equal_items_are_the_same_items(two, path):
    words = ["x1", "x2", "x1"]
    shared = [1]
    for _ in range(25):  # 2**25 lists, if each is looked at by itself
        shared = [shared, shared]
    own = [2]
    own.append(own)
    table = np.arange(12.0).reshape(3, 4)
    first = [("x1", "x2", "x1"), {"a": "b", "b": "a"}, table, shared, own]
    other = {"a": words[0].replace("x1", "b"), "b": "a"}
    second = [tuple(words), other, np.asfortranarray(table), shared, own]
    for items in (first, second):
        assert synk.map(type, items, checkpoint=path) == [tuple, dict, np.ndarray, list, list]


@pytest.mark.parametrize("seed", range(4))
def test_a_file_that_was_cut_off_anywhere_is_gone_on_with(two, path, seed):
    def run():
        return synk.map(lambda x: str(x) * x, range(40), checkpoint=path)

    expected = run()
    whole = path.read_bytes()
    rng = random.Random(seed)
    for at in sorted({0, 1, 19, 20, 21, 50, len(whole) - 1, *rng.choices(range(len(whole)), k=8)}):
        path.write_bytes(whole[:at] + rng.choice([b"", bytes(100)]))
        assert run() == expected
        assert len(path.read_bytes()) <= len(whole) + 100
        assert run() == expected


def test_a_damaged_file_is_told(two, path):
    items = [bytes([number]) * 999 for number in range(40)]
    assert synk.map(bytes.upper, items, checkpoint=path) == [item.upper() for item in items]
    whole = path.read_bytes()
    at = whole.index(items[7].upper()) + 500
    path.write_bytes(whole[:at] + b"!" + whole[at + 1 :])
    with pytest.raises(InvalidValue, match=r"is damaged at byte \d+ of \d+.*truncate -s \d+ ") as error:
        synk.map(bytes.upper, items, checkpoint=path)
    command = str(error.value).rpartition("it there: ")[2].split()
    subprocess.run(command, check=True)
    assert at - 1500 < path.stat().st_size < at
    assert synk.map(bytes.upper, items, checkpoint=path) == [item.upper() for item in items]


def test_a_full_disk_is_told_and_loses_nothing(path):
    """A limit on the size of files stands in for a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def run(items):
        return synk.map(lambda x: "x" * 1000, range(items), checkpoint=path)

    with running(2):
        assert len(run(10)) == 10
        limit = path.stat().st_size + 5500
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError, match=rf"the checkpoint: '{path}'") as error:
                run(50)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert error.value.errno == errno.EFBIG
        assert len(error.value.results) >= 10
        assert path.stat().st_size <= limit
        assert run(50) == ["x" * 1000] * 50


def test_nothing_is_left_open(two, path):
    def files():
        return [name for name in os.listdir("/proc/self/fd") if _leads_to(name, path)]

    synk.map(abs, range(10), checkpoint=path)
    assert not files()
    results = synk.imap(abs, range(10), checkpoint=path)
    assert next(results) == 0
    assert len(files()) == 1
    del results
    assert synk.map(abs, range(20), checkpoint=path) == list(range(20))
    results = synk.imap(abs, range(30), checkpoint=path)
    assert next(results) == 0
    assert synk.map(abs, [1]) == [1]
    del results
    assert not files()
    with pytest.raises(InvalidValue, match="another item"):
        synk.map(abs, [-5], checkpoint=path)
    assert not files()


def _leads_to(name, path):
    with contextlib.suppress(FileNotFoundError):
        return os.readlink(f"/proc/self/fd/{name}") == str(path)
    return False


# ── deaths ───────────────────────────────────────────────────────────────────────────────────────────


def test_after_the_death_of_a_worker_another_session_goes_on(tmp_path, path):
    def task(x, folder):
        if count(folder, x) == 1 and x in (70, 140):
            time.sleep(0.02)
            os.kill(os.getpid(), signal.SIGKILL)
        return x * x

    deaths, found = 0, None
    while found is None and deaths < 5:
        with running(2):
            try:
                found = synk.map(task, range(200), common={"folder": str(tmp_path)}, checkpoint=path)
            except WorkerDied:
                deaths += 1
    assert found == [x * x for x in range(200)]
    assert deaths in (1, 2)  # where one dies, the other may have begun the other item


PROGRAM = """
import time
import synkro as synk

def task(x):
    with open(str(x), "ab") as file:
        file.write(b".")
    time.sleep(0.002)
    return x * x, float(synk.rng().random())

if __name__ == "__main__":
    synk.fork(2, verbose=False)
    found = synk.map(task, range(300), checkpoint="run.synk")
    assert [square for square, _ in found] == [x * x for x in range(300)]
    assert len({drawn for _, drawn in found}) == 300
    print("done")
"""


@pytest.mark.long
def test_after_a_kill_of_everything_the_same_program_goes_on(tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    path, kills, out = tmp_path / "run.synk", 0, ""

    def size():
        return path.stat().st_size if path.exists() else 0

    while out != "done\n":
        process = subprocess.Popen(
            [sys.executable, "program.py"],
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        goal = size() + random.randrange(2000, 6000) if kills < 8 else float("inf")
        assert wait_until(lambda: size() > goal or process.poll() is not None, 30)
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            kills += 1
        out, _ = process.communicate()
        assert process.returncode in (0, -signal.SIGKILL)
    assert kills > 1
    assert calls(tmp_path).keys() == set(range(300))
    assert sum(calls(tmp_path).values()) < 300 + kills * 40


# ── fingerprints ─────────────────────────────────────────────────────────────────────────────────────

PRINTS = """
import dataclasses, enum, functools, logging, re, sys, threading
import numpy as np
from synkro.packing import fingerprint

NAMES = {"b", "a", "cc"}
LOCK = threading.Lock()
LOG = logging.getLogger("x")

class Color(enum.Enum):
    RED = 1

@dataclasses.dataclass
class Point:
    x: int
    def norm(self):
        return helper(self.x)

class Engine:
    def __init__(self):
        self.lock, self.scale, self.fn, self.me = threading.Lock(), 3, task, self

def helper(x):
    return x + len(NAMES) + recursive(3)

def recursive(n):
    return recursive(n - 1) if n else helper

@functools.lru_cache
def cached(x):
    return helper(x)

def task(x, k=3):
    with LOCK:
        LOG.info("x")
        return Point(x).norm() + cached(x) + (x in {"a", "b", "c"}) + np.sum(x) + ENGINE.scale

ENGINE = Engine()

if __name__ == "__main__":
    common = {"a": np.arange(5), "b": [1, {"x", "y"}, Color.RED], "c": Point(3)}
    parts = fingerprint.of_function(task, common)
    value = NAMES, [Point(2), {"k": {"x", "z"}}], np.ones((3, 4))[:, ::2]
    parts["value"] = fingerprint.values()(value).hex()
    print(parts)
"""


@pytest.fixture
def prints(tmp_path):
    def run(old="", new="", seed="0"):
        program = tmp_path / "prints.py"
        assert old in PRINTS
        program.write_text(PRINTS.replace(old, new) if old else PRINTS)
        return eval(output(program, PYTHONHASHSEED=seed))

    return run


@pytest.mark.parametrize(
    "more",
    [
        "NAMES = {Color.RED, (Color.RED, 1), *map(str, range(20)), frozenset({'a', 'b'})}",
        "class Named(set): pass\nNAMES = Named('abcdef')",
        "class A: pass\nclass B(A): pass\nclass C(A): pass\nNAMES = {A, B, C, helper, recursive}",
        "ENGINE.held = [LOCK, {'k': [LOCK, {'x', 'y', 'z'}]}, re.compile('a'), sys.stdout, [helper]]",
    ],
)
def test_sets_and_what_has_locks_have_fingerprints(prints, more):
    old = "ENGINE = Engine()"
    one, other = (prints(old, f"{old}\n{more}", seed) for seed in "12")
    assert one == other
    assert prints(old, f"{old}\n{more}\nNAMES = [NAMES, 1]") != one


def test_modules_have_fingerprints(tmp_path):
    """What a function uses of modules, however it names them."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("")
    program = """
import own.part, sys
import own.part as part
def inner(x):
    import own.late
    return own.late.K * x
closing = lambda m: lambda x: m.K * x
tasks = [lambda x: own.part.K * x, lambda x: part.K * x, lambda x, m=part: m.K * x, inner, closing(part)]
from synkro.packing import fingerprint
print([fingerprint.of_function(task, {}) for task in tasks])
"""

    def run(part, late):
        (tmp_path / "own" / "part.py").write_text(f"K = {part}\n")
        (tmp_path / "own" / "late.py").write_text(f"K = {late}\n")
        path = f"{tmp_path}:{os.getcwd()}"
        return eval(output("-c", program, PYTHONPATH=path, PYTHONDONTWRITEBYTECODE="1"))

    first, same, other = run(1, 2), run(1, 2), run(3, 4)
    assert first == same
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_fingerprints_are_the_same_in_each_run(prints):
    assert prints(seed="1") == prints(seed="2") == prints("import dataclasses", "\n\nimport dataclasses")


@pytest.mark.parametrize(
    ("old", "new", "changed"),
    [
        ("len(NAMES)", "-len(NAMES)", {"Point", "value", "cached", "ENGINE"}),
        ('"cc"}', '"dd"}', {"Point", "value"}),
        ("k=3", "k=4", {"its code"}),
        ('{"a", "b", "c"}', '{"a", "b", "d"}', {"its code"}),
        ("threading.Lock(), 3", "threading.Lock(), 4", {"ENGINE"}),
        ("np.arange(5)", "np.arange(6)", {"common={'a': …}"}),
        ("RED = 1", "RED = 2", {"common={'b': …}"}),
        ("[:, ::2]", "[:, 1:]", {"value"}),
        ("ENGINE = Engine()", "ENGINE = Engine(); task.note = 1", {"its attributes"}),
        ("class Color(enum.Enum)", "class Color(enum.IntEnum)", {"common={'b': …}"}),
    ],
)
def test_fingerprints_tell_what_has_changed(prints, old, new, changed):
    before, after = prints(), prints(old, new)
    found = {name for name in before if before[name] != after.get(name)}
    assert changed <= found
    if changed != {"value"}:
        assert found - changed <= {"ENGINE", "cached", "common={'c': …}", "Point"}


def test_fingerprints_import_no_package(tmp_path):
    program = """
import sys
from synkro.packing import fingerprint
def task(x):
    from wsgiref.util import guess_scheme
    from broken.part import f
    return f(guess_scheme(x))
print(fingerprint.of_function(task, {}).keys() > {"its code"}, "wsgiref" in sys.modules)
"""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "__init__.py").write_text("raise OSError")
    assert output("-c", program, PYTHONPATH=f"{tmp_path}:{os.getcwd()}") == "True False\n"
