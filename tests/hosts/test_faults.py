"""Faults of hosts, in every phase of a program: a named error, nothing left, and fork() works again."""

import os
import re
import shutil
import signal
import sys
import textwrap
import time

import pytest

from support.hosts import OPEN_MPI, processes_of, run
from support.waiting import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.counted_once,
    pytest.mark.usefixtures("nothing_left_there"),
]
SILENCE = 2  # host_timeout

BEGIN = f"""
import json, os, pickle, re, sys, time
import numpy as np
import synkro as synk
from synkro import here

launcher, *given = sys.argv[1:]
options = dict(hosts=["h1:1", "h2:1"], devices="cpu", launcher=launcher, verbose=False)
silence = dict(options, host_timeout={SILENCE})
"""

PROGRAM = """
(phase,) = given


def collective():
    for _ in range(100_000):
        synk.all_reduce(np.ones(3))


def told(**what):
    print(json.dumps(what), flush=True)


synk.fork(**silence)
mpi = here.session._engine._pool._mpi
told(worker=here.session.pids[1], leader=mpi.said[1].pid, gateway=mpi.said[0].pid,
     mpiexec=mpi._process.pid)
data = synk.data(np.ones((1 << 13, 1 << 9)))
call = synk.function(lambda: time.sleep(30), outputs=[])
collective = synk.function(collective, outputs=[])
rows = synk.function(lambda x: x.sum(), outputs="sum")
try:
    if phase == "idle":
        sys.stdin.readline()
    for _ in range(100_000):
        if phase == "call":
            call()
        elif phase == "collective":
            collective()
        elif phase == "transfer":
            data[:] += 1
            rows(data)
        else:
            rows(np.ones(4))
except BaseException as error:
    told(error=type(error).__name__, text=str(error), host=getattr(error, "host", None))
begun = time.monotonic()
synk.close()
told(closed=time.monotonic() - begun)
sys.stdin.readline()
synk.fork(**silence)
told(total=float(synk.function(lambda x: x.sum(), outputs="sum")(np.ones(7))))
synk.close()
"""


def begun(hosts, folder, phase):
    """The program, which runs on h1, and has told which processes there are."""
    program = hosts.begin(folder, sys.executable, "-c", BEGIN + PROGRAM, hosts.launcher, phase)
    program.pids = program.hear()
    return program


@pytest.fixture
def no_file_is_left(hosts, tmp_path):
    """After the test, but for those that it has written itself."""
    yield
    ours = {"few", "flag", "sitecustomize.py"}
    assert wait_until(lambda: ours.issuperset(os.listdir(tmp_path)), 10), os.listdir(tmp_path)


no_files = pytest.mark.usefixtures("no_file_is_left")


FAULTS = {
    "worker killed": ("worker", signal.SIGKILL, "WorkerDied", "h2"),
    "leader killed": ("leader", signal.SIGKILL, "HostLost", "h2"),
    "gateway killed": ("gateway", signal.SIGKILL, "HostLost", "h1"),
    "mpiexec killed": ("mpiexec", signal.SIGKILL, "HostLost", None),
    "leader stopped": ("leader", signal.SIGSTOP, "HostLost", "h2"),
    "gateway stopped": ("gateway", signal.SIGSTOP, "HostLost", "h1"),
}


PHASES = ["idle", "call", "collective", "transfer"]
IN_CI = {
    ("worker killed", "call"),
    ("worker killed", "transfer"),
    ("leader killed", "collective"),
    ("gateway killed", "transfer"),
    ("mpiexec killed", "idle"),
    ("leader stopped", "call"),
    ("gateway stopped", "collective"),
    ("network", "transfer"),
    ("network", "idle"),
    ("main", "call"),
    ("main", "collective"),
}
"""Each fault and each phase; the other pairs are for thorough runs."""


def cases(fault, *names):
    """The phases of a fault, with its *names* before each."""
    thorough = [pytest.mark.thorough]
    return [pytest.param(*names, each, marks=thorough * ((fault, each) not in IN_CI)) for each in PHASES]


@no_files
@pytest.mark.parametrize(("fault", "phase"), [case for each in FAULTS for case in cases(each, each)])
def test_a_fault_is_told_and_nothing_is_left(hosts, tmp_path, fault, phase):
    victim, number, kind, host = FAULTS[fault]
    with begun(hosts, tmp_path, phase) as program:
        time.sleep(0.3)  # in the middle of the phase
        start = time.monotonic()
        os.kill(program.pids[victim], number)
        if phase == "idle":
            program.tell()
        told = program.hear()
        seconds = time.monotonic() - start
        assert told["error"] == kind, told
        assert told["host"] == host, told
        if number == signal.SIGSTOP:
            assert f"nothing was heard of it for {SILENCE} s (host_timeout=)" in told["text"]
        assert "Call close() and then fork() to go on" in told["text"]
        assert seconds < 30
        assert program.hear()["closed"] < 10
        program.tell()
        assert program.hear() == {"total": 7.0}
        assert program.wait(30) == 0


@no_files
@pytest.mark.parametrize("phase", cases("network"))
def test_a_network_that_breaks_is_told(hosts, tmp_path, phase):
    with begun(hosts, tmp_path, phase) as program:
        time.sleep(0.3)
        with hosts.cut_off("h2"):
            if phase == "idle":
                program.tell()
            told = program.hear()
            assert (told["error"], told["host"]) == ("HostLost", "h2"), told
            heard = f"nothing was heard of it for {SILENCE} s" in told["text"]
            assert heard or OPEN_MPI, told  # whose mpiexec may find that out before
            assert program.hear()["closed"] < 10
            assert wait_until(lambda: processes_of(tmp_path) == {program.pid}, 10)
        program.tell()
        assert program.hear() == {"total": 7.0}
        assert program.wait(30) == 0


SLOW = """
synk.fork(trusted_network=given == ["trusted"], **silence)
total = synk.function(lambda x: x.sum(), outputs="sum")
print(total(np.ones(3 << 20)) == 3 << 20)  # of which h2 gets 12 MB
"""


@no_files
@pytest.mark.skipif(OPEN_MPI, reason="it sends pieces at the same time, and all come late")
@pytest.mark.parametrize("network", ["trusted", "other"])
def test_a_slow_network_loses_no_host(hosts, tmp_path, network):
    """On it beats come later than host_timeout: behind what is on its way, which is heard."""
    slow = ["dev", "eth0", "root", "tbf", "rate", "20mbit", "burst", "32kb", "latency", "400ms"]
    if shutil.which("tc") is None:
        pytest.skip("needs tc, of iproute2")
    run(*hosts.on("h1", "tc", "qdisc", "add", *slow))
    try:
        done = hosts.python(tmp_path, BEGIN + SLOW, hosts.launcher, network)
    finally:
        run(*hosts.on("h1", "tc", "qdisc", "delete", "dev", "eth0", "root"))
    assert done.stdout == "True\n", done.stderr


APART = """
synk.fork(**dict(silence, hosts=["h1:1", "h2:1", "h3:1"]))
collective = synk.function(lambda: synk.all_reduce(np.ones(3)), outputs=[])
collective()
print("ready", flush=True)
sys.stdin.readline()
try:
    collective()
except synk.HostLost as error:
    print(error.host, error)
"""


def test_hosts_that_do_not_hear_each_other_are_told(hosts, tmp_path):
    """Where the main process's hears both."""
    away = {"h2": "10.77.0.3", "h3": "10.77.0.2"}
    with hosts.begin(tmp_path, sys.executable, "-c", BEGIN + APART, hosts.launcher) as program:
        assert program.stdout.readline() == "ready\n"
        for name, address in away.items():
            run(*hosts.on(name, "ip", "route", "add", "blackhole", address))
        try:
            out, _ = program.communicate("\n", timeout=60)
        finally:
            for name, address in away.items():
                run(*hosts.on(name, "ip", "route", "delete", "blackhole", address))
    one, other = ("h2", "h3") if out.startswith("h2") else ("h3", "h2")
    rank = {"h2": 1, "h3": 2}[one]
    silent = f"nothing was heard of it for {SILENCE} s (host_timeout=) on {other}"
    assert out.startswith(f"{one} the host {one} (rank {rank}) is lost: {silent}. Call close()"), out


@pytest.mark.parametrize("phase", cases("main"))
def test_a_main_program_that_is_killed_leaves_nothing(hosts, tmp_path, phase):
    with begun(hosts, tmp_path, phase) as program:
        time.sleep(0.3)
        os.kill(program.pid, signal.SIGKILL)
        program.wait(10)
        assert wait_until(lambda: not processes_of(tmp_path), seconds=10), processes_of(tmp_path)


FEW = """#!/bin/sh
ulimit -n 100
exec {launcher} "$@"
"""

TOO_MANY = """
try:
    synk.fork(**dict(options, hosts=["h1:1", "h2:16", "h3:1"]))
except synk.SessionError as error:
    print(error)
synk.fork(**options)
print(synk.function(lambda: 1, outputs="sum")())
"""


@no_files
def test_workers_that_cannot_be_started_on_another_host(hosts, tmp_path):
    launcher = tmp_path / "few"
    launcher.write_text(FEW.format(launcher=hosts.launcher))
    launcher.chmod(0o700)
    done = hosts.python(tmp_path, BEGIN + TOO_MANY, launcher)
    error, one = done.stdout.splitlines()
    assert "on h2: " in error
    assert "Too many open files" in error
    assert one == "2"


def plant(folder, lines, module="synkro.hosts.process"):
    """Have the processes of a *module* on h2 begin with these lines, while there is a flag."""
    (folder / "flag").touch()
    (folder / "sitecustomize.py").write_text(f"""
import os, signal, socket, sys, time
flag = os.path.exists(os.path.join(os.path.dirname(__file__), "flag"))
if flag and socket.gethostname() == "h2" and any({module!r} in word for word in sys.orig_argv):
{textwrap.indent(lines, "    ")}
""")
    return folder / "flag"


FAILING = """
from synkro.hosts.mirror import Mirrors
def fail(*_):
    raise ValueError("planted")
Mirrors.descriptor = fail
"""

LOGGED = """
flag, prefix = given
try:
    synk.fork(**options)
except synk.HostLost as error:
    (path,) = re.findall(r"The log of all hosts is (.*)\\.$", str(error))
log = open(path).read()
assert prefix + "Traceback" in log and prefix + "ValueError: planted" in log, log
os.unlink(flag)
synk.fork(**options)
assert os.path.exists(path)
synk.close()
assert not os.path.exists(path)
"""


@no_files
def test_the_error_names_a_log_that_stays_until_a_session_ends_well(hosts, tmp_path):
    flag = plant(tmp_path, FAILING)
    prefix = "" if OPEN_MPI else "[h2] "
    done = hosts.python(
        tmp_path, BEGIN + LOGGED, hosts.launcher, flag, prefix, PYTHONDONTWRITEBYTECODE="1"
    )
    assert done.returncode == 0, done.stderr


BEGINNING = """
from synkro.hosts import cleanup, pool
def watched(*arguments, watch=cleanup.watch):
    watch(*arguments)
    os.kill(os.getpid(), signal.SIGKILL)
def stopped(*_):
    os.kill(os.getpid(), signal.SIGSTOP)
"""

TWICE = """
try:
    synk.fork(**silence)
except synk.SynkroError as error:
    print(type(error).__name__, error)
os.unlink(*given)
synk.fork(**silence)
print(synk.function(lambda: 1, outputs="sum")())
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("cleanup.watch = watched", "SessionError .* on h2 ended before MPI had begun"),
        ("pool.LeaderPool.start = stopped", "HostLost the host h2 .*nothing was heard of it for 2 s"),
    ],
    ids=["killed", "stopped"],
)
def test_a_process_that_ends_or_stops_at_the_start_is_told(hosts, tmp_path, what, says):
    """At once: the program has less time than fork()."""
    flag = plant(tmp_path, BEGINNING + what)
    done = hosts.python(tmp_path, BEGIN + TWICE, hosts.launcher, flag, timeout=40)
    assert re.search(says, done.stdout, re.DOTALL), done.stdout + done.stderr
    assert done.stdout.endswith("\n2\n"), done.stderr


@pytest.mark.parametrize("ends", ["told", "killed"])
def test_a_process_that_is_stopped_does_not_stay_where_its_network_breaks(hosts, tmp_path, ends):
    """Also if the main program is killed before it is told."""
    with begun(hosts, tmp_path, "call") as program:
        os.kill(program.pids["leader"], signal.SIGSTOP)
        with hosts.cut_off("h2"):
            if ends == "told":
                told = program.hear()
                assert (told["error"], told["host"]) == ("HostLost", "h2"), told
                assert program.hear()["closed"] < 10
            else:
                program.kill()
                program.wait()
            main = {program.pid} if ends == "told" else set()
            assert wait_until(lambda: processes_of(tmp_path) == main, seconds=10)


PATIENT = """
try:
    synk.fork(**dict(options, hosts=["h1:1", "h2:2"], start_timeout=8))
except synk.SessionError as error:
    print(error)
"""


def test_workers_of_a_host_that_come_too_late(hosts, tmp_path):
    plant(tmp_path, "time.sleep(60)", "synkro.worker")
    done = hosts.python(tmp_path, BEGIN + PATIENT, hosts.launcher)
    assert done.stdout == (
        "the hosts and their workers were not ready within 8 s (start_timeout=): ranks 1, 2 on h2 did "
        "not answer. Give more, or look at what takes long there.\n"
    ), done.stderr


FULL = """
import synkro.memory.segment
synkro.memory.segment.available_memory = lambda: 1 << 20
"""

COLLECTIVE = """
synk.fork(**options)
try:
    synk.function(lambda: synk.all_gather(np.ones(1 << 24)), outputs=[])()
except synk.HostLost as error:
    print(error.host, error)
"""


def test_memory_runs_out_in_a_collective(hosts, tmp_path):
    plant(tmp_path, FULL)
    done = hosts.python(tmp_path, BEGIN + COLLECTIVE, hosts.launcher)
    assert done.stdout.startswith(
        "h2 the host h2 (rank 1) is lost: memory ran out there, as 128.0 MB of shared memory were asked "
        "for, but the machine has 1.0 MB of memory left: "
    ), (done.stdout, done.stderr)


NAMED = """
synk.fork(**options)


def fail(x=0):
    if synk.rank() == 1:
        raise KeyError("mine")
    time.sleep(x)


sleep = synk.function(lambda: time.sleep(60 * synk.rank()), outputs=[]).options(timeout=0.5)
for call in (synk.function(fail, outputs=[]), lambda: synk.map(fail, [0.01] * 50), sleep):
    try:
        call()
    except KeyError as error:
        print(pickle.loads(pickle.dumps(error)).host, error)
    except synk.CallTimeout as error:
        print(error.ranks, error.hosts, error)
"""


@no_files
def test_errors_name_the_host(hosts, tmp_path):
    done = hosts.python(tmp_path, BEGIN + NAMED, hosts.launcher)
    one, other, late = done.stdout.splitlines()
    assert one.startswith("h2 rank 1 (h2) failed in the function 'fail': KeyError: 'mine'")
    assert other.startswith("h2 rank 1 (h2) failed in the function 'fail' at item ")
    assert late.startswith(
        "(1,) ('h2',) no answer within the timeout of 0.5 s from rank 1: rank 1 (h2, pid "
    )
