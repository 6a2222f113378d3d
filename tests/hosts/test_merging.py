"""The parts of a large result, from hosts that come in any order: ``hosts.merging``."""

import numpy as np

from support.examples import given, st
from synkro.hosts.merging import HERE, Merging
from synkro.plan.call import Region
from synkro.plan.extents import Partial

SIZE = 1000


@st.composite
def arrivals(draw):
    """The hosts that have a part, by their ranks; and in which order their parts come."""
    hosts = draw(st.lists(st.integers(0, 4), min_size=2, max_size=5, unique=True))
    return hosts, draw(st.permutations(hosts))


@given(arrivals(), st.sampled_from(["sum", "mean", "max", "prod"]), st.integers(1, 400))
def test_parts_merge_in_the_order_of_ranks(order_and_arrivals, op, length):
    order, come = order_and_arrivals
    rng = np.random.default_rng(1)
    parts = {host: rng.standard_normal((SIZE // 10, 10)) for host in order}
    target = parts[HERE].copy() if HERE in parts else np.empty((SIZE // 10, 10))
    merging = Merging(Partial(op, 7, Region(1, 0, target.shape, "<f8"), ()), target, order)
    assert merging.nbytes == target.nbytes
    buffer = np.empty(8 * length, np.uint8)

    def pieces(part):
        """As they come over the wire: each goes when the next one is asked for."""
        whole = part.reshape(-1).view(np.uint8)
        for start in range(0, len(whole), len(buffer)):
            piece = whole[start : start + len(buffer)]
            buffer[: len(piece)] = piece
            yield buffer[: len(piece)]
            buffer[:] = 255

    for host in come:
        if host == HERE:
            merging.here()
        else:
            merging.take(host, pieces(parts[host]))
    merging.here()
    ufunc = {"max": np.maximum, "prod": np.multiply}.get(op, np.add)
    expected = parts[order[0]]
    for host in order[1:]:
        expected = ufunc(expected, parts[host])
    np.testing.assert_array_equal(target, expected / 7 if op == "mean" else expected)
