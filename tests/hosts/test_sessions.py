"""Processes on several hosts, which are namespaces of this machine: started, asked, ended."""

import importlib.util
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from support.hosts import processes_of
from support.waiting import wait_until

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.counted_once,
    pytest.mark.usefixtures("nothing_left_there"),
]


@pytest.fixture
def doctor(hosts, tmp_path):
    """What ``doctor --hosts`` says on h1; and that by check, as (sign, what it says)."""

    def doctor(names, launcher=hosts.launcher, **variables):
        command = [sys.executable, "-m", "synkro", "doctor", "--hosts", names, "--launcher", launcher]
        done = hosts.done(tmp_path, *command, timeout=90, **variables)
        assert "Traceback" not in done.stderr
        found = {}
        for line in done.stdout.splitlines():
            sign, colon, says = line.strip().partition("  ")
            if colon and ":" in says:
                check, _, text = says.partition(": ")
                found[check] = sign, text
        return done, found

    return doctor


@pytest.mark.parametrize("names", ["h1,h2", "h2,h3", "h3,h1,h2", "h2,localhost"])
def test_doctor_looks_at_hosts(doctor, names):
    done, found = doctor(names)
    assert done.returncode == 0, done.stdout
    measured = {"latency", "bandwidth", "clocks"}  # which a busy machine makes worse
    assert {sign for check, (sign, _) in found.items() if check not in measured} == {"OK"}
    assert {found[check][0] for check in measured} <= {"OK", "warning"}
    assert list(found) == [
        *("hosts", "versions", "cores", "GPUs", "ports", "latency", "bandwidth", "clocks"),
        "shared file system",
    ]
    assert found["GPUs"][1] == "none: CuPy is not installed on any"
    others = [name for name in names.split(",") if name not in ("h1", "localhost")]
    assert found["hosts"][1].startswith(", ".join(["h1", *others]))
    assert "MPI" in found["versions"][1]
    assert all(f"to {name} " in found["latency"][1] for name in others)
    assert str(Path.cwd()) in found["shared file system"][1]


@pytest.mark.parametrize("name", ["x" * 100, 'it\'s "one" $HOME'])
def test_a_folder_for_temporary_files_with_a_special_path(doctor, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    done, _ = doctor("h1,h2", TMPDIR=str(folder))
    assert done.returncode == 0, done.stdout
    assert wait_until(lambda: not processes_of(folder), seconds=10)


def test_hosts_that_are_this_machine(doctor):
    done, found = doctor("localhost,localhost")
    assert done.returncode == 0
    assert found["hosts"][1].startswith("localhost, localhost by ")


def test_all_that_is_wrong_with_hosts_is_told_at_once(doctor):
    done, found = doctor("h1,h8,h2,h9")
    assert done.returncode == 1
    assert found["hosts"][0] == "FAILURE"
    for name in ("h8", "h9"):
        says = f"{name} cannot be reached by shell (ssh: Could not resolve hostname {name}"
        assert says in done.stdout
    assert "- h2" not in done.stdout


PYTHON = os.path.realpath(sys.executable)
NO_PYTHON = f"h2 has no {sys.executable}: install the same environment in the same place there"
MISSING = "h2: ModuleNotFoundError: No module named"
MEMORY = "h2 has 1.0 MB left in /dev/shm, with which MPI may not begin: remove"


def empty(package):
    """How to mount nothing in its place."""
    return ["-t", "tmpfs", "none", os.path.dirname(importlib.util.find_spec(package).origin)]


@pytest.mark.parametrize(
    ("mount", "says"),
    [
        (["--bind", "/dev/null", PYTHON], NO_PYTHON),
        (empty("numpy"), MISSING),
        (empty("synkro"), MISSING),
        (["-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], MEMORY),
    ],
    ids=["python", "numpy", "synkro", "shared memory"],
)
def test_what_a_host_does_not_have(hosts, doctor, mount, says):
    """Packages are missed long before the time for a start is over, which is 20 s."""
    begun = time.monotonic()
    with hosts.mounted("h2", *mount):
        done, _ = doctor("h1,h2")
    assert done.returncode == 1
    assert f"- {says}" in done.stdout
    if says == MISSING:
        assert "install the same packages there" in done.stdout
        assert time.monotonic() - begun < 15


def test_a_host_without_the_folder(hosts, tmp_path):
    stands = tmp_path / "program"
    stands.mkdir()
    code = (
        f"import os; os.chdir({str(stands)!r})\n"
        f"from synkro.hosts.launch import Launch\nLaunch(['h1', 'h3'], {str(hosts.launcher)!r})"
    )
    with hosts.mounted("h3", "-t", "tmpfs", "none", tmp_path):
        done = hosts.python(tmp_path, code)
    assert f"- h3 has no folder {stands}: make it there" in done.stderr


def test_a_host_that_is_cut_off_is_named(hosts, doctor):
    with hosts.cut_off("h3"):
        done, _ = doctor("h1,h3")
    assert done.returncode == 1
    assert "FAILURE" in done.stdout


def test_other_versions(doctor, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nif socket.gethostname() == 'h2':\n"
        "    import cloudpickle\n    cloudpickle.__version__ = '0.1'\n"
    )
    done, _ = doctor("h1,h2")
    assert "- h2 has cloudpickle 0.1 (here " in done.stdout


SLEEPS = """
import os, time
from synkro.hosts.launch import Launch
launch = Launch(["h1", "h2", "h3"], {launcher!r})
gateway, leader, _ = [said.pid for said in launch.said]
print(os.getpid(), gateway, leader, launch._process.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def sleeping(hosts, tmp_path):
    """Begin a program on h1 that starts hosts."""

    def sleeping(launcher=hosts.launcher):
        return hosts.begin(tmp_path, sys.executable, "-c", SLEEPS.format(launcher=str(launcher)))

    return sleeping


PROCESSES = ["main process", "gateway", "leader", "mpiexec"]


@pytest.mark.parametrize("victim", PROCESSES)
def test_nothing_is_left_of_hosts_whose_process_was_killed(sleeping, tmp_path, victim):
    with sleeping() as program:
        pids = dict(zip(PROCESSES, map(int, program.stdout.readline().split()), strict=True))
        os.kill(pids.pop(victim), signal.SIGKILL)
        gone = set(pids.values()) - {pids.get("main process")}
        assert wait_until(lambda: not gone & processes_of(tmp_path), seconds=10)


@pytest.mark.parametrize("moment", ["synkro-*", "synkro-*/gateway", "called"])
def test_a_main_program_that_is_killed_while_hosts_start(sleeping, tmp_path, moment):
    """As soon as there is such a file."""
    launcher = script(tmp_path / "hangs", f"#!/bin/sh\n> {tmp_path}/called; sleep 1000; true\n")
    with sleeping(launcher):
        assert wait_until(lambda: list(tmp_path.glob(moment)), seconds=30)
    assert wait_until(lambda: not list(tmp_path.glob("synkro-*")), seconds=10)


def test_a_main_program_that_is_killed_when_its_network_breaks(hosts, sleeping, tmp_path):
    """Between two sessions.  What the launcher starts is in no process group of this host's."""
    launcher = script(tmp_path / "apart", f'#!/bin/sh\nexec setsid -w {hosts.launcher} "$@"\n')
    with sleeping(launcher) as program:
        main, *_ = map(int, program.stdout.readline().split())
        with hosts.cut_off("h1"):
            os.kill(main, signal.SIGKILL)
            assert wait_until(lambda: not processes_of(tmp_path), seconds=20), processes_of(tmp_path)


def test_the_files_that_mpiexec_makes_for_others_are_gone(sleeping, tmp_path):
    with sleeping() as program:
        program.stdout.readline()
        opened = [
            os.readlink(fd)
            for pid in processes_of(tmp_path)
            if b"hydra_pmi_proxy" in Path(f"/proc/{pid}/cmdline").read_bytes()
            for fd in Path(f"/proc/{pid}/fd").iterdir()
        ]
        made = [path for path in opened if "hydra_hwloc_xmlfile_" in path]
        assert len(made) == 3
        assert all(path.endswith(" (deleted)") for path in made)


def test_the_key_and_the_environment_are_in_no_command_line(sleeping, tmp_path):
    with sleeping() as program:
        program.stdout.readline()
        (told,) = tmp_path.glob("synkro-*/told")
        secret, environment = told.read_text().split()
        assert len(secret) == 64
        for path in (told.parent, told, told.parent / "environment"):
            assert path.stat().st_mode & 0o77 == 0
        for pid in processes_of(tmp_path):
            command = Path(f"/proc/{pid}/cmdline").read_text()
            assert secret not in command
            assert environment not in command


def test_without_mpi(hosts, tmp_path):
    code = (
        "import importlib.util as u; old = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'mpi4py' else old(name, *a)\n"
        "from synkro.hosts.launch import Launch\nLaunch(['h1', 'h2'])"
    )
    done = hosts.python(tmp_path, code)
    assert "hosts= needs MPI, and mpi4py is not here: pip install mpi4py mpich" in done.stderr


def script(path, text):
    path.write_text(text)
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/nowhere/sh\n", "cannot be started (No such file or directory): check that it is a program"),
        ("", "cannot be started (Exec format error): check that it is a program"),
        ("#!/bin/sh\n", "ended without an error, and has started nothing on h2: check that"),
        (None, "there is no such program. Give 'ssh', 'slurm', or one that is called as ssh is"),
    ],
    ids=["of no interpreter", "of nothing", "ends", "not there"],
)
def test_a_program_that_is_no_launcher(doctor, tmp_path, text, says):
    launcher = tmp_path / "none"
    if text is not None:
        script(launcher, text)
    done, _ = doctor("h1,h2", launcher)
    assert f"{launcher}" in done.stdout
    assert says in done.stdout


ENDLESS = """
import pathlib, sys, time
import synkro as synk
begun = time.monotonic()
try:
    synk.fork(hosts="h1:1,h2:1", launcher=pathlib.Path(sys.argv[1]), start_timeout=3)
except synk.SessionError as error:
    print(time.monotonic() - begun, error)
"""


@pytest.mark.parametrize("text", ["exec yes", "sleep 1000; true"], ids=["prints", "sleeps"])
def test_hosts_are_not_awaited_for_longer_than_start_timeout(hosts, tmp_path, text):
    launcher = script(tmp_path / "endless", f"#!/bin/sh\n{text}\n")
    done = hosts.python(tmp_path, ENDLESS, launcher)
    seconds, _, says = done.stdout.partition(" ")
    works = re.escape(f"give start_timeout= more, or check that {tmp_path}/endless h2 works.")
    assert re.search(rf"- h2 did not answer within (1|0\.\d) s: {works}", says), (
        done.stdout + done.stderr
    )
    assert float(seconds) < 6
