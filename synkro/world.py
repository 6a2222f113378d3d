"""The one module-level variable of Synkro: the world that this process stands in.

In the main process it is the current session (``api.fork`` sets it), in a worker the replica
(``worker.main`` sets it), before either of them None.  Every public function is sent to it.
"""

from __future__ import annotations

from typing import Any

current: Any = None
