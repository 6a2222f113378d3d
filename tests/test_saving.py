"""Variables and generators, to a file and back."""

import os

import numpy as np
import pytest

import synkro as synk
from synkro import extensions as ext
from synkro.errors import InvalidValue

ROWS = np.random.default_rng(0).standard_normal((50, 3))


def program():
    """A training that draws random numbers on the workers; returns its step and all that changes."""
    w = synk.shared(np.zeros(3), name="w")
    noise = synk.shared(np.zeros(3, np.float32), name="noise")
    held = synk.shared(np.zeros((0, 3)), name="held")
    synk.scatter(held, ROWS[:5])

    def loss_and_grad(x):
        noise.value = synk.rng().standard_normal(3).astype(np.float32)
        residual = (x + noise.value) @ w.value - 1 + held.value.sum()
        return (residual**2).mean(), [2 * x.T @ residual / len(x)]

    train = ext.make_train_function(loss_and_grad, [w], ext.adam([w], 0.1))
    return train, (w, noise, held)


def values(variables):
    return [[synk.get_value(rank, v) for rank in range(2)] for v in variables]


def test_resuming_gives_the_numbers_of_never_having_stopped(tmp_path):
    synk.fork(2, seed=5, verbose=False, timeout=60)
    train, variables = program()
    for _ in range(5):
        train(ROWS)
    synk.save(tmp_path / "state")
    losses = [train(ROWS) for _ in range(5)]
    want = values(variables)
    synk.close()
    synk.fork(2, seed=6, verbose=False, timeout=60)
    train, variables = program()
    synk.load(tmp_path / "state.npz")
    assert [train(ROWS) for _ in range(5)] == losses
    for got, wanted in zip(values(variables), want, strict=True):
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype
    with np.load(tmp_path / "state.npz") as file:
        assert {"w", "held@0", "held@1", "adam.first", "adam.time"} <= set(file.files)


@pytest.mark.parametrize("when", ["write", "fsync", "replace"])
def test_a_crash_while_it_is_written_leaves_the_last_good_file(tmp_path, monkeypatch, when):
    synk.fork(1, verbose=False, timeout=60)
    w = synk.shared(np.arange(3.0), name="w")
    path = tmp_path / "state.npz"
    synk.save(path)
    good = path.read_bytes()
    w.set_value(np.zeros(3))

    def crash(*args, **kwargs):
        raise OSError("disk full")

    if when == "write":
        monkeypatch.setattr(np.lib.format, "write_array", crash)
    else:
        monkeypatch.setattr(os, when, crash)
    with pytest.raises(OSError, match="disk full"):
        synk.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == good
    assert os.listdir(tmp_path) == ["state.npz"]
    synk.load(path)
    np.testing.assert_array_equal(w.get_value(), np.arange(3.0))


def test_the_last_variable_of_a_name_is_saved(tmp_path):
    synk.fork(1, verbose=False, timeout=60)
    old, new = synk.shared(1.0, name="w"), synk.shared(2.0, name="w")
    unnamed = synk.shared(3.0)
    synk.save(tmp_path / "state")
    for variable in (old, new, unnamed):
        variable.set_value(0.0)
    synk.load(tmp_path / "state")
    assert [float(v.get_value()) for v in (old, new, unnamed)] == [0.0, 2.0, 0.0]


def test_what_does_not_fit_changes_nothing(tmp_path):
    synk.fork(2, verbose=False, timeout=60)
    w = synk.shared(np.zeros(3), name="w")
    path = tmp_path / "state.npz"
    synk.save(path)
    w.set_value(np.ones(3))
    with pytest.raises(FileNotFoundError):
        synk.load(tmp_path / "nothing")
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(InvalidValue, match=r"no file that synkro.save\(\) wrote"):
        synk.load(tmp_path / "text")
    np.savez(tmp_path / "other.npz", w=np.zeros(3))
    with pytest.raises(InvalidValue, match=r"no file that synkro.save\(\) wrote"):
        synk.load(tmp_path / "other")
    more = synk.shared(0.0, name="more")
    with pytest.raises(InvalidValue, match="'more' in the session alone"):
        synk.load(path)
    del more
    w_again = synk.shared(np.zeros((3, 1)), name="w")
    with pytest.raises(InvalidValue, match="2 dimensions"):
        synk.load(path)
    del w_again
    np.testing.assert_array_equal(synk.gather(w), np.ones((2, 3)))
    synk.close()
    synk.fork(1, verbose=False, timeout=60)
    with pytest.raises(InvalidValue, match="saved by 2 workers, and this session has 1"):
        synk.load(path)
