"""The types of ``map`` and ``imap``, by what they return."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypedDict, TypeVar, overload

from ...errors import SynkroError

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .maps import Results

R = TypeVar("R")

Items = Iterable[Any]
Raised = Literal["raise"]
Returned = Literal["return"]


class _OfMap(TypedDict, total=False):
    common: Mapping[str, Any] | None
    progress: bool
    timeout: float | None
    chunksize: int | None
    retries: int
    checkpoint: str | os.PathLike[str] | None
    item_timeout: float | None
    max_tasks: int | None


class _OfImap(_OfMap, total=False):
    ordered: bool


class RunsTasks(Protocol):
    """The type of ``map``: exceptions are among the results where they are to be returned."""

    @overload
    def __call__(
        self, fn: Callable[..., R], *iterables: Items, errors: Raised = ..., **options: Unpack[_OfMap]
    ) -> list[R]: ...

    @overload
    def __call__(
        self, fn: Callable[..., R], *iterables: Items, errors: Returned, **options: Unpack[_OfMap]
    ) -> list[R | SynkroError]: ...


class IteratesTasks(Protocol):
    """The type of ``imap``: exceptions are among the results where they are to be returned."""

    @overload
    def __call__(
        self, fn: Callable[..., R], *iterables: Items, errors: Raised = ..., **options: Unpack[_OfImap]
    ) -> Results[R]: ...

    @overload
    def __call__(
        self, fn: Callable[..., R], *iterables: Items, errors: Returned, **options: Unpack[_OfImap]
    ) -> Results[R | SynkroError]: ...
