"""Ranks on several hosts: what they write down reaches the mirrors, and collectives come out right."""

import contextlib
import functools
import os
import random
import select
import threading
import time

import numpy as np
import pytest

from support.examples import examples, given, st
from support.mirrors import Mirrors
from support.together import good, together
from support.waiting import Watch, wait_until
from support.worlds import HostsWorld, serial
from synkro.comms import hosts, meeting
from synkro.comms.board import LINE, Line
from synkro.comms.journal import ENTRIES, ENTRY, shared_words
from synkro.comms.members import found, name, new_board
from synkro.comms.ops import OPERATIONS
from synkro.errors import CollectiveError
from synkro.memory.arena import PART, Arena
from synkro.memory.mapping import map_file
from synkro.plan.call import Access
from synkro.plan.split import split

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]

SUM = OPERATIONS["sum"]

TOO_DIFFERENT = [20_000, 45_000, 100_000, 220_000, 480_000, 1_040_000]
"""Sizes of arrays of which one in turn never fits where another was."""


# ── one batch ────────────────────────────────────────────────────────────────────────────────────────


class Written:
    """What rank 0 of three hosts, of a rank each, writes down; nothing is carried by itself."""

    def __init__(self):
        self.mirrors = Mirrors([1, 1, 1], carry=False)
        self.journal = self.mirrors.journal(0)
        self.arena = Arena(self.mirrors.files[0], 0, self.journal.forget)
        boards = [map_file(file, 4096, Access.WRITE).data.cast("Q") for file in self.mirrors.files]
        self.here, *self.there = boards
        self.words = shared_words(self.here, 0, self.journal)
        self.filled = {1: 0, 2: 0}  # the bytes that each of the others has received

    def array(self, value, nbytes=100_000):
        """Memory of rank 0, and where it lies."""
        array = self.arena.empty((nbytes,), np.uint8)
        array[...] = value
        return array, self.arena.locate(array)

    def seen(self, host, at, nbytes=100_000):
        """What a host has there."""
        return Arena(self.mirrors.files[host], 9).view(at, (nbytes,), np.uint8)

    def entries(self):
        """What goes to host 1: where, the value or the size, and for which host."""
        passed = self.mirrors.relays[0].outgoing()
        return [each[1:] for each in ENTRY.iter_unpack(passed[1][0].entries)] if passed else []

    def carry(self):
        for host, (shown, load) in self.mirrors.relays[0].outgoing().items():

            def fill(views, host=host, load=load):
                for source, view in zip(load.bodies, views, strict=True):
                    self.filled[host] += len(view)
                    view[:] = source

            self.mirrors.relays[host].apply(shown.entries, fill)

    def woken(self, rank):
        """Whether *rank* has been woken since the last time."""
        wake = self.mirrors.wakes[rank][rank]
        os.set_blocking(wake, False)
        try:
            return bool(os.eventfd_read(wake))
        except BlockingIOError:
            return False

    def close(self):
        del self.here, self.there, self.words, self.arena, self.journal
        self.mirrors.close()


@pytest.fixture
def written():
    with contextlib.closing(Written()) as written:
        yield written


def test_words_reach_all_hosts(written):
    written.words[3] = 7
    written.words[3] += 1
    assert (written.here[3], written.there[0][3], written.there[1][3]) == (8, 0, 0)
    written.carry()
    assert [words[3] for words in written.there] == [8, 8]
    assert written.words[3] == 8
    assert bytes(written.words[3:5]) == bytes(written.here[3:5])
    assert written.mirrors.relays[0].outgoing() == {}


def test_bytes_reach_the_hosts_that_they_are_shown_to(written):
    (_one, at_one), (_two, at_two) = written.array(1), written.array(2)
    written.journal.show(at_one, 10, [0, 2])
    written.journal.show(at_two + 5, 20)
    written.journal.show(at_two, 0)
    written.carry()
    assert written.filled == {1: 20, 2: 30}
    assert written.seen(2, at_one, 12).tolist() == [1] * 10 + [0, 0]
    assert written.seen(1, at_two, 27).tolist() == [0] * 5 + [2] * 20 + [0, 0]
    assert not written.seen(1, at_one).any()


def test_the_words_that_make_bytes_count_come_after_them(written):
    """These are read when they are sent: no copy is made before."""
    array, at = written.array(1)
    written.words[0] = 5
    written.journal.show(at, len(array), [1])
    written.words[1] = 6
    shown, load = written.mirrors.relays[0].outgoing()[1]
    array[...] = 2
    before = []

    def fill(views):
        before.append(written.there[0][1])
        views[0][:] = load.bodies[0]

    written.mirrors.relays[1].apply(shown.entries, fill)
    assert before == [0]
    assert written.there[0][:2].tolist() == [5, 6]
    assert (written.seen(1, at) == 2).all()


def test_members_are_seen_elsewhere_when_all_of_them_are_named(written):
    board = new_board(written.arena, 3)
    at = written.arena.locate(board)
    name(shared_words(board.data.cast("B").cast("Q"), at, written.journal), (0, 1, 2))
    entries = written.mirrors.relays[0].outgoing()[1][0].entries
    seen = []
    for start in range(0, len(entries), ENTRY.size):
        written.mirrors.relays[1].apply(entries[start : start + ENTRY.size], None)
        seen.append(found(Arena(written.mirrors.files[1], 9), at, 1, []).ranks)
    assert seen == [(), (), (), (0, 1, 2)]


def test_who_sleeps_is_woken_by_what_it_may_wait_for(written):
    written.there[0][LINE + Line.SLEEPS] = 1
    written.words[Line.SLEEPS], written.words[Line.FOR] = 1, 8
    written.carry()
    assert not written.woken(1)  # two sleepers would wake each other for ever
    written.words[Line.LEFT] = 1
    written.carry()
    assert written.woken(1)
    assert not written.woken(2)  # it does not sleep


def test_a_relay_that_sleeps_is_woken(written):
    relay, slept = written.mirrors.relays[0], threading.Event()

    def sleep():
        slept.set()
        relay.sleeping(lambda wakes: select.select(wakes, [], [], 60))
        return list(relay.outgoing())

    def write():
        assert slept.wait(20)
        time.sleep(0.02)  # it sleeps by then, as a rule
        written.words[0] = 1

    with Watch():
        assert good(together(sleep, write))[0] == [1, 2]


def test_who_writes_down_more_than_is_read_waits(written):
    """And nothing is lost or comes twice, at the end of the ring either."""
    count, done = 3 * ENTRIES + 10, []

    def write():
        for number in range(count):
            written.words[number % 500] = number
            done.append(number)

    def read():
        seen = []
        assert wait_until(lambda: len(done) == ENTRIES)
        while len(seen) < count:
            assert len(done) <= len(seen) + ENTRIES
            for _, value, _ in written.entries():
                seen.append(value)
        return seen

    _, seen = good(together(write, read))
    assert seen == list(range(count))


# ── worlds ───────────────────────────────────────────────────────────────────────────────────────────

LAYOUTS = [(1, 1), (1, 2), (3, 1), (2, 2), (1, 1, 2), (2, 1, 2)]


@pytest.fixture(scope="module")
def worlds():
    """``worlds(layout)``: a world of hosts that serves the whole file."""
    with contextlib.ExitStack() as stack:
        yield functools.cache(lambda layout: stack.enter_context(contextlib.closing(HostsWorld(layout))))


def integers(rank, number, shape, dtype):
    """Small ones, so that nothing is rounded."""
    rng = np.random.default_rng([rank, number])
    made = rng.integers(0 if np.dtype(dtype).kind in "bu" else -2, 3, shape)
    return made.astype(dtype)


ARRAYS = st.lists(
    st.tuples(
        st.sampled_from(["?", "i1", "i4", "u8", "f2", "f4", "f8", "c8", "c16"]),
        st.sampled_from([0, 1, 2, 3, 5, 17, 64, 1000]),
        st.sampled_from([(), (1,), (3,), (0,)]),
    ),
    min_size=1,
    max_size=4,
)


@examples(80)
@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from(["all_reduce", "reduce", "reduce_scatter"]),
    st.sampled_from(list(OPERATIONS)),
    ARRAYS,
    st.data(),
)
def test_large_reductions_are_exact(worlds, layout, kind, op, types, data):
    """On some or all of the ranks, with any weights."""
    world = worlds(layout)
    some = st.sets(st.integers(0, world.size - 1), min_size=1)
    ranks = tuple(sorted(data.draw(st.just(range(world.size)) | some)))
    weights = data.draw(st.lists(st.integers(1, 3), min_size=len(ranks), max_size=len(ranks)))
    weights = weights if op == "mean" else [1] * len(ranks)
    root = data.draw(st.integers(0, len(ranks) - 1))
    given_ = [
        [integers(place, number, (n, *tail), dtype) for number, (dtype, n, tail) in enumerate(types)]
        for place in range(len(ranks))
    ]

    def body(comm):
        arrays, weight = given_[comm.place], weights[comm.place]
        if kind == "reduce":
            return comm.reduce(arrays, OPERATIONS[op], weight, root)
        return getattr(comm, kind)(arrays, OPERATIONS[op], weight)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hosts, "_WHOLE_UP_TO", -1)
        outcomes = good(world.run(body, ranks))
    wants = [serial(op, [mine[n] for mine in given_], weights) for n in range(len(types))]
    for place, outcome in enumerate(outcomes):
        if kind == "reduce" and place != root:
            assert outcome is None
            continue
        for got, want in zip(outcome, wants, strict=True):
            if kind == "reduce_scatter":
                want = want[slice(*split(0, len(want), len(ranks))[place])]
            assert (got.dtype, got.shape) == (want.dtype, want.shape)
            assert np.array_equal(got, want)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_large_reductions_give_all_ranks_the_same_bits_every_time(worlds, layout):
    world = worlds(layout)
    inputs = [np.random.default_rng(rank).standard_normal((1001, 7)) for rank in range(world.size)]

    def body(comm):
        mine = [inputs[comm.place]]
        rows = comm.reduce_scatter(mine, SUM, 1)[0]
        return comm.all_reduce(mine, SUM, 1)[0], comm.all_gather([rows])[0], comm.reduce(mine, SUM, 1, 0)

    results = [each for _ in range(3) for each in good(world.run(body))]
    want = world.total("sum", inputs, [1] * world.size)
    for whole, gathered, at_root in results:
        assert whole.tobytes() == gathered.tobytes() == want.tobytes()
        assert at_root is None or at_root[0].tobytes() == want.tobytes()


def test_small_reductions_have_the_bits_of_one_host(worlds):
    world = worlds((2, 1, 2))
    inputs = [np.random.default_rng(rank).standard_normal(300).astype("f4") for rank in range(5)]
    want = serial("mean", inputs, [1] * 5).tobytes()
    results = good(world.run(lambda comm: comm.all_reduce([inputs[comm.place]], OPERATIONS["mean"], 1)))
    assert [result[0].tobytes() for result in results] == [want] * 5


# ── what travels ─────────────────────────────────────────────────────────────────────────────────────

ROWS, ROW = 12, 100_000  # of arrays of bytes


def one(comm):
    return np.full((ROWS, ROW), comm.place, np.uint8)


def message(comm):
    return comm.send(one(comm), 3) if comm.place == 0 else comm.place == 3 and comm.recv(0)


def within(comm):
    array = comm.empty((ROWS, ROW), np.uint8)
    array[...] = comm.place
    comm.all_reduce_in_place([array], SUM)
    comm.send(array, (comm.place + 1) % comm.count)
    comm.all_reduce([comm.recv((comm.place - 1) % comm.count)], SUM, 1)


TRAVELS = {  # in the layout 1 + 3: from host 0 to host 1, and back; in arrays
    "broadcast": (lambda comm: comm.broadcast(None if comm.place else [one(comm)], 0), 1, 0),
    "scatter": (lambda comm: comm.scatter(None if comm.place else [one(comm)], 0), 9 / 12, 0),
    "gather": (lambda comm: comm.gather([one(comm)], 0), 0, 3),
    "all_gather": (lambda comm: comm.all_gather([one(comm)]), 1, 3),
    "all_to_all": (lambda comm: comm.all_to_all([one(comm)]), 9 / 12, 3 * 3 / 12),
    "all_reduce": (lambda comm: comm.all_reduce([one(comm)], SUM, 1), 9 / 12 + 3 / 12, 3 / 12 + 9 / 12),
    "reduce": (lambda comm: comm.reduce([one(comm)], SUM, 1, 0), 9 / 12, 3 / 12 + 9 / 12),
    "reduce_scatter": (lambda comm: comm.reduce_scatter([one(comm)], SUM, 1), 9 / 12, 3 / 12),
    "message": (message, 1, 0),
    "within a host": (within, 0, 0, (1, 2, 3)),
}


@pytest.mark.parametrize("what", TRAVELS)
def test_no_more_travels_than_is_read_on_the_other_host(what):
    body, there, back, *ranks = TRAVELS[what]
    with contextlib.closing(HostsWorld((1, 3))) as world:
        good(world.run(body, *ranks))
        for way, arrays in (((0, 1), there), ((1, 0), back)):
            beyond = world.mirrors.carried[way] - arrays * ROWS * ROW
            assert 0 <= beyond < 4000, (way, beyond)  # records, and the head of a message


def test_memory_is_given_back_in_the_mirrors():
    taken = []

    def body(comm):
        for turn in range(200):
            size = TOO_DIFFERENT[turn % len(TOO_DIFFERENT)]
            mine = comm.empty((size,), np.uint8)
            mine[...] = turn % 100
            got = comm.all_gather([mine])[0]
            assert len(got) == 3 * size
            assert (got == turn % 100).all()
            if comm.place == 0:
                taken.append(world.mirrors.blocks())

    with contextlib.closing(HostsWorld((1, 2))) as world:
        good(world.run(body))
    assert (np.max(taken[100:], axis=0) < 1.25 * np.max(taken[:100], axis=0)).all()


# ── worlds within worlds ─────────────────────────────────────────────────────────────────────────────


def exchanges(comm, turn):
    """What the ranks of a world say to each other: it comes out right."""
    total = comm.all_reduce([np.full(3, comm.place + turn)], SUM, 1)[0]
    assert total.tolist() == [sum(range(comm.count)) + turn * comm.count] * 3
    assert comm.all_gather([np.array([comm.place])])[0].tolist() == list(range(comm.count))
    right, left = (comm.place + 1) % comm.count, (comm.place - 1) % comm.count
    comm.send(np.array(turn), right)
    assert comm.recv(left) == turn


@pytest.mark.parametrize("layout", [(2, 2), (3, 1), (1, 1, 2)])
def test_split(worlds, layout):
    """Into worlds on one host and on several, and these once more."""
    world = worlds(layout)

    def body(comm):
        place = comm.place
        for turn, color in enumerate([place % 2, place // 2, 0, None if place == 3 else place % 3]):
            members = comm.split(color)
            assert (members is None) == (color is None)
            if members is None:
                continue
            with comm.among(members):
                exchanges(comm, turn)
                inner = comm.split(comm.place % 2)
                with comm.among(inner):
                    exchanges(comm, turn)
                exchanges(comm, turn)
        exchanges(comm, 9)

    for _ in range(5):
        good(world.run(body))


def test_ranks_of_different_worlds_that_wait_for_each_other_are_told(worlds):
    world = worlds((1, 1, 2))

    def body(comm):
        with comm.among(comm.split(comm.place % 2)):
            if comm.place == 0:
                comm.barrier()
        comm.barrier() if comm.place % 2 else comm.recv(comm.place)

    with Watch():
        outcomes = world.run(body)
    assert all(isinstance(outcome, CollectiveError) for outcome in outcomes), outcomes
    assert any("wait for each other" in str(outcome) for outcome in outcomes)
    good(world.run(lambda comm: exchanges(comm, 0)))


@pytest.mark.parametrize("layout", [(2, 2), (1, 1, 2)])
def test_nobody_is_told_that_nothing_can_come_while_it_is_under_way(monkeypatch, layout):
    """However late, and though sleepers look all the time whether their wait can still end."""
    monkeypatch.setattr(meeting, "_NAP", 1)
    pause = random.Random(0)

    def body(comm):
        for turn in range(12):
            if pause.random() < 0.1:
                time.sleep(0.005)
            with comm.among(comm.split((comm.place + turn) % 2)):
                exchanges(comm, turn)
                with comm.among(comm.split(0)):
                    exchanges(comm, turn)
            exchanges(comm, turn)

    with contextlib.closing(HostsWorld(layout, late=0.5)) as world:
        good(world.run(body))


def test_a_file_has_room_for_all_that_a_rank_may_look_at(written):
    for file in written.mirrors.files:
        assert os.fstat(file).st_size >= 4 * PART
    assert not written.seen(1, 3 * PART, 100).any()
