"""``as_serial``: a function in the main process, as the only rank of a call.

Worker variables are read from the master rank when the function first uses them.  When it has returned,
those that it changed are sent to all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ... import here
from ...comms.board import board_bytes
from ...comms.shm import ShmCommunicator
from ...memory.arena import arena_file
from ...memory.segment import descriptors_for
from ...messages import FunctionSpec
from ...packing.pickles import Reader
from ...packing.scene import Began, Scene, singles_at
from ...plan.binding import Bound
from ...plan.call import Form
from ...plan.outputs import pair_of
from ...storage.files import is_stored
from ...values.arrays import as_array, same_bits
from ...values.foreign import columns_of, handed, host_array, is_view_of_hdf5, library_of
from ...values.random import with_states
from ...worker.group import Group, Running, Task
from ...worker.scene import SceneWriter, imported_by
from ..data.data import Data
from ..data.stored import StoredData
from ..variables.shared import Shared
from .arguments import SCALARS

T = TypeVar("T")


def run_alone(
    spec: FunctionSpec,
    arguments: Sequence[Bound],
    form: Form | None,
    keywords: Sequence[str],
    rng: Callable[[], np.random.Generator],
) -> Any:
    """Run the function of *spec* once, in this process; the last arguments go by *keywords*."""
    leaves = [_serial(argument) for argument in arguments]
    values = leaves if form is None else form.build(leaves)
    count = len(values) - len(keywords)
    scattered = [leaf for each, leaf in zip(arguments, leaves, strict=True) if _has_rows(each, leaf)]

    def rows() -> NDArray[np.int64] | None:
        return np.arange(len(scattered[0]), dtype=np.int64) if scattered else None

    with alone(rng, Alone(spec.name, rows)):
        value = spec.fn(*values[:count], **dict(zip(keywords, values[count:], strict=True)))
        if spec.updates:
            value, new = pair_of(value, len(spec.updates), spec.name)
            for (variable, _), one in zip(spec.updates, new, strict=True):
                variable.value = one
        if spec.finish is not None:
            spec.finish(1)
    return value


def _has_rows(argument: Bound, value: Any) -> bool:
    """Whether the *value* that a function gets for an argument has rows of the call."""
    return not (argument.broadcast or isinstance(argument.value, Shared)) and np.iterable(value)


@dataclass(eq=False)
class Alone:
    """A call in this process: of all rows, or once more of those that a rank had.

    Attributes:
        name, in_parts, piece, rows: as in ``group.Running``.
    """

    in_parts = False
    piece = 0

    name: str
    rows: Callable[[], NDArray[np.int64] | None]


def _serial(argument: Bound) -> Any:
    """An argument as a function in this process gets it."""
    value = argument.value
    if isinstance(value, Shared):
        value = value.value
    elif isinstance(value, Data):
        value = value.data.view()
        value.flags.writeable = False
    elif isinstance(value, StoredData) or is_stored(value):
        value = np.asarray(value)
        value.flags.writeable = False
    elif is_view_of_hdf5(value) or (columns_of(value) is not None and not argument.broadcast):
        value = as_array(value, f"the argument {argument.name!r}")
    if argument.library == "numpy":
        return host_array(value)
    if argument.library is None or library_of(value) or isinstance(value, SCALARS):
        return value
    return handed(np.array(value), argument.library)  # a copy: tensors cannot be read-only


@contextlib.contextmanager
def alone(
    rng: Callable[[], np.random.Generator], call: Running, where: tuple[int, int, int] = (0, 0, 1)
) -> Iterator[Group]:
    """Until the end of the block, in this thread, this process is the only rank of a *call*.

    *rng* gives its random generator; *where* is as in ``Group``.
    """
    with contextlib.ExitStack() as stack:
        with descriptors_for("what collectives need could not be had"):
            wake = os.eventfd(0)
            stack.callback(os.close, wake)
            file = arena_file(board_bytes(1))
            stack.callback(os.close, file)
        group = Group(ShmCommunicator(0, 1, file, [wake]), rng, where=where)
        group.begin(1, (0,), call)
        token = here.group.set(group)
        try:
            yield group
        finally:
            here.group.reset(token)
        for variable, before, replica in group.stand_ins.values():
            value = replica.value
            if not same_bits(value, before):
                variable.value = value


_turn = threading.RLock()  # of the threads that stand where a rank stood: generators are the process's


@contextlib.contextmanager
def in_place_of(scene: Scene, began: Began, name: str) -> Iterator[None]:
    """A block in which this process stands where the rank stood that ran the function *name*: its place,
    its rows, its task, its generators, and the results of collectives."""

    def rng() -> np.random.Generator:
        made = np.random.default_rng()
        if began.rng is not None:
            made.bit_generator.state = began.rng
        return made

    running = Alone(name, lambda: copy.copy(scene.rows))
    with _turn, with_states(singles_at(began)), alone(rng, running, scene.where) as group:
        group.take(None if began.task is None else _TaskAgain(*began.task))
        as_there = group.replaying(began.results, scene.place), substituted(sys.modules, scene.modules)
        with as_there[0], as_there[1], np.errstate(**scene.errors):
            yield


def scene_of(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], rank: int) -> Scene:
    """A task of this program's, to be done as by *rank*, with copies of all that it uses."""
    place = (rank, rank + 1), (0, rank, rank + 1)
    writer = SceneWriter()
    writer.dump(Scene(fn, [*args], kwargs, None, *place, imported_by(fn), dict(np.geterr())))
    found: Scene = Reader(writer.stream, ()).load()
    return found


@contextlib.contextmanager
def substituted(mapping: MutableMapping[str, T], new: Mapping[str, T]) -> Iterator[None]:
    """A block in which *mapping* has *new* entries, such as modules that imports find."""
    before = {name: mapping.get(name) for name in new}
    mapping.update(new)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                mapping.pop(name, None)
            else:
                mapping[name] = value


class _TaskAgain(Task):
    """A task that is done once more."""

    def __init__(self, seed: int, number_of_map: int, number: int) -> None:
        self.seed, self.map, self.number = seed, number_of_map, number
