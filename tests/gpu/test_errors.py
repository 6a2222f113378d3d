"""Errors of the device in the user's words; and functions that mix devices and hosts."""

import numpy as np
import pytest

import synkro as synk
from support.gpus import pools, serves
from support.waiting import Watch
from synkro import here
from synkro.controller.engine.engine import State
from synkro.errors import InvalidType

MB = 1 << 20


session = serves(pools("one", "two", "four", rarely=("one", "four")))


# ── out of memory ────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def small(make_believe):
    """``small(devices, megabytes)``: a session on GPUs that have so little memory."""

    def session(devices=("cuda:0", "cuda:1"), megabytes=16):
        make_believe.set(FAKE_CUDA_MEMORY=megabytes * MB)
        return make_believe.session(devices)

    return session


def test_out_of_memory_is_told_and_the_next_call_works(small):
    with small() as session:
        f = session.function(lambda x: (x * 2 + 1).sum(axis=0), outputs="sum")
        x = session.data(np.ones((4096, 1024)))  # 16 MB a rank, and twice for what is computed
        for _ in range(3):
            with Watch(), pytest.raises(synk.WorkerError) as caught:
                f(x)
            message = str(caught.value)
            assert "num_slices" in message
            assert "16.0 MB" in message  # what the device has
            assert "OutOfMemoryError" in message or "out of memory" in message.lower()
            assert (f(x, num_slices=32) == 3 * 4096).all()
        assert session.state is State.READY


def test_what_is_free_does_not_count_what_the_failed_call_held(small):
    with small(["cuda:0"]) as session:

        def f(x):
            kept = synk.xp().ones(MB)  # 8 MB, and 12 more do not fit
            return kept.sum() + synk.xp().ones(3 * MB // 2).sum()

        with pytest.raises(synk.WorkerError, match=r"16\.0 MB, of which 16\.0 MB are free now"):
            session.function(f, outputs="sum")(np.ones((4096, 64)))


def test_arrays_on_gpus_have_no_place_in_the_main_process(session):
    """What they would be is not to be seen here: CuPy never comes into this process."""

    class OnTheGpu:
        __cuda_array_interface__ = None
        shape, dtype = (3,), np.dtype("f8")

        def __array__(self, dtype=None, copy=None):
            raise TypeError("Implicit conversion to a NumPy array is not allowed. Use `.get()`.")

    f = session.function(lambda x: x.sum(), outputs="sum")
    for use in (f, session.data, session.shared, lambda x: session.data(np.ones(3)).set_value(x)):
        with pytest.raises(InvalidType, match=r"needs an array in host memory, .* with \.get\(\)"):
            use(OnTheGpu())
    with pytest.raises(InvalidType, match=r"batch is not a 1-d array of ints or bools: .*\.get"):
        f(np.ones(5), batch=OnTheGpu())


def test_writing_an_array_of_the_host_into_one_of_the_gpu(session):
    def f(x):
        y = x.copy()
        y[:] = np.zeros(y.shape)
        return y.sum()

    with pytest.raises(synk.WorkerError, match=r"take synkro\.xp\(\)\.asarray\(…\) of it first"):
        session.function(f, outputs="sum")(np.ones((40, 3)))


def test_out_of_memory_in_the_function(machine):
    with machine.session() as session:
        f = session.function(lambda: synk.xp().empty(1 << 46, "u1"), outputs="sum")
        g = session.function(lambda x: x.sum(), outputs="sum")
        for _ in range(2):
            with Watch(), pytest.raises(synk.WorkerError, match="num_slices") as caught:
                f()
            assert "70,368,744,177,664" in str(caught.value)  # how much was asked for
            assert g(np.ones(5)) == 5


def test_out_of_memory_says_what_arrays_hold(small):
    with small(["cuda:0"]) as session:
        w = session.shared(np.zeros(MB))  # 8 MB
        f = session.function(lambda: w.value.sum() + synk.xp().empty(2 * MB).sum(), outputs="sum")
        with pytest.raises(synk.WorkerError, match=r"8\.0 MB"):
            f()


def test_out_of_memory_while_a_collective_is_prepared(small):
    """Room for what is given, none for what is to come of it, on one rank."""

    def f():
        held = synk.xp().zeros(MB if synk.rank() else 1)
        synk.all_reduce(synk.xp().ones(3 * MB // 4), "sum")
        return held.sum()

    with small() as session:
        f = session.function(f, outputs="sum")
        one = session.function(lambda: synk.all_reduce(synk.xp().ones(3), "sum").sum(), outputs="max")
        for _ in range(3):
            with Watch(), pytest.raises(synk.WorkerError, match="num_slices") as caught:
                f()
            assert caught.value.rank == 1
            assert one() == 6


def test_a_variable_that_does_not_fit(small):
    with small(megabytes=4) as session:
        with pytest.raises(synk.SynkroError, match="memory") as caught:
            session.shared(np.zeros(MB))  # 8 MB
        assert "4.0 MB are free now" in str(caught.value)
        assert "num_slices" not in str(caught.value)  # where there is no call to slice
        w = session.shared(np.ones(1000))
        assert session.function(lambda: w.value.sum(), outputs="sum")() == 2000


# ── errors that last ─────────────────────────────────────────────────────────────────────────────


STICKY = ["cudaErrorIllegalAddress", "cudaErrorLaunchFailure", "cudaErrorAssert"]


@pytest.mark.parametrize("name", STICKY)
@pytest.mark.parametrize("culprit", [0, 1])
def test_an_error_that_lasts_is_the_workers_end(make_believe, name, culprit):
    def f(x, spoilt):
        if spoilt and synk.rank() == culprit:
            synk.xp().cuda.runtime.fail(name)
        return x.sum(axis=0)

    with make_believe.session(["cuda:0", "cuda:1"]) as session:
        f = session.function(f, outputs="sum", bcast_inputs=["spoilt"])
        x = session.data(np.ones((6, 2)))
        assert f(x, False).tolist() == [6, 6]
        with Watch(), pytest.raises(synk.WorkerDied, match=name) as caught:
            f(x, True)
        assert caught.value.rank == culprit
        assert session.state is State.BROKEN
        assert (x[:] == 1).all()


def test_a_lost_gpu_is_told_in_one_line(make_believe, capfd):
    """Objects of CuPy's that are destroyed then say nothing of it; other destructors are heard."""

    class Spoilt:
        def __del__(self):
            raise synk.xp().cuda.runtime.CUDARuntimeError(700)

    class Loud:
        def __del__(self):
            raise ValueError("a destructor of the program's")

    def f():
        synk.xp().cuda.runtime.fail("cudaErrorIllegalAddress")
        Spoilt(), Loud()

    with make_believe.session(["cuda:0"]) as session:
        f = session.function(f, outputs=[])
        with pytest.raises(synk.WorkerDied, match="lost its GPU"):
            f()
    said = capfd.readouterr().err
    assert "CUDARuntimeError:" not in said
    assert said.count("ValueError: a destructor of the program's") == 1
    assert said.count("lost its GPU") == 1


@pytest.mark.libraries
def test_a_function_of_jax_that_got_an_array_of_cupys_is_told_what_to_do(machine):
    machine.needs_jax()
    import jax

    def f(x):
        return jax.jit(lambda y: y.sum())(x)

    with machine.session(["cuda:0"]) as session, pytest.raises(synk.WorkerError) as caught:
        session.function(f, outputs="sum")(np.ones((30, 40, 5), "f4"))
    assert "def f(x: jax.Array)" in str(caught.value)
    assert "synkro.function(jax.jit(…))" in str(caught.value)
    assert "\n" not in str(caught.value).partition("Traceback")[0].strip()
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize("turns", [0, 1, 3], ids=["before", "between", "after"])
def test_an_error_that_lasts_near_collectives(make_believe, turns):
    def f():
        xp = synk.xp()
        for turn in range(4):
            if synk.rank() and turn == turns:
                xp.cuda.runtime.fail("cudaErrorIllegalAddress")
            if turn < 3:
                synk.all_reduce(xp.ones(1000), "sum")

    make_believe.set(FAKE_NCCL_VERSION=22800)
    for devices in (["cuda:0", "cuda:1"], ["cuda:0", "cuda:0"]):
        with make_believe.session(devices) as session:
            with Watch(), pytest.raises(synk.WorkerDied, match="cudaErrorIllegalAddress") as caught:
                session.function(f, outputs=[])()
            assert caught.value.rank == 1


def test_an_error_that_lasts_raised_and_caught(make_believe):
    """A function that swallows the error does not hide it: the next use of the device finds it."""

    def f():
        xp = synk.xp()
        xp.cuda.runtime.fail("cudaErrorIllegalAddress")
        try:
            xp.ones(3).sum()
        except xp.cuda.runtime.CUDARuntimeError:
            return 1
        return 2

    with make_believe.session(["cuda:0"]) as session:
        f = session.function(f, outputs="sum")
        with Watch(), pytest.raises(synk.WorkerDied, match="cudaErrorIllegalAddress"):
            [f() for _ in range(2)]


def test_an_error_that_passes_is_an_exception(machine):
    """Asking for a device that is not there spoils nothing."""

    def f():
        synk.xp().cuda.Device(99).use()

    with machine.session() as session:
        for _ in range(2):
            with Watch(), pytest.raises(synk.WorkerError, match="cudaErrorInvalidDevice"):
                session.function(f, outputs=[])()
            assert session.function(lambda x: x.sum(), outputs="sum")(np.ones(5)) == 5


def test_a_death_by_the_device_can_be_followed_by_fork(make_believe):
    for _ in range(2):
        synk.fork(devices="cuda", verbose=False, timeout=60)
        f = synk.function(lambda x: x.sum(), outputs="sum")
        assert f(np.ones(3)) == 3
        spoil = synk.function(lambda: synk.xp().cuda.runtime.fail(STICKY[0]), outputs=[])
        with pytest.raises(synk.WorkerDied):
            [call() for call in (spoil, lambda: f(np.ones(3)))]


# ── hosts and devices ────────────────────────────────────────────────────────────────────────────


def by_rank(x):
    y = x * 2
    return y.get() if here.rank.number % 2 else y


def by_slice(x):
    y = x * 2
    return y.get() if int(x[0, 0] * 100) % 2 else y


@pytest.mark.parametrize("op", ["mean", "sum", "prod", "max", "min", "gather", "keep", None])
@pytest.mark.parametrize(
    "fn", [by_rank, by_slice, lambda x: 2 * x.get()], ids=["rank", "slice", "always"]
)
def test_some_arrays_of_the_host_some_of_the_device(session, op, fn):
    """What one rank computes on its GPU another may have on its host; so may two slices."""
    reduced = op not in ("gather", "keep", None)
    f = session.function(lambda x: getattr(fn(x), op)(axis=0) if reduced else fn(x), outputs=op)
    for width in (2, 50_000):
        array = np.random.default_rng(0).uniform(0.4, 0.6, (4 * session.n_parallel + 1, width))
        want = getattr(2 * array, op)(axis=0) if reduced else 2 * array
        for slices in (1, 3):
            got = f(array, num_slices=slices)
            assert op in ("keep", None) or isinstance(got, np.ndarray)
            got = np.concatenate(got) if op is None else np.asarray(got)
            assert np.allclose(got, want, rtol=1e-12)


def test_python_numbers(session):
    f = session.function(
        lambda x: (len(x), float(x.sum()), bool(x.min() > 0), complex(len(x))),
        outputs=("sum", "sum", "min", "sum"),
    )
    array = np.arange(1.0, 14)
    for slices in (1, 2):
        assert f(array, num_slices=slices) == (13, 91, True, 13 + 0j)


def test_mixed_outputs(session):
    def f(x):
        return {"here": x.sum(axis=0), "there": x.get().sum(axis=0), "count": len(x), "rows": x}

    modes = {"here": "sum", "there": "sum", "count": "sum", "rows": "gather"}
    array = np.random.default_rng(0).standard_normal((11, 40_000))
    got = session.function(f, outputs=modes)(array, num_slices=2)
    assert np.allclose(got["here"], array.sum(axis=0))
    assert np.allclose(got["there"], array.sum(axis=0))
    assert got["count"] == 11
    assert np.array_equal(got["rows"], array)


def test_a_function_written_for_both_is_serial_here(session):
    def f(x):
        xp = synk.xp()
        return xp.exp(x).mean(axis=0), xp.stack([x, x], axis=1)

    array = np.random.default_rng(0).standard_normal((7, 3))
    g = session.function(f, outputs=("mean", "gather"))
    for one, other in zip(g(array), g.as_serial(array), strict=True):
        assert isinstance(one, np.ndarray)
        assert np.allclose(one, other)


def test_what_is_neither_is_refused(session):
    with pytest.raises((synk.OutputError, synk.WorkerError), match=r"str|text"):
        session.function(lambda x: "text")(np.ones(4))


# ── a debugger on the rank ───────────────────────────────────────────────────────────────────────────


def test_debug_opens_on_the_rank(session, n, monkeypatch, capfd):
    """The main process never touches a device: the function runs again where the rows are."""
    seen = []

    def work(x):
        seen.append(len(x))
        total = synk.all_reduce(1, op="sum")
        low = float(x.min())
        if low < 0:
            raise ValueError(low)
        return x.sum() * total

    f = session.function(work, outputs="sum")
    x = np.ones(4 * n)
    x[-1] = -7
    with pytest.raises(synk.WorkerError) as caught:
        f(x)
    lines = ["p low, int(total), synk.rank(), seen", "!seen.append(0)", "q"]
    monkeypatch.setattr("builtins.input", lambda prompt="": lines.pop(0))
    assert caught.value.replay() is None
    said = capfd.readouterr().out
    assert f"[rank {n - 1}] ValueError: -7.0" in said
    assert f"[rank {n - 1}] (-7.0, {n}, {n - 1}, [4, 4])" in said
    assert (
        session.function(lambda: len(seen), outputs="max")() == 1
    )  # and not what the replay made of it
    lines[:] = ["q"]
    synk.debug(caught.value)


def test_debug_of_a_task_opens_on_the_rank(session, monkeypatch, capfd):
    def task(item):
        half = synk.xp().ones(3) * item
        if item == 3:
            raise ValueError(float(half.sum()))
        return item

    with pytest.raises(synk.WorkerError) as caught:
        session.map(task, range(5))
    lines = ["p item", "q"]
    monkeypatch.setattr("builtins.input", lambda prompt="": lines.pop(0))
    caught.value.replay()
    assert "ValueError: 9.0" in capfd.readouterr().out
    assert not lines
