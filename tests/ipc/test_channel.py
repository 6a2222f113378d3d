"""The channel: what is sent arrives whole, at all, once, and wakes whoever sleeps.

The two sides are threads of this process; the block lies between them as between processes.
"""

import mmap
import os
import random
import socket
import threading
import time
from itertools import pairwise

import pytest

from support.together import good, together
from support.waiting import wait_until
from synkro.ipc.block import AREA, MARKS, block_bytes
from synkro.ipc.channel import Controller
from synkro.ipc.descriptors import Descriptors, Inherited, send_descriptors
from synkro.ipc.listener import Listener
from synkro.ipc.waiting import new_fence

pytestmark = pytest.mark.quick

PATIENCE = 20.0  # seconds after which a test has failed
END = b"the end"
LOCK = threading.Lock


class Wire:
    """A controller and its listeners, which answer in threads of their own."""

    def __init__(self, size):
        self.size = size
        self.eventfds = [os.eventfd(0) for _ in range(1 + size)]
        wake_workers, *wakes_main = self.eventfds
        self.inherited = inherited = Inherited(-1, -1, wake_workers, tuple(wakes_main), (), -1)
        self.memory = memory = memoryview(mmap.mmap(-1, block_bytes(size)))
        pairs = [socket.socketpair() for _ in range(size)]
        self.sockets = [ours for ours, _ in pairs]
        self.controller = Controller(memory, size, inherited)
        self.lane = self.controller.everyone
        self.listeners = [Listener(memory, rank, size, inherited) for rank in range(size)]
        self.received = [Descriptors(theirs) for _, theirs in pairs]
        self.threads = []

    def serve(self, answer):
        """Every rank replies ``answer(rank, command, housekeeping)``, until the end."""

        def work(rank, listener):
            while (received := listener.receive(0))[0] != END:
                listener.reply(answer(rank, *received), 0)
            listener.reply(b"", 0)

        self.threads = [
            threading.Thread(target=work, args=each, daemon=True) for each in enumerate(self.listeners)
        ]
        for thread in self.threads:
            thread.start()

    def ask(self, command, housekeeping=b"", **options):
        """Send it; the replies of all ranks, when they have come."""
        self.lane.send(command, housekeeping)
        return self.answers(**options)

    def answers(self, **options):
        assert self.lane.wait(time.monotonic() + PATIENCE, [], **options) == []
        assert self.lane.unanswered() == []
        return list(self.lane.replies())

    def close(self):
        if self.threads:
            self.ask(END)
        for thread in self.threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()
        for received in self.received:
            received.close()
        for sock in self.sockets:
            sock.close()
        for fd in self.eventfds:
            os.close(fd)
        del self.listeners, self.controller, self.lane, self.memory


@pytest.fixture
def wired():
    """``wired(size)``: a wire that is closed after the test."""
    wires = []

    def start(size, answer=None):
        wires.append(Wire(size))
        if answer is not None:
            wires[-1].serve(answer)
        return wires[-1]

    yield start
    for wire in wires:
        wire.close()


def echo(rank, command, housekeeping):
    return b"%d|%s|%s" % (rank, command, housekeeping)


def waits(which, go):
    """Answers with the rank, and *which* of them to the command "wait" when it may *go*."""

    def answer(rank, command, _):
        if rank == which and command == b"wait":
            assert go.wait(PATIENCE)
        return b"%d" % rank

    return answer


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_rank_gets_the_command_and_gives_its_own_reply(wired, size):
    wire = wired(size, echo)
    assert wire.ask(b"do", b"tidy") == [b"%d|do|tidy" % rank for rank in range(size)]
    assert wire.ask(b"", b"") == [b"%d||" % rank for rank in range(size)]


def test_many_rounds_of_old_and_new_commands_and_replies(wired):
    rng = random.Random(0)
    kept = [rng.randbytes(rng.choice([0, 1, 100, AREA // 2])) for _ in range(4)]
    replies = [[rng.randbytes(rng.choice([0, 7, AREA])) for _ in range(3)] for _ in range(3)]
    given = [[] for _ in replies]

    def answer(rank, command, housekeeping):
        given[rank].append((command, housekeeping))
        return replies[rank][len(given[rank]) // 2 % 3]

    wire = wired(3, answer)
    sent = []
    for turn in range(400):
        command = rng.choice([*kept, rng.randbytes(turn)])
        housekeeping = rng.choice([b"", b"", rng.randbytes(AREA - len(command) and 5)])
        sent.append((command, housekeeping))
        want = [replies[rank][(turn + 1) // 2 % 3] for rank in range(3)]
        assert wire.ask(command, housekeeping) == want
    assert given == [sent] * 3


def test_payloads_as_large_as_their_place(wired):
    wire = wired(2, lambda rank, command, housekeeping: (command + housekeeping)[::-1])
    for middle in (0, 1, AREA - 1, AREA):
        payload = os.urandom(AREA)
        assert wire.ask(payload[:middle], payload[middle:]) == [payload[::-1]] * 2


def test_replies_that_did_not_change_are_the_same_objects(wired):
    same = b"as ever"
    wire = wired(2, lambda *_: same)
    wire.ask(b"first")
    first = wire.lane.replies()
    wire.ask(b"second")
    assert wire.lane.replies() is first
    assert first == [b"as ever"] * 2


@pytest.mark.parametrize("idle", [0.0, 0.0005, 0.005, 0.05])
def test_a_command_wakes_whoever_sleeps(wired, idle):
    wire = wired(3, echo)
    for turn in range(5):
        time.sleep(idle)  # the listeners poll for a moment, and then sleep
        assert wire.ask(b"%d" % turn) == [b"%d|%d|" % (rank, turn) for rank in range(3)]


@pytest.mark.parametrize("idle", [0.0, 0.005])
@pytest.mark.parametrize("late", [0.0, 0.0005, 0.02])
def test_workers_that_were_woken_early_also_get_a_command_that_comes_late_or_not_at_once(
    wired, idle, late
):
    wire = wired(3, echo)
    for turn in range(5):
        time.sleep(idle)
        for _ in range(turn):
            wire.controller.wake_early()
        time.sleep(late)  # after half a millisecond they sleep again
        assert wire.ask(b"%d" % turn) == [b"%d|%d|" % (rank, turn) for rank in range(3)]


class InterruptedLock:
    """A lock whose first release Ctrl-C comes before."""

    def __init__(self):
        self.lock = LOCK()
        self.acquire = self.lock.acquire
        self.steps = iter([self.interrupt])

    def interrupt(self):
        raise KeyboardInterrupt

    def release(self):
        next(self.steps, self.lock.release)()


def test_a_fence_holds_nobody_up_after_an_interrupt_between_its_steps(monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", InterruptedLock)
        fence = new_fence()
    with pytest.raises(KeyboardInterrupt):
        fence()
    assert good(together(fence, fence, seconds=PATIENCE)) == [None, None]


@pytest.mark.parametrize("last", [0, 1, 2])
def test_the_last_answer_wakes_the_controller(wired, last):
    """It sleeps, and nobody but the last to answer wakes it: waiting has no limit here."""
    go = threading.Event()
    wire = wired(3, waits(last, go))
    wire.lane.send(b"wait", b"")
    assert wait_until(lambda: wire.lane.unanswered() == [last])

    def let_go():
        time.sleep(0.02)  # the controller sleeps by then, as a rule
        go.set()

    outcomes = together(lambda: wire.lane.wait(None, []), let_go, seconds=PATIENCE)
    assert good(outcomes)[0] == []
    assert wire.answers() == [b"0", b"1", b"2"]


def test_a_deadline_ends_the_wait_and_the_answer_still_counts(wired):
    go = threading.Event()
    wire = wired(2, waits(1, go))
    wire.lane.send(b"wait", b"")
    assert wire.lane.wait(time.monotonic() + 0.05, []) == []
    assert wait_until(lambda: wire.lane.unanswered() == [1])
    assert not wire.listeners[0].answered(1, wire.listeners[0].number)
    go.set()
    assert wire.answers() == [b"0", b"1"]
    assert wire.listeners[0].answered(1, wire.listeners[0].number)
    assert wire.ask(b"on") == [b"0", b"1"]


def test_a_sentinel_ends_the_wait(wired):
    go = threading.Event()
    wire = wired(1, waits(0, go))
    ours, theirs = os.pipe()
    wire.lane.send(b"wait", b"")
    os.close(theirs)
    assert wire.lane.wait(time.monotonic() + PATIENCE, [ours]) == [ours]
    go.set()
    assert wire.answers() == [b"0"]
    assert wire.lane.wait(time.monotonic() + PATIENCE, [ours]) == []  # all have answered
    os.close(ours)


def test_ticks_come_while_it_waits(wired):
    ticks = []
    go = threading.Event()

    def tick():
        ticks.append(None)
        if len(ticks) == 3:
            go.set()

    wire = wired(1, lambda *_: b"yes" if go.wait(PATIENCE) else b"no")
    assert wire.ask(b"wait", on_tick=tick) == [b"yes"]
    assert len(ticks) >= 3


def test_who_has_not_begun_hears_that_nobody_wants_the_answer(wired):
    wire = wired(1)
    (listener,) = wire.listeners
    for unwanted in (True, False, True):
        wire.lane.send(b"do", b"")
        if unwanted:
            wire.lane.give_up()
        assert listener.receive(0) == (b"do", b"")
        assert listener.unwanted() == unwanted
        listener.reply(b"done", 0)
        assert wire.answers() == [b"done"]


def test_commands_have_numbers_that_grow(wired):
    wire = wired(2)
    one, other = wire.listeners
    numbers = []
    for _ in range(3):
        wire.lane.send(b"do", b"")
        one.receive(0), other.receive(0)
        numbers.append(one.number)
        assert other.number == one.number
        assert not one.answered(1, other.number)
        other.reply(b"", 0)
        assert one.answered(1, other.number)
        assert not other.answered(0, other.number)
        one.reply(b"", 0)
    assert sorted(set(numbers)) == numbers


def test_marks_are_left_while_somebody_traces(wired):
    wire = wired(2)
    controller, listener = wire.controller, wire.listeners[1]
    listener.report(1, 5)
    assert (controller.whereabouts(0), controller.whereabouts(1)) == ((0, 0), (1, 5))
    assert controller.marked(1) == 0
    controller.trace(True)
    before = time.perf_counter_ns()
    listener.report(2, 6)
    listener.mark(3)
    assert controller.whereabouts(1) == (2, 6)
    after = time.perf_counter_ns()
    controller.trace(False)
    listener.report(4, 8)
    listener.mark(5)
    assert (controller.marked(0), controller.marked(1)) == (0, 2)
    (first, *one), (second, *other) = controller.marks(1, 0)
    assert (one, other) == ([2, 6], [3, 6])  # a mark is of the slice that was reported last
    assert before <= first <= second <= after
    assert controller.marks(1, 1) == [(second, 3, 6)]
    assert controller.marks(1, 2) == controller.marks(0, 0) == []


def test_the_oldest_marks_give_way(wired):
    wire = wired(1)
    wire.controller.trace(True)
    for number in range(MARKS + 10):
        wire.listeners[0].report(1, number)
    marks = wire.controller.marks(0, 0)
    assert [count for _, _, count in marks] == list(range(10, MARKS + 10))
    assert all(one <= other for (one, *_), (other, *_) in pairwise(marks))
    assert wire.controller.marked(0) == MARKS + 10


def test_descriptors_arrive_by_their_numbers(wired, tmp_path):
    """More than fit a message, in several messages, and asked for in another order."""
    wire = wired(1)
    (received,), (sock,) = wire.received, wire.sockets
    files = {}
    for number in range(300):
        files[number] = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
        os.write(files[number], b"%d" % number)
    numbered = list(files.items())
    sender = threading.Thread(
        target=lambda: [send_descriptors(sock, numbered[:290]), send_descriptors(sock, numbered[290:])]
    )
    sender.start()
    for number in (5, 0, 299, *range(1, 5), *range(6, 299)):
        fd = received.descriptor(number)
        assert os.pread(fd, 10, 0) == b"%d" % number
        received.release(number)
        with pytest.raises(OSError, match="Bad file"):
            os.fstat(fd)
    sender.join(PATIENCE)
    for fd in files.values():
        os.close(fd)


def test_a_listener_ends_when_its_main_process_has_gone(wired, monkeypatch):
    wire = wired(1)
    monkeypatch.setattr(os, "getppid", lambda: 1)
    (outcome,) = together(lambda: wire.listeners[0].receive(0))
    assert isinstance(outcome, EOFError)
    wire.sockets[0].close()
    with pytest.raises(EOFError, match="closed the socket"):
        wire.received[0].descriptor(1)
