"""Python programs in processes of their own."""

import compileall
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from . import forked
from .leftovers import descendants
from .waiting import gone, wait_until

ROOT = Path(__file__).resolve().parents[2]
COMPILING = 400  # seconds that a model of PyMC's may take: PyTensor 2 compiles C for it, once


def pytest_configure(config):
    """Where Python keeps no bytecode, every worker of every test would compile the package anew."""
    if sys.dont_write_bytecode:
        for folder in ("synkro", "benchmarks", "tests/stand_in"):
            compileall.compile_dir(ROOT / folder, quiet=2)


PATHS = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
"""The environment of programs that import what is here, too."""


def start_python(code, *arguments, env=None, **options):
    """A process of its own that runs *code*: its input and output are pipes, as ``Popen`` has them."""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code, *map(str, arguments)]
    pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    environment = {**os.environ, **PATHS, **(env or {})}
    return subprocess.Popen(command, text=True, env=environment, **pipes | options)


SLOW = ("jax", "matplotlib", "numba", "pytensor", "torch")  # to import


@pytest.fixture
def nothing_slow(tmp_path_factory, monkeypatch):
    """Packages that take seconds to import are empty here, and in processes of ``synkro.cli.info``."""
    folder = tmp_path_factory.mktemp("empty")
    for name in SLOW:
        (folder / f"{name}.py").write_text("__version__ = '0.0'\n")
    monkeypatch.syspath_prepend(folder)
    return folder


def pytest_itemcollected(item):
    """What runs whole programs is one of the ``programs``, which take their time."""
    if "run_python" in item.fixturenames and item.get_closest_marker("lab") is None:
        item.add_marker("programs")


@pytest.fixture
def run_python(tmp_path, request):
    """Run Python in a process of its own, in an empty folder; returns the finished process.

    ``run_python(code)`` runs a script of that text; ``run_python("-c", code)`` passes arguments on.
    Scripts of tests with the marker ``loaded`` run in forks of a process that has loaded much.
    """

    def run(*args, input=None, check=True, timeout=60, env=None, cwd=None):
        if len(args) == 1 and "\n" in args[0]:
            script = tmp_path / "script.py"
            script.write_text(args[0])
            args = (str(script),)
        folder = {"FAKE_CUDA_FOLDER": str(tmp_path)}  # where ranks of the stand-in meet
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **folder, **(env or {})}
        command = [sys.executable, *args]
        if request.node.get_closest_marker("loaded") is None or forked.chosen is None:
            done = subprocess.run(
                command,
                input=input,
                capture_output=True,
                text=True,
                timeout=timeout,
                env=environment,
                cwd=cwd or tmp_path,
                check=False,
            )
        else:
            done = run_forked(command, tmp_path, environment, timeout)
        done.stderr = re.sub(r"Synkro: removed /synkro-test-.*\n", "", done.stderr)  # of other tests
        if check:
            assert done.returncode == 0, done.stderr
        return done

    return run


def all_end(command, line, number, least=1):
    """Whether a program's processes, at *least* so many, end by a signal when it has said a *line*."""
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        while line not in process.stdout.readline():
            assert process.poll() is None
        started = descendants(process.pid)
        assert len(started) >= least
        process.send_signal(number)
        process.stdout.read()
    return wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in started), 10)


def run_forked(command, folder, environment, timeout):
    """What ``subprocess.run`` would return of a script, by a fork."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = forked.chosen.program(command[1:], folder, environment, out, err)
        if not wait_until(lambda: gone(pid), timeout):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise subprocess.TimeoutExpired(command, timeout)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(command, code, out.read(), err.read())
