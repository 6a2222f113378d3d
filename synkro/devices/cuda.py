"""A GPU as a device, through CuPy.

    segment (host) ─ pinned ────────────────────────▶ buffer A │ B (GPU) ─▶ function ─▶ outputs (GPU)
    or file        ├ rows picked: the GPU gathers ─────────▶┤                              │
                   └ not pinned, or strided ─▶ small buffers┘                              │
    outbox, results (host, pinned) ◀───────────────────────────────────────────────────────┤
    other memory of the host ◀─────────────────────────────────────────────────── small buffers ◀┘

Inputs are copied on a stream of their own, into two buffers in turn: a piece is copied while the one
before is computed on.  Events order copies and computation on the GPU, without the host: the current
stream waits for a piece's copy, and a copy waits until its buffer is no longer computed on.  Outputs are
taken when the device has computed all that the function queued, on any stream.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime
from numpy.typing import NDArray

from ..errors import NotAvailable
from ..machine import readable_bytes
from ..memory.interrupts import atomic
from ..values.arrays import Array
from ..values.foreign import exposed, handed, move
from ..values.variable import Variable
from .base import Device, Source
from .hints import hint
from .inputs import Buffers, Feeding, Inputs, copy_out
from .pins import Pins

_READ_ONLY = 8  # hostRegister's flag, which CuPy has no name for


class CudaDevice(Device):
    """One GPU, current in this process from now on; the others stay untouched."""

    xp = cupy
    pins = True

    def __init__(self, index: int, preallocate: float | None) -> None:
        """*preallocate* is the fraction of its memory that CuPy's pool takes at once.

        Raises: NotAvailable if less is free.
        """
        self._device = cupy.cuda.Device(index)
        self._device.use()
        sys.unraisablehook = _quiet_about_cuda(sys.unraisablehook)
        self._pins = Pins(self._register, runtime.hostUnregister, self._wait_for_inputs)
        self._inputs = Inputs(self._device, self._pins)
        self._outgoing = Buffers()
        if preallocate is not None:
            self._preallocate(preallocate)

    def _preallocate(self, fraction: float) -> None:
        free, total = self._device.mem_info
        try:
            cupy.get_default_memory_pool().malloc(int(total * fraction))  # freed: it stays in the pool
        except cupy.cuda.memory.OutOfMemoryError:
            raise NotAvailable(
                f"preallocate={fraction:g} of {readable_bytes(total)} on cuda:{self._device.id}, but "
                f"{readable_bytes(free)} are free: ask for less, or end the programs that use the GPU "
                f"(nvidia-smi lists them)."
            ) from None

    # ── arrays ───────────────────────────────────────────────────────────────────────────────────

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        self.resume()
        array: Array = cupy.empty(shape, dtype)
        return array

    def adopt(self, value: Any) -> Array | None:
        if isinstance(value, Variable):
            value = value.value
        if not isinstance(value, cupy.ndarray):
            shown, dtype = exposed(value)
            if shown is None:
                return None
            self.settle()  # its library may still compute it, on a stream of its own
            value = cupy.asarray(shown)
            value = value if dtype is None else value.view(dtype)
        if value.device != self._device:
            with value.device:
                runtime.deviceSynchronize()  # other streams may still compute it
                value = cupy.ascontiguousarray(value).reshape(value.shape)
                runtime.deviceSynchronize()
            self.resume()
            value = value.copy()
        array: Array = value
        return array

    def owns(self, array: Array) -> bool:
        if isinstance(array, cupy.ndarray):
            return array.base is None and isinstance(array.data.mem, cupy.cuda.memory.PooledMemory)
        return False

    def holds(self, value: Any) -> bool:
        return type(value) is cupy.ndarray and value.device == self._device

    def beside(self, array: Array, other: Array) -> Array:
        if isinstance(other, cupy.ndarray) == isinstance(array, cupy.ndarray):
            return array
        there: Array = cupy.asarray(array) if isinstance(other, cupy.ndarray) else cupy.asnumpy(array)
        return there

    def stow(self, array: Array) -> Array:
        copy: Array = np.empty(array.shape, array.dtype)
        self.copy_out([(copy, array)])
        return copy

    def assign(self, target: Array, source: Any) -> None:
        here, there = isinstance(target, cupy.ndarray), isinstance(source, cupy.ndarray)
        if there and not here:
            self.copy_out([(target, source)])
        elif here and not there:
            source = np.asarray(source)
            if source.shape == target.shape and target.flags.c_contiguous:
                self._inputs.assign(Source(source.astype(target.dtype, copy=False)), target)
            else:
                target[...] = cupy.asarray(source)
        else:
            target[...] = source

    def take(self, array: Array, indices: NDArray[np.int64]) -> Array:
        xp = cupy.get_array_module(array)
        rows: Array = xp.take(array, xp.asarray(indices), axis=0)
        return rows

    def welcome(self, things: Sequence[Any]) -> None:
        if not things:
            return
        try:
            here = handed(self.empty((1,), "f4"), "torch").device
        except (AssertionError, RuntimeError):  # a PyTorch for the CPU: tensors never come here
            return
        move(things, here)

    # ── from the host ────────────────────────────────────────────────────────────────────────────

    def feed(self, pieces: Sequence[Sequence[Any]]) -> Generator[list[Any], None, None]:
        if len(pieces) == 1 and (ready := self._inputs.ready(pieces[0])) is not None:
            yield ready
            return
        with contextlib.closing(Feeding(self._inputs, pieces)) as feeding:
            feeding.begin(0)
            for number in range(len(pieces)):
                yield feeding.take(number)
                feeding.computed(number)

    # ── to the host ──────────────────────────────────────────────────────────────────────────────

    def copy_out(self, pairs: Iterable[tuple[Array, Array]]) -> None:
        stream = cupy.cuda.get_current_stream()
        sources = []
        with atomic:  # when an interrupted call has ended, others may use the targets
            for target, source in pairs:
                if not isinstance(source, cupy.ndarray):
                    target[...] = source
                elif target.nbytes:
                    flat = cupy.ascontiguousarray(source, target.dtype)
                    if target.flags.c_contiguous and self._pins.pinned(target):
                        sources.append(flat)  # alive until it is copied
                        copied = 0
                        for address, nbytes in self._pins.blocks(target):
                            copy_out(address, flat.data.ptr + copied, nbytes, stream)
                            copied += nbytes
                    else:
                        self._outgoing.unload(flat.data.ptr, target, stream)
            if sources:
                stream.synchronize()

    # ── memory ───────────────────────────────────────────────────────────────────────────────────

    def mapped(self, number: int, memory: NDArray[np.uint8]) -> None:
        self._pins.mapped(number, memory)

    def forget(self, number: int) -> None:
        self.settle()
        self._inputs.kept.forget(number)
        self._pins.forget(number)

    def _register(self, address: int, nbytes: int, read_only: bool) -> bool:
        with contextlib.suppress(runtime.CUDARuntimeError):
            runtime.hostRegister(address, nbytes, _READ_ONLY if read_only else 0)
            return True
        return False  # it is copied through buffers

    def _wait_for_inputs(self) -> None:
        self._inputs.stream.synchronize()

    def let_inputs_go(self) -> None:
        self._inputs.finish()

    # ── when things go wrong ─────────────────────────────────────────────────────────────────────

    def resume(self) -> None:
        if runtime.getDevice() != self._device.id:
            self._device.use()

    def settle(self) -> None:
        self.resume()
        runtime.deviceSynchronize()  # functions may have streams of their own

    def lost(self, error: BaseException) -> str | None:
        try:
            self.settle()
        except runtime.CUDARuntimeError as broken:  # it lasts: every later call of CUDA raises it
            return str(broken)
        return None

    def advice(self, error: BaseException, in_call: bool) -> str:
        if type(error).__name__ != "OutOfMemoryError":  # CuPy's, PyTorch's
            return hint(error)
        self._inputs.kept.clear()
        cupy.get_default_memory_pool().free_all_blocks()
        free, total = self._device.mem_info
        room = f" (the GPU has {readable_bytes(total)}, of which {readable_bytes(free)} are free now"
        sliced = ": if the rows fill it, compute them in more pieces, with num_slices="
        return f"{room}{sliced if in_call else ''})"


def _quiet_about_cuda(others: Any) -> Any:
    """A hook for errors of destructors: those of CUDA say of each object that the GPU is lost.

    The worker says so itself, once.  *others* is the hook for other errors.
    """

    def hook(unraisable: Any) -> None:
        if not unraisable.exc_type.__module__.startswith(("cupy.", "cupy_backends.")):
            others(unraisable)

    return hook


def describe() -> None:
    """Print what this process sees, as JSON: GPUs, versions of NCCL and CuPy; or why there are none."""
    try:
        found = [_properties(index) for index in range(runtime.getDeviceCount())]
    except (runtime.CUDARuntimeError, ImportError) as error:
        versions = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        print(json.dumps({"reason": str(error), "versions": versions}))
        return
    nccl = importlib.import_module("cupy.cuda.nccl")  # a dummy module if NCCL cannot be loaded
    version = nccl.get_version() if getattr(nccl, "available", True) else 0
    print(json.dumps({"gpus": found, "nccl": version, "cupy": cupy.__version__}))


def _properties(index: int) -> dict[str, Any]:
    properties = runtime.getDeviceProperties(index)
    return {
        "name": properties["name"].decode(),
        "address": runtime.deviceGetPCIBusId(index),
        "nbytes": properties["totalGlobalMem"],
    }
