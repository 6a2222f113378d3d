"""Whether an object has other owners than the one that asks: if not, nobody else can see it change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import getitem
from typing import Any


def _count(get: Callable[[Any, Any], object], holder: Any, key: Any) -> int:
    return sys.getrefcount(get(holder, key))


_ALONE = _count(getitem, [object()], 0)
"""What this interpreter counts for an object that one place refers to: on the way others come in."""


def sole_owner(get: Callable[[Any, Any], object], holder: Any, key: Any, places: int = 1) -> bool:
    """Whether only *places* refer to the object that ``get(holder, key)`` finds, one of them there.

    *get* is ``getattr`` or ``operator.getitem``, so that every object comes the same way: what an
    expression or an argument adds to the count differs between interpreters.
    """
    return _count(get, holder, key) <= _ALONE + places - 1
