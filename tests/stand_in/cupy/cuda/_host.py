"""The host's memory as the device sees it: which of it is pinned, and whether it is there at all."""

from __future__ import annotations

import atexit
import os
import sys

from . import _machine
from ._machine import CUDARuntimeError, lock

READ_ONLY = 8

_registered = {}  # address -> (size, where the range was mapped from when it was registered)
_allocated = {}  # address -> size, for pinned memory that was allocated


def _mapped(start, end, *, writable):
    """Where [start, end) is mapped from, or None where any of it is missing or forbidden."""
    source = None
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            area, rights, _offset, device, inode = line.split(maxsplit=5)[:5]
            low, high = (int(edge, 16) for edge in area.split("-"))
            if not low <= start < high:
                continue
            if rights[0] != "r" or (writable and rights[1] != "w"):
                return None
            source = source or (device, inode)
            if end <= high:
                return source
            start = high
    return None


def register(address, size, flags):
    """Pin a range, on the conditions under which CUDA does."""
    with lock:
        if size == 0:
            raise CUDARuntimeError(_machine.INVALID_VALUE)
        if any(low < address + size and address < low + extent for low, extent in ranges()):
            raise CUDARuntimeError(_machine.ALREADY_REGISTERED)
        source = _mapped(address, address + size, writable=not flags & READ_ONLY)
        if source is None:
            raise CUDARuntimeError(_machine.INVALID_VALUE)
        _registered[address] = (size, source)


def unregister(address):
    """Unpin the range that starts at `address`."""
    with lock:
        if address not in _registered:
            raise CUDARuntimeError(_machine.NOT_REGISTERED)
        size, source = _registered.pop(address)
        if _mapped(address, address + size, writable=False) != source:
            print("stand-in for CUDA: memory was unmapped before it was unpinned", file=sys.stderr)
            raise CUDARuntimeError(_machine.INVALID_VALUE)


def add_allocation(address, size):
    """Note memory that was allocated as pinned."""
    with lock:
        _allocated[address] = size


def drop_allocation(address):
    """Forget memory that `add_allocation` noted."""
    with lock:
        _allocated.pop(address, None)


def ranges():
    """Every pinned range as (address, size)."""
    return [(low, size) for low, (size, _) in _registered.items()] + list(_allocated.items())


def pinned(address, size):
    """Whether a range is pinned; one that is so only in part, or twice, is an error, as in CUDA."""
    touched = [each for each in ranges() if each[0] < address + size and address < sum(each)]
    if not touched:
        return False
    if not any(low <= address and address + size <= low + extent for low, extent in touched):
        raise CUDARuntimeError(_machine.INVALID_VALUE)
    return True


def visible(address, size):
    """Whether all of a range is pinned, in any number of parts: so that kernels can read it."""
    covered = address
    for low, extent in sorted(ranges()):
        if low <= covered < low + extent:
            covered = low + extent
    return covered >= address + size


def complaints():
    """One line for every registered range whose memory has gone or has been replaced."""
    lines = []
    with lock:
        for low, (size, source) in _registered.items():
            found = _mapped(low, low + size, writable=False)
            if found is None:
                lines.append(f"{size} bytes at {low:#x} are registered but no longer mapped")
            elif found != source:
                lines.append(f"{size} bytes at {low:#x} are registered but other memory is there now")
    return lines


def _at_exit(pid=os.getpid()):
    if os.getpid() == pid:
        for line in complaints():
            print(f"stand-in for CUDA: {line}", file=sys.stderr)


atexit.register(_at_exit)
