"""ResNet-50 on synthetic images, trained by plain torch, by DistributedDataParallel and by Synkro.

The network is that of He et al., "Deep Residual Learning for Image Recognition" (CVPR 2016), with the
stride in the 3 × 3 convolution, as torchvision has it and the published figures for "ResNet-50" mean it.
Needs torch; only the processes that train import this.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu

PARAMETERS = 25_557_032
"""Of ResNet-50 for 1000 classes; torchvision states the same number."""

STAGES = ((3, 1), (4, 2), (6, 2), (3, 2))
"""Blocks and stride of the four stages."""

RATE, MOMENTUM = 0.01, 0.9


# ── the network ──────────────────────────────────────────────────────────────────────────────────


def convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution that keeps the borders, and its normalization."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut; 4 *width* channels come out."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.first = convolution(inputs, width, 1)
        self.second = convolution(width, width, 3, stride)
        self.third = convolution(width, 4 * width, 1)
        same = stride == 1 and inputs == 4 * width
        self.shortcut = nn.Identity() if same else convolution(inputs, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.third(relu(self.second(relu(self.first(x)))))
        return relu(inner + self.shortcut(x))


def build(width: int = 64, classes: int = 1000) -> nn.Sequential:
    """The network, initialized from torch's global generator; *width* 64 makes it ResNet-50.

    Input: (images, 3, height, width) float32; output: (images, classes).  Blocks begin as their
    shortcuts (the last scale is 0, as in Goyal et al., "Accurate, Large Minibatch SGD", 2017): else
    rounding grows by orders of magnitude a step, and two ways to train cannot be compared after a few.
    """
    layers = [convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, (blocks, stride) in enumerate(STAGES):
        inner = width << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, inner, 1 if block else stride))
            channels = 4 * inner
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, Bottleneck):
            nn.init.zeros_(module.third[1].weight)
    return model


def parameter_count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# ── training it ──────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Job:
    """What every rank trains, whoever brings the ranks together.

    Attributes:
        images: a rank and step; the same ones in every step, on the device from the beginning.
        size: height and width of an image.
        bf16: autocast to bfloat16; else float32, where torch lets cuDNN use TF32.
    """

    images: int
    size: int
    width: int
    classes: int
    bf16: bool


class Trainer(ABC):
    """The network and the images of one rank, and steps of SGD with momentum.

    Weights come from one seed on all ranks, images from one seed a rank: whoever trains rank 1 of 2
    meets the same numbers.
    """

    def __init__(self, job: Job, rank: int, device: torch.device) -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)
            torch.backends.cudnn.benchmark = True  # shapes never change: let cuDNN choose by trial
        else:
            torch.set_num_threads(1)
        torch.manual_seed(0)
        model = build(job.width, job.classes)
        if (job.width, job.classes) == (64, 1000):
            assert parameter_count(model) == PARAMETERS
        self.job, self.device = job, device
        self.model = model.to(device, memory_format=torch.channels_last).train()
        drawn = torch.Generator().manual_seed(1000 + rank)
        images = torch.randn(job.images, 3, job.size, job.size, generator=drawn)
        self.images = images.to(device, memory_format=torch.channels_last)
        self.labels = torch.randint(job.classes, (job.images,), generator=drawn).to(device)

    @abstractmethod
    def step(self) -> Tensor:
        """One step on all ranks; returns this rank's loss."""

    def forward(self, model: nn.Module) -> Tensor:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.job.bf16):
            return cross_entropy(model(self.images), self.labels)

    def check(self, steps: int) -> dict[str, list[float]]:
        """The losses of *steps* steps, and how far (L2) they moved each parameter.

        Without TF32 and with deterministic kernels, so that two ways to train differ by rounding only.
        """
        before = [parameter.detach().clone() for parameter in self.model.parameters()]
        with exact():
            losses = [float(self.step()) for _ in range(steps)]
        moved = [float((new - old).norm()) for new, old in self._paired(before)]
        return {"losses": losses, "moved": moved}

    @torch.no_grad()
    def _paired(self, before: list[Tensor]) -> list[tuple[Tensor, Tensor]]:
        return list(zip((p.detach() for p in self.model.parameters()), before, strict=True))

    def seconds(self, steps: int) -> float:
        """Seconds a step; the device is waited for at the end, not between the steps."""
        self.settle()
        start = time.perf_counter()
        for _ in range(steps):
            self.step()
        self.settle()
        return (time.perf_counter() - start) / steps

    def settle(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@contextmanager
def exact() -> Iterator[None]:
    """float32 without TF32, by kernels that give the same bits each time."""
    cudnn = torch.backends.cudnn
    wanted = {"deterministic": True, "benchmark": False, "allow_tf32": False}
    before = {name: getattr(cudnn, name) for name in wanted}
    try:
        for name, value in wanted.items():
            setattr(cudnn, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(cudnn, name, value)


class Plain(Trainer):
    """The loop of every torch tutorial; with *spread* over all ranks, by DistributedDataParallel.

    ``gradient_as_bucket_view`` saves a copy of all gradients, as the documentation recommends.  Buffers
    (running means, unused in training) are not broadcast, since Synkro's step does not do it either.
    """

    def __init__(self, job: Job, rank: int, device: torch.device, spread: bool) -> None:
        super().__init__(job, rank, device)
        self._called: nn.Module = self.model
        if spread:
            self._called = nn.parallel.DistributedDataParallel(
                self.model,
                device_ids=[device] if device.type == "cuda" else None,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,
            )
        self._optimizer = torch.optim.SGD(self.model.parameters(), RATE, MOMENTUM)

    def step(self) -> Tensor:
        self._optimizer.zero_grad()
        loss = self.forward(self._called)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class Flat(Trainer):
    """A rank of Synkro: all gradients are one variable, all weights one vector.

    *gradients* is the variable's array on this rank, of CuPy or NumPy, which ``all_reduce`` averages in
    place; backward passes add into views of it.
    """

    def __init__(self, job: Job, rank: int, gradients: Any, all_reduce: Callable[[], Any]) -> None:
        self._gradients = torch.from_dlpack(gradients)
        super().__init__(job, rank, self._gradients.device)
        self._all_reduce = all_reduce
        self._weights = torch.empty_like(self._gradients)
        self._velocity = torch.zeros_like(self._gradients)
        views = zip(
            self.model.parameters(),
            self._views(self._weights),
            self._views(self._gradients),
            strict=True,
        )
        for parameter, weight, gradient in list(views):
            weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, gradient

    def _views(self, vector: Tensor) -> Iterator[Tensor]:
        """One view a parameter, with its shape and, for channels_last, its strides."""
        offset = 0
        for parameter in list(self.model.parameters()):
            piece = vector[offset : offset + parameter.numel()]
            offset += parameter.numel()
            yield piece.as_strided(parameter.shape, parameter.stride())
        assert offset == len(vector)

    def holds(self, gradients: Any) -> bool:
        """Whether these are still the gradients: the variable must not move."""
        return torch.from_dlpack(gradients).data_ptr() == self._gradients.data_ptr()

    def step(self) -> Tensor:
        self._gradients.zero_()
        loss = self.forward(self.model)
        loss.backward()
        # torch computes on its current stream and CuPy on its own, which are both the legacy default
        # stream unless someone changed them: then what is launched first is done first.  Else wait,
        # before and after the memory changes hands.
        ordered = self._same_stream()
        if not ordered:
            torch.cuda.synchronize()
        self._all_reduce()
        if not ordered:
            torch.cuda.synchronize()
        self._velocity.mul_(MOMENTUM).add_(self._gradients)
        self._weights.add_(self._velocity, alpha=-RATE)
        return loss.detach()

    def _same_stream(self) -> bool:
        if self.device.type != "cuda":
            return True
        import cupy

        return cupy.cuda.get_current_stream().ptr == torch.cuda.current_stream().cuda_stream


_kept: dict[Job, Flat] = {}


def on_this_worker(job: Job, rank: int, gradients: Any, all_reduce: Callable[[], Any]) -> Flat:
    """The worker's trainer of this job, made at its first use."""
    if job not in _kept:
        _kept.clear()
        _kept[job] = Flat(job, rank, gradients, all_reduce)
    if not _kept[job].holds(gradients):
        raise RuntimeError("the variable of the gradients has moved since the trainer was made")
    return _kept[job]
