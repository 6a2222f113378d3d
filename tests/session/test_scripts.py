"""A program without a thought of workers: as a script, from standard input, in cells."""

import pytest

pytestmark = pytest.mark.programs

CELLS = [
    "import importlib, os, pathlib, sys\nsys.path.insert(0, '.')\n"
    "import numpy as np\nimport synkro as synk\nimport tools",
    # a function before the workers
    "@synk.function\ndef train(x, y):\n"
    "    error = x @ model.weights - y\n"
    "    gradient = synk.all_reduce(2 * x.T @ error / len(x), 'mean', weight=len(x))\n"
    "    model.step(gradient, config['rate'])\n"
    "    return (error**2).mean()",
    "workers = synk.fork(WORKERS, verbose=False, seed=1)",
    "class Model:\n"
    "    def __init__(self):\n        self.weights = np.zeros(3)\n        self.training = True\n"
    "    def step(self, gradient, rate):\n        self.weights -= rate * tools.limited(gradient)",
    "model, config = Model(), {'rate': 0.1}\n"
    "x = np.random.default_rng(0).standard_normal((30, 3))\ny = x @ [1.0, -2.0, 0.5]",
    "for _ in range(100):\n    loss = train(x, y)\nprint(round(loss, 6))",
    # a second function, of the same model, which is sent now
    "@synk.function(outputs='gather')\ndef predict(x):\n"
    "    return np.round(x @ model.weights + shift, 2)",
    "shift = 0.0\nprint(predict(np.eye(3)), model.weights, synk.size())",
    "shift = 1.0\nprint(predict(np.eye(3)))",
    "config['rate'] = 0.0\nbefore = train(x, y)\nprint(train(x, y) == before)",
    "print(synk.fetch(model).weights.round(2))",
    "model.weights = np.ones(3)\nprint(predict(np.eye(3)))",
    # a module that is edited, and imported anew
    "scaled = synk.function(lambda x: tools.scaled(x), outputs='sum')\nprint(scaled(np.ones(4)))",
    "tools.FACTOR = 3\nprint(scaled(np.ones(4)))",
    "path = pathlib.Path('tools.py')\n"
    "path.write_text(path.read_text().replace('* FACTOR', '* FACTOR * 100'))\n"
    "os.utime(path, (2e9, 2e9))\nimportlib.reload(tools)\nprint(scaled(np.ones(4)))",
    # the first cell run again, and other workers
    "print(synk.fork(WORKERS, verbose=False, seed=1) == synk.size())",
    "synk.close()\nworkers = synk.fork(1, verbose=False)\nprint(predict(np.eye(3)), scaled(np.ones(4)))",
    "synk.close()",
]

TOOLS = """
import numpy as np

FACTOR = 2

def limited(gradient):
    return np.clip(gradient, -10, 10)

def scaled(x):
    return (x * FACTOR).sum()
"""

PRINTED = [
    "0.0",
    "[ 1.  -2.   0.5] [0. 0. 0.] WORKERS",
    "[ 2.  -1.   1.5]",
    "True",
    "[ 1.  -2.   0.5]",
    "[2. 2. 2.]",
    "8.0",
    "12.0",
    "800.0",
    "True",
    "[2. 2. 2.] 800.0",
]

SHELL = """
from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance()
for cell in {cells!r}:
    shell.run_cell(cell, store_history=True).raise_error()
"""


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("how", ["script", "stdin", "cells"])
def test_it_prints_what_a_serial_program_would(run_python, tmp_path, how, workers):
    (tmp_path / "tools.py").write_text(TOOLS)
    cells = [cell.replace("WORKERS", str(workers)) for cell in CELLS]
    cells.insert(1, "import warnings\nwarnings.simplefilter('ignore')  # more workers than cores")
    code = "\n\n".join(cells)
    if how == "cells":
        pytest.importorskip("IPython", reason="needs IPython")
        done = run_python(SHELL.format(cells=cells), env={"IPYTHONDIR": str(tmp_path)})
    else:
        done = run_python(code) if how == "script" else run_python("-", input=code)
    assert done.stdout.splitlines() == [line.replace("WORKERS", str(workers)) for line in PRINTED]
    assert done.stderr == ""
