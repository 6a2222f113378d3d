"""The random generators of the ranks: reproducible, independent, and kept from call to call."""

import sys

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.sessions import running
from synkro import WorkerError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

pytestmark = pytest.mark.counted_once


def drawn(seed, workers=2, calls=1):
    with running(workers, seed=seed):
        draw = synk.function(lambda: synk.rng().random(4), outputs=None)
        return np.array([draw() for _ in range(calls)])


def test_generators_are_reproducible_and_independent():
    first, again, other = drawn(7, calls=2), drawn(7, calls=2), drawn(8, calls=2)
    assert np.array_equal(first, again)
    numbers = np.concatenate([first.ravel(), other.ravel()])
    assert len(np.unique(numbers)) == numbers.size  # of all ranks, calls and seeds
    spawned = [np.random.default_rng(seed) for seed in np.random.SeedSequence(7).spawn(2)]
    for call in first:
        for generator, got in zip(spawned, call, strict=True):
            assert np.array_equal(got, generator.random(4))  # kept from call to call


def test_generators_without_a_seed_are_fresh():
    assert not np.array_equal(drawn(None), drawn(None))


def test_a_rank_draws_the_same_however_many_there_are():
    assert np.array_equal(drawn(3, workers=2)[0], drawn(3, workers=3)[0, :2])


def test_generators_in_slices_and_after_errors(three):
    draw = synk.function(lambda x: synk.rng().random(1), outputs=None)

    def fail():
        synk.rng().random()
        raise ValueError("drawn")

    with pytest.raises(WorkerError, match="drawn"):
        synk.function(fail, outputs=[])()
    numbers = np.ravel(draw(np.zeros(12), num_slices=4))
    assert len(np.unique(numbers)) == 12
