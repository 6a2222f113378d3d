"""The meeting: ranks go in step, messages arrive, and nobody waits for what cannot come.

The ranks are threads of this process; the board lies between them as between processes.
"""

import random
import threading
import time

import pytest

from support.mirrors import Mirrors
from support.together import good
from support.waiting import Watch, wait_until
from support.worlds import ShmWorld
from synkro.comms import meeting as module
from synkro.comms.board import KINDS, board_bytes
from synkro.comms.meeting import Meeting
from synkro.errors import CollectiveError
from synkro.memory.arena import Arena
from synkro.memory.mapping import map_file
from synkro.plan.call import Access

BARRIER, BROADCAST = KINDS.index("barrier"), KINDS.index("broadcast")
BOX = 8  # messages that may wait to be received


class Board(ShmWorld):
    """The meetings of all ranks over the files of hosts, with so many ranks each.

    *answered* as of ``Meeting``.
    """

    def __init__(self, layout, answered=None):
        self.mirrors = Mirrors(layout)
        self.size = size = self.mirrors.size
        self.epoch = 0
        self.comms = []
        for rank in range(size):
            host = self.mirrors.host_of(rank)
            file, wakes = self.mirrors.files[host], self.mirrors.wakes[host]
            board = map_file(file, board_bytes(size), Access.WRITE).data
            journal = self.mirrors.journal(rank) if len(layout) > 1 else None
            arena = Arena(file, rank, journal and journal.forget)
            self.comms.append(Meeting(board, rank, size, arena, wakes, answered, journal))

    def works(self):
        """Whether the next call goes well."""
        return good(self.run(in_step)) == [[b"%d" % rank for rank in range(self.size)]] * self.size

    def close(self):
        del self.comms
        self.mirrors.close()


LAYOUTS = {  # by the number of hosts: so many ranks on each
    "one host": lambda size: [size],
    "two hosts": lambda size: [size - size // 2, size // 2] if size > 1 else [1],
    "a host each": lambda size: [1] * size,
}


@pytest.fixture(params=LAYOUTS)
def board(request):
    """``board(size)``: a board that is closed after the test."""
    boards = []

    def make(size, *arguments):
        boards.append(Board(LAYOUTS[request.param](size), *arguments))
        return boards[-1]

    yield make
    for each in boards:
        each.close()


@pytest.fixture
def watched(monkeypatch):
    """What a test waits for wakes it: to look again by itself would take longer than the test may."""
    monkeypatch.setattr(module, "_NAP", 60_000)
    with Watch():
        yield


def in_step(meeting):
    """One collective: what all ranks have said."""
    said = meeting.meet(BARRIER, b"%d" % meeting.rank)
    meeting.step()
    meeting.part()
    return said


def strayed(outcome, *words, strays=False):
    assert isinstance(outcome, CollectiveError), outcome
    for word in words:
        assert word in str(outcome)
    assert outcome.strays == strays


# ── in step ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_all_see_what_all_say(board, size):
    board = board(size)

    def said(rank, turn):
        rng = random.Random(100 * turn + rank)
        return rng.randbytes(rng.choice([0, 1, 50, 2048, 2049, 30_000]))

    def body(meeting):
        seen = []
        for turn in range(60):
            seen.append(meeting.meet(BROADCAST, said(meeting.rank, turn)))
            if turn % 3:
                meeting.part()
            else:
                meeting.pass_on()
        return seen

    want = [[said(rank, turn) for rank in range(size)] for turn in range(60)]
    assert good(board.run(body)) == [want] * size


def test_what_is_said_again_is_seen_again(board):
    def body(meeting):
        same = b"from %d" % meeting.rank
        return [meeting.meet(BARRIER, same) for _ in range(5) if not meeting.pass_on()]

    assert good(board(2).run(body)) == [[[b"from 0", b"from 1"]] * 5] * 2


@pytest.mark.parametrize("stage", ["meet", "step", "part"])
def test_nobody_passes_before_all_are_there(board, stage, watched):
    """Where one of them is late, so that the others fall asleep."""
    arrived = []

    def body(meeting):
        for turn in range(3):
            if stage != "meet":
                meeting.meet(BARRIER, b"")
            if meeting.rank == turn:
                time.sleep(0.02)
            arrived.append(turn)
            if stage == "meet":
                meeting.meet(BARRIER, b"")
            elif stage == "step":
                meeting.step()
            else:
                meeting.part()
            assert arrived.count(turn) == meeting_size
            if stage != "part":
                meeting.part()
            else:
                in_step(meeting)

    meeting_size = 3
    good(board(meeting_size).run(body))
    assert len(arrived) == 9


def test_some_of_the_ranks(board):
    board = board(4)
    for ranks in [(0,), (3,), (1, 3), (0, 2, 3), (0, 1, 2, 3)]:

        def body(meeting):
            return meeting.members.place, in_step(meeting)

        want = [(place, [b"%d" % rank for rank in ranks]) for place in range(len(ranks))]
        assert good(board.run(body, ranks)) == want


def test_who_is_ahead_and_who_behind(board):
    """A rank marks a step; the other sees it, and goes after it."""
    marked, looked = threading.Event(), threading.Event()

    def body(meeting):
        meeting.meet(BARRIER, b"")
        if meeting.rank == 0:
            assert meeting.behind() == []
            meeting.mark()
            marked.set()
            assert meeting.behind() == [1]
            assert looked.wait(20)
        else:
            assert marked.wait(20)
            assert wait_until(meeting.overtaken)
            meeting.mark()
            assert not meeting.overtaken()
            looked.set()
        assert wait_until(lambda: meeting.behind() == [])
        meeting.part()

    good(board(2).run(body))


def test_a_failure_of_another_can_be_seen(board):
    looked = threading.Event()

    def body(meeting):
        in_step(meeting)
        if meeting.rank == 1:
            assert looked.wait(20)
            raise ZeroDivisionError
        before = meeting.failed()
        looked.set()
        return before, wait_until(meeting.failed)

    seen, failure = board(2).run(body)
    assert seen == (False, True)
    assert isinstance(failure, ZeroDivisionError)


# ── messages ─────────────────────────────────────────────────────────────────────────────────────


def test_a_message_that_comes_late(board, watched):
    arrived = threading.Event()

    def body(meeting):
        if meeting.rank == 1:
            assert meeting.fetch(0) == 7
            arrived.set()
        else:
            time.sleep(0.02)  # the other sleeps by then, as a rule
            meeting.post(1, 7)
            assert arrived.wait(20)

    good(board(2).run(body))


def test_messages_come_in_order_and_a_sender_waits_while_the_box_is_full(board, watched):
    posted = []

    def body(meeting):
        if meeting.rank == 0:
            numbers = []
            for at in range(5 * BOX):
                numbers.append(meeting.post(1, at))
                posted.append(at)
            return numbers
        seen = []
        for turn in range(5 * BOX):
            time.sleep(0.001 * (turn % BOX == 0))
            seen.append(meeting.fetch(0))
            assert len(posted) <= turn + BOX
            meeting.fetched(0)
        return seen

    numbers, seen = good(board(2).run(body))
    assert seen == list(range(5 * BOX))
    assert [number - numbers[0] for number in numbers] == seen


def test_a_sender_sees_how_many_have_been_read(board):
    def body(meeting):
        if meeting.rank == 0:
            before = meeting.received(1)
            for at in (10, 11, 12):
                meeting.post(1, at)
            in_step(meeting)
            return meeting.received(1) - before
        for _ in range(2):
            meeting.fetch(0)
            meeting.fetched(0)
        in_step(meeting)
        return None

    assert good(board(2).run(body))[0] == 2


@pytest.mark.parametrize("left", [1, BOX])
def test_messages_of_an_earlier_call_are_forgotten(board, left):
    board = board(2)

    def leave(meeting):
        if meeting.rank == 0:
            for at in range(left):
                meeting.post(1, at)

    def body(meeting):
        if meeting.rank == 0:
            for at in range(100, 100 + BOX):
                meeting.post(1, at)
            return []
        seen = []
        for _ in range(BOX):
            seen.append(meeting.fetch(0))
            meeting.fetched(0)
        return seen

    for _ in range(3):
        good(board.run(leave))
        assert good(board.run(body))[1] == list(range(100, 100 + BOX))


# ── what cannot come about ───────────────────────────────────────────────────────────────────────

WAITS = {
    "barrier": in_step,
    "recv from rank 1": lambda meeting: meeting.fetch(1),
    "send to rank 1": lambda meeting: [meeting.post(1, at) for at in range(2 * BOX)],
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("how", ["failed", "returned from the function"])
def test_who_leaves_strands_nobody(board, wait, late, how, watched):
    board = board(2)

    def body(meeting):
        in_step(meeting)
        if meeting.rank == 0:
            return WAITS[wait](meeting)
        if late:
            time.sleep(0.02)  # the other sleeps by then, as a rule
        if how == "failed":
            raise ZeroDivisionError
        return None

    outcomes = board.run(body)
    strayed(outcomes[0], f"rank 1 {how}", wait, "in which rank 0 waited", strays=how == "failed")
    assert board.works()


@pytest.mark.parametrize("wait", WAITS)
def test_who_never_came_and_has_answered_strands_nobody(board, wait):
    """Its end of the call is seen by its answer to the main process alone."""
    board = board(2, lambda rank, epoch: rank == 1)
    with Watch():
        outcomes = board.run(lambda meeting: None if meeting.rank else WAITS[wait](meeting))
    strayed(outcomes[0], "rank 1 returned from the function", wait)


def test_who_has_not_answered_is_waited_for(board):
    board = board(2, lambda rank, epoch: False)

    def body(meeting):
        if meeting.rank:
            time.sleep(0.25)  # longer than between two looks whether anything can still change
        return in_step(meeting)

    assert good(board.run(body)) == [[b"0", b"1"]] * 2


STANDSTILLS = {
    "all receive": lambda meeting: meeting.fetch((meeting.rank + 1) % 3),
    "all send too much": lambda meeting: [
        meeting.post((meeting.rank + 1) % 3, at) for at in range(2 * BOX)
    ],
    "one receives": lambda meeting: in_step(meeting) if meeting.rank else meeting.fetch(1),
    "one takes no part in it": lambda meeting: (
        meeting.fetch(1 - meeting.rank) if meeting.rank < 2 else meeting.meet(BARRIER, b"")
    ),
}


@pytest.mark.parametrize("what", STANDSTILLS)
def test_ranks_that_wait_for_each_other_are_told(board, what):
    board = board(3)
    with Watch():
        outcomes = board.run(STANDSTILLS[what])
    assert all(isinstance(outcome, CollectiveError) for outcome in outcomes), outcomes
    assert any("wait for each other, and none can go on" in str(outcome) for outcome in outcomes)
    assert board.works()


@pytest.mark.parametrize("leaver", [1, 2])
def test_a_rank_that_left_is_seen_behind_one_that_is_late(board, leaver):
    """Rank 0 waits for both others; the one that is only late waits for rank 0."""

    def body(meeting):
        if meeting.rank == 0:
            return in_step(meeting)
        return None if meeting.rank == leaver else meeting.fetch(0)

    board = board(3)
    with Watch():
        first, *others = board.run(body)
    strayed(first, f"rank {leaver} returned from the function")
    strayed(others[2 - leaver], "rank 0 failed", strays=True)
    assert board.works()


def test_who_was_thrown_out_of_a_collective_cannot_enter_the_next(board):
    board = board(2)

    def body(meeting):
        meeting.meet(BROADCAST, b"")
        if meeting.rank == 0:
            in_step(meeting)  # it has not parted
        else:
            meeting.step()
            meeting.part()

    with Watch():
        outcomes = board.run(body)
    strayed(outcomes[0], "rank 0 was thrown out of broadcast (collective 1 of this call)")
    strayed(outcomes[1], "rank 0 failed", strays=True)
    assert board.works()


def test_where_a_rank_is(board):
    def body(meeting):
        told = []
        for kind in ("barrier", "all_reduce"):
            meeting.meet(KINDS.index(kind), b"")
            meeting.part()
            told.append(meeting.where())
        other = 1 - meeting.rank
        meeting.post(other, 0)
        told.append(meeting.where())
        meeting.fetch(other)
        told.append(meeting.where())
        return told

    told = good(board(2).run(body))[0]
    assert told[:2] == ["barrier (collective 1 of this call)", "all_reduce (collective 2 of this call)"]
    assert told[2:] == ["send to rank 1", "recv from rank 1"]
