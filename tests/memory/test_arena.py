"""Memory that ranks share: where an array lies, when its place is used again, and what stays mapped."""

import mmap
import os

import numpy as np
import pytest

from support.leftovers import mappings
from synkro.memory import arena as module
from synkro.memory.arena import Arena, arena_file

pytestmark = pytest.mark.quick


@pytest.fixture
def file():
    fd = arena_file(mmap.PAGESIZE)
    yield fd
    os.close(fd)


@pytest.mark.parametrize("nbytes", [1, mmap.PAGESIZE - 1, mmap.PAGESIZE, 3 * mmap.PAGESIZE])
def test_others_find_an_array_by_its_place(file, nbytes):
    arena = Arena(file, 0)
    array = arena.empty((nbytes,), np.uint8)
    array[...] = 7
    at = arena.locate(array)
    assert Arena(file, 1).view(at, (nbytes,), np.uint8).tolist() == [7] * nbytes
    assert arena.locate(array[nbytes - 1 :]) == at + nbytes - 1
    assert arena.locate(np.empty(nbytes, np.uint8)) is None


def test_a_place_is_used_again_when_its_array_is_gone_and_not_before(file):
    arena = Arena(file, 0)
    first = arena.empty((9,), np.int64)
    place = arena.locate(first)
    second = arena.empty((9,), np.int64)
    assert arena.locate(second) != place
    part = first[3:]
    del first
    third = arena.empty((9,), np.int64)
    assert arena.locate(third) != place
    del part
    fourth, fifth = arena.empty((9,), np.int64), arena.empty((9,), np.int64)
    assert arena.locate(fourth) == place
    assert len({arena.locate(each) for each in (second, third, fourth, fifth)}) == 4


def test_of_others_memory_a_part_stays_mapped(file, monkeypatch):
    monkeypatch.setattr(module, "_VIEWS", 5)
    arena, other = Arena(file, 0), Arena(file, 1)
    arrays = [arena.empty((1,), np.int64) for _ in range(20)]
    before = mappings()
    for number, array in enumerate(arrays):
        array[0] = number
        assert other.view(arena.locate(array), (1,), np.int64)[0] == number
    assert mappings() - before <= 5
