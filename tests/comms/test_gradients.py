"""The gradients of collectives: those of the sum of all ranks' losses, by central differences."""

import gc
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import synkro as synk  # noqa: E402
from support.arrays import OPS  # noqa: E402
from support.examples import examples, given, st  # noqa: E402
from support.failing import told  # noqa: E402
from support.forked import TORCH  # noqa: E402
from support.sessions import per_rank  # noqa: E402
from synkro import CollectiveError, InvalidType, InvalidValue, UsageError, WorkerError  # noqa: E402

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once, pytest.mark.loaded(TORCH)]

STEP = 1e-6


def numbers(seed, shape, dtype=torch.float64):
    """A tensor of numbers that differ."""
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def loss_of(outputs):
    """A number that depends on all elements of *outputs*, on each in another way; as on each rank."""
    total = torch.zeros((), dtype=torch.float64)
    for index, output in enumerate(outputs):
        real = torch.view_as_real(output) if output.is_complex() else output
        weights = numbers(100 * synk.rank() + index, real.shape)
        total = total + (weights * real).sum() + (real**2).sum() / 3
    return total


def reals(tensor):
    """All numbers in *tensor*, in its memory if it is contiguous."""
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def against_differences(program, *inputs):
    """On each rank, the largest error of the gradients of *program* beside central differences.

    *inputs* are this rank's; each element of them is moved on its own, on each rank.
    """
    inputs = [x.requires_grad_() for x in inputs]
    loss_of(program(*inputs)).backward()
    found = [x.grad for x in inputs]
    errors = [0.0]
    with torch.no_grad():
        flat, slope = ([reals(x) for x in each] for each in (inputs, found))
        places = [(f, s, k) for f, s in zip(flat, slope, strict=True) for k in range(len(f))]
        for rank, length in enumerate(synk.all_gather(len(places))):
            for number in range(length):
                losses = []
                for step in (STEP, -STEP):
                    mine = rank == synk.rank()
                    if mine:
                        place, gradient, k = places[number]
                        before = place[k].item()
                        place[k] = before + step
                    losses.append(synk.all_reduce(loss_of(program(*inputs)), "sum").item())
                    if mine:
                        place[k] = before
                if mine:
                    expected = (losses[0] - losses[1]) / (2 * STEP)
                    errors.append(abs(gradient[k].item() - expected) / max(1, abs(expected)))
    return max(errors)


def check(program, *shapes, dtype=torch.float64, seed=0):
    """Check *program*; *shapes* are those of its inputs, or functions of the rank that return them."""

    def run():
        made = [shape(synk.rank()) if callable(shape) else shape for shape in shapes]
        inputs = [numbers(seed + 7 * synk.rank() + i, s, dtype) for i, s in enumerate(made)]
        return against_differences(program, *inputs)

    assert max(per_rank(run)) < 1e-7


def rows(shape, *counts):
    """The shape of a rank's input, whose numbers of rows differ by rank."""
    return lambda rank: (counts[rank % len(counts)], *shape)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_all_reduce(n, op, shape):
    check(lambda x: [synk.all_reduce(x * 2, op)], shape)


@pytest.mark.parametrize("op", OPS)
def test_all_reduce_of_containers(n, op):
    def program(x, y):
        got = synk.all_reduce({"b": [x, 1.5], "a": (y.sin(), np.ones(2))}, op)
        assert type(got["b"][1]) is np.float64
        assert type(got["a"][1]) is np.ndarray
        return [got["a"][0], got["b"][0]]

    check(program, (2, 2), (3,))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("shape", [(0,), (1,), (3, 2), (7,)])
def test_reduce_scatter(n, op, shape):
    check(lambda x: [synk.reduce_scatter(x.exp(), op)], shape)


@pytest.mark.parametrize("name", ["all_reduce", "reduce_scatter"])
def test_weighted_means(n, name):
    def program(x):
        return [getattr(synk, name)(x**2, weight=synk.rank() if synk.size() > 1 else 2)]

    check(program, (5, 2))


@pytest.mark.parametrize("nd_up", [0, 1])
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_all_gather(n, nd_up, shape):
    check(lambda x: [synk.all_gather(x * x, nd_up)], shape)


@pytest.mark.parametrize("counts", [(0, 0, 0), (3, 2, 2), (1, 0, 4), (0, 5, 1)])
def test_unequal_rows(n, counts):
    check(lambda x: [synk.all_gather(x.cos())], rows((2,), *counts))
    check(lambda x: [synk.all_to_all(x.cos())], rows((2,), *counts))


@pytest.mark.parametrize("root", [0, -1])
@pytest.mark.parametrize("name", ["broadcast", "scatter"])
def test_from_a_root(n, root, name):
    def program(x):
        return [getattr(synk, name)(x * 3, root=root % synk.size())]

    check(program, (5, 2))


def test_others_than_the_root_may_give_anything(n):
    def run():
        x = torch.ones(4, 2, requires_grad=True) if synk.rank() == 0 else None
        total = torch.zeros(())
        for give in (synk.broadcast, synk.scatter):
            got = give(x, root=0)
            assert got.requires_grad
            total = total + (got * (1 + synk.rank())).sum()
        total = total + synk.broadcast(None if x is None else x.sum(), root=0)
        total.backward()
        return None if x is None else x.grad

    gradient = per_rank(run)[0]
    parts = np.repeat(np.arange(1, n + 1), [len(p) for p in np.array_split(np.arange(4), n)])
    want = sum(range(1, n + 1)) + parts[:, None] + n
    assert np.array_equal(gradient, np.broadcast_to(want, (4, 2)))


def test_exchange_with_gradients(n):
    def program(x):
        other = synk.size() - 1 - synk.rank()
        again = synk.exchange(x.sin(), other)
        return [synk.exchange(again * 2, other), again, synk.exchange(x, synk.rank())]

    check(program, rows((2,), 3, 1, 2))


@pytest.mark.parametrize("color", [None, lambda rank: rank % 2, lambda rank: rank // 2, lambda rank: 0])
def test_all_of_them_in_one_graph(n, color):
    """Of the ranks of the call, or of worlds of them."""

    def program(x, y):
        world = synk if color is None else synk.split(color(synk.rank()))
        last = world.size() - 1
        a = world.all_reduce(x @ y, "mean", weight=1 + synk.rank())
        b = synk.all_gather(torch.tanh(a * x.sum()))
        c = world.all_to_all(b[: 4 + synk.rank()] * y[0, 0])
        d = world.broadcast(c.sum(0), root=last)
        e = world.reduce_scatter(b * d, "prod")
        f = world.scatter(b + d, root=0)
        g = world.exchange(f, last - world.rank())
        h = synk.exchange(x.sin(), synk.size() - 1 - synk.rank())
        return [a, e, h, synk.all_reduce(world.all_reduce({"g": g.sum()}, "max")["g"], "sum")]

    check(program, (3, 2), (2, 3))


def test_a_backward_through_a_world_of_an_earlier_call(n):
    kept = []

    def run():
        if kept:
            kept[0].backward()
        kept.append(synk.split(0).all_reduce(torch.ones(1, requires_grad=True), "sum"))

    run = synk.function(run, outputs=[])
    run()
    with pytest.raises(UsageError, match="was made in another call"):
        run()


@pytest.mark.parametrize("op", ["mean", "sum", "prod"])
def test_complex_numbers(n, op):
    def program(z):
        return [synk.all_reduce(z * 1j, op), synk.reduce_scatter(z.conj(), op), synk.all_gather(z)]

    check(program, (3,), dtype=torch.complex128)


@examples(25)
@given(data=st.data())
def test_any_rows_and_operations(n, data):
    counts = data.draw(st.tuples(*[st.integers(0, 7)] * 3))
    size = data.draw(st.integers(0, 5))
    op = data.draw(st.sampled_from(OPS))
    weights = data.draw(st.tuples(*[st.integers(1, 3)] * 3))

    def program(x, y):
        options = {"weight": weights[synk.rank()]} if op == "mean" else {}
        scattered = synk.reduce_scatter(y, op, **options)
        both = synk.all_gather(x), synk.all_to_all(x)
        return [*both, synk.all_reduce(y * 2, op, **options), synk.all_gather(scattered)]

    check(program, rows((2,), *counts), (size,), seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("op", ["max", "min"])
def test_equals_share_the_gradient_of_an_extremum(n, op):
    def run():
        x = torch.tensor([1.0, 2.0, synk.rank(), float("nan")], requires_grad=True)
        synk.all_reduce(x, op).backward(torch.ones(4))
        y = x.detach().clone().requires_grad_()
        synk.reduce_scatter(y, op).sum().backward()
        assert torch.equal(x.grad, synk.size() * y.grad)
        return y.grad

    at = n - 1 if op == "max" else 0
    for rank, gradient in enumerate(per_rank(run)):
        assert np.allclose(gradient, [1 / n, 1 / n, rank == at, 1 / n])


def test_products_with_zeros(n):
    def run():
        rank, size = synk.rank(), synk.size()
        x = torch.tensor([1e-200, 0.0, 0.0 if rank == 0 else 2.0, 3.0], dtype=torch.float64)
        x.requires_grad_()
        synk.all_reduce(x, "prod").sum().backward()
        return x.grad / size  # of as many losses

    for rank, gradient in enumerate(per_rank(run)):
        others = 1e-200 ** (n - 1), float(n == 1), 2.0 ** (n - 1) if rank == 0 else 0.0, 3.0 ** (n - 1)
        assert np.allclose(gradient, others, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "complex64"])
def test_dtypes_stay(n, dtype):
    def run():
        x = torch.full((6, 2), 0.5, dtype=getattr(torch, dtype), requires_grad=True)
        kinds = [synk.all_reduce(x, op) for op in ("mean", "sum", "prod")]
        kinds += [synk.reduce_scatter(x), synk.all_gather(x), synk.all_to_all(x)]
        kinds += [synk.broadcast(x), synk.scatter(x), synk.exchange(x, synk.rank())]
        if not x.is_complex():
            kinds.append(synk.all_reduce(x, "max"))
        for kind in kinds:
            x.grad = None
            assert kind.dtype is x.dtype
            kind.abs().sum().backward()
            assert x.grad.dtype is x.dtype
        return 0

    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    assert per_rank(run) == [0] * n


def test_halves_do_not_overflow_in_a_mean(n):
    def run():
        x = torch.ones(2, dtype=torch.float16, requires_grad=True)
        synk.all_reduce(x).backward(torch.full((2,), 6e4, dtype=torch.float16))
        return x.grad

    for gradient in per_rank(run):
        assert np.allclose(gradient, 6e4, rtol=1e-3)


def test_views_and_steps(n):
    def program(x):
        turned = synk.all_reduce(x.T[::2], "sum")
        spread = synk.all_gather(x[:, :1].expand(-1, 3).flip(0))
        turned += 1  # in place: a result is an own tensor
        return [turned, spread.T[1:]]

    check(program, (4, 3))


# ── as a serial model ────────────────────────────────────────────────────────────────────────────────


def test_normalization_over_all_rows_is_the_serial_one(n):
    x = numbers(5, (7, 3))
    whole = x.clone().requires_grad_()
    ((whole - whole.mean(0)) / whole.std(0, correction=0)).pow(3).sum().backward()

    def gradient(x):
        mine = x.clone().requires_grad_()
        mean, square = synk.all_reduce([mine.mean(0), (mine**2).mean(0)], weight=len(mine))
        ((mine - mean) / (square - mean**2).sqrt()).pow(3).sum().backward()
        return mine.grad

    assert np.allclose(synk.function(gradient, outputs="gather")(x), whole.grad)
    assert np.allclose(synk.function(gradient, outputs="gather").as_serial(x), whole.grad)


def test_alone_every_collective_is_the_identity():
    x = numbers(3, (3, 2)).requires_grad_()

    def run():
        y = synk.all_gather(synk.all_to_all(synk.reduce_scatter(synk.all_reduce(x, "prod"), "max")))
        return synk.exchange(synk.scatter(synk.broadcast(y)), 0)

    with synk.Session(1, verbose=False) as session:
        y = session.function(run).as_serial()
    assert torch.equal(y, x)
    y.pow(2).sum().backward()  # after the function has returned: a rank alone waits for nobody
    assert torch.equal(x.grad, 2 * x)


# ── who records ──────────────────────────────────────────────────────────────────────────────────────


def test_without_gradients_nothing_is_recorded(n):
    def run():
        plain, wanted = torch.ones(3), torch.ones(3, requires_grad=True)
        kinds = [synk.all_reduce, synk.all_gather, synk.reduce_scatter, synk.all_to_all]
        found = [kind(x) for kind in kinds for x in (plain, wanted.detach())]
        with torch.no_grad():
            found += [kind(wanted) for kind in kinds]
            assert synk.reduce(wanted) is None or synk.rank() == 0
        with torch.inference_mode():
            found += [kind(wanted) for kind in kinds]
        return int(any(each.requires_grad for each in found))

    assert per_rank(run) == [0] * n


def test_one_rank_with_a_history_is_enough(three):
    def run():
        x = torch.ones(2, requires_grad=synk.rank() == 1)
        y = synk.all_reduce([x, torch.ones(2)], "sum")
        assert y[0].requires_grad
        assert not y[1].requires_grad
        (y[0] * (1 + synk.rank())).sum().backward()
        assert (x.grad is None) == (synk.rank() != 1)
        return 0.0 if x.grad is None else x.grad.sum()

    assert per_rank(run) == [0, 12, 0]


def test_gradients_by_autograd_grad_and_twice(n):
    def run():
        x = torch.ones(2, requires_grad=True)
        y = synk.all_reduce(x, "sum").square().sum()
        (first,) = torch.autograd.grad(y, [x], retain_graph=True)
        (second,) = torch.autograd.grad(y, [x])
        assert torch.equal(first, second)
        return first

    assert np.allclose(per_rank(run), 2 * n * n)


def test_backward_in_a_later_call(n):
    held = {}

    @synk.function(outputs=[])
    def forward():
        held["x"] = torch.ones(3, requires_grad=True)
        held["y"] = synk.all_reduce(held["x"], "sum")

    @synk.function(outputs=None)
    def backward():
        held["y"].sum().backward()
        return held["x"].grad

    forward()
    assert np.allclose(backward(), n)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_a_checkpoint_computes_a_collective_again_in_backward(n):
    from torch.utils.checkpoint import checkpoint

    def program(x):
        def block(x):
            return synk.all_reduce(x.sin(), "sum").cos()

        return [checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=True)]

    check(program, (3,))


def test_backward_in_a_thread_of_its_own(n):
    """As PyTorch computes those of tensors on GPUs: also a backward of one's own may use collectives."""

    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, gradient):
            assert threading.current_thread() is not threading.main_thread()
            return synk.all_reduce(gradient) + synk.rank() * 0

    def run():
        x = torch.full((3,), 1.0 + synk.rank(), requires_grad=True)
        loss = (synk.all_reduce(Mean.apply(x), "sum") * synk.rank()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        return x.grad

    assert np.allclose(per_rank(run), sum(range(n)))


def test_transformed_functions_are_refused(two):
    def run():
        torch.func.grad(lambda x: synk.all_reduce(x).sum())(torch.ones(2))

    with pytest.raises(WorkerError, match=r"take the gradient with backward\(\) or torch.autograd.grad"):
        synk.function(run, outputs=[])()


def test_nothing_is_kept_after_backward(two):
    def run():
        gc.disable()  # what lies in a circle would stay
        x, seen = torch.ones(1000, requires_grad=True), []
        for op in OPS:
            given = x * 2
            result = synk.all_reduce(given, op)
            seen += [weakref.ref(given), weakref.ref(result)]
            result.sum().backward()
            del given, result
        gc.enable()
        return sum(ref() is not None for ref in seen)

    assert per_rank(run) == [0, 0]


# ── what cannot be ───────────────────────────────────────────────────────────────────────────────────


def losses_of_different_collectives(r):
    x = ones()
    y, z = synk.all_reduce(x), synk.all_reduce(x)
    (y if r == 0 else z).sum().backward()


def a_loss_without_one(r):
    synk.barrier()
    y = synk.all_gather(ones())
    if r != 1:
        y.sum().backward()


def a_loss_of_one_more(r):
    y = synk.all_reduce(ones())
    z = synk.all_reduce(y * 2)
    (z if r == 0 else y).sum().backward()


def an_exchange_that_one_leaves_out(r):
    x = ones()
    y, z = synk.exchange(x, 2 - r), synk.exchange(x, 2 - r)
    (y if r == 0 else z).sum().backward()


def a_rank_without_gradients(r):
    with torch.set_grad_enabled(r != 1):
        synk.all_reduce(ones())


def a_rank_with_an_array(r):
    synk.all_reduce(ones(torch.float64) if r != 1 else np.ones(2))


def integers_for_floats(r):
    synk.exchange(ones() if r else torch.ones(2, dtype=torch.int64), 2 - r)


def ones(dtype=torch.float32):
    return torch.ones(2, dtype=dtype, requires_grad=True)


IN_THE_BACKWARD = (
    r"rank 0 is in all_reduce .* in the backward of all_reduce \(collective 1\), but rank 1 in "
    r"all_reduce .* in the backward of all_reduce \(collective 2\).*add 0 \* result.sum\(\)"
)
EXCHANGED = (
    r"exchange in the backward of exchange [12] of ranks 0 and 2, but rank [02] was in exchange in "
    r"the backward of exchange [12] of ranks 0 and 2"
)
WRONG = {  # where backward would not run everywhere, or not the same
    "reduce": (
        lambda r: r < 2 and synk.reduce(ones() * 2),
        r"reduce\(\) got a tensor .* use all_reduce\(\)",
        InvalidValue,
    ),
    "gather": (
        lambda r: r < 2 and synk.gather(ones() * 2),
        r"gather\(\) got a tensor .* use all_gather\(\)",
        InvalidValue,
    ),
    "send": (
        lambda r: r < 2 and synk.send(ones() * 2, 1 - r),
        r"send\(\) got a tensor .* use exchange\(\)",
        InvalidValue,
    ),
    "different": (losses_of_different_collectives, IN_THE_BACKWARD, CollectiveError),
    "none": (
        a_loss_without_one,
        r"rank 1 returned from the function without .* in the backward of all_gather \(collective 2\)",
        CollectiveError,
    ),
    "one more": (
        a_loss_of_one_more,
        r"in the backward of all_reduce \(collective 2\), but rank 1",
        CollectiveError,
    ),
    "exchange": (an_exchange_that_one_leaves_out, EXCHANGED, CollectiveError),
    "no_grad": (a_rank_without_gradients, r"this one is in torch.no_grad\(\)", UsageError),
    "array": (a_rank_with_an_array, "gave array.*give tensors on all ranks", InvalidType),
    "integers": (integers_for_floats, "got one of torch.int64.*give floats on both", InvalidType),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_ranks_may_not_do(three, what):
    told(*WRONG[what])


def test_backward_among_other_ranks(three):
    held = {}

    @synk.function(outputs=[])
    def forward():
        held["y"] = synk.all_reduce(torch.ones(3, requires_grad=True))

    @synk.function(outputs=[])
    def backward(x):
        held["y"].sum().backward()

    forward()
    message = r"came to a collective of the ranks \(0, 1, 2\) in a call of the ranks \(0, 1\)"
    with pytest.raises(WorkerError, match=message):
        backward(np.ones(2))


def test_gradients_of_gradients_are_refused(two):
    def run():
        x = torch.ones(2, requires_grad=True)
        y = synk.all_reduce(x).square().sum()
        (gradient,) = torch.autograd.grad(y, [x], create_graph=True)
        gradient.sum().backward()

    with pytest.raises(WorkerError, match="differentiate twice"):
        synk.function(run, outputs=[])()
