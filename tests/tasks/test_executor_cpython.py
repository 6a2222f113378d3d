"""CPython's own tests of ``ProcessPoolExecutor``, on ``synk.Executor``.

They are a part of CPython 3.10, and from 3.13 on, and run where these bring them.
"""

from __future__ import annotations

import importlib
import multiprocessing
import unittest
from multiprocessing import resource_tracker
from typing import Any

import pytest

import synkro as synk

pytestmark = [pytest.mark.quick, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


class Plugged(synk.Executor):
    """Called as CPython's tests call theirs."""

    def __init__(
        self, max_workers=None, mp_context=None, initializer=None, initargs=(), max_tasks_per_child=None
    ):
        super().__init__(max_workers, initializer, initargs, max_tasks=max_tasks_per_child)


# Each of these looks into what only CPython's executor has, or asks for what ours does otherwise.
LEFT_OUT = {
    "test_killed_child": "takes a process from _processes",
    "test_traceback": "asks for the private type of the cause; ours has a type of its own",
    "test_saturation": "counts _processes",
    "test_idle_process_reuse_one": "counts _processes: ours start when the executor is made",
    "test_idle_process_reuse_multiple": "counts _processes",
    "test_max_tasks_per_child": "counts _processes",
    "test_max_tasks_per_child_defaults_to_spawn_context": "asks for _mp_context",
    "test_python_finalization_error": "has starting a thread fail, which ours does as it is made",
    "test_gh105829_should_not_deadlock_if_wakeup_pipe_full": "puts something into a private class",
    "test_shutdown_deadlock_pickle": "takes _executor_manager_thread",
    "test_processes_terminate": "counts _processes",
    "test_context_manager_shutdown": "takes _processes",
    "test_del_shutdown": "takes _processes",
    "test_shutdown_no_wait": "takes _processes",
    "test_interpreter_shutdown": "is a program that imports the executor by its name",
    "test_submit_after_interpreter_shutdown": "is a program that imports the executor by its name",
    "test_hang_gh83386": "is a program that imports the executor by its name",
    "test_hang_issue39205": "is a program that imports the executor by its name",
    "test_map_timeout": "takes six seconds: test_executor.py has one of its kind",
    "test_max_workers_too_large": "is about Windows",
    # another answer
    "test_exit_at_task_unpickle": "what the unpickling raises is of that task alone: ours goes on",
    "test_error_at_task_unpickle": "what the unpickling raises is of that task alone: ours goes on",
    "test_error_during_result_unpickle_in_result_handler": "that task alone fails: ours goes on",
    "test_exit_during_result_unpickle_in_result_handler": "that task alone fails: ours goes on",
}


def of_cpython(name: str) -> Any:
    """A module of CPython's tests; of 3.10, where they are one module, always that."""
    try:
        whole = importlib.import_module("test.test_concurrent_futures")
    except ImportError:
        return None
    return importlib.import_module(f"{whole.__name__}.{name}") if hasattr(whole, "__path__") else whole


def held(tests: type, **attributes: Any) -> type:
    """CPython's *tests* as a class of tests of ours."""

    class Held(unittest.TestCase):
        executor_type = Plugged
        worker_count = 2
        ctx = None

        def get_context(self):
            return multiprocessing.get_context("spawn")

        def setUp(self):
            super().setUp()
            self.executor = self.executor_type(self.worker_count)

        def tearDown(self):
            self.executor.shutdown(wait=True)
            self.executor = None
            resource_tracker._resource_tracker._stop()  # which a manager has started
            super().tearDown()

    without = {name: None for name in LEFT_OUT if hasattr(tests, name)}
    return type(tests.__name__, (tests, Held), {**attributes, **without, "__module__": __name__})


process_pool = of_cpython("test_process_pool")
if process_pool is not None:
    TestExecutor = held(process_pool.ProcessPoolExecutorTest, worker_count=5)
    TestWait = held(of_cpython("test_wait").WaitTests)
    TestAsCompleted = held(of_cpython("test_as_completed").AsCompletedTests)
    TestShutdown = held(of_cpython("test_shutdown").ExecutorShutdownTest)
    TestDeadlock = held(of_cpython("test_deadlock").ExecutorDeadlockTest)
