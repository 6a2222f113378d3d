"""Kernels of the package under test, done by NumPy: the stand-in cannot run CUDA's C.

They take the same arguments, find fault with what the real ones could not bear, and run as late.
"""

from __future__ import annotations

import ctypes
import re

import numpy as np

from .cuda import _host, _machine, _queues, runtime, stream


class RawModule:
    """Kernels in CUDA's C, of which only those can be had that are written here as well."""

    __slots__ = ("code",)

    def __init__(
        self,
        code=None,
        *,
        path=None,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        enable_cooperative_groups=False,
        name_expressions=None,
        jitify=False,
    ):
        self.code = code

    def get_function(self, name):
        """The kernel of that name."""
        return RawKernel(self.code, name)


class RawKernel:
    """A kernel, which is launched on the current stream."""

    __slots__ = ("_word", "name")

    def __init__(
        self,
        code,
        name,
        options=(),
        backend="nvrtc",
        translate_cucomplex=False,
        *,
        enable_cooperative_groups=False,
        jitify=False,
    ):
        word = re.fullmatch(r"gather_(\d+)", name)
        if word is None or "gather_##BYTES" not in code:
            raise ValueError(f"the stand-in has no kernel {name!r}")
        self.name = name
        self._word = int(word[1])

    def __call__(self, grid, block, args, *, shared_mem=0):
        _machine.check()
        assert all(isinstance(each, tuple) for each in (grid, block, args))
        address, rows, target, count, width, lanes = args
        assert [type(each) for each in (address, count, width, lanes)] == [
            np.uint64,
            np.int64,
            np.int64,
            np.int32,
        ]
        assert 1 <= lanes <= 32, lanes
        assert not lanes & (lanes - 1), lanes
        nbytes = int(width) * self._word
        assert not int(address) % self._word, "not aligned"
        assert not target.data.ptr % self._word, "not aligned"
        assert rows.dtype == np.int64
        assert len(rows) == count
        assert target.nbytes == count * nbytes
        into = target._a.reshape(-1).view(np.uint8).reshape(int(count), nbytes)

        def run():
            numbers = rows._a
            start, size = int(address), (int(numbers.max()) + 1) * nbytes
            if numbers.min() < 0 or not _host.visible(start, size):
                _machine.spoil(_machine.ILLEGAL_ADDRESS)
                raise _machine.CUDARuntimeError(_machine.ILLEGAL_ADDRESS)
            seen = np.frombuffer((ctypes.c_ubyte * size).from_address(start), np.uint8)
            np.take(seen.reshape(-1, nbytes), numbers, axis=0, out=into)
            return True

        runtime.statistics["gathered"] += into.nbytes
        queue = stream.current_queue()
        _queues.push(queue, run)
        if not _machine.lazy():
            _queues.finish(queue)
