"""Processes on several hosts, which are namespaces of this machine: started, asked, ended."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import processes_of
from support.programs import ROOT
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]


@pytest.fixture(autouse=True)
def nothing_is_left(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    yield
    assert wait_until(lambda: not processes_of(tmp_path), seconds=10), processes_of(tmp_path)
    assert wait_until(lambda: not hosts.shared_files()), hosts.shared_files()


def on(hosts, name, *command, **options):
    """Run a program of Python's on a host; returns what became of it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}
    command = hosts.on(name, sys.executable, *command)
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=90, env=environment, **options
    )


def doctor(hosts, names, *options):
    """What ``doctor --hosts`` says on h1, by check, as (sign, what it says)."""
    done = on(
        hosts, "h1", "-m", "synkro", "doctor", "--hosts", names, "--launcher", hosts.launcher, *options
    )
    assert "Traceback" not in done.stderr
    found = {}
    for line in done.stdout.splitlines():
        sign, colon, says = line.strip().partition("  ")
        if colon and ":" in says:
            check, _, text = says.partition(": ")
            found[check] = sign, text
    return done, found


def test_the_hosts_are_several(hosts):
    names = [
        on(hosts, name, "-c", "import socket; print(socket.gethostname())").stdout
        for name in hosts.names
    ]
    assert names == ["h1\n", "h2\n", "h3\n"]


@pytest.mark.parametrize("names", ["h1,h2", "h2,h3", "h3,h1,h2", "h2,localhost"])
def test_doctor_looks_at_hosts(hosts, names):
    done, found = doctor(hosts, names)
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
def test_a_folder_for_temporary_files_with_a_special_path(hosts, tmp_path, monkeypatch, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    done, _ = doctor(hosts, "h1,h2")
    assert done.returncode == 0, done.stdout


def test_hosts_that_are_this_machine(hosts):
    done, found = doctor(hosts, "localhost,localhost")
    assert done.returncode == 0
    assert found["hosts"][1].startswith("localhost, localhost by ")


def test_all_that_is_wrong_with_hosts_is_told_at_once(hosts, tmp_path):
    done, found = doctor(hosts, "h1,h8,h2,h9")
    assert done.returncode == 1
    assert found["hosts"][0] == "FAILURE"
    for name in ("h8", "h9"):
        assert (
            f"{name} cannot be reached by shell (ssh: Could not resolve hostname {name}" in done.stdout
        )
    assert "- h2" not in done.stdout


def test_a_host_without_python(hosts):
    interpreter = os.path.realpath(sys.executable)
    hidden = hosts.on("h2", "mount", "--bind", "/dev/null", interpreter)
    subprocess.run(hidden, check=True)
    try:
        done, _ = doctor(hosts, "h1,h2")
    finally:
        subprocess.run(hosts.on("h2", "umount", interpreter), check=True)
    assert done.returncode == 1
    assert (
        f"h2 has no {sys.executable}: install the same environment in the same place there"
        in done.stdout
    )


@pytest.mark.parametrize("package", ["numpy", "synkro"])
def test_a_host_without_a_package(hosts, tmp_path, package):
    """It is told long before the time for a start is over, which is 20 s."""
    folder = os.path.dirname(importlib.util.find_spec(package).origin)
    subprocess.run(hosts.on("h2", "mount", "--bind", tmp_path, folder), check=True)
    begun = time.monotonic()
    try:
        done, _ = doctor(hosts, "h1,h2")
    finally:
        subprocess.run(hosts.on("h2", "umount", folder), check=True)
    assert "- h2: ModuleNotFoundError: No module named" in done.stdout
    assert "install the same packages there" in done.stdout
    assert time.monotonic() - begun < 15


def test_a_host_without_shared_memory(hosts):
    sized = hosts.on("h2", "mount", "/dev/shm", "-o")
    subprocess.run([*sized, "remount,size=1m"], check=True)
    try:
        done, _ = doctor(hosts, "h1,h2")
    finally:
        subprocess.run([*sized, "remount,size=50%"], check=True)
    assert "- h2 has 1.0 MB left in /dev/shm, with which MPI may not begin: remove" in done.stdout


def test_a_host_without_the_folder(hosts, tmp_path):
    stands = tmp_path / "program"
    stands.mkdir()
    subprocess.run(hosts.on("h3", "mount", "-t", "tmpfs", "none", tmp_path), check=True)
    code = (
        f"import os; os.chdir({str(stands)!r})\n"
        f"from synkro.hosts.launch import Launch\nLaunch(['h1', 'h3'], {str(hosts.launcher)!r})"
    )
    try:
        done = on(hosts, "h1", "-c", code)
    finally:
        subprocess.run(hosts.on("h3", "umount", tmp_path), check=True)
    assert f"- h3 has no folder {stands}: make it there" in done.stderr


def test_a_host_that_is_cut_off_is_named(hosts):
    hosts.link("h3", up=False)
    try:
        done, _ = doctor(hosts, "h1,h3")
    finally:
        hosts.link("h3", up=True)
    assert done.returncode == 1
    assert "FAILURE" in done.stdout


def test_other_versions(hosts, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import socket\nif socket.gethostname() == 'h2':\n"
        "    import cloudpickle\n    cloudpickle.__version__ = '0.1'\n"
    )
    done = on(
        hosts, "h1", "-m", "synkro", "doctor", "--hosts", "h1,h2", "--launcher", hosts.launcher,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert "- h2 has cloudpickle 0.1 (here " in done.stdout


SLEEPS = """
import os, time
from synkro.hosts.launch import Launch
launch = Launch(["h1", "h2", "h3"], {launcher!r})
gateway, leader, _ = [said.pid for said in launch.said]
print(os.getpid(), gateway, leader, launch._process.pid, flush=True)
time.sleep(100)
"""


def sleeping(hosts, launcher=None):
    """A program on h1 that has started hosts."""
    code = SLEEPS.format(launcher=str(launcher or hosts.launcher))
    command = hosts.on("h1", sys.executable, "-c", code)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


@pytest.mark.parametrize("victim", ["main process", "gateway", "leader", "mpiexec"])
def test_nothing_is_left_of_hosts_whose_process_was_killed(hosts, tmp_path, victim):
    with sleeping(hosts) as program:
        names = ["main process", "gateway", "leader", "mpiexec"]
        pids = dict(zip(names, map(int, program.stdout.readline().split()), strict=True))
        os.kill(pids.pop(victim), signal.SIGKILL)
        gone = set(pids.values()) - {pids.get("main process")}
        assert wait_until(lambda: not gone & processes_of(tmp_path), seconds=10)
        program.kill()


@pytest.mark.parametrize("moment", ["synkro-*", "synkro-*/gateway", "called"])
def test_a_main_program_that_is_killed_while_hosts_start(hosts, tmp_path, moment):
    """As soon as there is such a file."""
    launcher = script(tmp_path / "hangs", f"> {tmp_path}/called; sleep 1000; true")
    with sleeping(hosts, launcher) as program:
        assert wait_until(lambda: list(tmp_path.glob(moment)), seconds=30)
        program.kill()
    assert wait_until(lambda: not list(tmp_path.glob("synkro-*")), seconds=10)


def test_a_main_program_that_is_killed_when_its_network_breaks(hosts, tmp_path):
    """Between two sessions.  What the launcher starts is in no process group of this host's."""
    launcher = script(tmp_path / "apart", f'exec setsid -w {hosts.launcher} "$@"')
    with sleeping(hosts, launcher) as program:
        main, *_ = map(int, program.stdout.readline().split())
        hosts.link("h1", up=False)
        try:
            os.kill(main, signal.SIGKILL)
            assert wait_until(lambda: not processes_of(tmp_path), seconds=20), processes_of(tmp_path)
        finally:
            hosts.link("h1", up=True)
        program.kill()


def test_the_files_that_mpiexec_makes_for_others_are_gone(hosts, tmp_path):
    with sleeping(hosts) as program:
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
        program.kill()


def test_the_key_and_the_environment_are_in_no_command_line(hosts, tmp_path):
    with sleeping(hosts) as program:
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
        program.kill()


@pytest.mark.parametrize("launcher", ["nosuchshell", ""])
def test_a_launcher_that_is_not_there(hosts, launcher):
    done = on(hosts, "h1", "-m", "synkro", "doctor", "--hosts", "h1,h2", "--launcher", launcher)
    assert (
        "there is no such program. Give 'ssh', 'slurm', or one that is called as ssh is" in done.stdout
    )


def test_without_mpi(hosts, tmp_path):
    code = (
        "import importlib.util as u; old = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'mpi4py' else old(name, *a)\n"
        "from synkro.hosts.launch import Launch\nLaunch(['h1', 'h2'])"
    )
    done = on(hosts, "h1", "-c", code)
    assert "hosts= needs MPI, and mpi4py is not here: pip install mpi4py mpich" in done.stderr


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("#!/nowhere/sh\n", "cannot be started (No such file or directory): check that it is a program"),
        ("", "cannot be started (Exec format error): check that it is a program"),
        ("#!/bin/sh\n", "ended without an error, and has started nothing on h2: check that"),
    ],
    ids=["of no interpreter", "of nothing", "ends"],
)
def test_a_program_that_is_no_launcher(hosts, tmp_path, text, says):
    launcher = script(tmp_path / "none", "")
    launcher.write_text(text)
    done = on(hosts, "h1", "-m", "synkro", "doctor", "--hosts", "h1,h2", "--launcher", launcher)
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
    done = on(hosts, "h1", "-c", ENDLESS, script(tmp_path / "endless", text))
    seconds, _, says = done.stdout.partition(" ")
    works = re.escape(f"give start_timeout= more, or check that {tmp_path}/endless h2 works.")
    assert re.search(rf"- h2 did not answer within (1|0\.\d) s: {works}", says), (
        done.stdout + done.stderr
    )
    assert float(seconds) < 6
