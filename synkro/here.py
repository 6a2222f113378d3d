"""Where this process stands: the module-level variables of Synkro, to which public functions are sent.

``session`` is, in the main process, the current session (``api.fork`` sets it).
``rank`` is, in a worker, the rank that it is (``worker.loop`` sets it).
``group`` is, in the main process, what a function sees that runs there by itself (``as_serial``).

Where they have nothing to hold they are None.
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

rank: Rank | None = None

group: ContextVar[Group | None] = ContextVar("group", default=None)


def replica(number: int, token: str) -> Any:
    """This rank's replica of a variable: what a pickled ``Shared`` becomes on a worker.

    *token* is the name of the session that the variable belongs to.  Raises: InvalidType for another.
    """
    if rank is None or rank.token != token:
        raise InvalidType(
            "a function uses a variable of another session: make the variable in this one, with "
            "shared()."
        )
    return rank.variables[number]
