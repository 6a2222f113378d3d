"""Where this process stands; the public functions look here what to act on.

``session``: in the main process, the current session (``api.fork`` sets it).
``asked``: the arguments of the ``fork()`` that made it, by name.
``rank``: in a worker, its rank (``worker.loop`` sets it).
``group``: in the main process, the ranks that a function sees in ``as_serial``, which is one.

Elsewhere they are None.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from .errors import InvalidType

if TYPE_CHECKING:
    from .controller.session import Session
    from .worker.group import Group
    from .worker.rank import Rank

session: Session | None = None

asked: dict[str, Any] = {}

rank: Rank | None = None

group: ContextVar[Group | None] = ContextVar("group", default=None)


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
    return rank.variables.found(number, name, ranks)
