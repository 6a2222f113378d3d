"""Arrays in memory with a name, which other programs read and write as well."""

from __future__ import annotations

import weakref
from dataclasses import replace
from math import prod
from typing import Any

import numpy as np

from ...errors import InvalidValue
from ...memory import named
from ...memory.segment import Segment
from ...plan.call import Region
from ...values.arrays import Array, Shape
from ..engine.engine import Engine
from .outgoing import Outgoing, Placed


class NamedOutgoing(Outgoing):
    """An array in a named segment, where it stays, and keeps its shape.

    Other programs may write to it at any time.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        segment: Segment,
        region: Region,
        counted: bool = False,
        ours: bool = False,
    ) -> None:
        """The array of *region*.  What is written to it is *counted* behind it, if that is so;
        *ours* is a name that ends with it."""
        super().__init__(engine)
        self._name = name
        self._writes: Any = named.counters_of(segment.base)["writes"] if counted else None
        self._ours = ours
        self.point(Placed(region, segment))

    @classmethod
    def made(
        cls,
        engine: Engine,
        name: str,
        dtype: np.dtype[Any],
        shape: tuple[int, ...] | None,
        value: Array | None = None,
    ) -> NamedOutgoing:
        """An array of this *value*, or of zeros, in a new segment, whose name ends with the session.

        Raises: InvalidType, InvalidValue for a name that cannot be, or is in use; SharedMemoryError.
        """
        name = named.checked_name(name)
        if shape is None:
            raise InvalidValue(f"the memory {name} cannot grow later: give data() a value, or a shape.")
        layout = named.SegmentLayout(dtype, shape)
        segment = named.create(engine.directory.number(), name, layout, value)
        segment = engine.directory.adopt(segment, name)
        engine.at_close.callback(_end, name, weakref.ref(segment))
        return cls(engine, name, segment, layout.region(segment.number), counted=True, ours=True)

    def resize(self, shape: Shape, dtype: np.dtype[Any], called: str, oversize: float = 1) -> Placed:
        """Raises: InvalidValue for another shape, or where the array is read-only."""
        assert self.placed is not None
        if shape != self.array.shape:
            raise InvalidValue(
                f"{called} lies in the shared memory {self._name}, where it keeps its shape, "
                f"{self.array.shape}; got {shape}. Make another with data(…)."
            )
        if not self.array.flags.writeable:
            raise InvalidValue(
                f"{called} is the shared memory {self._name} of another program, read-only: open it "
                f"with attach(…, writable=True)."
            )
        return self.point(Placed(replace(self.placed.region), self.placed.segment))

    def wrote(self) -> None:
        self.touch()
        if self._writes is not None:
            self._writes += 1

    def free(self) -> None:
        if self._ours and self.placed is not None:
            named.end(self._name, self.placed.segment)


class Slot(NamedOutgoing):
    """A frame of a ring, until the writer gets it back, while this program may still use what was made
    of it."""


class HandedBack(Outgoing):
    """In the place of a frame of a ring that the writer has got back: whoever asks for it hears so."""

    MISSING = (
        "was handed back to the writer of its ring, which fills it anew: a frame lasts until the next "
        "one is taken. Keep a copy, frame[:].copy(), or use it in the loop."
    )

    def __init__(self, engine: Engine, called: str) -> None:
        super().__init__(engine)
        self._called = called
        del self.array

    def __getattr__(self, name: str) -> Any:
        if name == "array":
            raise InvalidValue(f"{self._called} {self.MISSING}")
        raise AttributeError(name)


def _end(name: str, reference: weakref.ref[Segment]) -> None:
    segment = reference()
    if segment is not None:
        named.end(name, segment)


def layout_there(
    fd: int, nbytes: int, name: str, dtype: np.dtype[Any] | None, shape: Any, offset: int
) -> named.SegmentLayout:
    """How the array lies in a segment of another program's: as its header says, or, with a *dtype* and a
    *shape*, as these and *offset* say.

    Raises: InvalidValue.
    """
    layout = named.layout_of(fd, name)
    if dtype is not None and shape is not None:
        if layout is not None and offset < layout.offset:
            raise InvalidValue(
                f"the shared memory {name} begins with a header, which says what it holds: leave dtype= "
                f"and shape= out; or give an offset= of {layout.offset} or more."
            )
        needed = offset + prod(shape) * dtype.itemsize
        if needed > nbytes:
            raise InvalidValue(
                f"the shared memory {name} has {nbytes} bytes, and {dtype} of shape {shape} from byte "
                f"{offset} on needs {needed}: check dtype=, shape= and offset=."
            )
        return named.SegmentLayout(dtype, shape, offset=offset, counted=False)
    if layout is None:
        raise InvalidValue(
            f"the shared memory {name} is no .npy file, which would say what it holds: say it, with "
            f"attach({name!r}, dtype=…, shape=…)."
        )
    if layout.slots:
        raise InvalidValue(
            f"the shared memory {name} is a ring, of which one program reads, the one that has made it: "
            f"ring({name!r}) opens it for a writer."
        )
    return layout
