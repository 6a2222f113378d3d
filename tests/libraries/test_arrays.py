"""Functions that use JAX, PyTorch or numba: their arrays come out, their settings go in."""

import dataclasses
import gc
import threading
import warnings
from typing import NamedTuple

import numpy as np
import pytest

import synkro
from support.forked import TORCH
from support.sessions import lasting, running
from synkro.errors import InvalidType, InvalidValue, OutputError, WorkerDied, WorkerError

pytestmark = [
    pytest.mark.libraries,
    pytest.mark.counted_once,
    pytest.mark.loaded(TORCH, "jax", "numba"),
]

ROWS = np.random.default_rng(0).standard_normal((101, 5))

session = lasting(2)


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="needs PyTorch (the extra torch)")


class TestPytrees:
    def test_classes_registered_with_jax_are_so_on_the_workers(self, session):
        jax = pytest.importorskip("jax", reason="needs JAX (the extra jax)")

        @jax.tree_util.register_dataclass
        @dataclasses.dataclass
        class Line:
            slope: jax.Array
            power: int = dataclasses.field(default=1, metadata={"static": True})

        @jax.tree_util.register_pytree_node_class
        class Pair:
            def __init__(self, one, other):
                self.one, self.other = one, other

            def tree_flatten(self):
                return (self.one, self.other), None

            @classmethod
            def tree_unflatten(cls, _, children):
                return cls(*children)

        def loss(line, x):
            return (x @ line.slope**line.power).sum()

        slopes = session.function(
            lambda line, x: jax.grad(loss)(line, x).slope, bcast_inputs=["line"], outputs="sum"
        )
        x = np.arange(12, dtype="f4").reshape(4, 3)
        for _ in range(2):
            assert slopes(Line(jax.numpy.ones(3)), x).tolist() == x.sum(axis=0).tolist()
        pair = Pair(jax.numpy.arange(3.0), 2.0)
        total = session.function(lambda: jax.jit(lambda p: p.one.sum() * p.other)(pair), outputs=None)
        assert [float(each) for each in total()] == [6, 6]
        doubled = session.map(lambda k: jax.tree.map(lambda leaf: leaf * k, pair), [1, 2])
        assert [type(each) for each in doubled] == [Pair, Pair]
        assert doubled[1].one.tolist() == [0, 2, 4]


class TestJax:
    @pytest.fixture(autouse=True)
    def jax(self):
        """JAX, with numbers of 64 bits."""
        jax = pytest.importorskip("jax", reason="needs JAX (the extra jax)")
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", True)
        yield jax
        jax.config.update("jax_enable_x64", before)

    def test_a_compiled_gradient_in_the_precision_of_the_main_process(self, session, jax):
        loss = jax.jit(lambda w, x: ((x @ w) ** 2).mean())
        gradient = jax.jit(jax.grad(loss))
        f = session.function(gradient, inputs=["x"], bcast_inputs=["w"], name="gradient")
        got = f(np.arange(5.0), ROWS)
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, gradient(np.arange(5.0), ROWS))

    def test_a_precision_that_is_changed_between_calls(self, session, jax):
        jax.config.update("jax_enable_x64", False)
        f = session.function(jax.jit(lambda x: x + 0), inputs=["x"], outputs="gather")
        x = session.data(np.arange(4) + 2.0**40)
        assert f(x).dtype == np.float32
        jax.config.update("jax_enable_x64", True)
        np.testing.assert_array_equal(f(x), x[:])

    def test_nested_outputs(self, session):
        def nested(x):
            import jax.numpy as jnp

            return {"sum": jnp.sum(x, axis=0), "extremes": (x.max(), [jnp.min(x)])}

        spec = {"sum": "sum", "extremes": ("max", ["min"])}
        got = session.function(nested, outputs=spec)(ROWS)
        np.testing.assert_allclose(got["sum"], ROWS.sum(axis=0))
        assert got["extremes"] == (ROWS.max(), [ROWS.min()])

    def test_arrays_arrive_as_those_of_jax_and_params_as_pytrees(self, session, jax):
        jnp = jax.numpy

        class Params(NamedTuple):
            w: object
            b: object

        def loss(params, x, y):
            return ((x.at[0].set(0) @ params["layers"][0].w + params["layers"][0].b - y) ** 2).mean()

        params = {"layers": [Params(jnp.ones(5), jnp.zeros(()))]}
        x, y = jnp.asarray(ROWS[:60]), jnp.arange(60.0)
        grad = jax.value_and_grad(loss)
        f = session.function(grad, bcast_inputs="params", outputs=None)
        values = f(params, x, y)
        for rank, (value, found) in enumerate(values):
            rows = slice(30 * rank, 30 * rank + 30)
            wanted, gradient = grad(params, x[rows], y[rows])
            np.testing.assert_allclose(value, wanted)
            np.testing.assert_allclose(found["layers"][0].w, gradient["layers"][0].w)
        assert isinstance(f.as_serial(params, x, session.data(y))[0], jax.Array)

    def test_data_is_handed_over_without_a_copy(self, session):
        def address(x: "jax.Array", original):  # noqa: F821
            return x.unsafe_buffer_pointer() == original.ctypes.data

        f = session.function(address, bcast_inputs=["x", "original"], outputs=None)
        rows = session.data(ROWS)
        assert f(rows, rows) == [True, True]

    def test_annotated_parameters_get_arrays_of_jax(self, session, jax):
        def are(x: jax.Array, y: "jax.Array", z: jax.numpy.ndarray, v: jax.Array | None, other):
            return [isinstance(array, jax.Array) for array in (x, y, z, v, other)]

        got = session.function(are, outputs="max")(*[ROWS] * 5)
        assert got == [True, True, True, True, False]

    def test_random_keys_are_refused_by_name(self, session, jax):
        f = session.function(lambda key, x: x.sum(), bcast_inputs="key", name="draw")
        with pytest.raises(InvalidType, match=r"argument 'key' of the function 'draw'.*key_data"):
            f(jax.random.key(0), ROWS)

        def keys(x):
            import jax

            return jax.random.key(0)

        with pytest.raises(OutputError, match="key_data"):
            session.function(keys)(ROWS)

    def test_collectives_of_what_is_traced_are_refused(self, session, jax):
        f = session.function(jax.jit(lambda x: synkro.all_reduce(x)))
        with pytest.raises(WorkerError, match=r"no values while JAX traces.*outside of that part"):
            f(ROWS)

    def test_parallel_maps_are_refused_with_advice(self, session, jax):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = jax.pmap(lambda x: x)
        with pytest.raises(InvalidType, match="the workers are the parallel map"):
            session.function(mapped)(ROWS)

    def test_executables_are_refused_with_advice(self, session, jax):
        gc.collect()  # functions that were refused before are not to be sent with this one
        compiled = jax.jit(lambda x: x + 1).lower(ROWS).compile()
        f = session.function(compiled)
        with pytest.raises(InvalidType, match=r"Send the function that jax\.jit has made"):
            session.distribute()
        assert f.name == "Compiled"


def test_nested_arguments(session):
    def loss(params, batch_of):
        (w, b), factor = params
        return (batch_of["x"] @ w + b).sum(axis=0) * factor

    f = session.function(loss, bcast_inputs="params", outputs="sum")
    params = ([np.arange(10.0).reshape(5, 2), np.ones(2)], 0.5)
    got = f(params, {"x": session.data(ROWS)})
    np.testing.assert_allclose(got, loss(params, {"x": ROWS}))
    np.testing.assert_allclose(f.as_serial(params, {"x": session.data(ROWS)}), got)
    np.testing.assert_allclose(f.submit(params, {"x": ROWS}).result(), got)
    with pytest.raises(InvalidType, match=r"argument \"batch_of\['y'\]\"|batch_of\['y'\]"):
        f(params, {"x": ROWS, "y": "text"})
    with pytest.raises(InvalidValue, match="different numbers of rows"):
        f(params, {"x": ROWS, "y": ROWS[:7]})
    with pytest.raises(InvalidType, match=r"params\[0\]\[1\].*cannot be pickled"):
        f(([np.ones((5, 2)), threading.Lock(), ROWS], 0.5), {"x": ROWS})
    endless = [ROWS]
    endless.append(endless)
    with pytest.raises(InvalidValue, match=r"'params' .*nested too deeply .*, or holds itself"):
        f(endless, {"x": ROWS})


@pytest.mark.parametrize("form", ["csr", "coo", "dok"])
def test_sparse_matrices_of_scipy(session, form):
    sparse = pytest.importorskip("scipy.sparse")
    for made in (sparse.eye_array(4).asformat(form), sparse.eye(4, format=form)):
        for taking in (session.function(lambda x: x.sum(), outputs="sum"), session.data, session.shared):
            with pytest.raises(InvalidType, match=r"x\.toarray\(\), or list\(x\.tocsr\(\)\)"):
                taking(made)
        whole = session.function(lambda x: type(x).__name__, bcast_inputs="x", outputs=None)
        assert whole(made) == [type(made).__name__] * 2
        total = session.function(lambda rows: sum(row.sum() for row in rows), outputs="sum")
        assert total(list(made.tocsr())) == total(made.toarray()) == 4


@pytest.mark.parametrize(
    ("thing", "advice"),
    [
        (lambda: (one for one in "ab"), "Make a list of it"),
        (lambda: open(__file__), "Open it inside the function"),  # noqa: SIM115
        (threading.Lock, "Create such an object inside the function"),
    ],
)
def test_what_cannot_travel_is_refused_with_advice(session, thing, advice):
    held = thing()
    f = session.function(lambda x: held)
    with pytest.raises(InvalidType, match=f"'held' that it closes over.*{advice}"):
        f(ROWS)
    if hasattr(held, "close"):
        held.close()


@pytest.mark.usefixtures("torch")
class TestTorch:
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

    def test_a_tensor_that_changes_here_in_every_call(self, session, torch):
        weights = torch.zeros(2)
        f = session.function(lambda: weights.sum(), outputs="max")
        for number in range(1, 10):  # without a warning
            with torch.no_grad():
                weights.add_(1)
            assert f() == 2 * number

    def test_a_tensor_that_changed_here_and_there(self, session, torch):
        for calls in (1, 2, 3):  # the second is one in which all is looked at
            weights = torch.zeros(2)
            f = session.function(lambda: weights.add_(1).sum(), outputs="max")
            for _ in range(calls):
                f()
            weights.mul_(0).add_(7)
            with pytest.raises(
                InvalidValue, match=r"'weights', which the function .* has changed here and"
            ):
                f()

    def test_what_is_written_past_its_version_is_warned_of(self, session, torch):
        weights = torch.zeros(2)
        f = session.function(lambda: weights.sum(), outputs="max")
        f()
        weights.data.fill_(1)
        assert f() == 2  # the second call looks at all
        weights.data.fill_(2)
        assert f() == 2
        with pytest.warns(
            UserWarning, match=r"'weights', which .*: not all of it is compared at each call"
        ):
            assert f() == 4

    def test_bfloat16_is_reduced_in_float32(self, session):
        pytest.importorskip("ml_dtypes")

        def ones(x):
            import torch

            return torch.ones(3, dtype=torch.bfloat16)

        got = session.function(ones, outputs="sum")(np.zeros((1000, 1)), num_slices=500)
        assert got.dtype.name == "bfloat16"
        assert got.astype("f4").tolist() == [1000.0] * 3  # in bfloat16, ones end at 256

    @pytest.mark.parametrize("batch", [None, slice(None, None, -2), [5, 3, 3]])
    @pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
    def test_tensors_arrive_as_tensors(self, session, torch, batch, dtype):
        def total(x, w):
            return (x * w).sum(dim=0, dtype=torch.float64), w.requires_grad

        x = torch.tensor(ROWS).to(getattr(torch, dtype))
        w = torch.nn.Parameter(torch.ones(5, dtype=x.dtype))
        f = session.function(total, bcast_inputs="w", outputs=("sum", "max"))
        chosen = np.arange(101)[slice(None) if batch is None else batch].copy()
        for given in (x, session.data(x)):
            got, grad = f(given, w, batch=batch, num_slices=2)
            np.testing.assert_allclose(got, x[chosen].to(torch.float64).sum(dim=0).numpy())
            assert not grad
        serial = f.as_serial(session.data(x), w.detach())[0]
        np.testing.assert_allclose(serial, x.to(torch.float64).sum(dim=0))

    def test_annotated_parameters_get_tensors(self, session, torch):
        def total(x: torch.Tensor, y: "torch.Tensor", z):
            return x.sum() + y.sum(), isinstance(z, torch.Tensor)

        assert session.function(total, outputs=("sum", "max"))(ROWS, ROWS, ROWS) == (
            pytest.approx(2 * ROWS.sum()),
            False,
        )

    def test_big_endian_arrays_become_native_tensors(self, session, torch, tmp_path):
        rows = ROWS.astype(">f8")
        np.save(tmp_path / "rows.npy", rows)
        mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")

        def f(x: torch.Tensor):
            return x * 2

        f = session.function(f, outputs="gather")
        for x in (rows, session.data(rows), mapped, session.data(mapped)):
            np.testing.assert_array_equal(f(x, num_slices=2), rows * 2)

    @pytest.mark.parametrize("annotation", ["torch.Tensor | None", "Optional[torch.Tensor]", None])
    def test_annotations_of_what_may_be_none(self, session, torch, annotation):
        def is_tensor(x):
            return type(x).__name__ == "Tensor"

        is_tensor.__annotations__["x"] = annotation or torch.Tensor | None
        assert session.function(is_tensor, outputs=None)(ROWS) == [True, True]

    def test_data_that_gets_a_tensor(self, session, torch):
        x = session.data(ROWS)
        f = session.function(lambda x: type(x).__name__ == "Tensor", outputs=None)
        assert f(x) == [False, False]
        x.set_value(torch.tensor(ROWS))
        assert f(x) == [True, True]

    @pytest.mark.parametrize(
        "made",
        [
            lambda torch: torch.eye(4).to_sparse(),
            lambda torch: torch.eye(4).to_sparse_csr(),
            lambda torch: torch.eye(4).to_sparse_csc(),
            lambda torch: torch.ones(4, device="meta"),
            lambda torch: torch.ones(4).to(torch.float8_e4m3fn),
        ],
        ids=["coo", "csr", "csc", "meta", "float8"],
    )
    @pytest.mark.filterwarnings("ignore:Sparse:UserWarning")  # that they are in beta state
    def test_tensors_that_numpy_has_no_array_for(self, session, torch, made):
        with pytest.raises(InvalidType, match=r"argument 'x' .*NumPy has no array.*\.to_dense\(\)"):
            session.function(lambda x: x)(made(torch))
        with pytest.raises(WorkerError, match="NumPy has no array"):
            session.function(lambda: made(torch))()

    def test_the_default_dtype_goes_along(self, session, torch):
        def is_double():
            import torch

            return torch.ones(1).dtype is torch.float64

        torch.set_default_dtype(torch.float64)
        try:
            assert session.function(is_double, outputs=None)() == [True, True]
        finally:
            torch.set_default_dtype(torch.float32)
        assert session.function(lambda: is_double(), outputs=None)() == [False, False]

    def test_modules_are_functions(self, session, torch):
        model = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.ReLU()).double()
        expected = model(torch.tensor(ROWS)).detach().numpy()
        for fn in (model, model.forward, torch.compile(model, backend="eager")):
            f = session.function(fn, outputs="gather")
            np.testing.assert_allclose(f(ROWS), expected)
            np.testing.assert_allclose(f(input=session.data(ROWS)), expected)
            np.testing.assert_allclose(f.as_serial(ROWS).detach().numpy(), expected)

    def test_functional_call_with_broadcast_parameters(self, session, torch):
        model = torch.nn.Linear(5, 1).double()

        def gradient(params, x):
            def loss(params):
                return (torch.func.functional_call(model, params, (x,)) ** 2).mean()

            return torch.func.grad(loss)(params)

        params = {name: p.detach() for name, p in model.named_parameters()}
        got = session.function(gradient, bcast_inputs="params")(params, torch.tensor(ROWS))
        for name, value in gradient(params, torch.tensor(ROWS)).items():
            np.testing.assert_allclose(got[name], value)

    def test_collectives_return_tensors(self, session, torch):
        def fold(x):
            import torch

            import synkro as synk

            flat = torch.cat([x.sum(0), x.sum().reshape(1)]).requires_grad_()
            total = synk.all_reduce({"flat": flat, "one": x.sum()}, "sum")
            parts = [
                *total.values(),
                synk.all_gather(x),
                synk.broadcast(flat),
                synk.reduce_scatter(flat),
            ]
            assert all(isinstance(part, torch.Tensor) for part in parts)
            return total["flat"]

        got = session.function(fold, outputs=None)(torch.tensor(ROWS))
        for one in got:
            np.testing.assert_allclose(one, [*ROWS.sum(0), ROWS.sum()])

    @pytest.mark.fresh
    def test_threads_are_capped(self):
        def threads():
            import torch

            return torch.get_num_threads()

        with running(1, threads_per_worker=1) as session:
            assert session.function(threads, outputs="max")() == 1

    def test_what_cannot_travel_is_refused_with_advice(self, session, torch):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            script = torch.jit.script(torch.nn.Linear(5, 2))
        with pytest.raises(InvalidType, match=r"torch\.jit\.save"):
            session.function(script)(ROWS)

    def test_compiled_functions_are_compiled_there(self, session, torch):
        compiled = torch.compile(lambda x: x + 1, backend="eager")
        f = session.function(compiled, outputs="gather")
        assert np.array_equal(f(ROWS), ROWS + 1)
        assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))
        again = session.function(lambda x: compiled(torch.as_tensor(x.copy())), outputs="gather")
        assert np.array_equal(again(ROWS), ROWS + 1)

    def test_writing_to_an_input_ends_the_worker_with_a_hint(self, torch):
        session = synkro.Session(devices=["cpu"], verbose=False, timeout=60)
        with session, pytest.raises(WorkerDied, match=r"read-only.*\.clone\(\)"):
            session.function(lambda x: x.add_(1), outputs="gather")(torch.tensor(ROWS))


@pytest.mark.usefixtures("torch")
class TestSettingsOfModels:
    """What the program sets in a model of any size is there at the next call."""

    @staticmethod
    def large(count=20):
        from torch import nn

        layers = [m for _ in range(count) for m in (nn.Linear(4, 4), nn.Dropout(0.5))]
        return nn.Sequential(*layers, nn.BatchNorm1d(4))

    def test_its_mode_in_turn_without_a_warning(self, session):
        model = self.large()

        def mode():
            return sum(m.training for m in model.modules())

        train = session.function(mode, outputs="max")
        validate = session.function(mode, outputs="max")
        for _ in range(20):
            model.train()
            assert train() == 42
            model.eval()
            assert validate() == 0

    def test_attributes_of_its_last_layers_that_come_and_go(self, session):
        model = self.large()
        last = model[-2]
        look = lambda: (last.p, model[-1].momentum, getattr(model[-2], "extra", None))  # noqa: E731
        f = session.function(look, outputs=None)
        assert f() == [look()] * 2
        for turn in range(40):
            last.p, model[-1].momentum, last.extra = turn / 50, None if turn % 2 else 0.1, f"turn {turn}"
            assert f() == [look()] * 2
            if turn % 4 == 3:
                del last.extra
                assert f() == [look()] * 2

    def test_which_parameters_are_frozen_and_what_they_hold(self, session, torch):
        model = self.large()
        f = session.function(
            lambda: (model[0].weight.requires_grad, float(model[-3].weight.detach()[0, 0])), outputs=None
        )
        for turn in range(12):
            model[0].weight.requires_grad_(turn % 3 == 0)
            with torch.no_grad():
                model[-3].weight.fill_(turn)
            assert f() == [(turn % 3 == 0, float(turn))] * 2

    def test_a_list_of_its_own_is_told_and_warned_of_when_missed(self, session, capfd):
        model = self.large(40)
        model[-2].sizes = [[n] for n in range(300)]
        with running(2, verbose=True) as loud:
            capfd.readouterr()
            f = loud.function(lambda: model[-2].sizes[0][0], outputs="max")
            assert f() == 0
            told = capfd.readouterr().err
            assert "Synkro: 'model', which the function '<lambda>' uses, has " in told
            assert "push(model)" in told
            assert f() == 0
            model[-2].sizes[0][0] = 5
            assert f() == 0
            with pytest.warns(UserWarning, match=r"'model'.*may have missed it.*push\(model\)"):
                assert f() == 5


class TestNumba:
    @pytest.fixture
    def numba(self):
        return pytest.importorskip("numba", reason="needs numba")

    def test_one_worker_compiles_and_the_others_take_it_over(self, session, numba):
        @numba.njit
        def doubled(number):
            return number * 2

        @numba.njit
        def total(x):
            found = 0.0
            for row in x:
                found += doubled(row[0])
            return found

        def counted(x):
            return {"total": total(x), "compiled": sum(total.stats.cache_misses.values())}

        f = session.function(counted, outputs="sum")
        for rows in (ROWS, ROWS.astype("float32")):
            assert f(rows)["total"] == pytest.approx(2 * rows[:, 0].sum(), rel=1e-5)
        assert f(ROWS)["compiled"] == 2  # for two types, on two workers

    @pytest.mark.parametrize("verbose", [True, False])
    def test_a_long_compilation_is_announced_once_by_name(self, verbose, numba, capsys):
        @numba.njit
        def halved(number):
            return number / 2

        @numba.njit
        def halves(x):
            return halved(x.sum())

        def impatient():
            from synkro.machine import announcing
            from synkro.packing import numba

            numba.announcing = lambda say, text: announcing(say, text, 0.0)

        with synkro.Session(2, verbose=verbose) as session:
            f = session.function(halves, outputs="sum")
            session.function(lambda: impatient(), outputs=[])()
            for _ in range(2):
                assert f(np.ones(4)) == 2
        printed = capsys.readouterr().err
        lines = [line for line in printed.splitlines() if "compiling" in line]
        assert [line[9:] for line in lines] == verbose * ["Synkro is compiling 'halves'..."]

    def test_arrays_of_other_libraries_come_as_those_of_numpy(self, session, numba, torch):
        @numba.njit
        def total(x):
            return x.sum()

        f = session.function(total, outputs="sum")
        assert f(torch.tensor(ROWS)) == pytest.approx(ROWS.sum())
        assert f.as_serial(torch.tensor(ROWS)) == pytest.approx(ROWS.sum())

    def test_functions_differ_in_the_values_of_globals(self, session, numba):
        found = []
        for factor in (2.0, 3.0):

            @numba.njit
            def scaled(x):
                return factor * x.sum()

            found.append(session.function(scaled, outputs="sum")(ROWS))
        np.testing.assert_allclose(found, [2 * ROWS.sum(), 3 * ROWS.sum()])

    def test_compiled_for_given_types(self, session, numba):
        total = numba.njit("float64(float64[:, :])")(lambda x: x.sum())
        f = session.function(lambda x: total(x.copy()), outputs="sum")
        assert f(ROWS) == pytest.approx(ROWS.sum())
        with pytest.raises(WorkerError, match="No matching definition"):
            f(ROWS.astype(complex))
        with pytest.raises(WorkerError, match=r"read-only.*leave numba's signature out"):
            session.function(lambda x: total(x), outputs="sum")(ROWS)

    @pytest.mark.parametrize("types", [None, ["float64(float64)"]])
    def test_universal_functions(self, session, numba, types):
        square = (numba.vectorize(types) if types else numba.vectorize)(lambda x: x * x)
        f = session.function(square, outputs="gather", inputs=["x"])
        np.testing.assert_array_equal(f(ROWS), ROWS**2)

    def test_code_that_is_tied_to_a_process_is_compiled_by_each(self, session, numba):
        table = np.arange(300_000.0)  # numba keeps its address

        @numba.njit
        def looked_up(x):
            return x.sum() * 0 + table[-1]

        def counted(x):
            return looked_up(x), len(looked_up.overloads)

        f = session.function(counted, outputs="sum")
        assert f(ROWS) == (2 * 299_999, 2)

    @pytest.mark.fresh
    def test_its_cache_on_the_disk_is_used_if_the_user_asks(self, numba, tmp_path, monkeypatch):
        monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
        numba.core.config.reload_config()
        try:
            total = numba.njit(cache=True)(_total)
            with synkro.Session(devices=["cpu", "cpu"], verbose=False, timeout=60) as session:
                f = session.function(lambda x: total(x), outputs="sum")
                assert f(ROWS) == pytest.approx(ROWS.sum())
        finally:
            monkeypatch.undo()
            numba.core.config.reload_config()
        assert len(list(tmp_path.rglob("*.nbc"))) == 1

    def test_a_worker_that_dies_while_it_compiles_holds_nobody_up(self, numba):
        @numba.njit
        def total(x):
            return x.sum()

        def compiled(x):
            import os
            import signal

            from numba.core import event

            class Fatal(event.Listener):
                def on_start(self, event):
                    os.kill(os.getpid(), signal.SIGKILL)

                def on_end(self, event):
                    """It never ends."""

            event.register("numba:compile", Fatal())  # for the first to come
            return total(x)

        session = synkro.Session(devices=["cpu", "cpu"], verbose=False, timeout=60)
        with session, pytest.raises(WorkerDied, match="SIGKILL"):
            session.function(compiled, outputs="sum")(ROWS)

    def test_an_error_of_the_compiler_is_shown(self, session, numba):
        broken = numba.njit(lambda x: x.no_such_attribute)
        with pytest.raises(WorkerError, match="no_such_attribute"):
            session.function(broken, inputs=["x"])(ROWS)
        assert session.function(numba.njit(lambda x: x.sum()), inputs=["x"], outputs="sum")(
            ROWS
        ) == pytest.approx(ROWS.sum())


def _total(x):
    return x.sum()


def test_settings_of_pytensor_that_were_changed_at_run_time(session):
    pytensor = pytest.importorskip("pytensor", reason="needs PyTensor (the extra pytensor)")

    def seen():
        import pytensor

        return pytensor.config.floatX == "float32"

    with pytensor.config.change_flags(floatX="float32"):
        assert session.function(seen, outputs=None)() == [True, True]


class TestKernelsOfNumba:
    """Kernels for GPUs are compiled where they are launched; they travel to every worker."""

    def test_a_kernel_travels_with_what_it_uses(self, session):
        numba = pytest.importorskip("numba")
        cuda = pytest.importorskip("numba.cuda")
        step = 3

        @numba.cuda.jit(device=True)
        def more(value):
            return value + step

        @numba.cuda.jit
        def kernel(x):
            place = cuda.grid(1)
            if place < x.size:
                x[place] = more(x[place])

        def f():
            inner = kernel.py_func.__closure__ or ()
            names = [type(cell.cell_contents).__name__ for cell in inner]
            return type(kernel).__name__, kernel.py_func.__name__, names

        for found in session.function(f, outputs=None)():
            assert found[:2] == (type(kernel).__name__, "kernel")
            assert type(more).__name__ in found[2]


def test_sparse_tensors_that_tasks_read(session, torch):
    sparse = torch.eye(2).to_sparse()
    assert session.map(lambda k: float(sparse.to_dense().sum()) * k, [1, 2]) == [2, 4]
