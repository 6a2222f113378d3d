"""Outputs that look like rows, of functions whose ``outputs=`` was not given: a warning, once."""

import inspect
import warnings

import numpy as np
import pytest

import synkro as synk
from support.sessions import running
from synkro import OutputError
from synkro.extensions import make_train_function

pytestmark = [pytest.mark.quick, pytest.mark.counted_once]

X = np.arange(8.0)


def double(x):
    return x * 2


def warned(call):
    """The only warning of *call*."""
    with pytest.warns(UserWarning, match="outputs= was not given") as caught:
        call()
    (only,) = caught
    return only


def test_it_names_the_function_the_rows_and_what_to_say(two):
    f = synk.function(double)
    assert str(warned(lambda: f(X)).message) == (
        "output of the function 'double' has 4 rows on every rank, as many as the rank got, and "
        "outputs= was not given: the ranks' arrays are averaged. To concatenate their rows say "
        'outputs="gather"; if the average is meant say outputs="mean", which silences this.'
    )


def test_it_points_to_the_line_of_the_call_and_comes_once_a_function(two):
    f, g = synk.function(double), synk.function(double)
    line = inspect.currentframe().f_lineno + 1
    found = warned(lambda: f(X))
    assert (found.filename, found.lineno) == (__file__, line)
    f(X)
    f(X[:6])  # other rows, other replies
    warned(lambda: g(X))


def test_it_points_to_the_line_also_from_other_ways_to_call(two):
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(UserWarning, match="outputs= was not given") as caught, synk.trace():
        synk.function(double)(X, progress=True)
    assert [(found.filename, found.lineno) for found in caught] == [(__file__, line)]


def test_the_paths_of_nested_outputs(two):
    f = synk.function(lambda x: {"loss": x.mean(), "y": [x, x + 1]}, name="f")
    text = str(warned(lambda: f(X)).message)
    assert "output['y'][0] (and 1 more) of the function 'f' has 4 rows" in text
    assert 'give outputs= an entry for each output, "gather" for this one; if' in text
    nested = synk.function(f.fn, outputs={"loss": "mean", "y": "gather"})
    assert np.array_equal(nested(X)["y"][1], X + 1)


def test_with_slices_the_rows_of_a_slice_count(two):
    f = synk.function(double)
    assert "has 2 rows on every rank, as many as the rank got in a slice" in str(
        warned(lambda: f(X, num_slices=2)).message
    )


def test_rows_of_variables_count(two):
    w = synk.shared(X)
    warned(lambda: synk.function(double)(w))


@pytest.mark.parametrize(
    ("fn", "outputs", "x", "options"),
    [
        (double, "mean", X, {}),
        (double, "avg", X, {}),
        (double, "gather", X, {}),
        (double, None, X, {}),
        (double, "sum", X, {}),
        (lambda x: {"a": x}, {"a": "mean"}, X, {}),
        (double, "default", X[:2], {}),  # a row each
        (double, "default", X[:1], {}),  # one rank
        (double, "default", X[:4], {"num_slices": 2}),  # a row each at a time
        (lambda x: x.mean(), "default", X, {}),
        (lambda x: x[:3], "default", X, {}),
    ],
)
def test_without_a_reason_there_is_no_warning(two, fn, outputs, x, options):
    said = {} if outputs == "default" else {"outputs": outputs}
    synk.function(fn, **said)(x, **options)


def test_one_worker_is_not_warned():
    with running(1):
        assert np.array_equal(synk.function(double)(X), X * 2)


@pytest.mark.parametrize(("rows", "slices", "reason"), [(7, 1, "on rank 1"), (6, 2, "for another")])
def test_different_numbers_of_rows_get_the_same_advice(two, rows, slices, reason):
    with pytest.raises(OutputError, match=rf'{reason}.*To concatenate rows say outputs="gather"'):
        synk.function(double)(X[:rows], num_slices=slices)


def test_a_warning_that_is_an_error_leaves_a_function_that_works(two):
    f = synk.function(double)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match='outputs="gather"'):
            f(X)
    assert np.array_equal(f(X), X[:4] + X[4:])


def test_the_default_reads_as_mean(two):
    f = synk.function(double)
    assert f.output_modes == "mean"
    assert f.update_modes == ()
    assert repr(f) == "<synkro.Function 'double', outputs='mean'>"
    assert "outputs: 'Any' = 'mean'" in str(inspect.signature(make_train_function))


@pytest.mark.libraries
def test_outputs_of_graphs(two):
    pytest.importorskip("pytensor", reason="needs PyTensor")
    import pytensor.tensor as pt

    x = pt.dvector("x")
    f = synk.function([x], 2 * x, name="twice")
    assert str(warned(lambda: f(X)).message).endswith(
        'To concatenate their rows say (y, "gather") for this variable y in outputs=; if the average is '
        'meant say (y, "mean"), which silences this.'
    )
    synk.function([x], (2 * x, "mean"))(X)
    assert np.array_equal(synk.function([x], [(2 * x, "gather"), x.sum()])(X)[0], 2 * X)


@pytest.mark.parametrize("wanted", ["sum", "mean"])
def test_a_count_is_not_averaged_in_silence(two, wanted):
    x = np.arange(-3, 6)
    count = synk.function(lambda x: (x > 0).sum())
    with pytest.warns(UserWarning, match='is an integer, and outputs= was not given.*"sum"'):
        count(x)
    count(x)  # once is enough
    assert synk.function(lambda x: (x > 0).sum(), outputs=wanted)(x) == (
        5 if wanted == "sum" else 21 / 9
    )
    synk.function(lambda x: (x > 0).mean())(x)
