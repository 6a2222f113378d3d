"""``split``: worlds of the ranks of one color, with collectives of their own."""

import contextlib
import os
import signal
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.arrays import OPS
from support.collectives import check_everything, everything
from support.examples import examples, given, st
from support.failing import told
from support.sessions import current, per_rank, running, start
from support.waiting import Watch
from synkro import CollectiveError, InvalidType, InvalidValue, OutputError, UsageError, WorkerDied, here

pytestmark = pytest.mark.counted_once


@pytest.fixture(scope="module")
def four_forked():
    session = start(4)
    yield session
    session.close()


@pytest.fixture
def four(four_forked):
    with current(four_forked):
        yield four_forked


def parted(colors):
    """The ranks of each rank's world, by rank; None without a color."""
    return [
        None if color is None else [other for other, c in enumerate(colors) if c == color]
        for color in colors
    ]


COLORS = st.lists(st.sampled_from([0, 1, -7, None]), min_size=4, max_size=4)


@given(COLORS, COLORS, st.booleans(), st.sampled_from(OPS), st.sampled_from([(1,), (6, 2), (3000, 3)]))
@examples(25)
def test_collectives_of_worlds_are_those_of_numpy(four_forked, first, second, last, op, shape):
    def run():
        number, found = synk.rank(), []
        worlds = [synk.split(colors[number]) for colors in (first, second)]
        for world in [*worlds, *worlds]:  # in turns
            root = world.size() - 1 if world and last else None
            found.append(None if world is None else everything(world, number, shape, op, root))
        assert (synk.rank(), synk.size()) == (number, 4)
        places = [world and (world.rank(), world.size()) for world in worlds]
        return found, places, synk.all_gather(np.array([number]))

    with current(four_forked):
        results = per_rank(run)
    for number, (found, places, whole) in enumerate(results):
        assert whole.tolist() == [0, 1, 2, 3]
        for index, colors in enumerate([first, second]):
            ranks = parted(colors)[number]
            if ranks is None:
                assert (found[index], places[index]) == (None, None)
                continue
            assert places[index] == (ranks.index(number), len(ranks))
            for got in (found[index], found[index + 2]):
                check_everything(got, ranks, number, shape, op, len(ranks) - 1 if last else None)


def test_a_world_is_split_again(four):
    def run():
        half = synk.split(synk.rank() // 2)
        alone = half.split(half.rank())
        both = half.split(True)
        return alone.size(), alone.all_reduce(5, "sum"), both.all_reduce(synk.rank(), "sum")

    assert per_rank(run) == [(1, 5, 1), (1, 5, 1), (1, 5, 5), (1, 5, 5)]


def test_worlds_of_a_call_on_some_ranks(four):
    def run():
        world = synk.split(np.int64(synk.rank() == 2))
        return world.size(), world.all_reduce(synk.rank(), "sum"), synk.all_reduce(1, "sum")

    run = synk.function(run, outputs=None, target=[1, 2, 3])
    assert run() == [(2, 1, 3), (2, 1, 3), (1, 2, 3)]


def test_each_world_goes_its_own_way(four):
    """The ranks of one world enter other collectives than those of the other, and more of them."""

    def run():
        world, total = synk.split(synk.rank() % 2), 0
        if synk.rank() % 2:
            for number in range(200):
                total += world.all_reduce(number, "sum")
        else:
            world.barrier()
            total = world.all_gather(np.array([1])).sum()
        return total, synk.all_reduce(1, "sum")

    assert per_rank(run) == [(2, 4), (39_800, 4)] * 2


def test_records_of_one_world_are_not_overwritten_by_those_of_another(four):
    """A rank that is ahead shows records in other worlds before all have read those of the last."""

    def run():
        worlds = [synk.split(synk.rank() % 2), synk.split(synk.rank() // 2), synk.split(0)]
        seen = []
        for number in range(300):
            for world in worlds:
                world.barrier()
                seen.append(world.all_gather(np.full(1 + number % 3, synk.rank())).sum())
        return sum(seen)

    sums = [[0 + 2, 1 + 3, 0 + 2, 1 + 3], [0 + 1, 0 + 1, 2 + 3, 2 + 3], [6] * 4]
    want = [sum(each[rank] for each in sums) * (1 + 2 + 3) * 100 for rank in range(4)]
    assert per_rank(run) == want


def test_variables_are_reduced_within_a_world(four):
    w = synk.shared(np.arange(3.0), name="w")

    def run():
        w.value = w.value + synk.rank()
        half = synk.split(synk.rank() // 2)
        half.all_reduce(w)

    synk.function(run, outputs=[])()
    assert [synk.get_value(rank, w).tolist() for rank in (0, 3)] == [[0.5, 1.5, 2.5], [2.5, 3.5, 4.5]]


def test_ranks_of_the_call_while_a_thread_is_in_a_world(four):
    """``rank()`` and ``size()`` are those of the call, whatever another thread does."""

    def run():
        half, seen, waits = synk.split(synk.rank() // 2), set(), threading.Event()

        def meet():
            waits.set()
            half.barrier()

        thread = threading.Thread(target=meet)
        if half.rank():
            thread.start()
            waits.wait()
        for _ in range(100):
            seen.add((synk.rank(), synk.size()))
            time.sleep(0.001)
        if half.rank():
            thread.join()
        else:
            half.barrier()
        return seen == {(here.rank.number, 4)}

    assert per_rank(run) == [True] * 4


def test_in_each_slice(four):
    def run(x):
        half = synk.split(synk.rank() // 2)
        return half.all_reduce(x.sum(), "sum")

    f = synk.function(run, outputs="sum")
    assert f(np.arange(80.0), num_slices=5) == 2 * np.arange(80).sum()


def test_a_world_is_of_its_call(four):
    kept = []

    def run():
        if kept:
            return kept[0].all_reduce(1, "sum")
        kept.append(synk.split(0))
        return kept[0].all_reduce(1, "sum")

    run = synk.function(run, outputs=None)
    assert run() == [4] * 4
    with pytest.raises(UsageError, match="the world of ranks 0, 1, 2, 3 was made in another call"):
        run()


def test_what_split_takes(four):
    told(lambda r: synk.split("left"), "split takes a color, an int that the ranks", InvalidType)
    told(
        lambda r: synk.split(r // 2).broadcast(1, root=2),
        "root=2, but 2 ranks take part in the world of ranks 0, 1: give one from 0",
        InvalidValue,
    )
    with pytest.raises(UsageError, match=r"split\(\) is for use inside a function"):
        synk.split(0)
    with pytest.raises(OutputError, match=r"call split\(\) again in the next call"):
        synk.function(lambda: synk.split(0), outputs=None)()


def test_as_serial(four):
    def run(x):
        world = synk.split(synk.rank())
        return world.all_reduce(x.sum(), "sum"), world.size()

    f = synk.function(run, outputs="sum")
    assert f.as_serial(np.arange(5.0)) == (10, 1)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────


def halves(r):
    return synk.split(r // 2)


def crossed(r):
    half, other = halves(r), synk.split(r % 2)
    (half if r in (0, 3) else other).barrier()


def returns(r):
    half = halves(r)
    if r != 1:
        half.barrier()


def receives(r):
    half = halves(r)
    half.recv(0) if r % 2 else synk.barrier()


def other_worlds(r):
    half = halves(r)
    if r == 0:
        half.send(1, to=1)
    if r == 1:
        synk.recv(0)


FAILURES = {
    "crossed": (
        crossed,
        r"wait for each other, and none can go on: rank 0 is in barrier, collective 1 of the world "
        r"of ranks 0, 1; rank 1 is in barrier, collective 1 of the world of ranks 1, 3",
    ),
    "one_too_many": (
        lambda r: (halves(r), synk)[r == 2].barrier(),
        r"collective 1 of the world of ranks 2, 3|without taking part in barrier",
    ),
    "receives": (receives, r"rank 0 is in barrier, collective 2; rank 1 is in recv from rank 0"),
    "returns": (
        returns,
        r"rank 1 returned from the function without taking part in barrier \(collective 1 of the "
        r"world of ranks 0, 1\)",
    ),
    "split_by_some": (
        lambda r: r and synk.split(0),
        "rank 0 returned from the function without taking part in split",
    ),
    "other_kinds": (
        lambda r: halves(r).all_reduce(1, "sum" if r % 2 else "max"),
        r'of the world of ranks \d, \d\): rank \d is in all_reduce with "\w+", but rank \d',
    ),
    "other_worlds": (
        other_worlds,
        "rank 0 was in send or recv in the world of ranks 0, 1 when it sent the array",
    ),
}


@pytest.mark.parametrize("what", FAILURES)
def test_no_mistake_hangs(four, what):
    told(*FAILURES[what])
    assert synk.function(lambda: synk.split(0).size(), outputs="sum")() == 16  # and it goes on


def test_a_failure_in_one_world_is_the_error_of_the_call(four):
    def run():
        half = synk.split(synk.rank() // 2)
        if synk.rank() == 3:
            raise KeyError("three")
        half.barrier()

    with Watch(), pytest.raises(KeyError, match=r"rank 3\b.* failed in the function 'run': KeyError"):
        synk.function(run, outputs=[])()
    assert per_rank(lambda: synk.split(0).all_reduce(1, "sum")) == [4] * 4


@pytest.mark.parametrize("when", ["before", "in"])
def test_a_rank_that_is_killed(when):
    def run():
        if when == "before" and synk.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        half = synk.split(synk.rank() // 2)
        if synk.rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        half.barrier()
        synk.barrier()

    with running(3), Watch(), pytest.raises(WorkerDied, match="rank 2"):
        synk.function(run, outputs=[])()


def test_tasks_have_no_worlds():
    with running(2), pytest.raises(UsageError, match="a task used a collective"):
        synk.map(lambda item: synk.split(0), [1])


def test_many_splits_take_no_more_memory(four):
    """What the worlds of a call lie in is used again by the next."""

    def run():
        for _ in range(20):
            synk.split(synk.rank() % 2).barrier()
        (arena,) = {os.stat(fd).st_ino: os.stat(fd) for fd in descriptors("synkro-arena")}.values()
        return arena.st_blocks

    def descriptors(name):
        for fd in map(int, os.listdir("/proc/self/fd")):
            with contextlib.suppress(OSError):  # that of the listing itself
                if name in os.readlink(f"/proc/self/fd/{fd}"):
                    yield fd

    run = synk.function(run, outputs=None)
    before = [run() for _ in range(3)][-1]
    for _ in range(20):
        after = run()
    assert max(after) <= max(before) + 400


def test_splits_that_fail_take_no_more_memory(four):
    def run():
        if synk.rank():
            synk.split(0)

    boards = synk.function(lambda: len(here.rank.group.comm._meeting._boards), outputs=None)
    run = synk.function(run, outputs=[])
    for _ in range(5):
        with pytest.raises(CollectiveError):
            run()
    assert boards() == [0] * 4
