"""Where this process stands: the module-level variables of Synkro, to which public functions are sent.

``current`` is, in the main process, the current session (``api.fork`` sets it), in a worker the replica
(``worker.main`` sets it), before either of them None.

``group`` is, in the main process, what a function sees that runs there by itself (``as_serial``).
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

current: Any = None

group: ContextVar[Any] = ContextVar("group", default=None)
