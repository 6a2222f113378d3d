"""How do 1, 2, 4 … GPUs work together: at agreeing on arrays, products, copies, training ResNet-50?

::

    python -m benchmarks.multi_gpu --out gpus.json     # all GPUs; on an H200 in under 4 minutes
    python -m benchmarks.multi_gpu --device cpu        # the same program, tiny, on CPU workers

*All-reduce* of a float32 variable, in a function: the algorithm bandwidth is bytes ÷ seconds, the bus
bandwidth that times 2 (n - 1) ÷ n, as nccl-tests has them (in its doc/PERFORMANCE.md).  Floor: the
links.  Peer: torch.distributed over NCCL (on CPUs gloo), one process a rank.

*Scaling* of matrix products, so many a rank (weak scaling; float32 and float16, since CuPy multiplies no
bfloat16), beside the same code in bare processes, one a rank; and of the maximum of rows in host memory,
the same rows for any number of ranks (strong scaling).  Floor: one bare cudaMemcpyAsync a rank of its
part, from pinned memory, which computes nothing (on CPUs numpy.copyto).  "unchanged" is a call whose
data was not written to since the last one.

*Training* by synchronous SGD of ResNet-50, synthetic images that lie on the device from the beginning.
With Synkro the network lives in the workers, its gradients are one variable, and a step is one call.
Peers: torch in one process without a framework, and DistributedDataParallel.  Losses, and how far each
parameter moved, are compared before anything is timed.  Where ranks share a GPU, which NCCL refuses,
DistributedDataParallel runs over gloo.

A layout of ranks that share a GPU is *path only*: it shows that the path works, and is no scaling.  What
is not measured is named with the reason; exit status 1 says that Synkro was not, or disagreed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import synkro
from synkro.controller.placement.placement import why_not_nccl
from synkro.devices.gpus import visible
from synkro.machine import readable_bytes

from .common import Samples, Side, environment
from .findings import (
    SECTIONS,
    SYNKRO,
    TOLERANCES,
    Findings,
    Layout,
    bandwidths,
    command_line,
    layouts,
    rounds_for,
    settings_of,
)
from .ranks import Ranks, RanksFailed, array_module, multiply, reason, settle, stuck

CHECKED = 4
"""Steps after which two ways to train are compared."""

TIMEOUT = 90.0
"""Seconds that one call may take."""

HOSTED, LINKED, LOOPBACK = "through host memory", "NCCL", "NCCL over loopback sockets"
"""The ways on which workers on GPUs reduce arrays."""


class WrongResult(Exception):
    """Synkro computed something else than it should have."""


class Round:
    """The sections for one layout; Synkro's workers are running.

    Attributes:
        alone: one process on the first device.
        bare: as many processes as there are workers, without Synkro.
        refused: why the bare processes do not reduce arrays, once they have failed.
        until: when the section should end.
    """

    def __init__(
        self, layout: Layout, settings: argparse.Namespace, findings: Findings, alone: Ranks
    ) -> None:
        self.layout, self.settings, self.findings, self.alone = layout, settings, findings, alone
        self.until, self.refused = 0.0, ""
        self.bare = Ranks(layout.devices, "nccl" if layout.kind == "cuda" else "gloo", TIMEOUT)

    def run(self, section: str, seconds: float) -> None:
        self.until = time.monotonic() + seconds
        try:
            {"all_reduce": self.all_reduce, "scaling": self.scaling, "resnet": self.resnet}[section]()
        except synkro.SynkroError as error:
            self.miss(section, "what was left", "all", reason(error))

    def miss(self, section: str, *what_side_why: str) -> None:
        self.findings.miss(section, self.layout, *what_side_why)

    def bare_side(self, name: str, what: str, **options: Any) -> Side:
        """What the bare ranks do; the slowest counts."""
        return Side(name, lambda: max(self.bare.ask(what, **options)), own_clock=True)

    def shares(self, items: Sequence[Any]) -> Iterator[tuple[Any, float]]:
        """Each item with the time until which it should end: what is left is divided evenly."""
        for index, item in enumerate(items):
            now = time.monotonic()
            yield item, now + (self.until - now) / (len(items) - index)

    def alternate(self, section: str, what: str, sides: Sequence[Side], until: float) -> Samples:
        """As ``common.paired``, while there is time; a side that fails is left out, with the reason."""
        live = list(sides)
        samples: Samples = {side.name: [] for side in sides}

        def attempt(side: Side, call: Callable[[], float]) -> None:
            try:
                samples[side.name].append(call())
            except (RanksFailed, WrongResult, synkro.SynkroError) as error:
                live.remove(side)
                del samples[side.name]
                self.miss(section, what, side.name, reason(error))

        for side in sides:  # what happens only once
            attempt(side, lambda side=side: side.call(*side.prepare()))
        for values in samples.values():
            values.clear()
        least, most = self.settings.runs
        for run in range(most):
            if not live or (run >= least and time.monotonic() > until):
                break
            begin = run % len(live)
            for side in (*live[begin:], *live[:begin]):
                attempt(side, side.turn)
        return samples

    # ── sections ─────────────────────────────────────────────────────────────────────────────────

    def all_reduce(self) -> None:
        peer = f"torch.distributed, {self.bare.backend}"
        for nbytes, until in self.shares(self.settings.sizes):
            what = f"all-reduce, {readable_bytes(nbytes)}"
            function = all_reducer(self.layout, nbytes // 4)
            rounds = 1
            with contextlib.suppress(synkro.SynkroError):  # will come again, and be named then
                function(1)
                rounds = rounds_for(self.settings.turn, max(function(1)), 100)
            sides = [Side(SYNKRO, lambda f=function, k=rounds: max(f(k)), own_clock=True)]
            if self.refused:
                self.miss("all_reduce", what, peer, self.refused)
            else:
                sides.append(self.bare_side(peer, "all_reduce", count=nbytes // 4, rounds=rounds))
            samples = self.alternate("all_reduce", what, sides, until)
            if peer not in samples and not self.refused:
                self.refused = self.findings.reason(peer)
            for place, unit in enumerate(("GB/s algbw", "GB/s busbw")[: self.layout.size]):
                speed = lambda s, n=nbytes, k=place: bandwidths(n, s, self.layout.size)[k]  # noqa: E731
                self.findings.speeds("all_reduce", self.layout, what, unit, samples, speed)

    def scaling(self) -> None:
        for dtype, until in self.shares([*self.settings.dtypes, "rows"]):
            if dtype == "rows":
                self.copies(self.settings.rows, until)
            else:
                self.products(self.settings.matrix, dtype, until)

    def products(self, size: int, dtype: str, until: float) -> None:
        what = f"{size}³ products, {dtype}"
        rounds = 1
        with contextlib.suppress(RanksFailed):  # will come again, and be named then
            once = [max(self.bare.ask("gemm", size=size, dtype=dtype, rounds=1)) for _ in range(2)]
            rounds = rounds_for(self.settings.turn, min(once), 500)
        task = partial(multiply, self.layout.kind, size, dtype, rounds)
        sides = [
            Side(SYNKRO, synkro.function(task, inputs=[], outputs=[])),
            self.bare_side("bare", "gemm", size=size, dtype=dtype, rounds=rounds),
        ]
        samples = self.alternate("scaling", what, sides, until)
        work = self.layout.size * rounds * 2 * size**3 / 1e12
        self.findings.speeds("scaling", self.layout, what, "TFLOP/s", samples, lambda s: work / s)

    def copies(self, nbytes: int, until: float) -> None:
        x = synkro.data(np.zeros((nbytes // 4096, 1024), np.float32))
        largest = synkro.function(lambda x: x.max(), outputs="max")
        newest = 0

        def write() -> tuple[()]:
            nonlocal newest
            newest += 1
            x[-1:] = newest
            return ()

        def call() -> None:
            if (found := float(largest(x))) != newest:
                raise WrongResult(f"the maximum is {newest}, a call found {found}")

        what = f"{readable_bytes(nbytes)} of rows"
        sides = [
            Side(SYNKRO, call, prepare=write),
            Side(f"{SYNKRO}, unchanged", call, warm=1),
            self.bare_side("bare copy", "copy", nbytes=nbytes // self.layout.size),
        ]
        samples = self.alternate("scaling", what, sides, until)
        self.findings.speeds("scaling", self.layout, what, "GB/s", samples, lambda s: nbytes / s / 1e9)

    def resnet(self) -> None:
        settings = self.settings
        job = {key: getattr(settings, key) for key in ("images", "size", "width", "classes", "bf16")}
        if self.layout.path_only:  # NCCL refuses, gloo takes tensors on GPUs, too
            self.bare.close()
            self.bare = Ranks(self.layout.devices, "gloo", TIMEOUT)
        what = f"{settings.images} × {settings.size}², width {settings.width}"
        peer = f"DDP, {self.bare.backend}"
        steps = settings.steps
        sides = [
            self.bare_side(peer, "train", job=job, spread=True, steps=steps),
            Side(  # seconds for as many images as all ranks have, so that speeds compare
                "bare torch",
                lambda: (
                    self.layout.size * self.alone.ask("train", job=job, spread=False, steps=steps)[0]
                ),
                own_clock=True,
            ),
        ]
        try:
            count = self.alone.ask("parameters", width=settings.width, classes=settings.classes)[0]
        except RanksFailed as error:
            for name in (SYNKRO, *(side.name for side in sides)):
                self.miss("resnet", what, name, reason(error))
            return
        check, train = trainer(job, count)
        if self.agrees(what, check, job, peer):
            sides = [
                Side(SYNKRO, lambda: seconds_a_step(train, steps, 1), own_clock=True),
                Side(
                    f"{SYNKRO}, {steps} steps a call",
                    lambda: seconds_a_step(train, 1, steps),
                    own_clock=True,
                ),
                *sides,
            ]
        samples = self.alternate("resnet", what, sides, self.until)
        images = settings.images * self.layout.size
        self.findings.speeds("resnet", self.layout, what, "images/s", samples, lambda s: images / s)

    def agrees(self, what: str, check: Callable[[], Any], job: dict[str, Any], peer: str) -> bool:
        """Whether Synkro may be timed: it disagrees with nobody who could be asked."""
        peers = {peer: partial(self.bare.ask, spread=True)}
        if self.layout.size == 1:
            peers["bare torch"] = partial(self.alone.ask, spread=False)
        try:
            ours = check()
        except synkro.SynkroError as error:
            self.miss("resnet", what, SYNKRO, reason(error))
            return False
        tolerance = TOLERANCES["bf16" if job["bf16"] else "float32"]
        for name, ask in peers.items():
            try:
                theirs = ask("check", job=job, steps=CHECKED)
            except RanksFailed as error:
                self.miss("resnet", f"{what}, comparison", name, reason(error))
                continue
            if not self.findings.compare(self.layout, name, ours, theirs, tolerance):
                self.miss("resnet", what, SYNKRO, f"its numbers and those of {name} disagree")
                return False
        return True


# ── what Synkro runs ─────────────────────────────────────────────────────────────────────────────


def all_reducer(layout: Layout, count: int) -> Callable[[int], list[float]]:
    """A function of *rounds*: seconds an all-reduce, of that many one after the other, on every rank."""
    variable = synkro.shared(np.zeros(count, np.float32))
    total = layout.size * (layout.size + 1) / 2

    def inside(rounds):
        xp = array_module(layout.kind)
        variable.value[...] = synkro.rank() + 1
        synkro.all_reduce(variable, op="sum")
        if not bool((variable.value == total).all()):
            raise WrongResult(f"the sum of 1 … {synkro.size()} is {total:g}, not what came out")
        variable.value[...] = 0
        settle(xp)
        synkro.barrier()
        start = time.perf_counter()
        for _ in range(rounds):
            synkro.all_reduce(variable, op="sum")
        settle(xp)
        return (time.perf_counter() - start) / rounds

    return synkro.function(inside, bcast_inputs=["rounds"], outputs=None)


def trainer(job: dict[str, Any], count: int) -> tuple[Callable[[], Any], Callable[[int], float]]:
    """Two functions: ``check()`` gives every rank's numbers, ``train(steps)`` takes steps.

    The network has *count* parameters; it and its images are made where they are first used.
    """
    gradients = synkro.shared(np.zeros(count, np.float32), name="gradients")

    def kept():
        from benchmarks.resnet import Job, on_this_worker

        def mean():
            synkro.all_reduce(gradients, op="mean")

        return on_this_worker(Job(**job), synkro.rank(), gradients.value, mean)

    def check():
        found = kept().check(CHECKED)
        return {key: np.asarray(values) for key, values in found.items()}

    def train(steps):
        loss = [kept().step() for _ in range(steps)][-1]
        return loss.item()  # waits for the device

    return (
        synkro.function(check, inputs=[], outputs={"losses": None, "moved": None}),
        synkro.function(train, bcast_inputs=["steps"], outputs="mean"),
    )


def seconds_a_step(train: Callable[[int], float], calls: int, steps: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        train(steps)
    return (time.perf_counter() - start) / (calls * steps)


# ── the program ──────────────────────────────────────────────────────────────────────────────────


def fork(layout: Layout) -> tuple[str, str]:
    """Start Synkro's workers on GPUs: the way on which they reduce arrays, and that in words."""
    with contextlib.redirect_stderr(io.StringIO()) as said:
        synkro.fork(devices=list(layout.devices), threads_per_worker=1, timeout=TIMEOUT)
    for line in said.getvalue().splitlines():
        if HOSTED in line:
            return HOSTED, f"{layout}: {line}"
    way = LINKED if nccl_serves(layout, {}) else LOOPBACK
    return way, f"{layout}: {way}"


def nccl_serves(layout: Layout, environment: dict[str, str]) -> bool:
    """Whether NCCL is to connect ranks on these GPUs, in such an environment."""
    found = visible()
    gpus = [found.gpus[int(device.removeprefix("cuda:"))] for device in layout.devices]
    return not why_not_nccl(gpus, found.nccl, environment)


def measure(settings: argparse.Namespace, gpus: int, findings: Findings, alone: Ranks) -> None:
    start = time.monotonic()
    todo = layouts(gpus if settings.device == "cuda" else 0, settings.ranks)
    weight_left = len(todo) * sum(SECTIONS[section] for section in settings.only)
    for layout in todo:
        print(f"\n{layout}", flush=True)
        with contextlib.ExitStack() as stack:
            try:
                stack.callback(synkro.close)
                if layout.kind == "cuda" and layout.size > 1:
                    findings.ways[str(layout)], text = fork(layout)
                    print(f"  {text}", flush=True)
                else:
                    devices = list(layout.devices)
                    synkro.fork(devices=devices, threads_per_worker=1, timeout=TIMEOUT, verbose=False)
            except synkro.SynkroError as error:
                for section in settings.only:
                    findings.miss(section, layout, "all of it", "all", f"no workers: {reason(error)}")
                continue
            turn = Round(layout, settings, findings, alone)
            stack.callback(lambda turn=turn: turn.bare.close())
            for section in settings.only:
                left = start + settings.seconds - time.monotonic()
                share = SECTIONS[section] / weight_left
                weight_left -= SECTIONS[section]
                if left < 0:
                    why = f"the budget of {settings.seconds:g} s was spent"
                    findings.miss(section, layout, "all of it", "all", why)
                else:
                    turn.run(section, left * share)


def main() -> int:
    parser = command_line(__doc__)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is ended
    started, findings = time.monotonic(), Findings()
    with contextlib.ExitStack() as stack:
        device = "cpu" if options.device == "cpu" else "cuda:0"
        alone = stack.enter_context(Ranks([device], "none", TIMEOUT))
        machine = alone.ask("describe")[0]
        if options.device == "cuda" and not machine["gpus"]:
            parser.error("no GPU: torch and CuPy, where they are installed, see none")
        settings = settings_of(options, options.device or ("cuda" if machine["gpus"] else "cpu"))
        if settings.device == "cpu" and options.device is None:
            alone = stack.enter_context(Ranks(["cpu"], "none", TIMEOUT))
        measure(settings, len(machine["gpus"]), findings, alone)
    findings.finish()
    surroundings = environment()
    surroundings["versions"] |= machine["versions"]
    record = {
        "question": "multi_gpu",
        "asks": " ".join(__doc__.partition("\n\n")[0].split()),
        "scale": "quick" if options.quick else "full",
        "environment": {**surroundings, "gpus": machine["gpus"]},
        "settings": {**vars(settings), "out": None},
        "seconds": round(time.monotonic() - started, 1),
        "rows": findings.rows,
        "checks": findings.checks,
        "not_measured": findings.missing,
        "ways": findings.ways,
        "not_ended": stuck,
    }
    if options.out:
        options.out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    findings.table()
    for text in stuck:
        print(text)
    return 0 if findings.sound else 1


if __name__ == "__main__":
    sys.exit(main())
