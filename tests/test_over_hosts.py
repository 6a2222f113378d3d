"""The tests of one host, with workers on several, which are not always the main program's."""

import os
import subprocess
import sys

import pytest

from support.programs import ROOT

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once, pytest.mark.timeout(400)]

RUNS = [  # the hosts, the files, and which of their tests: of those that take long, some
    ("h1,h2", "test_function test_data test_batches", ""),
    ("h1,h2", "test_variables test_kept_outputs test_saving", ""),
    ("h1,h2", "test_collectives test_collective_errors test_split", ""),
    ("h1,h2", "test_map test_targets test_placed", ""),
    ("h1,h2", "test_exact", "[3"),  # workers, of which one is alone on its host
    ("h1,h2", "test_failures", "not (a_death_is_told or of_the_type) or SIGKILL or while_computing"),
    ("h1,h2", "test_target_failures", "not fork and not map"),
    ("h1,h2", "test_stranded", "not test_a_death_while or (SIGKILL and (all_reduce or recv))"),
    ("h1,h2", "test_interrupts", "ctrl_c and not cuts_off or training_step or comes_late"),
    ("h1,h2", "test_map_failures", "dies_while or dies_between or timeout or ctrl_c_ends or moment[0"),
    ("h2,h1", "test_variable_collectives test_outputs", ""),
    ("h3,h1,h2", "test_function", ""),
    ("h2,h3", "test_collectives", ""),
    ("h1,h2", "test_dtypes", "[3"),
    ("h1,h2", "test_out", ""),
]


@pytest.mark.parametrize(("over", "files", "which"), RUNS)
def test_the_tests_pass_over(hosts, over, files, which):
    """The main program runs on h1."""
    paths = [ROOT / "tests" / f"{file}.py" for file in files.split()]
    options = ["--over", over, "--launcher", hosts.launcher, "-k", which, "-m", "not programs"]
    options += ["-p", "no:cacheprovider"]
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
