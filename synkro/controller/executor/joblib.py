"""The backend ``"synkro"`` of joblib's: ``joblib.parallel_config(backend="synkro")``.

It is joblib's, and scikit-learn's, way to the workers of an ``Executor``.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from joblib.parallel import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend

from ... import here
from ...machine import available_cores
from .executor import Executor

_IDLE = 300.0  # seconds after which workers that nobody uses end


class Backend(AutoBatchingMixin, ParallelBackendBase):  # type: ignore[misc]
    """Runs the tasks of ``joblib.Parallel`` on the workers of an executor.

    The workers stay for the next call that asks for as many; they end with the program, or after five
    minutes without one.
    """

    supports_retrieve_callback = True
    supports_inner_max_num_threads = True

    def __init__(
        self, nesting_level: int | None = None, inner_max_num_threads: int | None = None, **options: Any
    ) -> None:
        """*options* are arguments of ``Executor``, such as ``retries=``."""
        super().__init__(nesting_level=nesting_level, inner_max_num_threads=inner_max_num_threads)
        self._options = options
        self._executor: Executor | None = None
        self._users = 0  # calls that go on: a generator's, and others beside it

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """How many workers *n_jobs* asks for: of -1 all cores, of -2 all but one …; in a worker one."""
        if n_jobs == 0:
            raise ValueError("n_jobs == 0 in Parallel has no meaning")
        nested = self.nesting_level and not self.in_main_thread()
        if n_jobs is None or nested or here.rank is not None or here.group.get() is not None:
            return 1
        return n_jobs if n_jobs > 0 else max(1, available_cores() + 1 + n_jobs)

    def configure(self, n_jobs: int = 1, parallel: Any = None, **_: Any) -> int:
        """Have workers ready; returns how many there are."""
        count = self.effective_n_jobs(n_jobs)
        if count == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        options = dict(self._options)
        if self.inner_max_num_threads is not None:
            options["threads_per_worker"] = self.inner_max_num_threads
        if self._executor is None or not self._executor.is_ready:
            self._executor, self._users = _pool.taken(count, options), 0
        self._users += 1
        self.parallel = parallel
        return count

    def submit(self, func: Callable[[], Any], callback: Any = None) -> Future[Any]:
        """Have a batch of tasks run."""
        if self._executor is None:
            raise RuntimeError("another call of the same backend has ended the workers.")
        future = self._executor.submit(func)
        if callback is not None:
            future.add_done_callback(callback)
        return future

    def retrieve_result_callback(self, future: Future[Any]) -> Any:
        """The result of a batch, whose future is done."""
        return future.result()

    def terminate(self) -> None:
        """The call is over; the workers stay for the next one."""
        self._users -= 1
        if self._executor is not None and self._users <= 0:
            _pool.leave(self._executor)
            self._executor = None
        self.reset_batch_stats()

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End the tasks, with the workers."""
        if self._executor is not None:
            self._executor.kill_workers()
            self._executor = None
        if ensure_ready:
            self.configure(self.parallel.n_jobs, self.parallel)


class _Files(Executor):
    """An executor whose tasks write to memory-mapped files, as joblib's users expect.

    Attributes:
        asked: how many workers it has, and its options.
    """

    _writes_to_files = True

    def __init__(self, count: int, options: dict[str, Any]) -> None:
        self.asked: Final = count, options
        super().__init__(count, **options)


class _Pool:
    """The executor of the last call, until another call takes it, or it has been idle for long."""

    def __init__(self) -> None:
        self._executor: Executor | None = None  # which nobody uses
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def taken(self, count: int, options: dict[str, Any]) -> Executor:
        """An executor of *count* workers with these *options* that nobody else uses."""
        with self._lock:
            self._calm()
            kept, self._executor = self._executor, None
        if isinstance(kept, _Files) and kept.is_ready and kept.asked == (count, options):
            return kept
        if kept is not None:
            kept.shutdown(wait=False)
        return _Files(count, options)

    def leave(self, executor: Executor) -> None:
        """Keep an executor that nobody uses any more."""
        with self._lock:
            self._calm()
            self._shut_down()
            self._executor = executor
            self._timer = threading.Timer(_IDLE, self.shut_down)
            self._timer.daemon = True
            self._timer.start()

    def shut_down(self) -> None:
        """End the executor."""
        with self._lock:
            self._calm()
            self._shut_down()

    def _shut_down(self) -> None:
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=False)

    def _calm(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()


_pool = _Pool()


def shut_down() -> None:
    """End the workers that are kept for the next call."""
    _pool.shut_down()


def _begin_anew() -> None:
    global _pool  # noqa: PLW0603
    _pool = _Pool()  # the workers are those of the parent


os.register_at_fork(after_in_child=_begin_anew)
