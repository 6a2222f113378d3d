"""The part of CUDA's runtime that Synkro calls.

`statistics`, `fail`, `contexts` and `check_registrations` are not in the real one: tests use them.
"""

from __future__ import annotations

import ctypes
import sys

from . import _host, _ipc, _machine, _queues
from ._machine import CUDARuntimeError, contexts

__all__ = ["CUDARuntimeError", "contexts"]

is_hip = False

memcpyHostToHost = 0
memcpyHostToDevice = 1
memcpyDeviceToHost = 2
memcpyDeviceToDevice = 3
memcpyDefault = 4

hostAllocDefault = 0
hostAllocPortable = 1
hostAllocMapped = 2
hostAllocWriteCombined = 4

streamDefault = 0
streamNonBlocking = 1
streamLegacy = 1
streamPerThread = 2

eventDefault = 0
eventBlockingSync = 1
eventDisableTiming = 2

cudaIpcMemLazyEnablePeerAccess = 1

cudaDevAttrWarpSize = 10
cudaDevAttrGpuOverlap = 15
cudaDevAttrMultiProcessorCount = 16
cudaDevAttrIntegrated = 18
cudaDevAttrCanMapHostMemory = 19
cudaDevAttrComputeMode = 20
cudaDevAttrConcurrentKernels = 31
cudaDevAttrPciBusId = 33
cudaDevAttrPciDeviceId = 34
cudaDevAttrAsyncEngineCount = 40
cudaDevAttrUnifiedAddressing = 41
cudaDevAttrPciDomainId = 50
cudaDevAttrManagedMemory = 83
cudaDevAttrPageableMemoryAccess = 88
cudaDevAttrConcurrentManagedAccess = 89
cudaDevAttrCanUseHostPointerForRegisteredMem = 91
cudaDevAttrHostRegisterSupported = 99
cudaDevAttrPageableMemoryAccessUsesHostPageTables = 100
cudaDevAttrHostRegisterReadOnlySupported = 113

_ATTRIBUTES = {
    "WarpSize": 32,
    "GpuOverlap": 1,
    "MultiProcessorCount": 4,
    "Integrated": 0,
    "CanMapHostMemory": 1,
    "ComputeMode": 0,
    "ConcurrentKernels": 1,
    "PciBusId": 0,
    "PciDeviceId": 0,  # differs from device to device
    "AsyncEngineCount": 2,
    "UnifiedAddressing": 1,
    "PciDomainId": 0,
    "ManagedMemory": 1,
    "PageableMemoryAccess": 0,
    "ConcurrentManagedAccess": 1,
    "CanUseHostPointerForRegisteredMem": 1,
    "HostRegisterSupported": 1,
    "PageableMemoryAccessUsesHostPageTables": 0,
    "HostRegisterReadOnlySupported": 1,
}
_FIRST_PLACE = 0x1B  # on one bus, as in many virtual machines
_HOST, _DEVICE = "host", "device"
_SIDES = {  # what dst and src must be for a kind of copy
    memcpyHostToHost: (_HOST, _HOST),
    memcpyHostToDevice: (_DEVICE, _HOST),
    memcpyDeviceToHost: (_HOST, _DEVICE),
    memcpyDeviceToDevice: (_DEVICE, _DEVICE),
}

statistics = {"pinned": 0, "pageable": 0, "device": 0, "gathered": 0, "registrations": 0, "waits": 0}
"""Bytes copied, by the memory on the host's side; what was pinned; how often the host waited."""


def fail(name):
    """Spoil the context: from now on every call raises the error `name`. None mends it.

    Not in the real one, where the device does this without being asked.
    """
    if name is None:
        _machine.spoil(None)
        return
    _machine.spoil({text: status for status, (text, _) in _machine.ERRORS.items()}[name])


def fault(name):
    """Queue a kernel on the current stream that spoils the context when it runs, and not before.

    Not in the real one.
    """
    from . import stream

    def run():
        fail(name)
        _machine.check()

    _machine.check()
    _queues.push(stream.current_queue(), run)


def check_registrations():
    """Raise AssertionError unless all registered memory is still there. Not in the real one."""
    lines = _host.complaints()
    for line in lines:
        print(f"stand-in for CUDA: {line}", file=sys.stderr)
    assert not lines, "; ".join(lines)


def driverGetVersion():
    """The version of CUDA that the driver supports; never raises, as in the real one."""
    return {"old": 11040, "none": 0}.get(_machine.driver(), 13000)


def runtimeGetVersion():
    """The version of the runtime; never raises, as in the real one."""
    return 12090


def getDeviceCount():
    """How many devices are visible."""
    _machine.check()
    return len(_machine.devices())


def getDevice():
    """The current device of the calling thread."""
    _machine.check()
    return _machine.current_device()


def setDevice(device):
    """Make `device` the calling thread's current one."""
    _machine.check_device(device)
    _machine.set_current_device(device)


def deviceGetAttribute(attrib, device):
    """The value of an attribute of a device."""
    _machine.check_device(device)
    names = {globals()[f"cudaDevAttr{name}"]: name for name in _ATTRIBUTES}
    if attrib not in names:
        raise CUDARuntimeError(_machine.INVALID_VALUE)
    if attrib == cudaDevAttrPciDeviceId:
        return _FIRST_PLACE + _machine.devices()[device]
    return _ATTRIBUTES[names[attrib]]


def deviceGetPCIBusId(device):
    """The address of a device on the bus, by which processes can compare devices."""
    return f"0000:00:{deviceGetAttribute(cudaDevAttrPciDeviceId, device):02X}.0"


def getDeviceProperties(device):
    """What the device is called and can do."""
    place = deviceGetAttribute(cudaDevAttrPciDeviceId, device)
    return {
        "name": b"Stand-in",
        "totalGlobalMem": _machine.capacity(),
        "major": 9,
        "minor": 0,
        "multiProcessorCount": _ATTRIBUTES["MultiProcessorCount"],
        "warpSize": _ATTRIBUTES["WarpSize"],
        "integrated": 0,
        "computeMode": 0,
        "asyncEngineCount": _ATTRIBUTES["AsyncEngineCount"],
        "pciBusID": 0,
        "pciDeviceID": place,
        "pciDomainID": 0,
        "pageableMemoryAccess": 0,
        "uuid": bytes([place]) * 16,
    }


def memGetInfo():
    """How many bytes of the current device are free, and how many it has."""
    from . import memory

    _machine.check()
    device = _machine.current_device()
    _machine.touch(device)
    return _machine.capacity() - memory.occupied(device), _machine.capacity()


def hostRegister(ptr, size, flags):
    """Pin memory that is there already."""
    _machine.check()
    _machine.touch(_machine.current_device())
    _host.register(ptr, size, flags)
    statistics["registrations"] += 1


def hostUnregister(ptr):
    """Undo `hostRegister`."""
    _machine.check()
    _host.unregister(ptr)


def deviceCanAccessPeer(device, peerDevice):
    """Whether one device can read the memory of another."""
    _machine.check()
    return int(device != peerDevice and _machine.peers())


def ipcGetMemHandle(devPtr):
    """The name of an allocation for other processes: 64 bytes."""
    from . import memory

    _machine.check()
    block = memory.find(devPtr)
    if block is None:
        raise CUDARuntimeError(_machine.INVALID_VALUE)
    return _ipc.handle(block)


def ipcOpenMemHandle(handle, flags=cudaIpcMemLazyEnablePeerAccess):
    """Map the allocation of another process, once a process; returns its address here."""
    from . import memory

    _machine.check()
    with _machine.lock:
        return memory._Opened(handle).ptr


def ipcCloseMemHandle(devPtr):
    """Undo `ipcOpenMemHandle`."""
    _machine.check()
    with _machine.lock:
        _ipc.close(devPtr)._close()


def deviceSynchronize():
    """Wait until the current device has nothing left to do."""
    _machine.check()
    statistics["waits"] += 1
    for queue in _queues.of_device(_machine.current_device()):
        _queues.finish(queue)


def streamSynchronize(stream):
    """Wait until a stream has nothing left to do."""
    _machine.check()
    statistics["waits"] += 1
    _queues.finish(_queues.lookup(stream))


def _status(ask):
    """The status of a query, which never raises: 0, 600 where there is more to do, or an error's."""
    try:
        _machine.check()
        return 0 if ask() else _machine.NOT_READY
    except CUDARuntimeError as error:
        return error.status


def streamQuery(stream):
    """The status of a stream; asking does what can be done."""

    def done():
        queue = _queues.lookup(stream)
        return _queues.advance(queue, _queues.mark(queue) if queue.null else queue.issued)

    return _status(done)


def eventQuery(event):
    """The status of the work before an event; asking does what can be done."""
    return _status(lambda: _queues.recorded(event))


class _Side:
    """One side of a copy: what kind of memory it is, and what keeps it from going away."""

    def __init__(self, address, size):
        from . import memory

        self.address, self.size = address, size
        owner = memory.find(address)
        if owner is None:
            self.place = _HOST
            self.pinned = _host.pinned(address, size)
            self.buffer = None
            return
        if address + size > owner.ptr + owner.size:
            raise CUDARuntimeError(_machine.INVALID_VALUE)
        self.place = _DEVICE
        owner._check()
        self._owner = owner if isinstance(owner, memory._Opened) else None
        self.buffer = owner.buffer  # not the owner: for the accounts it may be freed meanwhile
        _machine.touch(owner.device_id)

    def gone(self):
        """Whether memory that was pinned when the copy was issued is so no more, or was closed."""
        try:
            if self.place == _DEVICE and self._owner is not None:
                self._owner._check()
            return self.place == _HOST and not _host.pinned(self.address, self.size)
        except CUDARuntimeError:
            return True


def _sides(dst, src, size, kind):
    """Both sides of a copy, checked against its kind and counted."""
    sides = _Side(dst, size), _Side(src, size)
    places = sides[0].place, sides[1].place
    if kind != memcpyDefault and _SIDES.get(kind) != places:
        raise CUDARuntimeError(_machine.INVALID_VALUE)
    hosts = [side for side in sides if side.place == _HOST]
    if not hosts:
        statistics["device"] += size
    elif len(hosts) == 1:
        statistics["pinned" if hosts[0].pinned else "pageable"] += size
    return sides, all(side.pinned for side in hosts)


def _queued(queue, sides, work):
    """Queue `work`, which touches the memory of `sides`, or run it now if all is to run at once."""

    def run():
        if any(side.gone() for side in sides):
            print("stand-in for CUDA: memory was unpinned before the copy that uses it", file=sys.stderr)
            _machine.spoil(_machine.ILLEGAL_ADDRESS)
            raise CUDARuntimeError(_machine.ILLEGAL_ADDRESS)
        work()
        return True

    _queues.push(queue, run)
    if not _machine.lazy():
        _queues.finish(queue)


def memcpyAsync(dst, src, size, kind, stream):
    """Copy in stream order. With pageable memory on either side this is as good as synchronous."""
    _machine.check()
    queue = _queues.lookup(stream)
    if size == 0:
        return
    _machine.touch(queue.device)
    sides, can_wait = _sides(dst, src, size, kind)
    if can_wait:
        _queued(queue, sides, lambda: ctypes.memmove(dst, src, size))
        return
    _queues.catch_up(queue)
    ctypes.memmove(dst, src, size)


def memcpy(dst, src, size, kind):
    """Copy now, in the order of the null stream."""
    _machine.check()
    if size == 0:
        return
    device = _machine.current_device()
    _machine.touch(device)
    _sides(dst, src, size, kind)
    _queues.catch_up(_queues.null(device))
    ctypes.memmove(dst, src, size)


def memsetAsync(ptr, value, size, stream):
    """Fill device memory with a byte, in stream order."""
    _machine.check()
    queue = _queues.lookup(stream)
    if size == 0:
        return
    side = _Side(ptr, size)
    if side.place != _DEVICE:
        raise CUDARuntimeError(_machine.INVALID_VALUE)
    _queued(queue, [side], lambda: ctypes.memset(ptr, value, size))


def memset(ptr, value, size):
    """Fill device memory with a byte now."""
    memsetAsync(ptr, value, size, 0)
    streamSynchronize(0)


def _upload(dst, source, queue):
    """Queue a copy of the array `source`: as it is now, in memory of CuPy's own, unless it is pinned."""
    _machine.check()
    address = source.__array_interface__["data"][0]
    if _host.pinned(address, source.nbytes):

        def copy():
            ctypes.memmove(dst, address, source.nbytes)  # the source lives until then

        sides = _Side(dst, source.nbytes), _Side(address, source.nbytes)
        statistics["pinned"] += source.nbytes
        _queued(queue, sides, copy)
        return
    side = _Side(dst, source.nbytes)
    statistics["pageable"] += source.nbytes
    staged = source.tobytes(order="A")
    _queued(queue, [side], lambda: ctypes.memmove(dst, staged, len(staged)))
