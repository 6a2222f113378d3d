"""One rank in the test's own process, without a worker: commands are done at once."""

import os

import numpy as np

from synkro.comms.board import board_bytes
from synkro.comms.shm import ShmCommunicator
from synkro.memory.arena import arena_file
from synkro.memory.segment import Segment
from synkro.messages import Ack, Attach, Create, Housekeeping
from synkro.plan.call import Access, Region
from synkro.plan.extents import Extent, Partial, PickedRows, View
from synkro.worker.rank import Rank


class Home:
    """The main process of one rank, as far as a rank sees of it; the other ranks never come."""

    def __init__(self, number=0, size=1, host=None):
        self.file = arena_file(board_bytes(size))
        self.wake = os.eventfd(0)
        self.segments = {}
        self.passed = {}
        self.reports = []
        comm = ShmCommunicator(number, size, self.file, [self.wake] * size)
        self.rank = Rank(number, size, [host or range(size)], self, self, comm)

    def descriptor(self, number):
        if number not in self.passed:
            self.passed[number] = os.dup(self.mapped(number).fd)
        return self.passed[number]

    def mapped(self, number):
        """The segment that the rank is to map."""
        return self.segments[number]

    def release(self, number):
        os.close(self.descriptor(number))
        del self.passed[number]

    def report(self, phase, count):
        self.reports.append((phase, count))

    def mark(self, phase):
        """No trace goes on."""

    def allocate(self, nbytes, access=Access.READ):
        """The number of a new segment, which the rank hears of."""
        number = 100 + len(self.segments)
        self.segments[number] = Segment.create(number, nbytes)
        self.tell(number, access)
        return number

    def tell(self, number, access):
        """Have the rank hear of a segment."""
        attach = Attach(number, self.segments[number].nbytes, access, False)
        self.rank.keep_house(Housekeeping((attach,)))

    def give(self, array, *access):
        """The region of a new segment with the contents of *array*."""
        region = Region(self.allocate(array.nbytes, *access), 0, array.shape, array.dtype.str)
        self.seen(region)[...] = array
        return region

    def seen(self, region):
        """What the main process has in *region*."""
        return self.segments[region.segment].array(region)

    def do(self, command):
        """The rank's reply."""
        return self.rank.action(command)()

    def create(self, array, name=None, number=1):
        assert self.do(Create(number, name, self.give(np.asarray(array)))) == Ack()
        return self.rank.variables[number]

    def close(self):
        self.segments.clear()
        del self.rank
        for fd in (self.file, self.wake, *self.passed.values()):
            os.close(fd)


POISON = 0xA5


class Mirrored(Home):
    """The rank is on another host: it hears of what commands name, and sees mirrors, in which only lies
    what they read.

    Attributes:
        partials: what it has reduced, which is to be merged with what other hosts have.
    """

    def __init__(self, number=0, size=1, host=None):
        super().__init__(number, size, host)
        self.view = View(self.seen)
        self.mirrors = {}
        self.partials = []
        self.named = set()

    def allocate(self, nbytes):
        number = 100 + len(self.segments)
        self.segments[number] = Segment.create(number, nbytes)
        return number

    def mapped(self, number):
        if number not in self.mirrors:
            mirror = self.mirrors[number] = Segment.create(number, self.segments[number].nbytes)
            mirror.base[:] = POISON
        return self.mirrors[number]

    def do(self, command):
        for number, access in command.names():
            if number not in self.named:
                self.named.add(number)
                self.tell(number, access)
        read = list(self.view.reads(command, self.rank.host))
        for each in read:
            self._move(each, self.segments, self.mapped)
        reply = super().do(command)
        for each in self.view.writes(command, {self.rank.number: reply}):
            if isinstance(each, Partial):
                self.partials.append(each)
            else:
                self._move(each, self.mirrors, self.segments.__getitem__)
        for each in read:  # the next command has to name again what it reads
            self._poison(each)
        return reply

    def _move(self, what, source, target):
        for start, stop in spans(what):
            target(what.segment).base[start:stop] = source[what.segment].base[start:stop]

    def _poison(self, what):
        for start, stop in spans(what):
            self.mirrors[what.segment].base[start:stop] = POISON

    def close(self):
        self.mirrors.clear()
        super().close()


def spans(what):
    """The bytes of what moves, as (start, stop)."""
    if isinstance(what, Extent):
        return [(what.start, what.stop)]
    assert isinstance(what, PickedRows)
    starts = (what.start + what.stride * what.rows).tolist()
    return [(start, start + what.nbytes) for start in starts]
