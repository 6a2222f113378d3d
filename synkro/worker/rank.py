"""What a rank has (functions, variables, segments), and a handler for each command.

Large outputs of a call wait here.  ``Store`` copies them to a segment that all ranks see; then, in
``Reduce``, every rank reduces its share of the elements.  Outputs that stay on the workers wait for
``Keep``, which makes variables of them.

A run that has failed is done once more: copied for the main program, or with a debugger in it.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from functools import cached_property, partial
from typing import Any

import numpy as np

from .. import messages
from ..comms.base import Communicator
from ..comms.gpu import GpuCommunicator
from ..comms.ops import OPERATIONS, Operation, reduce_share
from ..devices import context
from ..devices.base import Device
from ..errors import InternalError, InvalidValue, folded
from ..machine import unlinked
from ..memory.interrupts import uninterrupted
from ..messages import Ack, Command, Phase, Replay, Reply
from ..packing import place, settings
from ..packing.scene import Began, Scene, singles_at
from ..storage import targets
from ..values.arrays import Array
from ..values.random import with_states
from . import variables
from .call import PreparedCall
from .group import Group
from .safekeeping import Safekeeping, restore
from .scene import SceneWriter, imported_by
from .tasks import Tasks
from .workspace import Workspace


def replayed(rank: Workspace, command: Replay) -> bytes:
    """The ``Scene``, pickled; or, after a debugger was in it, whether the function has raised something.

    Raises: what pickling raises.
    """
    plan, began = command.plan, pickle.loads(command.began)
    spec = rank.functions[plan.function]
    call = PreparedCall(rank, plan)
    world = tuple(range(rank.size)) if began.task else plan.world if spec.finish else plan.participants
    if rank.number not in world:
        raise InvalidValue(
            f"rank {rank.number} has no rows any more: the arguments of the call have fewer now. Call "
            f"the function with those that it failed on, and replay that."
        )
    place = world.index(rank.number), len(world)
    owned = rank.objects.generators()
    states = [(owned[number], state) for number, state in began.owned.items() if number in owned]
    with _given(rank, call, command, began) as (args, kwargs), with_states(states):
        if command.opens:
            return pickle.dumps(_entered(rank, spec.fn, args, kwargs, began, place))
        rows = None if began.task else call.rows()
        writer = SceneWriter()
        parts = rows, place, rank.group.where, imported_by(spec.fn), dict(np.geterr())
        writer.dump(Scene(spec.fn, [*args], dict(kwargs), *parts))
        return writer.stream


@contextlib.contextmanager
def _given(
    rank: Workspace, call: PreparedCall, command: Replay, began: Began
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """A block with the arguments of the run."""
    if command.item is None:
        with call.shown(began.piece) as found:
            yield found
        return
    stream, buffers = pickle.loads(command.item)
    args = rank.objects.unpickled("the item", stream, buffers)
    with contextlib.closing(call.common()) as common:
        yield args, next(common) if command.plan.inputs else {}


def _entered(
    rank: Workspace, fn: Any, args: Any, kwargs: Any, began: Began, place: tuple[int, int]
) -> bool:
    """Run the function, and open a debugger at the line that raises; returns whether one does."""
    rng = [] if began.rng is None else [(rank.group.generator.own(), began.rng)]
    with rank.group.replaying(began.results, place), with_states([*rng, *singles_at(began)]):
        try:
            rank.run(fn, args, kwargs)
        except Exception as error:
            import pdb  # noqa: PLC0415  it takes a while

            trace = folded(error).__traceback__
            print(f"{type(error).__name__}: {error}")
            pdb.post_mortem(trace)
            return True
        return False


class Rank(Workspace):
    """One rank of a session: a workspace, and a handler for each command."""

    _tasks: Tasks | None = None  # from the first map on

    @cached_property
    def _safekeeping(self) -> Safekeeping:
        return Safekeeping(self)

    @cached_property
    def _handlers(self) -> dict[type, Callable[[Any], Reply | None]]:
        """What is done for each command; None is returned where there is nothing to say."""
        return {
            messages.Keep: partial(variables.keep_outputs, self),
            messages.Create: partial(variables.create, self),
            messages.Move: partial(variables.move, self),
            messages.Write: partial(variables.write, self),
            messages.Read: partial(variables.read, self),
            messages.Inspect: partial(variables.inspect, self),
            messages.Identify: partial(variables.identify, self),
            messages.Exchange: partial(variables.exchange, self),
            messages.Release: lambda command: None,
            messages.Distribute: self._load,
            messages.Renew: lambda command: self._take(command.parcel),
            messages.Compare: lambda c: messages.Compared(self.objects.compare(*self._held(c.parcel))),
            messages.Secure: self._safekeeping.secure,
            messages.Revert: self._safekeeping.revert,
            messages.Restore: partial(restore, self),
            messages.Changes: lambda c: messages.Changed(self.objects.survey(*self._held(c.parcel))),
            messages.Copy: self._copy_several,
            messages.Recover: lambda command: self.objects.recover(command.pickles),
            messages.Fetch: lambda c: self._copied(c, lambda: self.objects.copy(c.number)),
            messages.Replay: lambda c: self._copied(c, lambda: replayed(self, c)),
            messages.Preserve: self._preserve,
            messages.Start: self._start,
            messages.Initialize: self._initialize,
            messages.Generator: self._generator,
            messages.Reseed: lambda command: self.reseed(command.seed),
            messages.Work: self._work,
            messages.Export: self._export,
        }

    def end(self, failed: bool) -> None:
        """The call, or the map, if there is one, ends on this rank."""
        super().end(failed)
        if self._tasks is not None:
            self.group.take(None)
            self._tasks.end()

    def action(self, command: Command) -> Callable[[], Reply]:
        """A callable that does *command* and returns the reply."""
        self.function: str | None = None  # what fails is no function's fault, but for that of a call
        match command:
            case messages.Call():
                return PreparedCall(self, command.plan).run
            case messages.Store():
                return self._storing(command)
            case messages.Reduce():
                return self._reducing(command)
        handler = self._handlers.get(type(command))
        if handler is None:
            raise InternalError(f"rank {self.number} does not know the command {command!r}.")
        return lambda: handler(command) or Ack()

    def _start(self, start: messages.Start) -> messages.Started:
        if (core := start.cores[self.number]) is not None:
            os.sched_setaffinity(0, {core})
        self.token: str = start.token
        self.verbose: bool = start.verbose
        self._master = start.master_rank
        problem = apart = ""
        if start.gpus is not None and start.versions is not None:
            self._versions = self.array(start.versions)
            problem, apart = self._move_to_gpu(start.gpus)
        # mapped after the device is made, which may pin it
        self.outbox: Array = self.array(start.outbox)[self.number]
        self.group: Group = self._new_group(start.seed)
        if start.seeded:
            self.reseed(start.seed, start.life)
        if start.profiles is not None:
            import cProfile  # noqa: PLC0415  it takes a while

            profile = cProfile.Profile()
            self.at_close.callback(_write_profile, profile, start.profiles[self.number])
            profile.enable()
        return messages.Started(problem, apart)

    def _move_to_gpu(self, gpus: messages.Gpus) -> tuple[str, str]:
        """Compute on this rank's GPU from now on.

        Returns why NCCL does not connect the ranks, and why they do not open each other's memory, or "".
        """
        index = gpus.indices[self.number]
        context.begin(index)
        from ..devices.cuda import CudaDevice  # noqa: PLC0415  only here is CuPy needed

        device = CudaDevice(index, gpus.preallocate)
        self.device: Device = device
        self.begin(tuple(range(self.size)))
        peers, apart = None, ""
        if gpus.near:
            from ..comms.peers import introduce  # noqa: PLC0415  as above
            from ..devices.window import Window  # noqa: PLC0415

            window = Window(index, self._say)
            self.at_close.callback(window.close)
            peers, apart = introduce(self.comm, device, window, gpus.indices)
        comm = GpuCommunicator(self.comm, device, index if gpus.linked else None, peers)
        self.comm: Communicator = comm
        self.at_close.callback(comm.links.close)
        self.group = self._new_group(None)
        return comm.links.connect(), apart

    def _say(self, text: str) -> None:
        if self.verbose:
            print(text, file=sys.stderr, flush=True)

    def _load(self, command: messages.Distribute) -> None:
        self.report(Phase.LOADING, 0)
        place.enter(command.sys_path, command.cwd)
        settings.take_over(command.settings)
        self._take(command.parcel)

    def _take(self, parcel: messages.Parcel) -> None:
        functions, movable = self.objects.load(
            *self._held(parcel), lambda done: self.report(Phase.LOADING, done)
        )
        self.draws.forget()
        self.device.welcome(movable)
        self.functions.update(functions)
        self._seed_torch()

    def _work(self, command: messages.Work) -> None:
        if self._tasks is None:
            with uninterrupted():  # the descriptors come once
                queue = [os.dup(self._descriptors.descriptor(number)) for number in command.queue]
                self._tasks = Tasks(self, self._listener, queue)
                for number in command.queue:
                    self._descriptors.release(number)
        self._tasks.work(command)

    def _copy_several(self, command: messages.Copy) -> messages.Copies:
        objects = self.objects
        lost = tuple(number for number in command.numbers if objects.pickle([number]) is None)
        found = objects.pickle([number for number in command.numbers if number not in lost])
        return messages.Copies(b"" if found is None else found.stream, lost)

    def _copied(
        self, command: messages.Fetch | messages.Replay, copy: Callable[[], bytes]
    ) -> messages.Copied:
        """A copy that is made by the rank alone which the command names."""
        return messages.Copied(copy() if self.number == command.rank else b"")

    def _preserve(self, command: messages.Preserve) -> None:
        self.group.check(command.keep)
        self.objects.preserve(command, self.variables.values())

    def _held(self, parcel: messages.Parcel) -> tuple[messages.Parcel, memoryview]:
        """A parcel, and the memory of its segment."""
        number = parcel.segment
        return parcel, memoryview(b"") if number is None else self.segments.memory(number).data

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
            return lambda: self._reduce_kept(command)
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
            return messages.Exported(start, stop)
        self.report(Phase.STORING, 0)
        return targets.write(command, self.array(command.source), (start, stop))

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

    def _reduce_kept(self, command: messages.Reduce) -> Ack:
        """Reduce outputs that wait on GPUs, by the GPUs."""
        if self.number in command.ranks:
            self.begin(command.ranks)
            self.report(Phase.REDUCING, 0)
            jobs = [
                (OPERATIONS[each.op], self._kept[each.leaf][0], self.array(each.target))
                for each in command.reductions
            ]
            self.comm.reduce_out(jobs, command.reductions[0].divisor)
            for reduction in command.reductions:
                self._kept[reduction.leaf] = []
        return Ack()

    def _initialize(self, command: messages.Initialize) -> None:
        spec = self.functions[command.function]
        self.objects.let_begin(command.begins)
        self.begin(tuple(range(self.size)))
        self.function = spec.name
        self.report(Phase.RUNNING, 0)
        with settings.initializing():
            self.run(spec.fn, (), {})

    def _generator(self, command: messages.Generator) -> messages.GeneratorState:
        bits = self.group.rng.bit_generator
        if command.states is not None:
            bits.state = command.states[self.number]
        return messages.GeneratorState(bits.state)


def _write_profile(profile: Any, path: str) -> None:
    """Write a profile to a new file, which nobody has put there."""
    profile.create_stats()
    try:
        with open(path, "xb", opener=unlinked) as file:
            marshal.dump(profile.stats, file)  # as dump_stats() does
    except OSError as error:
        print(f"Synkro: the profile {path} could not be written: {error.strerror}.", file=sys.stderr)
