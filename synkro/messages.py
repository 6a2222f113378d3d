"""The commands and replies: the only vocabulary between the main process and its workers.

Every command goes to every rank, or to those of a lane (``ipc.channel``), and a rank answers each with
exactly one reply.

    Start       → Started here is who you are and where you run
    Distribute  → Ack     load these functions
    Renew       → Ack     put these contents into objects that functions have brought along
    Assign      → (the reply to the command after it)  put these numbers and strings into such objects
    Compare     → Compared  say which of these objects you have changed
    Fetch       → Copied  return a copy of an object
    Preserve    → Ack     keep what objects and variables hold, or put it back
    Call        → Done    run a function on your rows
    Work        → Ack     run a function on items of a queue until there are no more
    Keep        → Ack     keep outputs of the last call as these variables
    Create      → Ack     these variables exist from now on
    Move        → Ack     send a replica to another rank, or receive it
    Write       → Ack     put these rows into your replicas
    Read        → Done    return your replicas, as if they were outputs of a function
    Inspect     → Shapes  return the shapes of your replicas
    Identify    → Identity  return the digest of your replica
    Exchange    → Ack     take part in a collective over your replicas
    Reseed      → Ack     seed all your random generators
    Generator   → GeneratorState  return the state of your random generator, or set it
    Store       → Ack     copy outputs of the last call into shared memory
    Reduce      → Ack     reduce your share of what all ranks have stored
    Export      → Exported  write your share of an array in shared memory to a file
    Deliver     → (the reply that was too long)
    Indirect    → (the reply to the command that it points to)
    Release     → Ack     do the housekeeping, and nothing else
    Exit        → no reply: the worker ends

Any command may be answered by Failed, and a reply that does not fit its place by TooLong.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

from .plan.call import Access, CallPlan, Region, Rows
from .plan.outputs import Tree
from .plan.split import Span
from .values.arrays import Code


class Message:
    """Equal to one of its class with equal contents.

    This is written once: a frozen dataclass, which makes six methods, takes each process 0.4 ms.
    """

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]


class Command(Message):
    """What the main process asks all ranks to do."""


class Reply(Message):
    """What a rank answers."""


class Phase(IntEnum):
    """What a worker is doing, for errors of time-outs and for progress bars.

    Those from BEGINNING to COMMUNICATING appear in traces only.
    """

    WAITING = 0
    LOADING = 1
    RUNNING = 2
    STORING = 3
    REDUCING = 4
    MERGING = 5
    BEGINNING = 6
    FEEDING = 7
    COMMUNICATING = 8
    TAKING = 9
    TASK = 10


class Attach(NamedTuple):
    """Map a segment, whose descriptor comes over the socket, under this number.

    *file* says whether it is a file of the user's, which others may write to.
    """

    segment: int
    nbytes: int
    access: Access
    file: bool


class Housekeeping(NamedTuple):
    """What a worker does before it handles the command itself.

    *drop* has the numbers of segments, functions and variables that are gone; no two have the same.
    """

    attach: tuple[Attach, ...] = ()
    drop: tuple[int, ...] = ()


class Gpus(NamedTuple):
    """The GPU of each rank, by its index among the visible ones, and what to do with all of them.

    *linked* says whether NCCL should connect them, *preallocate* which fraction of a GPU's memory its
    rank takes at once.
    """

    indices: tuple[int, ...]
    linked: bool
    preallocate: float | None


@dataclass(eq=False, repr=False)
class Start(Command):
    """Who runs where: for each rank the core to stay on (None: any), and its GPU, if they have any.

    *token* names the session in its pickled variables, *seed* is the entropy of all ranks' generators,
    *seeded* says whether the program gave it: then it seeds the generators of their processes, too;
    *profiles* are the files to which the ranks write profiles of themselves when they end, or None, and
    *verbose* says whether they print status lines; *versions* are those of all segments
    (``memory.versions``), where somebody asks for them.
    """

    token: str
    seed: Any
    seeded: bool
    master_rank: int
    outbox: Region
    cores: tuple[int | None, ...]
    gpus: Gpus | None
    profiles: tuple[str, ...] | None
    verbose: bool
    versions: Region | None


class Parcel(NamedTuple):
    """A stream of pickles, and its big buffers, which lie in a segment, as (start, stop)."""

    stream: bytes
    segment: int | None
    buffers: tuple[tuple[int, int], ...]


@dataclass(eq=False, repr=False)
class Distribute(Command):
    """Load the functions of a parcel, each with its number and a ``FunctionSpec``.

    *settings* are those of libraries, by library.
    """

    sys_path: tuple[str, ...]
    cwd: str
    settings: dict[str, dict[str, Any]]
    parcel: Parcel


@dataclass(eq=False, repr=False)
class Renew(Command):
    """Take over a parcel without functions."""

    parcel: Parcel


@dataclass(eq=False, repr=False)
class Assign(Command):
    """Put numbers and strings into objects, and do the command *then*, which is pickled.

    *entries* are the new ones of each object, by its number.
    """

    entries: dict[int, dict[Any, Any]]
    then: bytes


@dataclass(eq=False, repr=False)
class Compare(Command):
    """The parcel lists objects: their numbers, what they held when they came, what they are to hold."""

    parcel: Parcel


@dataclass(eq=False, repr=False)
class Fetch(Command):
    """Object *number*, from *rank*."""

    number: int
    rank: int


@dataclass(eq=False, repr=False)
class Preserve(Command):
    """Put back what was kept, if *restore*; if *keep*, keep *objects*, all variables and generators.

    While they are kept, functions may not use collectives, and not draw from ``rng()``.
    """

    objects: tuple[int, ...]
    restore: bool
    keep: bool


@dataclass(eq=False, repr=False)
class FunctionSpec(Message):
    """What a worker knows of a function.

    *updates* are the variables whose new values it returns beside its outputs, each with its operation.
    *finish* is called on every rank after its last piece, with the weight of its rows; it may use
    collectives.
    """

    name: str
    fn: Any
    outputs: Any
    updates: tuple[tuple[Any, str], ...] = ()
    finish: Any = None


@dataclass(eq=False, repr=False)
class Call(Command):
    plan: CallPlan


@dataclass(eq=False, repr=False)
class Work(Command):
    """Take items of a queue, and run a function on each.

    *plan* is that of a call with what all items have in common.  *queue* numbers the descriptors of the
    queue.  Item i's random generator is a stream of *seed*, of this map's *number*, and of i.  *objects*
    are those that the function uses: the paths, by number.  If *ordered*, each result is given back at
    once, else small ones together.
    """

    plan: CallPlan
    queue: tuple[int, ...]
    seed: int
    number: int
    objects: dict[int, str]
    ordered: bool


class KeptOutput(NamedTuple):
    """Leaf *leaf* of the last call's outputs becomes variable *number*.

    A rank that took no part has no rows of it: an array of *dtype*, of shape ``(0, *tail)``.
    """

    leaf: int
    number: int
    tail: tuple[int, ...]
    dtype: Code


@dataclass(eq=False, repr=False)
class Keep(Command):
    outputs: tuple[KeptOutput, ...]


@dataclass(eq=False, repr=False)
class Create(Command):
    """Variable *number* with the contents of *value*, a copy on every rank."""

    number: int
    name: str | None
    value: Region


@dataclass(eq=False, repr=False)
class Move(Command):
    """Variable *number* on rank *target* with the contents that *variable* has on rank *source*."""

    variable: int
    source: int
    number: int
    target: int


class Fill(NamedTuple):
    """A variable's new contents: on rank r the rows ``rows[r]`` of *source*; None: they do not change.

    Without a *selection* the ranks that have rows take all of *source*, whatever its dimensions.
    """

    variable: int
    source: Region
    selection: Rows | None
    rows: tuple[Span | None, ...]


@dataclass(eq=False, repr=False)
class Write(Command):
    fills: tuple[Fill, ...]


@dataclass(eq=False, repr=False)
class Read(Command):
    """The replicas on *ranks*, each with a new first dimension if *raised*, reduced by *mode*."""

    variables: tuple[int, ...]
    ranks: tuple[int, ...]
    mode: str | None
    raised: bool


@dataclass(eq=False, repr=False)
class Inspect(Command):
    variables: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Identify(Command):
    variable: int


@dataclass(eq=False, repr=False)
class Exchange(Command):
    """A collective over replicas, in place: all_reduce, reduce, broadcast or all_gather.

    Without *nccl*, replicas on GPUs go through host memory.
    """

    kind: str
    variables: tuple[int, ...]
    op: str
    root: int
    nccl: bool


@dataclass(eq=False, repr=False)
class Reseed(Command):
    """Seed all random generators anew; *seed* is the entropy of all ranks'."""

    seed: int


@dataclass(eq=False, repr=False)
class Generator(Command):
    """New states of the ranks' generators, one a rank; None to leave them."""

    states: tuple[Any, ...] | None


class StoredPiece(NamedTuple):
    """Piece *piece* of leaf *leaf* of the last call's outputs goes to *region*.

    If it is *staged*, a ``Reduce`` reads it there, on the ranks of its host, and nobody else.
    """

    leaf: int
    piece: int
    region: Region
    staged: bool


@dataclass(eq=False, repr=False)
class Store(Command):
    """*placements* has a tuple for each rank."""

    placements: tuple[tuple[StoredPiece, ...], ...]


class Reduction(NamedTuple):
    """Reduce *sources*, in their order, with operation *op* into *target*; each rank does its share.

    ``owners[i]`` has stored source i.  A mean's sum is divided by *divisor*.  In place of sources in
    shared memory there may be a *leaf* of the last call's outputs, which waits on the ranks' GPUs.
    """

    op: str
    divisor: int
    owners: tuple[int, ...]
    sources: tuple[Region, ...]
    target: Region
    leaf: int = -1


@dataclass(eq=False, repr=False)
class Reduce(Command):
    """*ranks* do it together: where the reductions are of leaves, those that have them."""

    reductions: tuple[Reduction, ...]
    ranks: tuple[int, ...]


@dataclass(eq=False, repr=False)
class Export(Command):
    """Write rows of *source* to the zarr array *path* of a *store*: rank r those of ``spans[r]``.

    It has to have the *layout* that the main process has seen.
    """

    store: str
    path: str
    layout: str
    source: Region
    spans: tuple[Span, ...]


@dataclass(eq=False, repr=False)
class Deliver(Command):
    region: Region


@dataclass(eq=False, repr=False)
class Indirect(Command):
    region: Region


@dataclass(eq=False, repr=False)
class Release(Command):
    """Do the housekeeping, and nothing else."""


@dataclass(eq=False, repr=False)
class Exit(Command):
    """End."""


@dataclass(eq=False, repr=False)
class Ack(Reply):
    """The command is done."""


@dataclass(eq=False, repr=False)
class Started(Reply):
    """*problem* says why NCCL, if it should, does not connect the ranks, or is empty."""

    problem: str


class Piece(NamedTuple):
    """One array: in the rank's outbox at *offset*, or, if that is None, waiting in the worker."""

    shape: tuple[int, ...]
    dtype: Code
    offset: int | None


class Leaf(NamedTuple):
    """One output of one rank: its own dtype, and its pieces in the dtype of their reduction.

    A reduced leaf has one piece; a gathered one, or one without reduction, a piece a slice.
    """

    dtype: Code
    pieces: tuple[Piece, ...]


@dataclass(eq=False, repr=False)
class Done(Reply):
    """The outputs of a call; ``leaves`` is None for a rank that had no rows."""

    tree: Tree
    leaves: tuple[Leaf, ...] | None


@dataclass(eq=False, repr=False)
class Exported(Reply):
    """Rows of the span are written up to *done*, and not touched from *reached* on.

    *errno* and *problem* say why not all are written, or are 0 and empty.
    """

    done: int
    reached: int
    errno: int
    problem: str


@dataclass(eq=False, repr=False)
class Shapes(Reply):
    shapes: tuple[tuple[int, ...], ...]


@dataclass(eq=False, repr=False)
class Identity(Reply):
    digest: bytes


@dataclass(eq=False, repr=False)
class Compared(Reply):
    """For each object, whether it is neither what it was nor what it is to be."""

    differs: tuple[bool, ...]


@dataclass(eq=False, repr=False)
class Copied(Reply):
    """The object, pickled; of other ranks empty."""

    pickle: bytes


@dataclass(eq=False, repr=False)
class GeneratorState(Reply):
    generator: Any


@dataclass(eq=False, repr=False)
class TooLong(Reply):
    nbytes: int


@dataclass(eq=False, repr=False)
class Failed(Reply):
    """An exception in a worker, as far as it can travel.

    ``usage`` says that it is one of our own errors of use, to be raised as it is; ``pickled`` is
    the exception itself, where it survives a round trip, and ``kinds`` are its classes.  ``strays``
    says that another rank's failure was the cause.  ``traceback`` is for ``packing.tracebacks``.
    ``item`` is the number of the item on which a task failed.
    """

    function: str | None
    summary: str
    traceback: bytes
    pickled: bytes | None
    kinds: tuple[bytes, ...]
    usage: bool
    strays: bool
    item: int | None
