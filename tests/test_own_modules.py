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


def test_an_import_in_a_function_finds_the_same_module(run):
    assert run(
        """
        def inner(x):
            import helpers as h
            from helpers import SCALE

            h.calls.append(1)
            return x * 0 + h.SCALE + SCALE + len(h.calls)

        f = synk.function(inner, outputs="gather")
        print(f(x))
        helpers.SCALE = 5.0
        print(f(x))
        print(synk.function(lambda: len(helpers.calls), outputs="max")())
        """
    ) == ["[5. 5. 5. 5.]", "[12. 12. 12. 12.]", "2"]


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
    (tmp_path / "pack" / "sub").mkdir(parents=True)
    (tmp_path / "pack" / "__init__.py").write_text("LEVEL = 1\nfrom . import base\n")
    (tmp_path / "pack" / "base.py").write_text(
        "count = []\n\ndef add(x):\n    count.append(1)\n    return x + len(count)\n"
    )
    (tmp_path / "pack" / "sub" / "__init__.py").write_text("")
    (tmp_path / "pack" / "sub" / "deep.py").write_text(
        "from .. import base\nfrom ..base import add\n\n"
        "def go(x):\n    from ..base import count\n    from .. import LEVEL\n"
        "    return add(x) * LEVEL + 0 * len(count)\n"
    )
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


def test_a_module_that_holds_what_cannot_be_sent(run):
    helpers = "import threading\nlock = threading.Lock()\ndef f(x):\n    with lock:\n        return x\n"
    assert run(
        """
        try:
            synk.function(lambda x: helpers.f(x))(x)
        except TypeError as error:
            print(str(error)[:26])
        """,
        helpers=helpers + "net = decorated = None\n",
    ) == ["'lock', <unlocked _thread."]


def test_what_no_function_uses_stays_at_home(run):
    helpers = (
        "import threading\nlock = threading.Lock()\n"
        "def used(x):\n    return x + 1\ndef unused(x):\n    with lock:\n        return x\n"
    )
    assert run(
        "print(synk.function(lambda x: helpers.used(x), outputs='gather')(x))",
        helpers=helpers + "net = decorated = None\n",
    ) == ["[1. 2. 3. 4.]"]


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
