"""Whether an object is referred to from one place alone, as this interpreter counts references."""

from operator import getitem

import numpy as np
import pytest

from synkro.memory.segment import Segment
from synkro.values.owners import sole_owner

pytestmark = pytest.mark.quick

OFTEN = 5000
"""Calls after which an interpreter has made of the code what it makes of code that runs often."""


class Attribute:
    """Holds an object as most do."""

    def __init__(self, held):
        self.held = held


class Slot:
    """Holds an object where there is no dictionary."""

    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


HOLDERS = [(Attribute, getattr, "held"), (Slot, getattr, "held"), (lambda held: [held], getitem, 0)]


@pytest.mark.parametrize("make", [object, lambda: np.empty(3)], ids=["object", "array"])
@pytest.mark.parametrize(("hold", "get", "key"), HOLDERS, ids=["attribute", "slot", "item"])
def test_every_further_owner_is_seen(hold, get, key, make):
    holder = hold(make())
    for _ in range(OFTEN):
        assert sole_owner(get, holder, key)
    other = get(holder, key)
    for _ in range(OFTEN):
        assert not sole_owner(get, holder, key)
        assert sole_owner(get, holder, key, 2)
    third = [other]
    assert not sole_owner(get, holder, key, 2)
    del other, third
    assert sole_owner(get, holder, key)


def test_views_own_the_memory_of_a_segment():
    segment = Segment.create(1, 1 << 12)
    assert sole_owner(getattr, segment, "base")
    view = segment.base[10:20]
    assert not sole_owner(getattr, segment, "base")
    further = view[:5]
    del view
    assert not sole_owner(getattr, segment, "base")
    del further
    assert sole_owner(getattr, segment, "base")
    segment.close()
