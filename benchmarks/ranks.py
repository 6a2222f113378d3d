"""Processes that do without Synkro what its workers do, one a GPU: CuPy or NumPy, torch.distributed.

``Ranks`` starts them, as torchrun does: a fresh interpreter a rank.  Each reads commands from its
standard input, one JSON line each, and answers with one.  A command goes to all ranks at once; what
takes too long, fails or dies ends them all, with the reason.  They end when their standard input does:
also when this process is killed, also in the middle of a collective.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import queue
import selectors
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


ENDING = 10.0
"""Seconds that a killed process may take to end: one that is stuck in a driver never does."""

stuck: list[str] = []
"""What there is to tell of processes that could not be ended."""


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and wait for its end, though not forever."""
    process.kill()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        what = f"process {process.pid} ({' '.join(process.args[1:3])})"
        stuck.append(f"{what} could not be ended: {ENDING:g} s after it was killed it is still there")


class RanksFailed(Exception):
    """The ranks did not answer as they should, and were ended; says why."""


class Ranks:
    """Processes that work together, one on each of *devices* (``cpu`` or ``cuda:0`` …).

    They start at the first command, and at the next one after a failure.

    Attributes:
        backend: of torch.distributed, which is set up where a command needs it.
    """

    def __init__(self, devices: Sequence[str], backend: str, timeout: float) -> None:
        self.backend = backend
        self._devices = devices
        self._timeout = timeout
        self._stack = contextlib.ExitStack()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._errors: list[Any] = []
        self._unread: list[bytes] = []

    def _start_all(self) -> None:
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        size = len(self._devices)
        for rank, device in enumerate(self._devices):
            setting = {"rank": rank, "size": size, "device": device, "backend": self.backend}
            self._start({**setting, "store": f"file://{folder}/store", "timeout": self._timeout})

    def _start(self, setting: dict[str, Any]) -> None:
        errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the others)
        self._stack.callback(errors.close)
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.ranks", json.dumps(setting)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
        )
        self._errors.append(errors)
        self._processes.append(process)
        self._unread.append(b"")

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, what: str, **options: Any) -> list[Any]:
        """What the ranks answer, in their order.  Raises: RanksFailed, and then they are gone."""
        try:
            if not self._processes:
                self._start_all()
            command = json.dumps({"what": what, **options}).encode() + b"\n"
            for process in self._processes:
                with contextlib.suppress(BrokenPipeError):  # its end is noticed while we listen
                    process.stdin.write(command)
            return self._answers()
        except BaseException:
            self.close(patience=0)
            raise

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + self._timeout
        answers: dict[int, Any] = {}
        with selectors.DefaultSelector() as selector:
            for rank, process in enumerate(self._processes):
                selector.register(process.stdout, selectors.EVENT_READ, rank)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    late = sorted(set(range(len(self._processes))) - answers.keys())
                    raise RanksFailed(f"ranks {late} did not answer within {self._timeout:g} s")
                for key, _ in ready:
                    if (line := self._line(key.data)) is not None:
                        answers[key.data] = self._opened(key.data, line)
        return [answers[rank] for rank in range(len(self._processes))]

    def _line(self, rank: int) -> bytes | None:
        """The next line of a rank, of which something has come; None while it is not whole."""
        piece = os.read(self._processes[rank].stdout.fileno(), 1 << 16)
        if not piece:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._processes[rank].wait(5)
            status = self._processes[rank].returncode
            raise RanksFailed(f"rank {rank} ended with status {status}: {self._last_words(rank)}")
        whole, newline, rest = (self._unread[rank] + piece).partition(b"\n")
        self._unread[rank] = rest if newline else whole
        return whole if newline else None

    def _opened(self, rank: int, line: bytes) -> Any:
        answer = json.loads(line)
        if "error" in answer:
            raise RanksFailed(f"rank {rank}: {answer['error']}")
        return answer["value"]

    def _last_words(self, rank: int) -> str:
        self._errors[rank].seek(0)
        lines = self._errors[rank].read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def close(self, patience: float = 10.0) -> None:
        for process in self._processes:
            process.stdin.close()
        until = time.monotonic() + patience
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
        for process in self._processes:
            end(process)
            process.stdout.close()
        self._processes, self._errors, self._unread = [], [], []
        self._stack.close()


# ── what workers of Synkro do, too ───────────────────────────────────────────────────────────────


def array_module(device: str) -> Any:
    """CuPy for ``cuda`` and ``cuda:1``, NumPy for ``cpu``."""
    return importlib.import_module("cupy" if device.startswith("cuda") else "numpy")


def settle(xp: Any) -> None:
    """Wait for what the current GPU still computes."""
    if xp.__name__ == "cupy":
        xp.cuda.Device().synchronize()


@functools.lru_cache(maxsize=1)
def operands(device: str, size: int, dtype: str) -> tuple[Any, Any, Any]:
    """Two factors and room for their product, made once a process: (size, size) each."""
    xp = array_module(device)
    drawn = np.random.default_rng(0).random((size, size), np.float32) - np.float32(0.5)
    return xp.asarray(drawn, dtype), xp.asarray(drawn.T, dtype), xp.empty((size, size), dtype)


def multiply(device: str, size: int, dtype: str, rounds: int) -> None:
    """So many products of two matrices, and done when it returns."""
    xp = array_module(device)
    left, right, out = operands(device, size, dtype)
    for _ in range(rounds):
        xp.dot(left, right, out=out)
    settle(xp)


# ── the process of one rank ──────────────────────────────────────────────────────────────────────


class Rank:
    """What one process does on command; methods are commands, named in ``COMMANDS``."""

    def __init__(
        self, rank: int, size: int, device: str, backend: str, store: str, timeout: float
    ) -> None:
        self.rank, self.size, self.device = rank, size, device
        self._group = {"backend": backend, "init_method": store, "timeout": timedelta(seconds=timeout)}

    @functools.cached_property
    def _xp(self) -> Any:
        """The array module, with the device of this rank as its current one."""
        xp = array_module(self.device)
        if self.device != "cpu":
            xp.cuda.Device(int(self.device.partition(":")[2])).use()
        return xp

    def describe(self) -> dict[str, Any]:
        """The GPUs of this machine, the versions of what computes on them, and what fails and why."""
        gpus: list[str] = []
        versions: dict[str, str] = {}
        broken: dict[str, str] = {}
        try:
            import torch

            versions["torch"] = torch.__version__
            if torch.cuda.is_available():
                gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
                versions["cuda of torch"] = str(torch.version.cuda)
                versions["nccl of torch"] = str(torch.cuda.nccl.version())
                versions["cudnn of torch"] = str(torch.backends.cudnn.version())
        except Exception as error:  # a library that it lacks may be any error
            broken["torch"] = reason(error)
        try:
            cupy = array_module("cuda")
            versions["cupy"] = cupy.__version__
            count = cupy.cuda.runtime.getDeviceCount()
            properties = map(cupy.cuda.runtime.getDeviceProperties, range(count))
            gpus = gpus or [entry["name"].decode() for entry in properties]
            versions["cuda driver"] = str(cupy.cuda.runtime.driverGetVersion())
            nccl = importlib.import_module("cupy.cuda.nccl")
            if getattr(nccl, "available", True):
                versions["nccl of cupy"] = str(nccl.get_version())
        except Exception as error:  # without a driver, too
            broken["cupy"] = reason(error)
        return {"gpus": gpus, "versions": versions, "broken": broken}

    def gemm(self, size: int, dtype: str, rounds: int) -> float:
        """Seconds for so many products."""
        xp = self._xp
        operands(self.device, size, dtype)
        settle(xp)
        start = time.perf_counter()
        multiply(self.device, size, dtype, rounds)
        return time.perf_counter() - start

    def copy(self, nbytes: int) -> float:
        """Seconds to copy so much from pinned host memory (on CPUs: from array to array)."""
        if self.device == "cpu":
            source, target = self._buffers(nbytes)
            start = time.perf_counter()
            np.copyto(target, source)
            return time.perf_counter() - start
        runtime = self._xp.cuda.runtime
        source, target = self._buffers(nbytes)
        runtime.deviceSynchronize()
        start = time.perf_counter()
        runtime.memcpyAsync(target.data.ptr, source.ptr, nbytes, runtime.memcpyHostToDevice, 0)
        runtime.deviceSynchronize()
        return time.perf_counter() - start

    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one Rank a process)
    def _buffers(self, nbytes: int) -> tuple[Any, Any]:
        target = self._xp.zeros(nbytes, np.uint8)
        if self.device == "cpu":
            return np.ones(nbytes, np.uint8), target
        return self._xp.cuda.alloc_pinned_memory(nbytes), target

    def all_reduce(self, count: int, rounds: int) -> float:
        """Seconds an all-reduce of *count* float32, of so many one after the other."""
        torch, dist = self._joined()
        tensor = torch.zeros(count, device=self.device)
        dist.all_reduce(tensor)
        self._settle(torch)
        dist.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            dist.all_reduce(tensor)
        self._settle(torch)
        return (time.perf_counter() - start) / rounds

    def parameters(self, width: int, classes: int) -> int:
        from .resnet import build, parameter_count

        return parameter_count(build(width, classes))

    def check(self, job: dict[str, Any], spread: bool, steps: int) -> dict[str, list[float]]:
        return self._trainer(spread, **job).check(steps)

    def train(self, job: dict[str, Any], spread: bool, steps: int) -> float:
        """Seconds a step."""
        return self._trainer(spread, **job).seconds(steps)

    @functools.lru_cache(maxsize=1)  # noqa: B019 (there is one Rank a process)
    def _trainer(self, spread: bool, **job: Any) -> Any:
        import torch

        from .resnet import Job, Plain

        if spread:
            self._joined()
        return Plain(Job(**job), self.rank, torch.device(self.device), spread)

    def _settle(self, torch: Any) -> None:
        if self.device != "cpu":
            torch.cuda.synchronize()

    @functools.cache  # noqa: B019 (there is one Rank a process)
    def _joined(self) -> tuple[Any, Any]:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        options = dict(self._group)
        if self.device != "cpu":
            torch.cuda.set_device(self.device)
            if options["backend"] == "nccl":
                options["device_id"] = torch.device(self.device)
        dist.init_process_group(rank=self.rank, world_size=self.size, **options)
        return torch, dist


COMMANDS = ("describe", "gemm", "copy", "all_reduce", "parameters", "check", "train")


def serve(setting: dict[str, Any]) -> None:
    answers = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is no answer
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            lines.put(line)
        # no farewell: torn-down collectives may wait for ranks that are gone
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    rank = Rank(**setting)
    while True:
        command = json.loads(lines.get())
        what = command.pop("what")
        try:
            if what not in COMMANDS:
                raise ValueError(f"no such command: {what}")
            answer = {"value": getattr(rank, what)(**command)}
        except Exception as error:
            answer = {"error": reason(error)}
        answers.write(json.dumps(answer).encode() + b"\n")


def reason(error: BaseException) -> str:
    """An error in one line: its type, and the lines of its text that say most."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " … ".join(lines if len(lines) < 4 else [lines[0], *lines[-2:]])
    return text if isinstance(error, RanksFailed) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    serve(json.loads(sys.argv[1]))
