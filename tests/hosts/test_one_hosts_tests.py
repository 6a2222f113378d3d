"""The tests of one host, with workers on several, which are not always the main program's."""

import sys

import pytest

from support.programs import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once, pytest.mark.timeout(400)]


def name(file):
    """The name of a *file*, which is given as its folder, and what it is about."""
    return f"test_{file.partition('/')[2]}.py"


ENDS = {  # of files that start a session for each test: which of their tests
    "session/dead_workers": "not a_death_is_told or SIGKILL or while_computing",
    "calls/target_failures": "not fork and not map",
    "comms/stranded": "not test_a_death_while or (SIGKILL and (all_reduce or recv))",
    "calls/interrupts": "ctrl_c and not cuts_off or training_step or comes_late",
    "tasks/failures": "dies_while or dies_between or timeout or ctrl_c_ends or moment[0",
}
RUNS = {  # the hosts, the files, and which of their tests
    "calls": (
        "h1,h2",
        "calls/function data/data calls/batches variables/shared results/kept variables/saving "
        "results/out tasks/map tasks/batches tasks/together calls/targets variables/placed",
        "not [1",
    ),
    "collectives": ("h1,h2", "comms/collectives comms/errors comms/split", "not [1"),
    "three workers": ("h1,h2", "calls/exact results/dtypes", "[3"),  # of which one is alone on its host
    "ends": (
        "h1,h2",
        " ".join(ENDS),
        " or ".join(f"{name(file)} and ({ENDS[file]})" for file in ENDS),
    ),
    "three hosts": (
        "h3,h1,h2",
        "calls/function comms/collectives variables/collectives results/outputs",
        "not [1",
    ),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_tests_pass_over(hosts, tmp_path, run):
    """The main program runs on h1."""
    over, files, which = RUNS[run]
    paths = [ROOT / "tests" / file.partition("/")[0] / name(file) for file in files.split()]
    options = ["--over", over, "--launcher", hosts.launcher, "-k", which]
    options += ["-m", "not programs and not thorough and not libraries", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *paths]
    done = hosts.done(tmp_path, *command, timeout=390)
    assert done.returncode == 0, done.stdout[-5000:]


def test_workers_are_on_hosts_of_their_own(hosts, tmp_path):
    code = (
        "import socket, sys\nimport synkro as synk\n"
        "synk.fork(hosts=['h1:1', 'h2:2'], devices='cpu', launcher=sys.argv[1])\n"
        "where = synk.function(lambda: (socket.gethostname(), synk.host(), synk.local_rank()), "
        "outputs=None)\nprint(where())"
    )
    done = hosts.python(tmp_path, code, hosts.launcher)
    assert done.stdout == "[('h1', 0, 0), ('h2', 1, 0), ('h2', 1, 1)]\n"
    assert "Synkro: 2 hosts by MPICH" in done.stderr
    assert "over shell: h1 (rank 0), h2 (ranks 1, 2), ready in " in done.stderr
    assert "trusted networks only" in done.stderr
