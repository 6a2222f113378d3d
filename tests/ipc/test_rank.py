"""What a rank does with commands, without a process: this process is the rank."""

import os
from itertools import count

import numpy as np
import pytest

from support.homes import Home
from support.leftovers import descriptors
from synkro.controller.objects.registry import Registry
from synkro.errors import InternalError
from synkro.memory.segment import Segment
from synkro.messages import (
    Ack,
    Distribute,
    Done,
    Exchange,
    Fill,
    FunctionSpec,
    Generator,
    GeneratorState,
    Housekeeping,
    Identify,
    Inspect,
    Parcel,
    Phase,
    Read,
    Release,
    Shapes,
    Write,
)
from synkro.packing import place
from synkro.plan.call import Access, Region

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


def test_what_cannot_be_mapped_can_be_tried_again(home, monkeypatch):
    region = home.give(np.ones(3))

    def refuse(number, fd, *_):
        os.close(fd)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "attach", refuse)
        with pytest.raises(MemoryError):
            home.rank.array(region)
    assert home.rank.array(region).tolist() == [1, 1, 1]


# ── functions ────────────────────────────────────────────────────────────────────────────────────


def distribute(functions):
    registry = Registry(count(1000).__next__, lambda owner, number: None)
    writer = registry.writer(lambda fn: NotImplemented)
    for value in (len(functions), *functions.items(), [], ([], [], ()), [], []):
        writer.dump(value)
    return Distribute(Parcel(writer.stream, None, ()), *place.found(), {})


def test_functions_come_and_go(home):
    specs = {number: FunctionSpec(f"f{number}", lambda x: 2 * x, "sum") for number in (5, 6)}
    assert home.do(distribute(specs)) == Ack()
    assert home.reports[0] == (Phase.LOADING, 0)
    assert sorted(home.rank.functions) == [5, 6]
    assert home.rank.functions[6].fn(4) == 8
    home.rank.keep_house(Housekeeping(drop=(5, 77)))
    assert list(home.rank.functions) == [6]


def test_functions_stand_where_the_program_stands(home, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", ["/nowhere"])
    before = os.getcwd()
    monkeypatch.chdir(tmp_path)
    command = distribute({})
    os.chdir(before)
    home.do(command)
    assert os.getcwd() == str(tmp_path)


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


def test_rows_are_written_into_a_variable(home):
    replica = home.create(np.zeros(3))
    source = home.give(np.arange(10.0))
    everything = Fill(1, home.give(np.full(3, 7.0)), None, ((0, 3),))
    assert home.do(Write((everything,))) == Ack()
    assert replica.value.tolist() == [7, 7, 7]
    some = Fill(1, source, range(1, 11, 2), ((1, 4),))  # of the rows 1, 3, 5, 7, 9
    home.do(Write((some,)))
    assert replica.value.tolist() == [3, 5, 7]
    home.do(Write((Fill(1, source, None, (None,)),)))
    assert replica.value.tolist() == [3, 5, 7]


def test_a_variable_is_shown_as_if_a_function_had_returned_it(home):
    home.create(np.arange(6.0).reshape(2, 3))
    shown = home.do(Read((1,), (0,), "gather", True))
    assert isinstance(shown, Done)
    (leaf,) = shown.leaves
    (piece,) = leaf.pieces
    assert (leaf.dtype, piece.shape) == ("<f8", (1, 2, 3))
    assert home.do(Read((1,), (), "gather", True)) == Done(None, None)


def test_a_collective_of_one_rank_changes_nothing(home):
    replica = home.create([1.0, 2.0])
    assert home.do(Exchange("all_reduce", (1,), "sum", 0, True)) == Ack()
    assert home.rank.in_call
    home.rank.end(failed=False)
    assert not home.rank.in_call
    assert replica.value.tolist() == [1, 2]


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────


def test_the_state_of_a_generator_goes_home_and_comes_back(home):
    before = home.do(Generator(None))
    assert isinstance(before, GeneratorState)
    first = home.rank.group.rng.random(3)
    home.do(Generator((before.generator,)))
    assert np.array_equal(home.rank.group.rng.random(3), first)


def test_a_release_does_nothing(home):
    assert home.do(Release()) == Ack()


def test_a_command_that_it_does_not_know_is_a_bug(home):
    with pytest.raises(InternalError, match="rank 0 does not know the command"):
        home.rank.action(Ack())
