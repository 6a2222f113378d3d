"""The records that describe one call: all that a rank needs to do its part of it.

Data is named by the number of its segment, never by a pointer, so that a plan can travel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

from ..values.arrays import Array, Code
from .outputs import Tree, unflatten
from .split import Span

ALIGNMENT = 64
"""Every array begins at a multiple of this: a cache line, and what JAX needs to take it as it is."""


def aligned(nbytes: int) -> int:
    """*nbytes* rounded up to the alignment of arrays."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Access(Enum):
    """How a worker maps a segment."""

    READ = "inputs: writing raises"
    WRITE = "outputs: shared, writable"
    COPY = "closures: writable, but what is written stays in this worker"


@dataclass(frozen=True, eq=False)
class Region:
    """An array inside of a segment.  Compared by identity: a changed array is a new region."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    dtype: Code
    strides: tuple[int, ...] | None = None


@dataclass(frozen=True, eq=False)
class FileArray:
    """An array in a file of the user's, which every process opens by itself; compared as a region is.

    *kind* is what errors call it, *name* which array of the file at *path* it is.  Its chunks have
    *chunk* rows.  The *stamp* changes when somebody writes to the file.  Workers know it by *number*.
    """

    number: int
    kind: str
    path: str
    name: str
    shape: tuple[int, ...]
    dtype: Code
    chunk: int
    stamp: tuple[int, ...]


@dataclass(frozen=True)
class Scattered:
    """An input whose rows are split over the ranks; of an array in a file each rank reads its own.

    Row i of the call is row i of it where it holds the rows *of the batch* and no others, else the
    i-th that the call selects.
    """

    array: Region | FileArray
    of_batch: bool = False


@dataclass(frozen=True)
class Broadcast:
    """An input that every rank sees whole; an array in a file it reads, and keeps."""

    array: Region | FileArray


@dataclass(frozen=True)
class Held:
    """A worker variable as an input by rows: every rank computes on rows of its own replica."""

    variable: int


@dataclass(frozen=True)
class Replicated:
    """A worker variable as a whole: every rank sees its own replica."""

    variable: int


@dataclass(frozen=True)
class Number:
    """A number that every rank gets as it is: a Python scalar if *plain*, else a NumPy scalar.

    It lies in shared memory, so that a call with another number of that type has the same plan.
    """

    region: Region
    plain: bool


LENGTH = 8
"""Bytes of each length before a pickle."""


@dataclass(frozen=True)
class Pickled:
    """A value that is no array, which every rank gets: loaded anew in each call.

    Its pickle lies in shared memory, so that another one needs no new plan: first a table of lengths
    (how many buffers follow the stream, the bytes of the stream, those of each buffer), then these, each
    at a multiple of ``ALIGNMENT``.
    """

    region: Region

    @staticmethod
    def lengths(memory: Array) -> list[int]:
        """The bytes of the table at the beginning of *memory*, of the stream, and of each buffer."""
        count = 2 + int.from_bytes(memory[:LENGTH].tobytes(), "little")
        return [count * LENGTH, *memory[: count * LENGTH].view("<u8").tolist()[1:]]


@dataclass(frozen=True)
class Items(Scattered):
    """A list that is no array, split by rows: its array says where in *items* each one begins and ends.

    They are strings, in UTF-8, or pickles.
    """

    items: Region = Region(0, 0, (0,), "|u1")
    strings: bool = True


Argument = Scattered | Broadcast | Held | Replicated | Number | Pickled


@dataclass(frozen=True)
class Picked:
    """Rows by index: a region of int64, one index a row of the call."""

    indices: Region


Rows = range | Picked  # of a call, as they travel


class Form(NamedTuple):
    """How inputs, which are leaves, become arguments: each one's nesting, and each leaf's library.

    What nests them has classes of the user's, perhaps: then it travels as the *pickle* of the trees.
    """

    trees: tuple[Tree, ...]
    libraries: tuple[str | None, ...]
    pickle: bytes = b""

    def build(self, leaves: Sequence[Any]) -> list[Any]:
        """The arguments."""
        values = iter(leaves)
        return [unflatten(tree, values) for tree in self.trees]


@dataclass(frozen=True)
class CallPlan:
    """One call of one function.

    ``spans[r]`` are the rows of the call that rank r computes, in ``slices`` pieces; ``unit`` is the
    number of rows that weigh 1 in a mean.  ``selection`` maps these rows to rows of scattered inputs,
    ``held[r]`` to rows of rank r's replicas: of held inputs, and of the variables ``sliced``.  A call
    without both has one row a rank.  The ranks of its ``world`` get the command; others have no rows.

    The pieces are *in_parts* if their number was left to Synkro: collectives would mean something else
    in each of them.

    The last arguments are passed by ``keywords``.  Inputs are the arguments themselves or, with a
    ``form``, leaves of them.
    """

    function: int
    inputs: tuple[Argument, ...]
    keywords: tuple[str, ...]
    form: Form | None
    selection: Rows | None
    spans: tuple[Span, ...]
    world: tuple[int, ...]
    slices: int
    unit: int
    subset: tuple[Any, ...] | None
    held: tuple[Rows, ...] | None = None
    sliced: tuple[int, ...] = ()
    in_parts: bool = False

    def regions(self) -> Iterator[Region]:
        """The arrays in shared memory that ranks read."""
        for argument in self.inputs:
            if isinstance(argument, Number | Pickled):
                yield argument.region
            elif isinstance(argument, Scattered | Broadcast) and isinstance(argument.array, Region):
                yield argument.array
            if isinstance(argument, Items):
                yield argument.items
        for rows in (self.selection, *(self.held or ())):
            if isinstance(rows, Picked):
                yield rows.indices

    @property
    def nccl(self) -> bool:
        """Whether GPUs reduce large outputs that lie on them."""
        return True

    @property
    def total_weight(self) -> int:
        """The sum of the weights of all pieces, by which a mean divides the weighted sum."""
        return (self.spans[-1][1] - self.spans[0][0]) // self.unit

    @property
    def participants(self) -> tuple[int, ...]:
        """The ranks that have rows."""
        return tuple(rank for rank, (start, stop) in enumerate(self.spans) if stop > start)


class Survey(NamedTuple):
    """A plan for collecting the values of variables from *participants*, without a call.

    The ranks of its *world* get the command.  Without *nccl*, values on GPUs are reduced in host memory.
    """

    participants: tuple[int, ...]
    world: tuple[int, ...]
    nccl: bool = True
    subset: tuple[Any, ...] | None = None

    @property
    def total_weight(self) -> int:
        """Every rank's value counts once."""
        return len(self.participants)
