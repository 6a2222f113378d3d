"""Choosing GPUs, starting on them, what is said about it, and what is left when it ends."""

import re
import sys

import numpy as np
import pytest

import synkro as synk
from support.gpus import EVERY, settled, started
from support.leftovers import children, descriptors
from support.waiting import wait_until
from synkro import here
from synkro.controller.placement.choice import choose
from synkro.devices import gpus

MB = 1 << 20


def where():
    """The stand-in's device that this worker is on, as the machine counts them."""
    runtime = synk.xp().cuda.runtime
    address = runtime.deviceGetPCIBusId(runtime.getDevice())
    return ["0000:00:1B.0", "0000:00:1C.0", "0000:00:1D.0"].index(address)


def places(session):
    """Where each rank is."""
    return session.function(where, outputs=None)()


def total(session):
    return session.function(lambda x: x.sum(), outputs="sum")(np.ones(7))


# ── which devices ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("devices", "by_environment", "want"),
    [
        (None, None, [0, 1, 2]),
        (["cuda:2", "cuda:0", "cuda2"], None, [2, 0, 2]),
        (None, "a->cuda:2; b->cuda2", [2, 2]),
    ],
)
def test_workers_are_on_the_devices_that_were_chosen(make_believe, devices, by_environment, want):
    make_believe.set(FAKE_CUDA_DEVICES=3, SYNKRO_DEVICES=by_environment)
    assert synk.fork(devices=devices, verbose=False, timeout=60) == len(want)
    assert places(here.session) == want
    assert total(here.session) == 7


@pytest.mark.parametrize(
    ("visible", "devices", "want"),
    [
        ("2,0", None, [2, 0]),
        ("2,0", "cuda:1", [0]),
        ("1", "cuda", [1]),
    ],
)
def test_hidden_and_reordered_devices(make_believe, visible, devices, want):
    make_believe.set(FAKE_CUDA_DEVICES=3, CUDA_VISIBLE_DEVICES=visible)
    synk.fork(devices=devices, verbose=False, timeout=60)
    assert places(here.session) == want
    assert total(here.session) == 7


def test_a_number_of_workers(make_believe):
    make_believe.set(FAKE_CUDA_DEVICES=3)
    assert synk.fork(2, verbose=False) == 2
    assert places(here.session) == [0, 1]
    synk.close()
    with pytest.raises(synk.InvalidValue, match="3 GPUs") as caught:
        synk.fork(4, verbose=False)
    assert "more than once" in str(caught.value)
    with pytest.raises(synk.InvalidValue, match="lists 1 device:"):
        synk.fork(2, devices=["cuda:0"], verbose=False)
    with pytest.raises(synk.InvalidValue, match=r"preallocate.*0 to 1"):
        synk.fork(devices="cuda", preallocate=1.5, verbose=False)
    assert not children()


def test_two_sessions_side_by_side(machine):
    with (
        machine.session(["cuda:0"]) as one,
        machine.session() as other,
        synk.Session(1, devices="cpu", verbose=False, timeout=60) as cpu,
    ):
        f = [s.function(lambda x: x.sum(axis=0), outputs="sum") for s in (one, other, cpu)]
        for _ in range(5):
            for g in f:
                assert g(np.ones((5, 3))).tolist() == [5, 5, 5]
        one.close()
        assert f[1](np.ones((5, 3))).tolist() == [5, 5, 5]
        assert f[2](np.ones((5, 3))).tolist() == [5, 5, 5]


# ── where there is no GPU, or half of one ────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"FAKE_CUDA_DEVICES": 0}, "cudaErrorNoDevice|no GPU"),
        ({"CUDA_VISIBLE_DEVICES": ""}, "cudaErrorNoDevice|no GPU"),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, "cudaErrorNoDevice|no GPU"),
        ({"FAKE_CUDA_DRIVER": "old"}, r"driver is too old .* CUDA 11\.4, CuPy of 12\.9"),
        ({"FAKE_CUDA_DRIVER": "none"}, "finds no CUDA driver .* nvidia-smi"),
    ],
)
def test_no_gpu(make_believe, environment, words):
    make_believe.set(**environment)
    for devices in ("cuda", "cuda:0", ["cuda:0"], "a->cuda0"):
        with pytest.raises(synk.NotAvailable, match=words):
            synk.fork(devices=devices, verbose=False)
    assert {each.device for each in choose(None, None, None)} == {"cpu"}  # as nobody asked for more


@pytest.mark.parametrize(("there", "devices"), [(0, None), (2, "cpu")])
def test_cpus_compute_with_numpy(make_believe, there, devices):
    """Where there is no GPU, and for who asks for CPUs."""
    make_believe.set(FAKE_CUDA_DEVICES=there)
    assert synk.fork(devices=devices, verbose=False) >= 1
    f = synk.function(lambda x: int(isinstance(x, np.ndarray) and synk.xp() is np), outputs="min")
    assert f(np.ones(4)) == 1


@pytest.mark.parametrize("broken", [False, True])
def test_no_cupy(make_believe, monkeypatch, tmp_path, broken):
    says = r"libnvrtc\.so\.12 is missing" if broken else "CuPy"
    if broken:
        (tmp_path / "cupy").mkdir()
        (tmp_path / "cupy" / "__init__.py").write_text("raise ImportError('libnvrtc.so.12 is missing')")
        monkeypatch.syspath_prepend(tmp_path)
    else:
        sys.path.remove(next(path for path in sys.path if path.endswith("stand_in")))
        if gpus.visible().gpus:
            pytest.skip("CuPy is installed here")
    with pytest.raises(synk.NotAvailable, match=says):
        synk.fork(devices="cuda", verbose=False)
    assert synk.fork(1, verbose=False) == 1


@pytest.mark.parametrize("nccl", ["none", "broken"])
def test_without_nccl_all_goes_through_host_memory(make_believe, capfd, nccl):
    make_believe.set(FAKE_NCCL=nccl)
    assert synk.fork(devices="cuda", timeout=60) == 2
    large = np.random.default_rng(0).standard_normal((5, 60_000))
    f = synk.function(lambda x: (x.sum(axis=0), x.max()), outputs=("sum", "max"))
    for given in (large, large[:, :3]):
        column, peak = f(given)
        assert np.allclose(column, given.sum(axis=0))
        assert peak == given.max()
    w = synk.shared(np.ones(1000))
    g = synk.function(lambda: synk.all_reduce(synk.xp().ones(5), "sum").sum(), outputs=None)
    assert g() == [10, 10]
    synk.all_reduce(w, "sum")
    assert (w.get_value() == 2).all()
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "host memory" in line]
    assert "NCCL" in line


def test_one_gpu_needs_no_nccl(make_believe, capfd):
    make_believe.set(FAKE_NCCL="none", FAKE_CUDA_DEVICES=1)
    assert synk.fork(timeout=60) == 1
    assert total(here.session) == 7
    assert "host memory" not in capfd.readouterr().err


# ── what is said ─────────────────────────────────────────────────────────────────────────────────


def test_status_lines(make_believe, capfd):
    make_believe.set(FAKE_CUDA_MEMORY=64 * MB)
    synk.fork(devices="dev0->cuda1;dev1->cuda0", preallocate=0.5)
    assert total(here.session) == 7
    said = capfd.readouterr().err
    assert "2 of 2 detected GPUs" in said
    assert re.search(r"dev0.*cuda1.*Stand-in \(0000:00:1C\.0\)", said)
    assert re.search(r"dev1.*cuda0.*Stand-in \(0000:00:1B\.0\)", said)
    assert re.search(r"32/64 MB \(0\.500\) on cuda1", said)
    assert re.search(r"2 GPU workers initialized, master rank: 0", said)
    synk.close()
    synk.fork(devices="cuda", verbose=False)
    synk.close()
    assert capfd.readouterr().err == ""


def test_status_lines_without_names(machine, capfd):
    synk.fork(devices=["cuda:0"])
    said = capfd.readouterr().err
    assert re.search(r"cuda0.*\([\dA-Fa-f]{4,8}:[\dA-Fa-f]{2}:[\dA-Fa-f]{2}\.[0-7]\)", said)


@pytest.mark.parametrize(
    ("devices", "version", "says"),
    [
        ([0, 0], 22800, "as NCCL 2.28 takes one rank a GPU, 2.30 takes two"),
        ([0, 0], 23203, ""),
        ([0, 0, 1], 23203, ""),
        ([1, 0, 0, 0], 23203, "as NCCL may lock up with more than two ranks on one GPU, and one has 3"),
    ],
)
def test_several_ranks_on_a_gpu(make_believe, capfd, devices, version, says):
    make_believe.set(FAKE_NCCL_VERSION=version)
    with make_believe.session([f"cuda:{index}" for index in devices], verbose=True) as session:
        assert total(session) == 7
        f = session.function(lambda: synk.all_reduce(synk.xp().ones(3), "sum"), outputs="max")
        assert f().tolist() == [len(devices)] * 3
    said = capfd.readouterr().err
    assert ("through host memory" in said) == bool(says)
    assert says in said


# ── memory that is taken at once ─────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fraction", [0, 0.7])
def test_preallocation(make_believe, fraction):
    def taken():
        return synk.xp().get_default_memory_pool().total_bytes()

    make_believe.set(FAKE_CUDA_MEMORY=100 * MB)
    with make_believe.session(["cuda:0", "cuda:1"], preallocate=fraction) as session:
        for bytes_ in session.function(taken, outputs=None)():
            assert fraction * 100 * MB * 0.99 <= bytes_ <= fraction * 100 * MB * 1.01 + MB
        assert total(session) == 7
        f = session.function(lambda x: x.sum(axis=0), outputs="sum")
        assert (f(np.ones((8, 100_000))) == 8).all()


def test_preallocation_of_a_part(machine):
    def taken():
        xp = synk.xp()
        return xp.get_default_memory_pool().total_bytes() / xp.cuda.Device().mem_info[1]

    with machine.session(["cuda:0"], preallocate=0.05) as session:
        assert 0.045 < session.function(taken, outputs="max")() < 0.06


# ── nothing touched, nothing left ────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pool", [param for param in EVERY if param.id.startswith("stand-in")])
def test_every_rank_is_on_its_own_device_only(pool):
    def contexts():
        return np.array(synk.xp().cuda.runtime.contexts())

    with settled(pool) as devices, started(pool, devices) as session:
        f = session.function(lambda x, y: (x * y).sum(axis=0), outputs="sum", bcast_inputs=["y"])
        f(np.ones((50, 50_000)), np.ones(50_000), num_slices=3)
        f(np.ones((50, 500)), np.ones(500), batch=[3, 1, 2, 0])
        w = session.shared(np.ones(100_000))
        session.all_reduce(w, "sum")
        found = session.function(contexts, outputs=None)()
        assert [each.tolist() for each in found] == [[int(device[-1])] for device in devices]


def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096


def test_many_sessions_leave_nothing(machine):
    def cycle():
        with machine.session(["cuda:0"]) as session:
            assert total(session) == 7
            x = session.data(np.ones((10, 1000)))
            assert session.function(lambda x: x.sum(), outputs="sum")(x) == 10_000

    for _ in range(2):
        cycle()
    before = resident(), len(descriptors()), len(children())
    for _ in range(5):
        cycle()
    assert wait_until(lambda: len(children()) == before[2])
    assert len(descriptors()) == before[1]
    assert resident() - before[0] < 8 * MB


def test_many_calls_do_not_grow(machine):
    def device():
        return synk.xp().get_default_memory_pool().total_bytes()

    with machine.session() as session:
        f = session.function(lambda x, y: (x * y).sum(axis=0), outputs="sum", bcast_inputs=["y"])
        g = session.function(lambda: synk.all_reduce(synk.xp().ones(1000)).sum(), outputs=[])
        memory = session.function(lambda: (resident(), device()), outputs=("max", "max"))
        x, y = session.data(np.ones((64, 1000))), session.data(np.ones(1000))

        def many():
            for turn in range(150):
                f(x, y, num_slices=1 + turn % 3)
                y[0] = turn
                g()

        many()
        before = memory()
        many()
        many()
        after = memory()
        assert after[1] == before[1]
        assert after[0] - before[0] < 4 * MB
