"""What stands open while hosts work together: mpiexec's port, and what the environment travels by."""

import functools
import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from support.examples import given, st
from support.hosts import OPEN_MPI, tap
from support.schedulers import pbs
from support.waiting import wait_until
from synkro.hosts.launch import exported, needed
from synkro.hosts.process import heard, told

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,9}", fullmatch=True) | TEXT.filter(
    lambda name: name and "=" not in name
)


@given(st.binary(min_size=32, max_size=32), st.dictionaries(NAMES, TEXT))
def test_what_is_told_is_heard(key, environment):
    environment["BYTES"] = os.fsdecode(b"\xff\x80 no UTF-8")
    lines = told(key, environment)
    assert lines.isascii()
    assert heard(lines.splitlines()) == (key, environment)


def test_a_large_environment_comes_in_several_lines():
    environment = {f"V{number}": os.urandom(30_000).hex() for number in range(9)}
    lines = told(bytes(32), environment).splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) < 1 << 17  # what one variable may have
    assert heard(lines) == (bytes(32), environment)


@pytest.mark.parametrize("shell", ["sh", "bash"])
@given(st.dictionaries(NAMES, TEXT, max_size=5))
def test_a_shell_takes_over_what_is_exported(shell, environment):
    """But for what it has of its own, and what no shell can name."""
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    environment |= {"UID": "7", "PPID": "1", "IFS": "x", "BASHOPTS": "no"}
    environment |= {"a b": "", "QUOTED": "it's $HOME\n"}
    show = [sys.executable, "-ISc", "import json, os; print(json.dumps(dict(os.environ)))"]
    done = subprocess.run(
        [shell, "-c", exported(environment) + 'exec "$@"', shell, *show],
        env={"LANG": "C.UTF-8"},
        capture_output=True,
        text=True,
        check=True,
    )
    shown = json.loads(done.stdout)
    own = re.compile(r"E?UID|PPID|IFS|BASH.*|_|ENV|GROUPS|LINENO|SHELLOPTS|PS\d|OPT.*")
    for name, value in environment.items():
        if name.isascii() and name.isidentifier() and not own.fullmatch(name):
            assert shown[name] == value
    assert shown["QUOTED"] == "it's $HOME\n"


def test_mpiexec_gets_what_an_interpreter_needs_and_no_secret():
    secrets = "AWS_SECRET_ACCESS_KEY MY_TOKEN PGPASSWORD SSH_AUTH_SOCK PYTHON_KEY SLURM_JWT FIX"
    own = "PATH HOME LD_LIBRARY_PATH LANG LC_ALL PYTHONHOME UCX_TLS OMPI_MCA_btl"
    environment = dict.fromkeys([*secrets.split(), *own.split()], "x")
    assert needed(environment) == dict.fromkeys(own.split(), "x")


# ── on hosts ─────────────────────────────────────────────────────────────────────────────────────────


RECORDED = """
class Tapped(Tap):
    def begin(self):
        self.file = open(f"{FOLDER}/sent-{os.getpid()}", "wb", 0)

    def Isend(self, message, to, tag):
        self.file.write(bytes(message[0]))
        return self.comm.Isend(message, to, tag)
"""

ASKED = """
import os, sys
import synkro as synk

synk.fork(devices="cpu", **eval(sys.argv[1]))
names = "MY_TOKEN", "OMP_NUM_THREADS"
asked = synk.function(lambda: tuple(os.environ[name][::-1] for name in names), outputs=None)
print(*set(asked()))
lines = synk.function(lambda: [n for n in os.environ if n.startswith("SYNKRO_LINE")], outputs=None)
print(sum(lines(), []))
"""


@pytest.mark.hosts
@pytest.mark.counted_once
@pytest.mark.usefixtures("nothing_left_there")
@pytest.mark.parametrize("secret", [True, False], ids=["ssh", "pbs_tmrsh"])
def test_the_environment_comes_by_the_launcher_or_in_the_first_message(hosts, tmp_path, secret):
    """MPI carries it in the clear, which is told, as is the key then."""
    tap(tmp_path, ["h1", "h2"], f"FOLDER = {str(tmp_path)!r}\n{RECORDED}")
    options, variables = {"hosts": "h1:1,h2:1", "launcher": str(hosts.launcher)}, {}
    if not secret:
        (tmp_path / "bin").mkdir()
        options, variables = {"hosts": "pbs"}, pbs(hosts, tmp_path / "bin", ("h1", "h2"))
    own = {"MY_TOKEN": "only for workers", "OMP_NUM_THREADS": "3"}
    done = hosts.python(tmp_path, ASKED, repr(options), **variables, **own)
    assert done.stdout == "('srekrow rof ylno', '3')\n[]\n", done.stderr
    sent = b"".join(path.read_bytes() for path in tmp_path.glob("sent-*"))
    assert len(sent) > 1000
    assert (b"only for workers" in sent) is not secret
    assert ("the key of their digests went over MPI, in the clear" in done.stderr) is not secret


KNOCKS = """
import socket, struct, sys

port, process = map(int, sys.argv[1:])
with socket.create_connection(("10.77.0.1", port), 5) as mpiexec:
    mpiexec.sendall(struct.pack("4sii", b"HYD", 0, process))  # as its process on that host does
    mpiexec.settimeout(1)
    heard = b""
    try:
        while more := mpiexec.recv(1 << 16):
            heard += more
    except TimeoutError:
        pass
    print(repr(heard), flush=True)
    sys.stdin.readline()
"""

HOLDS = """#!/bin/sh
echo "$@" > {folder}/called
[ -f {folder}/go ] || while [ ! -f {folder}/go ]; do sleep 0.05; done
exec {launcher} "$@"
"""

WAITS = """
import sys, time
import synkro as synk

try:
    synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=sys.argv[1], verbose=False)
    print("ready", flush=True)
    synk.function(lambda: time.sleep(60), outputs=[])()
except synk.SynkroError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.hosts
@pytest.mark.counted_once
@pytest.mark.usefixtures("nothing_left_there")
@pytest.mark.skipif(OPEN_MPI, reason="it is MPICH's mpiexec that says so")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_somebody_else_at_mpiexec_s_port(hosts, tmp_path, moment):
    """Who comes before the process of a host hears no secret; who comes after it ends the session."""
    begin = functools.partial(hosts.begin, tmp_path, sys.executable, "-B", "-c", stderr=subprocess.PIPE)
    launcher = tmp_path / "holds"
    launcher.write_text(HOLDS.format(folder=tmp_path, launcher=hosts.launcher))
    launcher.chmod(0o700)
    go = tmp_path / "go"
    if moment == "after":
        go.touch()
    program = begin(WAITS, launcher, MY_TOKEN="a secret")
    if moment == "after":
        assert program.stdout.readline() == "ready\n"
    assert wait_until((tmp_path / "called").exists, seconds=30)
    assert wait_until(lambda: "--proxy-id" in (tmp_path / "called").read_text())
    port = re.search(r"--control-port \S+?:(\d+)", (tmp_path / "called").read_text())[1]
    knocks = begin(KNOCKS, port, "1", on="h3")
    heard = knocks.stdout.readline()
    if moment == "before":
        assert "PATH=" in heard
        assert "a secret" not in heard
        go.touch()
    out, err = program.communicate(timeout=60)
    knocks.communicate("\n", timeout=10)
    who = "somebody who is none of its processes has connected to mpiexec's port"
    begin = "HostLost the hosts h1, h2 are lost: " if moment == "after" else "SessionError "
    assert out.startswith(begin), (out, err)
    assert who in out
    assert "assert" not in out
    for path in tmp_path.glob("synkro-*.log"):
        path.unlink()
