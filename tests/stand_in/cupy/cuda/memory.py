"""Device memory: ordinary memory of the process, with accounts as a device would keep them.

What is allocated, and what has been freed, is filled with 0xAB, so that reading what nobody has
written shows. A free takes effect in the order of the stream that was current at the allocation,
because from then on CuPy's pool may give the same block to later work of that stream.
"""

from __future__ import annotations

import bisect
import collections
import ctypes
import sys
import weakref

import numpy as np

from . import _ipc, _machine, device, runtime, stream

POISON = 0xAB
_ALIGNMENT = 512

_starts = []  # the addresses of all live blocks, sorted
_blocks = {}  # address -> a weak reference to the block
_occupied = collections.Counter()  # device -> bytes that its memory is short of


class OutOfMemoryError(MemoryError):
    """What an allocation raises that does not fit."""

    def __init__(self, size, total, limit=0):
        self._size, self._total, self._limit = size, total, limit
        limited = f", limit set to: {limit:,} bytes" if limit else ""
        super().__init__(
            f"Out of memory allocating {size:,} bytes (allocated so far: {total:,} bytes{limited})."
        )

    def __reduce__(self):
        return (type(self), (self._size, self._total, self._limit))


def occupied(device_id):
    """How many bytes of a device are taken."""
    return _occupied[device_id]


def find(address):
    """The live block that holds `address`, or None."""
    with _machine.lock:
        place = bisect.bisect_right(_starts, address) - 1
        block = _blocks[_starts[place]]() if place >= 0 else None
        return block if block is not None and address < block.ptr + block.size else None


class BaseMemory:
    """A block on the current device; `buffer` (not in the real one) is where it really is."""

    __slots__ = ("__weakref__", "_queue", "buffer", "device_id", "ptr", "size")

    def __init__(self, size):
        self.size = size
        self.device_id = _machine.current_device()
        self.ptr = 0
        self.buffer = None
        if size == 0:
            return
        self._queue = stream.current_queue()
        self.buffer = self._reserve(size)
        self.buffer.fill(POISON)
        self.ptr = self.buffer.ctypes.data
        self._enlist()

    def _reserve(self, size):
        """Where the block lies."""
        raw = np.empty(size + _ALIGNMENT, np.uint8)
        skip = -raw.ctypes.data % _ALIGNMENT
        return raw[skip : skip + size]

    def _enlist(self):
        """From now on the block is found by its address."""
        with _machine.lock:
            _machine.touch(self.device_id)
            bisect.insort(_starts, self.ptr)
            _blocks[self.ptr] = weakref.ref(self)

    def _check(self):
        """Raise where the block must not be touched any more."""

    @property
    def device(self):
        """The device whose memory this is."""
        return device.Device(self.device_id)

    def _release(self):
        """Settle the accounts."""

    def __del__(self):
        if (
            self.buffer is None or sys.is_finalizing() or self.ptr not in _blocks
        ):  # interrupted in __init__
            return
        with _machine.lock:
            del _blocks[self.ptr]
            _starts.pop(bisect.bisect_left(_starts, self.ptr))
            self._release()
            buffer, queue = self.buffer, self._queue
            if queue.completed < queue.issued:
                queue.add(lambda: buffer.fill(POISON) or True)
            else:
                buffer.fill(POISON)


class Memory(BaseMemory):
    """A block straight from the runtime, without a pool."""

    __slots__ = ()

    def __init__(self, size):
        self.buffer = None
        _machine.check()
        with _machine.lock:
            device_id = _machine.current_device()
            if _occupied[device_id] + size > _machine.capacity():
                raise runtime.CUDARuntimeError(_machine.OUT_OF_MEMORY)
            super().__init__(size)
            _occupied[device_id] += size

    def _reserve(self, size):
        memory, fd = _ipc.reserve(size)
        _ipc.note(_ipc.body(memory).ctypes.data, memory, fd)
        return _ipc.body(memory)

    def _release(self):
        _occupied[self.device_id] -= self.size
        _ipc.free(self.ptr)


class _Opened(BaseMemory):
    """A block of another process, which is open here. Not in the real one, where it is an address."""

    __slots__ = ("_is_open",)

    def __init__(self, name):
        self.buffer = None
        memory, fd, self.size = _ipc.open_(name)
        self.device_id = _machine.current_device()
        self.buffer, self._is_open = _ipc.body(memory), True
        self.ptr = self.buffer.ctypes.data
        self._enlist()
        _ipc.add(name, self, memory, fd)

    def _close(self):
        """From now on it must not be touched."""
        with _machine.lock:
            del _blocks[self.ptr]
            _starts.pop(bisect.bisect_left(_starts, self.ptr))
            self._is_open = False

    def _check(self):
        if not self._is_open or _ipc.is_lost(self.ptr):
            _machine.spoil(_machine.ILLEGAL_ADDRESS)
            raise runtime.CUDARuntimeError(_machine.ILLEGAL_ADDRESS)

    def __del__(self):
        """It goes with the process."""


class UnownedMemory(BaseMemory):
    """Memory of somebody else, who is kept alive and who alone frees it."""

    __slots__ = ("_block", "_owner")

    def __init__(self, ptr, size, owner, device_id=-1):
        self.ptr, self.size, self._owner = ptr, size, owner
        self._block = find(ptr)
        self.device_id = runtime.getDevice() if device_id < 0 else device_id
        self.buffer = np.frombuffer((ctypes.c_ubyte * size).from_address(ptr), np.uint8)

    def _check(self):
        if self._block is not None:
            self._block._check()

    def __del__(self):
        """Give nothing back."""


class PooledMemory(BaseMemory):
    """A block of a pool, to which it goes back."""

    __slots__ = ("_account",)

    def __init__(self, size, account):
        super().__init__(size)
        self._account = account

    def _release(self):
        self._account.used -= self.size


class MemoryPointer:
    """A place in a block, which it keeps alive."""

    __slots__ = ("mem", "ptr")

    def __init__(self, mem, offset):
        self.mem = mem
        self.ptr = mem.ptr + offset

    @property
    def device_id(self):
        """The number of the device that it points into."""
        return self.mem.device_id

    @property
    def device(self):
        """The device that it points into."""
        return self.mem.device

    def __int__(self):
        return self.ptr

    def __add__(self, offset):
        return MemoryPointer(self.mem, self.ptr - self.mem.ptr + offset)

    __radd__ = __add__

    def __sub__(self, offset):
        return self + -offset

    def copy_from_host(self, mem, size):
        """Copy from an address on the host, now."""
        runtime.memcpy(self.ptr, _address(mem), size, runtime.memcpyHostToDevice)

    def copy_from_host_async(self, mem, size, stream=None):
        """Copy from an address on the host, in stream order."""
        runtime.memcpyAsync(self.ptr, _address(mem), size, runtime.memcpyHostToDevice, _handle(stream))

    def copy_from_device_async(self, src, size, stream=None):
        """Copy from another place on a device, in stream order."""
        runtime.memcpyAsync(self.ptr, src.ptr, size, runtime.memcpyDeviceToDevice, _handle(stream))

    def memset(self, value, size):
        """Fill with a byte, now."""
        runtime.memset(self.ptr, value, size)


def _address(mem):
    return mem if isinstance(mem, int) else mem.value


def _handle(given):
    return (stream.get_current_stream() if given is None else given).ptr


class _Account:
    """What a pool holds of one device: `total` from the device, of which `used` is lent out."""

    def __init__(self):
        self.used = self.total = self.limit = 0


class MemoryPool:
    """A pool that keeps what is freed. Its free blocks fit any request: it never fragments."""

    __slots__ = ("_accounts",)

    def __init__(self, allocator=None):
        self._accounts = collections.defaultdict(_Account)

    def _account(self):
        return self._accounts[runtime.getDevice()]

    def malloc(self, size):
        """Memory of at least `size` bytes on the current device."""
        _machine.check()
        if size == 0:
            return MemoryPointer(BaseMemory(0), 0)
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        with _machine.lock:
            account, device_id = self._account(), _machine.current_device()
            if account.used + size > account.total:
                self._grow(account, device_id, size)
            mem = PooledMemory(size, account)
            account.used += size
        return MemoryPointer(mem, 0)

    def _grow(self, account, device_id, size):
        """Take from the device what the free blocks do not hold, giving them up if it is short."""
        others = _occupied[device_id] - account.total
        room = _machine.capacity() - others
        allowed = min(room, account.limit or room)
        if account.used + size > allowed:
            raise OutOfMemoryError(size, account.total, account.limit)
        _occupied[device_id] = others + account.used + size
        account.total = account.used + size

    def used_bytes(self):
        """Bytes in use on the current device."""
        return self._account().used

    def total_bytes(self):
        """Bytes that the pool holds of the current device."""
        return self._account().total

    def free_bytes(self):
        """Bytes that the pool holds but nobody uses."""
        return self.total_bytes() - self.used_bytes()

    def free_all_blocks(self, stream=None):
        """Give back to the current device what nobody uses."""
        with _machine.lock:
            account = self._account()
            _occupied[_machine.current_device()] -= account.total - account.used
            account.total = account.used

    def set_limit(self, size=None, fraction=None):
        """Limit what the pool may hold of the current device; 0 or nothing lifts the limit."""
        if size is not None and fraction is not None:
            raise ValueError("size and fraction cannot be specified at one time")
        if fraction is not None:
            if not 0 <= fraction <= 1:
                raise ValueError(f"memory limit fraction out of range: {fraction}")
            size = int(fraction * _machine.capacity())
        if (size or 0) < 0:
            raise ValueError(f"memory limit size out of range: {size}")
        self._account().limit = size or 0

    def get_limit(self):
        """The limit on the current device, 0 for none."""
        return self._account().limit


_default_pool = MemoryPool()
_allocator = [_default_pool.malloc]


def get_default_memory_pool():
    """The pool that arrays come from."""
    return _default_pool


def set_allocator(allocator=None):
    """Let arrays come from `allocator`, or straight from the runtime."""
    _allocator[0] = allocator or (lambda size: MemoryPointer(Memory(size), 0))


def get_allocator():
    """The function that memory for arrays comes from."""
    return _allocator[0]


def alloc(size):
    """Memory for an array."""
    return _allocator[0](size)
