"""An ``Executor`` whose workers are on several hosts."""

import concurrent.futures.process
import os
import signal
import time

import numpy as np
import pytest

import synkro as synk
from support.waiting import Watch, wait_until
from synkro import NotAvailable

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]

HOSTS = ["localhost:1", "localhost:1"]


@pytest.fixture(scope="module")
def executor():
    with synk.Executor(2, hosts=HOSTS, start_timeout=60) as executor:
        yield executor


def square(x):
    return x * x


def test_tasks_go_to_both_hosts(executor):
    def task(n):
        time.sleep(0.01)
        return os.getpid(), n * n

    found = list(executor.map(task, range(60)))
    assert [result for _, result in found] == [n * n for n in range(60)]
    assert len({pid for pid, _ in found}) == 2


def test_large_arrays_and_what_a_task_changes(executor):
    array = np.zeros(1 << 18)

    def change(array):
        array += 1
        return array

    for number in range(4):
        array[0] = number
        result = executor.submit(change, array).result()
        assert result[0] == number + 1
        assert result[1:].min() == result.max() - (number or 0) == 1
    assert array[1:].max() == 0


def test_data_and_mapped_files_travel(executor, tmp_path):
    mapped = np.memmap(tmp_path / "x", float, "w+", shape=1000)
    mapped[:] = 2
    with synk.Session(1, devices="cpu", verbose=False) as session:
        data = session.data(np.arange(1000.0))
        assert executor.submit(np.sum, data).result() == data[:].sum()
        assert executor.submit(np.sum, mapped).result() == 2000


def test_errors_initializer_and_cancelling(tmp_path):
    def begin(value):
        os.environ["BEGUN"] = value

    with synk.Executor(2, begin, ("yes",), hosts=HOSTS) as executor:
        assert set(executor.map(lambda _: os.getenv("BEGUN"), range(20))) == {"yes"}
        assert type(executor.submit(lambda: 1 // 0).exception()) is ZeroDivisionError
        futures = [executor.submit(time.sleep, 0.01) for _ in range(100)]
        assert futures[-1].cancel()
    assert all(future.done() for future in futures)


def test_a_death_breaks_it():
    with synk.Executor(2, hosts=HOSTS) as executor, Watch():
        future = executor.submit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        others = [executor.submit(time.sleep, 100) for _ in range(3)]
        with pytest.raises(concurrent.futures.process.BrokenProcessPool, match="in an Executor"):
            future.result()
        for other in others:
            with pytest.raises(concurrent.futures.BrokenExecutor):
                other.result()


def test_what_is_not_there_over_hosts():
    for how in ({"item_timeout": 1}, {"max_tasks": 3}):
        with pytest.raises(NotAvailable, match="over several hosts are not replaced"):
            synk.Executor(2, hosts=HOSTS, **how)


def test_it_waits_for_its_tasks(tmp_path):
    executor = synk.Executor(2, hosts=HOSTS)
    futures = [executor.submit(lambda n: time.sleep(0.05) or n, n) for n in range(10)]
    executor.shutdown(wait=False)
    assert wait_until(lambda: all(future.done() for future in futures), 15)
    assert [future.result() for future in futures] == list(range(10))
    executor.shutdown()
