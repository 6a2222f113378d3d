"""Where this process stands; the public functions look here what to act on.

``session``: in the main process, the current session (``api.fork`` sets it).
``asked``: the arguments of the ``fork()`` that made it, by name.
``rank``: in a worker, its rank (``worker.loop`` sets it).
``group``: in the main process, the ranks that a function sees in ``as_serial``, which is one.

Elsewhere they are None.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol

from .errors import InvalidType


class Ranks(Protocol):
    """What is asked of the ranks of a call, from rooms below that of the workers."""

    @property
    def in_task(self) -> bool: ...

    def send(self, value: Any, to: int) -> None: ...

    def recv(self, source: int) -> Any: ...

    def stand_in(self, variable: Any) -> Any: ...

    def assign(self, pairs: Any) -> None: ...


class ThisRank(Protocol):
    """What is asked of the rank that this process is, from rooms below that of the workers."""

    number: int
    epoch: int
    verbose: bool
    token: str

    @property
    def item(self) -> int | None: ...

    @property
    def group(self) -> Ranks: ...

    def replica(self, number: int, name: str | None, ranks: tuple[int, ...]) -> Any: ...


session: Any = None

asked: dict[str, Any] = {}

rank: ThisRank | None = None

group: ContextVar[Ranks | None] = ContextVar("group", default=None)


def replica(number: int, token: str, name: str | None, ranks: tuple[int, ...]) -> Any:
    """This rank's replica of a variable: what a pickled ``Shared`` becomes on a worker.

    *token* names the session of the variable, *ranks* are those that have it.  Raises: InvalidType if it
    is of another session.
    """
    if rank is None or rank.token != token:
        raise InvalidType(
            "a function uses a variable of another session: make the variable in this one, with "
            "shared()."
        )
    return rank.replica(number, name, ranks)
