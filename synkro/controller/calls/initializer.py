"""What each worker does before all else: ``fork(initializer=…)``."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Final

from ...errors import CallTimeout, InvalidType, WorkerDied, shortened
from ...messages import FunctionSpec, Initialize
from .distribution import SentFunction, Services
from .function import name_of


def checked_initializer(initializer: Any, initargs: Any) -> Callable[[], Any] | None:
    """The call of *initializer* with *initargs*; None if there is none.  Raises: InvalidType."""
    if not isinstance(initargs, Iterable) or isinstance(initargs, str | bytes):
        raise InvalidType(f"initargs= takes a tuple of arguments; got {shortened(initargs)}.")
    args = tuple(initargs)
    if initializer is None:
        if args:
            raise InvalidType(
                "initargs= are the arguments of initializer=: give one, or leave them out."
            )
        return None
    if not callable(initializer) or inspect.iscoroutinefunction(initializer):
        raise InvalidType(f"initializer= takes a function; got {shortened(initializer)}.")
    return functools.partial(initializer, *args) if args else initializer


class Initializer(SentFunction):
    """A function that all workers call, and those that take their places.

    What it assigns to globals is each worker's own: functions find it there.

    Attributes:
        begins: for ``Initialize``.
    """

    def __init__(self, services: Services, fn: Callable[[], Any]) -> None:
        """Raises: what sending it raises."""
        super().__init__()
        self.name: str = name_of(fn.func if isinstance(fn, functools.partial) else fn)
        self.begins: Final = services.objects.handover.leave_to_workers(fn)
        self._join(services, FunctionSpec(self.name, fn, None))
        self._bring()


def prepared(services: Services, fn: Callable[[], Any] | None) -> Initializer | None:
    """What has prepared the workers, if *fn* is to, as long as they live.

    Raises: what sending *fn* raises; WorkerError if it fails; WorkerDied, CallTimeout.
    """
    if fn is None:
        return None
    initializer = Initializer(services, fn)
    command = Initialize(initializer.number, initializer.begins)
    try:
        services.engine.run(command)
    except (WorkerDied, CallTimeout) as error:
        error.args = (f"in the initializer {initializer.name!r}, {error}",)
        raise
    services.replacement.initialize_by(command)
    return initializer
