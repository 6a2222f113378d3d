"""Classes that are registered with JAX as nodes of pytrees: they are so on the workers, too."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple


class Ways(NamedTuple):
    """How JAX takes an object apart, and makes one of its parts."""

    take_apart: Callable[[Any], Any]
    put_together: Callable[[Any, Any], Any]


def ways_of(cls: type) -> Ways | None:
    """How JAX treats the instances of *cls*; None where it is not registered."""
    # JAX has no public way to ask; where this one is gone, JAX itself refuses the objects on a worker
    registry = getattr(sys.modules.get("jax._src.tree_util"), "_registry", None)
    entry = registry.get(cls) if isinstance(registry, dict) else None
    return None if entry is None else Ways(entry.to_iter, entry.from_iter)


def set_and_register(cls: type, given: tuple[Callable[[type, Any], Any], Any, Ways]) -> None:
    """On a worker: give *cls* its contents, and register it."""
    from jax.tree_util import register_pytree_node  # noqa: PLC0415  the program has imported JAX

    set_contents, contents, ways = given
    set_contents(cls, contents)
    with contextlib.suppress(ValueError):  # it is registered already
        register_pytree_node(cls, *ways)
