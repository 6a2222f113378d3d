"""Maps whose workers are on several hosts: what is special about it.

The tests of maps themselves run over hosts by ``pytest --over h1,h2 tests/tasks/test_map.py``.
"""

import collections
import contextlib
import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

import synkro as synk
from support.failing import ctrl_c
from support.inside import in_phase, whereabouts
from support.waiting import Watch, wait_until
from synkro import CallTimeout, Session, WorkerDied, WorkerError
from synkro.messages import Phase

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]


def over(*counts):
    """A session of so many workers on each host."""
    hosts = [f"localhost:{count}" for count in counts]
    return Session(sum(counts), hosts=hosts, devices="cpu", verbose=False, timeout=60)


@pytest.fixture(scope="module")
def several():
    with over(1, 2) as session:
        yield session


@pytest.fixture(scope="module")
def two_hosts():
    with over(1, 1) as session:
        yield session


@pytest.fixture
def own():
    """Workers on two hosts, which a test may kill."""
    with over(1, 1) as session:
        yield session


def double(x):
    return x * 2


def fine(session):
    """The session serves maps and calls."""
    assert session.map(double, range(50)) == [2 * k for k in range(50)]
    return session.function(lambda x: x.sum(), outputs="sum")(np.ones(9)) == 9


# ── who does what ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seconds", [0.003, 0.03])
def test_all_hosts_do_their_part(several, seconds):
    def task(k):
        time.sleep(seconds)
        return os.getpid()

    count = 50 * several.n_parallel
    parts = collections.Counter(several.map(task, range(count)))
    assert parts.keys() == set(several.pids)
    assert min(parts.values()) > 20


def test_empty_tasks_go_to_both_hosts(two_hosts):
    missing = set(two_hosts.pids)  # how many go to each is a matter of the machine's load
    results = two_hosts.imap(lambda k: os.getpid(), itertools.count())
    with Watch(), contextlib.closing(results):
        while missing:
            missing.discard(next(results))


def test_long_tasks_among_short_ones_do_not_queue_up_at_one_host(two_hosts, tmp_path):
    """What waits behind a long task goes to whoever has nothing to do; at the end of the items, too."""

    def task(folder, number):  # the long ones end in pairs, one of which began while the other one ran
        if number in long:
            (folder / str(number)).touch()
            begun = long.index(number) // 2 * 2 + 2
            assert wait_until(lambda: len(list(folder.iterdir())) >= begun)
        return number

    long = [*range(1500, 1506), 2998, 2999]
    for maps in (two_hosts.map, two_hosts.imap):
        folder = tmp_path / maps.__name__
        folder.mkdir()
        with Watch():
            assert list(maps(task, [folder] * 3000, range(3000))) == list(range(3000))


# ── items and results ────────────────────────────────────────────────────────────────────────────────


def test_large_items_and_results(several):
    items = [np.full(1 << 20, k, np.float64) for k in range(12)]  # 8 MB each
    for results in (several.map(double, items), several.imap(double, items)):
        for number, result in enumerate(results):
            assert result.shape == (1 << 20,)
            assert (result == 2 * number).all()
            result[0] = 5  # it is the program's


def test_items_of_all_sizes_keep_their_order(several):
    items = [bytes([k % 256]) * size for k, size in enumerate([0, 10, 3000, 5000, 20_000, 300_000] * 60)]
    assert several.map(lambda x: x, items) == items
    assert list(several.imap(lambda x: x, iter(items))) == items


def test_results_that_nobody_reads_do_not_fill_the_hosts(two_hosts):
    """A program reads slowly: the processes of MPI's, and the workers, wait with more than a few."""
    results = two_hosts.imap(lambda k: np.full(4 << 20, k % 200, np.uint8), itertools.count())
    next(results)
    pids = children(os.getpid())
    before = sum(map(resident, pids))
    most = 0
    for number in range(1, 200):
        assert next(results)[-1] == number % 200
        time.sleep(0.002)
        most = max(most, sum(map(resident, pids)))
    assert most - before < 800 << 20


def children(pid):
    """All processes below *pid*."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        own = [int(each) for each in file.read().split()]
    return [*own, *itertools.chain.from_iterable(map(children, own))]


def resident(pid):
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * 4096


# ── pauses ───────────────────────────────────────────────────────────────────────────────────────────


def test_items_that_lie_in_groups_are_offered_again_after_a_pause(several):
    seen = []
    for number, result in enumerate(several.imap(double, range(6000))):
        seen.append(result)
        if number % 700 == 0:
            assert several.map(double, [number]) == [2 * number]
    assert seen == [2 * k for k in range(6000)]


def test_another_call_waits_only_for_tasks_that_run(two_hosts, tmp_path):
    def task(k):
        if k >= 3000:
            (tmp_path / str(k)).touch()
            time.sleep(0.3)
        return k

    results = two_hosts.imap(task, range(3100))
    assert list(itertools.islice(results, 3000)) == list(range(3000))
    assert wait_until(lambda: any(tmp_path.iterdir()))
    assert fine(two_hosts)
    assert len(list(tmp_path.iterdir())) <= 6
    assert next(results) == 3000
    results.close()


def test_an_imap_that_was_dropped_begins_no_other_task(two_hosts, tmp_path):
    def task(k):
        (tmp_path / str(k)).touch()
        time.sleep(0.05)
        return k

    results = two_hosts.imap(task, itertools.count())
    assert [next(results) for _ in range(4)] == [0, 1, 2, 3]
    assert two_hosts.map(double, [1]) == [2]  # a pause
    assert next(results) == 4
    del results
    time.sleep(0.2)
    begun = len(list(tmp_path.iterdir()))
    time.sleep(0.3)
    assert len(list(tmp_path.iterdir())) == begun
    assert fine(two_hosts)


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_names_its_item_and_no_other_task_begins(two_hosts, tmp_path, rank):
    pid = two_hosts.pids[rank]

    def task(k):
        if k > 2000 and os.getpid() == pid:
            (tmp_path / "failed").touch()
            raise KeyError(k)
        if k > 2000:
            wait_until((tmp_path / "failed").exists)
            time.sleep(0.1)
            (tmp_path / str(k)).touch()

    with pytest.raises(
        WorkerError, match=rf"rank {rank} \(localhost\) failed in the function 'task' at item [23]\d\d\d"
    ):
        two_hosts.map(task, range(4000))
    assert len(list(tmp_path.iterdir())) <= 3
    assert fine(two_hosts)


@pytest.mark.parametrize("order", [None, True, False])
def test_tasks_that_fail_are_tried_again_on_any_host(several, tmp_path, order):
    def task(k, folder):
        with open(f"{folder}/{k}", "ab") as file:
            file.write(b".")
            tries = file.tell()
        if k % 3 == 0 and tries < k % 5:
            raise KeyError(k, tries)
        return k, tries, np.ones(k * k)

    options = {"common": {"folder": str(tmp_path)}, "errors": "return", "retries": 2}
    if order is None:
        found = several.map(task, range(200), **options)
    else:
        found = list(several.imap(task, range(200), ordered=order, **options))
        found.sort(key=lambda each: each.args[0] if isinstance(each, KeyError) else each[0])
    for k, each in enumerate(found):
        if k % 3 == 0 and k % 5 == 4:
            assert each.args == (k, 3)
            assert "tried 3 times" in str(each)
        else:
            assert each[1] == (max(1, k % 5) if k % 3 == 0 else 1)
            assert len(each[2]) == k * k


def test_a_timeout_names_the_rank_of_the_other_host(two_hosts, tmp_path):
    pid = two_hosts.pids[1]

    def task(k):
        if os.getpid() == pid:
            (tmp_path / "began").touch()
            time.sleep(30)
        wait_until((tmp_path / "began").exists)  # or all tasks may end before the other host has one

    with Watch(), pytest.raises(CallTimeout, match=rf"rank 1 \(localhost, pid {pid}\) is running item"):
        two_hosts.map(task, range(100), timeout=1)
    assert fine(two_hosts)


def test_ctrl_c_ends_the_map_on_all_hosts(two_hosts):
    def in_tasks():
        return {whereabouts(two_hosts, rank) for rank in (0, 1)} == {Phase.TASK}

    ctrl_c(in_tasks, lambda: two_hosts.map(time.sleep, [30] * 10))
    with Watch():
        assert fine(two_hosts)


@pytest.mark.parametrize("seconds", [0, 30])
def test_a_worker_of_another_host_that_is_killed_is_told(own, seconds):
    pid = own.pids[1]

    def kill():
        assert wait_until(in_phase(own, Phase.TASK))
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    with Watch(), pytest.raises(WorkerDied, match=rf"rank 1 \(pid {pid}\).*SIGKILL"):
        for _ in own.imap(time.sleep, itertools.repeat(seconds)):
            pass
    thread.join()


def test_a_worker_of_another_host_that_dies_takes_no_result_along(own):
    pid = own.pids[1]

    def task(k):
        if os.getpid() == pid and k > 500:
            time.sleep(0.5)  # what is there is handed over meanwhile
            os._exit(3)
        time.sleep(1e-3)  # so that both hosts have tasks
        return k

    with Watch(), pytest.raises(WorkerDied) as error:
        own.map(task, range(2000))
    assert {*error.value.finished, *error.value.pending} == set(range(2000))
    assert list(error.value.results) == list(error.value.finished)
    assert len(error.value.results) > 100


def test_the_random_stream_of_an_item_is_the_same_on_any_host():
    def draw(k):
        return synk.rng().random()

    found = []
    for counts in ((1, 1), (1, 2)):
        with over(*counts) as session:
            session.reseed(5)
            found.append(session.map(draw, range(30)))
    assert found[0] == found[1]
