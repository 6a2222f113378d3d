"""Futures of submitted calls, as their calls are over."""

import numpy as np
import pytest

import synkro as synk

pytestmark = pytest.mark.counted_once  # arguments stay in memory for the next call


def test_futures_come_as_their_calls_are_over(two):
    last = synk.function(lambda x: x.sum(), outputs="sum", target=1).submit(np.ones(2))
    calls = [
        synk.function(lambda x, k=k: x.sum() * k, outputs="sum").submit(np.ones(4)) for k in range(5)
    ]
    found = [future.result() for future in synk.as_completed([*calls, last, last], timeout=60)]
    assert sorted(found) == sorted([0, 4, 8, 12, 16, 2])
    assert list(synk.as_completed([])) == []


@pytest.mark.parametrize("wrong", [3, None, [1], "futures"])
def test_what_is_no_list_of_futures(two, wrong):
    with pytest.raises(synk.InvalidType, match="takes a list of the futures"):
        synk.as_completed(wrong)
    future = synk.function(lambda: 1, outputs="sum").submit()
    with pytest.raises(synk.InvalidType, match="takes a list of the futures"):
        synk.as_completed(future)
    with pytest.raises((synk.InvalidType, synk.InvalidValue), match="timeout"):
        synk.as_completed([future], timeout="soon")
    assert future.result() == 2
