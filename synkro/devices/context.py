"""A GPU that gets ready in a thread of its own, while this process does something else."""

from __future__ import annotations

import contextlib
import ctypes
import threading


def begin(index: int) -> None:
    """Have CUDA make its context of a GPU, which takes as long as the import of CuPy.

    What fails here is told by whoever uses the GPU.
    """
    threading.Thread(target=_retain, args=(index,), name="synkro-context", daemon=True).start()


def _retain(index: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        driver = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if not driver.cuInit(0) and not driver.cuDeviceGet(ctypes.byref(device), index):
            driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
