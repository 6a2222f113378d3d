"""The queue of tasks, at the end for workers of other hosts, and where items are taken back."""

import pickle

import numpy as np
import pytest

from synkro.ipc.queue import CAPACITY, GROUP, UNDONE, Dispatcher, RemoteTaker, Taker

pytestmark = pytest.mark.quick


@pytest.fixture
def queue():
    queue = Dispatcher(3)
    yield queue
    queue.close()


@pytest.fixture
def remote(queue):
    """The end for other hosts, after the queue was opened."""
    queue.open(None)
    taker = RemoteTaker(1, queue.descriptors)
    taker.begin(0)
    return taker


def put(queue, *numbers):
    """Publish items that are their numbers."""
    for number in numbers:
        queue.put(number, queue.stored((pickle.dumps(number), (), False)))
    queue.publish()


def drained(taker):
    """All items that there are now, as (number, value)."""
    found = []
    while (item := taker.take_now()) is not None:
        number, (stream, buffers, _), place = item
        value = pickle.loads(stream, buffers=buffers)
        found.append((number, value if place < 0 else value[place]))
    return found


def test_nothing_waits_for_items(queue, remote):
    assert drained(remote) == []
    put(queue, 0, 1, 2)
    assert drained(remote) == [(0, 0), (1, 1), (2, 2)]
    assert drained(remote) == []
    put(queue, 3)
    assert remote.take_now()[0] == 3


def test_items_of_a_group_come_with_their_places(queue, remote):
    values = [k * k for k in range(GROUP)]
    assert queue.put_group(100, GROUP, pickle.dumps(values))
    queue.publish()
    assert drained(remote) == [(100 + k, k * k) for k in range(GROUP)]


def test_large_items_come_as_they_are(queue, remote):
    array = np.arange(100_000.0)
    buffers = []
    stream = pickle.dumps(array, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    queue.put(7, kept := queue.stored((stream, buffers, False)))
    queue.publish()
    ((number, value),) = drained(remote)
    assert number == 7
    assert np.array_equal(value, array)
    del kept


def test_it_says_how_many_items_others_may_take(queue, remote):
    put(queue, *range(5))
    remote.take_now()
    assert remote.waiting == 4
    drained(remote)
    assert remote.waiting == 0


def test_the_end_is_seen(queue, remote):
    put(queue, 0)
    queue.end()
    assert not remote.ended
    assert drained(remote) == [(0, 0)]
    assert remote.ended
    assert not remote.withdrawn


def test_what_was_withdrawn_is_nobodys(queue, remote):
    put(queue, *range(5))
    remote.take_now()
    assert queue.withdraw() == [1, 2, 3, 4]
    assert drained(remote) == []
    assert remote.withdrawn
    queue.open(None)
    remote.begin(0)
    assert not remote.withdrawn
    put(queue, 9)
    assert drained(remote) == [(9, 9)]


def test_results_that_do_not_fit_the_pipe_wait(queue, remote):
    text = b"x" * 3000
    given = 0
    while remote.give_now(given, (text, (), False), 0):
        given += 1
    assert given > 3
    found = queue.collect()
    assert remote.give_now(given, (text, (), False), 0)
    found += queue.collect()
    while len(found) <= given:
        found += queue.collect()
    assert found == [(number, -1, (text, (), False)) for number in range(given + 1)]


def test_large_results_wait_until_those_before_are_read(queue, remote):
    large = np.zeros(40 << 20, np.uint8).data
    assert remote.give_now(0, (b"", [large], False), 0)
    assert not remote.give_now(1, (b"", [large], False), 0)
    ((number, rank, _),) = queue.collect()
    assert (number, rank) == (0, 1)
    assert remote.give_now(1, (b"", [large], False), 1)


def test_items_are_told_that_have_not_begun(queue, remote):
    assert remote.give_now(UNDONE, (pickle.dumps([3, 4]), (), False), 0)
    ((number, _, (stream, _, _)),) = queue.collect()
    assert (number, pickle.loads(stream)) == (UNDONE, [3, 4])


def test_items_are_taken_back_that_no_worker_has_drawn(queue):
    queue.open(None)
    worker = Taker(0, queue.descriptors)
    put(queue, *range(4))
    assert worker.take(None)[0] == 0
    assert queue.take_back() == [1, 2, 3]
    assert queue.take_back() == []  # it holds the next ticket
    put(queue, 4, 5)
    assert queue.taken() == [4]
    assert queue.taken() == []
    assert worker.take(None)[0] == 5
    assert queue.take_back() == []


def test_taking_back_goes_on_around_the_slots(queue):
    queue.open(None)
    worker = Taker(0, queue.descriptors)
    expected = []
    for start in range(0, 2 * CAPACITY, 50):
        put(queue, *range(start, start + 50))
        back = queue.taken()
        expected.append(worker.take(None)[0])
        back += queue.take_back()
        assert sorted([*back, expected[-1]]) == list(range(start, start + 50))
