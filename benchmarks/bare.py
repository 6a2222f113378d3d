"""Peers without a library: forked processes that do one thing.

They have to be started before anything else is, so that nothing is forked after threads have started.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np

_PR_SET_PDEATHSIG = 1
LINE = 8  # words


def start(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Fork a process that runs ``target(*args)`` and does not outlive this one."""
    process = multiprocessing.get_context("fork").Process(target=_run, args=(target, args), daemon=True)
    process.start()
    return process


def _run(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    target(*args)


def stop(processes: Iterable[BaseProcess]) -> None:
    for process in processes:
        process.kill()  # of another signal posix_ipc would tell, on stderr
        process.join()


class BareAllReduce:
    """Two forked processes and the memory that they share; each command is a number of rounds."""

    def __init__(self, largest: int) -> None:
        self.words = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
        self.shared = np.frombuffer(mmap.mmap(-1, 3 * largest), np.float32).reshape(3, -1)
        self.pipes = []
        self.processes = []
        for rank in range(2):
            ours, theirs = multiprocessing.Pipe()
            self.processes.append(start(self._serve, rank, theirs))
            theirs.close()
            self.pipes.append(ours)

    def seconds(self, count: int, mean: bool, rounds: int) -> float:
        """Seconds a round, the median."""
        for pipe in self.pipes:
            pipe.send((count, mean, rounds))
        return max(pipe.recv() for pipe in self.pipes)

    def close(self) -> None:
        stop(self.processes)
        for pipe in self.pipes:
            pipe.close()

    def _serve(self, rank, pipe) -> None:
        mine = into = np.empty(0, np.float32)
        while True:
            count, mean, rounds = pipe.recv()
            if len(mine) != count:
                mine, into = np.ones(count, np.float32), np.zeros(count, np.float32)
            pipe.send(float(np.median([self._round(rank, mine, into, mean) for _ in range(rounds)])))

    def _round(self, rank, mine, into, mean) -> float:
        count = len(mine)
        one, other, result = (row[:count] for row in self.shared)
        half = slice(0, count // 2) if rank == 0 else slice(count // 2, count)
        self._barrier(rank)
        start = time.perf_counter()
        (one, other)[rank][...] = mine
        self._barrier(rank)
        np.add(one[half], other[half], out=result[half])
        if mean:
            np.true_divide(result[half], 2, out=result[half])
        self._barrier(rank)
        into[...] = result
        self._barrier(rank)
        return time.perf_counter() - start

    def _barrier(self, rank) -> None:
        words, other = self.words, (1 - rank) * LINE
        words[rank * LINE] += 1
        reached = words[rank * LINE]
        while words[other] < reached:
            os.sched_yield()
