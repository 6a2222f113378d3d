"""Which devices a session uses, one worker on each: from ``fork``'s arguments or the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...devices.gpus import Gpu, Visible, visible
from ...errors import InvalidType, InvalidValue, NotAvailable, counted, shown, warn
from ...machine import available_cores, cpu_name
from ...values.arrays import checked_int

VARIABLE = "SYNKRO_DEVICES"

_FORMS = '"cpu", "cuda", a list such as ["cuda:0", "cuda:1"], or a map such as "dev0->cuda0;dev1->cuda1"'


@dataclass(frozen=True)
class Assignment:
    """The device of one worker, and the context name that the user mapped to it (or None)."""

    device: str
    name: str | None = None
    gpu: Gpu | None = None

    @property
    def core(self) -> int | None:
        """The core that the worker stays on, as for ``cpu3``; None for plain ``cpu``, and GPUs."""
        index = self.device.removeprefix("cpu")
        return sorted(os.sched_getaffinity(0))[int(index)] if index.isdigit() else None

    def __str__(self) -> str:
        what = cpu_name() if self.gpu is None else f"{self.gpu.name} ({self.gpu.address})"
        return f"device {self.device}: {what}"


class Room(NamedTuple):
    """What a host has: usable cores, and GPUs, as *look* finds them.  This machine has no *name*."""

    cores: int
    look: Callable[[], Visible]
    name: str = ""

    def gpus(self, wish: str) -> Visible:
        """The visible GPUs.  Raises: NotAvailable if there are none; *wish* says what asks for them."""
        found = self.look()
        if found.gpus:
            return found
        if self.name:
            raise NotAvailable(f'{wish}, but on {self.name} {found.reason}: leave it out, or use "cpu".')
        raise NotAvailable(f'{wish}, but {found.reason}: use "cpu".')

    def counted(self, gpus: int) -> str:
        """How many *gpus* are visible on the host, in words."""
        count = "1 GPU is visible" if gpus == 1 else f"{gpus} GPUs are visible"
        return f"{count} on {self.name}" if self.name else count


def choose(
    n_parallel: int | None,
    devices: str | Sequence[str] | None,
    environment_value: str | None,
    room: Room | None = None,
) -> list[Assignment]:
    """One assignment a worker, in the order of ranks.

    *n_parallel* and *devices* are arguments of ``fork``.  If *devices* is None, *environment_value*, the
    value of ``SYNKRO_DEVICES``, takes its place.  *room* is that of a host, if it is not this machine.

    Raises: InvalidType, InvalidValue for a wrong number of workers or wrong devices, NotAvailable
    for GPUs that do not exist.
    """
    count = checked_count(n_parallel)
    room = room or Room(available_cores(), visible)
    source = "devices="
    if devices is None and environment_value:
        devices, source = environment_value, VARIABLE
    if devices is None and room.look().gpus:
        devices, source = "cuda", "this machine"
    if devices is None or (isinstance(devices, str) and devices.strip() == "cpu"):
        if count is not None and count > room.cores:
            there = counted(room.cores, "available core")
            warn(f"{count} CPU workers on {there}: they will take turns.", RuntimeWarning)
        return [Assignment("cpu")] * (count or room.cores)
    there, cure = "", "list a device more than once to run several workers on it"
    if isinstance(devices, str) and devices.strip() == "cuda":
        devices = [f"cuda{gpu.index}" for gpu in room.gpus(f"{source} asks for GPUs").gpus]
        there = room.counted(len(devices))
        cure = 'list a GPU more than once, as in devices=["cuda:0", "cuda:0"], or say devices="cpu"'
    named = [_assignment(each, source, room) for each in _parse(devices, source)]
    if len({assignment.gpu is None for assignment in named}) > 1:
        raise InvalidValue(
            f"{source} names CPUs and GPUs ({', '.join(each.device for each in named)}): the workers of "
            f"a session are on one kind of device."
        )
    if count is not None and count > len(named):
        there = there or f"{source} lists {counted(len(named), 'device')}"
        raise InvalidValue(f"{count} workers were asked for, but {there}: {cure}.")
    return named[:count]


def checked_count(n_parallel: Any) -> int | None:
    """The number of workers; None: one a device.  Raises: InvalidType, InvalidValue."""
    if n_parallel is None or (type(n_parallel) is int and n_parallel == -1):
        return None
    return checked_int(n_parallel, "the number of workers", 1, instead=", or None for one a device")


def check_devices(devices: Any, environment_value: str | None) -> None:
    """Raises: InvalidType, InvalidValue for what names no devices on any host."""
    named, source = (environment_value, VARIABLE) if devices is None else (devices, "devices=")
    if named:
        _parse(named, source)


class _Wish(NamedTuple):
    """A device as a user has named it: its kind, its number if there is one, and its context name."""

    text: str
    kind: str
    number: str
    name: str | None


def _parse(devices: str | Sequence[str], source: str) -> list[_Wish]:
    if isinstance(devices, str):
        if "->" in devices:
            return _parse_map(devices, source)
        devices = [part.strip() for part in devices.split(",")]
    if not isinstance(devices, Sequence) or not all(isinstance(part, str) for part in devices):
        raise InvalidType(f"{source} takes {_FORMS}; got {shown(devices)}.")
    if not devices:
        raise InvalidValue(f"{source} names no device: give {_FORMS}.")
    return [_wish(part, source) for part in devices]


def _parse_map(text: str, source: str) -> list[_Wish]:
    """A map of context names: ``name->device``, separated by semicolons, as Theano had them."""
    wishes: list[_Wish] = []
    for entry in text.split(";"):
        name, arrow, device = (part.strip() for part in entry.partition("->"))
        if not (name and arrow and device) or "->" in device:
            raise InvalidValue(
                f"{source} has the malformed entry {shown(entry.strip())} in {shown(text)}: write "
                f'"name->device", with ";" between entries, as in "dev0->cpu;dev1->cpu".'
            )
        if name.startswith(("cpu", "cuda", "opencl")):
            raise InvalidValue(
                f"{source} has the context name {name!r}, which looks like a device: choose one "
                f"that does not begin with cpu, cuda or opencl, such as dev0."
            )
        if any(name == other.name for other in wishes):
            raise InvalidValue(f"{source} maps the context name {name!r} twice: name each once.")
        wishes.append(_wish(device, source, name))
    return wishes


def _wish(text: str, source: str, name: str | None = None) -> _Wish:
    match = re.fullmatch(r"(cpu|cuda)(?::?(\d+))?", text.strip())
    if match is None:
        raise InvalidValue(f"{source} names the unknown device {shown(text)}: expected {_FORMS}.")
    return _Wish(text, match[1], match[2] or "", name)


def _assignment(wish: _Wish, source: str, room: Room) -> Assignment:
    """The device that is wished for, in its normal form, such as ``cpu`` or ``cuda0``."""
    text, kind, index, name = wish
    if kind == "cuda":
        gpus = room.gpus(f"{source} names {shown(text)}").gpus
        if not index:
            raise InvalidValue(
                f'{source} names {shown(text)} among others: say which GPU, as in "cuda:0".'
            )
        if int(index) >= len(gpus):
            raise InvalidValue(
                f"{source} names {shown(text)}, but {room.counted(len(gpus))} "
                f"({', '.join(f'cuda:{gpu.index}' for gpu in gpus)}; CUDA_VISIBLE_DEVICES says which)."
            )
        gpu = gpus[int(index)]
        return Assignment(f"cuda{gpu.index}", name, gpu)
    cores = len(os.sched_getaffinity(0))
    if index and int(index) >= cores:
        raise InvalidValue(
            f"{source} names {shown(text)}, but this process may use {counted(cores, 'core')}, cpu0 to "
            f'cpu{cores - 1}: name one of them, or plain "cpu".'
        )
    return Assignment(f"cpu{index}", name)
