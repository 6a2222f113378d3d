"""Rings: a program hands frames over to this one; whichever ends, the other gets an error or the end."""

import functools
import os
import random
import signal
import subprocess
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.named import files
from support.programs import start_python
from support.sessions import lasting, running
from support.waiting import Watch, interrupted_after, wait_until
from synkro.memory import named
from synkro.memory import ring as module

pytest.importorskip("posix_ipc", reason="needs posix_ipc, which has no wheel for this Python")

pytestmark = [pytest.mark.quick, pytest.mark.one_host]

session = lasting(2)
SHAPE = (5, 3)


def frame(number, dtype="i8"):
    return np.full(SHAPE, number, dtype)


@pytest.fixture
def ring(session, name):
    with session.ring(name, slots=3, shape=SHAPE, dtype="i8", timeout=30) as ring:
        yield ring


@pytest.fixture
def total(session):
    return session.function(lambda x: x.sum(), outputs="sum")


def writing(name, numbers, end=True):
    """A thread that hands frames over."""

    def write():
        with synk.ring(name) as writer:
            for number in numbers:
                writer.write(frame(number))

    thread = threading.Thread(target=write)
    thread.start()
    return thread


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("slots", [1, 2, 5])
def test_frames_come_in_order_and_none_is_lost(session, name, total, slots):
    ring = session.ring(name, slots=slots, shape=SHAPE, dtype="i8", timeout=30)
    writer = writing(name, range(50))
    assert [total(each) for each in ring] == [15 * number for number in range(50)]
    writer.join()
    assert list(ring) == []  # it stays at its end
    assert not files(name)


def test_each_side_wakes_the_other(ring, name, monkeypatch):
    """To look by itself would take longer than the test may."""
    monkeypatch.setattr(module, "_WAIT", 60)
    with Watch():
        writer = writing(name, range(9))
        for each in ring:
            time.sleep(0.01)  # the slots are full by then, as a rule
            seen = each[0, 0]
        writer.join()
    assert seen == 8


def test_calls_on_frames_are_exact(session, ring, name):
    f = session.function(lambda x, w: (x * w).sum(axis=0), outputs="sum", bcast_inputs="w")
    with synk.ring(name) as writer:
        for number in range(3):
            writer.write(np.arange(15).reshape(SHAPE) * number)
    for number, each in enumerate(ring):
        expected = np.arange(15).reshape(SHAPE) * number
        for batch in (None, 2, slice(None, None, -2), [4, 0, 0]):
            rows = expected[slice(batch) if batch is None or batch == 2 else batch]
            for slices in (1, 2):
                found = f(each, 2, batch=batch, num_slices=slices)
                assert np.array_equal(found, 2 * rows.sum(axis=0))
        assert np.array_equal(f.as_serial(each, 2), 2 * expected.sum(axis=0))
        f.check(each, 2)
        assert np.array_equal(f(np.ones((5, 1, 1)), each), 5 * expected)


def test_submitted_calls_keep_their_frame(session, ring, name):
    def slow(x):
        time.sleep(0.02)
        return x.sum()

    f = session.function(slow, outputs="sum")
    writer = writing(name, range(8))
    futures = [f.submit(each) for each in ring]
    writer.join()
    assert [future.result() for future in futures] == [15 * number for number in range(8)]


def test_a_map_that_goes_on_keeps_its_frame(name):
    def first(item, frame, frames):
        return item, int(frame[0, 0]), int(frames[0].sum()) // frame.size

    with running(2) as session:  # which begins to map
        ring, maps = session.ring(name, slots=1, shape=SHAPE, dtype="i8", timeout=30), []
        writer = writing(name, range(1, 4))
        for each in ring:
            maps.append(session.imap(first, range(60), common={"frame": each, "frames": [each]}))
            assert next(maps[-1]) == (0, len(maps), len(maps))
        writer.join()
        for number, results in enumerate(maps, 1):
            assert list(results) == [(item, number, number) for item in range(1, 60)]


def test_a_frame_that_was_handed_back_is_an_error_and_no_other_frame(ring, name, total):
    writer = writing(name, range(4))
    frames = list(ring)
    writer.join()
    assert len(frames) == 4
    for each in frames:
        assert "handed back" in repr(each)
        for use in (total, np.sum, len, lambda frame: frame[:], lambda frame: frame * 2):
            with pytest.raises(synk.InvalidValue, match=r"handed back to the writer .* frame\[:\].copy"):
                use(each)


@pytest.mark.parametrize("way", ["thread", "signal"])
def test_a_reader_may_be_closed_while_it_waits(ring, way):
    before = signal.signal(signal.SIGALRM, lambda *_: ring.close())
    alarm = functools.partial(os.kill, os.getpid(), signal.SIGALRM)
    timer = threading.Timer(0.05, ring.close if way == "thread" else alarm)
    timer.start()
    try:
        with Watch(), pytest.raises(synk.InvalidValue, match="was closed"):
            next(ring)
    finally:
        timer.join()
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("taken", [0, 1], ids=["while it waits", "in the loop"])
def test_the_name_is_free_when_the_reader_hears_of_the_end(session, name, monkeypatch, taken):
    end = named.end

    def slow(*args):
        time.sleep(0.2)  # as the machine may be
        end(*args)

    ring = session.ring(name, slots=3, shape=SHAPE, timeout=30)
    writer = writing(name, range(taken))
    for _ in range(taken):
        next(ring)
    monkeypatch.setattr(named, "end", slow)
    thread = threading.Thread(target=ring.close)
    thread.start()
    assert wait_until(lambda: ring._side._signals.closed)
    with Watch(), pytest.raises(synk.InvalidValue, match="was closed"):
        next(ring)
    with session.ring(name, slots=1, shape=SHAPE):
        thread.join()
    writer.join()


def test_a_writer_may_be_closed_while_it_waits(ring, name):
    writer = synk.ring(name)
    for number in range(ring.slots):
        writer.write(frame(number))
    timer = threading.Timer(0.05, writer.close)
    timer.start()
    with Watch(), pytest.raises(synk.InvalidValue, match="was closed"):
        writer.write(frame(3))
    timer.join()
    assert [each[0, 0] for each in ring] == [0, 1, 2]


def test_semaphores_go_where_the_name_was_removed_by_hand(session, name):
    with session.ring(name, slots=2, shape=SHAPE):
        os.unlink(f"/dev/shm{name}")
    assert not files(name)


def test_what_is_written_is_cast_as_data_is(ring, name):
    with synk.ring(name) as writer:
        assert (writer.shape, writer.dtype, writer.slots) == (SHAPE, np.dtype("i8"), 3)
        writer.write(frame(7, "i2"))
        writer.write(frame(8).tolist())
        with pytest.raises(synk.InvalidType, match="may lose information"):
            writer.write(frame(0.5, "f8"))
        with pytest.raises(synk.InvalidValue, match=r"frames of shape \(5, 3\); got the shape \(3,\)"):
            writer.write(np.ones(3, "i8"))
    assert [each[0, 0] for each in ring] == [7, 8]
    with pytest.raises(synk.InvalidValue, match="was closed"):
        writer.write(frame(1))


# ── who waits for whom ───────────────────────────────────────────────────────────────────────────────


def test_waits_are_timed(session, name, total):
    ring = session.ring(name, slots=2, shape=SHAPE, dtype="i8", timeout=0.05)
    with pytest.raises(synk.CallTimeout, match="its writer has not come"):
        next(ring)
    writer = synk.ring(name, timeout=0.05)
    with pytest.raises(TimeoutError, match="its writer sends nothing"):
        next(ring)
    writer.write(frame(1))
    writer.write(frame(2))
    with pytest.raises(synk.CallTimeout, match=r"no slot of .* became free in 0.05 s"):
        writer.write(frame(3))
    assert total(next(ring)) == 15  # and all goes on
    assert total(next(ring)) == 30
    writer.write(frame(3))
    assert total(next(ring)) == 45
    writer.close()
    with pytest.raises(StopIteration):
        next(ring)


def test_an_interrupt_between_two_steps_costs_no_frame(ring, name, total, monkeypatch):
    """The semaphores only wake: one that was taken in vain is not missed."""
    with synk.ring(name) as writer:
        for number in range(3):
            writer._signals.wait(writer._signals.free)
            ring._side._signals.free.release() if number == 2 else None
            writer.write(frame(number))
        with Watch():
            assert [total(next(ring)) for _ in range(3)] == [0, 15, 30]
            writer.write(frame(3))
            assert total(next(ring)) == 45


def test_the_reader_that_closes_is_an_error_of_the_writer(session, name, total):
    ring = session.ring(name, slots=2, shape=SHAPE)
    writer = synk.ring(name)
    writer.write(frame(1))
    total(next(ring))  # the workers have mapped it from now on
    ring.close()
    ring.close()
    assert not files(name)
    with Watch(), pytest.raises(synk.RingBroken, match="has closed it or is gone"):
        list(map(writer.write, map(frame, range(3))))
    with pytest.raises(synk.InvalidValue, match=r"the ring .* was closed"):
        next(ring)
    writer.close()


def test_the_session_that_closes_ends_the_ring(name):
    with synk.Session(1, verbose=False) as own:
        ring = own.ring(name, slots=2, shape=SHAPE)
        assert len(files(name)) == 3
    assert not files(name)
    with pytest.raises(synk.InvalidValue, match="was closed"):
        next(ring)


def test_a_block_that_fails_does_not_end_the_ring(ring, name, total):
    def fail():
        with synk.ring(name) as writer:
            writer.write(frame(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert total(next(ring)) == 15
    with Watch(), pytest.raises(synk.RingBroken, match="all 1 frames that it handed over"):
        next(ring)


def test_a_ring_has_one_writer(ring, name):
    writer = synk.ring(name)
    with pytest.raises(synk.InvalidValue, match="has a writer"):
        synk.ring(name)
    writer.close()
    with pytest.raises(synk.InvalidValue, match="has had its writer"):
        synk.ring(name)


def test_what_a_ring_needs(session, name, ring):
    x = session.data(np.ones(3), shm_name=f"{name}-2")
    for make, error, says in (
        (lambda: synk.ring(name, slots=3), synk.InvalidValue, "neither in the one that writes"),
        (lambda: session.ring(f"{name}-3", 0, 3), synk.InvalidValue, "slots must be 1 or more"),
        (lambda: session.ring(f"{name}-3", 1.5, 3), synk.InvalidType, "slots must be an int"),
        (lambda: session.ring("/" + "x" * 246, 2, 3), synk.InvalidValue, "at most 245 bytes"),
        (lambda: session.ring(name, 2, 3), synk.InvalidValue, "this program has"),
        (lambda: session.attach(name), synk.InvalidValue, r"is a ring.*ring\('"),
        (lambda: synk.ring(f"{name}-3"), synk.InvalidValue, "there is no shared memory"),
        (lambda: synk.ring(f"{name}-2"), synk.InvalidValue, "is no ring"),
    ):
        with pytest.raises(error, match=says):
            make()
    x.free_memory()


def test_the_longest_name_and_frames_of_one_number(session):
    longest = f"/synkro-test-{os.getpid()}".ljust(246, "x")
    f = session.function(lambda x: x + 1, outputs="max", bcast_inputs="x")
    with session.ring(longest, 1, (), "f4", timeout=30) as ring:
        with synk.ring(longest) as writer:
            writer.write(2.5)
        assert [f(each) for each in ring] == [3.5]
    assert not files(longest)


@pytest.mark.parametrize("missing", [["free", "full"], ["full"]])
def test_a_writer_that_comes_while_the_ring_is_made_is_told_to_come_again(
    session, name, missing, monkeypatch
):
    import posix_ipc

    make = named.create

    def made(*args):
        segment = make(*args)
        if "free" not in missing:
            posix_ipc.Semaphore(f"{name}.free", posix_ipc.O_CREX).close()
        with pytest.raises(synk.InvalidValue, match=r"no semaphores .*: it is being made, .* Try again"):
            synk.ring(name)
        return segment

    monkeypatch.setattr(named, "create", made)
    with session.ring(name, slots=1, shape=()):
        synk.ring(name).close()


def test_semaphores_that_were_left_are_no_hindrance(session, name):
    import posix_ipc

    posix_ipc.Semaphore(f"{name}.free", posix_ipc.O_CREX, initial_value=7).close()
    with session.ring(name, slots=1, shape=(), timeout=0.05):
        assert synk.ring(name)._signals.free.value == 1


# ── other programs, and their ends ───────────────────────────────────────────────────────────────────


def test_a_writer_in_c(session, name, total, programs_in_c):
    ring = session.ring(name, slots=2, shape=SHAPE, dtype="u1", timeout=30)
    writer = subprocess.Popen([programs_in_c / "camera", name, "100"], stdout=subprocess.DEVNULL)
    assert [total(each) for each in ring] == [15 * number for number in range(100)]
    assert writer.wait() == 0


def test_a_writer_in_c_is_killed_at_any_moment(session, name, total, programs_in_c):
    chance = random.Random(0)
    for _ in range(10):
        # the writer may be killed before it comes
        ring = session.ring(name, slots=2, shape=SHAPE, dtype="u1", timeout=5)
        writer = subprocess.Popen([programs_in_c / "camera", name, "200"], stdout=subprocess.PIPE)
        killer = threading.Timer(chance.uniform(0, 0.02), writer.kill)
        killer.start()
        got = []
        with Watch():
            try:
                got.extend(total(each) // 15 for each in ring)
            except (synk.RingBroken, synk.CallTimeout):
                pass
            else:
                assert len(got) == 200
            killer.join()
        said = writer.communicate()[0].split()
        assert got == list(range(len(got)))
        assert len(got) >= len(said)  # nothing acknowledged is lost
        ring.close()


def test_a_writer_in_c_whose_reader_closes(session, name, programs_in_c):
    ring = session.ring(name, slots=2, shape=SHAPE, dtype="u1", timeout=30)
    writer = subprocess.Popen([programs_in_c / "camera", name, "100"], stderr=subprocess.PIPE)
    next(ring)
    ring.close()
    with Watch():
        assert b"the reader is gone" in writer.communicate()[1]
    assert writer.returncode == 1


WRITER = """
import sys, numpy as np, synkro as synk
try:
    with synk.ring(sys.argv[1]) as ring:
        for number in range(int(sys.argv[2])):
            ring.write(np.full((5, 3), number))
            print(number, flush=True)
except synk.RingBroken:
    print("broken", flush=True)
"""


@pytest.mark.programs
def test_a_writer_in_python_is_killed_at_any_moment(session, name, total):
    def take(frame):
        got.append(total(frame) // 15)
        if len(got) == last + 1:
            writer.kill()

    chance = random.Random(1)
    for _ in range(4):
        ring, got, last = session.ring(name, 2, SHAPE, "i8", timeout=30), [], chance.randrange(100)
        writer = start_python(WRITER, name, 10**6)
        with pytest.raises(synk.RingBroken, match="is gone"):
            list(map(take, ring))
        said = writer.communicate()[0].splitlines()
        assert got == list(range(len(got)))
        assert len(got) >= len(said)
        ring.close()


READER = """
import sys, synkro as synk
synk.fork(2, verbose=False)
total = synk.function(lambda x: x.sum(), outputs="sum")
ring = synk.ring(sys.argv[1], slots=2, shape=(5, 3), dtype="i8")
print("ready", flush=True)
for number, frame in enumerate(ring):
    assert total(frame) == 15 * number
    print(number, flush=True)
"""


@pytest.mark.programs
def test_a_reader_is_killed_at_any_moment(name):
    chance = random.Random(2)
    for _ in range(3):
        reader = start_python(READER, name)
        assert reader.stdout.readline() == "ready\n"
        writer = start_python(WRITER, name, 10**6)
        for _ in range(chance.randrange(50)):
            assert reader.stdout.readline()
        reader.kill()
        reader.communicate()
        with Watch():
            assert wait_until(lambda: not files(name))
            assert writer.communicate()[0].splitlines()[-1] == "broken"


FORKS = """
import os, sys, time, numpy as np, synkro as synk
ring = synk.ring(sys.argv[1])
child = os.fork()
if not child:
    time.sleep(60)
print(child, flush=True)
ring.write(np.ones((5, 3), "i8"))
time.sleep(60)
"""


@pytest.mark.programs
def test_a_fork_of_the_writer_does_not_stand_for_it(ring, name, total):
    writer = start_python(FORKS, name)
    child = int(writer.stdout.readline())
    try:
        assert total(next(ring)) == 15
        writer.kill()
        with Watch(), pytest.raises(synk.RingBroken):
            next(ring)
    finally:
        os.kill(child, signal.SIGKILL)
        writer.communicate()


def test_ctrl_c_ends_a_wait(ring, name):
    with Watch(), pytest.raises(KeyboardInterrupt), interrupted_after(0.15):
        next(ring)
    with synk.ring(name) as writer:
        for number in range(3):
            writer.write(frame(number))
        with Watch(), pytest.raises(KeyboardInterrupt), interrupted_after(0.15):
            writer.write(frame(3))
    assert [each[0, 0] for each in ring] == [0, 1, 2]
