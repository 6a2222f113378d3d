"""What do calls, data, outputs and collectives cost over two hosts?

The hosts are made of namespaces of this machine (``tests/support/hosts.py``, which needs root): a
network without a cable, whose bytes are carried by the cores that also compute.  So ratios count, and
no figure says what a real network does.  Every side runs its main program on the first host.  All
processes are in one control group, as in a container: five of Synkro's take turns on the cores.

Floors.  An empty call is two messages of MPI's, there and back, and six hand-overs through shared
memory: main process, gateway; leader, worker; and back.  A flat bcast and gather are the two messages.
Data of which half goes to the other host: half of the bytes once through TCP (2 copies each side), and
once more where the main process wrote them.  A reduced output: all of the other host's part through TCP,
one pass over both.  An all-reduce of 2 x 2 ranks: a pass over the ranks of each host, and all bytes once
each way through TCP; flat, each byte passes the network three times.

Peers: mpi4py over MPICH, flat, whose ranks spin; Ray (an actor on each host); Dask (an actor on each).
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import synkro

from .common import Report, Samples, Side, main, paired
from .pools import WIDTH, DaskHolder
from .simulated import address, elsewhere, flat, on_first_host, session

_DASK_PORT = 8786
_RAY_PORT = 6379


# ── calls ────────────────────────────────────────────────────────────────────────────────────────


@contextlib.contextmanager
def ray_call() -> Iterator[Callable[[], float]]:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    import ray

    one = ["--num-cpus=1", "--disable-usage-stats"]
    start = [str(Path(sys.executable).with_name("ray")), "start", *one]
    head_at = f"{address(0)}:{_RAY_PORT}"
    head = [
        "--head",
        f"--node-ip-address={address(0)}",
        f"--port={_RAY_PORT}",
        "--include-dashboard=false",
    ]
    subprocess.run([*start, *head], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    token = [f"{name}={os.environ[name]}" for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN")]
    other = f"mkdir -p /tmp/ray; mount -t tmpfs none /tmp/ray; {' '.join(token)} "
    other += shlex.join([*start, f"--address={head_at}", f"--node-ip-address={address(1)}", "--block"])
    node = elsewhere("sh", "-c", other)
    try:
        ray.init(head_at, log_to_driver=False, logging_level="ERROR")
        deadline = time.monotonic() + 60
        while len([each for each in ray.nodes() if each["Alive"]]) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)

        @ray.remote(num_cpus=1)
        class Holder:
            def __init__(self) -> None:
                self.x = np.ones(WIDTH)

            def total(self) -> float:
                return float(self.x.sum())

        holders = [Holder.remote() for _ in range(2)]
        yield lambda: sum(ray.get([holder.total.remote() for holder in holders]))
    finally:
        ray.shutdown()
        node.terminate()
        stop = [str(Path(sys.executable).with_name("ray")), "stop", "--force"]
        subprocess.run(stop, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        node.wait()


@contextlib.contextmanager
def dask_call() -> Iterator[Callable[[], float]]:
    import dask.distributed as dd

    scheduler_at = f"tcp://{address(0)}:{_DASK_PORT}"
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", scheduler_at]
    options = ["--nthreads=1", "--no-dashboard", "--no-nanny", "--local-directory"]
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        place = ["--host", address(0), "--port", str(_DASK_PORT), "--no-dashboard"]
        for process in (
            subprocess.Popen([*scheduler, *place], **quiet),
            subprocess.Popen([*worker, "--host", address(0), *options, folder], **quiet),
            elsewhere(*worker, "--host", address(1), *options, folder),
        ):
            stack.callback(process.wait)
            stack.callback(process.terminate)
        client = stack.enter_context(dd.Client(scheduler_at, timeout=60))
        client.wait_for_workers(2, timeout=60)
        places = client.scheduler_info()["workers"]
        made = [client.submit(DaskHolder, actor=True, pure=False, workers=[place]) for place in places]
        holders = [future.result() for future in made]
        yield lambda: sum([future.result() for future in [holder.total() for holder in holders]])


PEERS: dict[str, tuple[str, Callable[[], Any], float]] = {
    "Ray": ("ray", ray_call, 8),
    "Dask": ("distributed", dask_call, 15),
}
"""What has to be installed, what makes a call, and how much slower it should be."""


def calls(report: Report, runs: int, count: int, named: list[str]) -> None:
    with contextlib.ExitStack() as stack:
        workers = stack.enter_context(session([1, 1]))
        peer = stack.enter_context(flat([1, 1]))
        nothing = workers.function(lambda: None, outputs=[])
        total = workers.function(lambda x: x.sum(), outputs="sum")
        data = workers.data(np.ones(2 * WIDTH))
        sides = [
            Side("Synkro, empty", nothing, count, warm=20),
            Side("Synkro, a reduced number", lambda: total(data), count, warm=20),
            Side("mpi4py, spinning", lambda: peer.seconds("caller", rounds=count), own_clock=True),
        ]
        for name in named:
            module, make, _ = PEERS[name]
            if importlib.util.find_spec(module) is None:
                report.absent(name, f"{module} is not installed")
                continue
            sides.append(Side(name, stack.enter_context(make()), max(2, count // 10), warm=3))
        samples = paired(sides, runs)
        report.table("a call over two hosts, a worker on each", samples)
        ours = samples["Synkro, empty"]
        report.ratio("empty call ÷ mpi4py", ours, samples["mpi4py, spinning"], at_most=2)
        for name in set(PEERS) & set(samples):
            least = PEERS[name][2]
            report.ratio(f"{name} ÷ a reduced number", samples[name],
                         samples["Synkro, a reduced number"], at_least=least)  # fmt: skip
    with session([1, 1]) as workers:
        nothing = workers.function(lambda: None, outputs=[])
        quiet = paired([Side("empty, after 100 ms", nothing, 10, idle=0.1)], runs)
        report.table("a call after a pause", quiet)
        report.figure(
            "empty call after 100 ms", np.median(quiet["empty, after 100 ms"]), "s", at_most=2e-3
        )
        _idle(report, max(1.0, runs / 2))


def _idle(report: Report, seconds: float) -> None:
    """What the processes of a session take that does nothing."""
    before = _used()
    time.sleep(seconds)
    for name, now in _used().items():
        share = (now - before[name]) / 1e9 / seconds * 100
        report.figure(f"idle: {name}, of a core", share, "%", at_most=3)


def _used() -> dict[str, int]:
    """Nanoseconds that the gateway and the leader have computed."""
    used: dict[str, int] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"synkro.hosts.process" in (process / "cmdline").read_bytes():
                _, found, rest = (process / "environ").read_bytes().partition(b"PMI_RANK=")
                name = "gateway" if rest.startswith(b"0") else "leader"
                seconds = int((process / "schedstat").read_text().split()[0])
                if found:  # else it is mpiexec, or what cleans up after it, which sleeps
                    used[name] = max(seconds, used.get(name, 0))
    return used


# ── data and outputs ─────────────────────────────────────────────────────────────────────────────


def data(report: Report, runs: int, megabytes: int) -> None:
    count = megabytes << 18  # of float32
    array = np.ones((count // 1024, 1024), np.float32)
    with session([1, 1]) as workers, flat([1, 1]) as peer:
        look = workers.function(lambda x: x[0, 0], outputs="sum")
        kept, wide = workers.data(array), workers.data(array)

        def written() -> tuple[Any]:
            kept[0] = 1
            return (kept,)

        def scattered() -> float:
            return peer.seconds("scatterer", count=count)

        sides = [
            Side("first", look, prepare=lambda: (workers.data(array),)),
            Side("unchanged", lambda: look(wide), 3, warm=1),
            Side("rewritten", look, prepare=written),
            Side("Scatter, each time", scattered, own_clock=True),
        ]
        samples = paired(sides, runs)
        report.table(f"{megabytes} MB of Data, half of it for the other host", samples)
        for name, most in (("first", 1.5), ("unchanged", 1 / 15), ("rewritten", 1.1)):
            report.ratio(f"{name} ÷ Scatter", samples[name], samples["Scatter, each time"], at_most=most)
        whole = workers.function(lambda x: x[0, 0], bcast_inputs=["x"], outputs="sum")
        sides = [
            Side("first", whole, prepare=lambda: (workers.data(array),)),
            Side(
                "Bcast, each time",
                lambda: peer.seconds("broadcaster", count=count),
                own_clock=True,
            ),
        ]
        samples = paired(sides, runs)
        report.table(f"{megabytes} MB broadcast", samples)
        report.ratio(
            "broadcast, first ÷ Bcast", samples["first"], samples["Bcast, each time"], at_most=2
        )


def outputs(report: Report, runs: int, megabytes: int) -> None:
    count = megabytes << 18
    with session([1, 1]) as workers, flat([1, 1]) as peer:
        w = workers.shared(np.ones(count, np.float32))
        half = workers.shared(np.ones(count // 2, np.float32))
        for mode, function, name, theirs, most in (
            ("sum", lambda: w.value, "Reduce", "reducer", 0.6),
            ("gather", lambda: half.value, "Gather", "gatherer", 1.3),
        ):
            f = workers.function(function, outputs=mode)

            def timed(theirs: str = theirs) -> float:
                return peer.seconds(theirs, count=count)

            samples = paired([Side("Synkro", f, 2), Side(name, timed, own_clock=True)], runs)
            report.table(f"{megabytes} MB of output, {mode}", samples)
            report.ratio(f"{mode} ÷ {name}", samples["Synkro"], samples[name], at_most=most)


def all_reduce(report: Report, runs: int, megabytes: int, ranks: int) -> None:
    count = megabytes << 18
    with session([ranks, ranks]) as workers, flat([ranks, ranks]) as peer:
        w = workers.shared(np.ones(count, np.float32))

        def reduced(times: int) -> float:
            array = w.value * 1
            synkro.all_reduce(array)
            seconds = []
            for _ in range(times):
                synkro.barrier()
                start = time.perf_counter()
                synkro.all_reduce(array)
                seconds.append(time.perf_counter() - start)
            return float(np.median(seconds))

        f = workers.function(reduced, outputs="max", bcast_inputs=["times"])
        sides = [
            Side("Synkro", lambda: f(3), own_clock=True),
            Side("flat", lambda: peer.seconds("all_reducer", count=count, rounds=3), own_clock=True),
        ]
        samples = paired(sides, runs)
    report.table(f"all-reduce of {megabytes} MB in a function, 2 hosts of {ranks} ranks", samples)
    report.ratio("all-reduce ÷ flat Allreduce", samples["Synkro"], samples["flat"], at_most=0.35)


def start(report: Report, runs: int) -> None:
    def forked() -> float:
        begin = time.perf_counter()
        with session([1, 1]):
            return time.perf_counter() - begin

    samples: Samples = paired([Side("fork of two hosts", forked, own_clock=True)], max(1, runs // 2))
    report.table("start", samples)
    report.figure("fork of two hosts", np.median(samples["fork of two hosts"]), "s", at_most=1.2)


def ask(report: Report, runs: int, count: int, megabytes: int, ranks: int, named: list[str]) -> None:
    warnings.simplefilter("ignore")
    calls(report, runs, count, named)
    data(report, runs, megabytes)
    outputs(report, runs, megabytes)
    all_reduce(report, runs, megabytes, ranks)
    start(report, runs)


if __name__ == "__main__":
    on_first_host("benchmarks.hosts")
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 10, "count": 100, "megabytes": 64, "ranks": 2, "named": list(PEERS)},
        quick={"runs": 4, "count": 50},
        smoke={"runs": 1, "count": 3, "megabytes": 1, "ranks": 1, "named": []},
    )
