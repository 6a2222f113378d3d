"""Functions that use JAX, PyTorch or numba: their arrays come out, their settings go in."""

import numpy as np
import pytest

ROWS = np.random.default_rng(0).standard_normal((101, 5))


class TestJax:
    @pytest.fixture(autouse=True)
    def wide(self):
        jax = pytest.importorskip("jax", reason="needs JAX (the extra jax)")
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", True)
        yield
        jax.config.update("jax_enable_x64", before)

    def test_a_compiled_gradient_in_the_precision_of_the_main_process(self, session):
        import jax

        loss = jax.jit(lambda w, x: ((x @ w) ** 2).mean())
        gradient = jax.jit(jax.grad(loss))
        f = session.function(gradient, inputs=["x"], bcast_inputs=["w"], name="gradient")
        got = f(np.arange(5.0), ROWS)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, gradient(np.arange(5.0), ROWS))

    def test_nested_outputs(self, session):
        def nested(x):
            import jax.numpy as jnp

            return {"sum": jnp.sum(x, axis=0), "extremes": (x.max(), [jnp.min(x)])}

        spec = {"sum": "sum", "extremes": ("max", ["min"])}
        got = session.function(nested, outputs=spec)(ROWS)
        np.testing.assert_allclose(got["sum"], ROWS.sum(axis=0))
        assert got["extremes"] == (ROWS.max(), [ROWS.min()])


class TestTorch:
    @pytest.fixture(autouse=True)
    def there(self):
        pytest.importorskip("torch", reason="needs PyTorch (the extra torch)")

    def test_outputs_lose_their_history(self, session):
        def loss(x, w):
            import torch

            parameter = torch.tensor(w, requires_grad=True)
            value = ((torch.tensor(x) @ parameter) ** 2).mean()
            value.backward()
            return value, parameter.grad, parameter

        value, gradient, parameter = session.function(loss, bcast_inputs="w")(ROWS, np.arange(5.0))
        np.testing.assert_allclose(value, ((ROWS @ np.arange(5.0)) ** 2).mean())
        np.testing.assert_allclose(gradient, 2 * ROWS.T @ (ROWS @ np.arange(5.0)) / 101)
        np.testing.assert_allclose(parameter, np.arange(5.0))

    def test_bfloat16_is_reduced_in_float32(self, session):
        pytest.importorskip("ml_dtypes")

        def ones(x):
            import torch

            return torch.ones(3, dtype=torch.bfloat16)

        got = session.function(ones, outputs="sum")(np.zeros((1000, 1)), num_slices=500)
        assert got.dtype.name == "bfloat16"
        assert got.astype("f4").tolist() == [1000.0] * 3  # in bfloat16, ones end at 256

    def test_a_module_with_its_parameters(self, session):
        import torch

        model = torch.nn.Linear(5, 2).double()

        def predict(x):
            return model(torch.tensor(x))

        got = session.function(predict, outputs="gather")(ROWS)
        np.testing.assert_allclose(got, model(torch.tensor(ROWS)).detach().numpy())


def test_a_function_compiled_by_numba(session):
    numba = pytest.importorskip("numba", reason="needs numba")

    @numba.njit
    def total(x):
        found = 0.0
        for row in x:
            found += row[0]
        return found

    assert session.function(total, outputs="sum")(ROWS) == pytest.approx(ROWS[:, 0].sum())


def test_settings_of_pytensor_that_were_changed_at_run_time(session):
    pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")

    def seen():
        import pytensor

        return pytensor.config.floatX == "float32"

    with pytensor.config.change_flags(floatX="float32"):
        assert session.function(seen, outputs=None)() == [True, True]
