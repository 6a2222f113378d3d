"""Executors whose workers have a GPU each."""

import os
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

import synkro as synk
from synkro import NotAvailable


def on_the_gpu(x):
    found = synk.xp().asarray(x)
    return found * 2, type(found).__module__


def test_tasks_compute_on_gpus_and_results_come_to_the_host(machine):
    with synk.Executor(devices="cuda") as executor:
        for x in (np.arange(5.0), np.ones(1 << 18)):
            for result, module in executor.map(on_the_gpu, [x] * 4):
                assert type(result) is np.ndarray
                assert np.array_equal(result, 2 * x)
                assert module.startswith("cupy")


def test_workers_on_gpus_are_not_replaced(machine):
    with pytest.raises(NotAvailable, match="Workers on GPUs are not replaced"):
        synk.Executor(devices="cuda", max_tasks=3)
    executor = synk.Executor(devices="cuda", retries=1)
    with executor, pytest.raises(BrokenProcessPool, match=r"_exit\(3\).*exit code 3"):
        executor.submit(os._exit, 3).result()
