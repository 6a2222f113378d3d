"""A notebook, executed: workers start without a main guard, functions are redefined, errors shown."""

import json
import os
import re
import subprocess
import sys

import pytest

from support.programs import start_python
from support.waiting import wait_until

pytestmark = pytest.mark.programs

CELLS = {
    "fork": "import numpy as np, synkro as synk\nsynk.fork(2, timeout=60)",
    "pids": "print(*synk.here.session.pids)",
    "define": "def f(x):\n    return x.sum()\nf = synk.function(f, outputs='sum')\nsynk.distribute()",
    "call": "x = synk.data(np.arange(5.0))\nf(x)",
    "trace": "with synk.trace():\n    f(x)",
    "picture": "synk.plot_timeline()",
    "picture beside pyplot": "import matplotlib.pyplot as plt\nplt.plot([1, 2])\nplt.show()\n"
    "before = plt.get_backend()\nsynk.plot_timeline('timeline.png')",
    "pyplot": "plt.get_fignums() == [] and plt.get_backend() == before",
    "picture not shown": "picture = synk.plot_timeline()",
    "redefine": "def f(x):\n    return 2 * helper(x)\ndef helper(x):\n    return x.sum()\n"
    "f = synk.function(f, outputs='sum')",
    "call the new one": "f(x)",
    "change a global": "def helper(x):\n    return -x.sum()\nf = synk.function(f, outputs='sum')\nf(x)",
    "fail": "synk.function(lambda x: x.reshape(-1, 7))(x)",
    "catch": "def inverse(x):\n    matrix = np.zeros((2, 2))\n    return np.linalg.inv(matrix)\n"
    "try:\n    synk.function(inverse)(x)\nexcept np.linalg.LinAlgError as error:\n"
    "    print(error.__cause__)",
    "define an error": "class Own(Exception):\n    def __init__(self, left, right):\n"
    "        super().__init__('own')\n        self.left = left",
    "catch it": "def fail(x):\n    raise Own(1, 2)\n"
    "try:\n    synk.function(fail)(x)\nexcept Own as error:\n    print(error.left)",
    "fail once": "def low(x):\n    lowest = x.min()\n    raise Own(lowest, 2)\n"
    "try:\n    synk.function(low)(x)\nexcept Own as error:\n    failed = error",
    "replay": "failed.replay()",
    "enter": "import builtins\nlines = ['p lowest, len(x)', 'q']\nasked = builtins.input\n"
    "builtins.input = lambda prompt='': lines.pop(0)\n%debug\nbuiltins.input = asked",
    "enter by Synkro": "lines = ['p lowest + 40', 'q']\n"
    "builtins.input = lambda prompt='': lines.pop(0)\nsynk.debug()\nbuiltins.input = asked",
    "ask": "lines = ['Ann', 'Bob']\nbuiltins.input = lambda prompt='': print(prompt) or lines.pop(0)\n"
    "names = synk.function(lambda: input('name? '), outputs=None)()\nbuiltins.input = asked\n"
    "print(sorted(names))",
    "nobody answers": "synk.function(lambda: input('name? '), outputs=None)()",
    "call after a failure": "f(x)",
    "print": "def speak():\n    print('hello from a worker')\n"
    "synk.function(speak, outputs=[])()\nsynk.close()",
}

RUN = """
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read("notebook.ipynb", as_version=4)
NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
nbformat.write(notebook, "executed.ipynb")
"""


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """The outputs of the notebook's cells, by name; and what running it printed."""
    import nbformat

    folder = tmp_path_factory.mktemp("notebook")
    spec = folder / "jupyter" / "kernels" / "python3"
    spec.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    kernel = {"argv": argv, "display_name": "this Python", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(kernel))
    cells = [nbformat.v4.new_code_cell(source) for source in CELLS.values()]
    for name in ("fail", "replay", "nobody answers"):
        cells[list(CELLS).index(name)].metadata["tags"] = ["raises-exception"]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), folder / "notebook.ipynb")
    names = ("PATH", "DATA_DIR", "RUNTIME_DIR", "CONFIG_DIR")
    environment = {f"JUPYTER_{name}": str(folder / "jupyter") for name in names}
    environment["IPYTHONDIR"] = str(folder / "ipython")
    running = start_python(RUN, env=environment, cwd=folder, stderr=subprocess.PIPE)
    _, errors = running.communicate(timeout=110)
    assert running.returncode == 0, errors
    notebook = nbformat.read(folder / "executed.ipynb", as_version=4)
    return dict(zip(CELLS, [cell.outputs for cell in notebook.cells], strict=True))


def text(outputs, kind="stdout"):
    return "".join(o.text for o in outputs if o.output_type == "stream" and o.name == kind)


def value(outputs):
    (result,) = [o for o in outputs if o.output_type == "execute_result"]
    return result.data["text/plain"]


@pytest.mark.parametrize(
    ("cell", "shown"),
    [
        ("fork", "2"),
        ("call", "np.float64(10.0)"),
        ("call the new one", "np.float64(20.0)"),
        ("change a global", None),
        ("call after a failure", None),
        ("pyplot", "True"),
    ],
)
def test_what_cells_show(cell, shown, executed):
    assert value(executed[cell]) == (shown or "np.float64(-20.0)")


@pytest.mark.parametrize(
    ("cell", "times"), [("picture", 1), ("picture beside pyplot", 1), ("picture not shown", 0)]
)
def test_a_timeline_is_shown_once(cell, times, executed):
    results = [output for output in executed[cell] if output.output_type == "execute_result"]
    assert ["image/png" in output.data for output in results] == [True] * times
    others = [o for o in executed[cell] if o.output_type == "display_data"]  # the plot of pyplot's
    assert len(others) == (cell == "picture beside pyplot")


def test_status_lines_are_shown(executed):
    assert "Synkro: 2 CPU workers initialized, master rank: 0\n" in text(executed["fork"], "stderr")
    assert "Synkro distributing functions..." in text(executed["define"], "stderr")


def test_a_failure_is_shown_with_the_remote_traceback(executed):
    (error,) = [output for output in executed["fail"] if output.output_type == "error"]
    assert error.ename == "WorkerError[ValueError]"
    assert error.evalue.startswith("rank 0 ")
    assert "ValueError: cannot reshape" in error.evalue
    assert "RemoteTraceback" in "".join(error.traceback)


def test_the_remote_traceback_has_the_lines_of_cells(executed):
    shown = text(executed["catch"])
    assert re.search(r"\.\.\. \d+ frames of Synkro \.\.\.\n  File .*, line 3, in inverse\n", shown)
    assert "    return np.linalg.inv(matrix)\n" in shown
    assert shown.endswith("numpy.linalg.LinAlgError: Singular matrix\n\n")


def test_a_class_of_a_cell_catches_what_a_worker_raises(executed):
    assert text(executed["catch it"]) == "1\n"


def test_a_failure_can_be_entered(executed):
    (error,) = [output for output in executed["replay"] if output.output_type == "error"]
    assert error.ename == "Own"
    shown = re.sub(r"\x1b\[[\d;]*m", "", "".join(error.traceback))
    assert "raise Own(lowest, 2)" in shown
    assert "synkro/controller" not in shown
    assert "0.0), 3)" in text(executed["enter"])
    assert "np.float64(40.0)\n" in text(executed["enter by Synkro"])


def test_functions_ask_the_user(executed):
    shown = text(executed["ask"])
    assert "[rank 0] name? \n" in shown
    assert shown.endswith("['Ann', 'Bob']\n")
    (error,) = [output for output in executed["nobody answers"] if output.output_type == "error"]
    assert error.ename == "WorkerError[EOFError]"
    assert "gets no answer" in text(executed["nobody answers"], "stderr")


def test_what_workers_print_is_shown(executed):
    printed = "".join(map(text, executed.values()))
    for rank in (0, 1):
        assert printed.count(f"[rank {rank}] hello from a worker\n") == 1


def test_nothing_is_left(executed):
    pids = text(executed["pids"]).split()
    assert len(pids) == 2
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
