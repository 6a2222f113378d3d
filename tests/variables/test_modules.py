"""Training steps of PyTorch's modules: those of one process, for any rows, workers and slices."""

import copy
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")
from torch import nn  # noqa: E402

import synkro as synk  # noqa: E402
from support.forked import TORCH  # noqa: E402
from support.sessions import per_rank  # noqa: E402
from synkro import InvalidType, InvalidValue, NotForked, WorkerError  # noqa: E402
from synkro import extensions as ext  # noqa: E402

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once, pytest.mark.loaded(TORCH)]

ROWS = torch.randn(67, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
TARGETS = (ROWS[:, 0] > ROWS[:, 1]).long() + (ROWS[:, 2] > 0)

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.05),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=0.01),
}


def network(dtype=torch.float64):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def batches(count=25, low=1, high=25):
    rng = np.random.default_rng(3)
    return [rng.permutation(67)[: rng.integers(low, high)] for _ in range(count)]


def alone(model, optimizer, rows, loss=nn.functional.cross_entropy):
    """A step in this process."""
    optimizer.zero_grad()
    value = loss(model(ROWS[rows]), TARGETS[rows])
    value.backward()
    optimizer.step()
    return value.item()


def check_alike(got, expected, tolerance=1e-9):
    for (name, one), (_, other) in zip(
        got.state_dict().items(), expected.state_dict().items(), strict=True
    ):
        assert torch.allclose(one, other, rtol=tolerance, atol=tolerance), name


def training(made, model=None):
    """A module, its twin, a step of the workers and one of this process; *made* makes optimizers."""
    model = model or network()
    mine = copy.deepcopy(model)
    optimizer, serial = (made(list(m.parameters())) for m in (model, mine))
    train = ext.make_train_function(model, nn.functional.cross_entropy, optimizer)
    return model, mine, train, partial(alone, mine, serial)


@pytest.mark.parametrize("slices", [1, 3])
@pytest.mark.parametrize("made", OPTIMIZERS)
def test_steps_are_those_of_one_process(n, made, slices):
    model, mine, train, step = training(OPTIMIZERS[made])
    before = copy.deepcopy(model)
    for rows in batches():  # also of fewer rows than workers
        loss = train(ROWS, TARGETS, batch=rows, num_slices=slices)
        assert np.isclose(loss, step(rows), rtol=1e-9)
    check_alike(synk.fetch(model), mine)
    check_alike(model, before, 0)  # it is the workers' that is trained
    copies = per_rank(lambda: [p.detach() for p in model.parameters()])
    for one in copies[1:]:
        assert all(map(np.array_equal, one, copies[0]))


def test_arrays_data_and_automatic_slices(two):
    model = network()
    train = ext.make_train_function(
        model, nn.functional.cross_entropy, torch.optim.SGD(model.parameters(), lr=0.0), name="own"
    )
    want = nn.functional.cross_entropy(model(ROWS), TARGETS).item()
    for x, y in [(ROWS, TARGETS), (ROWS.numpy(), TARGETS.numpy()), train.build_inputs(ROWS, TARGETS)]:
        assert np.isclose(train(x, y), want)
        assert np.isclose(train(x, y, num_slices="auto"), want)
    assert train.name == "own"


def test_a_rate_that_changes_and_weights_that_are_pushed(two):
    model = network()
    mine = copy.deepcopy(model)
    optimizer, serial = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, mine))
    train = ext.make_train_function(model, nn.functional.cross_entropy, optimizer)
    for rows in batches(6, low=5):
        train(ROWS, TARGETS, batch=rows)
        alone(mine, serial, rows)
        for each in (optimizer, serial):
            each.param_groups[0]["lr"] *= 0.5
    check_alike(synk.fetch(model), mine)
    synk.push(model)
    check_alike(synk.fetch(model), model, 0)


def test_outputs_beside_the_loss(two):
    def loss(scores, targets):
        right = (scores.argmax(1) == targets).double().mean()
        return nn.functional.cross_entropy(scores, targets), right

    model = network()
    train = ext.make_train_function(model, loss, torch.optim.SGD(model.parameters(), lr=0.1))
    value, right = train(ROWS, TARGETS)
    assert np.isclose(value, nn.functional.cross_entropy(model(ROWS), TARGETS).item())
    assert np.isclose(right, (model(ROWS).argmax(1) == TARGETS).double().mean())


class Branches(nn.Module):
    """One of its layers is for rows that begin with a positive number; one is for none."""

    def __init__(self):
        super().__init__()
        self.rest, self.positive, self.unused = (nn.Linear(4, 3).double() for _ in range(3))

    def forward(self, x):
        above = x[:, 0] > 0
        scores = self.rest(x)
        return scores + above[:, None] * self.positive(x) if above.any() else scores


def test_parameters_that_not_all_rows_use(n):
    torch.manual_seed(2)
    model, mine, train, step = training(partial(torch.optim.AdamW, lr=0.1), Branches())
    order = torch.argsort(ROWS[:, 0]).numpy()
    for rows in [order[:20], order[-40:], order[20:60], order[:9]]:
        assert np.isclose(train(ROWS, TARGETS, batch=rows), step(rows))
    check_alike(synk.fetch(model), mine)  # AdamW shrinks what has a gradient of zero, and no other
    assert torch.equal(synk.fetch(model).unused.weight, model.unused.weight)


def test_frozen_parameters_stay(two):
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = ext.make_train_function(model, nn.functional.cross_entropy, optimizer)
    train(ROWS, TARGETS)
    model[2].bias.requires_grad_(False)
    after = synk.fetch(model)
    train(ROWS, TARGETS)
    got = synk.fetch(model)
    assert torch.equal(got[0].weight, model[0].weight)
    assert torch.equal(got[2].bias, after[2].bias)
    assert not torch.equal(got[2].weight, after[2].weight)
    model[0].requires_grad_(True)
    with pytest.raises(WorkerError, match=r"call make_train_function\(\) again"):
        train(ROWS, TARGETS)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_other_dtypes(two, dtype):
    dtype = getattr(torch, dtype)
    model = network(dtype)
    mine = copy.deepcopy(model)
    optimizer, serial = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, mine))

    def loss(scores, targets):
        return nn.functional.cross_entropy(scores.float(), targets)

    class Cast(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x.to(dtype))

    train = ext.make_train_function(Cast(model), loss, optimizer)
    for _ in range(5):
        train(ROWS, TARGETS)
        serial.zero_grad()
        loss(mine(ROWS.to(dtype)), TARGETS).backward()
        serial.step()
    got = synk.fetch(model)
    assert got[0].weight.dtype is dtype
    check_alike(got.double(), mine.double(), 1e-6 if dtype is torch.float32 else 2e-2)


def test_as_serial_trains_the_module_here(two):
    model, mine, train, step = training(torch.optim.Adam)
    assert np.isclose(train.as_serial(ROWS, TARGETS).item(), step(slice(None)))
    check_alike(model, mine)


def test_a_step_is_made_on_all_ranks_or_on_none(three):
    model = network()

    def loss(scores, targets):
        assert synk.rank() != 1 or not failing.value, "on purpose"
        return nn.functional.cross_entropy(scores, targets)

    failing = synk.shared(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train = ext.make_train_function(model, loss, optimizer)
    mine = copy.deepcopy(model)
    serial = torch.optim.SGD(mine.parameters(), lr=0.1, momentum=0.9)
    for fails in (False, True, False):
        failing.set_value(fails)
        if fails:
            with pytest.raises(WorkerError, match="on purpose"):
                train(ROWS, TARGETS)
        else:
            train(ROWS, TARGETS)
            alone(mine, serial, slice(None))
    check_alike(synk.fetch(model), mine)


def test_losses_that_cannot_be(two):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in (lambda s, t: s, lambda s, t: 1.0, lambda s, t: s.detach().sum(), lambda s, t: ()):
        train = ext.make_train_function(model, loss, optimizer)
        with pytest.raises(WorkerError, match="a tensor without dimensions that depends on the param"):
            train(ROWS, TARGETS)


def test_bad_input(two):
    model, loss = network(), nn.functional.cross_entropy
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(network().parameters(), lr=0.1)
    for kind, arguments, options, message in (
        (InvalidType, (model, loss), {}, "must be an optimizer of PyTorch's.*got None"),
        (InvalidType, (model, loss, "sgd"), {}, "must be an optimizer of PyTorch's.*got 'sgd'"),
        (InvalidType, (model, "loss", sgd), {}, "loss must be a function of the module's output"),
        (InvalidType, (model, sgd, loss), {}, "loss must be a function"),
        (InvalidType, (model, loss, ROWS, sgd), {}, "inputs of a function of Python are named"),
        (InvalidType, (model, loss, sgd), {"givens": {}}, "givens=, which is for graphs of PyTensor"),
        (InvalidType, (model, loss, torch.optim.LBFGS(model.parameters())), {}, "LBFGS"),
        (InvalidValue, (model, loss, other), {}, "trains no parameter of the module"),
        (InvalidType, (model.forward, loss, sgd), {}, "must be an update rule"),
    ):
        with pytest.raises(kind, match=message):
            ext.make_train_function(*arguments, **options)


def test_before_fork():
    model = network()
    with pytest.raises(NotForked, match="no workers yet"):
        ext.make_train_function(model, nn.functional.mse_loss, torch.optim.SGD(model.parameters(), 0.1))
