"""Device memory that other processes open: their rules, and what becomes of those who break them.

An allocation straight from the runtime lies in a file, behind a page that says who has it open.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import sys
from contextlib import contextmanager

import numpy as np

from . import _machine

HANDLE_BYTES = 64
_FORMAT = "<8sqqqqq"  # a word of ours; the process, its file, the bytes, the device, the address
_MAGIC = b"stand-in"
_HEAD = mmap.PAGESIZE
_FREED, _OPEN = 0, 1  # words of the head

_files = {}  # address -> the file of an allocation
_opened = {}  # address -> the opened block
_known = {}  # handle -> the address at which it is open


@contextmanager
def _locked(fd):
    fcntl.lockf(fd, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(fd, fcntl.LOCK_UN)


def _words(memory):
    return memory[:16].view(np.int64)


def _is_allowed():
    """Whether this machine has IPC at all; many containers have not."""
    return os.environ.get("FAKE_CUDA_IPC", "1") != "0"


def reserve(size):
    """Memory for an allocation of so many bytes, all of it, and its file."""
    fd = os.memfd_create("stand-in-device")
    os.ftruncate(fd, _HEAD + size)
    return np.frombuffer(mmap.mmap(fd, _HEAD + size), np.uint8), fd


def body(memory):
    """The allocation in what `reserve` returned."""
    return memory[_HEAD:]


def note(address, memory, fd):
    """The allocation lies at this address."""
    _files[address] = memory, fd


def free(address):
    """The allocation is gone; complain if others have it open."""
    memory, fd = _files.pop(address)
    with _locked(fd):
        words = _words(memory)
        words[_FREED] = 1
        if words[_OPEN]:
            print(
                f"stand-in for CUDA: memory was freed that {words[_OPEN]} processes have open",
                file=sys.stderr,
            )
    os.close(fd)


def handle(block):
    """The name of an allocation, for other processes."""
    if block.ptr not in _files or not _is_allowed():
        raise _machine.CUDARuntimeError(_machine.INVALID_VALUE)
    _, fd = _files[block.ptr]
    place = _machine.devices()[block.device_id]
    packed = struct.pack(_FORMAT, _MAGIC, os.getpid(), fd, block.size, place, block.ptr)
    return packed.ljust(HANDLE_BYTES, b"\0")


def open_(name):
    """Map the allocation of another process; returns its memory, its file and its size."""
    if not _is_allowed():
        raise _machine.CUDARuntimeError(_machine.NOT_SUPPORTED)
    magic, pid, number, size, place, _ = struct.unpack_from(_FORMAT, name)
    if magic != _MAGIC:
        raise _machine.CUDARuntimeError(_machine.INVALID_VALUE)
    if pid == os.getpid():
        raise _machine.CUDARuntimeError(_machine.DEVICE_UNINITIALIZED)
    if name in _known:
        raise _machine.CUDARuntimeError(_machine.ALREADY_MAPPED)
    if place != _machine.devices()[_machine.current_device()] and not _machine.peers():
        raise _machine.CUDARuntimeError(_machine.NO_PEER_ACCESS)
    try:
        fd = os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR)
        memory = np.frombuffer(mmap.mmap(fd, _HEAD + size), np.uint8)
    except (OSError, ValueError):  # the process, or the allocation, has gone
        raise _machine.CUDARuntimeError(_machine.INVALID_VALUE) from None
    with _locked(fd):
        words = _words(memory)
        if words[_FREED]:
            os.close(fd)
            raise _machine.CUDARuntimeError(_machine.INVALID_VALUE)
        words[_OPEN] += 1
    return memory, fd, size


def add(name, block, memory, fd):
    """Note a block as open."""
    _opened[block.ptr] = (name, block, memory, fd)
    _known[name] = block.ptr


def close(address):
    """Take the block that is open at an address out again; whoever uses it later is told."""
    if address not in _opened:
        raise _machine.CUDARuntimeError(_machine.INVALID_VALUE)
    name, block, memory, fd = _opened.pop(address)
    del _known[name]
    with _locked(fd):
        _words(memory)[_OPEN] -= 1
    os.close(fd)
    return block


def is_lost(address):
    """Whether the allocation that is open at an address was freed by its owner."""
    entry = _opened.get(address)
    return entry is not None and bool(_words(entry[2])[_FREED])
