"""``Handover``: all that the workers have, for one that takes the place of another.

Functions and objects keep their numbers.  They are written as they are here; what is not as the workers
have taken it over, or as they have left it, is copied from one of them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...memory.segment import Segment
from ...messages import Changes, Copy, FunctionSpec, Parcel, Recover
from ...packing import kinds
from ...packing.kinds import WHOLE
from ...packing.pickles import Writer
from ...plan.call import aligned
from ..engine.engine import Engine
from .comparison import is_flat
from .known import UNKNOWN, Known, reached
from .registry import Registry
from .values import Relied
from .watch import Watch


@dataclass(eq=False)
class Handover:
    """What a worker needs to take the place of another: the *functions* that were sent, and all objects
    in the *registry*.

    *compiled* says how a function of numba's is pickled; *watches* compare objects before calls.
    """

    _engine: Engine
    _registry: Registry
    _functions: Iterable[Any]
    _compiled: Callable[[Any], Any]
    _watches: Iterable[Watch]

    def leave_to_workers(self, fn: Any) -> list[tuple[int, str, Any]]:
        """The names that *fn* assigns, which prepares workers, are each worker's own from now on.

        Returns what they begin with: numbers of modules, names and values.
        """
        return self._registry.leave_to_workers(fn)

    def anew(self) -> tuple[Parcel, Segment | None]:
        """A delivery of all functions and objects that the workers have; its memory is to be held.

        Raises: what pickling raises.
        """
        sent = (function for function in self._functions if not isinstance(function, Relied))
        specs = {function.number: function.spec for function in sent}
        writer = _written(self._registry, specs, self._compiled)
        return parcelled(self._engine.directory.allocate, writer)

    def forget(self, taken: Container[int]) -> None:
        """A worker has got all objects as they are here, but for those *taken* from other workers, by
        number: what others do not have like that is sent to all of them again."""
        apart = [known for known in self._registry.all() if known.number not in taken]
        for known in self.changed(apart):
            known.forget_contents()
            for watch in self._watches:
                watch.expire()

    def changed(self, objects: Iterable[Known]) -> list[Known]:
        """The *objects* that the program has changed since the workers took them over."""
        return [known for known in objects if not _is_as_taken(known)]

    def survey(self) -> tuple[int, ...]:
        """The numbers of objects that functions have changed on some worker."""
        everything = [known for known in self._registry.all() if _can_change_there(known)]
        return tuple(set[int]().union(*self._surveyed(everything)))

    def changed_on(self, rank: int, roots: Iterable[Known]) -> list[str]:
        """What functions have changed on a *rank* of all that *roots* reach, as errors call it."""
        parts = self._registry.parts
        there = [one for one in reached(roots) if one.contents is not None and id(one.obj) not in parts]
        found = {known.number: known for known in there if _can_change_there(known)}
        changed = [found[number] for number in self._surveyed(found.values())[rank]]
        return [one.obj.__name__ if isinstance(one.obj, type) else one.path for one in changed]

    def _surveyed(self, objects: Iterable[Known]) -> list[tuple[int, ...]]:
        """By rank, the numbers of *objects* that are not as they came."""
        writer = self._registry.writer(self._compiled)
        writer.dump([(known.number, known.contents) for known in objects])
        parcel, _memory = parcelled(self._engine.allocate, writer)
        return [reply.numbers for reply in self._engine.run(Changes(parcel))]

    def copy(self, objects: Sequence[Known], source: int) -> Recover:
        """What gives a worker *objects* as they are on the rank *source*, which has nothing to do.

        Raises: ValueError for what pickle does not take.
        """
        numbers = tuple(known.number for known in objects)
        copies = self._engine.workers.tell(source, Copy(numbers), None)
        if lost := [known.path for known in objects if known.number in copies.lost]:
            raise ValueError(f"{lost[0]!r} cannot be pickled on a worker")
        return Recover((copies.pickle,))

    def forget_dropped(self) -> None:
        """Let the workers drop what the program does not have any more: of it nothing needs to be put
        back.  What is left in circles is collected first, all that belongs together at once."""
        gc.collect()
        self._registry.forget_dropped()

    def numbers(self) -> list[int]:
        """The numbers of all objects that the workers have, and the program, too."""
        return [known.number for known in self._registry.all()]

    def called(self, numbers: Iterable[int]) -> list[str]:
        """The names of objects."""
        wanted = set(numbers)
        return [known.path for known in self._registry.all() if known.number in wanted]


def _written(
    registry: Registry, specs: Mapping[int, FunctionSpec], compiled: Callable[[Any], Any]
) -> Writer:
    """A delivery of the functions *specs*, by number, and of all objects in the *registry*.

    Raises: what pickling raises.
    """
    writer = Writer({}, registry.space, lambda *_: False, compiled, registry.parts)
    writer.dump(len(specs))
    for item in specs.items():
        writer.dump(item)
    everything = registry.all()
    others = [known for known in everything if known.kind is not kinds.NAME]
    names = [
        (known.number, registry.space(known.obj.names), known.obj.name, known.contents)
        for known in everything
        if known.kind is kinds.NAME and known.contents and known.contents[WHOLE] is not UNKNOWN
    ]
    writer.dump(names)
    writer.dump(([], [], [known.obj for known in others]))
    writer.dump(writer.movable)
    pairs = zip(others, writer.places(known.obj for known in others), strict=True)
    writer.dump([(at, k.number, kinds.KINDS.index(k.kind)) for k, at in pairs if at is not None])
    return writer


def _can_change_there(known: Known) -> bool:
    """Whether functions may have changed an object on the workers, and that can be seen: of names only
    if they stand for numbers and strings."""
    if known.kind is kinds.NAME:
        return known.contents is not None and is_flat(known.contents.get(WHOLE))
    return known.kind is not kinds.FUNCTION


def _is_as_taken(known: Known) -> bool:
    if known.kind is kinds.NAME:  # written as the workers have it
        return known.contents is not None and known.contents.get(WHOLE) is not UNKNOWN
    return known.has(known.kind.look(known.obj))


def parcelled(allocate: Callable[[int], Segment], writer: Writer) -> tuple[Parcel, Segment | None]:
    """The stream; its big buffers go once into memory that all workers map, as long as that is held."""
    if not writer.buffers:
        return Parcel(writer.stream, None, ()), None
    segment = allocate(sum(aligned(b.nbytes) for b in writer.buffers))
    spans = []
    end = 0
    for buffer in writer.buffers:
        stop = end + buffer.nbytes
        segment.base[end:stop] = np.frombuffer(buffer, np.uint8)
        spans.append((end, stop))
        end = aligned(stop)
    return Parcel(writer.stream, segment.number, tuple(spans)), segment
