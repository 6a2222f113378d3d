"""Streams that do nothing before they must.

A stream is a queue of work. CUDA promises only that work runs in order, after what it waits for,
and before a synchronization that covers it returns; so here it runs no earlier than that. Work is a
function that returns whether it is complete: copies always are, an operation of NCCL may have to be
asked again.
"""

from __future__ import annotations

import collections
import itertools
import threading
import time

from . import _machine
from ._machine import lock

# How long an operation that other processes wait for may stay untouched. A real device would run it
# without being asked; a thread does that here, late enough for a mistake to show.
GRACE = 0.005

LEGACY = 1
PER_THREAD = 2

_handles = itertools.count(0x5581_0000_1000, 0x10)
_by_handle = {}
_by_device = collections.defaultdict(list)
_thread = threading.local()

events = {}  # handle -> the queue and the point in it that were recorded, None before


class Queue:
    """The work of one stream; `completed` of the `issued` items are done."""

    def __init__(self, device, *, null=False, non_blocking=False):
        self.device = device
        self.null = null
        self.non_blocking = non_blocking
        self.handle = 0 if null else next(_handles)
        self.items = collections.deque()
        self.issued = 0
        self.completed = 0
        self.destroyed = False

    def add(self, work):
        """Append `work` as it is."""
        self.items.append(work)
        self.issued += 1


class Urgent:
    """The engine that runs what other ranks wait for although nobody here asks for it."""

    def __init__(self):
        self.pending = []
        self.running = False

    def add(self, queue):
        """From now on everything up to the last item of `queue` counts as urgent."""
        with lock:
            self.pending.append((time.monotonic() + GRACE, queue, queue.issued))
            if not self.running:
                self.running = True
                threading.Thread(target=self.run, name="stand-in device", daemon=True).start()

    def run(self):
        """Advance whatever is due until nothing is left."""
        while True:
            with lock:
                now = time.monotonic()
                self.pending = [
                    (due, q, point) for due, q, point in self.pending if self.left(now, due, q, point)
                ]
                if not self.pending:
                    self.running = False
                    return
            time.sleep(0.001)

    @staticmethod
    def left(now, due, queue, point):
        """Whether the items of `queue` up to `point` are still to be done after a try."""
        if _machine.spoilt():
            return False
        if now < due:
            return queue.completed < point
        try:
            return not advance(queue, point)
        except _machine.CUDARuntimeError:
            return False  # it is sticky, so the next call of the program raises it


urgent = Urgent()


def create(non_blocking):
    """A queue for a new stream of the current device."""
    with lock:
        device = _machine.current_device()
        _machine.touch(device)
        queue = Queue(device, non_blocking=non_blocking)
        _by_handle[queue.handle] = queue
        _by_device[device].append(queue)
        return queue


def destroy(handle):
    """Forget the handle; what is queued still runs when a synchronization comes by."""
    with lock:
        queue = _by_handle.pop(handle, None)
        if queue is not None:
            queue.destroyed = True


def null(device):
    """The queue of the null stream of `device`."""
    with lock:
        queues = _by_device[device]
        if not queues:
            queues.append(Queue(device, null=True))
        if not queues[0].null:
            queues.insert(0, Queue(device, null=True))
        return queues[0]


def per_thread(device):
    """The queue of the calling thread's own default stream on `device`."""
    own = _thread.__dict__.setdefault("queues", {})
    if device not in own:
        own[device] = Queue(device)
        with lock:
            _by_device[device].append(own[device])
    return own[device]


def lookup(handle, device=None):
    """The queue that a stream's handle names."""
    device = _machine.current_device() if device is None else device
    if handle in {0, LEGACY}:
        return null(device)
    if handle == PER_THREAD:
        return per_thread(device)
    try:
        return _by_handle[handle]
    except KeyError:
        raise _machine.CUDARuntimeError(_machine.INVALID_HANDLE) from None


def of_device(device):
    """The queues of `device`, less the destroyed ones that have nothing left to do."""
    with lock:
        queues = _by_device[device]
        queues[:] = [q for q in queues if not q.destroyed or q.completed < q.issued]
        return list(queues)


def wait_for(queue, other, point):
    """Make what comes later on `queue` wait until `other` has completed `point` items."""
    with lock:
        if other is not queue and other.completed < point:
            queue.add(lambda: advance(other, point))


def barrier(queue):
    """The null stream waits for the blocking streams of its device, and they wait for it."""
    if queue.non_blocking:
        return
    others = (
        [q for q in of_device(queue.device) if not q.non_blocking]
        if queue.null
        else [null(queue.device)]
    )
    for other in others:
        wait_for(queue, other, other.issued)


def push(queue, work):
    """Queue `work` on a stream, and return the point at which it is complete."""
    with lock:
        barrier(queue)
        queue.add(work)
        return queue.issued


def mark(queue):
    """The point at which everything issued so far is complete: what an event records."""
    with lock:
        barrier(queue)
        return queue.issued


def advance(queue, point):
    """Run items of `queue` up to `point`, as far as they can run now; whether all of them have."""
    with lock:
        while queue.completed < point:
            try:
                if not queue.items[0]():
                    return False
            except BaseException:
                queue.items.popleft()  # what failed is over, too
                queue.completed += 1
                raise
            queue.items.popleft()
            queue.completed += 1
        return True


def finish(queue, point=None):
    """Run items of `queue` up to `point` (all, unless told), waiting for other ranks if need be."""
    if point is None:
        point = mark(queue) if queue.null else queue.issued
    pause = 5e-5
    while not advance(queue, point):
        _machine.check()
        time.sleep(pause)
        pause = min(1.5 * pause, 2e-3)


def recorded(event):
    """Whether the work before an event has been done, as far as it can be."""
    try:
        point = events[event]
    except KeyError:
        raise _machine.CUDARuntimeError(_machine.INVALID_HANDLE) from None
    return point is None or advance(*point)


def catch_up(queue):
    """Run everything that must come before an operation which runs at once on `queue`."""
    finish(queue, mark(queue))
