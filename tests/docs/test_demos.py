"""Every demo runs as a script, to its last line, and leaves nothing behind."""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

from support.forked import TORCH
from support.programs import COMPILING, ROOT
from support.waiting import wait_until

pytestmark = pytest.mark.programs

DEMOS = sorted((ROOT / "demos").glob("demo_*.py"))
K = 32  # the colours that demo 5 is left with


LOADED = {"torch": TORCH, "pytensor": "pytensor", "pymc": "pymc"}
SMALL = "0.2"  # times as large as usual: for the demos that take so long that they have a size


@pytest.fixture
def run_demo(run_python, tmp_path):
    """Run a demo; returns the lines that it printed, when all its processes have gone."""

    def run(demo, *args, **environment):
        timeout = COMPILING if "pymc" in demo.stem else 240
        done = run_python(str(demo), *args, env=environment, timeout=timeout)
        assert wait_until(lambda: not processes_in(tmp_path)), processes_in(tmp_path)
        return done.stdout.splitlines()

    return run


def processes_in(folder):
    """The ids of the processes that work in that folder, whoever their parents are."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(entry / "cwd") == str(folder):
                found.add(int(entry.name))
    return found


def colours(image):
    return len(np.unique(image[..., :3].reshape(-1, 3), axis=0))


def test_demos_are_found():
    assert len(DEMOS) >= 20


def marked(demo, size):
    """A demo in that size; small ones of libraries that take long to import are forks, but for one."""
    if "pymc" in demo.stem:
        marks = [pytest.mark.pymc, pytest.mark.timeout(COMPILING)]
    else:
        marks = [pytest.mark.libraries for library in LOADED if library in demo.stem]
        marks += [pytest.mark.timeout(250)]  # where the cores are busy, a graph takes a while
    if size != SMALL:
        marks += [pytest.mark.thorough]
    elif demo.stem != "demo_10_pytensor":  # whose graphs are compiled
        marks += [pytest.mark.loaded(LOADED[name]) for name in LOADED if name in demo.stem]
    return pytest.param(demo, size, id=f"{demo.stem}-{size}", marks=marks)


@pytest.mark.parametrize(
    ("demo", "size"), [marked(demo, size) for demo in DEMOS for size in (SMALL, "1")]
)
def test_runs_to_its_end(demo, size, run_demo, tmp_path):
    for library in ("pymc", "pytensor", "torch"):
        if library in demo.stem:
            pytest.importorskip(library, reason=f"needs {library}")
    folder = tmp_path / "pictures"  # not there yet
    lines = run_demo(demo, str(folder), size)
    assert lines[-1] == "All assertions passed."
    assert len(lines) > 1
    picture = check_picture(folder, demo)
    if "photo" in demo.stem:
        check_photo(picture)
    if "timed_by_joblib" in demo.read_text():
        assert {"serial", "joblib", "Synkro"} <= {line.split()[0] for line in lines}


def test_the_cookbook_runs_without_joblib(run_demo, tmp_path):
    (tmp_path / "joblib.py").write_text("raise ImportError\n")
    demo = ROOT / "demos" / "demo_14_bootstrap.py"
    lines = run_demo(demo, str(tmp_path / "pictures"), SMALL, PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert "joblib is not installed: there is no time beside it" in lines
    assert lines[-1] == "All assertions passed."


@pytest.mark.parametrize("number", [1, 9])
def test_runs_on_gpus_as_it_is(number, run_demo, tmp_path):
    (demo,) = (demo for demo in DEMOS if demo.stem.startswith(f"demo_{number}_"))
    path = f"{ROOT / 'tests' / 'stand_in'}:{ROOT}"
    lines = run_demo(demo, str(tmp_path / "pictures"), PYTHONPATH=path, FAKE_CUDA_DEVICES="2")
    assert lines[-1] == "All assertions passed."


def check_picture(folder, demo):
    """The pixels of the one file in that folder: a PNG of the demo's name, which is not empty paper."""
    import matplotlib.image

    (png,) = folder.iterdir()
    assert png.name == f"{demo.stem}.png"
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    image = matplotlib.image.imread(png)
    assert colours(image) > 20
    return image


def check_photo(image):
    """Two photographs in half their size, side by side: with many colours on the left half only."""
    height, width, channels = image.shape
    assert 427 / 2 < height < 427
    assert 2 * 480 / 2 < width < 3 * 480 / 2
    assert channels in {3, 4}
    assert colours(image[:, : width // 2]) > 10_000
    assert K / 2 < colours(image[:, width // 2 :]) <= K
