"""The collectives of the main process over variables, and how values get to replicas and back.

Values for the workers lie in shared memory, like inputs, and every rank copies its rows from there.
Values of replicas come back like outputs.  Collectives among the replicas move nothing through the main
process.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from typing import cast as cast_type

import numpy as np

from ...comms.ops import operation_named
from ...errors import CollectiveError, InvalidValue, counted, ranks_in_words, shown
from ...ipc.channel import Lane
from ...messages import Exchange, Fill, Generator, Identify, Inspect, KeptOutput, Read, Write
from ...plan.batch import select_any
from ...plan.call import Picked, Rows, Survey
from ...plan.split import Span, split
from ...values.arrays import Array, cast, checked_bool, checked_int, of_other_ndim
from ..data.data import Data
from ..data.outgoing import Outgoing
from ..engine.engine import Engine
from ..engine.nesting import check_alone, operation
from ..results.collector import Collection
from ..results.transfer import Outputs
from .shared import Shared, check_rows

_SMALL = 1 << 16  # bytes up to which the buffer of a sent value is kept for the next one

Method = TypeVar("Method", bound=Callable[..., Any])


def in_turn(method: Method) -> Method:
    """Let nothing else use the workers while a method runs of an object that has an ``_engine``.

    Calls of other threads wait; those of a signal handler in the middle of it are refused.
    """

    @functools.wraps(method)
    @operation(unbroken=True)
    def alone(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls = self._engine.calls
        with self._engine.lock:
            self._engine.turns.wait_for_all()
            if calls:
                check_alone(self._engine, sys._getframe(1))
            calls.append(self)
            try:
                return method(self, *args, **kwargs)
            finally:
                calls.pop()

    return cast_type("Method", alone)


@dataclass(eq=False)
class Collectives:
    """The collectives of the main process over one variable or a list of them.

    Those that users call are methods of ``Session``, too.  Theirs is the form of Synkhronos: with
    ``nccl=False`` replicas on GPUs go through host memory.  The others, for variables and values that
    were checked, are the transport.

    *check* takes what a collective was given for variables, *bridge* those that it changes.

    Attributes:
        master_rank: the root of collectives that have one.
    """

    _engine: Engine
    _outputs: Outputs
    master_rank: int
    _check: Callable[[Sequence[Any]], list[Shared]]
    _bridge: Callable[[Sequence[Shared]], AbstractContextManager[None]]
    _keep_outputs: Callable[[Sequence[KeptOutput], tuple[int, ...]], Sequence[Any]]
    _buffers: dict[int, Outgoing] = field(default_factory=dict)  # for small variables, by number

    # ── from the main process to the replicas ────────────────────────────────────────────────────

    @in_turn
    def broadcast(self, shared_vars: Any, values: Any = None, nccl: bool = True) -> None:
        """Write *values* (arrays or ``Data``, one a variable) to all replicas of *shared_vars*.

        That is a variable, or a list of them.  Without values, write the master rank's replica to the
        others: on GPUs by NCCL, or through host memory with ``nccl=False``.

        Raises: InvalidType, InvalidValue.
        """
        targets, _ = self._checked(shared_vars)
        if values is None:
            self._exchange("broadcast", targets, "", nccl)
            return
        checked_bool(nccl, "nccl")
        self._write(targets, values)

    @in_turn
    def scatter(self, shared_vars: Any, values: Any, batch: Any = None) -> None:
        """Make each replica its rank's rows of *values*, or of the rows of them that *batch* selects.

        *shared_vars* is a variable, or a list of them, with as many *values*.  The rows are split as
        evenly as can be, the first ranks having one more.  Ranks may get none.

        Raises: InvalidType, InvalidValue, InvalidIndex.
        """
        targets, _ = self._checked(shared_vars, "scatter")
        self._require_everywhere(targets, "scatter")
        self._write(targets, values, lambda n: split(0, n, self._engine.size), batch, True)

    @in_turn
    def set_value(self, rank: int, shared_vars: Any, values: Any, batch: Any = None) -> None:
        """Write *values*, or the rows of them that *batch* selects, to the replicas of one *rank*.

        *shared_vars* is a variable, or a list of them, with as many *values*.

        Raises: InvalidType, InvalidValue, InvalidIndex.
        """
        targets, _ = self._checked(shared_vars)
        place = self._place(rank, targets)

        def rows(length: int) -> list[Span | None]:
            return [(0, length) if r == place else None for r in range(self._engine.size)]

        self._write(targets, values, rows, batch, batch is not None)

    # ── from the replicas to the main process ────────────────────────────────────────────────────

    @in_turn
    def get_value(self, rank: int, shared_vars: Any) -> Any:
        """The replica of one *rank*: an array, or a list of them if *shared_vars* is a list.

        Raises: InvalidType, InvalidValue, InvalidIndex.
        """
        targets, single = self._checked(shared_vars)
        return _one_or_all(self.fetch(targets, (self._place(rank, targets),)), single)

    @in_turn
    def gather(self, shared_vars: Any, nd_up: int = 1, nccl: bool = True) -> Any:
        """The replicas of *shared_vars*, a variable or a list of them, of all ranks, in their order.

        They are stacked along a new first axis (``nd_up=1``: they need the same shape) or concatenated
        along the first (``nd_up=0``: they may differ in their rows).  They always come through host
        memory, whatever *nccl* says.

        Raises: InvalidType, InvalidValue.
        """
        checked_bool(nccl, "nccl")
        if not isinstance(nd_up, int) or isinstance(nd_up, bool) or nd_up not in (0, 1):
            raise InvalidValue(f"nd_up must be 0 (concatenate) or 1 (stack); got {shown(nd_up)}.")
        targets, single = self._checked(shared_vars, "" if nd_up else "gather with nd_up=0")
        if nd_up:
            self._check_alike(targets, "gather with nd_up=1", "nd_up=0 concatenates")
        else:
            self._check_alike(targets, "gather", "", rows_may_differ=True)
        return _one_or_all(self.fetch(targets, None, "gather", raised=bool(nd_up)), single)

    @in_turn
    def reduce(self, shared_vars: Any, op: str = "avg", in_place: bool = True, nccl: bool = True) -> Any:
        """Make the master rank's replica the plain mean ("avg"), "sum", "prod", "max" or "min" of all.

        *op* says which; *shared_vars* is a variable, or a list of them.  With ``in_place=False``, return
        that instead.  On GPUs it goes through host memory with ``nccl=False``.

        Raises: InvalidType, InvalidValue.
        """
        operation = operation_named(op)
        targets, single = self._checked(shared_vars)
        for target in targets:
            operation.check(target.dtype, f"reduce of {target.called()}")
        if checked_bool(in_place, "in_place"):
            self._exchange("reduce", targets, operation.name, nccl)
            return None
        self._check_alike(targets, "reduce", "")
        return _one_or_all(self.fetch(targets, None, operation.name, nccl=nccl), single)

    @in_turn
    def get_shapes(self, shared_vars: Any) -> Any:
        """The shape of each rank's replica: a list, or a list of lists if *shared_vars* is a list."""
        targets, single = self._checked(shared_vars)
        return _one_or_all(self.shapes(targets), single)

    @in_turn
    def get_lengths(self, shared_vars: Any) -> Any:
        """How many rows each rank's replica has: a list, or one for each if *shared_vars* is a list."""
        targets, single = self._checked(shared_vars, "get_lengths")
        lengths = [[shape[0] for shape in shapes] for shapes in self.shapes(targets)]
        return _one_or_all(lengths, single)

    @in_turn
    def are_alike(self, variable: Shared) -> bool:
        """Whether all replicas are equal to the bit: they are not brought here."""
        targets, _ = self._checked(variable)
        lane = self._lane(targets)
        command = Identify(targets[0].number)
        return len({reply.digest for reply in self._engine.run(command, lane=lane)}) == 1

    # ── among the replicas ───────────────────────────────────────────────────────────────────────

    @in_turn
    def all_reduce(self, shared_vars: Any, op: str = "avg", nccl: bool = True) -> None:
        """Make every replica the plain mean ("avg"), "sum", "prod", "max" or "min" of all.

        *op* says which; *shared_vars* is a variable, or a list of them.  On GPUs it goes through host
        memory with ``nccl=False``.

        Raises: InvalidType, InvalidValue.
        """
        operation = operation_named(op)
        targets, _ = self._checked(shared_vars)
        for target in targets:
            operation.check(target.dtype, f"all_reduce of {target.called()}")
        self._exchange("all_reduce", targets, operation.name, nccl)

    @in_turn
    def all_gather(self, shared_vars: Any, nccl: bool = True) -> None:
        """Make every replica the concatenation of all, along axis 0 in the order of the ranks.

        *shared_vars* is a variable, or a list of them.  On GPUs it goes through host memory with
        ``nccl=False``.

        Raises: InvalidType, InvalidValue.
        """
        self._exchange("all_gather", self._checked(shared_vars, "all_gather")[0], "", nccl)

    # ── transport ────────────────────────────────────────────────────────────────────────────────

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._engine.size

    def _write(self, targets: Sequence[Shared], values: Any, *how: Any) -> None:
        """``send`` what users gave, after checks; PyTensor's variables get it, too."""
        arrays = self._values(targets, values)
        with self._bridge(targets):
            self.send(targets, arrays, *how)

    def send(
        self,
        targets: Sequence[Shared],
        arrays: Sequence[Array],
        rows: Callable[[int], Sequence[Span | None]] | None = None,
        batch: Any = None,
        by_rows: bool = False,
    ) -> None:
        """Put *arrays* into replicas of *targets*: whole, or *by_rows*, the rows that *batch* selects.

        ``rows(n)`` says which of n rows each rank takes, with None for a rank whose replica stays as it
        is.  By default all ranks take all.
        """
        self._engine.require_ready()
        self._engine.settle()
        fills, buffers, indices = [], [], []
        for target, array in zip(targets, arrays, strict=True):
            buffer = self._buffers.get(target.number) or Outgoing(self._engine)
            buffers.append(buffer)
            region = buffer.put(array, target.called()).region
            selection: Rows | None = None
            length = 0
            if by_rows:
                chosen = select_any(batch, len(array), "batch")
                length = len(chosen)
                if not isinstance(chosen, range):
                    indices.append(Outgoing(self._engine))
                    selection = Picked(indices[-1].put(chosen, "batch").region)
                else:
                    selection = chosen
            spans = rows(length) if rows else [(0, length)] * self.size
            fills.append(Fill(target.number, region, selection, tuple(spans)))
        self._engine.run(Write(tuple(fills)), lane=self._lane(targets))
        for target, buffer in zip(targets, buffers, strict=True):
            self._keep(buffer, target)

    def fetch(
        self,
        targets: Sequence[Shared],
        ranks: tuple[int, ...] | None,
        mode: str | None = None,
        raised: bool = False,
        nccl: bool = True,
    ) -> list[Any]:
        """For each of *targets* its replicas on *ranks* (None: all that have it), merged by *mode*.

        Without a mode it is the replica of the first rank.  *raised* adds a first axis before merging.
        """
        lane = self._lane(targets)
        survey = Survey(ranks or lane.ranks, lane.ranks, checked_bool(nccl, "nccl"))
        command = Read(tuple(target.number for target in targets), survey.participants, mode, raised)
        replies = dict(zip(lane.ranks, self._engine.run(command, lane=lane), strict=True))
        modes = (mode,) * len(targets)
        collection = Collection(self._outputs, "get_value", modes, survey, replies, self._keep_outputs)
        return [value[0] if mode is None else value for value in collection.result()]

    def shapes(
        self, variables: Sequence[Shared], ranks: tuple[int, ...] | None = None
    ) -> list[list[tuple[int, ...]]]:
        """For each variable the shapes of its replicas on *ranks*, or on all that have it."""
        command = Inspect(tuple(variable.number for variable in variables))
        replies = self._engine.run_beside(command, ranks or self._lane(variables).ranks)
        return [[reply.shapes[index] for reply in replies] for index in range(len(variables))]

    def generators(self, states: tuple[Any, ...] | None = None) -> list[Any]:
        """The states of the ranks' random generators, after setting them to *states* if given."""
        return [reply.generator for reply in self._engine.run(Generator(states))]

    def close(self) -> None:
        """Give memory back."""
        self._buffers.clear()

    def _exchange(self, kind: str, targets: Sequence[Shared], op: str, nccl: bool) -> None:
        self._require_everywhere(targets, kind)
        numbers = tuple(target.number for target in targets)
        command = Exchange(kind, numbers, op, self.master_rank, checked_bool(nccl, "nccl"))
        with self._bridge(targets):
            try:
                self._engine.run(command)
            except CollectiveError:  # the ranks know no names: say it in the user's words
                if kind != "broadcast":
                    self._check_alike(targets, kind, "", rows_may_differ=kind == "all_gather")
                raise

    def _keep(self, buffer: Outgoing, variable: Shared) -> None:
        """Keep the buffer that brought a value of *variable* for its next one, if it is small."""
        assert buffer.placed is not None
        if buffer.placed.segment.nbytes > _SMALL or self._engine.on_gpus:
            self._buffers.pop(variable.number, None)
            return
        if variable.number not in self._buffers:
            weakref.finalize(variable, self._buffers.pop, variable.number, None).atexit = False
        self._buffers[variable.number] = buffer

    # ── checks ───────────────────────────────────────────────────────────────────────────────────

    def _checked(self, variables: Any, by_rows: str = "") -> tuple[list[Shared], bool]:
        """*variables* as a list, and whether there was one outside of a list.

        They must have rows if *by_rows* is given, the verb that needs them.
        """
        self._engine.require_ready()
        single = not isinstance(variables, list | tuple)
        given = [variables] if single else list(variables)
        if not given:
            raise InvalidValue("a collective needs at least one variable; got an empty list.")
        checked = self._check(given)
        if by_rows:
            for variable in checked:
                check_rows(variable, by_rows)
        return checked, single

    def _place(self, rank: Any, variables: Sequence[Shared]) -> int:
        place = checked_int(rank, "a rank", 0, self._engine.size - 1)
        for variable in variables:
            if place not in variable.ranks:
                raise InvalidValue(
                    f"{variable.called()} is on {ranks_in_words(variable.ranks)} alone, and not on rank "
                    f"{place}."
                )
        return place

    def _lane(self, variables: Sequence[Shared]) -> Lane:
        """The lane of the ranks that have *variables*.

        Raises: InvalidValue if they are on different ones.
        """
        ranks = {variable.ranks for variable in variables}
        if len(ranks) > 1:
            listed = ", ".join(f"{each.called()} on {ranks_in_words(each.ranks)}" for each in variables)
            raise InvalidValue(
                f"one call takes variables that are on the same ranks, and got {listed}: make one for "
                f"each."
            )
        return self._engine.channel.lane(*ranks)

    def _require_everywhere(self, variables: Sequence[Shared], kind: str) -> None:
        for variable in variables:
            if len(variable.ranks) < self.size:
                raise InvalidValue(
                    f"{kind} takes variables that all ranks have, and {variable.called()} is on "
                    f"{ranks_in_words(variable.ranks)} alone: use its get_value(), set_value() and "
                    f"transfer()."
                )

    def _values(self, targets: Sequence[Shared], values: Any) -> list[Array]:
        """*values* as one array a variable, of its dtype and number of dimensions."""
        given = list(values) if isinstance(values, list | tuple) and len(targets) > 1 else [values]
        if isinstance(values, list | tuple) and len(targets) == 1 and len(values) == 1:
            given = [values if np.ndim(values[0]) + 1 == targets[0].ndim else values[0]]
        if len(given) != len(targets):
            raise InvalidValue(
                f"{counted(len(targets), 'variable')} got {counted(len(given), 'value')}: give one each."
            )
        arrays = []
        for target, value in zip(targets, given, strict=True):
            if value is None:
                raise InvalidValue(f"no value was given for {target.called()}.")
            plain = value.data if isinstance(value, Data) else value
            advice = f"convert the values yourself, with .astype({target.dtype.name!r})"
            array = cast(plain, target.dtype, False, target.called(), advice)
            if array.ndim != target.ndim:
                raise of_other_ndim(array, target.ndim, target.called(), "a value")
            arrays.append(array)
        return arrays

    def _check_alike(
        self, variables: Sequence[Shared], called: str, advice: str, rows_may_differ: bool = False
    ) -> None:
        """Raises: InvalidValue if the replicas of a variable differ in their shapes."""
        for variable, shapes in zip(variables, self.shapes(variables), strict=True):
            alike = {shape[1:] for shape in shapes} if rows_may_differ else set(shapes)
            if len(alike) > 1:
                listed = ", ".join(f"{shape} on rank {rank}" for rank, shape in enumerate(shapes))
                hint = f" ({advice})" if advice else ""
                raise InvalidValue(
                    f"{called}: the replicas of {variable.called()} have different shapes, {listed}: "
                    f"they must be the same{' but for the number of rows' * rows_may_differ}{hint}."
                )


def _one_or_all(values: list[Any], single: bool) -> Any:
    return values[0] if single else values
