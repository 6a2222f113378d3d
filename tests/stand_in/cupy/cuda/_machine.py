"""What the make-believe machine has: its devices, the state of its driver, and the runtime's errors.

Everything else in the package asks here first, so that one place decides whether a call may go on.
"""

from __future__ import annotations

import os
import threading

# One lock for all: the stand-in is to be right, not fast.
lock = threading.RLock()
os.register_at_fork(after_in_child=lock._at_fork_reinit)

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INITIALIZATION = 3
INSUFFICIENT_DRIVER = 35
NO_DEVICE = 100
INVALID_DEVICE = 101
DEVICE_UNINITIALIZED = 201
ALREADY_MAPPED = 208
NO_PEER_ACCESS = 217
INVALID_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
ALREADY_REGISTERED = 712
NOT_REGISTERED = 713
NOT_SUPPORTED = 801

ERRORS = {
    1: ("cudaErrorInvalidValue", "invalid argument"),
    2: ("cudaErrorMemoryAllocation", "out of memory"),
    3: ("cudaErrorInitializationError", "initialization error"),
    35: (
        "cudaErrorInsufficientDriver",
        "CUDA driver version is insufficient for CUDA runtime version",
    ),
    46: ("cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"),
    98: ("cudaErrorInvalidDeviceFunction", "invalid device function"),
    100: ("cudaErrorNoDevice", "no CUDA-capable device is detected"),
    101: ("cudaErrorInvalidDevice", "invalid device ordinal"),
    214: ("cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"),
    201: ("cudaErrorDeviceUninitialized", "invalid device context"),
    208: ("cudaErrorAlreadyMapped", "resource already mapped"),
    217: (
        "cudaErrorPeerAccessUnsupported",
        "peer access is not supported between these two devices",
    ),
    400: ("cudaErrorInvalidResourceHandle", "invalid resource handle"),
    600: ("cudaErrorNotReady", "device not ready"),
    700: ("cudaErrorIllegalAddress", "an illegal memory access was encountered"),
    710: ("cudaErrorAssert", "device-side assert triggered"),
    712: (
        "cudaErrorHostMemoryAlreadyRegistered",
        "part or all of the requested memory range is already mapped",
    ),
    713: (
        "cudaErrorHostMemoryNotRegistered",
        "pointer does not correspond to a registered memory region",
    ),
    719: ("cudaErrorLaunchFailure", "unspecified launch failure"),
    801: ("cudaErrorNotSupported", "operation not supported"),
}


class CUDARuntimeError(RuntimeError):
    """The runtime's error: `status` is its number, the text its name and what it means."""

    def __init__(self, status):
        self.status = status
        name, text = ERRORS[status]
        super().__init__(f"{name}: {text}")

    def __reduce__(self):
        return (type(self), (self.status,))


class _Process:
    """What holds for this process as a whole."""

    def __init__(self):
        self.devices = None  # the physical index of every visible device, once somebody asked
        self.pid = None  # the process that first used the driver
        self.sticky = None  # the number of the error that spoilt the context
        self.contexts = set()


_process = _Process()
_thread = threading.local()


def _visible():
    """The physical devices in the order of CUDA_VISIBLE_DEVICES.

    Read at the first use only, as the driver does: a variable that is set later has no effect.
    """
    count = int(os.environ.get("FAKE_CUDA_DEVICES", "1"))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return list(range(count))
    devices = []
    for entry in listed.split(","):
        if not entry.strip().isdigit() or int(entry) >= count or int(entry) in devices:
            break
        devices.append(int(entry))
    return devices


def driver():
    """'old' or 'none' where the driver is too old or missing, '' where it is well."""
    return os.environ.get("FAKE_CUDA_DRIVER", "")


def devices():
    """The physical index of every visible device."""
    if _process.devices is None:
        _process.devices = _visible()
    return _process.devices


def check():
    """Raise what CUDA would raise from any call at this moment.

    The last check is the one that a fork fails: a child cannot use what its parent initialized.
    """
    if driver() in {"old", "none"}:
        raise CUDARuntimeError(INSUFFICIENT_DRIVER)
    if not devices():
        raise CUDARuntimeError(NO_DEVICE)
    if _process.sticky is not None:
        raise CUDARuntimeError(_process.sticky)
    if _process.pid is None:
        _process.pid = os.getpid()
    elif _process.pid != os.getpid():
        raise CUDARuntimeError(INITIALIZATION)


def check_device(device):
    """Raise unless `device` is the ordinal of a visible device."""
    check()
    if not 0 <= device < len(devices()):
        raise CUDARuntimeError(INVALID_DEVICE)


def spoil(status):
    """From now on every call raises the error `status`; None mends it."""
    _process.sticky = status


def spoilt():
    """Whether an error has spoilt the context."""
    return _process.sticky is not None


def current_device():
    """The calling thread's device; a new thread starts on device 0."""
    return getattr(_thread, "device", 0)


def set_current_device(device):
    """Make `device` the calling thread's own."""
    _thread.device = device


def touch(device):
    """Note that this process has a context on `device`."""
    _process.contexts.add(device)


def contexts():
    """The devices on which this process has a context, in order."""
    return sorted(_process.contexts)


def capacity():
    """How many bytes a device has."""
    return int(os.environ.get("FAKE_CUDA_MEMORY", str(1 << 30)))


def peers():
    """Whether one device can read the memory of another."""
    return os.environ.get("FAKE_CUDA_PEERS", "1") != "0"


def lazy():
    """Whether copies wait in their streams until something forces them."""
    return os.environ.get("FAKE_CUDA_LAZY", "1") != "0"
