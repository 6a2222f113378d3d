"""Hosts of SLURM's and PBS's jobs, and programs that mpiexec or srun has started on all of them."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.hosts import MPIEXEC, OPEN_MPI
from support.schedulers import pbs, slurm
from support.waiting import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.counted_once,
    pytest.mark.usefixtures("no_folder_is_left", "nothing_left_there"),
]

SESSION = """
import sys, os, socket, numpy as np, synkro as synk
def where(**options):
    with synk.Session(verbose=False, **options) as session:
        total = session.function(lambda x: x.sum(), outputs="sum")(np.arange(10.0))
        assert total == 45, total
        return session.function(lambda: __import__("socket").gethostname(), outputs=None)()
"""


@pytest.fixture
def no_folder_is_left(tmp_path):
    yield
    assert not list(tmp_path.glob("synkro-*"))


@pytest.fixture
def job(tmp_path):
    """The folder of a job's programs."""
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.fixture
def start(hosts, tmp_path):
    """Start a command line on h1, in whose environment are also *variables*."""
    started = []

    def start(*command, **variables):
        started.append(hosts.begin(tmp_path, *command, stderr=subprocess.PIPE, **variables))
        return started[-1]

    yield start
    for program in started:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
        program.communicate()


@pytest.fixture
def run(hosts, tmp_path):
    """What becomes of a program of these lines on h1."""
    return lambda code, **variables: hosts.python(tmp_path, SESSION + code, timeout=90, **variables)


def line(program):
    """The next line that it prints."""
    found = program.stdout.readline()
    assert found, finished(program).stderr
    return found


def finished(program, stdin=""):
    out, err = program.communicate(stdin, timeout=90)
    return subprocess.CompletedProcess(program.args, program.returncode, out, err)


# ── jobs ─────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("how", "nodes", "found"),
    [
        ('hosts="slurm"', "h[1,3]", ["h1", "h3"]),
        ('hosts=["h1", "h3"], launcher="slurm"', "h[1,3]", ["h1", "h3"]),
        ('hosts="slurm"', "h[2-3]", ["h2", "h3"]),  # the program stands outside of the job
    ],
)
def test_in_a_job_of_slurm(hosts, job, run, how, nodes, found):
    done = run(f"print(sorted(set(where({how}))))", **slurm(hosts, job, nodes))
    assert done.stdout == f"{found}\n", done.stderr


def test_a_host_that_is_not_in_the_job_of_slurm(hosts, job, run):
    done = run('where(hosts="h1,h2,h3", launcher="slurm")', **slurm(hosts, job, "h[1-2]"))
    assert "h3 cannot be reached by srun" in done.stderr
    assert "not in this job" in done.stderr


@pytest.mark.parametrize("tmrsh", [False, True], ids=["ssh", "pbs_tmrsh"])
def test_in_a_job_of_pbs(hosts, job, run, tmrsh):
    done = run('print(sorted(set(where(hosts="pbs"))))', **pbs(hosts, job, tmrsh=tmrsh))
    assert done.stdout == "['h1', 'h2']\n", done.stderr


def test_the_variable_names_hosts(hosts, job, run):
    environment = {**pbs(hosts, job, tmrsh=False), "SYNKRO_HOSTS": "h1:1,h3:2"}
    assert run("print(where())", **environment).stdout == "['h1', 'h3', 'h3']\n"
    assert run('print(where(hosts="h1:2"))', **environment).stdout == "['h1', 'h1']\n"
    assert run("print(len(where(n_parallel=2)))", SYNKRO_HOSTS="").stdout == "2\n"
    for value, code in {"h1:0": "where()", "h1:1,h9": "where()", "h1:2": "where(n_parallel=3)"}.items():
        error = run(code, **{**environment, "SYNKRO_HOSTS": value}).stderr
        assert error.endswith(f"The environment variable SYNKRO_HOSTS names these hosts: {value!r}.\n")


# ── programs that were started on all hosts ──────────────────────────────────────────────────────────


BOTH = pytest.mark.parametrize("started", ["mpiexec", "srun"], indirect=True)
ONE = pytest.mark.parametrize(
    "started", ["mpiexec", pytest.param("srun", marks=pytest.mark.thorough)], indirect=True
)
"""By srun in thorough runs only."""


@pytest.fixture
def started(request, hosts, job, start):
    """Start ``python …`` on all hosts."""

    def started(*arguments, python=("-m", "synkro.hosts"), **variables):
        program = [sys.executable, *python, *map(str, arguments)]
        if request.param == "srun":
            if OPEN_MPI:
                pytest.skip("the stand-in for srun offers MPI what MPICH asks for")
            return start("srun", "--ntasks-per-node=1", *program, **slurm(hosts, job), **variables)
        if OPEN_MPI:
            reach = ["--allow-run-as-root", "--prtemca", "plm_ssh_agent", hosts.launcher]
            where = ["--host", "h1,h2,h3", "--map-by", "ppr:1:node", "--bind-to", "none"]
            where += ["-x", "PYTHONPATH", "-x", "TMPDIR"]
        else:
            reach = ["-launcher", "ssh", "-launcher-exec", hosts.launcher]
            where = ["-hosts", "h1,h2,h3", "-n", "3", "-ppn", "1"]
        return start(MPIEXEC.path, *reach, *where, *program, **variables)

    return started


@pytest.fixture
def program(tmp_path):
    """Write a program; returns its path."""

    def program(code):
        path = tmp_path / "program.py"
        path.write_text(SESSION + code)
        return path

    return program


ON_ALL = """
import beside

print(__name__, sys.argv, sys.path[0], input(), flush=True)
for _ in range(5):  # each begins with as few descriptors as the first
    print(where(hosts="mpi")[::2], flush=True)
with synk.Session(hosts="mpi", verbose=False) as session:
    print(session.function(beside.double, outputs="gather")(np.arange(12)))
print(sorted(name for name in os.environ if name.startswith(("PMI", "SLURM_PROCID"))))
sys.exit(3)
"""


@BOTH
def test_a_program_on_all_hosts(started, program, tmp_path):
    """It imports what lies beside it."""
    (tmp_path / "beside.py").write_text("def double(x):\n    return 2 * x\n")
    path = program(ON_ALL)
    done = finished(started(path, "a", "-b"), "to read\n")
    assert done.stdout.splitlines() == [
        f"__main__ ['{path}', 'a', '-b'] {tmp_path} to read",
        *["['h1', 'h2', 'h3']"] * 5,
        "[ 0  2  4  6  8 10 12 14 16 18 20 22]",
        "[]",
    ], done.stderr
    assert done.returncode == 3


@ONE
def test_modules_and_code(started):
    done = finished(started("-c", "import sys; print(sys.argv, __name__)", "a"))
    assert done.stdout == "['-c', 'a'] __main__\n", done.stderr
    done = finished(started("-m", "platform"))
    assert done.stdout.startswith("Linux"), done.stderr


@ONE
def test_an_exception_in_it(started, program):
    """And that the key goes over MPI is told."""
    done = finished(started(program('synk.fork(hosts="mpi", devices="cpu")\nraise KeyError("mine")')))
    assert done.returncode == 1
    assert "KeyError: 'mine'" in done.stderr
    assert "Synkro: the key of their digests went over MPI, in the clear" in done.stderr


@ONE
def test_a_worker_dies_and_the_next_session_works(started, program):
    code = """
try:
    with synk.Session(hosts="mpi", verbose=False) as session:
        session.function(lambda: os._exit(7) if synk.rank() == 5 else None, outputs=[])()
except synk.WorkerDied as error:
    print(error.rank, error.exitcode)
print(where(hosts="mpi")[::2])
"""
    done = finished(started(program(code)))
    assert done.stdout == "5 7\n['h1', 'h2', 'h3']\n", done.stderr


WAITING = """
def sleep():
    if synk.rank() == 0:
        print("asleep", flush=True)
    __import__("time").sleep(60)

with synk.Session(hosts="mpi", verbose=False) as session:
    print(os.getpid(), *session.pids, flush=True)
    try:
        session.function(sleep, outputs=[])()
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    print(session.function(lambda: 1, outputs="sum")())
    __import__("time").sleep({seconds})
"""


@BOTH
@pytest.mark.skipif(OPEN_MPI, reason="Open MPI's mpiexec ends all processes at Ctrl-C")
def test_ctrl_c(started, program):
    running = started(program(WAITING.format(seconds=0)))
    line(running)
    assert line(running).endswith("asleep\n")
    os.killpg(running.pid, signal.SIGINT)
    done = finished(running)
    assert done.stdout.endswith("interrupted\n6\n"), done.stderr  # mpiexec says something, too
    assert done.returncode == 0


SIGNALLED = """
import os, sys
if "synkro.hosts" in sys.orig_argv:
    from synkro.hosts import {module}

    def signalled(*args, done={module}.{step}, **options):
        os.kill(os.getpid(), {number})
        return done(*args, **options)

    {module}.{step} = signalled
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize(("module", "step"), [("cleanup", "watch"), ("process", "work")])
def test_a_signal_that_comes_before_the_program(start, tmp_path, module, step, number):
    """While process 0 begins: nothing is left, and the program, which it would not reach, ends by it."""
    text = SIGNALLED.format(module=module, step=step, number=int(number))
    (tmp_path / "sitecustomize.py").write_text(text)
    code = "import time; time.sleep(60); print('finished')"
    done = finished(start(sys.executable, "-m", "synkro.hosts", "-c", code))
    assert done.stdout == ""
    assert done.returncode == (-number if number == signal.SIGKILL else 128 + number), done.stderr
    assert wait_until(lambda: not list(tmp_path.glob("synkro-*")))


@ONE
@pytest.mark.parametrize("victim", ["program", "gateway", "launcher", "worker"])
def test_nothing_is_left_when_something_is_killed(started, program, victim):
    running = started(program(WAITING.format(seconds=60)))
    pid, *workers = map(int, line(running).split())
    status = Path(f"/proc/{pid}/status").read_text()
    gateway = int(re.search(r"PPid:\s*(\d+)", status)[1])
    pids = {"program": pid, "gateway": gateway, "launcher": running.pid, "worker": workers[-1]}
    os.kill(pids[victim], signal.SIGKILL)
    done = finished(running)
    assert done.returncode != 0
    if victim == "program":
        assert done.returncode == 137, done.stderr
    if victim == "worker":
        assert f"(pid {workers[-1]}) on h3 was killed by SIGKILL" in done.stderr


@ONE
def test_sigterm_reaches_it(started, program):
    code = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(5)))
print(os.getppid(), flush=True)
time.sleep(60)
"""
    running = started(program(code))
    os.killpg(int(line(running)), signal.SIGTERM)
    done = finished(running)
    assert (done.stdout, done.returncode) == ("saved\n", 5)


@BOTH
def test_a_plain_start_of_copies_is_refused(started, program):
    done = finished(started(program('where(hosts="h1,h2")'), python=()))
    assert "has started 3 copies of this program, and with hosts='h1,h2'" in done.stderr


# ── what does not fit ────────────────────────────────────────────────────────────────────────────────


def test_one_session_at_a_time(start, program):
    path = program('synk.fork(hosts="mpi", verbose=False)\nwhere(hosts="mpi")')
    done = finished(start(sys.executable, "-m", "synkro.hosts", path))
    assert "serves one session at a time, and this program has one: close() it first" in done.stderr


def test_srun_without_mpi(hosts, job, start, program):
    srun = ["srun", "--mpi=none", "--ntasks-per-node=1", sys.executable, "-m", "synkro.hosts"]
    done = finished(start(*srun, program("print('started')"), **slurm(hosts, job)))
    assert done.returncode != 0
    assert "started" not in done.stdout
    assert "3 processes were started, but MPI sees 1 of them" in done.stderr


@pytest.mark.parametrize("name", ["synkro.hosts", "synkro.cluster"])
def test_usage(start, name):
    done = finished(start(sys.executable, "-m", name))
    assert done.returncode == 2
    assert "usage: mpiexec -n HOSTS -ppn 1 python -m synkro.hosts PROGRAM.py" in done.stderr


def test_the_former_name(start, program):
    path = program("print('the program runs')")
    done = finished(start(sys.executable, "-m", "synkro.cluster", path))
    assert (done.returncode, done.stdout) == (0, "the program runs\n")
    says = "Synkro: python -m synkro.cluster is called python -m synkro.hosts now, and goes on.\n"
    assert done.stderr == says
