"""What only a real GPU has: kernels, memory that is really missing, other programs' view of it."""

import time

import numpy as np
import pytest

import synkro as synk
from support.gpus import environment, real_gpus
from support.leftovers import nothing_left
from support.waiting import Watch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def session():
    with environment("gpu"):
        session = on("cuda:0", "cuda:0")
    with session:
        yield session


@pytest.fixture
def own():
    with nothing_left(), environment("gpu"), on("cuda:0", "cuda:0") as session:
        yield session


def on(*devices):
    return synk.Session(devices=list(devices), verbose=False, timeout=60)


X = np.random.default_rng(0).standard_normal((1001, 32)).astype("f4")


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────


def elementwise(x):
    kind = synk.xp().ElementwiseKernel
    return kind("float32 x", "float32 y", "y = x * x + 1", "squared_and_one")(x)


def reduction(x):
    kind = synk.xp().ReductionKernel
    return kind("T x", "T y", "x * x", "a + b", "y = a", "0", "sum_of_squares")(x, axis=1)


SOURCE = r"""
extern "C" __global__ void square_and_one(const float* x, float* y, int n) {
    int i = blockDim.x * blockIdx.x + threadIdx.x;
    if (i < n) y[i] = x[i] * x[i] + 1;
}
"""


def launched(kernel, x):
    y = synk.xp().empty_like(x)
    kernel(((x.size + 127) // 128,), (128,), (x, y, np.int32(x.size)))
    return y


def raw_kernel(x):
    return launched(synk.xp().RawKernel(SOURCE, "square_and_one"), x)


def raw_module(x):
    return launched(synk.xp().RawModule(code=SOURCE).get_function("square_and_one"), x)


def fused(x):
    @synk.xp().fuse()
    def square_and_one(x):
        return x * x + 1

    return square_and_one(x)


@pytest.mark.parametrize("slices", [1, 5])
@pytest.mark.parametrize("fn", [elementwise, raw_kernel, raw_module, fused], ids=lambda f: f.__name__)
def test_kernels(session, fn, slices):
    got = session.function(fn, outputs="gather")(X, num_slices=slices)
    assert np.allclose(got, X * X + 1, rtol=1e-6)


def test_reductions_of_ones_own(session):
    got = session.function(reduction, outputs="gather")(X, num_slices=3)
    assert np.allclose(got, (X * X).sum(axis=1), rtol=1e-5)


def test_blas_and_random(session):
    def f(x, y):
        return x @ y, synk.xp().random.random(3) < 2

    product, _ = session.function(f, outputs=("gather", "max"), bcast_inputs=["y"])(X, X[:32])
    assert np.allclose(product, X @ X[:32], atol=1e-3)


# ── errors ───────────────────────────────────────────────────────────────────────────────────────


BAD = r"""
extern "C" __global__ void out_of_bounds(float* x) { x[1ull << 44] = 1; }
"""


def out_of_bounds():
    if synk.rank():
        xp = synk.xp()
        xp.RawKernel(BAD, "out_of_bounds")((1,), (1,), (xp.zeros(1, "f4"),))


def test_an_illegal_access_ends_the_worker(own):
    f = own.function(lambda x: x.sum(), outputs="sum")
    x = own.data(np.ones(9))
    assert f(x) == 9
    with Watch(), pytest.raises(synk.WorkerDied, match="cudaErrorIllegalAddress") as caught:
        [call() for call in (own.function(out_of_bounds, outputs=[]), lambda: f(x))]
    assert caught.value.rank == 1
    assert x[:].tolist() == [1] * 9


def test_an_illegal_access_before_a_collective(own):
    def f():
        out_of_bounds()
        synk.all_reduce(synk.xp().ones(1000))

    own.function(lambda: synk.all_reduce(synk.xp().ones(1000)), outputs=[])()
    with Watch(), pytest.raises(synk.WorkerDied, match="cudaErrorIllegalAddress"):
        own.function(f, outputs=[])()


# ── memory, and other devices ────────────────────────────────────────────────────────────────────


def test_slices_bound_the_device_memory(own):
    """2 GB of rows through at most 300 MB a rank."""

    def most(x):
        xp = synk.xp()
        return x.sum(), xp.get_default_memory_pool().total_bytes()

    x = own.data(np.ones((1 << 19, 1 << 9)))
    own.function(lambda: synk.xp().get_default_memory_pool().free_all_blocks(), outputs=[])()
    sum_, bytes_ = own.function(most, outputs=("sum", "max"))(x, num_slices=32)
    assert sum_ == x.size
    assert bytes_ < 300 << 20


def test_device_memory_comes_back_with_the_session(own):
    def free():
        return synk.xp().cuda.Device().mem_info[0]

    look = own.function(free, outputs="min")
    look()
    with on("cuda:0") as watcher:
        look = watcher.function(free, outputs="min")
        own.function(lambda: synk.xp().ones(1 << 28).sum(), outputs="sum")()  # 2 GB a rank
        before = look()
        own.close()
        deadline = time.monotonic() + 10
        while look() < before + (3 << 30) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert look() >= before + (3 << 30)


def test_other_devices_stay_untouched():
    """A worker on cuda:1 takes no memory on cuda:0, where another one watches."""
    with environment("gpu"):
        if real_gpus() < 2:
            pytest.skip("needs 2 GPUs")
        with on("cuda:0") as watcher:
            look = watcher.function(lambda: synk.xp().cuda.Device().mem_info[0], outputs="min")
            look()
            before = look()
            with on("cuda:1") as session:
                f = session.function(lambda x, y: (x * y).sum(), outputs="sum", bcast_inputs=["y"])
                for _ in range(3):
                    assert f(np.ones((10, 1000)), np.ones(1000)) == 10_000
                assert before - look() < 32 << 20
