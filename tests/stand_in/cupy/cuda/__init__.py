"""The part of `cupy.cuda` that Synkro uses. As in the real one, `nccl` must be imported by name."""

from __future__ import annotations

from . import device, memory, pinned_memory, runtime, stream
from .device import Device, get_device_id
from .memory import (
    BaseMemory,
    Memory,
    MemoryPointer,
    MemoryPool,
    UnownedMemory,
    alloc,
    get_allocator,
    set_allocator,
)
from .pinned_memory import PinnedMemory, PinnedMemoryPointer, PinnedMemoryPool, alloc_pinned_memory
from .stream import Event, Stream, get_current_stream

__all__ = [
    "BaseMemory",
    "Device",
    "Event",
    "Memory",
    "MemoryPointer",
    "MemoryPool",
    "PinnedMemory",
    "PinnedMemoryPointer",
    "PinnedMemoryPool",
    "Stream",
    "UnownedMemory",
    "alloc",
    "alloc_pinned_memory",
    "device",
    "get_allocator",
    "get_current_stream",
    "get_device_id",
    "is_available",
    "memory",
    "pinned_memory",
    "runtime",
    "set_allocator",
    "stream",
]


def is_available():
    """Whether there is a device to use."""
    try:
        return runtime.getDeviceCount() > 0
    except runtime.CUDARuntimeError:
        return False
