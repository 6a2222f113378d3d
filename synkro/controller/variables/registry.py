"""The variables of a session, and the collectives of the main process over them.

Values that go to the workers travel like inputs, through a segment from which every rank takes its rows;
values that come back travel like outputs.  Collectives among the replicas move nothing through the
main process.
"""

from __future__ import annotations

import functools
import operator
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any, TypeVar
from typing import cast as cast_type

import numpy as np
from numpy.typing import ArrayLike

from ... import messages
from ...comms.ops import operation_named
from ...errors import CollectiveError, InvalidType, InvalidValue
from ...messages import Command, Create, Exchange, Fill, Generator, Inspect, Read, Write
from ...plan.batch import Indexed, Strided, select_any
from ...plan.call import Access, Picked, Survey
from ...plan.split import Span, split
from ...values.arrays import Array, as_numeric, cast, checked_dtype, native
from ...values.foreign import is_graph_shared
from ...values.variable import Variable
from ..data import Data
from ..engine.engine import Engine
from ..outgoing import Outgoing
from ..results.collector import Collection
from ..results.transfer import Outputs
from .mirror import Linked
from .shared import Kept, Shared

_SMALL = 1 << 16  # bytes of a value that stays in shared memory after it was sent, for the next one

Made = TypeVar("Made", bound=Shared)
Method = TypeVar("Method", bound=Callable[..., Any])


def _in_turn(method: Method) -> Method:
    """While *method* runs, the calls of other threads wait."""

    @functools.wraps(method)
    def alone(self: Variables, *args: Any, **kwargs: Any) -> Any:
        with self._engine.lock:
            return method(self, *args, **kwargs)

    return cast_type("Method", alone)


class Variables:
    """The variables of a session, and the collectives over them.

    Attributes:
        token: what variables of this session are known by on its workers.
        master_rank: the root of collectives that have one.
        rng: gives the generator of functions that run in the main process by themselves.
        linked: PyTensor's shared variables, which are variables here, too.
    """

    def __init__(
        self,
        engine: Engine,
        outputs: Outputs,
        token: str,
        master_rank: int,
        rng: Callable[[], np.random.Generator],
    ) -> None:
        self.token = token
        self.master_rank = master_rank
        self.rng = rng
        self.linked = Linked(self)
        self._named: list[weakref.ref[Shared]] = []
        self._buffers: dict[int, Outgoing] = {}  # those that brought variables' small values
        self._engine = engine
        self._outputs = outputs

    def shared(self, value: ArrayLike, name: str | None) -> Shared:
        """See ``api.shared``."""
        self._engine.require_ready()
        if name is not None and not isinstance(name, str):
            raise InvalidType(f"the name of a variable must be a string; got {name!r}.")
        called = f"the variable {name!r}" if name else "a variable"
        array = native(as_numeric(value, called))
        checked_dtype(array.dtype, called)
        made = self._made(Shared(self, self._engine.directory.number(), array.dtype, array.ndim, name))
        region, segment = Outgoing(self._engine).put(array, called)
        self._engine.run(Create(made.number, name, region), [(segment, Access.READ)])
        if name:
            self._named.append(weakref.ref(made))
        return made

    def keep(self, outputs: Sequence[messages.KeptOutput]) -> list[Kept]:
        """Handles of outputs of the last call, which stay on the workers."""
        handles = []
        for output in outputs:
            dtype = np.dtype(output.dtype)
            handles.append(self._made(Kept(self, output.number, dtype, 1 + len(output.tail), None)))
        self._engine.run(messages.Keep(tuple(outputs)))
        return handles

    def _made(self, variable: Made) -> Made:
        self._engine.directory.watch_variable(variable, variable.number)
        return variable

    def named(self) -> list[Shared]:
        """The variables that have a name and are in use, in the order in which they were made."""
        living = [(reference, reference()) for reference in self._named]
        self._named = [reference for reference, variable in living if variable is not None]
        return [variable for _, variable in living if variable is not None]

    def unused_name(self, label: str) -> str:
        """*label*, with a number behind it if variables in use are named by it already."""
        taken = {str(variable.name).partition(".")[0] for variable in self.named()}
        numbered = (f"{label}{number}" for number in count(2))
        return next(name for name in chain([label], numbered) if name not in taken)

    def name(self, variable: Shared, name: str) -> None:
        """Give a variable a name that had none."""
        variable.name = name
        self._named.append(weakref.ref(variable))

    # ── what functions ask ───────────────────────────────────────────────────────────────────────

    def check_updates(self, updates: Any) -> tuple[tuple[Shared, str], ...]:
        """``updates=`` as pairs of a variable and the operation that accumulates it over slices.

        Raises: InvalidType, InvalidValue.
        """
        if updates is None:
            return ()
        if isinstance(updates, Variable):
            updates = [updates]
        if not isinstance(updates, list | tuple):
            raise InvalidType(
                f"updates= takes a list of variables, or of pairs (variable, operation); got "
                f"{updates!r}."
            )
        pairs = []
        for entry in updates:
            variable, op = (
                entry if isinstance(entry, list | tuple) and len(entry) == 2 else (entry, "mean")
            )
            pairs.append((self.check(variable, "updates="), operation_named(op).name))
        _check_once([variable for variable, _ in pairs], "updates=")
        return tuple(pairs)

    def check_sliceable(self, variables: Any) -> tuple[Shared, ...]:
        """Raises: InvalidType, InvalidValue."""
        if variables is None:
            return ()
        if isinstance(variables, Variable):
            variables = [variables]
        if not isinstance(variables, list | tuple):
            raise InvalidType(f"sliceable_shareds= takes a list of variables; got {variables!r}.")
        for variable in variables:
            self._need_rows(self.check(variable, "sliceable_shareds="), "sliceable_shareds=")
        _check_once(variables, "sliceable_shareds=")
        return tuple(variables)

    def rows(self, variables: Mapping[str, Shared], function: str) -> list[int]:
        """How many rows each rank holds of all *variables*, which messages call by their keys.

        Raises: InvalidValue if they differ.
        """
        for called, variable in variables.items():
            self._need_rows(variable, called)
        shapes = self.shapes(list(variables.values()))
        lengths = {
            called: [shape[0] for shape in each] for called, each in zip(variables, shapes, strict=True)
        }
        first = next(iter(lengths.values()))
        if any(each != first for each in lengths.values()):
            listed = "; ".join(f"{called} has {each}" for called, each in lengths.items())
            raise InvalidValue(
                f"what the workers hold for the function {function!r} differs in its rows by rank: "
                f"{listed}. Give all the same."
            )
        return first

    # ── between the main process and the replicas ────────────────────────────────────────────────

    @_in_turn
    def broadcast(self, variables: Any, values: Any = None) -> None:
        """See ``api.broadcast``."""
        targets, _ = self._checked(variables)
        if values is None:
            self._exchange("broadcast", targets, "")
            return
        self._write(targets, self._values(targets, values), self._everywhere)

    @_in_turn
    def set_value(self, rank: Any, variables: Any, values: Any, batch: Any = None) -> None:
        """See ``api.set_value``."""
        place = self._rank(rank)
        targets, _ = self._checked(variables)
        arrays = self._values(targets, values)
        ranks = range(self._engine.size)
        if batch is None:
            self._write(targets, arrays, lambda array: [(0, 0) if r == place else None for r in ranks])
        else:
            self._write(
                targets, arrays, lambda n: [(0, n) if r == place else None for r in ranks], batch, True
            )

    @_in_turn
    def scatter(self, variables: Any, values: Any, batch: Any = None) -> None:
        """See ``api.scatter``."""
        targets, _ = self._checked(variables)
        for target in targets:
            self._need_rows(target, "scatter")
        arrays = self._values(targets, values)
        size = self._engine.size
        self._write(targets, arrays, lambda n: list(split(0, n, size)), batch, True)

    def _write(
        self,
        targets: Sequence[Shared],
        arrays: Sequence[Array],
        rows: Callable[[int], list[Span | None]],
        batch: Any = None,
        by_rows: bool = False,
    ) -> None:
        """Send *arrays* to the workers, and what becomes of them to PyTensor's shared variables."""
        self.linked.doubt(targets)
        self._fill(targets, arrays, rows, batch, by_rows)
        self.linked.pull(targets)

    def _fill(
        self,
        targets: Sequence[Shared],
        arrays: Sequence[Array],
        rows: Callable[[int], list[Span | None]],
        batch: Any = None,
        by_rows: bool = False,
    ) -> None:
        """Put *arrays* into replicas; ``rows(n)`` says which of so many rows each rank takes."""
        self._engine.require_ready()
        if self._engine.interrupted:
            self._engine.settle()
        fills, segments, buffers = [], [], []
        for target, array in zip(targets, arrays, strict=True):
            buffer = self._buffers.get(target.number) or Outgoing(self._engine)
            buffers.append(buffer)
            region, segment = buffer.put(array, target.called())
            segments.append((segment, Access.READ))
            selection: Strided | Picked | None = None
            length = 0
            if by_rows:
                chosen = select_any(batch, len(array), "batch")
                length = chosen.count
                if isinstance(chosen, Indexed):
                    indices, segment = Outgoing(self._engine).put(chosen.indices, "batch")
                    segments.append((segment, Access.READ))
                    selection = Picked(indices)
                else:
                    selection = chosen
            fills.append(Fill(target.number, region, selection, tuple(rows(length))))
        self._engine.run(Write(tuple(fills)), segments)
        for target, buffer in zip(targets, buffers, strict=True):
            self._keep(buffer, target)

    def send(self, targets: Sequence[Shared], arrays: Sequence[Array]) -> None:
        """Put *arrays* into all replicas of *targets*, and nowhere else."""
        self._fill(targets, arrays, self._everywhere)

    def fetch(self, targets: Sequence[Shared]) -> list[Array]:
        """The master rank's replicas."""
        found: list[Array] = self._replicas(targets, (self.master_rank,), None)
        return found

    @_in_turn
    def get_value(self, rank: Any, variables: Any) -> Any:
        """See ``api.get_value``."""
        place = self._rank(rank)
        return self._read(variables, (place,), None)

    @_in_turn
    def gather(self, variables: Any, nd_up: Any = 1) -> Any:
        """See ``api.gather``."""
        everyone = tuple(range(self._engine.size))
        targets, _ = self._checked(variables)
        if nd_up not in (0, 1) or isinstance(nd_up, bool):
            raise InvalidValue(f"nd_up must be 0 (concatenate) or 1 (stack); got {nd_up!r}.")
        if nd_up:
            self._need_alike(targets, "gather with nd_up=1", "nd_up=0 concatenates")
        else:
            for target in targets:
                self._need_rows(target, "gather with nd_up=0")
            self._need_alike(targets, "gather", "", rows_may_differ=True)
        return self._read(variables, everyone, "gather", raised=bool(nd_up))

    @_in_turn
    def reduce(self, variables: Any, op: Any = "mean", in_place: bool = True) -> Any:
        """See ``api.reduce``."""
        operation = operation_named(op)
        targets, _ = self._checked(variables)
        if in_place:
            self._exchange("reduce", targets, operation.name)
            return None
        self._need_alike(targets, "reduce", "")
        return self._read(variables, tuple(range(self._engine.size)), operation.name)

    # ── among the replicas ───────────────────────────────────────────────────────────────────────

    @_in_turn
    def all_reduce(self, variables: Any, op: Any = "mean") -> None:
        """See ``api.all_reduce``."""
        self._exchange("all_reduce", self._checked(variables)[0], operation_named(op).name)

    @_in_turn
    def all_gather(self, variables: Any) -> None:
        """See ``api.all_gather``."""
        targets, _ = self._checked(variables)
        for target in targets:
            self._need_rows(target, "all_gather")
        self._exchange("all_gather", targets, "")

    @_in_turn
    def get_shapes(self, variables: Any) -> Any:
        """See ``api.get_shapes``."""
        targets, single = self._checked(variables)
        shapes = self.shapes(targets)
        return shapes[0] if single else shapes

    @_in_turn
    def get_lengths(self, variables: Any) -> Any:
        """See ``api.get_lengths``."""
        targets, single = self._checked(variables)
        for target in targets:
            self._need_rows(target, "get_lengths")
        lengths = [[shape[0] for shape in shapes] for shapes in self.shapes(targets)]
        return lengths[0] if single else lengths

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self._engine.size

    def shapes(self, variables: Sequence[Shared]) -> list[list[tuple[int, ...]]]:
        """For each variable the shapes of its replicas, by rank."""
        replies = self._engine.run(Inspect(tuple(variable.number for variable in variables)))
        return [[reply.shapes[index] for reply in replies] for index in range(len(variables))]

    def generators(self, states: tuple[Any, ...] | None = None) -> list[Any]:
        """The states of the ranks' random generators, after setting them to *states* if given."""
        return [reply.generator for reply in self._engine.run(Generator(states))]

    # ── checks and transport ─────────────────────────────────────────────────────────────────────

    def check(self, variable: Any, called: str) -> Shared:
        """Raises: InvalidType, InvalidValue for what is no variable, or one of another session."""
        if is_graph_shared(variable):
            variable = self.linked.shared(variable)
        if not isinstance(variable, Shared):
            raise InvalidType(
                f"{called} takes worker variables, made by shared(); got {type(variable).__name__}."
            )
        if not variable.belongs_to(self):
            raise InvalidValue(
                f"{variable.called()} belongs to another session: make it anew in this one."
            )
        return variable

    def _checked(self, variables: Any) -> tuple[list[Shared], bool]:
        """*variables* as a list, and whether it was a single one."""
        self._engine.require_ready()
        single = not isinstance(variables, list | tuple)
        given = [variables] if single else list(variables)
        if not given:
            raise InvalidValue("a collective needs at least one variable; got an empty list.")
        checked = [self.check(variable, "a collective") for variable in given]
        _check_once(checked, "a collective")
        self.linked.push(checked)
        return checked, single

    def _values(self, targets: Sequence[Shared], values: Any) -> list[Array]:
        """One array a variable, of its dtype and number of dimensions."""
        given = list(values) if isinstance(values, list | tuple) and len(targets) > 1 else [values]
        if isinstance(values, list | tuple) and len(targets) == 1 and len(values) == 1:
            given = [values if np.ndim(values[0]) + 1 == targets[0].ndim else values[0]]
        if len(given) != len(targets):
            raise InvalidValue(
                f"{len(targets)} variables were given, but {len(given)} values: one for each."
            )
        arrays = []
        for target, value in zip(targets, given, strict=True):
            if value is None:
                raise InvalidValue(f"no value was given for {target.called()}.")
            plain = value.data if isinstance(value, Data) else value
            advice = f"convert the values yourself, with .astype({target.dtype.name!r})"
            array = cast(plain, target.dtype, False, target.called(), advice)
            if array.ndim != target.ndim:
                raise InvalidValue(
                    f"{target.called()} has {target.ndim} dimensions, got a value of {array.ndim} "
                    f"(shape {array.shape}); the number of dimensions cannot change."
                )
            arrays.append(array)
        return arrays

    def _rank(self, rank: Any) -> int:
        try:
            place = -1 if isinstance(rank, bool) else operator.index(rank)
        except TypeError:
            raise InvalidType(f"a rank must be an int; got {rank!r}, a {type(rank).__name__}.") from None
        if not 0 <= place < self._engine.size:
            raise InvalidValue(f"a rank must be from 0 to {self._engine.size - 1}; got {rank!r}.")
        return place

    def _need_rows(self, variable: Shared, called: str) -> None:
        if variable.ndim == 0:
            raise InvalidValue(f"{called}: {variable.called()} has no dimensions, so it has no rows.")

    def _need_alike(
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

    def _everywhere(self, _: int) -> list[Span | None]:
        return [(0, 0)] * self._engine.size

    def _keep(self, buffer: Outgoing, variable: Shared) -> None:
        """Keep the buffer that brought a value of *variable* for its next one, if it is small."""
        assert buffer.placed is not None
        if buffer.placed.segment.nbytes > _SMALL or self._engine.on_gpus:
            self._buffers.pop(variable.number, None)
            return
        if variable.number not in self._buffers:
            weakref.finalize(variable, self._buffers.pop, variable.number, None).atexit = False
        self._buffers[variable.number] = buffer

    def close(self) -> None:
        """Give memory back."""
        self._buffers.clear()

    def _exchange(self, kind: str, targets: Sequence[Shared], op: str) -> None:
        numbers = tuple(target.number for target in targets)
        self.linked.doubt(targets)
        try:
            self._engine.run(Exchange(kind, numbers, op, self.master_rank))
        except CollectiveError:  # the ranks know no names: say it in the user's words
            if kind != "broadcast":
                self._need_alike(targets, kind, "", rows_may_differ=kind == "all_gather")
            raise
        self.linked.pull(targets)

    def _read(
        self,
        variables: Any,
        ranks: tuple[int, ...],
        mode: str | None,
        raised: bool = False,
    ) -> Any:
        targets, single = self._checked(variables)
        found = self._replicas(targets, ranks, mode, raised)
        return found[0] if single else found

    def _replicas(
        self, targets: Sequence[Shared], ranks: tuple[int, ...], mode: str | None, raised: bool = False
    ) -> list[Any]:
        command: Command = Read(tuple(t.number for t in targets), ranks, mode, raised)
        replies = self._engine.run(command)
        modes = tuple([mode] * len(targets))
        values = Collection(self._outputs, "get_value", modes, Survey(ranks), replies).result()
        return [value[0] if mode is None else value for value in values]


def _check_once(variables: Sequence[Shared], keyword: str) -> None:
    if len({id(variable) for variable in variables}) < len(variables):
        raise InvalidValue(f"{keyword} names a variable twice: name each once.")


def new_token() -> str:
    """A name that no other session has."""
    return os.urandom(8).hex()
