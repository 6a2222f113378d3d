"""The variables of a session: made, named, and checked where they are arguments."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, count
from typing import Any, Final
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import ArrayLike

from ... import messages
from ...comms.ops import operation_named
from ...errors import InvalidType, InvalidValue, named, shown
from ...values.arrays import as_array, native
from ...values.foreign import is_graph_shared, is_graph_variable
from ...values.random import generator
from ...values.variable import Variable
from ..data.outgoing import Outgoing
from ..engine.engine import Engine
from ..placement.targets import Targets
from ..results.transfer import Outputs
from .collectives import Collectives
from .mirror import Bridge, Linked
from .shared import Kept, Shared, check_once, check_rows


class Variables:
    """The variables of a session.

    Attributes:
        token: the name of the session, by which a pickled variable finds its replica on a worker.
        targets: the names of the ranks.
        rng: returns the generator of functions that run in the main process by themselves.
        collectives: reads and writes the replicas.
        maps: the seed, and the number of the next map, from which items get random streams.
        linked: PyTensor's shared variables and random streams, for which variables of the session stand.
    """

    def __init__(
        self, engine: Engine, outputs: Outputs, token: str, master_rank: int, seed: int, targets: Targets
    ) -> None:
        self.token = token
        self.targets = targets
        self._engine = engine
        self._seed(seed)
        self.collectives: Final = Collectives(
            engine, outputs, master_rank, self._collected, self._bridge, self.keep
        )
        self.linked: Final = Linked(targets, self.shared, self.collectives)
        self._named: WeakValueDictionary[int, Shared] = WeakValueDictionary()  # by their numbers

    def _seed(self, seed: int) -> None:
        self.maps: tuple[int, int] = (seed, 0)
        # numbered after those of the workers, and made once
        self.rng: Callable[[], np.random.Generator] = functools.cache(
            functools.partial(generator, seed, self._engine.size)
        )

    def go_on_with(self, seed: int, number: int) -> None:
        """The next map is number *number* of *seed*."""
        self.maps = seed, number

    def next_map(self) -> tuple[int, int]:
        """The seed, and the number of the map that begins."""
        seed, number = self.maps
        self.maps = seed, number + 1
        return seed, number

    def forget_map(self, number: int) -> None:
        """Map *number* has not happened, if no other has begun since."""
        seed, following = self.maps
        if following == number + 1:
            self.maps = seed, number

    def reseed(self, seed: int) -> None:
        """Seed the generators of all ranks anew, and that of the main process."""
        self._engine.run(messages.Reseed(seed))
        self._seed(seed)

    # ── made and named ───────────────────────────────────────────────────────────────────────────

    def shared(self, value: ArrayLike, name: str | None = None, *, target: Any = None) -> Shared:
        """A variable with a replica on every rank, which functions read and write.

        Inside a function ``w.value`` is this rank's replica, an array: ``w[...] -= g`` writes into it
        (also where it was read before), ``w.value = new`` replaces it.  Nothing is synchronized by
        itself.  Ranks without rows (where a call has fewer rows than ranks) do not run, so their
        replicas stay as they are.

        Args:
            value: its first contents, on every rank, of any dtype that ``data`` takes.
            name: for messages, and for ``save`` and ``load``.
            target: the rank that has it, or a list of them, as for ``function``; None for all ranks.

        Raises: InvalidType; SharedMemoryError; NotForked.
        """
        self._engine.require_ready()
        if name is not None and not isinstance(name, str):
            raise InvalidType(f"the name of a variable must be a string; got {shown(name)}.")
        called = f"the variable {named(name)!r}" if name else "a variable"
        ranks = self.targets.ranks(target) or self._engine.everyone.ranks
        array = native(as_array(value, called))
        number = self._engine.directory.number()
        made = Shared(self, number, array.dtype, array.ndim, name, ranks)
        self._engine.directory.watch(made, number)
        buffer = Outgoing(self._engine)
        create = messages.Create(number, name, buffer.put(array, called).region)
        self._engine.run_beside(create, ranks)
        if name:
            self._named[number] = made
        return made

    def place(self, variable: Any, target: str | int) -> Any:
        """Put a shared variable of PyTensor's on one rank; returns the variable.

        Graphs that use it run over the devices of such variables: see ``function``.  It stays there in
        later sessions, on the device of that name.

        Args:
            variable: made by ``pytensor.shared()``, and not yet used by a function.
            target: a context name, a device that one worker is on, or a rank.

        Raises: InvalidType, InvalidValue; UsageError if it is somewhere else already; SharedMemoryError.
        """
        self._engine.require_ready()
        held = variable.get_value(borrow=True) if is_graph_shared(variable) else None
        if not isinstance(held, np.ndarray | np.generic):
            raise InvalidType(
                f"place() takes a shared variable of PyTensor's that holds an array; got "
                f"{shown(variable)}. (A variable of Synkro's is made where it is to be: shared(value, "
                f"target=…).)"
            )
        from ...graphs import transfers  # noqa: F401,PLC0415  which PyTensor then knows

        self.linked.place(variable, target)
        return variable

    def transfer(self, value: Any, target: str | int | None) -> Any:
        """*value* on another rank, or here: a new variable, or a NumPy array for ``"cpu"``.

        What lies on one rank moves from its device to the other one, by NCCL or through shared memory.
        Of a variable on several ranks it is a copy of the master rank's replica, of kept outputs all
        rows.

        Args:
            value: a variable, a kept output, an array or ``Data``; or the future of a submitted call
                that returns one: then this returns a future, too.  A variable of a PyTensor graph gives
                one of the graph: its value there, as ``value.transfer(target)``.
            target: a context name, a device that one worker is on, or a rank; ``"cpu"`` for this
                process; None for the master rank.

        Raises: InvalidType, InvalidValue; SharedMemoryError, SessionError.
        """
        if is_graph_variable(value):
            from ...graphs import transfers  # noqa: F401,PLC0415  which PyTensor then knows

            return value.transfer(target)
        variable = self.check(value, "transfer()") if isinstance(value, Shared) else None
        if target == "cpu":
            return np.array(value) if variable is None else variable.get_value()
        rank = self.collectives.master_rank if target is None else self.targets.rank(target)
        if variable is None:
            return self.shared(value, target=rank)
        if isinstance(variable, Kept) and len(variable.ranks) > 1:
            return self.shared(variable.get_value(), target=rank)
        source = rank if rank in variable.ranks and not isinstance(value, Kept) else variable.first
        number = self._engine.directory.number()
        made = Shared(self, number, variable.dtype, variable.ndim, None, (rank,))
        self._engine.directory.watch(made, number)
        move = messages.Move(variable.number, source, number, rank)
        self._engine.run_beside(move, tuple(sorted({source, rank})))
        return made

    def keep(self, outputs: Sequence[messages.KeptOutput], ranks: tuple[int, ...]) -> list[Kept]:
        """Let *ranks* keep *outputs* of their last call; returns a handle for each."""
        handles = []
        for output in outputs:
            dtype, ndim = np.dtype(output.dtype), 1 + len(output.tail)
            handles.append(Kept(self, output.number, dtype, ndim, None, ranks))
            self._engine.directory.watch(handles[-1], output.number)
        self._engine.run_beside(messages.Keep(tuple(outputs)), ranks)
        return handles

    def named(self) -> list[Shared]:
        """The variables that have a name and are in use, in the order in which they were made."""
        return list(self._named.values())

    def unused_name(self, label: str) -> str:
        """*label*, with a number behind it if variables in use are named by it already."""
        taken = {str(variable.name).partition(".")[0] for variable in self.named()}
        numbered = (f"{label}{number}" for number in count(2))
        return next(name for name in chain([label], numbered) if name not in taken)

    def name(self, variable: Shared, name: str) -> None:
        """Give a variable a name that had none."""
        variable.name = named(name)
        self._named[variable.number] = variable

    # ── checked ──────────────────────────────────────────────────────────────────────────────────

    def check(self, variable: Any, called: str) -> Shared:
        """*variable*, or the one that stands for it if it is PyTensor's; errors call it *called*.

        Raises: InvalidType for what is no variable, InvalidValue for a variable of another session.
        """
        if is_graph_shared(variable):
            if isinstance(variable.get_value(borrow=True), np.random.Generator):
                raise InvalidType(
                    f"{called} takes variables that hold arrays; {variable} is a random stream, of "
                    f"which each rank has a part of its own."
                )
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

    def _collected(self, given: Sequence[Any]) -> list[Shared]:
        """The variables of a collective, checked; the workers get what PyTensor's hold.

        Raises: InvalidType, InvalidValue.
        """
        checked = [self.check(variable, "a collective") for variable in given]
        check_once(checked, "a collective")
        self.linked.push(checked)
        return checked

    def _bridge(self, changed: Sequence[Shared]) -> Bridge:
        return Bridge(self.linked, (), changed)

    def check_updates(self, updates: Any) -> tuple[tuple[Shared, str], ...]:
        """``updates=`` as pairs of a variable and the operation that accumulates it over slices.

        Raises: InvalidType, InvalidValue.
        """
        pairs = []
        for entry in _listed(updates, "updates=", ", or of pairs (variable, operation)"):
            paired = isinstance(entry, list | tuple) and len(entry) == 2
            variable, op = entry if paired else (entry, "mean")
            variable, operation = self.check(variable, "updates="), operation_named(op)
            operation.check(variable.dtype, f"updates= of {variable.called()}")
            pairs.append((variable, operation.name))
        check_once([variable for variable, _ in pairs], "updates=")
        return tuple(pairs)

    def check_sliceable(self, variables: Any) -> tuple[Shared, ...]:
        """``sliceable_shareds=``, one variable or a list of them, as a tuple of variables with rows.

        Raises: InvalidType, InvalidValue.
        """
        keyword = "sliceable_shareds="
        checked = [self.check(variable, keyword) for variable in _listed(variables, keyword)]
        for variable in checked:
            check_rows(variable, keyword)
        check_once(checked, keyword)
        return tuple(checked)

    def rows(self, variables: Mapping[str, Shared], function: str, ranks: tuple[int, ...]) -> list[int]:
        """How many rows each of *ranks* holds of every variable; errors call them by their keys.

        Raises: InvalidValue if a rank holds more of one than of another.
        """
        for called, variable in variables.items():
            check_rows(variable, called)
        shapes = self.collectives.shapes(list(variables.values()), ranks)
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


def _listed(given: Any, keyword: str, otherwise: str = "") -> Sequence[Any]:
    """What was given for a *keyword* that takes a list of variables, or one; None stands for none."""
    if given is None:
        return ()
    if isinstance(given, Variable) or is_graph_shared(given):
        return (given,)
    if not isinstance(given, list | tuple):
        raise InvalidType(f"{keyword} takes a list of variables{otherwise}; got {shown(given)}.")
    return given
