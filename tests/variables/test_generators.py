"""The random generators of the ranks: reproducible, independent, and kept from call to call."""

import sys

import numpy as np
import pytest

import synkro as synk
from support.forked import TORCH
from support.sessions import running
from synkro import WorkerError

pytestmark = [pytest.mark.long, pytest.mark.counted_once]


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


def test_generators_in_slices_and_after_errors(three):
    draw = synk.function(lambda x: synk.rng().random(1), outputs=None)

    def fail():
        synk.rng().random()
        raise ValueError("drawn")

    with pytest.raises(WorkerError, match="drawn"):
        synk.function(fail, outputs=[])()
    numbers = np.ravel(draw(np.zeros(12), num_slices=4))
    assert len(np.unique(numbers)) == 12


def from_globals():
    import random

    return np.array([random.random(), *np.random.rand(2)])


def globally(seed, workers=2):
    """What each rank draws from the generators of its process, in two calls."""
    with running(workers, seed=seed):
        draw = synk.function(from_globals, outputs=None)
        return np.array([draw(), draw()])


def test_a_seed_is_also_that_of_random_and_of_numpy_random_on_each_rank():
    first, again, other = globally(7), globally(7), globally(8)
    assert np.array_equal(first, again)
    numbers = np.concatenate([first.ravel(), other.ravel(), drawn(7).ravel()])
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize("draws", [drawn, globally])
def test_without_a_seed_they_are_fresh(draws):
    numbers = np.concatenate([draws(None).ravel(), draws(None).ravel()])
    assert len(np.unique(numbers)) == numbers.size


@pytest.mark.parametrize("draws", [drawn, globally])
def test_a_rank_draws_the_same_however_many_there_are(draws):
    assert np.array_equal(draws(3, workers=2), draws(3, workers=3)[:, :2])


def test_what_is_drawn_from_rng_changes_nothing_for_the_others():
    wanted = globally(7)
    with running(2, seed=7):
        synk.function(lambda: synk.rng().random(), outputs=None)()
        draw = synk.function(from_globals, outputs=None)
        assert np.array_equal([draw(), draw()], wanted)


def test_a_rank_can_be_seeded_anew():
    def both():
        return np.array([*from_globals(), *synk.rng().random(4)])

    with running(2, seed=8) as session:
        draw = synk.function(both, outputs=None)
        other = draw()
        session.reseed(7)
        first, second = draw(), draw()
        session.reseed(7)
        assert np.array_equal(draw(), first)
        assert np.array_equal(draw(), second)
    assert not np.intersect1d(other, first).size
    assert np.array_equal(np.array(first)[:, 3:], drawn(7)[0])


def test_the_recipe_of_scattered_seeds_is_equal_for_any_number_of_workers():
    def draw(seeds):
        return np.array([np.random.default_rng(seed).random(5) for seed in seeds])

    seeds = np.random.SeedSequence(0).generate_state(13, np.uint64)
    for workers in (1, 2, 3):
        with running(workers):
            f = synk.function(draw, outputs="gather")
            assert np.array_equal(f(seeds), draw(seeds))
            assert np.array_equal(f(seeds, num_slices=3), draw(seeds))


@pytest.mark.libraries
@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
class TestTorch:
    @pytest.fixture(autouse=True)
    def torch(self):
        return pytest.importorskip("torch", reason="needs PyTorch (the extra torch)")

    def masks(self, torch, seed):
        """The dropout of each rank, in two calls."""
        dropout = torch.nn.Dropout()
        with running(2, seed=seed):
            f = synk.function(lambda x: dropout(torch.as_tensor(x)), outputs=None)
            return np.array([f(np.ones(128)), f(np.ones(128))])

    def different(self, *masks):
        return len({mask.tobytes() for mask in np.concatenate(masks).reshape(-1, 64)})

    @pytest.mark.loaded(TORCH)
    def test_dropout_differs_by_rank_and_is_reproducible_with_a_seed(self, torch):
        first, again, other = self.masks(torch, 7), self.masks(torch, 7), self.masks(torch, 8)
        assert np.array_equal(first, again)
        assert self.different(first, other) == 8

    def test_without_a_seed_dropout_differs_by_rank_and_session(self, torch):
        assert self.different(self.masks(torch, None), self.masks(torch, None)) == 8

    def test_a_function_without_torch_does_not_import_it(self, torch):
        with running(2, seed=7):
            assert synk.function(lambda: "torch" in sys.modules, outputs=None)() == [False, False]

    def test_torch_that_a_call_imports_is_seeded_before_the_next(self, torch):
        name = "torch"  # which the function does not bring along

        def seed_of():
            import importlib

            return importlib.import_module(name).initial_seed()

        def seeds():
            with running(2, seed=7):
                f = synk.function(seed_of, outputs=None)
                return f(), f(), f()

        _, second, third = seeds()
        assert second[0] != second[1]
        assert second == third == seeds()[1]

    @pytest.mark.loaded(TORCH)
    def test_a_seed_that_a_function_gives_stays(self, torch):
        with running(2, seed=7):
            synk.function(lambda: torch.manual_seed(5), outputs=[])()
            draw = synk.function(lambda: torch.rand(3), outputs=None)
            wanted = torch.rand(3, generator=torch.Generator().manual_seed(5)).numpy()
            assert np.array_equal(draw(), [wanted] * 2)

    @pytest.mark.parametrize("before", [True, False])
    def test_a_rank_can_be_seeded_anew_before_and_after_torch_comes(self, torch, before):
        def reseed(seed):
            from synkro import here

            here.rank.reseed(seed)

        def draws(seed, anew=None):
            with running(2, seed=seed):
                draw = synk.function(lambda: torch.rand(3), outputs=None)
                if not before:
                    draw()
                if anew is not None:
                    synk.function(reseed, bcast_inputs=["seed"], outputs=[])(anew)
                return np.array(draw())

        with running(2, seed=7):
            wanted = synk.function(lambda: torch.rand(3), outputs=None)()
        assert np.array_equal(draws(8, anew=7), wanted)
