"""``Request``: what one call is asked to do.  A call in the background copies its arguments first."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import InvalidValue
from ...plan.binding import RESERVED
from ...plan.outputs import Tree, flatten, unflatten
from ...storage.files import is_stored
from ...values.foreign import is_future, library_of
from ..data.data import Data
from ..data.stored import StoredData
from ..objects.known import Snapshot
from ..results.targets import Destinations
from ..variables.shared import Shared
from .background import result_of


@dataclass(slots=True)  # and not frozen: that takes twice as long to make
class Request:
    """What one call is asked to do; nobody keeps it when the call is over.

    Attributes:
        args, kwargs: the function's own arguments.
        batch, batch_s, num_slices, output_subset, progress: as in ``Function.__call__``.
        alone: the rank that is to compute all rows, if one is to.
        limit: seconds that it may take; None for as long as all others.
        out: where outputs go; None for new memory.
        view: what the function is to see of its objects, where that is not what is there now.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    batch: Any = None
    batch_s: Any = None
    num_slices: Any = 1
    output_subset: Sequence[Any] | None = None
    progress: bool = False
    alone: int | None = None
    limit: float | None = None
    out: Destinations | None = None
    view: Snapshot | None = None

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], **how: Any) -> Request:
        """The request of a call with *args* and *kwargs*, options of calls among these; *how* are other
        attributes."""
        options = {name: kwargs[name] for name in RESERVED if name in kwargs}
        named = {name: value for name, value in kwargs.items() if name not in RESERVED}
        return cls(args, named, **options, **how)


def snapshot(argument: Any) -> Any:
    """A copy of *argument* for a later call: the caller may go on writing to the original."""
    leaves, tree = _taken_apart(argument)
    return unflatten(tree, map(_copied, leaves))


def arrived(arguments: Any, name: str) -> Any:
    """*arguments* of the function *name*, with results in the place of futures, after a wait for them.

    Raises: InvalidValue for the future of a call that failed, or was cancelled.
    """
    leaves, tree = _taken_apart(arguments)
    for index, leaf in enumerate(leaves):
        if is_future(leaf):
            leaves[index] = result_of(leaf, f"the function {name!r}")
    return unflatten(tree, iter(leaves))


def _taken_apart(value: Any) -> tuple[list[Any], Tree]:
    """What plain containers hold; *value* itself if they are nested too deeply, as the call will say."""
    try:
        return flatten(value, lambda each: type(each) in (dict, list) or isinstance(each, tuple))
    except InvalidValue:
        return [value], None


def _copied(leaf: Any) -> Any:
    if library_of(leaf) == "torch":
        return leaf.detach().clone()
    known = isinstance(leaf, np.memmap | np.generic | Data | StoredData | Shared)
    if known or library_of(leaf) or is_future(leaf) or is_stored(leaf):
        return leaf
    if isinstance(leaf, np.ndarray | bytearray | memoryview | array):
        return np.array(leaf, subok=True)
    try:
        return copy.deepcopy(leaf)
    except Exception:  # it cannot be pickled, either, which the call will say
        return leaf
