"""Variables and generators, to a file and back."""

import os

import numpy as np
import pytest

import synkro as synk
from synkro import extensions as ext
from synkro import here
from synkro.errors import InvalidValue

pytestmark = [pytest.mark.long, pytest.mark.quick]

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


def test_of_equal_replicas_one_comes_here(tmp_path, monkeypatch):
    """They are compared where they are, by their bytes."""
    synk.fork(2, verbose=False, timeout=60)
    alike, other = (synk.shared(np.arange(3.0), name=name) for name in ("alike", "not"))
    synk.set_value(1, other, np.array([-0.0, 1.0, 2.0]))
    collectives = here.session.services.variables.collectives
    assert [collectives.are_alike(each) for each in (alike, other)] == [True, False]
    fetched = []

    def get_value(_, rank, variable):
        fetched.append((variable.name, rank))
        return np.arange(3) + rank

    monkeypatch.setattr(type(collectives), "get_value", get_value)
    synk.save(tmp_path / "state")
    assert fetched == [("alike", 0), ("not", 0), ("not", 1)]
    with np.load(tmp_path / "state.npz") as file:
        assert {"alike", "not@0", "not@1"} < set(file.files)


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


def test_names_that_are_missing_or_taken_twice(tmp_path):
    synk.fork(1, verbose=False, timeout=60)
    unnamed = synk.shared(3.0)
    with pytest.raises(InvalidValue, match="no variable has a name"):
        synk.save(tmp_path / "state")
    old, new = synk.shared(1.0, name="w"), synk.shared(2.0, name="w")
    with pytest.raises(InvalidValue, match="two variables have the name 'w'"):
        synk.save(tmp_path / "state")
    assert os.listdir(tmp_path) == []
    del old
    synk.save(tmp_path / "state")
    for variable in (new, unnamed):
        variable.set_value(0.0)
    synk.load(tmp_path / "state")
    assert [float(v.get_value()) for v in (new, unnamed)] == [2.0, 0.0]


@pytest.mark.parametrize(
    "name", ["a/b", "w.npy", "synkro", "a\0b", "x" * 1000, "ü", "\ud800", "..", " "]
)
def test_any_name_will_do(tmp_path, name):
    synk.fork(1, verbose=False, timeout=60)
    one, other = synk.shared(np.arange(3.0), name=name), synk.shared(1.0, name="w")
    synk.save(tmp_path / "state")
    one.set_value(np.zeros(3))
    other.set_value(0.0)
    synk.load(os.fsencode(tmp_path / "state"))
    np.testing.assert_array_equal(one.get_value(), np.arange(3.0))
    assert other.get_value() == 1


def test_damaged_files_are_refused(tmp_path):
    synk.fork(1, verbose=False, timeout=60)
    w = synk.shared(np.arange(300.0), name="w")
    path = tmp_path / "state.npz"
    synk.save(path)
    good = path.read_bytes()
    w.set_value(np.zeros(300))
    damages = [good[:n] for n in (0, 1, 30, 100, len(good) // 2, len(good) - 1)]
    damages += [good[:n] + bytes([good[n] ^ 255]) + good[n + 1 :] for n in range(35, 400, 17)]
    refused = 0
    for damage in damages:
        path.write_bytes(damage)
        try:
            synk.load(path)
        except InvalidValue:
            refused += 1
            assert not w.get_value().any()
        else:  # a byte that nothing depends on
            np.testing.assert_array_equal(w.get_value(), np.arange(300.0))
            w.set_value(np.zeros(300))
    assert refused > len(damages) // 2


def test_two_rules_of_a_kind_are_both_saved(tmp_path):
    synk.fork(2, verbose=False, timeout=60)
    params = [synk.shared(np.zeros(3)), synk.shared(np.zeros(3), name="other")]
    rules = [ext.adam([param], 0.1) for param in params]
    trains = [
        ext.make_train_function(lambda x, w=param: (x.mean(), [x.mean(axis=0) + w.value]), [param], rule)
        for param, rule in zip(params, rules, strict=True)
    ]
    for train in trains:
        train(ROWS)
    synk.save(tmp_path / "state")
    for train in trains:
        train(ROWS)
    want = [param.get_value() for param in params]
    synk.load(tmp_path / "state")
    for train in trains:
        train(ROWS)
    for param, value in zip(params, want, strict=True):
        np.testing.assert_array_equal(param.get_value(), value)
    with np.load(tmp_path / "state.npz") as file:
        assert {"adam.param0", "adam.first", "adam2.first", "other"} <= set(file.files)


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
    np.testing.assert_array_equal(synk.gather(w), np.ones((2, 3)))
    synk.close()
    synk.fork(2, verbose=False, timeout=60)
    w_again = synk.shared(np.zeros((3, 1)), name="w")
    with pytest.raises(InvalidValue, match="2 dimensions"):
        synk.load(path)
    del w_again
    synk.close()
    synk.fork(1, verbose=False, timeout=60)
    with pytest.raises(InvalidValue, match="saved by 2 workers, and this session has 1"):
        synk.load(path)


def test_a_file_is_of_one_moment_while_calls_go_on(session, tmp_path):
    a, b = session.shared(np.zeros(2), name="a"), session.shared(np.zeros(2), name="b")

    def count():
        a.value[...] += 1
        b.value[...] += 1

    f = session.function(count, outputs=[])
    f()
    for number in range(5):
        futures = [f.submit() for _ in range(50)]
        session.save(tmp_path / f"{number}")
        for future in futures:
            future.result()
        with np.load(tmp_path / f"{number}.npz") as file:
            assert file["a"].tolist() == file["b"].tolist()
