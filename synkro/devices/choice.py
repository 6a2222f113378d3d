"""Which devices a session uses, one worker on each: from ``fork``'s arguments or the environment."""

from __future__ import annotations

import operator
import os
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidType, InvalidValue, NotAvailable
from ..machine import available_cores, cpu_name

VARIABLE = "SYNKRO_DEVICES"

_FORMS = '"cpu", "cuda", a list such as ["cpu", "cpu"], or a map such as "dev0->cpu;dev1->cpu"'


@dataclass(frozen=True)
class Assignment:
    """The device of one worker, and the context name that the user mapped to it (or None)."""

    device: str
    name: str | None = None

    @property
    def core(self) -> int | None:
        """The core that the worker is kept on: that of ``cpu3``; None for plain ``cpu``."""
        index = self.device.removeprefix("cpu")
        return sorted(os.sched_getaffinity(0))[int(index)] if index else None

    def __str__(self) -> str:
        return f"Mapped name {self.name} to device {self.device}: {cpu_name()}"


def choose(
    n_parallel: int | None, devices: str | Sequence[str] | None, environment_value: str | None
) -> list[Assignment]:
    """One assignment a worker, in the order of ranks.

    *n_parallel* is ``fork``'s; *devices* its ``devices=``, instead of which *environment_value*
    (of ``SYNKRO_DEVICES``) counts where it is None.

    Raises: InvalidType, InvalidValue for what is no number of workers or no list of devices,
    NotAvailable for GPUs.
    """
    count = None if n_parallel is None else _worker_count(n_parallel)
    source = "devices="
    if devices is None and environment_value:
        devices, source = environment_value, VARIABLE
    if devices is None or (isinstance(devices, str) and re.fullmatch("cpu", devices.strip())):
        return [Assignment("cpu")] * _cpu_workers(count)
    named = _parse(devices, source)
    if count is not None and count > len(named):
        raise InvalidValue(
            f"{count} workers were asked for, but {source} lists {len(named)} devices: list a "
            f"device more than once to run several workers on it."
        )
    return named[:count]


def _worker_count(n_parallel: Any) -> int:
    try:
        if isinstance(n_parallel, bool):
            raise TypeError
        count = operator.index(n_parallel)
    except TypeError:
        raise InvalidType(
            f"the number of workers must be an int of 1 or more, or None for one a device; got "
            f"{n_parallel!r}, a {type(n_parallel).__name__}."
        ) from None
    if count < 1:
        raise InvalidValue(f"the number of workers must be 1 or more; got {count}.")
    return count


def _cpu_workers(count: int | None) -> int:
    cores = available_cores()
    if count is not None and count > cores:
        warnings.warn(
            f"{count} CPU workers on {cores} available cores: they will take turns.",
            RuntimeWarning,
            stacklevel=5,
        )
    return count or cores


def _parse(devices: str | Sequence[str], source: str) -> list[Assignment]:
    if isinstance(devices, str):
        if "->" in devices:
            return _parse_map(devices, source)
        devices = [part.strip() for part in devices.split(",")]
    if not isinstance(devices, Sequence) or not all(isinstance(part, str) for part in devices):
        raise InvalidType(f"{source} takes {_FORMS}; got {devices!r}.")
    if not devices:
        raise InvalidValue(f"{source} names no device: give {_FORMS}.")
    return [Assignment(_device(part, source)) for part in devices]


def _parse_map(text: str, source: str) -> list[Assignment]:
    """A map of context names, ``name->device`` separated by semicolons, as in Theano's contexts."""
    assignments: list[Assignment] = []
    for entry in text.split(";"):
        name, arrow, device = (part.strip() for part in entry.partition("->"))
        if not (name and arrow and device) or "->" in device:
            raise InvalidValue(
                f"{source} has the malformed entry {entry.strip()!r} in {text!r}: write "
                f'"name->device", with ";" between entries, as in "dev0->cpu;dev1->cpu".'
            )
        if name.startswith(("cpu", "cuda", "opencl")):
            raise InvalidValue(
                f"{source} has the context name {name!r}, which looks like a device: choose one "
                f"that does not begin with cpu, cuda or opencl, such as dev0."
            )
        if any(name == other.name for other in assignments):
            raise InvalidValue(f"{source} maps the context name {name!r} twice: name each once.")
        assignments.append(Assignment(_device(device, source), name))
    return assignments


def _device(text: str, source: str) -> str:
    """A device's name in its normal form, such as ``cpu``."""
    match = re.fullmatch(r"(cpu|cuda):?(\d*)", text.strip())
    if match is None:
        raise InvalidValue(f"{source} names the unknown device {text!r}: expected {_FORMS}.")
    kind, index = match.groups()
    if kind == "cuda":
        raise NotAvailable(
            f"{source} names {text!r}, but workers on GPUs are not available yet in this version "
            f'of Synkro: use "cpu".'
        )
    cores = len(os.sched_getaffinity(0))
    if index and int(index) >= cores:
        raise InvalidValue(
            f"{source} names {text!r}, but this process may use {cores} cores, cpu0 to "
            f'cpu{cores - 1}: name one of them, or plain "cpu".'
        )
    return f"cpu{index}"
