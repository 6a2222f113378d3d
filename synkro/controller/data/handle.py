"""What all inputs that ``data()`` makes have in common, wherever their contents lie."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, ClassVar, Final

import numpy as np

from ...errors import InvalidType, InvalidValue, named, with_article
from ...values.arrays import Scalar
from ...values.variable import ReadsLikeArray
from ..engine.engine import Engine, State


class InputArray(ReadsLikeArray[Scalar]):
    """An input of functions: it belongs to a session, and reads like an ndarray.

    Attributes:
        ONLY_HERE: objects of this class live in the main process; functions get them as arguments.
        ATTRIBUTE: what to use instead of an attribute that arrays have, whose name is put in.
        COPY: what to do elsewhere than in functions; the input is put in.
        ANEW: what to do about an input of another session.
        name: a name for messages, or None.
        minibatch: whether it holds the rows of a batch, in its order: row k belongs to the k-th row
            that ``batch=`` names.
    """

    ONLY_HERE = True
    ATTRIBUTE: ClassVar[str]
    COPY: ClassVar[str]
    ANEW: ClassVar[str]

    _dtype: np.dtype[Scalar]

    def __init__(self, engine: Engine, minibatch: bool, name: str | None) -> None:
        self.name: Final = named(name)
        self.minibatch: Final = bool(minibatch)
        self._engine = engine

    def _called(self) -> str:
        kind = type(self).__name__
        return f"the {kind} {self.name!r}" if self.name else f"a {kind}"

    @property
    def dtype(self) -> np.dtype[Scalar]:
        """The type of its elements, which never changes."""
        return self._dtype

    @property
    def nbytes(self) -> int:
        """The bytes that its elements take."""
        return self.size * self._dtype.itemsize

    def __complex__(self) -> complex:
        return complex(self._element())

    def __index__(self) -> int:
        return operator.index(self._element())

    if not TYPE_CHECKING:  # which would take each name for one of these

        def __getattr__(self, name: str) -> Any:
            hint = f": use {self.ATTRIBUTE.format(name)}" if hasattr(np.ndarray, name) else ""
            raise AttributeError(f"a {type(self).__name__} has no attribute {name!r}{hint}")

    def __reduce__(self) -> Any:
        raise InvalidType(
            f"{self._called()} cannot be pickled: pass it to a function as an input rather than "
            f"using it as a global or closure variable; elsewhere {self.COPY.format(self)}."
        )

    def _foreign(self, called: str) -> InvalidValue:
        """The error where the input, *called* so, belongs to another session than the call."""
        state = self._engine.state
        whose = "another" if state is State.READY else with_article(state.name.lower())
        return InvalidValue(f"{called} belongs to {whose} session: {self.ANEW}.")
