"""Whether an object has only known owners: nobody else can see it change then."""

from __future__ import annotations

import sys
from collections.abc import Callable
from operator import getitem
from typing import Any


def _count(get: Callable[[Any, Any], object], holder: Any, key: Any) -> int:
    return sys.getrefcount(get(holder, key))


_ALONE = _count(getitem, [object()], 0)
"""The count of an object with one owner; this includes the references that the call itself adds."""


def sole_owner(get: Callable[[Any, Any], object], holder: Any, key: Any, places: int = 1) -> bool:
    """Whether the object ``get(holder, key)`` has no more than *places* references, that one included.

    *get* is ``getattr`` or ``operator.getitem``, so that the call adds the same number of references
    for every object: how many these are differs between interpreters.
    """
    return _count(get, holder, key) <= _ALONE + places - 1
