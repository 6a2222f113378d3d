"""Pieces of segments, as messages carry them."""

import numpy as np
import pytest

from support.examples import given, st
from support.homes import spans
from synkro.errors import SharedMemoryError
from synkro.hosts.mirror import Mirrors
from synkro.hosts.parcels import discard, pack, unpack
from synkro.plan.extents import Extent, PickedRows

LENGTH = 60_000


def pieces():
    ends = st.tuples(st.integers(0, LENGTH), st.integers(0, LENGTH)).map(sorted)
    extents = st.builds(
        lambda n, ends, bare: Extent(n, *ends, bare), st.integers(1, 2), ends, st.booleans()
    )
    rows = st.lists(st.integers(0, 50), min_size=1, max_size=20, unique=True)
    picked = st.builds(
        lambda n, start, rows: PickedRows(n, start, 1000, 900, np.array(rows)),
        st.integers(1, 2), st.integers(0, 99), rows,
    )  # fmt: skip
    return extents | picked


@given(st.lists(pieces(), max_size=5))
def test_pieces_arrive_and_nothing_else(sent):
    rng = np.random.default_rng(7)
    there = {number: rng.integers(1, 256, LENGTH).astype(np.uint8) for number in (1, 2)}
    here = {number: np.zeros(LENGTH, np.uint8) for number in (1, 2)}
    expected = {number: np.zeros(LENGTH, np.uint8) for number in (1, 2)}
    for piece in sent:
        for start, stop in spans(piece):
            expected[piece.segment][start:stop] = there[piece.segment][start:stop]
    parcel, loads = pack(sent, there.__getitem__)
    loads = iter(loads)

    def fill(places, sealed):
        load = next(loads)
        assert load.sealed is sealed
        for place, body in zip(places, load.bodies, strict=True):
            place[:] = body

    unpack(parcel, here.__getitem__, fill)
    for number in (1, 2):
        np.testing.assert_array_equal(here[number], expected[number])


def test_little_travels_in_the_head():
    memory = {1: np.arange(200, dtype=np.uint8)}
    parcel, loads = pack([Extent(1, 5, 9), Extent(1, 100, 103)], memory.__getitem__)
    assert loads == []
    assert parcel[1] == bytes([5, 6, 7, 8, 100, 101, 102])


def test_what_there_is_no_memory_for_is_received_all_the_same():
    memory = {1: np.zeros(LENGTH, np.uint8)}
    rows = PickedRows(1, 0, 8, 8, np.arange(9), bare=True)
    parcel, loads = pack([rows, Extent(1, 0, 50_000)], memory.get)
    received = []
    discard(parcel, lambda places, sealed: received.append(([*map(len, places)], sealed)))
    assert received == [([*map(len, load.bodies)], load.sealed) for load in loads]
    assert received == [([50_000], True), ([72], False)]


def test_mirrors_take_memory_where_they_are_reserved(monkeypatch):
    mirrors = Mirrors()
    fd = mirrors.descriptor(3, 1 << 30)
    assert mirrors.descriptor(3, 1 << 30) == fd
    assert mirrors.memory(3).nbytes == 1 << 30
    mirrors.reserve(Extent(3, 5000, 9000))
    mirrors.memory(3)[5000:9000] = 7

    def full(fd, offset, nbytes):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="No space left"):
        mirrors.reserve(Extent(3, 0, 1 << 20))
    mirrors.keep(3)
    mirrors.drop(3)
    assert mirrors.memory(3)[6000] == 7
    mirrors.close()
