"""Streams and events; what they do, and when, is in `_queues`."""

from __future__ import annotations

import itertools
import threading

from . import _machine, _queues, runtime

_thread = threading.local()
_event_handles = itertools.count(0x5582_0000_1000, 0x10)


def _stacks():
    """The calling thread's streams by device: the last of each list is current."""
    return _thread.__dict__.setdefault("stacks", {})


def _stack(device):
    return _stacks().setdefault(device, [Stream.null])


def current_queue():
    """The queue of the current stream of the current device."""
    return _queues.lookup(get_current_stream().ptr)


def get_current_stream(device_id=-1):
    """The calling thread's current stream on a device, its current device unless told."""
    _machine.check()
    return _stack(_machine.current_device() if device_id == -1 else device_id)[-1]


class Event:
    """A point in a stream, where one was recorded."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        if interprocess:
            raise ValueError("the stand-in has no events between processes")
        self.ptr = 0
        _machine.check()
        _machine.touch(_machine.current_device())
        self.ptr = next(_event_handles)
        _queues.events[self.ptr] = None

    @property
    def done(self):
        """Whether the work before the point has been done; asking does what can be done.

        Where it cannot be known, because the context is spoilt say, it has not.
        """
        return runtime.eventQuery(self.ptr) == 0

    def record(self, stream=None):
        """Record the event on a stream, the current one unless told."""
        stream = get_current_stream() if stream is None else stream
        _machine.check()
        queue = _queues.lookup(stream.ptr)
        _queues.events[self.ptr] = queue, _queues.mark(queue)

    def __del__(self, forget=_queues.events.pop):
        forget(getattr(self, "ptr", None), None)

    def synchronize(self):
        """Wait until the work before the point has been done."""
        _machine.check()
        runtime.statistics["waits"] += 1
        if _queues.events[self.ptr] is not None:
            _queues.finish(*_queues.events[self.ptr])


class _BaseStream:
    """What the null stream and streams that were made have in common."""

    def __init__(self, ptr, device_id):
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other):
        return isinstance(other, _BaseStream) and self.ptr == other.ptr

    def __hash__(self):
        return self.ptr

    def __repr__(self):
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __cuda_stream__(self):
        return (0, self.ptr)

    def _own_device(self):
        """The current device, which must be the stream's."""
        current = runtime.getDevice()
        if self.device_id not in {-1, current}:
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id})"
                f" does not match with the current device ({current})"
            )
        return current

    def __enter__(self):
        device = self._own_device()
        _stack(device).append(self)
        _thread.__dict__.setdefault("entered", []).append(device)
        return self

    def __exit__(self, *args):
        _stack(_thread.entered.pop()).pop()

    def use(self):
        """Make the stream current."""
        _stack(self._own_device())[-1] = self
        return self

    @property
    def done(self):
        """Whether all work has been done; asking does what can be done."""
        return runtime.streamQuery(self.ptr) == 0

    def synchronize(self):
        """Wait until all work has been done."""
        runtime.streamSynchronize(self.ptr)

    def record(self, event=None):
        """Record an event, a new one unless told."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event):
        """Make what comes later on this stream wait for the point that `event` recorded."""
        _machine.check()
        queue = _queues.lookup(self.ptr)
        if _queues.events[event.ptr] is not None:
            _queues.wait_for(queue, *_queues.events[event.ptr])

    @property
    def is_non_blocking(self):
        """Whether the null stream and this one ignore each other."""
        _machine.check()
        return _queues.lookup(self.ptr).non_blocking


class Stream(_BaseStream):
    """A stream of the current device, or the null stream, or the thread's default one."""

    null = None
    ptds = None

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self._queue = None
        if null or ptds:
            super().__init__(0 if null else _queues.PER_THREAD, -1)
            return
        _machine.check()
        self._queue = _queues.create(non_blocking)
        super().__init__(self._queue.handle, self._queue.device)

    def __del__(self, destroy=_queues.destroy):
        if self._queue is not None:
            destroy(self.ptr)


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)
