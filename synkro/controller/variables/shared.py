"""``Shared``: a variable on the workers, as the main process has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ... import here
from ...errors import A_LINE, InvalidValue, named, ranks_in_words, shown
from ...values.arrays import Array, Scalar
from ...values.variable import Variable
from ..placement.targets import Targets


class Transport(Protocol):
    """What brings values to the replicas of variables, and back."""

    @property
    def master_rank(self) -> int: ...

    def shapes(
        self, variables: Sequence[Shared], ranks: tuple[int, ...] | None = None
    ) -> list[list[tuple[int, ...]]]: ...

    def broadcast(self, shared_vars: Any, values: Any = None) -> None: ...

    def get_value(self, rank: int, shared_vars: Any) -> Any: ...

    def gather(self, shared_vars: Any, nd_up: int = 1) -> Any: ...


class Owner(Protocol):
    """All variables of a session, as one of them knows them.

    Attributes:
        token: the name of the session.
        targets: the names of its ranks.
    """

    token: str
    targets: Targets

    @property
    def collectives(self) -> Transport: ...

    def transfer(self, value: Any, target: str | int | None) -> Any: ...


@dataclass(eq=False, repr=False)
class Shared(Variable[Scalar]):
    """A worker variable, made by ``shared()``: one replica a rank, all of one dtype and number of
    dimensions.

    One with a target has replicas on those ranks alone.

    Functions that use it, however they were distributed, find their rank's replica in its place.
    In the main process ``value`` and ``get_value()`` are a copy of the master rank's replica (of the
    first one, where the master rank has none), and assigning to ``value`` and ``set_value()`` write to
    all replicas.

    Attributes:
        ranks: those that have a replica.
    """

    _owner: Owner
    number: int
    dtype: np.dtype[Scalar]
    ndim: int
    name: str | None
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        self.name = named(self.name)

    @property
    def value(self) -> NDArray[Scalar]:
        own = self._stand_in()
        return self.get_value() if own is None else own.value

    @value.setter
    def value(self, value: Any) -> None:
        self.set_value(value)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the master rank's replica."""
        own = self._stand_in()
        return self._owner.collectives.shapes([self], (self.first,))[0][0] if own is None else own.shape

    @property
    def first(self) -> int:
        """The rank whose replica stands for all: the master rank, if it has one."""
        master = self._owner.collectives.master_rank
        return master if master in self.ranks else self.ranks[0]

    @property
    def target(self) -> str | int | list[str | int] | None:
        """Where the variable is, a context name or a rank, or a list of them; None for all ranks."""
        return self._owner.targets.names(self.ranks)

    def transfer(self, target: str | int | None) -> Any:
        """A copy on the rank *target*, device to device; see ``transfer()``."""
        return self._owner.transfer(self, target)

    def get_value(self) -> NDArray[Scalar]:
        """A copy of the master rank's replica."""
        own = self._stand_in()
        if own is not None:
            return np.array(own.value)
        return np.asarray(self._owner.collectives.get_value(self.first, self))

    def set_value(self, value: ArrayLike) -> None:
        """Write *value* to all replicas; its shape may differ from theirs.

        Raises: InvalidType, InvalidValue if its dtype or number of dimensions does not fit.
        """
        own = self._stand_in()
        if own is None:
            self._owner.collectives.broadcast(self, value)
        else:
            own.value = value

    def in_place(self) -> Array | None:
        """The array, where a function that runs here by itself may write to it."""
        own = self._stand_in()
        return None if own is None else own.in_place()

    def _stand_in(self) -> Variable | None:
        """The copy that a function uses that runs in this process by itself (``as_serial``), if any."""
        group = here.group.get()
        return None if group is None else group.stand_in(self)

    def belongs_to(self, owner: Owner) -> bool:
        """Whether the variable is one of this session, and not of another."""
        return self._owner is owner

    def __copy__(self) -> Shared:
        return self  # a handle: the contents are on the workers

    def __deepcopy__(self, memo: Any) -> Shared:
        return self

    def __reduce__(self) -> Any:
        return here.replica, (self.number, self._owner.token, self.name, self.ranks)


class Kept(Shared[Any]):
    """Outputs that stayed on the workers: the replica of a rank holds the rows that it computed.

    It can be an input of functions, where it is used in place.  Its value are all rows, in their order.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all rows together."""
        shapes = self._owner.collectives.shapes([self])[0]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    def gather(self) -> Array:
        """All rows, of all ranks."""
        return np.asarray(self._owner.collectives.gather(self, nd_up=0))

    get_value = gather

    def _stand_in(self) -> None:
        return None


class MakesVariables(Protocol):
    """The type of ``shared()``: a variable is of the dtype of its value."""

    @overload
    def __call__(
        self, value: NDArray[Scalar], name: str | None = ..., *, target: Any = ...
    ) -> Shared[Scalar]: ...

    @overload
    def __call__(self, value: ArrayLike, name: str | None = ..., *, target: Any = ...) -> Shared: ...


def check_rows(variable: Shared, verb: str) -> None:
    """Raises: InvalidValue if the variable, which is an argument of a *verb*, has no rows."""
    if variable.ndim == 0:
        raise InvalidValue(f"{verb}: {variable.called()} has no dimensions, so it has no rows.")


def check_there(variable: Shared, called: str, ranks: Sequence[int]) -> None:
    """Raises: InvalidValue if not all *ranks*, on which a function runs, have the variable."""
    missing = [rank for rank in ranks if rank not in variable.ranks]
    if missing:
        target = variable.target
        raise InvalidValue(
            f"{called} is on {ranks_in_words(variable.ranks)} alone, and the function runs on "
            f"{ranks_in_words(ranks)}: make the function with target={shown(target, A_LINE)}, or give "
            f"it a copy, by transfer({missing[0]})."
        )


def check_whole(variable: Shared, called: str, ranks: Sequence[int]) -> None:
    """Raises: InvalidValue if *ranks* would have a part of the rows of the variable."""
    if isinstance(variable, Kept) and not set(variable.ranks).issubset(ranks):
        raise InvalidValue(
            f"{called} is a kept output, of which {ranks_in_words(variable.ranks)} have their own rows "
            f"each: give np.asarray(…) of it to have all of them."
        )


def check_once(variables: Sequence[Shared], keyword: str) -> None:
    """Raises: InvalidValue if *variables*, of a *keyword*, name one twice."""
    if len({id(variable) for variable in variables}) < len(variables):
        raise InvalidValue(f"{keyword} names a variable twice: name each once.")
