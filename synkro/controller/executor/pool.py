"""The workers of an executor, and the thread that hands tasks to them.

All tasks of an executor are the items of one map, which goes on until no more will come. So they have
what maps have: shared memory for large arrays, another worker for one that dies, hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import pickle
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

import numpy as np

from ... import errors
from ...ipc.process import BROKEN
from ...packing import settings
from ...packing.futures import NotPrepared, Runner, Wrapped
from ..calls.function import name_of
from ..calls.replay import Enter, keep, run_here
from ..calls.serial import scene_of
from ..session import Session
from ..tasks.feed import Item, ItemPickler, ItemSource
from ..tasks.wishes import Wishes
from .arguments import PickledTask, TaskPickler

_ANEW = "make a new Executor."
_CLOSED = f"cannot schedule new futures after shutdown: {_ANEW}"
_PARENTS = f"this Executor belongs to the parent of this process, which is a fork of that: {_ANEW}"
_LOST = f"Tasks without a result are lost: {_ANEW}"
_CURE = (
    f"{_LOST} One with retries= lets another worker take the place of one that dies, and tries its task "
    f"again."
)


Prepare = tuple[Callable[..., Any], tuple[Any, ...]]  # a function, and its arguments


class Submitted(Item):
    """A function with its arguments, and the future of its result."""

    __slots__ = ("_pickled", "_pickler", "_settings", "args", "called", "fn", "future", "kwargs")

    def __init__(self, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any], called: Any) -> None:
        """*called* is the function of the user's, as errors name it."""
        self.fn, self.args, self.kwargs, self.called = fn, args, kwargs, called
        self.future: Future[Any] = Future()
        self._settings: tuple[Any, ...] = ()
        self._pickler: TaskPickler | None = None
        self._pickled: PickledTask | None = None  # as long as workers may need it

    def run_under(self, *settings: Any) -> None:
        """Note the settings that the workers may lack."""
        self._settings = settings

    def pickle(self, arguments: TaskPickler) -> None:
        """Pickle the task.  Raises: what pickling raises."""
        self._pickler = arguments
        self._pickled = arguments.task(self.fn, self.args, self.kwargs, *self._settings)

    def sent(self) -> tuple[bytes, list[memoryview]]:
        """The pickle, beside its large buffers."""
        assert self._pickled is not None
        return self._pickled.stream, self._pickled.buffers

    def remember(self, error: BaseException) -> None:
        trace = error.__cause__
        if isinstance(trace, errors.RemoteTraceback) and trace.began and self._pickler is not None:
            task, name = (self.fn, self.args, self.kwargs), name_of(self.called)
            keep(trace, functools.partial(_again, self._pickler, task, name, getattr(error, "rank", 0)))

    def __repr__(self) -> str:
        args = self.args if self.fn is self.called else self.args[1][0]  # of a chunk the first item
        given = [*map(_shown, args), *(f"{k}={_shown(v)}" for k, v in self.kwargs.items())]
        return errors.cut(f"{name_of(self.called)}({', '.join(given)})", errors.A_LINE)


def _again(
    pickler: TaskPickler, task: Any, name: str, rank: int, trace: errors.RemoteTraceback, enter: Enter
) -> Any:
    """Do a task once more, in this process, with copies of what it gets."""
    fn, args, kwargs = pickler.pickled(task).load()
    if pickler.prepares:
        print(
            "Synkro: what the initializer of the Executor has set is on its workers only: the replay "
            "has what the program has.",
            file=sys.stderr,
        )
    return run_here(scene_of(fn, args, kwargs, rank), trace, name, rank, enter)


def _shown(value: Any) -> str:
    """An argument in a sentence; of an array what it is, as its file may have gone."""
    if isinstance(value, np.ndarray):
        return f"<{type(value).__name__} {value.shape} {value.dtype}>"
    return errors.shown(value)


class _Streams(ItemPickler):
    """Tasks are pickled already."""

    def pickled(self, value: Any) -> tuple[bytes, list[memoryview], bool]:
        task: Submitted = value[0]
        return *task.sent(), False

    def together(self, columns: list[list[Any]]) -> None: ...

    def introduce(self, classes: set[type]) -> None: ...

    def settle(self) -> None: ...


class TaskPool(ItemSource):
    """The workers of an executor, and its tasks, which wait, or were given to them.

    Attributes:
        arguments: what pickles functions and arguments.
        thread: hands tasks to the workers, and results to futures, until there are no more.
        broken: why there are none, in words; empty while there may be some.
    """

    def __init__(self, session: Session, wishes: Wishes, prepare: Prepare | None, writes: bool) -> None:
        """*prepare* is the initializer, and its arguments; what tasks write to files is seen if that
        *writes*."""
        # It imports multiprocessing, and cannot be imported any more while the program ends.
        from concurrent.futures.process import BrokenProcessPool  # noqa: PLC0415

        self._broken_error: Final = BrokenProcessPool
        self._cure = _CURE if wishes.ends_by_death else _LOST
        nearby = not session.services.engine.has_hosts
        self.arguments: TaskPickler = TaskPickler(nearby, writes, prepare is not None)
        self.broken: str = ""
        self._session = session
        self._channel = session.services.engine.channel
        session.services.engine.workers.pool.be_anonymous()
        self._waiting: deque[Submitted] = deque()
        self._given: dict[int, Submitted] = {}  # by the numbers of items
        self._size = session.n_parallel
        self._count = 0  # of those that were given
        self._closed = False
        self._aborted = ""  # why, if the program has ended the workers
        self._is_over = False  # whether no task will run any more
        self._lock = threading.RLock()  # also for a callback of garbage collection, at any step
        self._process = os.getpid()
        self._settings = settings.changing()  # those of the last task
        self._changed: tuple[int, bytes] | None = None  # how often they have changed, and what they are
        # the initializer, and what it holds
        self._first = None if prepare is None else self.arguments.pickled(prepare, often=True)
        self._map = session.maps.serve(Runner(self.arguments.key, self._first), self, wishes)
        self.thread: threading.Thread = threading.Thread(
            target=self._serve, name="synkro-executor", daemon=True
        )
        _pools.add(self)
        self.thread.start()

    # ── from any thread ──────────────────────────────────────────────────────────────────────────

    def submit(self, task: Submitted) -> None:
        """Have a task run.  Raises: SessionClosed; BrokenProcessPool."""
        if os.getpid() != self._process:
            raise errors.SessionClosed(_PARENTS)
        with self._lock:
            if self.broken:
                raise self._broken_error(self.broken)
            if self._closed:
                raise errors.SessionClosed(_CLOSED)
            if (now := settings.changing()) != self._settings:
                self._settings = now
                times = self._changed[0] if self._changed is not None else 0
                self._changed = times + 1, pickle.dumps(settings.collected(), 5)
            if self._changed is not None:
                task.run_under(*self._changed)
            self._waiting.append(task)
            self._channel.everyone.look_again()

    def close(self, cancel: bool = False) -> None:
        """Let no more tasks come; *cancel* those for which no worker is free."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
            free = max(0, self._size - len(self._given)) if cancel else len(self._waiting)
            left = []
            with contextlib.suppress(IndexError):  # the thread takes them, too
                while len(self._waiting) > free:
                    left.append(self._waiting.pop())
            if not self._is_over:
                self._channel.everyone.look_again()
        for task in reversed(left):
            task.future.cancel()
            task.future.set_running_or_notify_cancel()

    def abort(self, why: str) -> None:
        """End all tasks, with the workers."""
        self._aborted = f"{why} {_LOST}"
        self.close(cancel=True)
        self._session.services.engine.break_by(errors.WorkerDied(why))

    # ── items ────────────────────────────────────────────────────────────────────────────────────

    @property
    def is_ready(self) -> bool:
        return bool(self._waiting) or self._closed

    @property
    def is_over(self) -> bool:
        closed = self._closed  # before the look for tasks: all are there when it is closed
        return closed and not self._waiting

    def pickler(self, least: int) -> ItemPickler:
        return _Streams()

    def __next__(self) -> Submitted:
        while self._waiting:
            try:
                task = self._waiting.popleft()
            except IndexError:  # another thread has cancelled it
                break
            if not task.future.set_running_or_notify_cancel():
                continue
            try:
                task.pickle(self.arguments)
            except BaseException as error:
                task.future.set_exception(error)
                continue
            self._given[self._count] = task
            self._count += 1
            return task
        raise StopIteration

    # ── the thread ───────────────────────────────────────────────────────────────────────────────

    def _serve(self) -> None:
        failure: BaseException | None = None
        try:
            for value in iter(self._map.next, self):  # which no task returns
                self._settle(self._map.taken, value)
        except StopIteration:
            pass
        except BaseException as error:
            failure = error
        self._end(failure)
        self._session.close()
        _pools.discard(self)

    def _settle(self, number: int, value: Any) -> None:
        """Give a future its result, which is in a tuple, or its exception."""
        if type(value) is tuple:
            _resolve(self._given.pop(number).future.set_result, value[0])
            return
        error = value
        original = value.original if isinstance(value, errors.WorkerError) else None
        if isinstance(original, NotPrepared):
            raise errors.SessionError(
                f"the initializer has failed on a worker: {original}."
            ) from value.__cause__
        if original is not None:
            error = original.error if isinstance(original, Wrapped) else original
            error.__cause__ = value.__cause__
        _resolve(self._given.pop(number).future.set_exception, error)

    def _end(self, failure: BaseException | None) -> None:
        """No task runs any more, and none will."""
        with self._lock:
            left = [*self._given.values(), *self._waiting]
            self._given.clear()
            self._waiting.clear()
            if failure is not None:
                why = (str(failure) or repr(failure)).replace(BROKEN, self._cure)
                self.broken = self._aborted or why
            self._closed = self._is_over = True
        for task in left:
            if task.future.running() or task.future.set_running_or_notify_cancel():
                error = self._broken_error(self.broken)
                error.__cause__ = failure
                task.future.set_exception(error)


def _resolve(settle: Callable[[Any], None], value: Any) -> None:
    """Give a future its result, or its exception; whatever its callbacks raise."""
    try:
        settle(value)
    except BaseException:  # exceptions are told by the future itself
        traceback.print_exc()


_pools: set[TaskPool] = set()  # those whose threads have not ended


@atexit.register
def _at_exit() -> None:
    """The tasks of executors that nobody has shut down come to their ends, unless Ctrl-C was pressed."""
    stopped = getattr(sys, "last_type", None) is KeyboardInterrupt
    for pool in tuple(_pools):
        if stopped:
            pool.abort("the program was interrupted.")
        pool.close()
    for pool in tuple(_pools):
        try:
            pool.thread.join()
        except KeyboardInterrupt:  # which nobody can catch any more
            pool.abort("the program was interrupted.")
            pool.thread.join()
            print("KeyboardInterrupt: the tasks of an Executor were ended.", file=sys.stderr)


os.register_at_fork(after_in_child=_pools.clear)
