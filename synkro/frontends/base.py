"""The interface of a front end: how functions of one kind become bytes, and callables again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

Buffer = memoryview


class FrontEnd(ABC):
    """Packs functions in the main process and unpacks them in a worker."""

    @abstractmethod
    def pack(self, specs: Mapping[int, Any]) -> tuple[bytes, list[Buffer]]:
        """All *specs* (by number) as one stream of pickles, in which shared objects stay shared, and
        the big buffers that were left out of it.  What they bring along of PyTorch's comes last.

        Raises: InvalidType naming the function and the object that cannot be pickled.
        """

    @abstractmethod
    def unpack(
        self, stream: bytes, buffers: Sequence[Buffer], loading: Callable[[int], None]
    ) -> tuple[dict[int, Any], list[Any]]:
        """The inverse of ``pack``, in a worker: the specs, and PyTorch's modules and optimizers.

        *loading* hears how many specs are done before each.
        """

    @abstractmethod
    def argument(self, array: Any, library: str | None) -> Any:
        """A device array as the function takes it: of *library*, or as it is."""

    @abstractmethod
    def output(self, value: Any) -> NDArray[Any]:
        """One leaf of a function's result as an array; one of the device's own stays what it is.

        Raises: OutputError for what is no array and no number, or of a dtype without arithmetic.
        """

    def close(self) -> None:  # noqa: B027 (most hold nothing)
        """Give back what packing took."""
