"""PyTensor graphs in the classic form: inputs, outputs, updates and givens are variables of a graph.

    graph ─ givens replaced ─ shared variables become inputs ─▶ compiled function ─▶ pickled
                                                                                       │
    on a rank:  arguments of the call, and the rank's replicas of the variables ──▶ outputs, new values

The compiled function is pure: it returns the new values of ``updates=``, which Synkro merges over slices
and writes to the replicas.

A random stream of a graph is a worker variable, too.  Each rank draws from a part of its own.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.basic import Variable as GraphVariable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.random.type import RandomType
from pytensor.tensor.type import TensorType

from .. import here
from ..errors import InvalidType, InvalidValue, NotAvailable, shown, with_article
from ..memory.interrupts import atomic
from ..plan.binding import RESERVED
from ..plan.outputs import DEFAULT
from ..values.random import from_words, to_words
from .programs import Program, typed


class InputType(NamedTuple):
    """The type that an input has to have.

    *shape* has None where any length fits, and *downcast* says whether casts may lose digits.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    downcast: bool


Update = tuple[Any, Any, str]  # a shared variable, its new value, and its operation

_OUTPUT = (GraphVariable, pytensor.Out)  # what an output of a graph may be given as


class Graph:
    """A function of a graph, checked.

    Attributes:
        names: the names of the inputs as parameters, the scattered ones first.
        scattered: the number of scattered inputs.
        modes: the operation of each output, or one for a single output.
        updates: the shared variables that get new values, each with its operation.
        shared: all shared variables that it uses, but for random streams.
        streams: the random streams that it uses; first those that move on.
        targets: the outputs, and then the new values of the updates.
    """

    def __init__(
        self,
        inputs: Any,
        bcast_inputs: Any,
        outputs: Any,
        updates: Any,
        givens: Any,
        name: str | None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """*options* are those of ``pytensor.function``.

        Raises: InvalidType, InvalidValue unless the arguments describe a graph.
        """
        self.name: Final = name or _default_name(outputs, inputs)
        self.options: Final = dict(options or {})
        scattered, broadcast = _listed(inputs), _listed(bcast_inputs)
        places = [self._place(given) for given in (*scattered, *broadcast)]
        self.inputs: Final = [variable for variable, _, _ in places]
        self.scattered: Final = len(scattered)
        self._check_inputs()
        self.names: Final = _names([own for _, own, _ in places])
        self.downcast: Final = [downcast for _, _, downcast in places]
        pairs, single = _outputs(outputs)
        self.single: bool = single
        for variable, _ in pairs:
            self._check_tensor(variable, "an output")
        modes = [mode for _, mode in pairs]
        self.modes: Final = modes[0] if self.single else modes
        targets, replaced = [variable for variable, _ in pairs], self._givens(givens)
        new = _updates(updates)
        new += self._implied([*targets, *(one for _, one, _ in new), *replaced.values()], new)
        states = [(stream, one) for stream, one, _ in new if _is_stream(stream)]
        new = [entry for entry in new if not _is_stream(entry[0])]
        self.updates: Final = [(variable, mode) for variable, _, mode in new]
        targets += [one for _, one, _ in new]
        count = len(targets)
        targets += [one for _, one in states]
        if replaced and targets:
            targets = clone_replace(targets, replace=replaced)
        found = [v for v in graph_inputs(targets[:count]) if isinstance(v, SharedVariable)]
        self.shared: list[Any] = [variable for variable in found if not _is_stream(variable)]
        for variable in [*self.shared, *(v for v, _ in self.updates)]:
            self._check_tensor(variable, "a shared variable")
        following = {stream: one for (stream, _), one in zip(states, targets[count:], strict=True)}
        streams = [variable for variable in found if _is_stream(variable)]
        self.streams: list[Any] = sorted(streams, key=lambda stream: stream not in following)
        self._states = [following[stream] for stream in self.streams if stream in following]
        self.targets: list[Any] = targets[:count]

    def _givens(self, givens: Any) -> dict[Any, Any]:
        """What replaces which variables of the graph.  Raises: InvalidType."""
        replaced = {}
        for variable, value in _pairs(givens, "givens= replaces variables of the graph, by pairs"):
            if not isinstance(variable, GraphVariable):
                raise InvalidType(f"givens= replaces variables of the graph; got {shown(variable)}.")
            what = f"givens= of the function {self.name!r} replaces {variable} by one of another type"
            replaced[variable] = _filtered(variable, value, what)
        return replaced

    def _implied(self, targets: list[Any], explicit: list[Update]) -> list[Update]:
        """The updates that shared variables bring along, as random streams do (``default_update``)."""
        without = self.options.pop("no_default_updates", False)
        if not isinstance(without, bool | list | tuple):
            raise InvalidType(f"no_default_updates= takes True, False or a list; got {shown(without)}.")
        known = [variable for variable, _, _ in explicit]
        known += [] if isinstance(without, bool) else list(without)
        made: list[Update] = []
        before = -1
        while len(made) > before and without is not True:
            before = len(made)
            for variable in graph_inputs([*targets, *(one for _, one, _ in made)]):
                new = getattr(variable, "default_update", None)
                if new is not None and not any(variable is each for each in known):
                    known.append(variable)
                    made.append((variable, variable.type.filter_variable(new), "mean"))
        return made

    def _place(self, given: Any) -> tuple[Any, Any, bool | None]:
        """A variable, or an ``In``, as an input of the graph: the variable, its name, and whether casts
        may lose digits, or None where that is not said.  Raises: NotAvailable."""
        if not isinstance(given, pytensor.In):
            return given, getattr(given, "name", None), None
        for option, usual in {"update": None, "implicit": False, "shared": False}.items():
            if getattr(given, option) is not usual:
                called = given.name or given.variable
                raise NotAvailable(
                    f"the function {self.name!r} has In({called}, {option}=…): use a shared variable, "
                    f"and updates=."
                )
        return given.variable, given.name, given.allow_downcast

    def _check_inputs(self) -> None:
        for position, variable in enumerate(self.inputs):
            if isinstance(variable, SharedVariable):
                raise InvalidType(
                    f"the shared variable {variable} is listed as an input of the function "
                    f"{self.name!r}: shared variables are found by themselves, leave it out."
                )
            if not isinstance(variable, GraphVariable) or isinstance(variable, Constant):
                raise InvalidType(
                    f"inputs and bcast_inputs of a graph are its variables, such as "
                    f"pytensor.tensor.matrix('x'); got {shown(variable)}."
                )
            self._check_tensor(variable, "an input")
            if position < self.scattered and any(variable.type.shape[:1]):
                raise InvalidValue(
                    f"the input {variable} of the function {self.name!r} is scattered by rows, but the "
                    f"graph fixes their number ({variable.type}): leave the first length open (None), "
                    f"or name it in bcast_inputs."
                )
            if any(variable is other for other in self.inputs[:position]):
                raise InvalidValue(
                    f"the variable {variable} is listed twice for the function {self.name!r}: list each "
                    f"once, in inputs (scattered) or in bcast_inputs (broadcast)."
                )

    def _check_tensor(self, variable: Any, what: str) -> None:
        if not isinstance(variable, GraphVariable) or not isinstance(variable.type, TensorType):
            kind = with_article(str(getattr(variable, "type", type(variable).__name__)))
            raise InvalidType(
                f"{what} of the function {self.name!r} is {shown(variable)}, {kind}: only dense tensors "
                f"can be split and reduced. (Random numbers: draw them in NumPy, and pass them.)"
            )

    def compiled(self, replicas: Mapping[Any, Any], on_gpus: bool) -> Compiled:
        """The function; it takes the values of shared variables from their *replicas*.

        Raises: InvalidValue if the graph does not use an input, or needs a variable that is none;
        NotAvailable for GPUs without JAX, or for what JAX cannot compile.
        """
        if on_gpus and self.streams:
            raise NotAvailable(
                f"the function {self.name!r} has random streams of PyTensor's, which go on CPU workers "
                f'only: fork(devices="cpu"), or draw in a function of Python, by synkro.rng().'
            )
        # shared variables are replaced by inputs
        stand_ins = {v: v.type(v.name) for v in (*self.shared, *self.streams)}
        targets = [*self.targets, *self._states]
        targets = clone_replace(targets, replace=stand_ins) if targets else []
        # a stream is unpacked for each run, which may write to it
        inputs = (*self.inputs, *stand_ins.values())
        places = [pytensor.In(v, borrow=True, mutable=_is_stream(v)) for v in inputs]
        try:
            return Compiled(self, replicas, Program(self.name, (places, targets, self.options), on_gpus))
        except Exception as error:
            if type(error).__name__ not in ("UnusedInputError", "MissingInputError"):
                raise
            raise InvalidValue(
                f"the inputs of the function {self.name!r} do not fit its graph: {_first(error)} (List "
                f"all variables that the graph needs, and no others, or say on_unused_input='ignore'.)"
            ) from None

    def program(self, places: list[Any], targets: list[Any], on_gpus: bool) -> Program:
        """A part of the function, for one rank, which computes *targets* of *places*."""
        given = [pytensor.In(variable, borrow=True) for variable in places]
        return Program(self.name, (given, targets, self.options), on_gpus, late=True)

    def input_types(self) -> dict[str, InputType]:
        """The type that each input has to have, by its name."""
        downcast = self.options.get("allow_input_downcast")
        return {
            name: InputType(np.dtype(v.type.dtype), v.type.shape, bool(downcast if own is None else own))
            for name, v, own in zip(self.names, self.inputs, self.downcast, strict=True)
        }


class GraphFunction:
    """A function of a graph, with the names of its inputs as parameters.

    Attributes:
        names: these.
        input_types: the type that each has to have, by its name.
    """

    def __init__(self, graph: Graph) -> None:
        self.__name__: Final = graph.name
        self.names: Final = graph.names
        self.input_types: Final = graph.input_types()
        self._single = graph.single
        self._count = len(graph.targets) - len(graph.updates)  # of outputs

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.names])


class Compiled(GraphFunction):
    """A compiled graph: in the main process a function of whole arrays, on a rank of its rows.

    It returns the outputs or, if there are updates, the outputs and the new values of variables.

    Attributes:
        variables: the worker variables that it uses.
        streams: the worker variables of random streams.
    """

    def __init__(self, graph: Graph, replicas: Mapping[Any, Any], program: Program) -> None:
        super().__init__(graph)
        self._program = program
        self.variables: Final = tuple(replicas[variable] for variable in graph.shared)
        self.streams: Final = tuple(replicas[variable] for variable in graph.streams)
        self._theirs = tuple(graph.streams)  # the streams themselves, in the main process
        self._states = len(graph._states)  # of streams; the others begin anew in each call

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_theirs": ()}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
        arrays = [typed(v, t.dtype) for v, t in zip(given, self.input_types.values(), strict=True)]
        arrays += [typed(variable.value) for variable in self.variables]
        results = self._drawing(arrays) if self.streams else self._program(*arrays)
        outputs: Any = results[0] if self._single else list(results[: self._count])
        new = list(results[self._count :])
        return (outputs, new) if new else outputs

    def _drawing(self, arrays: list[Any]) -> list[Any]:
        """The results without the streams' new states, which go back to where the streams lie."""
        rank = here.rank
        if rank is None:
            streams = [theirs.get_value() for theirs in self._theirs]
        else:
            streams = [from_words(variable.value, rank.number) for variable in self.streams]
        with atomic:  # compiled code that draws does not survive an exception of Ctrl-C
            results = self._program(*arrays, *streams)
        end = len(results) - self._states
        if rank is None:
            for theirs, state in zip(self._theirs, results[end:], strict=False):
                theirs.set_value(state, borrow=True)
        else:
            for variable, state in zip(self.streams, results[end:], strict=False):
                variable.value = to_words(state)
        return list(results[:end])

    def warm(self) -> None:
        """Let PyTensor compile what it compiles only in a call: with read-only arrays, as rows are."""
        self._program.warm(len(self.names))


def flat_gradient(loss: Any, params: Sequence[Any]) -> tuple[SharedVariable, GraphVariable]:
    """A shared variable for the gradient of *loss* by *params*, and that gradient as one vector.

    Raises: InvalidType unless *loss* is a loss and *params* are shared variables, InvalidValue if it
    does not depend on one of them, or there are none.
    """
    if not isinstance(params, list | tuple) or not all(isinstance(p, SharedVariable) for p in params):
        raise InvalidType(
            f"params must be a list of shared variables, made by pytensor.shared(); got {shown(params)}."
        )
    if not params:
        raise InvalidValue("params is empty: list the shared variables that are to be trained.")
    kind = getattr(loss, "type", None)
    if not isinstance(kind, TensorType) or kind.ndim or not kind.dtype.startswith("float"):
        raise InvalidType(
            f"the loss must be a float without dimensions, such as a mean over the rows; got {loss}, a "
            f"{kind}."
        )
    used = set(graph_inputs([loss]))
    for param in params:
        if sum(param is other for other in params) > 1:
            raise InvalidValue(f"params names {param} twice: name each once.")
        if param not in used:
            raise InvalidValue(f"the loss does not depend on the parameter {param}: leave it out.")
    dtype = np.result_type(*[param.type.dtype for param in params])
    gradients = [gradient.flatten() for gradient in pytensor.grad(loss, list(params))]
    flat = pytensor.tensor.concatenate(gradients).astype(str(dtype))
    size = sum(param.get_value(borrow=True).size for param in params)
    return pytensor.shared(np.zeros(size, dtype)), flat


def updates_by(
    rule: Any,
    loss: Any,
    params: Sequence[Any],
    rate: Any,
    constants: tuple[Any, ...],
    timed: bool,
    name: str | None,
) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]], SharedVariable]:
    """The updates of a step by the formula of a *rule*, one of the classes of ``extensions.rules``.

    The names of its state's variables begin with *name*, if there is one.

    The first of its constants is the number of the step, if it is *timed*.  Returns the updates of the
    variable of the flat gradient, those of the parameters and the state, and that variable.

    Raises: as ``flat_gradient``.
    """
    number = isinstance(rate, int | float | np.number | np.ndarray) and not isinstance(rate, bool)
    if not (number or isinstance(rate, GraphVariable)):
        raise InvalidType(
            f"the learning rate must be a number or a variable of the graph; got {shown(rate)}."
        )
    gradient, flat = flat_gradient(loss, params)
    zeros = gradient.get_value()
    held = [pytensor.shared(zeros, name and f"{name}.{state}") for state in rule.STATES]
    updates: list[tuple[Any, Any]] = []
    if timed:
        count = pytensor.shared(np.int64(0))
        updates.append((count, count + 1))
        constants = (count + 1, *constants)
    change, new = rule.formula(pytensor.tensor, gradient, rate, held, *constants)
    updates += [(state, value.astype(state.dtype)) for state, value in zip(held, new, strict=True)]
    start = 0
    for param in params:
        value = param.get_value(borrow=True)
        stop = start + value.size
        updates.append((param, param + change[start:stop].reshape(value.shape).astype(param.dtype)))
        start = stop
    return [(gradient, flat)], updates, gradient


def _is_stream(variable: Any) -> bool:
    return isinstance(variable.type, RandomType)


def _listed(variables: Any) -> list[Any]:
    if variables is None:
        return []
    return list(variables) if isinstance(variables, list | tuple) else [variables]


def _names(given: Sequence[Any]) -> list[str]:
    """A parameter's name for each variable: its own name, as *given*, where that is valid and new."""
    names: list[str] = []
    for position, own in enumerate(given):
        fit = isinstance(own, str) and own.isidentifier() and own not in (*names, *RESERVED)
        names.append(own if fit else f"input_{position}")
    return names


def _outputs(outputs: Any) -> tuple[list[tuple[Any, Any]], bool]:
    """Each output with its operation, and whether there is a single one, not in a list."""
    if outputs is None:
        return [], False
    single = isinstance(outputs, _OUTPUT) or _is_pair(outputs)
    listed = [outputs] if single else outputs
    if not isinstance(listed, list | tuple):
        raise InvalidType(
            f"outputs= of a graph takes a variable, a pair (variable, operation), or a list of them; "
            f"got {shown(outputs)}."
        )
    return [_pair(output) for output in listed], single


def _default_name(outputs: Any, inputs: Any) -> str:
    """The names of the outputs, where they have some; else those of the inputs say which graph it is."""
    listed = outputs if isinstance(outputs, list | tuple) and not _is_pair(outputs) else [outputs]
    named = [getattr(each[0] if _is_pair(each) else each, "name", None) for each in listed]
    if any(named):
        return ", ".join(filter(None, named))
    names = ", ".join(filter(None, [getattr(each, "name", None) for each in _listed(inputs)]))
    return f"graph of {names}" if names else "graph"


def _is_pair(value: Any) -> bool:
    two = isinstance(value, tuple) and len(value) == 2
    return two and isinstance(value[0], _OUTPUT) and not isinstance(value[1], _OUTPUT)


def _pair(output: Any) -> tuple[Any, Any]:
    """An output and its operation; ``borrow=`` of an ``Out`` means nothing: results are copied."""
    variable, mode = output if _is_pair(output) else (output, DEFAULT)
    if not isinstance(variable, _OUTPUT):
        raise InvalidType(
            f"an output of a graph is a variable, or a pair (variable, operation); got {shown(output)}."
        )
    return variable.variable if isinstance(variable, pytensor.Out) else variable, mode


def _updates(updates: Any) -> list[Update]:
    """The shared variables of ``updates=``, their new values as graphs, and their operations."""
    made: list[Update] = []
    takes = "updates= takes pairs (variable, new value), or triples with an operation"
    for entry in _pairs(updates, takes, 3):
        variable, new, op = entry if len(entry) == 3 else (*entry, "mean")
        if not isinstance(variable, SharedVariable):
            raise InvalidType(f"updates= changes shared variables; got {shown(variable)}.")
        if any(variable is other for other, _, _ in made):
            raise InvalidValue(f"updates= names the shared variable {variable} twice: name each once.")
        what = f"the new value of the shared variable {variable} is of another type"
        made.append((variable, _filtered(variable, new, what), op))
    return made


def _pairs(given: Any, takes: str, most: int = 2) -> list[Any]:
    """A dict, or a list of pairs, as a list of pairs (or of up to *most*).  Raises: InvalidType."""
    entries = list(given.items()) if isinstance(given, Mapping) else given or ()
    if not isinstance(entries, list | tuple):
        raise InvalidType(f"{takes}; got {shown(given)}.")
    for entry in entries:
        if not isinstance(entry, tuple | list) or not 2 <= len(entry) <= most:
            raise InvalidType(f"{takes}; got {shown(entry)}.")
    return list(entries)


def _filtered(variable: Any, value: Any, what: str) -> Any:
    """*value* as a variable of the type of *variable*.  Raises: InvalidType, with *what* is wrong."""
    try:
        return variable.type.filter_variable(value)
    except Exception as error:  # PyTensor raises many kinds, some without a text
        raise InvalidType(f"{what}: {_first(error)}") from None


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{lines[0].rstrip('.')}."
