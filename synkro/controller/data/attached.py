"""Inputs that other programs write: ``attach`` opens their memory, ``ring`` takes frames from them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from ...errors import InvalidValue
from ...memory import named
from ...memory.interrupts import uninterrupted
from ...memory.ring import RingReader
from ...memory.segment import undoing
from ...plan.call import Access
from ...values.arrays import checked_bool, checked_dtype, checked_int, checked_seconds, checked_shape
from ..engine.engine import Engine
from .data import Data
from .named import HandedBack, NamedOutgoing, Slot, layout_there


def attach(
    engine: Engine,
    shm_name: str,
    dtype: DTypeLike | None = None,
    shape: Any = None,
    offset: int = 0,
    writable: bool = False,
    minibatch: bool = False,
    name: str | None = None,
    any_owner: bool = False,
) -> Data:
    """An array in shared memory with a name, which another program has made: an input, without a copy.

    Each call reads what lies there then.  The name stays the other program's: nothing of it ends here.

    Args:
        shm_name: the memory's name, such as ``"/frames"``.
        dtype, shape: of what lies there, in memory of other programs.  An ``.npy`` file, as
            ``data(…, shm_name=…)`` and ``np.save`` make it, says so by itself.
        offset: the byte where the array begins, in memory of other programs.
        writable: whether this program may write to it.
        minibatch, name: as for ``data()``.
        any_owner: also open memory that belongs to another user, or that other users can write.

    Raises: InvalidType, InvalidValue if there is no such memory, if it does not hold that, or if others
    than this user and root may have written it; SharedMemoryError.
    """
    engine.require_ready()
    if (dtype is None) != (shape is None):
        raise InvalidValue("attach() takes dtype= and shape= together, or, with a header, none of them.")
    wanted = None if dtype is None else checked_dtype(dtype, "attach()")
    lengths = None if shape is None else checked_shape(shape)
    start = checked_int(offset, "offset", 0)
    if start and wanted is None:
        raise InvalidValue("offset= is for memory without a header: give dtype= and shape=, too.")
    writable, any_owner = checked_bool(writable, "writable"), checked_bool(any_owner, "any_owner")
    called = named.checked_name(shm_name)
    otherwise = ", or leave writable= out" if writable else ""
    fd, nbytes = named.open_named(called, writable, any_owner, otherwise)
    with undoing(os.close, fd):
        layout = layout_there(fd, nbytes, called, wanted, lengths, start)
    segment = engine.directory.opened(fd, nbytes, Access.WRITE if writable else Access.READ, called)
    counted = writable and layout.counted
    memory = NamedOutgoing(engine, called, segment, layout.region(segment.number), counted)
    array = memory.array
    found = Data(engine, array.dtype, array.ndim, minibatch=minibatch, name=name or shm_name)
    found.lie_in(memory)
    return found


@dataclass(eq=False, repr=False)
class Ring(Iterator[Data], contextlib.AbstractContextManager["Ring"]):
    """Frames that another program hands over, one after the other; iterate over it.

    ``for frame in ring: f(frame)``: each frame is a ``Data`` on the memory that the writer has filled,
    and lasts until the next one is taken, or the ring is closed: keep ``frame[:].copy()``.  The loop
    ends when the writer ends the ring.

    Attributes:
        name: the memory's.
        shape, dtype: those of a frame.
        slots: how many frames may wait.
    """

    ONLY_HERE = True

    _engine: Engine
    _await_calls: Callable[[], None]  # it returns when no submitted call may read a frame
    name: str
    slots: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    _timeout: float | None
    _over: bool = field(default=False, init=False)
    _closed: bool = field(default=False, init=False)
    _frame: Data | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        engine, layout = self._engine, named.ring_layout(self.dtype, self.shape, self.slots)
        self._side = RingReader(engine.directory.number(), self.name, layout)
        segment = engine.directory.adopt(self._side.segment, f"the ring {self.name}")
        regions = [layout.region(segment.number, slot) for slot in range(self.slots)]
        self._places = [Slot(engine, self.name, segment, region) for region in regions]
        engine.at_close.callback(self.close)

    def __next__(self) -> Data:
        """Hand the last frame back, and wait for the next one.

        Raises: CallTimeout; RingBroken if the writer is gone, after its last frame.
        """
        if self._over:
            raise StopIteration
        places = list(self._places)
        self._hand_back()
        slot = self._side.take(self._timeout)
        if slot is None:
            self._over = True
            self.close()
            raise StopIteration
        frame = Data(self._engine, self.dtype, len(self.shape), name=f"a frame of {self.name}")
        frame.lie_in(places[slot])
        self._frame = frame
        return frame

    def _hand_back(self) -> None:
        """Let the writer have the slot of the last frame, when nobody reads it any more."""
        frame = self._frame
        if frame is None:
            return
        self._await_calls()
        if self._engine.interrupted:
            self._engine.settle()
        with uninterrupted():
            frame.lie_in(HandedBack(self._engine, f"a frame of the ring {self.name}"))
            self._frame = None
            self._side.hand_back()

    def close(self) -> None:
        """End the ring: its names go, and the writer is told.  The second time it does nothing."""
        closed, self._closed = self._closed, True
        if not closed:
            self._side.close()
            self._places.clear()
            self._frame = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Ring({self.name!r}, slots={self.slots}, shape={self.shape}, dtype={self.dtype})"


def make_ring(
    engine_and_wait: tuple[Engine, Callable[[], None]],
    shm_name: str,
    slots: int,
    shape: Any,
    dtype: DTypeLike = np.float64,
    timeout: float | None = None,
) -> Ring:
    """A ring of *slots* in shared memory, through which another program hands frames over.

    *shm_name* is its name; frames have *shape* and *dtype*; *timeout* is how many seconds the next one
    may take.

    Raises: InvalidType, InvalidValue; SharedMemoryError; NotAvailable.
    """
    engine, await_calls = engine_and_wait
    engine.require_ready()
    name, slots = named.checked_ring_name(shm_name), checked_int(slots, "slots", 1)
    frames = checked_shape(shape), checked_dtype(dtype, "a ring")
    timeout = None if timeout is None else checked_seconds(timeout, "timeout")
    with contextlib.ExitStack() as undo:
        with uninterrupted():
            ring = Ring(engine, await_calls, name, slots, *frames, timeout)
            undo.callback(ring.close)
        undo.pop_all()
    return ring
