"""What goes to a host: each byte once a version."""

import numpy as np

from support.examples import given, st
from synkro.hosts.mirror import CurrentBytes
from synkro.plan.extents import Extent, PickedRows

LENGTH = 60
EXTENTS = st.tuples(st.integers(0, LENGTH - 1), st.integers(1, LENGTH)).map(
    lambda ends: Extent(1, min(ends), max(*ends, min(ends) + 1))
)
ROWS = st.builds(
    lambda start, size, rows: PickedRows(1, start, 4, size, np.array(rows)),
    st.integers(0, 3),
    st.integers(1, 6),
    st.lists(st.integers(0, 12), max_size=8),
)


def touched(piece):
    """The bytes of a piece."""
    if isinstance(piece, Extent):
        return set(range(piece.start, piece.stop))
    starts = [piece.start + int(row) * piece.stride for row in piece.rows]
    return {start + at for start in starts for at in range(piece.nbytes)}


@given(st.lists(EXTENTS | ROWS | st.none(), max_size=12))
def test_the_host_always_has_what_it_reads(steps):
    """None: the contents have changed."""
    version = [0]
    current, there = CurrentBytes(lambda segment: version[0]), set()
    for step in steps:
        if step is None:
            version[0] += 1
            there.clear()
            continue
        sent = list(current.lacks(step))
        for piece in sent:
            there |= touched(piece)
        assert touched(step) <= there
        assert all(touched(piece) <= touched(step) for piece in sent)
        assert list(current.lacks(step)) == []


@given(st.lists(EXTENTS, max_size=12))
def test_no_byte_goes_twice(steps):
    current, there = CurrentBytes(lambda segment: 0), set()
    for step in steps:
        for piece in current.lacks(step):
            assert not there & touched(piece)
            there |= touched(piece)


def test_a_row_goes_once_however_often_it_is_picked():
    current = CurrentBytes(lambda segment: 0)
    (piece,) = current.lacks(PickedRows(1, 0, 8, 8, np.array([5, 2, 5])))
    assert piece.rows.tolist() == [2, 5]
    (piece,) = current.lacks(PickedRows(1, 0, 8, 8, np.array([9, 5])))
    assert piece.rows.tolist() == [9]


def test_segments_are_apart():
    current = CurrentBytes(lambda segment: 0)
    assert list(current.lacks(Extent(1, 0, 9))) == [Extent(1, 0, 9)]
    assert list(current.lacks(Extent(2, 0, 9))) == [Extent(2, 0, 9)]
    current.drop(1)
    assert list(current.lacks(Extent(1, 0, 9))) == [Extent(1, 0, 9)]
    assert list(current.lacks(Extent(2, 0, 9))) == []


def test_of_a_file_that_the_host_has_nothing_goes_there():
    current = CurrentBytes(lambda segment: 0)
    assert not current.knows(1)
    current.share(1, True)
    current.share(2, False)
    assert current.knows(1)
    assert current.knows(2)
    assert [*current.lacks(Extent(1, 0, 9)), *current.lacks(PickedRows(1, 0, 4, 4, np.array([1])))] == []
    assert [*current.lacks(Extent(2, 0, 9))] == [Extent(2, 0, 9)]
    current.drop(1)
    assert not current.knows(1)
    assert [*current.lacks(Extent(1, 0, 9))] == [Extent(1, 0, 9)]


def test_what_has_come_bare_comes_again_where_it_needs_a_digest():
    current = CurrentBytes(lambda segment: 0)
    bare, sealed = Extent(1, 0, 9, bare=True), Extent(1, 0, 9)
    assert [*current.lacks(bare)] == [bare]
    assert [*current.lacks(bare)] == []
    assert [*current.lacks(sealed)] == [sealed]
    rows = PickedRows(1, 0, 4, 4, np.array([1, 7]), bare=True)
    assert [(piece.rows.tolist(), piece.bare) for piece in current.lacks(rows)] == [([1, 7], True)]
    current.drop(1)
    assert [*current.lacks(bare), *current.lacks(sealed)] == [bare, sealed]
