"""Turns: operations on some ranks run beside each other, those on all ranks alone."""

import threading
import time

import pytest

from support.together import good, together
from support.waiting import wait_until
from synkro.controller.engine.turns import NeedsAll, Turns

pytestmark = pytest.mark.quick

ZERO, ONE, BOTH = frozenset([0]), frozenset([1]), frozenset([0, 1])


@pytest.fixture
def lock():
    return threading.RLock()


@pytest.fixture
def turns(lock):
    return Turns(lock, 2, None)


def at_once(*bodies):
    return good(together(*bodies))


@pytest.mark.parametrize("ranks", [BOTH, ONE], ids=["both", "one"])
def test_turns_that_share_a_rank_go_on_one_after_the_other(turns, ranks):
    inside = []

    def action():
        inside.append("in")
        turns.released(lambda: time.sleep(0.02))
        inside.append("out")

    at_once(*[lambda: turns.run(ranks, action)] * 4)
    assert inside == ["in", "out"] * 4


def test_an_operation_on_all_ranks_waits_for_the_turns_and_lets_none_begin(turns, lock):
    going, go = threading.Event(), threading.Event()
    seen = []

    def one():
        turns.run(ZERO, lambda: turns.released(lambda: (going.set(), go.wait(10), seen.append("turn"))))

    def all_ranks():
        going.wait(10)
        with lock:
            assert turns.go_on
            turns.wait_for_all()
            seen.append("all")
            assert wait_until(lambda: len(turns.line) == 1)  # the second turn
            turns.wait_for_all()  # it is a part of this operation
            seen.append("all")

    def another():
        wait_until(lambda: len(turns.line) > 1)  # all_ranks has its place
        turns.run(ZERO, lambda: seen.append("another"))

    def let_go():
        wait_until(lambda: len(turns.line) > 2)
        go.set()

    at_once(one, all_ranks, another, let_go)
    assert seen == ["turn", "all", "all", "another"]


def test_a_stream_of_turns_does_not_keep_the_others_waiting(turns, lock):
    """Two threads always have a turn on rank 0 or on rank 1; one on both has to get in."""
    over = threading.Event()

    def stream(ranks):
        def one():
            while not over.is_set():
                turns.run(ranks, lambda: turns.released(lambda: time.sleep(0.001)))

        return one

    def both():
        try:
            for _ in range(20):
                turns.run(BOTH, lambda: None)
                with lock:
                    turns.wait_for_all()
        finally:
            over.set()

    at_once(stream(ZERO), stream(ONE), both)


def test_who_waits_gives_up_in_time(turns, lock):
    going, go = threading.Event(), threading.Event()

    def all_ranks():
        going.wait(10)
        with lock:
            assert not turns.wait_for_all(time.monotonic() + 0.02)
        go.set()

    hold = lambda: turns.released(lambda: (going.set(), go.wait(10)))  # noqa: E731
    at_once(lambda: turns.run(ZERO, hold), all_ranks)


def test_a_turn_ends_with_an_exception(turns, lock):
    def fail():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turns.run(ZERO, fail)
    with pytest.raises(KeyboardInterrupt):
        turns.run(ZERO, lambda: turns.released(fail))
    with lock:
        assert turns.wait_for_all(time.monotonic() + 5)
    assert turns.line == []


def test_what_needs_all_ranks_begins_anew_with_them(turns):
    barrier = threading.Barrier(2)
    ranks = []

    def body(own):
        def needy():
            ranks.append(turns.ranks)
            turns.require_all()
            turns.released(lambda: time.sleep(0.01))
            assert turns.ranks == BOTH
            return own

        def action():
            turns.released(lambda: barrier.wait(10))  # both have a turn, and want all ranks
            assert turns.widening(needy) == own
            assert turns.ranks == own

        return lambda: turns.run(own, action)

    at_once(body(ZERO), body(ONE))
    assert ranks.count(BOTH) == 2
    assert set(ranks) == {ZERO, ONE, BOTH}


def test_all_ranks_cannot_be_had_in_a_part_of_an_operation_on_some(turns):
    def action():
        with pytest.raises(NeedsAll):
            turns.require_all()
        with pytest.raises(NeedsAll):
            turns.owns_some(BOTH)
        turns.run(ONE, lambda: None)  # it is a part of the operation

    turns.run(ZERO, action)
    turns.require_all()


def test_turns_on_different_ranks_go_on_at_the_same_time_each_with_its_own_limit(turns):
    barrier = threading.Barrier(2)

    def action(seconds):
        def look():
            with turns.limited(seconds):
                turns.released(lambda: barrier.wait(10))
                assert turns.limit == seconds

        return look

    at_once(lambda: turns.run(ZERO, action(1.0)), lambda: turns.run(ONE, action(2.0)))
    assert turns.limit is None
    assert not turns.go_on
