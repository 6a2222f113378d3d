"""PyTensor graphs in the classic form: inputs, outputs, updates and givens are variables of a graph.

    graph ─ givens replaced ─ shared variables become inputs ─▶ compiled function ─▶ pickled
                                                                                       │
    on a rank:  arguments of the call, and the rank's replicas of the variables ──▶ outputs, new values

The compiled function is pure: it returns the new values of ``updates=``, which Synkro merges over slices
and writes to the replicas.  It is compiled once, in the main process; the workers find the result in
PyTensor's cache on the disk.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytensor
from pytensor.compile.sharedvalue import SharedVariable
from pytensor.graph.basic import Constant
from pytensor.graph.basic import Variable as GraphVariable
from pytensor.graph.replace import clone_replace
from pytensor.graph.traversal import graph_inputs
from pytensor.tensor.type import TensorType

from ..errors import InvalidType, InvalidValue, NotAvailable
from ..plan.binding import RESERVED
from ..values.foreign import handed


class InputType(NamedTuple):
    """The type that an input has to have.

    *shape* has None where any length fits, and *downcast* says whether casts may lose digits.
    """

    dtype: np.dtype[Any]
    shape: tuple[int | None, ...]
    downcast: bool


Recipe = tuple[list[Any], list[Any], dict[str, Any]] | None  # arguments of ``pytensor.function``


class Graph:
    """A function of a graph, checked.

    Attributes:
        names: the names of the inputs as parameters, the scattered ones first.
        scattered: the number of scattered inputs.
        modes: the operation of each output, or one for a single output.
        updates: the shared variables that get new values, each with its operation.
        shared: all shared variables that it uses.
    """

    def __init__(
        self, inputs: Any, bcast_inputs: Any, outputs: Any, updates: Any, givens: Any, name: str | None
    ) -> None:
        """Raises: InvalidType, InvalidValue unless the arguments describe a graph."""
        self.name = name or "graph"
        scattered, broadcast = _listed(inputs), _listed(bcast_inputs)
        self.inputs = [*scattered, *broadcast]
        self.scattered = len(scattered)
        self._check_inputs()
        self.names = _names(self.inputs)
        pairs, self.single = _outputs(outputs)
        for variable, _ in pairs:
            self._check_tensor(variable, "an output")
        modes = [mode for _, mode in pairs]
        self.modes = modes[0] if self.single else modes
        self._new = _updates(updates)
        self.updates = [(variable, mode) for variable, _, mode in self._new]
        for variable in givens or ():
            if not isinstance(variable[0] if isinstance(variable, tuple) else variable, GraphVariable):
                raise InvalidType(f"givens= replaces variables of the graph; got {variable!r}.")
        targets = [variable for variable, _ in pairs] + [new for _, new, _ in self._new]
        if givens:
            try:
                targets = clone_replace(targets, replace=dict(givens))
            except TypeError as error:
                raise InvalidType(
                    f"givens= of the function {self.name!r} replaces a variable by one of another type: "
                    f"{_first(error)}"
                ) from None
        self.shared = [v for v in graph_inputs(targets) if isinstance(v, SharedVariable)]
        for variable in [*self.shared, *(v for v, _ in self.updates)]:
            self._check_tensor(variable, "a shared variable")
        self._targets = targets

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
                    f"pytensor.tensor.matrix('x'); got {variable!r}."
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
            kind = getattr(variable, "type", type(variable).__name__)
            raise InvalidType(
                f"{what} of the function {self.name!r} is {variable!r}, a {kind}: only dense tensors "
                f"can be split and reduced. (Random numbers: draw them in NumPy, and pass them.)"
            )

    def compiled(self, replicas: Mapping[Any, Any], options: dict[str, Any]) -> Compiled:
        """The function; it takes the values of shared variables from their *replicas*.

        Raises: InvalidValue if the graph does not use an input, or needs a variable that is none.
        """
        return Compiled(self, replicas, options, self._built(*self._pure(), options))

    def for_gpus(self, replicas: Mapping[Any, Any], options: dict[str, Any]) -> Compiled:
        """The function, as ``compiled``: interpreted here, and compiled by JAX on the workers.

        Raises: NotAvailable without JAX, for another mode, and for operations that JAX lacks.
        """
        mode = options.get("mode")
        if mode not in (None, "JAX", pytensor.compile.mode.JAX):
            raise NotAvailable(
                f"on GPUs, JAX compiles the graphs of PyTensor; the function {self.name!r} asks for "
                f'mode={mode!r}: leave that out, or fork(devices="cpu").'
            )
        try:
            from pytensor.link.jax.dispatch import jax_funcify  # noqa: PLC0415  it imports JAX
        except ImportError:
            raise NotAvailable(
                'on GPUs, JAX compiles the graphs of PyTensor: pip install "jax[cuda12]", or '
                'fork(devices="cpu").'
            ) from None
        places, targets = self._pure()
        jax = pytensor.compile.mode.JAX
        rewrites = jax.provided_optimizer.excluding(*jax.linker.incompatible_rewrites)
        interpreted = pytensor.compile.mode.Mode("py", rewrites)
        function = self._built(places, targets, {**options, "mode": interpreted})
        for node in function.maker.fgraph.apply_nodes:
            if jax_funcify.dispatch(type(node.op)) is jax_funcify.dispatch(object):
                raise NotAvailable(
                    f"the function {self.name!r} uses {node.op}, which PyTensor cannot compile with "
                    f'JAX, as it must on GPUs: fork(devices="cpu"), or write it with xp().'
                )
        recipe = places, targets, {**options, "mode": "JAX"}
        return Compiled(self, replicas, options, function, recipe)

    def _pure(self) -> tuple[list[Any], list[Any]]:
        """The inputs and the results of the graph, with shared variables replaced by inputs."""
        stand_ins = {variable: variable.type(variable.name) for variable in self.shared}
        targets = clone_replace(self._targets, replace=stand_ins) if self._targets else []
        return [pytensor.In(v, borrow=True) for v in (*self.inputs, *stand_ins.values())], targets

    def _built(self, places: list[Any], targets: list[Any], options: dict[str, Any]) -> Any:
        try:
            return pytensor.function(places, targets, name=self.name, **options)
        except Exception as error:
            if type(error).__name__ not in ("UnusedInputError", "MissingInputError"):
                raise
            raise InvalidValue(
                f"the inputs of the function {self.name!r} do not fit its graph: {_first(error)} (List "
                f"all variables that the graph needs, and no others, or say on_unused_input='ignore'.)"
            ) from None


class Compiled:
    """A compiled graph: in the main process a function of whole arrays, on a rank of its rows.

    It returns the outputs or, if there are updates, the outputs and the new values of variables.
    """

    def __init__(
        self,
        graph: Graph,
        replicas: Mapping[Any, Any],
        options: dict[str, Any],
        function: Any,
        recipe: Recipe = None,
    ) -> None:
        """With a *recipe*, workers compile that instead of taking over *function*."""
        self.__name__ = graph.name
        self.names = graph.names
        downcast = bool(options.get("allow_input_downcast"))
        self.input_types = {
            name: InputType(np.dtype(v.type.dtype), v.type.shape, downcast)
            for name, v in zip(graph.names, graph.inputs, strict=True)
        }
        self._function = function
        self._variables = tuple(replicas[variable] for variable in graph.shared)
        self._single = graph.single
        self._count = len(graph._targets) - len(graph.updates)  # of outputs
        self._updates = bool(graph.updates)
        self._trusted = False
        self._recipe = recipe

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) if self._recipe is None else {**vars(self), "_function": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._recipe is not None:
            places, targets, options = self._recipe
            self._function = pytensor.function(places, targets, name=self.__name__, **options)

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(name, kind) for name in self.names])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._trusted:  # arguments have been checked: PyTensor need not do it again
            self._function.trust_input = self._trusted = True
        given = [*args, *[kwargs[name] for name in self.names[len(args) :]]]
        arrays = [_typed(v, t.dtype) for v, t in zip(given, self.input_types.values(), strict=True)]
        results = self._function(*arrays, *[_typed(v.value) for v in self._variables])
        outputs: Any = results[0] if self._single else list(results[: self._count])
        return (outputs, list(results[self._count :])) if self._updates else outputs

    def warm(self) -> None:
        """Let PyTensor compile what it compiles only in a call: with read-only arrays, as rows are.

        They are as empty as they can be, so that there is nothing to compute.
        """
        arrays: list[Any] = []
        for variable in self._function.maker.fgraph.inputs:
            array = np.zeros([length or 0 for length in variable.type.shape], variable.type.dtype)
            if len(arrays) < len(self.names):
                array.flags.writeable = False
            arrays.append(array)
        with contextlib.suppress(Exception):  # such shapes need not fit each other
            self._function(*arrays)


def flat_gradient(loss: Any, params: Sequence[Any]) -> tuple[SharedVariable, GraphVariable]:
    """A shared variable for the gradient of *loss* by *params*, and that gradient as one vector.

    Raises: InvalidType unless *loss* is a loss, InvalidValue if it does not depend on a parameter.
    """
    kind = getattr(loss, "type", None)
    if not isinstance(kind, TensorType) or kind.ndim or not kind.dtype.startswith("float"):
        raise InvalidType(
            f"the loss must be a float without dimensions, such as a mean over the rows; got {loss}, a "
            f"{kind}."
        )
    used = set(graph_inputs([loss]))
    for param in params:
        if param not in used:
            raise InvalidValue(f"the loss does not depend on the parameter {param}: leave it out.")
    dtype = np.result_type(*[param.type.dtype for param in params])
    gradients = [gradient.flatten() for gradient in pytensor.grad(loss, list(params))]
    flat = pytensor.tensor.concatenate(gradients).astype(str(dtype))
    size = sum(param.get_value(borrow=True).size for param in params)
    return pytensor.shared(np.zeros(size, dtype)), flat


def _listed(variables: Any) -> list[Any]:
    if variables is None:
        return []
    return list(variables) if isinstance(variables, list | tuple) else [variables]


def _names(variables: Sequence[Any]) -> list[str]:
    """A parameter's name for each variable: its own name where that is valid and new."""
    names: list[str] = []
    for position, variable in enumerate(variables):
        own = variable.name
        fit = isinstance(own, str) and own.isidentifier() and own not in (*names, *RESERVED)
        names.append(own if fit else f"input_{position}")
    return names


def _outputs(outputs: Any) -> tuple[list[tuple[Any, Any]], bool]:
    """Each output with its operation, and whether there is a single one, not in a list."""
    if outputs is None:
        return [], False
    single = isinstance(outputs, GraphVariable) or _is_pair(outputs)
    listed = [outputs] if single else outputs
    if not isinstance(listed, list | tuple):
        raise InvalidType(
            f"outputs= of a graph takes a variable, a pair (variable, operation), or a list of them; "
            f"got {outputs!r}."
        )
    return [_pair(output) for output in listed], single


def _is_pair(value: Any) -> bool:
    two = isinstance(value, tuple) and len(value) == 2
    return two and isinstance(value[0], GraphVariable) and not isinstance(value[1], GraphVariable)


def _pair(output: Any) -> tuple[Any, Any]:
    if _is_pair(output):
        return output[0], output[1]
    if isinstance(output, GraphVariable):
        return output, "mean"
    raise InvalidType(
        f"an output of a graph is a variable, or a pair (variable, operation); got {output!r}."
    )


def _updates(updates: Any) -> list[tuple[Any, Any, str]]:
    """The shared variables of ``updates=``, their new values as graphs, and their operations."""
    if updates is None:
        return []
    entries = list(updates.items()) if isinstance(updates, Mapping) else list(updates)
    made: list[tuple[Any, Any, str]] = []
    for entry in entries:
        if not isinstance(entry, tuple | list) or len(entry) not in (2, 3):
            raise InvalidType(
                f"updates= takes pairs (variable, new value), or triples with an operation; got "
                f"{entry!r}."
            )
        variable, new, op = entry if len(entry) == 3 else (*entry, "mean")
        if not isinstance(variable, SharedVariable):
            raise InvalidType(f"updates= changes shared variables; got {variable!r}.")
        if any(variable is other for other, _, _ in made):
            raise InvalidValue(f"updates= names the shared variable {variable} twice: name each once.")
        try:
            new = variable.type.filter_variable(new)
        except TypeError as error:
            raise InvalidType(
                f"the new value of the shared variable {variable} is of another type: {_first(error)}"
            ) from None
        made.append((variable, new, op))
    return made


def _typed(array: Any, dtype: Any = None) -> Any:
    """*array*, cast to *dtype* if that is given, as NumPy's; as JAX's where it lies on a GPU."""
    if hasattr(array, "__cuda_array_interface__"):
        return handed(array if dtype is None else array.astype(dtype, copy=False), "jax")
    return np.asarray(array, dtype)


def _first(error: Exception) -> str:
    line: str = str(error).strip().splitlines()[0].rstrip(".")
    return f"{line}."
