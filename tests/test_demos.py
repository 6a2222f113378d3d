"""Every demo runs as a script, to its last line, and leaves nothing behind."""

import uuid
from pathlib import Path

import numpy as np
import pytest

from support.programs import COMPILING, ROOT
from support.waiting import wait_until

pytestmark = pytest.mark.programs

DEMOS = sorted((ROOT / "demos").glob("demo_*.py"))
K = 32  # the colours that demo 5 is left with


@pytest.fixture
def run_demo(run_python):
    """Run a demo; returns the lines that it printed, when all its processes have gone."""

    def run(demo, *args, **environment):
        mark = uuid.uuid4().hex  # in the environment of the demo and of every process it starts
        environment["SYNKRO_TEST_MARK"] = mark
        timeout = COMPILING if "pymc" in demo.stem else 240
        done = run_python(str(demo), *args, env=environment, timeout=timeout)
        assert wait_until(lambda: not processes_with(mark)), processes_with(mark)
        return done.stdout.splitlines()

    return run


def processes_with(mark):
    """The ids of the processes that have *mark* in their environment, whoever their parents are."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if mark.encode() in environment:
                found.add(int(entry.name))
    return found


def colours(image):
    return len(np.unique(image[..., :3].reshape(-1, 3), axis=0))


def test_demos_are_found():
    assert len(DEMOS) >= 20


def marked(demo):
    marks = [pytest.mark.libraries] * ("torch" in demo.stem)
    if "pymc" in demo.stem:
        marks += [pytest.mark.pymc, pytest.mark.timeout(COMPILING)]
    else:
        marks += [pytest.mark.timeout(250)]  # where the cores are busy, a graph takes a while
    return pytest.param(demo, id=demo.stem, marks=marks)


@pytest.mark.parametrize("demo", list(map(marked, DEMOS)))
def test_runs_to_its_end(demo, run_demo, tmp_path):
    for library in ("pymc", "pytensor", "torch"):
        if library in demo.stem:
            pytest.importorskip(library, reason=f"needs {library}")
    folder = tmp_path / "pictures"  # for demos that write something; not there yet
    lines = run_demo(demo, str(folder))
    assert lines[-1] == "All assertions passed."
    assert len(lines) > 1
    if "photo" in demo.stem:
        check_photo(folder)
    if "from cookbook import" in demo.read_text():
        assert {"serial", "joblib", "Synkro"} <= {line.split()[0] for line in lines}


def test_the_cookbook_runs_larger_and_without_joblib(run_demo, tmp_path):
    (tmp_path / "joblib.py").write_text("raise ImportError\n")
    lines = run_demo(ROOT / "demos" / "demo_14_bootstrap.py", "2", PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "joblib is not installed: there is no time beside it" in lines
    assert lines[-1] == "All assertions passed."


@pytest.mark.parametrize("number", [1, 9])
def test_runs_on_gpus_as_it_is(number, run_demo):
    (demo,) = (demo for demo in DEMOS if demo.stem.startswith(f"demo_{number}_"))
    path = f"{ROOT / 'tests' / 'stand_in'}:{ROOT}"
    lines = run_demo(demo, PYTHONPATH=path, FAKE_CUDA_DEVICES="2")
    assert lines[-1] == "All assertions passed."


def check_photo(folder):
    """One PNG, of the photograph's size twice over, with many colours on its left half only."""
    import matplotlib.image

    (png,) = folder.iterdir()
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(png)
    height, width, channels = image.shape
    assert 427 < height < 2 * 427
    assert 2 * 640 < width < 3 * 640
    assert channels in {3, 4}
    assert colours(image[:, : width // 2]) > 10_000
    assert K / 2 < colours(image[:, width // 2 :]) <= K
