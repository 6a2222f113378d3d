"""The stand-in for CuPy beside the real one, and what users see who have CuPy but no driver.

They need a Python that has the real CuPy, NCCL and Synkro, and no GPU, as CI makes one:

    python3 -m venv .venv-cupy && .venv-cupy/bin/pip install -e '.[cuda12]'
    SYNKRO_REAL_CUPY=.venv-cupy/bin/python python -m pytest -m real_cupy
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from stand_in import loading

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.real_cupy

EXTRA = {
    "cupy.cuda.runtime": {"check_registrations", "contexts", "fail", "fault", "statistics"},
    "cupy.cuda.memory": {"POISON", "find", "get_default_memory_pool", "occupied"},
    "cupy.cuda.stream": {"current_queue"},
    "cupy.cuda.pinned_memory": {"get_default_pinned_memory_pool"},
}
"""What the stand-in has and the real one does not, or elsewhere; and its memory has a ``buffer``."""

MADE_OTHERWISE = {"PooledMemory", "ufunc"}
"""Classes of which only CuPy itself makes objects, and the stand-in in its own way."""

REFERRED_TO = {"BaseMemory", "Memory", "PooledMemory", "UnownedMemory", "NcclCommunicator"}
REFERRED_TO |= {"PinnedMemoryPointer"}  # it is an array there
"""Classes to whose objects the stand-in refers weakly, which the real ones do not allow."""

ROOTS = {"cupy": "cupy", "runtime": "cupy.cuda.runtime", "nccl": "cupy.cuda.nccl"}
"""What names in Synkro's sources stand for."""

HELD = {
    "self._comm": "cupy.cuda.nccl.NcclCommunicator()",
    "stream": "cupy.cuda.get_current_stream()",
    "self.stream": "cupy.cuda.get_current_stream()",
    "comm": "cupy.cuda.nccl.NcclCommunicator()",
    "event": "cupy.cuda.Event()",
    "copied": "cupy.cuda.Event()",
}
"""What variables hold in the files that are full of them."""

FULL = {ROOT / "synkro" / "devices" / f"{name}.py" for name in ("cuda", "inputs", "buffers", "window")}
FULL |= {ROOT / "synkro" / "comms" / "nccl.py"}


def ran(python, *arguments, **environment):
    """What a Python does on which nothing of this one's settings acts."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        [python, *map(str, arguments)],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def printed(python, script, *arguments, **environment):
    """What a script prints as JSON."""
    done = ran(python, "-c", (loading.FOLDER / script).read_text(), *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def of_both(script, *arguments):
    """What a script prints with the stand-in, on a machine without a driver, and with the real CuPy."""
    stand_in = {"PYTHONPATH": str(loading.FOLDER), "FAKE_CUDA_DRIVER": "none"}
    real = printed(os.environ["SYNKRO_REAL_CUPY"], script, *arguments)
    return printed(sys.executable, script, *arguments, **stand_in), real


def used_in(path):
    """What a file uses of CuPy, as expressions such as ``cupy.cuda.Device().mem_info``."""
    held = HELD if path in FULL else {}

    def expression(node):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name == "xp" or name.endswith(".xp"):
                return "cupy"
            inner = expression(node.func)
            return inner and f"{inner}()"
        text = ast.unparse(node)
        if text in {**ROOTS, **held}:
            return {**ROOTS, **held}[text]
        inner = expression(node.value) if isinstance(node, ast.Attribute) else None
        return inner and f"{inner}.{node.attr}"

    trees = [ast.parse(path.read_text())]
    while trees:
        for node in ast.walk(trees.pop()):
            if isinstance(node, ast.Attribute) and expression(node):
                yield expression(node)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("cupy"):
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Constant) and str(node.value).startswith("import cupy"):
                trees.append(ast.parse(node.value))


@pytest.fixture(scope="module")
def used():
    """What Synkro, its benchmarks and its demonstrations use of CuPy."""
    folders = (ROOT / "synkro", ROOT / "benchmarks", ROOT / "demos")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    return sorted({expression for path in files for expression in used_in(path)})


@pytest.fixture(scope="module")
def both(used):
    """What the two have to offer."""
    return of_both("public_names.py", *used)


@pytest.fixture(scope="module")
def names(both):
    """The names that both have, each with what the stand-in and the real one say of it."""
    here, there = (each["names"] for each in both)
    return [
        ((module, name), said, there[module][name])
        for module in here
        for name, said in here[module].items()
        if name in there[module]
    ]


class TestNames:
    def test_everything_is_in_the_real_one(self, both):
        here, there = (each["names"] for each in both)
        assert "RawKernel" in there["cupy"]
        for module, mine in here.items():
            missing = mine.keys() - there[module].keys() - EXTRA.get(module, set())
            missing = {name for name in missing if not name.endswith(".buffer")}
            assert not missing, (module, sorted(missing))

    def test_what_objects_are_given_is_in_the_real_ones(self, both):
        here, there = both
        for name, given in here["given"].items():
            public = {each for each in given if not each.startswith("_")}
            assert public <= {*there["attributes"][name]}, name

    def test_parameters(self, names):
        compared = set()
        for (module, name), here, there in names:
            mine, theirs = here.get("parameters"), there.get("parameters")
            known = mine and theirs and not {"args", "kwargs"} & {*mine, *theirs}
            if known and name not in MADE_OTHERWISE:
                compared.add(name)
                assert mine == theirs, (module, name)
        assert {"MemoryPointer", "NcclCommunicator.allReduce", "asarray", "hostRegister"} <= compared

    def test_constants(self, names):
        compared = set()
        for (module, name), here, there in names:
            assert here.get("value") == there.get("value"), (module, name)
            compared |= {name} if "value" in here else set()
        assert {
            "NCCL_SUM",
            "memcpyHostToDevice",
            "cudaDevAttrPciBusId",
            "eventDisableTiming",
        } <= compared
        assert {"__version__", "hostAllocPortable", "is_hip", "streamNonBlocking"} <= compared

    def test_what_can_be_called(self, names):
        for (module, name), here, there in names:
            assert here["callable"] == there["callable"], (module, name)

    def test_classes(self, names):
        compared = set()
        for (module, name), here, there in names:
            if "bases" not in here:
                continue
            compared.add(name)
            assert here["bases"] == there["bases"] or name == "PinnedMemoryPointer", (module, name)
            able, ours = ({each for each, can in of["abilities"].items() if can} for of in (there, here))
            able |= {"weak references"} if name in REFERRED_TO else set()
            assert ours <= able, (module, name)
        assert {"CUDARuntimeError", "NcclCommunicator", "NcclError", "OutOfMemoryError"} <= compared


def test_what_synkro_uses_is_in_both(used, both):
    anchors = {"cupy.cuda.nccl.NcclCommunicator().allReduce", "cupy.cuda.runtime.hostRegister"}
    anchors |= {"cupy.cuda.Device().mem_info", "cupy.get_default_memory_pool().malloc"}
    anchors |= {"cupy.cuda.Event().ptr", "cupy.cuda.get_current_stream().wait_event"}
    assert anchors <= {*used}
    here, there = both
    assert there["missing"] == []
    assert here["missing"] == []


def test_both_do_the_same_without_a_driver():
    with loading.loaded() as cupy:
        errors = sorted(cupy.cuda._machine.ERRORS)
    assert 600 in errors
    here, there = of_both("behaviour.py", *errors)
    assert len(there) > 200
    assert here.keys() == there.keys()
    assert {name: (did, there[name]) for name, did in here.items() if did != there[name]} == {}


SENTENCE = "CuPy finds no CUDA driver (cudaErrorInsufficientDriver: install NVIDIA's"
FORK = """if True:
    import synkro as synk
    try:
        synk.fork(devices={!r})
    except synk.NotAvailable as error:
        print(error)
"""
SUM = """if True:
    import numpy as np, synkro as synk
    synk.fork()
    print("the sum is", synk.function(np.sum, outputs="sum")(np.arange(10)))
"""


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        ("-m synkro info", 0, [f"none           {SENTENCE}", "cupy           14.2.0"]),
        ("-m synkro doctor --data 1M", 0, [f"not checked  NCCL between all pairs: {SENTENCE}"]),
        (
            "-m synkro doctor --data 1M --devices cuda",
            1,
            [f"FAILURE  workers: devices= asks for GPUs, but {SENTENCE}"],
        ),
        (FORK.format("cuda"), 0, [f", but {SENTENCE}", ': use "cpu".\n']),
        (FORK.format("cuda:0"), 0, [f", but {SENTENCE}", ': use "cpu".\n']),
        (SUM, 0, [f"Synkro uses CPUs, as {SENTENCE}", "the sum is 45"]),
    ],
    ids=["info", "doctor", "doctor for GPUs", "fork for GPUs", "fork for a GPU", "fork"],
)
def test_without_a_driver(arguments, status, said):
    """What there is to see for somebody who has CuPy, but no driver."""
    arguments = ["-c", arguments] if "\n" in arguments else arguments.split()
    done = ran(os.environ["SYNKRO_REAL_CUPY"], *arguments, PYTHONPATH=str(ROOT))
    assert "Traceback" not in done.stdout + done.stderr
    assert done.returncode == status, done.stderr
    for words in said:
        assert words in (done.stderr if words.startswith("Synkro") else done.stdout)
