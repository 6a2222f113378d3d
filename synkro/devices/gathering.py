"""Rows of host memory, picked by their numbers, that a GPU fetches by itself.

The GPU sees pinned memory at the addresses of the host.  A kernel reads the rows from there, so that
the host touches none of them.  It keeps few multiprocessors busy, since the bus is the bottleneck: with
four of them it reaches 0.9 of a bare copy, and the kernels beside it have the others.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import cupy
import numpy as np

from ..values.arrays import Array

BLOCKS, THREADS = 4, 512

_WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int", 8: "uint2", 16: "uint4"}
"""The C types of the words that rows consist of, by their bytes."""

_SOURCE = r"""
#define AT_ONCE 8

/* Word w of row r of `to` is word w of row rows[r] of `from`; rows are `width` words long.  So many
   `lanes`, a power of two, fetch a row together.  Each thread has AT_ONCE loads under way, without a
   branch between them: what is beyond the end is loaded, too, from the last row, and not stored. */
#define GATHER(BYTES, WORD)                                                                         \
extern "C" __global__ void gather_##BYTES(const WORD* from, const long long* rows, WORD* to,        \
                                          long long count, long long width, int lanes) {            \
    const long long thread = blockIdx.x * (long long)blockDim.x + threadIdx.x;                      \
    const long long teams = gridDim.x * (long long)blockDim.x / lanes;                              \
    const long long lane = thread % lanes, steps = (width + lanes - 1) / lanes;                     \
    const long long last = count * steps - 1;                                                       \
    for (long long first = thread / lanes; first <= last; first += AT_ONCE * teams) {               \
        long long row[AT_ONCE], column[AT_ONCE];                                                    \
        WORD word[AT_ONCE];                                                                         \
        _Pragma("unroll")                                                                           \
        for (int k = 0; k < AT_ONCE; ++k) {                                                         \
            const long long item = min(first + k * teams, last);                                    \
            row[k] = last >> 32 ? item / steps : (unsigned)item / (unsigned)steps;                  \
            column[k] = (item - row[k] * steps) * lanes + lane;                                     \
        }                                                                                           \
        _Pragma("unroll")                                                                           \
        for (int k = 0; k < AT_ONCE; ++k)                                                           \
            word[k] = from[rows[row[k]] * width + min(column[k], width - 1)];                       \
        _Pragma("unroll")                                                                           \
        for (int k = 0; k < AT_ONCE; ++k)                                                           \
            if (first + k * teams <= last && column[k] < width)                                     \
                to[row[k] * width + column[k]] = word[k];                                           \
    }                                                                                               \
}
"""


@cache
def _module() -> Any:
    """The kernels, compiled when the first is needed: on all the device's contexts of this process."""
    kernels = "".join(f"GATHER({nbytes}, {word})\n" for nbytes, word in _WORDS.items())
    return cupy.RawModule(code=_SOURCE + kernels)


@cache
def _kernel(word: int) -> Any:
    return _module().get_function(f"gather_{word}")


def gather(address: int, rows: Array, target: Any) -> None:
    """Queue, on the current stream, the copy of *rows* of the array at *address* to *target*.

    *address* is one of pinned host memory, where rows like those of *target*, which is contiguous, lie
    one behind the other; *rows* are their numbers, int64, on the GPU.
    """
    nbytes = target.nbytes // len(rows)
    word = math.gcd(address, target.data.ptr, nbytes, max(_WORDS))
    width = nbytes // word
    lanes = min(32, 1 << (width - 1).bit_length())
    numbers = np.int64(len(rows)), np.int64(width), np.int32(lanes)
    _kernel(word)((BLOCKS,), (THREADS,), (np.uint64(address), rows, target, *numbers))
