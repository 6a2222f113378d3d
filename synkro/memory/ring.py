"""The two sides of a ring: slots in one named segment, through which a program hands frames over.

::

    writer: wait for a free slot ─▶ fill it ─▶ writes += 1 ─▶ post "full"
    reader: wait for a full one ─▶ read it ─▶ read += 1 ─▶ post "free"

The counters behind the slots say what is where: frame n lies in slot n modulo the slots, it has been
handed over if ``writes > n``, and handed back if ``read > n``.  The semaphores only wake.  So nothing is
lost where a side is killed between two steps; waits are of a tenth of a second, and after each the other
side's lock is looked at: flock(2) of the reader, which has made the segment, and a locked byte of the
writer.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final

from numpy.typing import ArrayLike

from ..errors import CallTimeout, InvalidValue, RingBroken
from ..machine import disown_in_children
from ..plan.call import Access
from ..values.arrays import Array, cast, checked_bool, checked_seconds
from . import named
from .keeper import COMPANIONS, companions
from .segment import Segment, descriptors_for, undoing

_SIGNALS = signal.valid_signals()
_ENDED = -1  # in the place of a slot
_WAIT = 0.1  # seconds of a wait, after which the other side is looked at


class _Signals:
    """The semaphores of a ring, and its counters.

    Attributes:
        mutex: held by the thread that uses them, for as long as a wait at most.
        closed: whether a thread has closed this side, or is about to.
    """

    def __init__(self, name: str, header: Any, slots: int, new: bool, any_owner: bool = False) -> None:
        """Make the semaphores, if *new*, or open them.

        Raises: InvalidValue; SharedMemoryError.
        """
        self._ipc = named.posix_ipc()
        self._name = name
        self.mutex = threading.RLock()
        self.closed = False
        self._over = threading.Event()  # the closing
        self.header = header
        self.free: Any = None
        self.full: Any = None
        had = descriptors_for(f"the semaphores of the ring {name} could not be had")
        with undoing(self._close_semaphores), had:
            if not new:
                named.check_companions(name, any_owner)
            self._open(slots, new)

    def _open(self, slots: int, new: bool) -> None:
        ipc = self._ipc
        free, full = (self._name + end for end in COMPANIONS)
        flags = ipc.O_CREX if new else 0
        try:
            for semaphore in (free, full) if new else ():  # whoever has the ring's name has theirs
                with contextlib.suppress(ipc.ExistentialError):
                    ipc.unlink_semaphore(semaphore)
            self.free = ipc.Semaphore(free, flags, 0o600, slots if new else 0)
            self.full = ipc.Semaphore(full, flags, 0o600, 0)
        except (ipc.Error, OSError) as error:
            if isinstance(error, OSError) and error.errno is None:  # as where no descriptor is left
                raise OSError(errno.EMFILE, str(error)) from None
            if isinstance(error, ipc.ExistentialError) and not new:
                raise InvalidValue(
                    f"the ring {self._name} has no semaphores at this moment: it is being made, or it "
                    f"ends. Try again; if it has none for long, make it anew."
                ) from None
            there = " and ".join(companions(self._name))
            raise InvalidValue(
                f"the semaphores of the ring {self._name} cannot be had: {error}. Remove {there}, if "
                f"they are left from before, or take another name."
            ) from None

    def count(self, field: str) -> int:
        return int(self.header[field][0])

    def add(self, field: str) -> None:
        self.header[field] += 1

    def post(self, field: str, semaphore: Any) -> None:
        """Count one more in a *field*, and wake who waits for a *semaphore*; a count of that which is
        full, which nothing here makes, wakes as well."""
        self.add(field)
        with contextlib.suppress(OSError):
            semaphore.release()

    def wait(self, semaphore: Any, patience: float = _WAIT) -> None:
        """Wait until a *semaphore* is posted, or the *patience* is over.

        Signals come after it: posix_ipc would run their handlers, and drop what these raise.
        """
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS) if patience > 0 else None
        try:
            with contextlib.suppress(self._ipc.BusyError, self._ipc.SignalError):
                semaphore.acquire(min(max(patience, 0), _WAIT))
        finally:
            if before is not None:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def repeat(
        self, step: Callable[[], int | None], posted: str, timeout: float | None, late: Callable[[], str]
    ) -> int:
        """What *step* returns; it is repeated until it returns a number, after waits for a semaphore.

        *posted* is the semaphore's name, "free" or "full"; *late* says what did not come in time.

        Raises: CallTimeout; InvalidValue once this side is closed; what *step* raises.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            with self.held():
                found = step()
                if found is not None:
                    return found
                patience = deadline - time.monotonic()
                if patience <= 0:
                    raise CallTimeout(late())
                self.wait(getattr(self, posted), patience)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the mutex.  Raises: as ``check_open``."""
        with self.mutex:
            if not self.closed:
                yield
                return
        self.check_open()

    def check_open(self) -> None:
        """Raises: InvalidValue where another thread, or a signal's handler, has closed this side.

        The names are gone then; but who has been closing for a second may be below, in this thread.
        """
        if self.closed:
            self._over.wait(1)
            raise InvalidValue(
                f"the ring {self._name} was closed, and no more frames go through it: make a new one."
            )

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Close this side after the block, in which no other thread waits."""
        self.closed = True  # before the mutex is asked for: whoever waits lets go of it then
        with self.mutex:
            try:
                yield
            finally:
                self._close_semaphores()
                self._over.set()

    def _close_semaphores(self) -> None:
        for semaphore in (self.free, self.full):
            if semaphore is not None:
                with contextlib.suppress(self._ipc.Error):
                    semaphore.close()
        self.free = self.full = None


class RingReader:
    """The reader's side, which makes the ring.

    Attributes:
        segment, layout: its memory.
    """

    def __init__(self, number: int, name: str, layout: named.SegmentLayout) -> None:
        """Raises: InvalidValue if the name is in use; SharedMemoryError; NotAvailable."""
        named.posix_ipc()
        self.name = name
        self.layout = layout
        self.segment: Segment = named.create(number, name, layout)
        with undoing(self.segment.close), undoing(named.end, name, self.segment):
            header = named.counters_of(self.segment.base)
            self._signals = _Signals(name, header, layout.slots, new=True)

    def take(self, timeout: float | None) -> int | None:
        """Wait for a frame; returns the slot that it lies in, or None at the end of all frames.

        Raises: CallTimeout; RingBroken.
        """
        slot = self._signals.repeat(
            self._slot,
            "full",
            timeout,
            lambda: (
                f"no frame came through the ring {self.name} in {timeout:g} s: its writer "
                f"{'sends nothing' if self._signals.count('writer') else 'has not come'}."
            ),
        )
        return None if slot == _ENDED else slot

    def _slot(self) -> int | None:
        """The slot of the next frame, if it is there; ``_ENDED`` if none comes any more."""
        signals = self._signals
        come = signals.count("writer")  # before its lock is looked at: it locks first
        gone = come and not named.has_writer(self.segment.fd)
        ended = signals.count("ended")  # before the frames are counted: none comes after it
        done = signals.count("read")
        if signals.count("writes") > done:
            signals.wait(signals.full, 0)
            return done % self.layout.slots
        if ended:
            return _ENDED
        if gone:
            raise RingBroken(
                f"the writer of the ring {self.name} is gone, and has not ended it: all {done} frames "
                f"that it handed over have been taken. Make the ring anew, and start the writer again."
            )
        return None

    def hand_back(self) -> None:
        """The frame that was taken last is not needed any more."""
        with self._signals.held():
            self._signals.post("read", self._signals.free)

    def close(self) -> None:
        """Remove the names; the writer finds the ring's lock free."""
        with self._signals.closing():
            named.end(self.name, self.segment)
            self.segment.close()


class RingWriter:
    """The writer's side of a ring, in any program; it needs no workers.

    ``write(array)`` hands a frame over.  ``close()``, or the end of a ``with`` block, ends the ring: the
    reader's loop ends after the last frame.  A block that an exception ends, or a program that ends
    without ``close()``, is an error for the reader.

    Attributes:
        name: the ring's.
        shape, dtype: those of a frame.
        slots: how many frames may wait.
    """

    def __init__(self, name: str, timeout: float | None = None, any_owner: bool = False) -> None:
        """Open the ring; made by ``ring(name)``."""
        self.name: Final = named.checked_ring_name(name)
        self._timeout = None if timeout is None else checked_seconds(timeout, "timeout")
        self._fd, nbytes = named.open_named(self.name, True, checked_bool(any_owner, "any_owner"))
        self._close_fd = weakref.finalize(self, os.close, self._fd)
        with undoing(self._close_fd):
            layout = named.layout_of(self._fd, self.name)
            if layout is None or not layout.slots:
                raise InvalidValue(
                    f"the shared memory {self.name} is no ring: a ring is made by ring(name, slots=…, "
                    f"shape=…, dtype=…) in the program that reads; attach() opens arrays."
                )
            self.shape: Final = layout.shape
            self.dtype: Final = layout.dtype
            self.slots: Final = layout.slots
            self._layout = layout
            with descriptors_for(f"the shared memory {self.name} could not be opened"):
                mapped = named.reopened(self._fd)
            self._segment = Segment.attach(0, mapped, nbytes, Access.WRITE)
            header = named.counters_of(self._segment.base)
            self._signals = _Signals(self.name, header, self.slots, new=False, any_owner=any_owner)
            self._enter()
        _writers.add(self)

    def _enter(self) -> None:
        """Be the writer.  Raises: InvalidValue if there is, or was, another; RingBroken."""
        self._check_reader()
        if not named.lock_as_writer(self._fd):
            raise InvalidValue(f"the ring {self.name} has a writer: one program writes to a ring.")
        if self._signals.count("writer"):
            raise InvalidValue(
                f"the ring {self.name} has had its writer, which is gone: make a new ring."
            )
        self._signals.add("writer")

    def write(self, array: ArrayLike) -> None:
        """Hand a frame over: a copy of *array*, after a wait for a free slot.

        When it returns, the reader gets the frame, whatever becomes of this program.

        Raises: InvalidType, InvalidValue for another shape, or a cast that loses information;
        CallTimeout if no slot becomes free in time; RingBroken if the reader is gone.
        """
        called = f"the ring {self.name}"
        self._signals.check_open()
        frame = cast(array, self.dtype, False, called, "convert the values yourself")
        if frame.shape != self.shape:
            raise InvalidValue(
                f"{called} has frames of shape {self.shape}; got the shape {frame.shape}."
            )
        self._signals.repeat(
            lambda: self._filled(frame),
            "free",
            self._timeout,
            lambda: (
                f"no slot of {called} became free in {self._timeout:g} s: its reader takes none of the "
                f"{self.slots} frames that wait."
            ),
        )

    def _filled(self, frame: Array) -> int | None:
        """The slot into which *frame* went, if one was free."""
        self._check_reader()
        signals = self._signals
        count = signals.count("writes")
        if count - signals.count("read") >= self.slots:
            return None
        signals.wait(signals.free, 0)
        slot = count % self.slots
        self._segment.array(self._layout.region(0, slot))[...] = frame
        signals.post("writes", signals.full)
        return slot

    def close(self) -> None:
        """End the ring: no frame comes after those that were handed over."""
        self._leave(ended=True)

    def _leave(self, ended: bool = False) -> None:
        if not self._close_fd.alive:
            return
        with self._signals.closing():
            if ended:
                self._signals.post("ended", self._signals.full)
            self._close_fd()

    def _check_reader(self) -> None:
        if not named.is_held(self._fd):
            raise RingBroken(
                f"the reader of the ring {self.name}, which has made it, has closed it or is gone: "
                f"start it again, and open the new ring."
            )

    def __enter__(self) -> RingWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self._leave()

    def __repr__(self) -> str:
        return f"RingWriter({self.name!r}, slots={self.slots}, shape={self.shape}, dtype={self.dtype})"

    def disown(self) -> None:
        """In a fork of this process: the parent is the writer."""
        self._close_fd()


_writers: weakref.WeakSet[RingWriter] = weakref.WeakSet()
disown_in_children(_writers)
