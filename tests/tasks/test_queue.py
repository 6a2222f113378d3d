"""The queue of tasks, without workers: batches, tickets in part, results in blocks and in the pipe."""

import os
import pickle

import numpy as np
import pytest

from synkro.ipc.queue import ALONE, EACH, Dispatcher, Pickles, Taker, Ticket, fits

pytestmark = pytest.mark.quick


@pytest.fixture
def queue():
    queue = Dispatcher(3)
    yield queue
    queue.close()


@pytest.fixture
def taker(queue, read):
    """A worker's end, after the queue was opened."""
    queue.open(None)
    taker = Taker(1, queue.descriptors, lambda: len(read))
    taker.begin()
    return taker


@pytest.fixture
def read():
    """One of something for each block of results that the main process has read."""
    return []


def put(queue, first, values):
    """Publish a batch, and let workers draw it; returns its slot, and what holds it there."""
    stored = queue.stored(Pickles(EACH, [pickle.dumps(value) for value in values]))
    slot = queue.put(first, stored)
    queue.issue([Ticket(slot, 0, len(values))])
    return slot, stored


def drawn(taker, most=1 << 20):
    """What one ticket is for, as (number, value)."""
    ticket, (first, pickles), _ = taker.take_now(most)
    values = [pickle.loads(part) for part in pickles.parts]
    return [(first + place, values[place]) for place in range(ticket.start, ticket.stop)]


def test_nobody_waits_who_looks_for_what_is_there_now(queue, taker):
    assert taker.take_now(9) is None
    kept = put(queue, 0, "ab")
    assert drawn(taker) == [(0, "a"), (1, "b")]
    del kept


def test_large_buffers_come_aligned_and_writable(queue, taker):
    array = np.arange(100_000.0)
    buffers = []
    stream = pickle.dumps(array, 5, buffer_callback=lambda buffer: buffers.append(buffer.raw()))
    stored = queue.stored(Pickles(ALONE, [stream, *buffers], True))
    queue.issue([Ticket(queue.put(3, stored), 0, 1)])
    _, (first, pickles), _ = taker.take_now(1)
    assert (first, pickles.kind, pickles.by_us) == (3, ALONE, True)
    value = pickle.loads(pickles.parts[0], buffers=pickles.parts[1:])
    assert np.array_equal(value, array)
    assert value.flags.aligned
    assert value.flags.writeable


def test_a_ticket_goes_back_in_part(queue, taker):
    other = Taker(2, queue.descriptors, lambda: 0)
    slot, kept = put(queue, 0, range(5))
    assert drawn(taker, most=2) == [(0, 0), (1, 1)]
    assert other.take_now(9)[0] == (slot, 2, 5)
    assert other.is_dry
    assert other.put_back(Ticket(slot, 4, 5))
    assert not taker.is_dry
    assert drawn(taker) == [(4, 4)]
    del kept


def test_a_ticket_before_others_is_taken_whole(queue, taker):
    kept = [put(queue, first, "ab") for first in (0, 2)]
    assert drawn(taker, most=1) == [(0, "a"), (1, "b")]
    assert drawn(taker, most=1) == [(2, "a")]
    assert drawn(taker, most=1) == [(3, "b")]
    del kept


def test_a_worker_that_waits_is_told_of_tickets_and_of_the_end(queue, taker):
    slots = []

    def wait(condition):
        assert not condition()
        slots.append(put(queue, 0, "x"))
        assert condition()

    assert taker.take(wait)[0] == (slots[0][0], 0, 1)
    ends = []

    def wait_for_the_end(condition):
        assert not condition()
        queue.end()
        ends.append(condition())

    assert taker.take(wait_for_the_end) is None
    assert ends == [True]
    assert not taker.withdrawn


def test_what_was_withdrawn_is_nobodys_until_the_queue_is_opened_again(queue, taker):
    slot, kept = put(queue, 0, range(5))
    drawn(taker, most=1)
    assert queue.withdraw() == [(slot, 1, 5)]
    assert taker.withdrawn
    assert taker.take(None) is None
    assert taker.put_back(Ticket(slot, 0, 1))  # by a worker that had not begun
    assert queue.withdraw() == [(slot, 0, 1)]
    queue.open(None)
    taker.begin()
    assert not taker.withdrawn
    again = put(queue, 9, "a")
    assert drawn(taker) == [(9, "a")]
    del kept, again


def test_there_are_so_many_slots(queue, taker):
    kept = []
    while queue.has_room:
        kept.append(put(queue, len(kept), [0]))
    assert len({slot for slot, _ in kept}) == len(kept) > 500
    queue.free(kept[3][0])
    assert put(queue, 9999, [1])[0] == kept[3][0]


def test_nobody_takes_what_is_not_wanted(queue, taker):
    kept = put(queue, 0, range(5))
    queue.stop()
    assert not taker.wanted
    assert taker.take(None) is None
    del kept


# ── results ──────────────────────────────────────────────────────────────────────────────────────────


def test_results_that_do_not_fit_the_pipe_wait(queue, taker):
    text = Pickles(EACH, [b"x" * 3000])
    assert fits(text)
    given = 0
    while taker.write(taker.record(0, given, 1, text)):
        given += 1
    assert given > 3
    found = queue.collect()
    assert taker.write(taker.record(0, given, 1, text))
    while len(found) <= given:
        found += queue.collect()
    assert [run.first for run in found] == list(range(given + 1))


def test_results_of_a_worker_that_died_before_it_told_of_them(queue, taker):
    text = Pickles(EACH, [b"abc"])
    assert queue.collect() == []  # the first look is at all that is there
    os.write(queue.descriptors[2], taker.record(0, 7, 1, text))
    assert queue.collect() == []
    ((_, first, *_),) = queue.collect(told=False)
    assert first == 7
    assert taker.write(taker.record(0, 8, 1, text))
    ((_, first, *_),) = queue.collect()
    assert first == 8


def test_large_results_wait_until_those_before_are_read(queue, taker, read):
    large = Pickles(ALONE, [b"", np.zeros(40 << 20, np.uint8).data])
    assert not fits(large)
    assert taker.write(taker.record(0, 0, 1, large))
    assert taker.record(0, 1, 1, large) is None
    ((_, first, _, rank, _),) = queue.collect()
    assert (first, rank) == (0, 1)
    read.append(1)
    assert taker.record(0, 1, 1, large) is not None
