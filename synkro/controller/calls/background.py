"""Calls in the background: each after those submitted before it that share one of its ranks."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from ...errors import InvalidType, InvalidValue, SessionClosed
from ...memory.segment import descriptors_for
from ...values.foreign import is_future
from ..engine.engine import Engine
from ..variables.registry import Variables

if TYPE_CHECKING:
    from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """The submitted calls of a session.

    Those with the same first rank run in one thread.  There each waits for earlier ones of other threads
    that share a rank with it, so no circle of waits can arise.
    """

    def __init__(self, engine: Engine, variables: Variables) -> None:
        self._engine = engine
        self._variables = variables
        self._lock = threading.Lock()  # calls may be submitted by several threads
        self._threads: dict[int, ThreadPoolExecutor] = {}
        self._last: WeakValueDictionary[int, Future[Any]] = WeakValueDictionary()
        self._ranks: WeakKeyDictionary[Future[Any], tuple[int, ...]] = WeakKeyDictionary()

    @functools.wraps(Variables.transfer)
    def transfer(self, value: Any, target: str | int | None) -> Any:
        variables = self._variables
        if not is_future(value):
            return variables.transfer(value, target)
        ranks = self._ranks.get(value)
        if ranks is None:
            raise InvalidType(
                "transfer() takes the future of a call submitted in this session: give the result() of "
                "another one."
            )
        if target != "cpu":
            to = variables.targets.ranks(target) or (variables.collectives.master_rank,)
            ranks = tuple(sorted({*ranks, *to}))
        return self.submit(ranks, lambda: variables.transfer(result_of(value, "transfer()"), target))

    def submit(self, ranks: tuple[int, ...], call: Callable[[], Any]) -> Future[Any]:
        """Run *call*, which uses *ranks*, after the calls that were submitted before.

        Raises: SessionClosed at the end of the program.
        """
        self._engine.require_ready()
        with descriptors_for("the call could not be submitted"):
            from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  no worker needs it

        with self._lock:
            if ranks[0] not in self._threads:
                self._threads[ranks[0]] = ThreadPoolExecutor(1, thread_name_prefix="synkro-submit")
            found = {id(one): one for one in map(self._last.get, ranks) if one is not None}
            try:
                future = self._threads[ranks[0]].submit(_after, list(found.values()), call)
            except RuntimeError:
                raise SessionClosed(
                    "this session, or the program, is ending: no call can be submitted."
                ) from None
            self._ranks[future] = ranks
            for rank in ranks:
                self._last[rank] = future
        return future

    def await_all(self) -> None:
        """Wait until all calls that have been submitted are over."""
        _await(list(self._last.values()))

    def cancel(self) -> None:
        """Cancel the calls that have not begun; none can be submitted any more."""
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)


def result_of(future: Future[Any], called: str) -> Any:
    """The result of a *future* that is an argument, as errors call it, after a wait for it.

    Raises: InvalidValue for the future of a call that failed, or was cancelled.
    """
    try:
        return future.result()
    except Exception as error:
        raise InvalidValue(
            f"{called} got the future of a call that failed, or was cancelled "
            f"({type(error).__name__}): it did not run."
        ) from error


def _after(earlier: list[Future[Any]], call: Callable[[], Any]) -> Any:
    _await(earlier)
    return call()


def _await(futures: list[Future[Any]]) -> None:
    """Wait until all *futures* are done, or were cancelled; the list keeps none of their results."""
    from concurrent.futures import CancelledError  # noqa: PLC0415

    while futures:
        with contextlib.suppress(CancelledError):
            futures.pop().exception()
