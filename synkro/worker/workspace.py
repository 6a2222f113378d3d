"""What a rank has: functions, variables, objects, memory, a device, and the other ranks of a call.

A call works with these, and so does each command; what the commands are is in ``rank``.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..comms.base import Communicator
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..devices.hints import shorten
from ..errors import CollectiveError, UsageError, reason, with_article
from ..ipc.descriptors import Descriptors
from ..ipc.listener import Listener
from ..ipc.process import give_up
from ..memory.segment import Segment, SegmentTable
from ..messages import Failed, FunctionSpec, Phase
from ..packing.failures import kinds, pickled, sent
from ..plan.call import Access, Region
from ..values.arrays import Array
from ..values.random import generator, seed_globals, seed_torch
from ..values.variable import Variable
from .group import Group, Running, Task
from .objects import RankObjects
from .reading import WholeFiles
from .replica import Elsewhere, Replica
from .scene import Draws
from .terminal import end_debugging


class Workspace:
    """What one rank has.

    Attributes:
        number, size, pid: this rank, the number of all ranks, and this process.
        hosts, host: the ranks of each host, and those on this one.
        epoch: the number of the running command.
        objects: the objects that functions have brought along.
        files: broadcast inputs that were read from files.
        segments: the shared memory that this rank knows.
        function: the name of the function that runs or ran last, for messages.
        in_function: whether the user's code is running.
        in_call: whether the other ranks may wait for this one in a collective.
        group: the ranks of the running call, as functions see them.
        token: the name of this session, by which its variables are recognized.
        verbose: whether status lines are shown.
        at_close: what is done before the process ends: writing the profile, letting go of NCCL.
        forked: whether the function has forked, and this is the child, which is no rank.
        called: whether a call has run since ``forget_calls``.
        draws: the generators that functions may draw from, as they were when a run began.
        leaves: whether the process ends after the command, without a reply.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        hosts: Sequence[range],
        listener: Listener,
        descriptors: Descriptors,
        comm: Communicator,
    ) -> None:
        self.number = rank
        self.size = size
        self.hosts = hosts
        self.host: Final = next(ranks for ranks in hosts if rank in ranks)
        self.pid: Final = os.getpid()
        self.epoch: int = 0
        self.device: Device = CpuDevice()
        self.comm = comm
        self.functions: dict[int, FunctionSpec] = {}
        self.variables: dict[int, Replica] = {}
        self.objects: Final = RankObjects()
        self.files: Final = WholeFiles()
        self.function: str | None = None
        self.in_function: bool = False
        self.in_call: bool = False
        self._task: Task | None = None
        self.outbox: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.report: Final = listener.report
        self.mark: Final = listener.mark
        self.token = ""
        self.verbose = False
        self.forked: bool = False
        self.called: bool = False
        self.leaves: bool = False
        os.register_at_fork(after_in_child=self._on_fork)
        self.at_close: Final = contextlib.ExitStack()
        self._listener = listener
        self._descriptors = descriptors
        self.segments: Final = SegmentTable(self._mapped, descriptors.release)
        self._kept: list[list[Array]] = []
        self._master = 0
        self._life: tuple[int, ...] = ()  # its number among the workers of its rank, after the first
        self.group: Group = self._new_group(None)
        self._versions: NDArray[Any] = np.empty(0, np.uint64)
        self._torch_seed: int | None = None  # of a session that has one, until PyTorch is imported
        self.draws: Final = Draws(self.objects.generators, self.objects.classes)

    def keep_house(self, housekeeping: messages.Housekeeping) -> None:
        """Forget what the main process has freed, and receive the segments that it has created."""
        for wanted in housekeeping.attach:
            self.segments.attach(wanted.segment, wanted)
        for number in housekeeping.drop:
            self.functions.pop(number, None)
            self.variables.pop(number, None)
            self.objects.drop(number)
            if self.files.drop(number) or self.segments.is_mapped(number):
                self.device.forget(number)  # what is pinned is unpinned before it is unmapped
            self.segments.drop(number)
        if housekeeping.drop:
            self.objects.tidy()
            self.comm.tidy()

    def array(self, region: Region) -> Array:
        """The array that *region* describes."""
        return self.segments.array(region)

    def copied(self, array: Array) -> Array:
        """A copy of *array* where variables lie."""
        copy = self.comm.empty(array.shape, array.dtype)
        self.device.assign(copy, array)
        return copy

    def replica(self, number: int, name: str | None, ranks: tuple[int, ...]) -> Variable:
        """The replica of a variable, or what stands here for one that only other *ranks* have."""
        return self.variables[number] if self.number in ranks else Elsewhere(name, ranks, self.number)

    def version(self, region: Region) -> tuple[int, int] | None:
        """The segment of *region*, and the version of its contents; None if that is not known."""
        if not len(self._versions) or not self.segments.memory(region.segment).flags.writeable:
            return None  # a file, which other programs may write to
        return region.segment, int(self._versions[region.segment % len(self._versions)])

    def _mapped(self, number: int, wanted: messages.Attach) -> NDArray[np.uint8]:
        """The memory of a segment, whose descriptor has come."""
        access = wanted.access
        if access is Access.READ and self.device.pins and not wanted.file:
            access = Access.WRITE
        fd = os.dup(self._descriptors.descriptor(number))
        memory = Segment.attach(number, fd, wanted.nbytes, access).base
        if access is not Access.COPY:
            self.device.mapped(number, memory)
        return memory

    def attend(self, epoch: int) -> None:
        """Command number *epoch* begins."""
        self.in_function = False
        self._task = None
        self.epoch = epoch
        self.device.resume()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the user's code, and wait until the device has done it."""
        value = self.start(fn, args, kwargs)
        self.device.settle()
        return value

    def start(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the user's code; the device may still compute what it returns."""
        if self._torch_seed is not None and "torch" in sys.modules:
            self._seed_torch()
        self.in_function = True
        try:
            value = fn(*args, **kwargs)
        except BaseException as error:
            if self.forked:
                end_as_child(error)
            raise
        finally:
            end_debugging()
        if self.forked:
            end_as_child(SystemExit())
        self.in_function = False
        return value

    def _on_fork(self) -> None:
        self.forked = True

    def reseed(self, seed: int, life: int = 0) -> None:
        """Seed ``rng()``, ``random``, ``numpy.random`` and PyTorch as a session of *seed* does, for
        worker number *life* of this rank."""
        self._life = (life,) if life else ()
        self.group = self._new_group(seed)
        seed_globals(seed, self.number, *self._life)
        self._torch_seed = seed
        self._seed_torch()

    def _seed_torch(self) -> None:
        if self._torch_seed is not None and seed_torch(self._torch_seed, self.number, *self._life):
            self._torch_seed = None

    def begin_call(self, ranks: tuple[int, ...], call: Running, fn: Any) -> None:
        """A call of the function *fn* begins, which may change whatever it uses."""
        self.called = True
        self.begin(ranks, call)
        self.draws.note(fn, self.group.generator.own)

    def begin(self, ranks: tuple[int, ...], call: Running | None = None) -> None:
        """A call begins, in which *ranks* take part: they may wait for each other in collectives."""
        if call is not None:
            self.function = call.name
        self.group.begin(self.epoch, ranks, call)
        self.in_call = True

    def end(self, failed: bool) -> None:
        """The call, if there is one, ends on this rank; if it *failed*, the other ranks are told."""
        if failed and not self.in_call:
            self.begin(tuple(range(self.size)))
        if self.in_call:
            self.in_call = False
            self.comm.end(failed)

    def leave(self) -> None:
        """End after the command: another worker is to take the place of this one."""
        self.leaves = True
        self.report(Phase.LEAVING, 0)

    def forget_calls(self) -> None:
        """From now on no call has run."""
        self.called = False

    def begin_task(self, task: Task) -> None:
        """Tasks begin; *task* says on which item."""
        self._task = task
        self.group.take(task)

    @property
    def item(self) -> int | None:
        """The number of the item on which a task runs, or ran last in this command."""
        return None if self._task is None else self._task.number

    def _new_group(self, seed: Any) -> Group:
        rng = functools.partial(generator, seed, self.number)
        where = self.hosts.index(self.host), self.number - self.host.start, len(self.host)
        return Group(self.comm, rng, self.device, self.mark, self._master, where)

    def keep(self, leaves: list[list[Array]]) -> None:
        """Hold the outputs of a call until a ``Store`` fetches them, or a ``Keep`` names them."""
        self._kept = leaves

    def failure(self, error: BaseException) -> Failed:
        """What to tell of *error*; it ends the process if its device is useless then, as results would
        be wrong."""
        try:
            lost = self.device.lost(error)
        except Exception as another:
            lost = reason(another)
        if lost is not None:
            where = f" in the function {self.function!r}" if self.function else ""
            give_up(f"rank {self.number} lost its GPU{where}: {lost}")
        try:
            return self._failed(error)
        except Exception:  # of the error's own methods
            what = f"{with_article(type(error).__name__)}, which cannot be looked at"
            return self._failed(RuntimeError(what))

    def _failed(self, error: BaseException) -> Failed:
        shorten(error)
        parts = sent(error)
        traceback.clear_frames(error.__traceback__)  # do not keep the function's arrays alive
        return Failed(
            function=self.function,
            summary=_summary(error) + self.device.advice(error, self.function is not None),
            traceback=parts,
            pickled=pickled(error),
            kinds=kinds(error),
            usage=isinstance(error, UsageError) and not self.in_function,
            strays=isinstance(error, CollectiveError) and error.strays,
            item=self.item,
            began=self._began(),
        )

    def _began(self) -> bytes:
        """How the run began that has failed; empty if no function's has."""
        if self.function is None:
            return b""
        try:
            task, group = self._task, self.group
            which = None if task is None else (task.seed, task.map, task.number)
            return pickle.dumps(self.draws.began(group.piece, which, tuple(group.recorded.results)), 5)
        except Exception:  # of a generator of the user's own
            return b""

    def handed_over(self, leaf: int) -> list[Array]:
        """The pieces of an output that are held, which are held no longer."""
        pieces: list[Array] = []
        if self._kept:
            pieces, self._kept[leaf] = self._kept[leaf], []
        return pieces


_TOLD = 2000  # characters of an exception's text; the traceback has all of it


def _summary(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:
        text = "(its text could not be made)"
    return f"{type(error).__name__}: {text if len(text) <= _TOLD else f'{text[:_TOLD]}…'}"


def end_as_child(error: BaseException) -> NoReturn:
    """End a process that a function has forked, as Python ends one after *error*."""
    if not isinstance(error, SystemExit):
        traceback.print_exception(error)
        status = 1
    elif isinstance(error.code, int | None):
        status = error.code or 0
    else:
        print(error.code, file=sys.stderr)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
