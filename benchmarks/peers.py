"""Two ranks of another library, each as its documentation recommends: torch.distributed, MPI.

Run as ``python -m benchmarks.peers gloo`` or, by ``mpiexec``, ``… mpi``: rank 0 reads commands from its
standard input, one JSON line each, and answers each with seconds, the median of so many rounds.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


def missing(kind: str) -> str | None:
    """Why this peer cannot be measured here; None if it can."""
    needed = {"gloo": "torch", "mpi": "mpi4py"}[kind]
    if importlib.util.find_spec(needed) is None:
        return f"{needed} is not installed"
    if kind == "mpi" and _mpiexec() is None:
        return "there is no mpiexec"
    return None


def _mpiexec() -> str | None:
    beside = Path(sys.executable).with_name("mpiexec")
    return str(beside) if beside.exists() else shutil.which("mpiexec")


class Peer:
    """Processes that talk among themselves; this process tells rank 0 what to time."""

    def __init__(self, kind: str, count: int = 2, options: Sequence[str] = ()) -> None:
        """*count* of them, which are 2 of gloo; mpiexec gets *options*."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "benchmarks.peers", kind]
        self._others = []
        if kind == "mpi":
            command = [str(_mpiexec()), *options, "-n", str(count), *command]
        else:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = str(probe.getsockname()[1])
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
            self._others = [self._start(command, {**environment, "RANK": "1"})]
            environment["RANK"] = "0"
        self._root = self._start(command, environment)

    @staticmethod
    def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, what: str, **options: Any) -> float:
        """Seconds a round of *what*."""
        self._root.stdin.write(json.dumps({"what": what, **options}) + "\n")
        self._root.stdin.flush()
        return float(self._root.stdout.readline())

    def close(self) -> None:
        self._root.stdin.write('{"what": "leave"}\n')
        self._root.stdin.close()
        for process in (self._root, *self._others):
            process.wait(20)
            process.stdout.close()
            if not process.stdin.closed:
                process.stdin.close()


# ── what the peers run ───────────────────────────────────────────────────────────────────────────


class Mpi:
    def __init__(self) -> None:
        from mpi4py import MPI

        self.mpi, self.world = MPI, MPI.COMM_WORLD
        self.rank = self.world.rank

    def share(self, command: Any) -> Any:
        if self.rank == 0:
            for rank in range(1, self.world.size):
                self.world.send(command, rank)
            return command
        while not self.world.iprobe(source=0):  # MPI waits by spinning, which would disturb the others
            time.sleep(0.001)
        return self.world.recv(source=0)

    def barrier(self) -> None:
        self.world.Barrier()

    def leave(self) -> None:
        """MPI takes its leave when the process ends."""

    def caller(self) -> Any:
        """A call of both ranks, by pickled bcast and gather: each sums its eight numbers."""
        rows = np.ones(8)

        def call() -> float:
            self.world.bcast({"function": 1} if self.rank == 0 else None)
            return sum(self.world.gather(float(rows.sum())) or ())

        return call

    def all_reducer(self, count: int) -> Any:
        array = np.zeros(count, np.float32)
        return lambda: self.world.Allreduce(self.mpi.IN_PLACE, array)

    def scatterer(self, count: int) -> Any:
        """A part of an array to each rank, which looks at its first element: the root has their sum."""
        whole, part = self.arrays(count)
        total = np.empty(1, np.float32)

        def scatter() -> float:
            self.world.Scatter(whole, part)
            self.world.Reduce(part[:1].copy(), total)
            return float(total[0])

        return scatter

    def echo(self, count: int) -> Any:
        """An array from the root to rank 1, and back."""
        array, other = np.ones(count, np.float32), 1 - self.rank

        def there_and_back() -> None:
            (self.world.Send if self.rank == 0 else self.world.Recv)(array, other)
            (self.world.Recv if self.rank == 0 else self.world.Send)(array, other)

        return there_and_back

    def gatherer(self, count: int) -> Any:
        """The parts of an array, to the root."""
        whole, part = self.arrays(count)
        return lambda: self.world.Gather(part, whole)

    def broadcaster(self, count: int) -> Any:
        """An array to all ranks, which look at its first element: the root has their sum."""
        whole, total = np.ones(count, np.float32), np.empty(1, np.float32)

        def broadcast() -> float:
            self.world.Bcast(whole)
            self.world.Reduce(whole[:1].copy(), total)
            return float(total[0])

        return broadcast

    def reducer(self, count: int) -> Any:
        """The sum of all ranks' arrays, to the root."""
        array = np.ones(count, np.float32)
        total = np.empty_like(array) if self.rank == 0 else None
        return lambda: self.world.Reduce(array, total)

    def arrays(self, count: int) -> Any:
        """An array of the root's, and the part of a rank."""
        whole = np.ones(count, np.float32) if self.rank == 0 else None
        return whole, np.ones(count // self.world.size, np.float32)


class Gloo:
    def __init__(self) -> None:
        import torch
        import torch.distributed

        torch.set_num_threads(1)
        self.torch, self.dist = torch, torch.distributed
        self.dist.init_process_group("gloo")
        self.rank = self.dist.get_rank()

    def share(self, command: Any) -> Any:
        box = [command]
        self.dist.broadcast_object_list(box)
        return box[0]

    def barrier(self) -> None:
        self.dist.barrier()

    def leave(self) -> None:
        self.dist.destroy_process_group()

    def all_reducer(self, count: int) -> Any:
        tensor = self.torch.zeros(count)
        return lambda: self.dist.all_reduce(tensor)

    def trainer(self, count: int, features: int, hidden: int, rows: int) -> Any:
        """A step on half of *rows* shuffled rows a rank, out of *count*, which every rank holds.

        The model has one hidden layer, or with *hidden* 0 none, and 10 classes.
        """
        torch, nn = self.torch, self.torch.nn
        torch.manual_seed(0)
        layers = [nn.Linear(features, hidden), nn.ReLU()] if hidden else []
        net = nn.Sequential(*layers, nn.Linear(hidden or features, 10))
        model = nn.parallel.DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        loss_of = nn.CrossEntropyLoss()
        images, labels = torch.rand(count, features), torch.randint(10, (count,))

        def step() -> None:
            chosen = torch.randperm(count)[: rows // 2]
            optimizer.zero_grad()
            loss_of(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()

        return step


def serve(peer: Any) -> None:
    prepared: dict[str, Any] = {}
    while True:
        line = sys.stdin.readline() if peer.rank == 0 else ""
        command = peer.share(json.loads(line) if line else {"what": "leave"})
        what, rounds = command.pop("what"), command.pop("rounds", 1)
        if what == "leave":
            peer.leave()
            return
        key = f"{what} {command}"
        if key not in prepared:
            prepared.clear()
            prepared[key] = getattr(peer, what)(**command)
        turn = prepared[key]
        turn()
        seconds = []
        for _ in range(rounds):
            peer.barrier()
            start = time.perf_counter()
            turn()
            seconds.append(time.perf_counter() - start)
        if peer.rank == 0:
            print(float(np.median(seconds)), flush=True)


if __name__ == "__main__":
    serve({"mpi": Mpi, "gloo": Gloo}[sys.argv[1]]())
