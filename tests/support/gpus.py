"""Machines with GPUs, real and make-believe, and pools: how the ranks of a session lie on them."""

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field

import pytest

import synkro as synk
from support.leftovers import nothing_left
from support.programs import ROOT
from synkro import here
from synkro.devices import gpus

STAND_IN = ROOT / "tests" / "stand_in"
MEETING_PLACE = tempfile.TemporaryDirectory(
    prefix="stand-in-"
)  # of its ranks; the killed ones leave files
SOCKETS = {"SYNKRO_NCCL_SOCKETS": "1"}  # NCCL older than 2.30 connects ranks on one GPU by these
SEVERAL = {"FAKE_NCCL_VERSION": "23203"}  # a release that takes several ranks a GPU
SINGLE = {"FAKE_NCCL_VERSION": "22800"}  # one that does not
NEAR = {"SYNKRO_GPU_PATHS": "new"}  # ranks open each other's device memory

MACHINES = [pytest.param("gpu", marks=pytest.mark.gpu), "stand-in"]


@dataclass(frozen=True)
class WorkerPool:
    """Ranks on devices.  *link* is how they are connected: by NCCL, by each other's device memory
    (near), or through host memory."""

    machine: str
    name: str
    devices: tuple
    link: str
    environment: dict = field(default_factory=dict)
    hosts: tuple = ()

    @property
    def size(self):
        return len(self.devices)

    def __str__(self):
        return f"{self.machine}-{self.name}"


def _pool(machine, name, devices, link, **environment):
    marks = [pytest.mark.gpu] if machine == "gpu" else []
    pool = WorkerPool(machine, name, tuple(devices), link, environment)
    return pytest.param(pool, id=str(pool), marks=marks)


CREWS = {
    name: [_pool(machine, name, *rest, **env) for machine, rest, env in kinds]
    for name, kinds in {
        "one": [
            ("gpu", (["cuda:0"], "alone"), {}),
            ("stand-in", (["cuda:0"], "alone"), {"FAKE_CUDA_DEVICES": "1"}),
        ],
        "two": [
            ("gpu", (["cuda:0", "cuda:1"], "nccl"), {}),
            ("stand-in", (["cuda:0", "cuda:1"], "nccl"), {"FAKE_CUDA_DEVICES": "2", **SINGLE}),
        ],
        "same": [
            ("gpu", (["cuda:0"] * 2, "any"), {}),
            ("stand-in", (["cuda:0"] * 2, "nccl"), {"FAKE_CUDA_DEVICES": "1", **SEVERAL}),
        ],
        "sockets": [("gpu", (["cuda:0"] * 2, "nccl"), SOCKETS)],
        "four": [
            ("gpu", (["cuda:0"] * 4, "any"), {}),
            ("stand-in", (["cuda:0"] * 4, "host memory"), {"FAKE_CUDA_DEVICES": "2", **SINGLE}),
        ],
        "near": [
            ("gpu", (["cuda:0"] * 2, "near"), NEAR),
            (
                "stand-in",
                (["cuda:0", "cuda:1", "cuda:0"], "near"),
                {"FAKE_CUDA_DEVICES": "2", **SINGLE, **NEAR},
            ),
        ],
        "three": [
            ("stand-in", (["cuda:2", "cuda:0", "cuda:1"], "nccl"), {"FAKE_CUDA_DEVICES": "3"}),
        ],
        "all": [("gpu", ("all", "nccl"), {})],
    }.items()
}


_TWO = ("cuda:0", "cuda:1")
OVER_HOSTS = [  # each of which is this machine, so that two ranks share a GPU
    pytest.param(
        WorkerPool("stand-in", name, _TWO, "nccl", {"FAKE_CUDA_DEVICES": "2", **SEVERAL}, hosts),
        id=f"stand-in-{name}",
        marks=pytest.mark.hosts,
    )
    for name, hosts in {
        "1+1": ("localhost:1", "localhost:1"),
        "2+1": ("localhost:2", "localhost:1"),
    }.items()
]


def pools(*names, rarely=()):
    """The parameters of a fixture: the pools of these names on every machine.

    On the stand-in those that are to come *rarely* run with ``pytest -m thorough`` only.
    """
    return [_rare(param) if name in rarely else param for name in names for param in CREWS[name]]


def _rare(param):
    (pool,) = param.values
    marks = [pytest.mark.thorough] if pool.machine == "stand-in" else param.marks
    return pytest.param(pool, id=param.id, marks=marks)


PAIRS = pools("two", "same", "sockets")
EVERY = pools("one", "two", "same", "sockets", "four", "near", "all", rarely=("one", "same"))
MOST = pools(
    "one", "two", "sockets", "four", "near", "all", rarely=("one",)
)  # "same" goes the way of one of these


def real_gpus():
    """How many GPUs there really are, as CuPy sees them here."""
    return len(gpus.visible().gpus)


@contextlib.contextmanager
def environment(machine, **variables):
    """This process's environment as on that machine, for a while."""
    if machine == "gpu" and not real_gpus():
        pytest.skip("needs a GPU and CuPy")
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith(("FAKE_", "SYNKRO_"))]:
            patch.delenv(name)
        if machine == "stand-in":
            patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
            patch.syspath_prepend(str(STAND_IN))
        patch.setenv("FAKE_CUDA_FOLDER", MEETING_PLACE.name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield patch


@contextlib.contextmanager
def settled(pool):
    """The environment of a pool; yields the devices of its ranks."""
    devices = pool.devices
    with environment(pool.machine, **pool.environment):
        if pool.machine == "gpu":
            found = real_gpus()
            if devices == tuple("all"):
                devices = [f"cuda:{index}" for index in range(found)]
            wanted = 3 if pool.name == "all" else len(set(devices))  # two of two are a pool already
            if found < wanted:
                pytest.skip(f"needs {wanted} GPUs; there is only {found}")
        yield list(devices)


def started(pool, devices, **options):
    """A session of that pool, connected as the pool says."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        options = {"timeout": 60, "hosts": pool.hosts or None, **options}
        asked = "cuda" if pool.hosts else devices  # each host has ranks on the first of its GPUs
        session = synk.Session(devices=asked, verbose=True, **options)
    through = [line for line in said.getvalue().splitlines() if "through host memory" in line]
    if pool.link == "nccl" and through:
        session.close()
        pytest.fail(through[0])
    if pool.link == "host memory":
        assert through, said.getvalue()
    if pool.link == "near":
        assert all("outputs are" in line for line in through), said.getvalue()
    return session


@contextlib.contextmanager
def serving(pool, **options):
    """A session of a pool's ranks for many tests; the environment is that of its start alone.

    In the end all that was pinned is still there.
    """
    with settled(pool) as devices:
        session = started(pool, devices, **options)
    with session:
        yield session
        assert mapped_as_pinned(session)


def serves(params, **options):
    """A fixture for a file: the session of each of these pools."""

    @pytest.fixture(scope="module", params=params)
    def session(request):
        with serving(request.param, **options) as session:
            yield session

    return session


def mapped_as_pinned(session):
    """Whether no rank's pinned memory has gone; what real GPUs do not tell."""

    def look():
        check = getattr(synk.xp().cuda.runtime, "check_registrations", None)
        if check is not None:
            check()
        return 1

    return session.function(look, outputs="min", name="mapped_as_pinned")() == 1


@pytest.fixture(params=MACHINES)
def machine(request):
    """A machine for a test that starts its own sessions, which leaves nothing; and its environment."""
    with nothing_left(), environment(request.param) as patch:
        if request.param == "stand-in":
            patch.setenv("FAKE_CUDA_DEVICES", "2")
        yield Machine(request.param, patch)
        synk.close()
        here.session = None


@pytest.fixture
def make_believe():
    """The machine of the stand-in alone, for what real GPUs cannot be told to do."""
    with nothing_left(), environment("stand-in", FAKE_CUDA_DEVICES="2") as patch:
        yield Machine("stand-in", patch)
        synk.close()
        here.session = None


class Machine:
    """Where a test starts sessions of its own."""

    def __init__(self, name, patch):
        self.name = name
        self.patch = patch

    @property
    def real(self):
        return self.name == "gpu"

    def set(self, **variables):
        """Set variables of the environment; None takes one away."""
        for name, value in variables.items():
            if value is None:
                self.patch.delenv(name, raising=False)
            else:
                self.patch.setenv(name, str(value))

    def needs_jax(self):
        """Skip the test where JAX is missing, or knows no GPUs."""
        pytest.importorskip("jax", reason="needs JAX (the extra jax)")
        plugins = [importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)]
        if self.real and not any(plugins):
            pytest.skip('needs JAX for GPUs: pip install "jax[cuda12]", or [cuda13]')

    def needs(self, count):
        """Skip the test where there are fewer GPUs."""
        if self.real and real_gpus() < count:
            pytest.skip(f"needs {count} GPUs")

    def session(self, devices=("cuda:0", "cuda:0"), **options):
        return synk.Session(devices=list(devices), **{"verbose": False, "timeout": 60, **options})

    def python(self, code, **variables):
        """A finished process that ran *code* on this machine."""
        path = [str(ROOT), *([] if self.real else [str(STAND_IN)])]
        return subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
