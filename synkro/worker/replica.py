"""``Replica``: one rank's replica of a variable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .. import here
from ..comms.base import Communicator
from ..devices.base import Device
from ..errors import InvalidType, InvalidValue, UsageError, ranks_in_words
from ..values.arrays import Array, as_array, can_assign, check_whole, of_other_ndim
from ..values.variable import Variable


class Replica(Variable):
    """One rank's replica of a variable: what functions see in place of a ``Shared`` or a kept output.

    Attributes:
        whole: the replica, with all its rows.
    """

    def __init__(
        self, name: str | None, array: Array, device: Device, comm: Communicator, shared: bool = True
    ) -> None:
        """*array* lies on *device*; *shared* says whether *comm* made it, so that all ranks see it."""
        self.name = name
        self.dtype: np.dtype[Any] = array.dtype
        self.ndim: int = array.ndim
        self._device = device
        self._comm = comm
        self.whole: Array = array
        self._shared = shared
        self._rows: Array | None = None
        self._select: Callable[[Array], Array] | None = None
        self._apart = False  # whether the rows are copies

    @property
    def value(self) -> Array:
        """This rank's replica; if the call slices it or selects its rows, those of the running slice."""
        return self.whole if self._rows is None else self._rows

    @value.setter
    def value(self, value: Any) -> None:
        if value is self.whole or value is self._rows:
            return
        array = self.checked(value)
        if self._rows is not None:
            self._write_rows(self._rows, array)
            return
        # arrays that were read before stay what they were
        fresh = self._comm.empty(array.shape, self.dtype)
        self._device.assign(fresh, array)
        self.adopt(fresh)

    def checked(self, value: Any) -> Array:
        """*value* as an array that can be assigned.  Raises: InvalidType, InvalidValue, UsageError."""
        self._check_no_task()
        array = self._device.adopt(value)
        if array is None:
            array = as_array(value, self.called())
        if array.ndim != self.ndim:
            raise of_other_ndim(array, self.ndim, self.called())
        if not can_assign(array.dtype, self.dtype):
            raise InvalidType(
                f"{self.called()} holds {self.dtype}, got {array.dtype}: convert the values yourself."
            )
        return array

    def get_value(self) -> Array:
        """A copy of this rank's replica."""
        copy: Array = self.value.copy()
        return copy

    def set_value(self, value: Any) -> None:
        """Replace this rank's replica."""
        self.value = value

    @property
    def __cuda_array_interface__(self) -> Any:
        """Lets libraries for GPUs take the replica as an array, if it lies on a GPU."""
        return self.value.__cuda_array_interface__  # type: ignore[attr-defined]

    def in_place(self) -> Array | None:
        if self._rows is not None:
            return None
        if not self._shared:
            self.value = self.whole.view()  # a copy in memory that all ranks see
        return self.whole

    def adopt(self, array: Array) -> None:
        """Become *array*, which the communicator has made."""
        self.whole = array
        self._shared = True

    def show(self, select: Callable[[Array], Array] | None) -> None:
        """Show only the rows that *select* takes of the replica, until None is given.

        Rows that are copies (selected by index) are read-only: what is assigned goes through ``value``.
        """
        self._select = select
        self._rows = None if select is None else select(self.whole)
        self._apart = self._rows is not None and self._rows.base is None
        if self._rows is not None and self._apart:
            read_only(self._rows)

    def __getitem__(self, key: Any) -> Any:
        rows = self.value
        return rows[key].copy() if self._apart else rows[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._check_no_task()
        check_whole([value], self.called())
        array = self.value.copy() if self._apart else self.value
        array[key] = self._device.xp.asarray(value) if isinstance(value, np.ndarray) else value
        self.value = array

    def _check_no_task(self) -> None:
        """Raises: UsageError if a task of ``map`` runs."""
        if here.rank is not None and here.rank.group.in_task:
            raise UsageError(
                f"a task assigned {self.called()}: each worker has its own, and runs some of the "
                f"tasks. Return the value, and assign it in the main program."
            )

    def _write_rows(self, rows: Array, array: Array) -> None:
        assert self._select is not None
        if array.shape != rows.shape:
            raise InvalidValue(
                f"{self.called()} shows the function {len(rows)} of its rows (shape "
                f"{rows.shape}), and got the shape {array.shape}: assign as many rows."
            )
        if not self._apart:
            self._device.assign(rows, array)
            return
        places = self._select(np.arange(len(self.whole)))
        self.whole[self._device.xp.asarray(places)] = self._device.xp.asarray(array)
        self.show(self._select)

    def __reduce__(self) -> Any:
        raise InvalidType(f"{self.called()} cannot be pickled on a worker: return its value instead.")


def read_only(array: Array) -> Array:
    """Make *array* read-only and return it; an array on a GPU cannot be."""
    if isinstance(array, np.ndarray):
        array.flags.writeable = False
    return array


class KeptReplica(Replica):
    """The rows of a kept output that this rank has, where others have others."""

    def _value(self) -> Array:
        if here.rank is not None and here.rank.group.in_task:
            raise InvalidValue(
                "a task used a kept output, of which each rank has its own rows: give np.asarray(…) of "
                "it to the map, to have all of them."
            )
        return self.whole if self._rows is None else self._rows

    value = property(_value, Replica.value.fset)  # type: ignore[attr-defined]


class Elsewhere(Variable):
    """Stands on a rank for a variable that only others have; functions that use it here fail."""

    def __init__(self, name: str | None, ranks: tuple[int, ...], here: int) -> None:
        """*ranks* have the variable, and *here* is this rank."""
        self.name = name
        self._ranks = ranks
        self._here = here

    @property
    def value(self) -> Array:
        raise self._error()

    @value.setter
    def value(self, value: Any) -> None:
        raise self._error()

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "ndim", "whole"):
            raise self._error()
        return super().__getattr__(name)  # type: ignore[misc]  # which checkers do not see

    def _error(self) -> InvalidValue:
        ranks = self._ranks
        target = ranks[0] if len(ranks) == 1 else list(ranks)
        return InvalidValue(
            f"{self.called()} is on {ranks_in_words(ranks)} alone, and this function runs on rank "
            f"{self._here}, too: make the function with target={target}, or give it a copy, by "
            f"transfer({self._here})."
        )
