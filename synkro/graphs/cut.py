"""A graph of PyTensor, cut into parts for the devices that its variables lie on.

    homes      a variable is on one rank, or everywhere: inputs, constants, and what is computed of these
               alone.  An operation runs where its first placed input is; a transfer says another place.
    needs      from the results back: what each rank computes, and which values go from rank to rank
    levels     a value that came from another rank is one level higher than there
    steps      of a rank, level by level: receive, compute what others wait for, send, compute the rest

What a rank computes in one step is one compiled function.  A value moves to each rank at most once.

Sending waits while ``SLOTS`` messages from one rank to another are unread.  So messages have an order:
by *turn*, a level and a number among those from one rank to another, and then by sender.  Before a rank
sends or computes it reads, in this order, what it needs, and all but the last few messages of lower
turns: who waits, waits for one that is at a lower turn, and none waits for ever.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

from pytensor.graph.basic import Constant
from pytensor.graph.traversal import io_toposort

from .programs import Program
from .transfers import TransferBack, TransferTo

SLOTS = 8  # as on the board of comms


class Receive(NamedTuple):
    """The next message from the rank *source* is the value *key*."""

    key: int
    source: int


class Run(NamedTuple):
    """Compute the values *gives* of the values *takes*."""

    program: Program
    takes: tuple[int, ...]
    gives: tuple[int, ...]


class Send(NamedTuple):
    """Send the value *key* to the rank *to*."""

    key: int
    to: int


Step = Receive | Run | Send

Turn = tuple[int, int]  # a level, and a number


class Computation(NamedTuple):
    """An operation of the graph, and the ranks that it runs on."""

    name: str
    ranks: tuple[int, ...]


class Movement(NamedTuple):
    """The value *key*, called *name*, goes from one rank to another."""

    name: str
    key: int
    source: int
    to: int


class Cut:
    """The parts of a graph.

    Attributes:
        keys: the number of each variable that a rank holds between steps.
        ends: where each of the wanted variables is when all is done.
        steps: what each rank does, by rank.
        table: operations and movements, in an order in which they could run one after the other.
    """

    def __init__(
        self,
        sources: Mapping[Any, int | None],
        wanted: Sequence[tuple[Any, Sequence[int]]],
        first: int,
        rank_of: Callable[[Any], int],
        build: Callable[[list[Any], list[Any]], Program],
    ) -> None:
        """*sources* are the inputs and shared variables, and the rank that has each; None: all have it.

        *wanted* are variables, and the ranks that have to have each in the end; without any, the one
        that has it, or *first* if that could be any.  *rank_of* gives the rank of a target, *build*
        compiles.
        """
        self._rank_of, self._build = rank_of, build
        self._homes: dict[Any, int | None] = dict(sources)
        self._same: dict[Any, Any] = {}  # what the result of a transfer is
        nodes = [node for node in io_toposort(list(sources), [v for v, _ in wanted]) if self._add(node)]
        found = chain(sources, *(node.outputs for node in nodes))
        self._order = {variable: number for number, variable in enumerate(found)}
        self._computed: dict[int, dict[Any, None]] = defaultdict(dict)  # by rank: nodes
        self._moved: dict[tuple[int, int], list[Any]] = defaultdict(list)  # from one rank to another
        self._kept: dict[int, set[Any]] = defaultdict(set)  # by rank: what it has to have in the end
        self.ends: Final = [self._end(variable, ranks, first) for variable, ranks in wanted]
        self._levels: dict[tuple[int, Any], int] = {}  # of a variable on a rank
        self._set_levels(nodes)
        self.keys: dict[Any, int] = {}
        ranks = sorted({*self._computed, *(rank for pair in self._moved for rank in pair)})
        self.steps: Final = {rank: list(self._steps(rank)) for rank in ranks}
        self.table: Final = list(self._lines(nodes))

    def key(self, variable: Any) -> int:
        """The number of a variable that a rank holds."""
        return self.keys.setdefault(self._itself(variable), len(self.keys))

    # ── homes ────────────────────────────────────────────────────────────────────────────────────

    def _add(self, node: Any) -> bool:
        """Find the place of a node; returns whether it computes something."""
        places = [self._homes.get(variable) for variable in node.inputs]
        placed = [place for place in places if place is not None]
        if isinstance(node.op, TransferTo):
            home: int | None = self._rank_of(node.op.target)
        elif isinstance(node.op, TransferBack) and places[1] is not None:
            home = places[1]
        else:
            home = placed[0] if placed else None
        self._homes.update(dict.fromkeys(node.outputs, home))
        moves = isinstance(node.op, TransferTo | TransferBack)
        if moves:
            self._same[node.outputs[0]] = self._itself(node.inputs[0])
        return not moves

    def _itself(self, variable: Any) -> Any:
        """The variable whose value *variable* has: the same, but for results of transfers."""
        return self._same.get(variable, variable)

    def _operands(self, node: Any) -> list[Any]:
        return [self._itself(v) for v in node.inputs if not isinstance(self._itself(v), Constant)]

    # ── needs ────────────────────────────────────────────────────────────────────────────────────

    def _end(self, variable: Any, ranks: Sequence[int], first: int) -> int:
        """Have *variable* on *ranks*; returns one that has it."""
        home = self._homes.get(variable)
        ranks = ranks or [first if home is None else home]
        for rank in ranks:
            self._kept[rank].add(self._itself(variable))
            self._need(self._itself(variable), rank)
        return ranks[0]

    def _need(self, variable: Any, rank: int) -> None:
        todo = [(variable, rank)]
        while todo:
            variable, rank = todo.pop()
            home = self._homes.get(variable)
            if home is not None and home != rank:
                if variable not in self._moved[home, rank]:
                    self._moved[home, rank].append(variable)
                    todo.append((variable, home))
            elif variable.owner is not None and variable.owner not in self._computed[rank]:
                self._computed[rank][variable.owner] = None
                todo += [(each, rank) for each in self._operands(variable.owner)]

    # ── levels ───────────────────────────────────────────────────────────────────────────────────

    def _set_levels(self, nodes: Sequence[Any]) -> None:
        for node in nodes:
            for rank in self._ranks_of(node):
                level = max((self._level(each, rank) for each in self._operands(node)), default=0)
                self._levels.update({(rank, output): level for output in node.outputs})
        for (source, _), moved in self._moved.items():  # in the order in which they are sent
            moved.sort(key=lambda v: (self._level(v, source), self._order[v]))

    def _level(self, variable: Any, rank: int) -> int:
        home = self._homes.get(variable)
        if home is not None and home != rank:
            return self._levels.get((home, variable), 0) + 1
        return self._levels.get((rank, variable), 0)

    def _ranks_of(self, node: Any) -> tuple[int, ...]:
        return tuple(sorted(rank for rank, computed in self._computed.items() if node in computed))

    # ── steps ────────────────────────────────────────────────────────────────────────────────────

    def _steps(self, rank: int) -> Iterator[Step]:
        own = sorted(self._computed[rank], key=lambda node: self._order[node.outputs[0]])
        coming = {source: self._messages(source, to) for source, to in self._moved if to == rank}
        going = [
            (turn, self._order[variable], variable, to)
            for source, to in self._moved
            if source == rank
            for turn, variable in self._messages(source, to)
        ]
        levels = {self._level(node.outputs[0], rank) for node in own}
        levels |= {level for (level, _), *_ in going}
        for level in sorted(levels):
            nodes = [node for node in own if self._level(node.outputs[0], rank) == level]
            yield from self._receive(coming, (level, 0), nodes)
            sent = sorted(each for each in going if each[0][0] == level)
            urgent = self._leading_to({variable for *_, variable, _ in sent}, nodes)
            yield from self._run(rank, urgent)
            for turn, _, variable, to in sent:
                yield from self._receive(coming, turn)
                yield Send(self.key(variable), to)
            yield from self._run(rank, [node for node in nodes if node not in urgent])
        yield from self._receive(coming, None)

    def _messages(self, source: int, to: int) -> list[tuple[Turn, Any]]:
        """What goes from one rank to another, in order."""
        moved = enumerate(self._moved[source, to])
        return [((self._level(variable, source), number), variable) for number, variable in moved]

    def _receive(
        self, coming: dict[int, list[tuple[Turn, Any]]], before: Turn | None, nodes: Sequence[Any] = ()
    ) -> Iterator[Receive]:
        """Take what is *coming* from each rank, and is to be read *before* a turn and the *nodes* there.

        None: all of it.
        """
        operands = {each for node in nodes for each in self._operands(node)}
        taken = []
        for source, messages in coming.items():
            needed = [number for number, (_, v) in enumerate(messages, 1) if v in operands]
            lower = sum(before is None or turn < before for turn, _ in messages)
            spared = 0 if before is None else SLOTS - 1
            due = max(0, lower - spared, *needed)
            taken += [(turn, source, variable) for turn, variable in messages[:due]]
            del messages[:due]
        for _, source, variable in sorted(taken, key=lambda message: message[:2]):
            yield Receive(self.key(variable), source)

    def _leading_to(self, variables: set[Any], nodes: Sequence[Any]) -> list[Any]:
        """The *nodes* that *variables* depend on, in their order."""
        found: list[Any] = []
        for node in reversed(nodes):
            if not variables.isdisjoint(node.outputs):
                found.insert(0, node)
                variables = variables.union(self._operands(node))
        return found

    def _run(self, rank: int, nodes: Sequence[Any]) -> Iterator[Run]:
        """The step that computes *nodes*, if there are any."""
        if not nodes:
            return
        inside = [output for node in nodes for output in node.outputs]
        operands = dict.fromkeys(each for node in nodes for each in self._operands(node))
        takes = [variable for variable in operands if variable not in inside]
        later = {v for each in self._computed[rank] if each not in nodes for v in self._operands(each)}
        later |= self._kept[rank].union(*(m for (source, _), m in self._moved.items() if source == rank))
        gives = [variable for variable in inside if variable in later]
        made = {variable: variable.type(variable.name) for variable in takes}
        places = list(made.values())
        for node in nodes:
            inputs = [self._itself(variable) for variable in node.inputs]
            clone = node.clone_with_new_inputs([made.get(each, each) for each in inputs])
            made.update(zip(node.outputs, clone.outputs, strict=True))
        program = self._build(places, [made[variable] for variable in gives])
        yield Run(program, tuple(map(self.key, takes)), tuple(map(self.key, gives)))

    # ── the table ────────────────────────────────────────────────────────────────────────────────

    def _lines(self, nodes: Sequence[Any]) -> Iterator[Computation | Movement]:
        yield from self._movements(v for v in self._order if v.owner is None)
        for node in nodes:
            if ranks := self._ranks_of(node):
                yield Computation(str(node.op), ranks)
                yield from self._movements(node.outputs)

    def _movements(self, variables: Iterable[Any]) -> Iterator[Movement]:
        for variable in variables:
            for (source, to), moved in self._moved.items():
                if variable in moved:
                    name = variable.name or str(variable.owner.op if variable.owner else variable)
                    yield Movement(name, self.key(variable), source, to)
