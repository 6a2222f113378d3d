"""``Executor``: a ``concurrent.futures.Executor`` whose tasks run on workers of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import inspect
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any, ClassVar, ParamSpec, TypeVar

from ... import here
from ...errors import InvalidType, InvalidValue, SessionClosed, counted, shortened
from ...ipc.waiting import Deadline
from ...memory.segment import undoing
from ...packing.futures import chunk
from ...values.arrays import checked_int
from ..session import Session
from ..tasks.wishes import Wishes
from .pool import Submitted, TaskPool

P = ParamSpec("P")
R = TypeVar("R")


class Executor(concurrent.futures.Executor):
    """Runs functions on worker processes of its own: ``submit`` returns a future for each task.

    It is a ``concurrent.futures.Executor``, for libraries that take a pool, and goes beside sessions and
    other executors.  Functions and arguments travel by value, as to ``ProcessPoolExecutor``, but also
    those that are defined in the program or in other functions; what a task changes in them is thrown
    away.  Large arrays go through shared memory, and a ``Data`` stays where it lies.

    It is a context manager, whose end waits for all tasks, as ``shutdown()`` does.  If Ctrl-C ends the
    block, or the program, tasks are ended at once.  Inside a worker, and in ``as_serial``, tasks run one
    after the other where they are submitted, with the arguments themselves.
    """

    _writes_to_files: ClassVar[bool] = False  # whether tasks write to memory-mapped files that they get

    def __init__(
        self,
        max_workers: int | None = None,
        initializer: Callable[..., Any] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        retries: int = 0,
        item_timeout: float | None = None,
        max_tasks: int | None = None,
        devices: str | Sequence[str] | None = "cpu",
        threads_per_worker: int | None = None,
        hosts: str | os.PathLike[str] | Sequence[str] | None = None,
        start_timeout: float = 60.0,
        seed: int | None = None,
        verbose: bool = False,
    ) -> None:
        """Start the workers.

        Args:
            max_workers: how many; None for one a core, or device.
            initializer: a function that each worker calls, with *initargs*, before its first task; also
                one that takes the place of another.  If it raises an exception, the executor is broken.
            retries: how often a task is tried again that has raised an exception, has taken too long, or
                whose worker has died; then another worker takes the place of that.  With 0 a worker that
                dies breaks the executor: all its futures raise BrokenProcessPool.
            item_timeout: seconds that a task may take.  One that takes longer is ended with its worker,
                another worker takes the place of that, and the future raises CallTimeout.
            max_tasks: after so many tasks a worker ends, and another one takes its place.
            devices: as for ``fork()``, but the CPU's by default.
            threads_per_worker, hosts, start_timeout, seed, verbose: as for ``fork()``.

        Raises: InvalidType, InvalidValue; NotAvailable for *item_timeout* and *max_tasks* on GPUs and
        over several hosts; otherwise as ``fork()``.
        """
        if initializer is not None and not callable(initializer):
            raise InvalidType(f"initializer= takes a function; got {shortened(initializer)}.")
        if max_workers is not None:
            if isinstance(max_workers, int) and max_workers < 1:
                raise InvalidValue(f"max_workers must be greater than 0; got {max_workers}.")
            max_workers = checked_int(max_workers, "max_workers", 1)
        how = retries, "return", None, item_timeout, max_tasks
        wishes = Wishes(False, None, 1, *how, ends_by_death=retries == 0)
        self._pool: TaskPool | None = None
        self._closed = False  # of an executor without workers
        if here.rank is not None or here.group.get() is not None:
            self._max_workers: int = 1
            if initializer is not None:
                initializer(*initargs)
            return
        prepare = None if initializer is None else (initializer, tuple(initargs))
        listed = max_workers is not None and devices == "cpu" and hosts is None  # as many as are wanted
        session = Session(
            max_workers,
            devices=["cpu"] * (max_workers or 1) if listed else devices,
            threads_per_worker=threads_per_worker,
            hosts=hosts,
            start_timeout=start_timeout,
            seed=seed,
            verbose=verbose,
        )
        self._max_workers = session.n_parallel
        with undoing(session.close):
            self._pool = TaskPool(session, wishes, prepare, self._writes_to_files)
        weakref.finalize(self, self._pool.close).atexit = False

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Have a worker call ``fn(*args, **kwargs)``; returns the future of the result.

        The future raises what the function raises, with the worker's traceback as its cause; what
        pickling raises, for arguments that cannot travel; BrokenProcessPool if a worker dies.

        Raises: InvalidType if *fn* cannot be called; SessionClosed, a RuntimeError, after
        ``shutdown()``; BrokenProcessPool.
        """
        if not callable(fn):
            raise InvalidType(f"submit() takes a function, and its arguments; got {shortened(fn)}.")
        if inspect.iscoroutinefunction(fn):
            raise InvalidType(
                f"submit() runs its function on a worker, and {shortened(fn)} is async: submit a plain "
                f"function, by asyncio.run() if need be."
            )
        return self._start(Submitted(fn, args, kwargs, fn))

    def _start(self, task: Submitted) -> Future[Any]:
        if self._pool is not None:
            self._pool.submit(task)
        else:
            self._run(task)
        return task.future

    def _run(self, task: Submitted) -> None:
        """Do a task here."""
        if self._closed:
            raise SessionClosed("cannot schedule new futures after shutdown: make a new Executor.")
        task.future.set_running_or_notify_cancel()
        try:
            result = task.fn(*task.args, **task.kwargs)
        except Exception as error:
            task.future.set_exception(error)
        else:
            task.future.set_result(result)

    def map(
        self,
        fn: Callable[..., R],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[R]:
        """The results of ``fn`` for the items of the iterables, in order, as they come.

        Args:
            fn: a function of one item of each iterable.
            iterables: they are read at once, up to the end of the shortest, but for *buffersize*.
            timeout: seconds from now on that the results may take.
            chunksize: how many items are one task.
            buffersize: so many items at most are read ahead of the results; None for all.

        Raises: InvalidType, InvalidValue; the iterator raises what *fn* raises, for the first item that
        fails, and TimeoutError.
        """
        size = checked_int(chunksize, "chunksize", 1)
        ahead = None if buffersize is None else -(-checked_int(buffersize, "buffersize", 1) // size)
        until = None if timeout is None else time.monotonic() + timeout
        if not callable(fn):
            raise InvalidType(f"map() takes a function, and then its items; got {shortened(fn)}.")
        return self._several(fn, zip(*iterables, strict=False), size, ahead, until)

    def starmap(
        self, fn: Callable[..., R], iterable: Iterable[Iterable[Any]], chunksize: int | None = None
    ) -> list[R]:
        """A list of ``fn(*args)`` for each *args* of the iterable, as ``multiprocessing.Pool`` has it.

        Args:
            chunksize: how many are one task; None for a quarter of each worker's share.

        Raises: InvalidType, InvalidValue; what *fn* raises, for the first item that fails.
        """
        if not callable(fn):
            raise InvalidType(f"starmap() takes a function, and then its items; got {shortened(fn)}.")
        items = [tuple(args) for args in iterable]
        size = max(1, -(-len(items) // (4 * self._max_workers)))
        size = size if chunksize is None else checked_int(chunksize, "chunksize", 1)
        return [*self._several(fn, iter(items), size, None, None)]

    def _several(
        self, fn: Callable[..., R], items: Iterator[Any], size: int, ahead: int | None, until: Deadline
    ) -> Iterator[R]:
        """The results for items, of which *size* are a task, and so many tasks begin *ahead*."""
        common = self._pickled(fn)
        chunks = iter(lambda: [*itertools.islice(items, size)], [])
        key = "" if self._pool is None else self._pool.arguments.key
        tasks = (self._start(Submitted(chunk, (common, some, key), {}, fn)) for some in chunks)
        return _results(deque(itertools.islice(tasks, ahead)), tasks, until)

    def _pickled(self, fn: Any) -> Any:
        """A function that many tasks have in common: pickled once, if it can be."""
        if self._pool is not None:
            with contextlib.suppress(Exception):  # each task's future raises it
                return self._pool.arguments.pickled(fn, often=True)
        return fn

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more tasks; when the last one has ended, the workers end.

        *wait* for that.  *cancel_futures*: tasks that no worker has taken do not begin.
        """
        self._closed = True
        if self._pool is not None:
            self._pool.close(cancel_futures)
            if wait and threading.current_thread() is not self._pool.thread:
                self._pool.thread.join()

    def kill_workers(self) -> None:
        """End the workers at once, with what they do; tasks without a result raise BrokenProcessPool."""
        self._closed = True
        if self._pool is not None:
            self._pool.abort("kill_workers() has ended the workers of this Executor.")

    terminate_workers = kill_workers

    @property
    def is_ready(self) -> bool:
        """Whether the executor takes tasks."""
        return not self._closed and (self._pool is None or not self._pool.broken)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pool is not None and kind is not None and issubclass(kind, KeyboardInterrupt):
            self._pool.abort("the block of the Executor was interrupted.")
        self.shutdown()

    def __reduce__(self) -> Any:
        return _on_worker, (self._max_workers,)

    def __repr__(self) -> str:
        state = "closed" if self._closed else "ready"
        if self._pool is not None and self._pool.broken:
            state = "broken"
        return f"<synkro.Executor of {counted(self._max_workers, 'worker')}, {state}>"


def _on_worker(count: int) -> Executor:
    """What an executor is that travels with a function.  Raises: InvalidType in the program."""
    if here.rank is None:
        raise InvalidType(
            "an Executor cannot be copied, or pickled for another program: make a new one."
        )
    return Executor(count)


def _results(futures: deque[Future[Any]], more: Iterator[Future[Any]], until: Deadline) -> Iterator[Any]:
    """The results of chunks; the others are cancelled if nobody wants them any more."""
    try:
        while futures:
            future = futures.popleft()
            try:
                found = future.result(None if until is None else until - time.monotonic())
            finally:
                future.cancel()
            del future  # and what it holds
            futures.extend(itertools.islice(more, 1))
            found.reverse()
            while found:
                yield found.pop()
    finally:
        for future in futures:
            future.cancel()
