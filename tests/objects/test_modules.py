"""Modules of the user's own: their functions travel with their globals, and are what they are now."""

import textwrap

import pytest

pytestmark = pytest.mark.quick

HELPERS = """
import numpy as np
import synkro as synk

SCALE = 2.0
model = {"w": np.zeros(3)}
calls = []

class Net:
    rate = 1.0

    def __init__(self):
        self.k = 3

    def go(self, x):
        return x * self.k * self.rate * SCALE

net = Net()

def norm(x):
    calls.append(1)
    return x * SCALE

def fit(x):
    model["w"] += x.sum()

def weight():
    return float(model["w"][0])

@synk.function(outputs="sum")
def decorated(x):
    return norm(x).sum()
"""

START = """
import numpy as np
import synkro as synk
import helpers
from helpers import net, decorated

synk.fork(WORKERS, verbose=False)
x = np.arange(4.0)
"""


def put(folder, files):
    """Write files: their texts by their paths in *folder*."""
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


@pytest.fixture
def run(run_python, tmp_path):
    """Run a program beside a module ``helpers``; returns what it printed."""

    def run(program, workers=2, helpers=HELPERS, start=START):
        (tmp_path / "helpers.py").write_text(helpers)
        code = start.replace("WORKERS", str(workers)) + textwrap.dedent(program)
        done = run_python("import warnings\nwarnings.simplefilter('ignore')\n" + code)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return run


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_module_is_one_with_its_functions(run, workers):
    assert run(
        """
        f = synk.function(lambda x: helpers.norm(x), outputs="gather")
        g = synk.function(net.go, outputs="gather")
        calls = synk.function(lambda: len(helpers.calls), outputs="max")
        print(f(x), g(x), calls(), decorated(x), calls(), len(helpers.calls))
        helpers.SCALE = 10.0
        print(f(x), g(x))
        net.k = 1
        helpers.Net.rate = 0.5
        print(g(x))
        fit = synk.function(helpers.fit, outputs=[])
        weight = synk.function(helpers.weight, outputs="sum")
        fit(x)
        print(weight(), helpers.model["w"][0], synk.fetch(helpers.model)["w"][0] > 0)
        """,
        workers,
    ) == [
        "[0. 2. 4. 6.] [ 0.  6. 12. 18.] 1 12.0 2 0",
        "[ 0. 10. 20. 30.] [ 0. 30. 60. 90.]",
        "[ 0.  5. 10. 15.]",
        "6.0 0.0 True",
    ]


def test_a_module_that_was_edited_and_reloaded(run):
    assert run(
        """
        import importlib, os, pathlib
        f = synk.function(lambda x: helpers.norm(x), outputs="gather")
        print(f(x))
        path = pathlib.Path("helpers.py")
        path.write_text(path.read_text().replace("return x * SCALE\\n", "return x * SCALE + 100\\n"))
        os.utime(path, (2e9, 2e9))
        importlib.reload(helpers)
        print(f(x))
        """
    ) == ["[0. 2. 4. 6.]", "[100. 102. 104. 106.]"]


def test_packages_and_relative_imports(run, tmp_path):
    files = {
        "__init__.py": "LEVEL = 1\nfrom . import base\n",
        "base.py": "count = []\ndef add(x):\n    count.append(1)\n    return x + len(count)\n",
        "sub/__init__.py": "",
        "sub/deep.py": "from .. import base\nfrom ..base import add\n"
        "def go(x):\n    from ..base import count\n    from .. import LEVEL\n"
        "    return add(x) * LEVEL + 0 * len(count)\n",
    }
    put(tmp_path / "pack", files)
    assert run(
        """
        import pack.sub.deep
        f = synk.function(pack.sub.deep.go, outputs="gather")
        g = synk.function(lambda x: pack.sub.deep.go(x) + len(pack.base.count), outputs="gather")
        print(f(x), g(x))
        pack.LEVEL = 10
        print(f(x))
        print(synk.function(lambda: len(pack.base.count), outputs="max")())
        """
    ) == ["[1. 2. 3. 4.] [4. 5. 6. 7.]", "[30. 40. 50. 60.]", "3"]


def test_what_no_code_names_is_refused_by_name(run):
    assert run(
        """
        f = synk.function(lambda x: getattr(helpers, "no" + "rm")(x), outputs="gather")
        try:
            f(x)
        except synk.WorkerError as error:
            print("the module 'helpers' has no 'norm' on the workers" in str(error))
        """
    ) == ["True"]


LOCKED = """
import contextvars, ctypes, threading
import synkro as synk

print("helpers is imported")
SCALE = 2
lock = threading.Lock()
locks = {"a": [threading.RLock()], "b": threading.Condition()}
var = contextvars.ContextVar("var", default=5)
local = threading.local()
local.x = 1
libm = ctypes.CDLL(None)
late = None
seen = {}

class Meta(type):
    pass

class Service(metaclass=Meta):
    rate = 1
    lock = threading.Lock()

    def __init__(self):
        self.own = threading.Lock()
        self.k = 3

    def go(self, i):
        with self.lock, self.own:
            return self.rate * i * self.k * SCALE

    @classmethod
    def made(cls):
        return cls.rate

service = Service()

def price(i):
    with lock, locks["a"][0], locks["b"]:
        return i * SCALE, seen.get("rate")

def inside(i):
    from helpers import price

    return price(i)

def served(i):
    return service.go(i), Service.made()

def told():
    return var.get(), local.x

def absolute(i):
    return libm.abs(i)

def too_late():
    with late:
        return 1

@synk.function(outputs=None)
def decorated(x):
    with lock:
        return SCALE

net = None
"""


def test_what_cannot_travel_of_a_module_is_made_there_by_an_import(run):
    assert run(
        """
        seen = helpers.seen
        for way in (helpers.price, helpers.inside):
            print(synk.map(way, [1, 2]))
        helpers.SCALE, seen["rate"] = 10, 7
        for way in (helpers.price, helpers.inside):
            print(synk.map(way, [1, 2]), decorated(x))
        print(synk.map(helpers.absolute, [-3]))
        """,
        helpers=LOCKED,
    ) == [
        "helpers is imported",
        *["[(2, None), (4, None)]"] * 2,
        *["[(10, 7), (20, 7)] [np.int64(10), np.int64(10)]"] * 2,
        "[3]",
    ]


def test_what_holds_a_lock_is_what_it_is_in_the_program(run):
    assert run(
        """
        served = synk.function(helpers.served, outputs=None, bcast_inputs="i")
        def show():
            assert [list(map(int, each)) for each in served(1)] == [list(helpers.served(1))] * 2
            print(*helpers.served(1), synk.map(lambda s: s.go(1), [helpers.service]))
        show()
        helpers.Service.rate = 10
        show()
        helpers.SCALE = 7
        helpers.service.k = 1
        show()
        synk.close()
        synk.fork(2, verbose=False)
        show()
        """,
        helpers=LOCKED,
    ) == ["helpers is imported", "6 1 [6]", "60 10 [60]", "70 10 [70]", "70 10 [70]"]


def test_values_of_contexts_and_of_threads_are_those_of_the_program(run):
    assert run(
        """
        told = synk.function(helpers.told, outputs=None)
        def show():
            assert [list(map(int, each)) for each in told()] == [list(helpers.told())] * 2
            print(*helpers.told())
        show()
        helpers.var.set(7)
        show()
        helpers.local.x = 4
        show()
        token = helpers.var.set(8)
        show()
        helpers.var.reset(token)
        show()
        """,
        helpers=LOCKED,
    ) == ["helpers is imported", "5 1", "7 1", "7 4", "8 4", "7 4"]


def test_what_an_import_does_not_make_is_refused_by_name(run, tmp_path):
    gone = "import threading\nlock = threading.Lock()\ndef f():\n    with lock: return 1\n"
    bad = "import synkro as synk\ntry:\n    synk.data([1.0])\nexcept synk.NotForked:\n    pass\n" + gone
    put(tmp_path, {"bad.py": bad, "gone.py": gone})
    assert run(
        """
        import os, threading, bad, gone
        os.unlink(gone.__file__)
        helpers.late = threading.Lock()
        for f in (helpers.too_late, bad.f, gone.f):
            try:
                print(synk.function(f, outputs=None)())
            except TypeError as error:
                print(str(error).partition(":")[0], "|", str(error).partition(": ")[2][:20])
        print(synk.map(helpers.price, [1]))
        """,
        helpers=LOCKED,
    ) == [
        "helpers is imported",
        "helpers.late, a lock, cannot be pickled, and an import of 'helpers' on a worker does not make "
        "it | make it where the mo",
        "bad.lock cannot be pickled, so the workers import 'bad' to make it, and that failed"
        " | UsageError: data() w",
        "gone.lock cannot be pickled, so the workers import 'gone' to make it, and that failed"
        " | ModuleNotFoundError:",
        "[(2, None)]",
    ]


def test_exceptions_of_the_module_are_its_own(run):
    helpers = "class Bad(Exception):\n    pass\ndef f(x):\n    raise Bad(3)\nnet = decorated = None\n"
    assert run(
        """
        try:
            synk.function(helpers.f)(x)
        except synk.WorkerError as error:
            print(type(error.original) is helpers.Bad, error.original.args)
        """,
        helpers=helpers,
    ) == ["True (3,)"]


def test_a_decorated_function_of_an_installed_module(run_python, tmp_path):
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "installed.py").write_text(
        "import synkro as synk\n\n@synk.function(outputs='sum')\ndef total(x):\n    return x.sum()\n\n"
        "def inner(x):\n    return total(x)\n"
    )
    done = run_python(
        f"import sys\nsys.path.insert(0, {str(folder)!r})\n"
        "import numpy as np, synkro as synk, installed\n"
        "synk.fork(2, verbose=False)\n"
        "print(installed.total(np.arange(4.0)))\n"
        "print(synk.function(installed.inner, outputs='sum')(np.arange(4.0)))\n"
    )
    assert done.stdout.split() == ["6.0", "6.0"]


WEAK = """
import queue, threading, weakref

net = decorated = None

class Target:
    pass

target = Target()

class Base:
    own = weakref.ref(target)
    _kept = [own]

class Sensor(Base):
    name = "sensor"
    link = weakref.ref(target)
    listeners = threading.local()

    @classmethod
    def size(cls):
        return len(cls.name)

stop = threading.Event()
free, jobs = threading.Semaphore(3), queue.Queue()

class Service:
    def __init__(self):
        self.stop = threading.Event()

service = Service()

def total(k):
    return Sensor.size() * k

def other(k):
    return k

def state(k):
    return stop.is_set(), service.stop.is_set(), free._value, jobs.qsize()
"""


def test_what_an_import_has_made_comes_again_after_another_function(run):
    """With another map in between no function uses it for a while."""
    assert run(
        """
        def show(*names):
            for name in names:
                print(name, synk.map(getattr(helpers, name), [1, 2]))

        show("total", "other", "total")
        helpers.Sensor.name = "ab"
        show("total", "other")
        helpers.Sensor.name = "abc"
        show("other", "total")
        f = synk.function(lambda x: helpers.total(1), outputs="max")
        print(f(x), f(x))
        helpers.Sensor.name = "a"
        print(f(x), f(x))
        synk.push(helpers.Sensor)
        show("other", "total")
        print(f(x), synk.function(lambda: helpers.Sensor.name, outputs=None)())
        """,
        helpers=WEAK,
    ) == [
        *("total [6, 12]", "other [1, 2]", "total [6, 12]", "total [2, 4]", "other [1, 2]"),
        *("other [1, 2]", "total [3, 6]", "3 3", "1 1", "other [1, 2]", "total [1, 2]", "1 ['a', 'a']"),
    ]


@pytest.mark.parametrize("called", [True, False], ids=["first", "then"])
def test_events_semaphores_and_queues_are_as_they_are_in_the_program(run, called):
    """Also before the first call, when a queue has to be empty."""
    first = "print(synk.map(helpers.state, [1]), f(x)[0], helpers.jobs.put(3))"
    assert run(
        f"""
        f = synk.function(lambda x: helpers.state(0), outputs=None)
        {first * called}
        helpers.stop.set()
        helpers.free.acquire()
        print(synk.map(helpers.state, [1, 2]), f(x)[0])
        helpers.stop.clear()
        helpers.service.stop.set()
        print(f(x)[1], synk.map(helpers.state, [1]))
        helpers.free.release()
        print(f(x)[1], synk.map(helpers.state, [1]))
        """,
        helpers=WEAK,
    ) == [
        *["[(False, False, 3, 0)] (False, False, 3, 0) None"] * called,
        f"[(True, False, 2, {called:d}), (True, False, 2, {called:d})] (True, False, 2, {called:d})",
        f"(False, True, 2, {called:d}) [(False, True, 2, {called:d})]",
        f"(False, True, 3, {called:d}) [(False, True, 3, {called:d})]",
    ]


MODELS = """
net = decorated = None
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

class Base(DeclarativeBase):
    pass

class Sensor(Base):
    __tablename__ = "sensor"
    id: Mapped[int] = mapped_column(primary_key=True)

OFFSET = 0

def total(k):
    return len(Sensor.__tablename__) * k + OFFSET

def other(k):
    return k

def made(k):
    return Sensor(id=k).id
"""


@pytest.mark.libraries
def test_models_of_sqlalchemy_come_again(run):
    pytest.importorskip("sqlalchemy", reason="needs SQLAlchemy")
    assert run(
        """
        for name in ("total", "other", "total", "made", "other", "made"):
            print(synk.map(getattr(helpers, name), [1, 2]))
            helpers.OFFSET += 1
        """,
        helpers=MODELS,
    ) == ["[6, 12]", "[1, 2]", "[8, 14]", "[1, 2]", "[1, 2]", "[1, 2]"]


def test_modules_of_a_package_are_its_attributes_whichever_came_first(run, tmp_path):
    put(tmp_path / "pkg6", {"__init__.py": "K = 2\n", "deep/__init__.py": "", "deep/end.py": "D = 3\n"})
    assert run(
        """
        import gc, pkg6

        def head(x):
            from pkg6 import K
            return float(K)

        def end(x):
            import sys, pkg6.deep.end
            assert sys.modules["pkg6.deep.end"] is pkg6.deep.end
            return pkg6.deep.end.D + 10.0 * (type(pkg6.deep.end) is type(sys))  # 10: read from its file

        first = synk.function(head, outputs="max")
        print(first(x))
        last = synk.function(end, outputs="max")  # nobody has imported that module
        print(last(x))
        del first
        gc.collect()
        print(last(x), synk.function(head, outputs="max")(x), last(x), end(0))
        """,
    ) == ["2.0", "3.0", "3.0 2.0 3.0 13.0"]


def test_a_module_of_a_package_that_only_a_function_imports(run, tmp_path):
    files = {
        "__init__.py": "K = 1\ndef here(x):\n    return x * K\n",
        "late.py": "from . import K, here\nN = 2\ndef h(x):\n    return here(x) + K + N\n",
        "named.py": "from . import here\ndef twice(x):\n    return 2 * here(x)\n",
        "more.py": "def m(x):\n    return 10 * x\n",
        "gone.py": "raise OSError('none')\n",
        "deep/__init__.py": "",
        "deep/end.py": "from ..more import m\ndef d(x):\n    return m(x) + 1\n",
    }
    put(tmp_path / "pkg5", files)
    assert run(
        """
        import sys, pkg5

        def submodule(x):
            from pkg5.late import h
            return h(x) + pkg5.here(x)

        def by_its_name(x):
            import importlib
            return importlib.import_module("pkg5.named").twice(x) + pkg5.here(x)

        def attribute(x):
            from pkg5 import more, here
            return more.m(x) + here(x)

        def whole(x):
            import pkg5.deep.end
            return pkg5.deep.end.d(x)

        def gone(x):
            try:
                import pkg5.gone
            except OSError as error:
                return str(error)

        class Plotter:
            def go(self, x):
                return self.late(x)
            def late(self, x):
                from pkg5.more import m
                return m(x)

        ways = by_its_name, submodule, attribute, whole, gone, Plotter().go
        for _ in range(2):
            print([synk.map(way, [1, 2]) for way in ways], "pkg5.gone" in sys.modules)
        serial = lambda: [[way(each) for each in (1, 2)] for way in ways]
        assert serial() == [synk.map(way, [1, 2]) for way in ways]
        pkg5.K, sys.modules["pkg5.late"].N = 2, 5
        assert serial() == [synk.map(way, [1, 2]) for way in ways]
        f = synk.function(lambda x: submodule(1), outputs="max")
        print(f(x), submodule(1))
        """
    ) == [
        *["[[3, 6], [5, 7], [11, 22], [11, 21], ['none', 'none'], [10, 20]] False"] * 2,
        "10 10",
    ]


def test_a_module_of_which_a_map_has_missed_a_name(run):
    """What later functions name of it is there, in the module that the others have."""
    run(
        """
        for task in (lambda n: hasattr(helpers, "norm"), lambda n: hasattr(helpers, "nothing")):
            assert synk.map(task, range(4)) == [False] * 4
        for _ in range(2):
            assert synk.map(lambda n: helpers.net.go(n), range(4)) == [6.0 * n for n in range(4)]
            assert synk.map(lambda n: helpers.SCALE, range(4)) == [2.0] * 4
        """
    )


RECORDS = """
import enum
import typing

FACTOR = 2.0

class Params(typing.NamedTuple):
    rate: float
    bias: object = None

    def times(self, x):
        return x * self.rate * FACTOR

class Key(enum.Enum):
    RATE = 1

def model(x, p):
    return p.times(x).sum()

def nested(x, p):
    return p["a"][0].times(x).sum()

def keyed(x, p):
    return (x * p[Key.RATE]).sum()

def kind(p):
    return type(p).__name__, isinstance(p, Params)
"""


def test_named_tuples_and_keys_of_ones_own_module_are_arguments(run):
    """Their classes are those that functions see, whether a function names them or not."""
    program = """
        from helpers import Key, Params
        f = synk.function(lambda x, p: p.times(x).sum(), outputs="sum", bcast_inputs=["p"])
        print(f(x, Params(2.0)), f(x, Params(2.0, np.ones(3))))
        model, nested, keyed = (
            synk.function(fn, outputs="sum", bcast_inputs=["p"])
            for fn in (helpers.model, helpers.nested, helpers.keyed)
        )
        print(model(x, Params(2.0)), nested(x, {"a": [Params(3.0), x]}), keyed(x, {Key.RATE: 2.0}))
        print(synk.function(helpers.kind, bcast_inputs=["p"], outputs=None)(Params(1.0)))
        print(synk.map(lambda item: item.rate, [Params(1.0), Params(2.0)]), f(x, Params(2.0)))
        print(synk.map(helpers.kind, [Params(1.0)]))
        print(synk.map(lambda i, p: p.rate, [1], common={"p": Params(4.0)}))
        helpers.FACTOR = 3.0
        print(f(x, Params(2.0)), model(x, Params(2.0)))
        Params.times = lambda self, x: x * 0.0
        print(f(x, Params(2.0)))
        print(f.check(x, Params(2.0)), f.as_serial(x, Params(1.0)))
    """
    assert run(
        program, start=START.replace("from helpers import net, decorated\n", ""), helpers=RECORDS
    ) == [
        "24.0 24.0",
        "24.0 36.0 12.0",
        "[('Params', True), ('Params', True)]",
        "[1.0, 2.0] 24.0",
        "[('Params', True)]",
        "[4.0]",
        "36.0 36.0",
        "0.0",
        "0.0 0.0",
    ]
