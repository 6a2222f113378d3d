"""What a rank does with commands, without a process: this process is the rank."""

import builtins
import sys

import numpy as np
import pytest

from support.homes import Home
from support.leftovers import descriptors
from synkro.messages import (
    Ack,
    Exchange,
    Housekeeping,
    Identify,
    Inspect,
    Shapes,
)
from synkro.plan.call import Access, Region
from synkro.worker import objects
from synkro.worker.objects import RankObjects

pytestmark = pytest.mark.quick


@pytest.fixture
def home():
    home = Home()
    yield home
    home.close()


# ── memory ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("access", Access)
def test_a_segment_is_mapped_as_it_is_meant(home, access):
    region = home.give(np.arange(4.0), access)
    array = home.rank.array(region)
    assert array.tolist() == [0, 1, 2, 3]
    home.seen(region)[0] = 7
    if access is Access.READ:
        assert array[0] == 7
        with pytest.raises(ValueError, match="read-only"):
            array[1] = 5
        return
    array[1] = 5
    assert home.seen(region)[1] == (5 if access is Access.WRITE else 1)
    assert home.rank.array(region)[1] == 5


def test_what_was_freed_is_unmapped_and_its_descriptor_given_back(home):
    before = len(descriptors())
    used, unused = (home.give(np.zeros(3)) for _ in range(2))
    home.rank.array(used)
    home.rank.keep_house(Housekeeping(drop=(used.segment, unused.segment, 12_345)))
    home.segments.clear()
    assert len(descriptors()) == before
    with pytest.raises(KeyError):
        home.rank.array(used)


# ── variables ────────────────────────────────────────────────────────────────────────────────────


def test_a_variable_is_a_copy(home):
    replica = home.create([1.0, 2.0], "w")
    home.seen(Region(100, 0, (2,), "<f8"))[:] = 9
    assert replica.value.tolist() == [1, 2]
    assert replica.name == "w"
    assert home.do(Inspect((1, 1))) == Shapes(((2,), (2,)))
    home.rank.keep_house(Housekeeping(drop=(1, 2)))
    assert home.rank.variables == {}


def test_digests_tell_replicas_apart(home):
    numbers = [0.0, -0.0, np.float32(0), [0.0], np.zeros((1, 1)), np.nan, 0]
    arrays = [np.asarray(value) for value in numbers] + [np.arange(12.0).reshape(3, 4).T]
    digests = set()
    for number, array in enumerate(arrays, 1):
        home.create(array, number=number)
        digests.add(home.do(Identify(number)).digest)
    assert len(digests) == len(arrays)
    home.create(np.ascontiguousarray(arrays[-1]), number=100)
    assert home.do(Identify(100)).digest in digests


def test_a_collective_of_one_rank_changes_nothing(home):
    replica = home.create([1.0, 2.0])
    assert home.do(Exchange("all_reduce", (1,), "sum", 0, True)) == Ack()
    assert home.rank.in_call
    home.rank.end(failed=False)
    assert not home.rank.in_call
    assert replica.value.tolist() == [1, 2]


def test_a_module_that_an_interrupt_cut_off_is_made_anew(monkeypatch):
    """Functions in it would miss what every module has."""
    found, install = RankObjects(), objects._install

    def interrupted(module):
        monkeypatch.setattr(objects, "_install", install)
        raise KeyboardInterrupt

    monkeypatch.setattr(objects, "_install", interrupted)
    module = (7, "a_module_of_ones_own", [], {"x": 1})
    with pytest.raises(KeyboardInterrupt):
        found._space(*module)
    whole = found._space(*module)
    assert sys.modules.pop("a_module_of_ones_own") is whole
    assert vars(whole)["__builtins__"] is vars(builtins)
    assert found._space(*module) is whole
