"""What a rank has (functions, variables, segments), and a handler for each command.

Large outputs of a call wait here.  ``Store`` copies them to a segment that all ranks see; then, in
``Reduce``, every rank reduces its share of the elements.  Outputs that stay on the workers wait for
``Keep``, which makes variables of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from .. import messages
from ..comms.base import Communicator
from ..comms.gpu import GpuCommunicator
from ..comms.ops import OPERATIONS, Operation, reduce_share
from ..devices.base import Device
from ..devices.cpu import CpuDevice
from ..errors import InternalError
from ..ipc.descriptors import Descriptors
from ..ipc.listener import Listener
from ..memory.interrupts import uninterrupted
from ..memory.segment import Segment
from ..messages import Ack, Command, FunctionSpec, Phase, Reply
from ..packing import place, settings
from ..plan.call import Access, Region
from ..storage import targets
from ..values.arrays import Array
from ..values.random import generator, seed_globals, seed_torch
from .call import PreparedCall
from .group import Group
from .holdings import Holdings
from .objects import Belongings
from .reading import WholeFiles
from .tasks import Tasks


class Rank:
    """One rank.

    Attributes:
        number, size, pid: this rank, the number of all ranks, and this process.
        hosts, host: the ranks of each host, and those on this one.
        epoch: the number of the running command.
        belongings: the objects that functions have brought along.
        files: broadcast inputs that were read from files.
        function: the name of the function that runs or ran last, for messages.
        in_function: whether the user's code is running.
        in_call: whether the other ranks may wait for this one in a collective.
        item: the number of the item on which a task runs, or ran last in this command.
        group: the ranks of the running call, as functions see them.
        token: the name of this session, by which its variables are recognized.
        verbose: whether status lines are shown.
        forked: whether the function has forked, and this is the child, which is no rank.
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
        self.host = next(ranks for ranks in hosts if rank in ranks)
        self.pid = os.getpid()
        self.epoch = 0
        self.device: Device = CpuDevice()
        self.comm = comm
        self.functions: dict[int, FunctionSpec] = {}
        self.variables = Holdings(self)
        self.belongings = Belongings()
        self.files = WholeFiles()
        self.function: str | None = None
        self.in_function = False
        self.in_call = False
        self.item: int | None = None
        self.outbox: NDArray[np.uint8] = np.empty(0, np.uint8)
        self.report = listener.report
        self.mark = listener.mark
        self.token = ""
        self.verbose = False
        self.forked = False
        os.register_at_fork(after_in_child=self._on_fork)
        self._listener = listener
        self._descriptors = descriptors
        self._segments: dict[int, Segment] = {}
        self._unmapped: dict[int, messages.Attach] = {}
        self._kept: list[list[Array]] = []
        self._master = 0
        self.group = self._new_group(None)
        self._tasks: Tasks | None = None
        self._at_close = contextlib.ExitStack()
        self._versions: NDArray[Any] = np.empty(0, np.uint64)
        self._torch_seed: int | None = None  # of a session that has one, until PyTorch is imported

    def keep_house(self, housekeeping: messages.Housekeeping) -> None:
        """Forget what the main process has freed, and receive the segments that it has created."""
        attach = [wanted for wanted in housekeeping.attach if wanted.segment not in self._segments]
        self._unmapped |= {wanted.segment: wanted for wanted in attach}
        for number in housekeeping.drop:
            self.functions.pop(number, None)
            self.variables.pop(number, None)
            self.belongings.drop(number)
            if self.files.drop(number):
                self.device.forget(number)
            if number in self._segments:
                self.device.forget(number)  # what is pinned is unpinned before it is unmapped
                del self._segments[number]
            elif number in self._unmapped:
                self._descriptors.release(number)
                del self._unmapped[number]
        if housekeeping.drop:
            self.belongings.tidy()
            self.comm.tidy()

    def array(self, region: Region) -> Array:
        """The array that *region* describes."""
        return self._segment(region.segment).array(region)

    def version(self, region: Region) -> tuple[int, int] | None:
        """The segment of *region*, and the version of its contents; None if that is not known."""
        if not len(self._versions) or not self._segment(region.segment).base.flags.writeable:
            return None  # a file, which other programs may write to
        return region.segment, int(self._versions[region.segment % len(self._versions)])

    def _segment(self, number: int) -> Segment:
        """A segment, mapped at its first use; if that fails, the next use tries again."""
        if number in self._unmapped:
            with uninterrupted():
                fd, wanted = self._descriptors.descriptor(number), self._unmapped[number]
                access = wanted.access
                if access is Access.READ and self.device.pins and not wanted.file:
                    access = Access.WRITE
                segment = Segment.attach(number, os.dup(fd), wanted.nbytes, access)
                self._segments[number] = segment
                if access is not Access.COPY:
                    self.device.mapped(number, segment.base)
                del self._unmapped[number]
                self._descriptors.release(number)
        return self._segments[number]

    def close(self) -> None:
        """Before the process ends: write the profile, and let go of NCCL."""
        self._at_close.close()

    def attend(self, epoch: int) -> None:
        """Command number *epoch* begins."""
        self.in_function = False
        self.item = None
        self.epoch = epoch
        self.device.resume()

    def run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the user's code, and wait until the device has done it."""
        if self._torch_seed is not None and "torch" in sys.modules:
            self._seed_torch()
        self.in_function = True
        try:
            value = fn(*args, **kwargs)
        except BaseException as error:
            if self.forked:
                end_as_child(error)
            raise
        if self.forked:
            end_as_child(SystemExit())
        self.in_function = False
        self.device.settle()
        return value

    def _on_fork(self) -> None:
        self.forked = True

    def reseed(self, seed: int) -> None:
        """Seed ``rng()``, ``random``, ``numpy.random`` and PyTorch as a session of *seed* does."""
        self.group = self._new_group(seed)
        seed_globals(seed, self.number)
        self._torch_seed = seed
        self._seed_torch()

    def _seed_torch(self) -> None:
        if self._torch_seed is not None and seed_torch(self._torch_seed, self.number):
            self._torch_seed = None

    def begin(self, ranks: tuple[int, ...], call: PreparedCall | None = None) -> None:
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
        if self._tasks is not None:
            self.group.take(None)
            self._tasks.end()

    def begin_item(self, item: tuple[int, int, int]) -> None:
        """A task begins, on an *item*: the seed of its map, the number of that, and its own."""
        self.item = item[-1]
        self.group.take(item)
        self.report(Phase.TASK, item[-1])

    def action(self, command: Command) -> Callable[[], Reply]:
        """A callable that does *command* and returns the reply."""
        self.function = None
        match command:
            case messages.Call():
                return PreparedCall(self, command.plan).run
            case messages.Store():
                return self._storing(command)
            case messages.Reduce():
                return self._reducing(command)
            case messages.Release():
                return Ack
        handlers: dict[type, Callable[[Any], Reply]] = {
            **self.variables.handlers,
            messages.Distribute: self._load,
            messages.Renew: lambda command: self._take(command.parcel),
            messages.Compare: self._compare,
            messages.Fetch: self._copy,
            messages.Preserve: self._preserve,
            messages.Start: self._start,
            messages.Generator: self._generator,
            messages.Reseed: self._reseed,
            messages.Work: self._work,
            messages.Export: self._export,
        }
        handler = handlers.get(type(command))
        if handler is None:
            raise InternalError(f"rank {self.number} does not know the command {command!r}.")
        self.function = None  # what fails from here on is no function's fault
        return lambda: handler(command)

    def _start(self, start: messages.Start) -> messages.Started:
        if (core := start.cores[self.number]) is not None:
            os.sched_setaffinity(0, {core})
        self.token, self.verbose = start.token, start.verbose
        self._master = start.master_rank
        problem = ""
        if start.gpus is not None and start.versions is not None:
            self._versions = self.array(start.versions)
            problem = self._move_to_gpu(start.gpus)
        # mapped after the device is made, which may pin it
        self.outbox = self.array(start.outbox)[self.number]
        self.group = self._new_group(start.seed)
        if start.seeded:
            self.reseed(start.seed)
        if start.profiles is not None:
            import cProfile  # noqa: PLC0415  it takes a while

            profile = cProfile.Profile()
            self._at_close.callback(profile.dump_stats, start.profiles[self.number])
            profile.enable()
        return messages.Started(problem)

    def _new_group(self, seed: Any) -> Group:
        rng = functools.partial(generator, seed, self.number)
        return Group(self.comm, rng, self.device, self.mark, self._master)

    def _move_to_gpu(self, gpus: messages.Gpus) -> str:
        """Compute on this rank's GPU from now on; returns why NCCL does not connect the ranks, or ""."""
        from ..devices.cuda import CudaDevice  # noqa: PLC0415  only here is CuPy needed

        index = gpus.indices[self.number]
        self.device = CudaDevice(index, gpus.preallocate)
        self.comm = comm = GpuCommunicator(self.comm, self.device, index if gpus.linked else None)
        self._at_close.callback(comm.links.close)
        self.group = self._new_group(None)
        self.begin(tuple(range(self.size)))
        return comm.links.connect()

    def _load(self, command: messages.Distribute) -> Ack:
        self.report(Phase.LOADING, 0)
        place.enter(command.sys_path, command.cwd)
        settings.apply(command.settings)
        return self._take(command.parcel)

    def _take(self, parcel: messages.Parcel) -> Ack:
        functions, movable = self.belongings.load(
            parcel, self._memory(parcel), lambda done: self.report(Phase.LOADING, done)
        )
        self.device.welcome(movable)
        self.functions |= functions
        self._seed_torch()
        return Ack()

    def _work(self, command: messages.Work) -> Ack:
        if self._tasks is None:
            with uninterrupted():  # the descriptors come once
                queue = [os.dup(self._descriptors.descriptor(number)) for number in command.queue]
                self._tasks = Tasks(self, self._listener, queue)
                for number in command.queue:
                    self._descriptors.release(number)
        return self._tasks.work(command)

    def _compare(self, command: messages.Compare) -> messages.Compared:
        parcel = command.parcel
        return messages.Compared(self.belongings.compare(parcel, self._memory(parcel)))

    def _copy(self, command: messages.Fetch) -> messages.Copied:
        mine = self.number == command.rank
        return messages.Copied(self.belongings.copy(command.number) if mine else b"")

    def _preserve(self, command: messages.Preserve) -> Ack:
        self.group.check(command.keep)
        return self.belongings.preserve(command, self.variables.values())

    def _memory(self, parcel: messages.Parcel) -> memoryview:
        return memoryview(b"") if parcel.segment is None else self._segment(parcel.segment).base.data

    def keep(self, leaves: list[list[Array]]) -> None:
        """Hold the outputs of a call until a ``Store`` fetches them, or a ``Keep`` names them."""
        self._kept = leaves

    def handed_over(self, leaf: int) -> list[Array]:
        """The pieces of an output that are held, which are held no longer."""
        pieces: list[Array] = []
        if self._kept:
            pieces, self._kept[leaf] = self._kept[leaf], []
        return pieces

    def _storing(self, command: messages.Store) -> Callable[[], Reply]:
        places = [(p.leaf, p.piece, self.array(p.region)) for p in command.placements[self.number]]

        def store() -> Ack:
            self.report(Phase.STORING, 0)
            self.device.copy_out((place, self._kept[leaf][piece]) for leaf, piece, place in places)
            self._kept = []
            return Ack()

        return store

    def _reducing(self, command: messages.Reduce) -> Callable[[], Reply]:
        if not command.reductions[0].sources:
            return lambda: self._reduce_kept(command, command.ranks)
        together = [rank for rank in command.ranks if rank in self.host]
        place, count = together.index(self.number), len(together)
        shares = list(filter(None, map(self._share, command.reductions)))

        def reduce() -> Ack:
            self.report(Phase.REDUCING, 0)
            for operation, divisor, sources, target in shares:
                reduce_share(operation, divisor, sources, [target], place, count)
            return Ack()

        return reduce

    def _export(self, command: messages.Export) -> messages.Exported:
        start, stop = command.spans[self.number]
        if start == stop:
            return messages.Exported(start, stop, 0, "")
        self.report(Phase.STORING, 0)
        rows = self.array(command.source)
        written = targets.write(command.store, command.path, command.layout, rows, (start, stop))
        return messages.Exported(*written)

    def _share(self, reduction: messages.Reduction) -> tuple[Operation, int, list[Array], Array] | None:
        """What the ranks of this host reduce: what they have stored; None for nothing.

        If others have stored some of it, all is divided when that is merged.
        """
        pairs = zip(reduction.owners, reduction.sources, strict=True)
        sources = [self.array(source) for owner, source in pairs if owner in self.host]
        if not sources:
            return None
        divisor = reduction.divisor if len(sources) == len(reduction.sources) else 1
        return OPERATIONS[reduction.op], divisor, sources, self.array(reduction.target)

    def _reduce_kept(self, command: messages.Reduce, ranks: tuple[int, ...]) -> Ack:
        """Reduce outputs that wait on GPUs, by the GPUs."""
        if self.number in ranks:
            self.begin(ranks)
            self.report(Phase.REDUCING, 0)
            self.comm.reduce_out(
                [OPERATIONS[reduction.op] for reduction in command.reductions],
                command.reductions[0].divisor,
                [self._kept[reduction.leaf][0] for reduction in command.reductions],
                [self.array(reduction.target) for reduction in command.reductions],
            )
            for reduction in command.reductions:
                self._kept[reduction.leaf] = []
        return Ack()

    def _reseed(self, command: messages.Reseed) -> Ack:
        self.reseed(command.seed)
        return Ack()

    def _generator(self, command: messages.Generator) -> messages.GeneratorState:
        bits = self.group.rng.bit_generator
        if command.states is not None:
            bits.state = command.states[self.number]
        return messages.GeneratorState(bits.state)


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
