"""Functions of PyTensor graphs: the classic form of ``function()``."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING, Any

from ...errors import InvalidType, InvalidValue, check_keywords
from ...machine import announcing
from ...values.foreign import is_graph_shared
from ..variables.mirror import Bridge
from .distribution import Functions
from .function import Definition, Function

if TYPE_CHECKING:
    from ...packing.pytensor import Compiled, Graph


KEYWORDS = ("inputs", "outputs", "bcast_inputs", "updates", "sliceable_shareds", "name", "target")
"""Keywords of ``function()``, whatever it is made of."""

_OPTIONS = (
    *("givens", "mode", "no_default_updates", "accept_inplace", "rebuild_strict", "profile"),
    *("allow_input_downcast", "on_unused_input", "trust_input"),
)
"""Those that a graph has, too; the last ones are PyTensor's."""


def graph_definition(
    home: Functions,
    inputs: Any,
    outputs: Any,
    bcast_inputs: Any,
    updates: Any,
    givens: Any,
    sliceable_shareds: Any,
    name: str | None,
    options: dict[str, Any],
    finish: Callable[[int], None] | None = None,
    used: Sequence[Any] = (),
    changed: Sequence[Any] = (),
) -> Definition:
    """What a function of graph variables is, compiled here; *options* go to ``pytensor.function``.

    *finish* runs on every rank at the end of a call (see ``FunctionSpec``): it reads the variables
    *used*, and changes some of them, *changed*.

    Raises: InvalidType, InvalidValue for what is no graph, NotAvailable for workers on GPUs
    without JAX, or an operation of the graph that JAX lacks.
    """
    from ...packing.pytensor import Graph  # noqa: PLC0415  whoever has graphs has imported it

    check_keywords("function()", options, [*KEYWORDS, *_OPTIONS])

    home.engine.require_ready()
    graph = Graph(inputs, bcast_inputs, outputs, updates, givens, name, options)
    linked = home.variables.linked
    _check_used(sliceable_shareds, graph.shared, graph.name)
    compiled = compiled_graph(home, graph)
    updated = [(linked.shared(theirs), op) for theirs, op in graph.updates]
    bridge = Bridge(
        linked,
        dict.fromkeys((*compiled.variables, *used)),
        (*(variable for variable, _ in updated), *changed),
        functools.partial(home.variables.streams.hand_out, compiled.streams),
    )
    scattered, whole = graph.names[: graph.scattered], graph.names[graph.scattered :]
    return Definition(
        compiled, scattered, graph.modes, whole, updated, sliceable_shareds, name, finish, bridge
    )


def graph_function(home: Functions, *args: Any, **kwargs: Any) -> Function:
    """A ``Function`` of graph variables in one session, of the arguments of ``graph_definition``."""
    return Function(lambda verb: home, graph_definition(home, *args, **kwargs))


def compiled_graph(home: Functions, graph: Graph) -> Compiled:
    """*graph* as a function of arrays, with worker variables for its shared ones."""
    variables = home.variables
    replicas = {theirs: variables.linked.shared(theirs) for theirs in graph.shared}
    replicas |= {theirs: variables.streams.shared(theirs) for theirs in graph.streams}
    start, say = time.monotonic(), home.engine.say
    with announcing(say, f"Synkro is compiling the graph {graph.name!r}..."):
        compiled = (graph.for_gpus if home.engine.on_gpus else graph.compiled)(replicas)
        compiled.warm()
    say(f"Synkro compiled the graph {graph.name!r} ({time.monotonic() - start:.2g} s).")
    return compiled


def check_no_options(options: dict[str, Any], called: str = "function()") -> None:
    """Raises: InvalidType for keywords of a function, made by *called*, that is no graph."""
    check_keywords(called, options, [*KEYWORDS, *_OPTIONS])
    if options:
        unknown = ", ".join(options)
        raise InvalidType(f"{called} got {unknown}=, which is for graphs of PyTensor only.")


def _check_used(given: Any, used: Container[Any], name: str) -> None:
    """Raises: InvalidValue for variables of PyTensor's in *given* that are not *used*."""
    for variable in given if isinstance(given, list | tuple) else [given]:
        if is_graph_shared(variable) and variable not in used:
            raise InvalidValue(
                f"sliceable_shareds names {variable}, which the graph of the function {name!r} does not "
                f"use: leave it out."
            )
