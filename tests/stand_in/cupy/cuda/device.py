"""Devices by number."""

from __future__ import annotations

import threading

from . import runtime

_thread = threading.local()


class Device:
    """A device, the current one unless told."""

    __slots__ = ("id",)

    def __init__(self, device=None):
        self.id = runtime.getDevice() if device is None else int(device)

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and self.id == other.id

    __hash__ = None

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def __enter__(self):
        _thread.__dict__.setdefault("left", []).append(runtime.getDevice())
        try:
            runtime.setDevice(self.id)
        except runtime.CUDARuntimeError:
            _thread.left.pop()
            raise
        return self

    def __exit__(self, *args):
        runtime.setDevice(_thread.left.pop())

    def use(self):
        """Make the device current."""
        runtime.setDevice(self.id)

    def synchronize(self):
        """Wait until the device has nothing left to do."""
        with self:
            runtime.deviceSynchronize()

    @property
    def mem_info(self):
        """How many bytes are free, and how many there are."""
        with self:
            return runtime.memGetInfo()

    @property
    def pci_bus_id(self):
        """Its address on the bus."""
        return runtime.deviceGetPCIBusId(self.id)

    @property
    def compute_capability(self):
        """Its capability as digits."""
        properties = runtime.getDeviceProperties(self.id)
        return f"{properties['major']}{properties['minor']}"

    @property
    def attributes(self):
        """Its attributes by the names they have in CUDA, less the prefix."""
        names = [name for name in vars(runtime) if name.startswith("cudaDevAttr")]
        return {
            name.removeprefix("cudaDevAttr"): runtime.deviceGetAttribute(getattr(runtime, name), self.id)
            for name in names
        }


def get_device_id():
    """The number of the current device."""
    return runtime.getDevice()
