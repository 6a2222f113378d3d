"""Libraries that take a pool, on ``synk.Executor``: as their users write it, with one line changed."""

import functools
import multiprocessing
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.programs import ROOT
from support.together import together

pytestmark = [pytest.mark.libraries, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(scope="module")
def executor():
    with synk.Executor(2) as executor:
        yield executor


def square(x):
    return x * x


# ── Dask ─────────────────────────────────────────────────────────────────────────────────────────────


def test_dask(executor):
    dask = pytest.importorskip("dask")
    array, bag = pytest.importorskip("dask.array"), pytest.importorskip("dask.bag")
    x = np.arange(200 * 300.0).reshape(200, 300)
    chunked = array.from_array(x, chunks=(50, 100))
    assert chunked.mean().compute(scheduler=executor) == x.mean()
    assert np.allclose((chunked @ chunked.T).compute(scheduler=executor), x @ x.T)
    lazy = [dask.delayed(square)(n) for n in range(10)]
    assert dask.compute(*lazy, scheduler=executor) == tuple(n * n for n in range(10))
    with dask.config.set(scheduler=executor):
        assert bag.from_sequence(range(100), npartitions=7).map(square).sum().compute() == 328350
        with pytest.raises(ZeroDivisionError):
            dask.delayed(lambda: 1 // 0)().compute()


# ── SciPy ────────────────────────────────────────────────────────────────────────────────────────────


def rosen(x):
    return float(np.sum(100.0 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2))


def test_scipy_optimize(executor):
    optimize = pytest.importorskip("scipy.optimize")
    bounds = [(-2, 2)] * 3
    how = {"updating": "deferred", "seed": 1, "maxiter": 30}
    mapped = optimize.differential_evolution(rosen, bounds, workers=executor.map, **how)
    alone = optimize.differential_evolution(rosen, bounds, **how)
    assert np.array_equal(mapped.x, alone.x)
    grid = optimize.brute(rosen, bounds[:2], Ns=9, workers=executor.map)
    assert np.array_equal(grid, optimize.brute(rosen, bounds[:2], Ns=9))


# ── samplers ─────────────────────────────────────────────────────────────────────────────────────────


def log_prob(x, ivar):
    return -0.5 * np.sum(ivar * x**2)


def test_emcee(executor):
    emcee = pytest.importorskip("emcee")

    def chain(**pool):
        start = np.random.default_rng(3).standard_normal((16, 4))
        np.random.seed(5)  # the sampler goes on from there
        sampler = emcee.EnsembleSampler(16, 4, log_prob, args=[1 / np.arange(1.0, 5)], **pool)
        sampler.run_mcmc(start, 20)
        return sampler.get_chain()

    assert np.array_equal(chain(pool=executor), chain())


def log_like(x):
    return -0.5 * float(x @ x)


def from_cube(u):
    return 10 * (2 * u - 1)


def test_dynesty(executor):
    dynesty = pytest.importorskip("dynesty")
    sampler = dynesty.NestedSampler(
        log_like,
        from_cube,
        2,
        nlive=60,
        pool=executor,
        queue_size=2,
        rstate=np.random.default_rng(0),
    )
    sampler.run_nested(print_progress=False)
    assert sampler.results.logz[-1] == pytest.approx(np.log(2 * np.pi / 400), abs=1)


def test_pymoo(executor):
    pytest.importorskip("pymoo")
    from pymoo.algorithms.soo.nonconvex.ga import GA
    from pymoo.core.problem import ElementwiseProblem
    from pymoo.optimize import minimize
    from pymoo.parallelization.starmap import StarmapParallelization

    class Sphere(ElementwiseProblem):
        def __init__(self, **how):
            super().__init__(n_var=4, n_obj=1, xl=-5, xu=5, **how)

        def _evaluate(self, x, out, *args, **kwargs):
            out["F"] = (x**2).sum()

    parallel = Sphere(elementwise_runner=StarmapParallelization(executor.starmap))
    found = minimize(parallel, GA(pop_size=20), ("n_gen", 5), seed=1)
    assert found.F == minimize(Sphere(), GA(pop_size=20), ("n_gen", 5), seed=1).F


# ── joblib and scikit-learn ──────────────────────────────────────────────────────────────────────────


@pytest.fixture
def joblib():
    """joblib; what its backend has kept is ended."""
    joblib, before = pytest.importorskip("joblib"), set(threading.enumerate())
    yield joblib
    sys.modules["synkro.controller.executor.joblib"].shut_down()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "synkro-executor":
            thread.join(30)


def fail_at(number):
    if number == 7:
        raise KeyError("seven")
    return number


def test_joblib(joblib):
    with joblib.parallel_config(backend="synkro", n_jobs=2):
        squares = joblib.Parallel()(joblib.delayed(square)(n) for n in range(100))
        assert squares == [n * n for n in range(100)]
        workers = joblib.Parallel(batch_size=1)(joblib.delayed(pid)() for _ in range(20))
        assert set(joblib.Parallel(batch_size=1)(joblib.delayed(pid)() for _ in range(20))) <= set(
            workers
        )
        with pytest.raises(KeyError, match="seven"):
            joblib.Parallel()(joblib.delayed(fail_at)(n) for n in range(20))
        unordered = joblib.Parallel(return_as="generator_unordered")
        assert sorted(unordered(joblib.delayed(square)(n) for n in range(9))) == squares[:9]
        generated = joblib.Parallel(return_as="generator")
        assert list(generated(joblib.delayed(square)(n) for n in range(9))) == squares[:9]
    with pytest.raises(multiprocessing.TimeoutError):
        joblib.Parallel(2, backend="synkro", timeout=0.2)(
            joblib.delayed(time.sleep)(100) for _ in range(2)
        )
    assert joblib.Parallel(2, backend="synkro")([joblib.delayed(square)(3)]) == [9]
    assert joblib.Parallel(1, backend="synkro")([joblib.delayed(square)(3)]) == [9]


def pid():
    import os

    time.sleep(0.01)
    return os.getpid()


def nested(n):
    import joblib

    return joblib.Parallel(n_jobs=2)(joblib.delayed(square)(k) for k in range(n))


def test_joblib_nested_and_with_options(joblib):
    with joblib.parallel_config(backend="synkro", n_jobs=2, retries=1, inner_max_num_threads=1):
        assert joblib.Parallel()(joblib.delayed(nested)(n) for n in range(4)) == [
            [k * k for k in range(n)] for n in range(4)
        ]
        found = joblib.Parallel()(joblib.delayed(threads)() for _ in range(4))
        assert found == ["1"] * 4
    with (
        joblib.parallel_config(backend="synkro", n_jobs=2, nonsense=1),
        pytest.raises(TypeError, match="nonsense"),
    ):
        joblib.Parallel()([joblib.delayed(square)(3)])


def threads():
    import os

    return os.environ["OMP_NUM_THREADS"]


def slow(n):
    time.sleep(0.02)
    return n


def test_joblib_in_several_threads(joblib):
    """Each call has workers of its own: none ends those of another."""

    def work(jobs, function, count):
        parallel = joblib.Parallel(jobs, backend="synkro", batch_size=1)
        return parallel(joblib.delayed(function)(n) for n in range(count))

    calls = (2, slow, 60), (3, slow, 9), (2, fail_at, 9), (2, slow, 5)
    *found, error, short = together(*(functools.partial(work, *call) for call in calls), seconds=100)
    assert type(error) is KeyError
    assert [*found, short] == [list(range(60)), list(range(9)), list(range(5))]


def add_up(rows, sums, n):
    sums[n] = rows[n].sum()


def test_joblib_writes_to_memory_mapped_files(joblib, tmp_path):
    rows = np.random.default_rng(0).random((10, 40_000))
    joblib.dump(rows, tmp_path / "rows")
    rows = joblib.load(tmp_path / "rows", mmap_mode="r")
    sums = np.memmap(tmp_path / "sums", float, "w+", shape=10)
    with joblib.parallel_config(backend="synkro", n_jobs=2):
        joblib.Parallel()(joblib.delayed(add_up)(rows, sums, n) for n in range(10))
    assert np.array_equal(sums, rows.sum(axis=1))


def test_scikit_learn(joblib):
    pytest.importorskip("sklearn")
    from sklearn.datasets import make_classification
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler
    from sklearn.svm import SVC

    x, y = make_classification(300, 8, random_state=0)
    search, alone = (
        GridSearchCV(make_pipeline(StandardScaler(), SVC()), {"svc__C": [0.1, 1, 10]}, cv=3)
        for _ in range(2)
    )
    alone.fit(x, y)
    with joblib.parallel_config(backend="synkro", n_jobs=2):
        search.fit(x, y)
        scores = cross_val_score(SVC(), x, y, cv=4)
        forest = RandomForestClassifier(20, random_state=0, n_jobs=2).fit(x, y)
    assert search.best_params_ == alone.best_params_
    assert np.array_equal(search.cv_results_["mean_test_score"], alone.cv_results_["mean_test_score"])
    assert np.array_equal(scores, cross_val_score(SVC(), x, y, cv=4))
    again = RandomForestClassifier(20, random_state=0).fit(x, y)
    assert np.array_equal(forest.predict_proba(x), again.predict_proba(x))


def told(*command):
    """What Python prints of this."""
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT)},
    )
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    "imports",
    ["import joblib\nimport synkro", "import synkro\nimport joblib", "import synkro, sklearn.svm"],
)
def test_whoever_is_imported_first(imports, tmp_path):
    pytest.importorskip("sklearn")
    (tmp_path / "program.py").write_text(
        f"""{imports}
import joblib
def square(x):
    return x * x
with joblib.parallel_config(backend="synkro", n_jobs=2):
    print(joblib.Parallel()(joblib.delayed(square)(n) for n in range(5)))
print(joblib.parallel.__spec__.loader.get_source("joblib.parallel")[:3])
"""
    )
    assert told("-W", "error", str(tmp_path / "program.py")) == ('[0, 1, 4, 9, 16]\n"""\n', "")


def test_synkro_imports_none_of_them():
    code = "import sys, synkro; synkro.Executor; print('joblib' in sys.modules, 'dask' in sys.modules)"
    assert told("-c", code) == ("False False\n", "")
