"""Inputs on their way to other hosts: files that are there do not travel; what takes long is told."""

import contextlib
import os
import signal
import sys

import numpy as np
import pytest

from support.hosts import processes_of, run
from support.waiting import wait_until

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]
ROWS, COLUMNS = 1 << 12, 1 << 10  # 32 MB of int64
SIZE = 8 * ROWS * COLUMNS

PROGRAM = """
import sys
import numpy as np
import synkro as synk
from synkro import here

launcher, path = sys.argv[1:]
total = synk.function(lambda x: x.sum(axis=0), outputs="sum")
rows = synk.function(lambda x: x, outputs="gather")


def check(x):
    there = np.load(path)
    assert np.array_equal(total(x), there.sum(axis=0))
    assert np.array_equal(rows(x, batch=[4000, 5, 5, 4001]), there[[4000, 5, 5, 4001]])


for line in sys.stdin:
    if line == "fork\\n":
        synk.close()
        synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=launcher)
        x = synk.data(np.load(path, mmap_mode="r"), name="x")
        leader = here.session._engine._pool._mpi.said[1].pid
    check(x)
    print(leader, flush=True)
"""


@contextlib.contextmanager
def begun(hosts, folder, path):
    """The program runs on h1, with the file at *path* as an input, and ends well."""
    command = [sys.executable, "-c", PROGRAM, hosts.launcher, path]
    stderr = (folder / "stderr").open("w")
    with stderr, hosts.begin(folder, *command, stderr=stderr) as program:
        yield program
        program.stdin.close()
        assert program.wait(20) == 0


def errors(folder):
    return (folder / "stderr").read_text()


def ask(program, line):
    """Wait until it is done; returns the process id of the leader on h2."""
    program.tell(line)
    return program.hear()


@pytest.fixture
def path(hosts, tmp_path):
    """A file in a folder of its own; no other one is left after the test."""
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.npy"
    np.save(path, np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS))
    yield path
    assert wait_until(lambda: not processes_of(tmp_path), seconds=10), processes_of(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["data", "stderr"]
    assert not hosts.shared_files()


def received(hosts):
    """The bytes that h2 has received from others until now."""
    return int(run(*hosts.on("h2", "cat", "/sys/class/net/eth0/statistics/rx_bytes")))


MISSING = "Synkro: h2 does not have the file of the Data 'x': what is read of it is sent there"


def test_a_file_on_both_hosts_does_not_travel(hosts, tmp_path, path):
    before = received(hosts)
    with begun(hosts, tmp_path, path) as program:
        ask(program, "fork")
        with path.open("r+b") as file:  # what others write later is seen
            file.seek(-8 * COLUMNS, os.SEEK_END)
            file.write(np.full(COLUMNS, -7).tobytes())
        ask(program, "check")
        np.save(path, np.load(path) + 1)  # another file in its place
        ask(program, "fork")
    assert MISSING not in errors(tmp_path)
    assert received(hosts) - before < SIZE / 8


def other_contents(path, other):
    """Of the same size and time."""
    np.save(other, -np.load(path))
    times = path.stat()
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))


def other_time(path, other):
    other.write_bytes(path.read_bytes())
    os.utime(other, (0, 0))


def another_size(path, other):
    other.write_bytes(path.read_bytes()[:-1])


def a_pipe(path, other):
    os.mkfifo(other)


@pytest.mark.parametrize("made", [other_contents, other_time, another_size, a_pipe, None])
def test_another_file_at_its_path_is_not_taken(hosts, tmp_path, path, made):
    """Nor is one awaited where there is none."""
    mount = ["-t", "tmpfs", "none", path.parent]
    if made is not None:
        other = tmp_path / "data" / "other.npy"
        made(path, other)
        mount = ["--bind", other, path]
    before = received(hosts)
    with hosts.mounted("h2", *mount), begun(hosts, tmp_path, path) as program:
        ask(program, "fork")
        ask(program, "check")
    assert errors(tmp_path).count(MISSING) == 1
    assert received(hosts) - before > SIZE / 2


def test_inputs_that_take_long_to_get_there_are_told(hosts, tmp_path, path):
    np.save(path, np.ones((4 * ROWS, COLUMNS)))  # of which a half is more than the kernel takes
    empty = hosts.mounted("h2", "-t", "tmpfs", "none", path.parent)
    with empty, begun(hosts, tmp_path, path) as program:
        leader = ask(program, "fork")
        os.kill(leader, signal.SIGSTOP)
        program.tell("check")
        try:
            said = "Synkro: pushing 64.0 MB of the Data 'x' to h2…"
            assert wait_until(lambda: said in errors(tmp_path), seconds=8), errors(tmp_path)
        finally:
            os.kill(leader, signal.SIGCONT)
        program.hear()
