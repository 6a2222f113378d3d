"""However programs end that have made names of shared memory, nothing of these is left."""

import os
import random
import signal
import subprocess

import pytest

from support.leftovers import children
from support.named import files
from support.programs import start_python
from support.waiting import SOON, Watch, gone, wait_until
from synkro.memory import named

pytest.importorskip("posix_ipc", reason="needs posix_ipc, which has no wheel for this Python")

pytestmark = [pytest.mark.programs, pytest.mark.one_host]

OWNER = """
import os, sys, time, numpy as np, synkro as synk
name = sys.argv[1]
synk.fork(2, verbose=False)
x = synk.data(np.ones((7, 3)), shm_name=name)
ring = synk.ring(name + "-ring", slots=2, shape=3)
synk.function(lambda x: x.sum(), outputs="sum")(x)
child = os.fork() if "fork" in sys.argv else None
if child == 0:
    time.sleep(60)
print(child or 0, *synk.here.session.pids, flush=True)
"""
WAITING = OWNER + "sys.stdin.read()\n"

AGAIN = """
import sys, numpy as np, synkro as synk
synk.fork(1, verbose=False)
while True:
    x = synk.data(np.ones((7, 3)), shm_name=sys.argv[1])
    ring = synk.ring(sys.argv[1] + "-ring", slots=2, shape=3)
    print("made", flush=True)
    x.free_memory()
    ring.close()
"""


def begun(*arguments):
    """A program that has made two names; the process ids of its child and of its workers."""
    program = start_python(WAITING, *arguments)
    child, *workers = map(int, program.stdout.readline().split())
    assert len(files(arguments[0])) == 4
    return program, child, workers


NOT_ALLOWED = """
def not_allowed(path):
    raise PermissionError(1, "Operation not permitted", path)

os.unlink = not_allowed
"""
ANOTHER_USER = "if not os.geteuid(): os.setuid(65534)\n"  # who may not remove what root has made


@pytest.mark.parametrize(
    "how",
    ["", "synk.close()", "raise SystemExit(3)", "os.abort()", "os._exit(1)"]
    + [first + then for first in (NOT_ALLOWED, ANOTHER_USER) for then in ("", "synk.close()")],
)
def test_a_program_that_ends_takes_its_names_along(name, how):
    program = start_python(OWNER + how, name, stderr=subprocess.DEVNULL)
    with Watch():
        program.communicate()
        assert wait_until(lambda: not files(name))


@pytest.mark.parametrize("by", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGSEGV])
def test_a_program_that_is_killed_takes_its_names_along(name, by):
    program, _, workers = begun(name)
    program.send_signal(by)
    with Watch():
        assert wait_until(lambda: not files(name))
        assert wait_until(lambda: all(map(gone, workers)))
    program.communicate()


def test_a_worker_that_is_killed_takes_no_names_along(name):
    program, _, workers = begun(name)
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
    assert wait_until(lambda: all(map(gone, workers)), SOON)
    assert named.sweep() == []
    assert len(files(name)) == 4
    program.communicate()
    assert not files(name)


def test_a_fork_of_the_program_ends_no_name_and_keeps_none(name):
    program, child, _ = begun(name, "fork")
    os.kill(child, signal.SIGTERM)
    assert wait_until(lambda: gone(child), SOON)
    assert len(files(name)) == 4
    program.communicate()
    program, child, _ = begun(name, "fork")
    try:
        program.kill()
        assert wait_until(lambda: not files(name), SOON)
        assert not gone(child)
    finally:
        os.kill(child, signal.SIGKILL)
        program.communicate()


def kill_all(program):
    """The program, its workers, and the keeper of its names, which can do nothing meanwhile."""
    os.kill(program.pid, signal.SIGSTOP)
    family = children(program.pid)
    for pid in (*family, program.pid):
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: all(map(gone, family)), SOON)
    program.communicate()


DOCTOR = ["doctor", "--data", "1M", "--devices", "cpu"]
FINDERS = {  # a program, its arguments, and what it prints
    "fork": (["import synkro; synkro.fork(1); synkro.close()"], ["Synkro: removed ", "NAME-ring"]),
    "doctor": (
        ["import runpy; runpy.run_module('synkro', run_name='__main__')", *DOCTOR],
        ["names of shared memory: removed ", "NAME-ring"],
    ),
    "data": (["import synkro.controller.session as s; s.sweep = lambda: []\n" + OWNER, "NAME"], []),
}


@pytest.mark.parametrize("finder", FINDERS)
def test_where_all_are_killed_the_next_one_removes_the_names(name, finder):
    command, says = FINDERS[finder]
    for _ in range(10):  # other tests begin programs, too, one of which may be the next
        program, _, _ = begun(name)
        kill_all(program)
        done = start_python(*(part.replace("NAME", name) for part in command), stderr=subprocess.PIPE)
        printed = "".join(done.communicate())
        assert done.returncode == 0, printed
        assert not files(name)
        if not says or f"{name}-ring" in printed:
            break
    assert all(line.replace("NAME", name) in printed for line in says)


@pytest.mark.parametrize("all_of_it", [False, True])
def test_killed_at_any_moment(name, all_of_it):
    """The program alone, or with its workers and the keeper of its names."""
    chance = random.Random(all_of_it)
    for _ in range(8):
        program = start_python(AGAIN, name)
        for _ in range(chance.randrange(1, 4)):
            program.stdout.readline()
        if all_of_it:
            kill_all(program)
            named.sweep()
            assert not files(name)
        else:
            program.kill()
            assert wait_until(lambda: not files(name), SOON)
            program.communicate()
