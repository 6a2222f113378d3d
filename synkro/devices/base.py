"""The interface of a device, as a worker sees it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from numpy.typing import NDArray


class Device(ABC):
    """Where a worker computes.  Host arrays are NumPy's, device arrays those of ``xp``."""

    @property
    @abstractmethod
    def xp(self) -> Any:
        """The array module of the device's arrays."""

    @abstractmethod
    def to_device(self, array: NDArray[Any]) -> Any:
        """A host array (a read-only view of shared memory, or rows taken from one) on the device."""

    @abstractmethod
    def to_host(self, array: Any) -> Any:
        """A function's output, computed to the end, as something that NumPy understands."""
