"""The base of all objects that read like an array, and of all variables among them.

A variable, in the main process or on a worker, is an object with a ``value``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any, Generic

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from .arrays import Array, Scalar, check_whole


class ReadsLikeArray(NDArrayOperatorsMixin, ABC, Generic[Scalar]):
    """An object that computes, and reads, like the ndarray that stands behind it."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The lengths of its dimensions."""

    @abstractmethod
    def _element(self) -> Array:
        """The array as a number, or a truth value."""

    @property
    def size(self) -> int:
        """The number of elements."""
        return prod(self.shape)

    def __bool__(self) -> bool:
        return bool(self._element())

    def __int__(self) -> int:
        return int(self._element())

    def __float__(self) -> float:
        return float(self._element())


class Variable(ReadsLikeArray[Scalar]):
    """An array with a name that is kept from call to call: read and written through ``value``.

    Its dtype and number of dimensions never change; the lengths of its dimensions may.
    """

    name: str | None
    dtype: np.dtype[Scalar]
    ndim: int

    @property
    @abstractmethod
    def value(self) -> NDArray[Scalar]:
        """The array."""

    @value.setter
    @abstractmethod
    def value(self, value: Any) -> None: ...

    def in_place(self) -> Array | None:
        """The array, if it lies where collectives may write to it in place."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape

    def _element(self) -> Array:
        return self.value

    def __hash__(self) -> int:
        return object.__hash__(self)  # == is elementwise, as of arrays

    if not TYPE_CHECKING:  # which would take each name for one of these

        def __getattr__(self, name: str) -> Any:
            hint = f": use its value, .value.{name}" if hasattr(np.ndarray, name) else ""
            raise AttributeError(f"a worker variable has no attribute {name!r}{hint}")

    def called(self) -> str:
        """What errors call the variable."""
        return f"the variable {self.name!r}" if self.name else "a variable"

    def __len__(self) -> int:
        if not self.ndim:
            raise TypeError(f"{self.called()} has no dimensions, so it has no length.")
        return self.shape[0]

    def __getitem__(self, key: Any) -> Any:
        return self.value[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        check_whole([value], self.called())
        array = self.value
        array[key] = value
        self.value = array

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        return np.array(self.value, dtype) if copy else np.asarray(self.value, dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        plain = [value.value if isinstance(value, Variable) else value for value in inputs]
        out = kwargs.get("out", ())
        if out:
            check_whole(inputs, self.called())
            targets = tuple(o.value if isinstance(o, Variable) else o for o in out)
            getattr(ufunc, method)(*plain, **{**kwargs, "out": targets})
            for variable, target in zip(out, targets, strict=True):
                if isinstance(variable, Variable):
                    variable.value = target
            return out[0] if len(out) == 1 else out
        return getattr(ufunc, method)(*plain, **kwargs)

    def __repr__(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"{type(self).__name__}({name}dtype={self.dtype}, ndim={self.ndim})"
