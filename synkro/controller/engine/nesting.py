"""Who is in the middle of what: signal handlers and finalizers run between any two steps of a call.

The frames of the stack say so.  Marks would have to be set and taken away, and an interrupt between two
steps leaves one behind, or finds none yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, TypeVar

from ...errors import UsageError
from ...ipc.logs import handling

Method = TypeVar("Method", bound=Callable[..., Any])

_OPERATIONS: dict[CodeType, bool] = {}  # by code: whether nothing else may be done in their middle


def operation(unbroken: bool) -> Callable[[Method], Method]:
    """Mark a method of an engine, or of an object with an ``_engine``, as one that uses the workers.

    *unbroken*: the user's code can use them for nothing else in the middle of it.
    """

    def mark(method: Method) -> Method:
        _OPERATIONS[method.__code__] = unbroken
        return method

    return mark


def goes_on(engine: object, frame: FrameType | None) -> bool:
    """Whether *frame*, or a caller of it, is in the middle of an operation."""
    while frame is not None:
        if frame.f_code in _OPERATIONS and _engine_of(frame) is engine:
            return True
        frame = frame.f_back
    return False


def check_alone(engine: object, frame: FrameType | None, owner: object = None) -> None:
    """See that no code of the user's, *frame* or its callers, is in the middle of an operation.

    It may be in the middle of one that is not unbroken, but not of *owner*'s.

    Raises: UsageError.
    """
    foreign = False
    while frame is not None:
        if foreign and frame.f_code in _OPERATIONS:
            unbroken = _OPERATIONS[frame.f_code] and _engine_of(frame) is engine
            if unbroken or frame.f_locals["self"] is owner:
                raise UsageError(
                    "a call was made in the middle of another one, by a signal handler, or by a method "
                    "that Python calls by itself (__del__, __setstate__ …): there, set a flag, and make "
                    "the call when the other one has returned."
                )
        foreign = foreign or frame.f_globals.get("__name__", "").partition(".")[0] != "synkro"
        frame = frame.f_back


def check_not_handling() -> None:
    """See that this thread does not handle what workers have logged.  Raises: UsageError."""
    if handling and threading.get_ident() in handling:
        raise UsageError(
            "a handler of log records, or of warnings, has called a function of Synkro's: the call that "
            "has logged waits for the handler. Let it put what it needs into a queue.Queue."
        )


def _engine_of(frame: FrameType) -> object:
    owner = frame.f_locals["self"]
    return getattr(owner, "_engine", owner)
