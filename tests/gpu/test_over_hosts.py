"""GPU workers on several hosts, which are this machine more than once, or made of namespaces."""

import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest

import synkro as synk
from calls import test_exact as exact
from comms.test_collectives import (  # noqa: F401
    test_everything,
    test_reductions,
)
from gpu.test_collectives import (  # noqa: F401
    test_training_takes_the_serial_steps,
    test_worlds,
    where,
)
from gpu.test_exact import (  # noqa: F401
    DTYPES,
    call,
    test_all_operations_in_one_call,
    test_large_outputs_of_all_operations,
    test_what_is_kept_is_what_would_be_gathered,
    test_without_reduction_comes_every_piece_in_order,
)
from gpu.test_failures import test_an_exception_strands_nobody  # noqa: F401
from gpu.test_inputs import (  # noqa: F401
    scaled,
    test_a_view_from_before_a_call_writes_after_many,
    test_data_of_two_that_took_turns_in_memory,
    test_files_that_change_are_read_anew,
)
from gpu.test_variables import (  # noqa: F401
    test_broadcasts,
    test_reduce_in_place_changes_the_master_alone,
    test_scatters_and_gathers,
    test_without_nccl_they_go_through_host_memory,
)
from support.gpus import OVER_HOSTS, SINGLE, STAND_IN, environment, serving, settled, started
from support.programs import ROOT
from support.sessions import LARGE, current, per_rank
from synkro import here

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]


@pytest.fixture(scope="module", params=OVER_HOSTS)
def session(request):
    with serving(request.param, seed=1) as session, mock.patch.object(exact, "DTYPES", DTYPES):
        yield session


@contextmanager
def of_its_own(pool, **options):
    """A session that a test may break."""
    with settled(pool) as devices, started(pool, devices, **options) as session, current(session):
        yield session


def total(session):
    return session.function(lambda x: x.sum(), outputs="sum")(np.ones(7))


# ── who they are ─────────────────────────────────────────────────────────────────────────────────


def test_ranks_fill_the_hosts(n, session):
    def place():
        return synk.host(), synk.local_rank(), synk.xp().cuda.runtime.getDevice()

    first, second = (len(host.ranks) for host in session.hosts)
    assert first + second == n
    pairs = [(0, rank) for rank in range(first)] + [(1, rank) for rank in range(second)]
    assert per_rank(place) == [(host, rank, rank) for host, rank in pairs]


def test_one_link_connects_all(n):
    def linked():
        x = synk.all_reduce(synk.xp().ones(3), "sum")
        _, link = here.rank.comm.links._known[tuple(range(n))]
        return link._comm.size(), float(x[0])

    assert per_rank(linked) == [(n, n)] * n


# ── what has changed ─────────────────────────────────────────────────────────────────────────────


def test_unchanged_inputs_stay_on_the_gpus(n):
    y = synk.data(np.arange(1 << 16, dtype="f4"))
    f = synk.function(lambda y: y.sum(), bcast_inputs=["y"], outputs=None)
    f(y)

    def kept():
        return len(here.rank.device._inputs.kept._copies)

    before = per_rank(kept)
    f(y)
    assert per_rank(kept) == before
    assert min(before) >= 1


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────


def test_maps(n, session):
    y = np.arange(5.0)
    table = session.map(lambda k: float((synk.xp().asarray(y) * k).sum()), range(40))
    assert table == [10.0 * k for k in range(40)]


def test_save_and_load(n, session, tmp_path):
    w = synk.shared(np.zeros(3), name="saved")
    for rank in range(n):
        synk.set_value(rank, w, np.full(3, rank + 1.0))
    session.save(tmp_path / "state")
    synk.broadcast(w, np.zeros(3))
    session.load(tmp_path / "state")
    assert [synk.get_value(rank, w)[0] for rank in range(n)] == [rank + 1.0 for rank in range(n)]


@pytest.fixture
def pool():
    return OVER_HOSTS[0].values[0]


def test_a_worker_that_dies(pool):
    def die():
        if synk.rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        synk.all_reduce(synk.xp().ones(3))

    with of_its_own(pool), pytest.raises(synk.WorkerDied) as caught:
        synk.function(die, outputs=[])()
    assert (caught.value.rank, caught.value.host) == (1, "localhost")


def test_where_nccl_is_too_old_they_go_through_host_memory(pool):
    old = replace(pool, link="host memory", environment={"FAKE_CUDA_DEVICES": "2", **SINGLE})
    with of_its_own(old) as session:
        f = session.function(lambda x: (synk.all_reduce(x.sum(0)), x.sum(0)), outputs=[None, "sum"])
        each, together = f(np.ones((4, LARGE)))
    assert [float(x[0]) for x in each] == [2.0, 2.0]
    assert (together == 4).all()


# ── hosts that differ ────────────────────────────────────────────────────────────────────────────

PROGRAM = """
import sys
import numpy as np, synkro as synk
synk.fork(hosts=sys.argv[2:], launcher=sys.argv[1], timeout=60{options})
def mine(x):
    runtime = synk.xp().cuda.runtime
    device = runtime.deviceGetPCIBusId(runtime.getDevice())
    return synk.host(), device[-4:], float(synk.all_reduce(x.sum(0), "sum")[0])
x = np.ones((12, 3))
print(synk.function(mine, outputs=None)(x))
print(synk.function(lambda x: x.sum(0), outputs="sum")(np.ones((12, 400_000)))[-1])
"""
ON_H2 = """
import os, socket
if socket.gethostname() == "h2" and "PMI_RANK" in os.environ:  # as a launcher would
    os.environ |= {variables!r}
"""


@pytest.fixture
def ran(hosts, tmp_path):
    """Runs a program on h1; the processes of MPI's on h2 have some variables."""

    def run(*names, options="", command=(), **variables):
        (tmp_path / "sitecustomize.py").write_text(ON_H2.format(variables=variables))
        path = os.pathsep.join(map(str, (tmp_path, ROOT, STAND_IN)))
        with environment("stand-in", FAKE_CUDA_DEVICES="3"):
            program = ["-c", PROGRAM.format(options=options), hosts.launcher, *names]
            return subprocess.run(
                hosts.on("h1", sys.executable, *(command or program)),
                env={**os.environ, "PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=False,
                timeout=60,
            )

    return run


def test_hosts_with_different_gpus(ran):
    """As many ranks as GPUs; what shows GPUs to the host's process shows them to its workers."""
    done = ran("h1:2", "h2", CUDA_VISIBLE_DEVICES="2,1")
    lie = [(0, "1B.0", 12.0), (0, "1C.0", 12.0), (1, "1D.0", 12.0), (1, "1C.0", 12.0)]
    assert done.stdout.splitlines() == [str(lie), "12.0"], done.stderr
    assert "Synkro attempting to use 4 of 5 detected GPUs" in done.stderr
    assert "through host memory" not in done.stderr


def test_the_main_program_is_on_a_host_of_its_own(ran):
    done = ran("h2:1", "h3:1")
    assert done.stdout.splitlines() == [str([(0, "1B.0", 12.0), (1, "1B.0", 12.0)]), "12.0"], done.stderr


BY_HOST = ", devices=['cuda:0', 'cuda:1']"
TARGET = "); synk.shared(1.0, target='cuda:0'"


@pytest.mark.parametrize(
    ("names", "options", "variables", "says"),
    [
        (
            "h1 h2",
            ", devices='cuda'",
            {"CUDA_VISIBLE_DEVICES": ""},
            "NotAvailable: devices= asks for GPUs, but on h2 CUDA finds no GPU (",
        ),
        (
            "h1 h2:3",
            "",
            {"CUDA_VISIBLE_DEVICES": "0"},
            "3 workers were asked for, but 1 GPU is visible on h2: list a GPU more than once",
        ),
        (
            "h1 h2",
            "",
            {"FAKE_NCCL_VERSION": "22800"},
            "- h2 has NCCL 2.28.0 (h1 has 2.32.3): install the same versions there.",
        ),
        (
            "h1:2 h2:2",
            BY_HOST + TARGET,
            {},
            "target='cuda:0' is a name of the ranks 0, 2: give the number of one.",
        ),
        (
            "h1:2 h2:1",
            BY_HOST,
            {},
            "devices= lists 2 devices for each host (['cuda:0', 'cuda:1']), but hosts= gives h2 1 rank:",
        ),
    ],
)
def test_what_hosts_cannot_do_together(ran, names, options, variables, says):
    done = ran(*names.split(), options=options, **variables)
    assert says in done.stderr.splitlines()[-1], done.stderr


def test_cpus_where_nobody_asked_and_a_host_has_no_gpu(ran):
    done = ran("h1:1", "h2:1", CUDA_VISIBLE_DEVICES="")
    assert "Synkro uses CPUs, as on h2 CUDA finds no GPU" in done.stderr
    assert "2 CPU workers initialized" in done.stderr


def test_doctor_tells_the_gpus_of_hosts(hosts, ran):
    doctor = ["-m", "synkro", "doctor", "--hosts", "h1,h2", "--launcher", hosts.launcher]
    done = ran(command=doctor, CUDA_VISIBLE_DEVICES="2,1")
    assert re.search(r"GPUs: h1 has 3 \S.* \(CuPy .*, NCCL 2.32.3\); h2 has 2 ", done.stdout), (
        done.stdout
    )
    done = ran(command=doctor, CUDA_VISIBLE_DEVICES="")
    assert re.search(r"GPUs: h1 has 3 .*; h2 has none: CUDA finds no GPU", done.stdout), done.stdout
    done = ran(command=doctor, FAKE_NCCL_VERSION="22800")
    assert "h2 has NCCL 2.28.0 (h1 has 2.32.3)" in done.stdout
