"""Modules of PyTorch's that come along with functions live on the worker's GPU."""

import numpy as np
import pytest

import synkro as synk
from support.forked import TORCH

torch = pytest.importorskip("torch", reason="needs PyTorch (the extra torch)")

pytestmark = [pytest.mark.libraries, pytest.mark.loaded(TORCH)]


class Net(torch.nn.Module):
    """Counts how often it is moved; a make-believe GPU's tensors lie where the CPU's do."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3)
        self.register_buffer("shift", torch.full((3,), 0.5))
        self.moved = 0

    def forward(self, x):
        return self.norm(self.first(x)) + self.shift

    def _apply(self, fn, *args, **kwargs):
        self.moved += 1
        return super()._apply(fn, *args, **kwargs)


def places(model, x):
    """The devices of all that a model is made of."""
    return {tensor.device for tensor in (*model.parameters(), *model.buffers())} == {x.device}


@pytest.mark.parametrize("how", ["itself", "closure", "method", "nested"])
def test_modules_are_moved_when_they_arrive(machine, how):
    model = Net().eval()
    holder = {"deep": [model]}

    def check(model, x):
        assert model.moved
        assert places(model, x)
        return model(x)

    def nested(x: torch.Tensor):
        return check(holder["deep"][0], x)

    def closed(x: torch.Tensor):
        return check(model, x)

    fn = {"itself": model, "closure": closed, "method": model.forward, "nested": nested}[how]
    x = torch.randn(50, 4)
    with machine.session() as session:
        f = session.function(fn, outputs="gather", name="f")
        want = model(x).detach().numpy()
        np.testing.assert_allclose(f(x), want, atol=1e-5)
        assert not model.moved
        if how not in ("closure", "nested"):
            np.testing.assert_allclose(f.as_serial(x).detach().numpy(), want, atol=1e-5)
            assert not model.moved
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"cpu"}


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained before"])
def test_optimizers_keep_their_parameters(machine, trained):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    rows = torch.randn(64, 4)
    answers = rows.sum(dim=1, keepdim=True)

    def step(x: torch.Tensor, y: torch.Tensor):
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        held = {id(each) for group in optimizer.param_groups for each in group["params"]}
        assert held == {id(each) for each in model.parameters()}
        state = [each["exp_avg"].device for each in optimizer.state.values()]
        assert set(state) == {x.device}
        return loss.detach()

    if trained:
        for _ in range(3):
            step(rows, answers)
    with machine.session(["cuda:0"]) as session:
        train = session.function(step)
        there = [float(train(rows, answers)) for _ in range(30)]
    here = [float(step(rows, answers)) for _ in range(30)]
    np.testing.assert_allclose(there, here, rtol=1e-3)


def test_what_optimizers_remember_keeps_its_dtype(machine):
    """In place: who holds a group of parameters holds it afterwards, too."""

    class Odd(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    state.setdefault("master", torch.full((2,), 1 / 3, dtype=torch.float64))
                    state.setdefault("mask", torch.tensor([True, False]))
                    state.setdefault("nested", {"index": [torch.tensor(3)], "name": "fast"})
                    state.setdefault("numpy", np.arange(3))
                    state["step"] = torch.tensor(float(state.get("step", 0)) + 1)

    theta = torch.zeros(2, requires_grad=True)  # which no module has
    theta.grad = torch.ones(2)
    optimizer = Odd([theta], lr=0.5)
    optimizer.step()
    groups = optimizer.param_groups

    def look(x: torch.Tensor):
        assert optimizer.param_groups is groups
        assert groups[0]["params"][0] is theta
        state = optimizer.state[theta]
        moved = [theta, state["master"], state["mask"], state["nested"]["index"][0]]
        assert {each.device for each in moved} == {x.device}
        assert [state[key].dtype for key in ("master", "mask")] == [torch.float64, torch.bool]
        assert state["nested"]["index"][0].dtype == torch.int64
        assert state["nested"]["name"] == "fast"
        assert state["numpy"].tolist() == [0, 1, 2]
        assert state["step"].device.type == "cpu"
        optimizer.step()
        return (theta + x).sum()

    with machine.session(["cuda:0"]) as session:
        assert session.function(look, outputs="sum")(torch.ones(3, 2)) == 6


def test_modules_without_values_stay_so(machine):
    """As a form for `torch.func.functional_call`, whose values are arguments."""
    form = torch.nn.Linear(4, 2, device="meta")
    whole = torch.nn.Linear(4, 2)

    def run(params, x: torch.Tensor):
        return torch.func.functional_call(form, params, (x,))

    x = torch.randn(10, 4)
    with machine.session() as session:
        f = session.function(run, bcast_inputs=["params"], outputs="gather")
        got = f({name: p.detach() for name, p in whole.named_parameters()}, x)
    np.testing.assert_allclose(got, whole(x).detach().numpy(), atol=1e-5)


def test_a_module_that_cannot_be_moved_is_named(machine):
    class Fixed(torch.nn.Linear):
        def to(self, *args, **kwargs):
            raise RuntimeError("use .place() instead")

    fixed = Fixed(4, 2)
    with machine.session() as session:
        f = session.function(lambda x: fixed(x), outputs="gather")
        with pytest.raises(
            synk.SynkroError, match=r"the Fixed that .* cannot be moved to .*: use \.place"
        ):
            f(torch.randn(10, 4))


def test_where_pytorch_is_for_the_cpu_modules_stay_there(make_believe):
    """Functions make tensors of copies in host memory then."""
    model = torch.nn.Linear(4, 2, bias=False)

    def without_cuda():
        def refuse(array):
            raise AssertionError("Torch not compiled with CUDA enabled")

        import torch as real

        real.from_dlpack = refuse

    with make_believe.session(["cuda:0"]) as session:
        session.function(without_cuda, outputs=[])()
        f = session.function(
            lambda x: model(torch.as_tensor(x.get())).detach().numpy(), outputs="gather"
        )
        x = np.ones((3, 4), "f4")
        np.testing.assert_allclose(f(x), model(torch.as_tensor(x)).detach().numpy(), atol=1e-6)


def test_functions_that_share_a_module_share_the_moved_one(machine):
    model = torch.nn.Linear(4, 1, bias=False)

    def change(x: torch.Tensor):
        with torch.no_grad():
            model.weight += len(x)

    def look(x: torch.Tensor):
        return model.weight.sum()

    with machine.session(["cuda:0"]) as session:
        first = session.function(change, outputs=[])
        second = session.function(look, outputs="max")
        session.distribute()
        x = np.ones((3, 4), "f4")
        before = float(second(x))
        first(x)
        assert float(second(x)) == pytest.approx(before + 12, abs=1e-4)


def test_tensors_that_come_along_are_not_moved_and_that_is_said(machine):
    if not machine.real:
        pytest.skip("a make-believe GPU takes tensors of the CPU")
    weights = torch.ones(4)
    with machine.session(["cuda:0"]) as session:
        f = session.function(lambda x: torch.as_tensor(x) @ weights, outputs="gather")
        with pytest.raises(synk.WorkerError, match=r"make them arguments"):
            f(np.ones((3, 4), "f4"))


@pytest.mark.parametrize("slices", [1, 3])
def test_functions_of_jax_and_numba_get_arrays_that_they_take(machine, slices):
    machine.needs_jax()
    import jax

    numba = pytest.importorskip("numba", reason="needs numba")
    total = jax.jit(lambda x, y: {"x": (x * y["a"]).sum(), "y": y["b"].sum()})
    rows = np.arange(60, dtype="f4").reshape(20, 3)

    @numba.njit
    def longest(x):
        best = 0.0
        for row in x:
            best = max(best, (row * row).sum())
        return best

    with machine.session() as session:
        f = session.function(total, inputs=["x"], bcast_inputs=["y"], outputs="sum")
        g = session.function(longest, outputs="max")
        for x in (rows, session.data(rows), rows.astype(">f4")):
            found = f(x, {"a": 2.0, "b": np.ones(3, ">f4")}, num_slices=slices)
            assert found["x"] == 2 * rows.sum()
            assert found["y"] == 3 * 2 * slices
            assert g(x, num_slices=slices) == (rows[-1] ** 2).sum()
