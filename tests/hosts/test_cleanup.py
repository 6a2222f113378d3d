"""What a process leaves when it has ended goes by its keeper: also what MPI has made for it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.hosts import environment, processes_of
from support.waiting import wait_until

pytestmark = pytest.mark.one_host


def run(folder, code, *arguments):
    """What becomes of a program on this host."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(folder, {}),
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


MADE_EARLY = """
import os, subprocess, sys
open(sys.argv[1], "w").close()
code = "from synkro.hosts.cleanup import watch; watch(ours=False)"
subprocess.run([sys.executable, "-c", code], check=True)
"""


def test_files_go_that_mpi_has_made_for_one_process_before_the_other_began(tmp_path):
    """Those that were there before mpiexec began are not this program's."""
    old, new = (Path(f"/dev/shm/mpich_shm_{kind}_{os.getpid()}") for kind in ("old", "new"))
    old.touch()
    try:
        time.sleep(0.3)  # by less than that the times of files and processes may be wrong
        run(tmp_path, MADE_EARLY, new)
        assert wait_until(lambda: not new.exists(), seconds=10)
        assert old.exists()
    finally:
        old.unlink()
        new.unlink(missing_ok=True)


STOPPED = """
import subprocess, sys
code = "import math, os, signal, time; from synkro.hosts.cleanup import watch; keeper = watch()"
code += "; print(flush=True); " + sys.argv[1]
process = subprocess.Popen(
    [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
)
process.stdout.readline()  # it knows now who has started it
if sys.argv[2] != "starter":
    print(process.wait(), flush=True)
"""


@pytest.mark.parametrize(
    ("code", "victim"),
    [
        ("keeper.beat(0.2); os.kill(os.getpid(), signal.SIGSTOP)", "process"),
        ("keeper.beat(0.2); keeper.beat(math.inf); time.sleep(2); os._exit(7)", "nobody"),
        ("os.kill(os.getpid(), signal.SIGSTOP)", "starter"),
        ("[(keeper.beat(60), time.sleep(0.1)) for _ in range(600)]", "starter"),
    ],
    ids=["silent", "need not say so", "stopped", "without a starter"],
)
def test_a_process_that_stands_still_or_has_no_starter_is_ended(tmp_path, code, victim):
    done = run(tmp_path, STOPPED, code, victim)
    assert done.returncode == 0, done.stderr
    assert wait_until(lambda: not processes_of(tmp_path), seconds=10)
    if victim != "starter":
        assert int(done.stdout) == (7 if victim == "nobody" else -signal.SIGKILL)


OWNER = """
import os, signal, subprocess, sys
from synkro.memory.keeper import Keeper

keeper = Keeper(inherits=True)
options = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
group, other = (subprocess.Popen(["sleep", "60"], **options) for _ in range(2))
keeper.tell("folder", sys.argv[1])
keeper.tell("file", sys.argv[2])
keeper.tell("line", "it has ended\\n")
keeper.tell("group", other.pid)
keeper.tell("group", group.pid)
os.mkdir(sys.argv[1])
print(group.pid, other.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_keeper_removes_a_folder_and_a_file_and_ends_a_group(tmp_path):
    """The last group that it was told of; another one is let be."""
    folder, file = tmp_path / "folder", tmp_path / "file"
    file.touch()
    done = run(tmp_path, OWNER, folder, file)
    assert done.stderr == "it has ended\n"
    group, other = map(int, done.stdout.split())
    try:
        assert wait_until(lambda: processes_of(tmp_path) == {other}, seconds=10)
        assert wait_until(lambda: not (folder.exists() or file.exists()), seconds=10)
    finally:
        os.kill(other, signal.SIGKILL)
    assert group != other


STARTER = """
import os, subprocess, sys

there, inherited = os.pipe()
code = "import os, signal; from synkro.hosts.cleanup import watch; keeper = watch()"
code += "; os.kill(os.getpid(), signal.SIGKILL)"
subprocess.run([sys.executable, "-c", code], pass_fds=[inherited], stderr=subprocess.DEVNULL)
os.close(inherited)
os.read(there, 1)
os._exit(7)
"""


def test_a_starter_sees_that_what_it_has_started_has_ended(tmp_path):
    """By the end of what that has inherited, as mpiexec's process on a host does: the keeper, which has
    inherited it, too, lets go of it, and ends the starter only where that goes on."""
    done = run(tmp_path, STARTER)
    assert done.returncode == 7
    assert wait_until(lambda: not processes_of(tmp_path), seconds=10)
