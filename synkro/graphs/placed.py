"""A graph of PyTensor that runs once, over the devices that its variables are placed on.

All ranks run it at the same time, each its own steps (``cut``).  What goes from rank to rank goes by
``send`` and ``recv``.  An output comes from a rank that has it; new values of variables are put in place
on all ranks, or on none.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.traversal import ancestors, graph_inputs

from .. import here
from ..errors import InvalidValue, NotAvailable
from ..plan.outputs import DEFAULT
from .cut import Computation, Cut, Movement, Receive, Send
from .graph import Graph, GraphFunction
from .programs import Program, typed
from .transfers import TransferTo

Devices = Callable[[Sequence[int]], Any]  # what a user calls ranks


class PlacementRow(NamedTuple):
    """A line of the table: an operation, or a transfer between two devices.

    Attributes:
        operation: its name.
        device: where it runs, a list where each of these computes it for itself; of a transfer from
            where to where.
        nbytes: what a transfer has moved in the last call, in bytes; None before the first, and 0 for
            all other operations.
    """

    operation: str
    device: Any
    nbytes: int | None


class PlacementTable(tuple[PlacementRow, ...]):
    """The operations of a graph, in an order in which they could run one by one, and their devices."""

    __slots__ = ()

    def __repr__(self) -> str:
        lines = [("operation", "device", "bytes moved"), *map(_cells, self)]
        widths = [max(len(line[column]) for line in lines) for column in range(2)]
        return "\n".join(f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c}".rstrip() for a, b, c in lines)


def _cells(row: PlacementRow) -> tuple[str, str, str]:
    device = row.device  # a rank may be 0
    if isinstance(device, tuple | list):
        device = (" -> " if isinstance(device, tuple) else ", ").join(map(str, device))
    return row.operation, str(device), "?" if row.nbytes is None else str(row.nbytes or "")


def is_placed(graph: Graph, place_of: Callable[[Any], int | None]) -> bool:
    """Whether *graph* has transfers, or variables of which *place_of* knows where they are."""
    variables = (*graph.shared, *(variable for variable, _ in graph.updates))
    if any(place_of(variable) is not None for variable in variables):
        return True
    return any(each.owner and isinstance(each.owner.op, TransferTo) for each in ancestors(graph.targets))


class PlacedGraph(GraphFunction):
    """The function of the graph, for all ranks; it returns this rank's outputs, and the bytes it sent.

    In the main process by itself it is the plain function, of all values.
    """

    def __init__(
        self,
        graph: Graph,
        replicas: Mapping[Any, Any],
        place_of: Callable[[Any], int | None],
        rank_of: Callable[[Any], int],
        first: int,
        size: int,
        on_gpus: bool,
    ) -> None:
        """*replicas* are the worker variables for shared ones, *place_of* says where one is placed.

        *rank_of* gives the rank of a target.  What could be computed anywhere, and is wanted from one
        rank only, the *first* computes.  There are *size* ranks.

        Raises: InvalidValue, NotAvailable for what cannot be placed; InvalidValue as ``Graph``.
        """
        _check(graph)
        super().__init__(graph)
        count = self._count
        outputs, new = graph.targets[:count], graph.targets[count:]
        sources: dict[Any, int | None] = dict.fromkeys(graph.inputs)
        sources |= {variable: place_of(variable) for variable in graph.shared}
        updated = [(v, place_of(v), one) for (v, _), one in zip(graph.updates, new, strict=True)]
        everyone = range(size)
        wanted: list[tuple[Any, Sequence[int]]] = [(each, ()) for each in outputs]
        wanted += [(one, everyone if place is None else (place,)) for _, place, one in updated]

        def build(places: list[Any], targets: list[Any]) -> Program:
            made = graph.program(places, targets, on_gpus)
            made.warm(0)
            return made

        cut = Cut(sources, wanted, first, rank_of, build)
        keys = [cut.key(variable) for variable, _ in wanted]
        self._ends = cut.ends[:count]
        self._outputs = keys[:count]
        self._new = [
            (replicas[v], key, place) for (v, place, _), key in zip(updated, keys[count:], strict=True)
        ]
        self._steps, self._table = cut.steps, cut.table
        self._inputs = {name: cut.keys.get(v) for name, v in zip(graph.names, graph.inputs, strict=True)}
        self._held = [(cut.keys[v], replicas[v], place_of(v)) for v in graph.shared if v in cut.keys]
        self._constants = {key: v.data for v, key in cut.keys.items() if isinstance(v, Constant)}
        self._serial = functools.cache(lambda: graph.compiled(replicas, False))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_serial": None, "_table": ()}

    # ── on a rank ────────────────────────────────────────────────────────────────────────────────

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if here.rank is None:
            return self._alone(*args, **kwargs)
        rank, group = here.rank.number, here.rank.group
        given = dict(zip(self.names, args, strict=False)) | kwargs
        values = dict(self._constants)
        for name, key in self._inputs.items():
            if key is not None:
                values[key] = typed(given[name], self.input_types[name].dtype)
        for key, variable, place in self._held:
            if place in (None, rank):
                values[key] = typed(variable.value)
        sent = []
        for step in self._steps.get(rank, ()):
            if isinstance(step, Receive):
                values[step.key] = typed(group.recv(step.source))
            elif isinstance(step, Send):
                group.send(values[step.key], step.to)
                sent.append((step.key, step.to, values[step.key].nbytes))
            else:
                results = step.program(*[values[key] for key in step.takes])
                values.update(zip(step.gives, results, strict=True))
        if self._new:
            group.assign([(v, values[key]) for v, key, place in self._new if place in (None, rank)])
        mine = [values[key] for key, end in zip(self._outputs, self._ends, strict=True) if end == rank]
        return mine, sent

    # ── in the main process ──────────────────────────────────────────────────────────────────────

    def _alone(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs, by the plain function of this process, whose variables get their new values."""
        result = self._serial()(*args, **kwargs)
        if not self._new:
            return result
        outputs, new = result
        for (variable, _, _), value in zip(self._new, new, strict=True):
            variable.value = value
        return outputs

    def assembly(self) -> Assembly:
        """What makes the outputs, of what the ranks return."""
        return Assembly(self._outputs, self._ends, self._single, self._table)


@dataclass(eq=False)
class Assembly:
    """What the main process does with the replies of the ranks.

    *keys* are the numbers of the outputs, of which there may be a *single* one; *ends* are the ranks
    that have them.

    It is no part of the function: what a function holds is compared at each call, and sent when it has
    changed.
    """

    _keys: Sequence[int]
    _ends: Sequence[int]
    _single: bool
    _table: Sequence[Computation | Movement]
    _moved: dict[tuple[int, int], int] | None = None

    def outputs(self, replies: Sequence[Any]) -> Any:
        """The outputs, of what the ranks have returned."""
        self._moved = {(key, to): nbytes for _, sent in replies for key, to, nbytes in sent}
        parts = [iter(mine) for mine, _ in replies]
        outputs: list[Any] = []
        seen: set[int] = set()
        for key, end in zip(self._keys, self._ends, strict=True):
            value = next(parts[end])
            own = value.flags.writeable and key not in seen  # it is no input, and no other output
            outputs.append(value if own else np.array(value))
            seen.add(key)
        return outputs[0] if self._single else outputs

    def placement(self, devices: Devices) -> PlacementTable:
        """The table of operations; *devices* gives the names of ranks."""
        return PlacementTable(self._rows(devices))

    def _rows(self, devices: Devices) -> Iterator[PlacementRow]:
        for line in self._table:
            if isinstance(line, Movement):
                ways = devices([line.source]), devices([line.to])
                moved = None if self._moved is None else self._moved.get((line.key, line.to))
                yield PlacementRow(f"transfer of {line.name}", ways, moved)
            else:
                yield PlacementRow(line.name, devices(line.ranks), 0)


def _check(graph: Graph) -> None:
    """Raises: InvalidValue, NotAvailable for what a placed graph does not have."""
    name = graph.name
    modes = [graph.modes] if graph.single else graph.modes
    if any(mode is not DEFAULT for mode in modes) or any(op != "mean" for _, op in graph.updates):
        raise InvalidValue(
            f"the graph of the function {name!r} is placed on devices, so it runs once, on whole "
            f"inputs, and there is nothing to reduce: give its outputs and updates without operations."
        )
    if graph.streams:
        raise NotAvailable(
            f"the function {name!r} has random streams of PyTensor's, and is placed on devices: draw "
            f"the numbers in NumPy, and pass them as an input."
        )
    found = [v for v in graph_inputs(graph.targets) if not isinstance(v, Constant | SharedVariable)]
    missing = [variable for variable in found if variable not in graph.inputs]
    unused = [variable for variable in graph.inputs if variable not in found]
    ignored = graph.options.get("on_unused_input", "raise") != "raise"
    for variable in missing or (() if ignored else unused):
        what = "is needed, and is not listed" if missing else "is listed, and is not used"
        raise InvalidValue(
            f"the inputs of the function {name!r} do not fit its graph: {variable} {what}. (List all "
            f"variables that the graph needs, and no others, or say on_unused_input='ignore'.)"
        )
