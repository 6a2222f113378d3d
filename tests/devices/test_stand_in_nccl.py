"""The stand-in for NCCL: how it differs from NumPy, and what it does to those who misuse it.

That its operations compute what they should, the tests in gpu/ show.
"""

import functools
import gc
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from stand_in import loading
from support.together import good, together


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    """The stand-in, imported for this file alone."""
    folder = str(tmp_path_factory.mktemp("ranks"))
    settings = {"FAKE_CUDA_FOLDER": folder, "NCCL_RUNTIME_CONNECT": "0"}
    with loading.loaded(FAKE_CUDA_DEVICES="3", **settings) as cupy:
        yield cupy


@pytest.fixture
def cp(imported):
    """The stand-in; no memory stays behind."""
    yield imported
    gc.collect()
    assert imported.get_default_memory_pool().used_bytes() == 0


def ranks(cp, count, work, end="destroy"):
    """What `work(communicator, stream, rank)` returns on every rank, each a thread with its device."""
    nccl = cp.cuda.nccl
    name = nccl.get_unique_id()

    def rank(number):
        with cp.cuda.Device(number):
            communicator = nccl.NcclCommunicator(count, name, number)
            stream = cp.cuda.Stream(non_blocking=True)
            with stream:
                result = work(communicator, stream.ptr, number)
            if end is not None:
                getattr(communicator, end)()
            return result

    results = together(*[functools.partial(rank, number) for number in range(count)])
    assert not os.listdir(os.environ["FAKE_CUDA_FOLDER"])
    return good(results)


def place(array):
    """The address of an array."""
    return array.data.ptr


def test_the_order_of_a_sum_rotates(cp):
    parts = [np.full(3, value, np.float32) for value in (1e8, 1, -1e8)]

    def work(c, s, rank):
        mine = cp.asarray(parts[rank])
        c.allReduce(place(mine), place(mine), 3, 7, 0, s)
        return mine.tolist()

    assert ranks(cp, 3, work) == [[0, 0, 1]] * 3


def test_halves_and_what_is_no_number(cp):
    def work(c, s, rank):
        mine = cp.array([np.nan if rank else 2, 1 + rank], dtype=np.float16)
        largest, mean = cp.empty_like(mine), cp.empty(2, np.int32)
        c.allReduce(place(mine), place(largest), 2, 6, 2, s)
        whole = cp.array([-3, 3 + 2 * rank], dtype=np.int32)
        c.allReduce(place(whole), place(mean), 2, 2, 4, s)
        return largest.tolist() + mean.tolist()

    assert ranks(cp, 2, work) == [[2, 2, -3, 4]] * 2


def test_abort_releases_who_waits(cp):
    def work(c, s, rank):
        mine = cp.ones(2, np.float32)
        if rank == 0:
            c.allReduce(place(mine), place(mine), 2, 7, 0, s)
            event = cp.cuda.get_current_stream().record()
            assert not event.done
            c.abort()
            event.synchronize()
            with pytest.raises(cp.cuda.nccl.NcclError, match="INVALID_ARGUMENT"):
                c.rank_id()
        else:
            c.abort()
        return mine.tolist()

    assert ranks(cp, 2, work, end=None) == [[1, 1]] * 2


def test_a_mismatch_spoils_all_ranks(cp, capsys):
    def work(c, s, rank):
        mine = cp.ones(4, np.float32)
        c.allReduce(place(mine), place(mine), 3 + rank, 7, 0, s)
        try:
            while c.check_async_error() is None:
                pass
        except cp.cuda.nccl.NcclError as error:
            return error.status

    assert ranks(cp, 2, work, end="abort") == [5, 5]
    assert "does not match" in capsys.readouterr().err


def test_errors_without_a_name(cp):
    for status in (7, 8):
        with pytest.raises(KeyError):
            cp.cuda.nccl.NcclError(status)


@pytest.mark.parametrize("setting", ["0", "1"])
def test_ranks_that_are_not_connected_wait_for_each_other_in_c(cp, monkeypatch, setting):
    """Messages connect their ranks when they are first sent, collectives only where that is set."""
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", setting)
    arrived = threading.Event()

    def work(c, s, rank):
        mine = cp.ones(2, np.float32)
        if rank:
            arrived.wait()
        elif setting == "1":
            threading.Timer(0.05, arrived.set).start()
        c.allReduce(place(mine), place(mine), 2, 7, 0, s)
        waited = arrived.is_set()
        arrived.set()
        getattr(c, "recv" if rank else "send")(place(mine), 2, 7, 1 - rank, s)
        return waited

    assert ranks(cp, 2, work) == [setting == "1", True]


def test_within_a_group_nothing_is_left(cp):
    def work(c, s, rank):
        mine = cp.ones(2, np.float32)
        cp.cuda.nccl.groupStart()
        c.allReduce(place(mine), place(mine), 2, 7, 0, s)
        c.abort()
        assert c.rank_id() == rank
        cp.cuda.nccl.groupEnd()
        with pytest.raises(cp.cuda.nccl.NcclError, match="INVALID_ARGUMENT"):
            c.rank_id()
        return mine.tolist()

    assert ranks(cp, 2, work, end=None) == [[1, 1]] * 2


def test_one_device_for_two_ranks(cp, monkeypatch):
    nccl = cp.cuda.nccl

    def outcome():
        name = nccl.get_unique_id()

        def rank(number):
            try:
                nccl.NcclCommunicator(2, name, number).destroy()
            except nccl.NcclError as error:
                return error.status
            return 0

        return together(*[functools.partial(rank, number) for number in range(2)])

    assert outcome() == [5, 5]
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert outcome() == [0, 0]
    monkeypatch.setenv("FAKE_NCCL_VERSION", "22900")
    assert outcome() == [5, 5]
    monkeypatch.setenv("FAKE_NCCL", "broken")
    assert outcome() == [2, 2]
    assert not os.listdir(os.environ["FAKE_CUDA_FOLDER"])


def test_two_processes_of_which_one_never_asks(tmp_path):
    """A device works on its own: what one process has issued must not wait for its next call."""
    code = """if True:
        import sys, time, cupy
        from cupy.cuda import nccl
        name, rank = bytes.fromhex(sys.argv[1]), int(sys.argv[2])
        comm = nccl.NcclCommunicator(2, name, rank)
        x = cupy.full(1000, rank + 1, cupy.float64)
        for _ in range(3):
            comm.allReduce(x.data.ptr, x.data.ptr, x.size, nccl.NCCL_FLOAT64, nccl.NCCL_SUM, 0)
        print("issued", flush=True)
        if rank == 0:
            sys.stdin.read()
        print(x.get()[-1], flush=True)
        comm.destroy()
    """
    env = {**os.environ, "PYTHONPATH": str(loading.FOLDER), "FAKE_CUDA_FOLDER": str(tmp_path)}
    env["FAKE_CUDA_DEVICES"] = "2"
    name = os.urandom(128).hex()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, name, str(rank)],
            env={**env, "CUDA_VISIBLE_DEVICES": str(rank)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    assert processes[0].stdout.readline() == "issued\n"
    assert processes[1].stdout.read() == "issued\n12.0\n"
    assert processes[0].communicate(timeout=20)[0] == "12.0\n"
    processes[1].communicate(timeout=20)
    assert os.listdir(tmp_path) == []
