"""The tests of one host, with workers on several, which are not always the main program's."""

import os
import subprocess
import sys

import pytest

from support.programs import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once, pytest.mark.timeout(400)]

ENDS = {  # of files that start a session for each test: which of their tests
    "failures": "not (a_death_is_told or of_the_type) or SIGKILL or while_computing",
    "target_failures": "not fork and not map",
    "stranded": "not test_a_death_while or (SIGKILL and (all_reduce or recv))",
    "interrupts": "ctrl_c and not cuts_off or training_step or comes_late",
    "map_failures": "dies_while or dies_between or timeout or ctrl_c_ends or moment[0",
}
RUNS = {  # the hosts, the files, and which of their tests
    "calls": (
        "h1,h2",
        "function data batches variables kept_outputs saving out map "
        "map_batches together targets placed",
        "not [1",
    ),
    "collectives": ("h1,h2", "collectives collective_errors split", "not [1"),
    "three workers": ("h1,h2", "exact dtypes", "[3"),  # of which one is alone on its host
    "ends": (
        "h1,h2",
        " ".join(ENDS),
        " or ".join(f"test_{file}.py and ({ENDS[file]})" for file in ENDS),
    ),
    "three hosts": ("h3,h1,h2", "function collectives variable_collectives outputs", "not [1"),
}


@pytest.mark.parametrize("run", RUNS)
def test_the_tests_pass_over(hosts, run):
    """The main program runs on h1."""
    over, files, which = RUNS[run]
    paths = [ROOT / "tests" / f"test_{file}.py" for file in files.split()]
    options = ["--over", over, "--launcher", hosts.launcher, "-k", which]
    options += ["-m", "not programs and not thorough and not libraries", "-p", "no:cacheprovider"]
    done = subprocess.run(
        hosts.on("h1", sys.executable, "-m", "pytest", *options, *paths),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]


def test_workers_are_on_hosts_of_their_own(hosts):
    code = (
        "import socket, sys\nimport synkro as synk\n"
        "synk.fork(hosts=['h1:1', 'h2:2'], devices='cpu', launcher=sys.argv[1])\n"
        "where = synk.function(lambda: (socket.gethostname(), synk.host(), synk.local_rank()), "
        "outputs=None)\nprint(where())"
    )
    done = subprocess.run(
        hosts.on("h1", sys.executable, "-c", code, hosts.launcher),
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "[('h1', 0, 0), ('h2', 1, 0), ('h2', 1, 1)]\n"
    assert "Synkro: 2 hosts by MPICH" in done.stderr
    assert "over shell: h1 (rank 0), h2 (ranks 1, 2), ready in " in done.stderr
    assert "trusted networks only" in done.stderr
