"""What goes to a host: each byte once a version."""

import numpy as np
import pytest

from support.examples import given, st
from support.homes import spans
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
    return {at for span in spans(piece) for at in range(*span)}


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


ONE, TWO = Extent(1, 0, 9), Extent(2, 0, 9)


def rows(*numbers, **options):
    return PickedRows(1, 0, 8, 8, np.array(numbers), **options)


def sent(current, *pieces):
    """What goes to the host for these, in turn; rows as their numbers, and whether they go bare."""
    parts = [part for piece in pieces for part in current.lacks(piece)]
    return [part if isinstance(part, Extent) else (part.rows.tolist(), part.bare) for part in parts]


@pytest.fixture
def current():
    return CurrentBytes(lambda segment: 0)


def test_a_row_goes_once_however_often_it_is_picked(current):
    assert sent(current, rows(5, 2, 5), rows(9, 5)) == [([2, 5], False), ([9], False)]


def test_segments_are_apart(current):
    assert sent(current, ONE, TWO) == [ONE, TWO]
    current.drop(1)
    assert sent(current, ONE, TWO) == [ONE]


def test_of_a_file_that_the_host_has_nothing_goes_there(current):
    assert not current.knows(1)
    current.share(1, True)
    current.share(2, False)
    assert current.knows(1)
    assert current.knows(2)
    assert sent(current, ONE, rows(1), TWO) == [TWO]
    current.drop(1)
    assert not current.knows(1)
    assert sent(current, ONE) == [ONE]


def test_what_has_come_bare_comes_again_where_it_needs_a_digest(current):
    bare = Extent(1, 0, 9, bare=True)
    assert sent(current, bare, bare, ONE) == [bare, ONE]
    assert sent(current, rows(2, 7, bare=True)) == [([2, 7], True)]
    current.drop(1)
    assert sent(current, bare, ONE) == [bare, ONE]
