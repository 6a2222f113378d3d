"""Device memory stays bounded, and pinned memory is let go of before it goes."""

import numpy as np
import pytest

import synkro as synk
from support.gpus import mapped_as_pinned

MB = 1 << 20
DIRTY = ("stand-in for CUDA", "Traceback", "Error", "Warning")


def used():
    """Bytes of device memory that this worker's arrays hold."""
    return synk.xp().get_default_memory_pool().used_bytes()


def peak(x):
    """The most device memory that was held when a slice began, and its sum."""
    xp = synk.xp()
    return x.sum(), xp.get_default_memory_pool().total_bytes()


# ── more data than memory ────────────────────────────────────────────────────────────────────────


def small(machine, nbytes=8 * MB):
    machine.set(FAKE_CUDA_MEMORY=nbytes)
    return machine.session(["cuda:0", "cuda:1"])


@pytest.mark.parametrize("kind", ["array", "file", "reversed", "indices"])
def test_inputs_larger_than_the_device_in_slices(make_believe, tmp_path, kind):
    array = np.ones((4096, 1024))  # 32 MB, 16 a rank, for devices of 8
    batch = {
        "reversed": slice(None, None, -1),
        "indices": np.random.default_rng(0).permutation(4096),
    }.get(kind)
    with small(make_believe) as session:
        f = session.function(peak, outputs=("sum", "max"))
        given = array
        if kind == "file":
            np.save(tmp_path / "a.npy", array)
            given = np.load(tmp_path / "a.npy", mmap_mode="r")
        if kind != "array":
            given = session.data(given)
        for turn in range(3):
            if turn == 2 and kind != "reversed":
                with pytest.raises(synk.WorkerError, match="num_slices"):
                    f(given, batch=batch)
            sum_, most = f(given, batch=batch, num_slices=16)
            assert sum_ == array.size
            assert turn == 2 or most <= 4 * MB  # two buffers of 1 MB, and something for the sums


@pytest.mark.parametrize("op", ["gather", None, "keep"])
def test_large_outputs_of_slices_do_not_need_the_inputs_memory(make_believe, op):
    """Results of 4 MB a rank beside inputs of 16 MB, on 8 MB."""
    array = np.arange(4096.0 * 1024).reshape(4096, 1024)
    with small(make_believe, 12 * MB) as session:
        f = session.function(lambda x: x[:, ::4].copy(), outputs=op)
        x = session.data(array)
        for _ in range(2):
            result = f(x, num_slices=32)
            result = np.concatenate(result) if op is None else np.asarray(result)
            assert np.array_equal(result, array[:, ::4])
            del result


def calls(session):
    f = session.function(lambda x, y: (x * y).sum(axis=0), outputs="sum", bcast_inputs=["y"])
    g = session.function(lambda x: x, outputs="gather")
    x, y = session.data(np.ones((100, 1000))), session.data(np.ones(1000))
    while True:
        f(x, y, num_slices=3)
        f(np.ones((7, 1000)), np.ones(1000))
        g(x)
        yield


def calls_that_fail(session):
    def fail(x):
        more = x * 2
        raise ValueError(more.shape)

    f, x = session.function(fail), session.data(np.ones((1024, 1024)))
    while True:
        with pytest.raises(synk.WorkerError):
            f(x, num_slices=2)
        yield


def variables_of_the_past(session):
    for value in range(9):
        w = session.shared(np.full(MB // 8, float(value)))
        assert session.function(lambda w=w: w.value.sum(), outputs="min")() == value * MB // 8
        del w
        yield


@pytest.mark.parametrize("done", [calls, calls_that_fail, variables_of_the_past])
def test_nothing_keeps_memory_in_use(machine, done):
    with machine.session() as session:
        held = session.function(used, outputs=None)
        turns = done(session)
        levels = [max(held()) for _ in range(6) if next(turns) is None]
        turns.close()
        assert levels[-1] <= levels[1], levels
        assert levels[-1] < (4 * MB if done is variables_of_the_past else MB)


def test_kept_outputs_are_let_go_of(machine):
    with machine.session() as session:
        keep = session.function(lambda x: x + 1, outputs="keep")
        held = session.function(used, outputs="max")
        x = session.data(np.ones((1024, 1024)))
        handles = [keep(x) for _ in range(3)]
        assert held() >= 12 * MB
        before = held()
        del handles[1:]
        keep(x)  # the workers hear of it with a later command
        assert held() <= before - 4 * MB
        assert np.asarray(handles[0])[0, 0] == 2


# ── pinned memory ────────────────────────────────────────────────────────────────────────────────


def test_data_that_grow_shrink_and_go(machine):
    with machine.session() as session:
        f = session.function(lambda x, y: (x.sum(axis=0) + y).sum(), outputs="sum", bcast_inputs=["y"])
        for turn in range(8):
            x, y = session.data(np.ones((4, 3))), session.data(np.zeros(3))
            assert f(x, y) == 12
            x.set_length(4 + 1000 * turn)
            x[:] = 1
            assert f(x, y, num_slices=2) == 3 * len(x)
            x.free_memory()
            x.set_value(np.ones((2, 3)))
            assert f(x, y) == 6
            x.set_shape((500, 3))
            x[:] = 2
            assert f(x, y) == 3000
            if turn % 2:
                del x
            assert mapped_as_pinned(session)


def test_large_results_come_and_go(machine):
    with machine.session() as session:
        f = session.function(lambda x: x * 2, outputs="gather")
        held = []
        for turn in range(12):
            array = np.full((300 + 50 * turn, 1000), float(turn))
            held.append((array, f(array)))
            del held[: turn % 3]
            assert mapped_as_pinned(session)
        for array, result in held:
            assert np.array_equal(result, array * 2)


PROGRAM = """
import numpy as np
import synkro as synk

synk.fork(devices=["cuda:0", "cuda:0"], verbose=False, timeout=60)
f = synk.function(lambda x, y: (x * y).sum(axis=0), outputs="sum", bcast_inputs=["y"])
g = synk.function(lambda x: x, outputs="gather")
x, y = synk.data(np.ones((8, 50_000))), synk.data(np.ones(50_000))
w = synk.shared(np.zeros(50_000))
h = synk.function(lambda: synk.all_reduce(w, "sum").value.sum(), outputs="max")
for turn in range(5):
    f(x, y, num_slices=2), g(x), h()
    x.set_length(8 + turn * 100)
    if turn == 3:
        x.free_memory()
        x.set_value(np.ones((8, 50_000)))
    x[:] = 1
    w.set_value(np.ones(50_000))
assert (f(x, y) == len(x)).all()
{end}
"""


@pytest.mark.parametrize("end", ["", "synk.close(); synk.fork(devices='cuda:0')"])
def test_nothing_is_said_at_the_end(machine, end):
    done = machine.python(PROGRAM.format(end=end))
    assert done.returncode == 0, done.stderr
    assert not any(word in done.stderr for word in DIRTY), done.stderr
    if "fork" not in end:
        assert done.stderr == ""
        assert done.stdout == ""
