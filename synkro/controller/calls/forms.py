"""The two forms of ``function()``: of a callable, and of a graph of PyTensor's."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import time
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from ...errors import InvalidType, InvalidValue, NotAvailable, check_keywords, cut
from ...machine import announcing
from ...plan.outputs import DEFAULT
from ...values.foreign import has_graph_variables, is_graph_shared
from ..variables.mirror import Bridge
from ..variables.shared import Kept
from .distribution import Services
from .function import Definition, Function

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ...graphs.graph import Compiled, Graph


KEYWORDS = ("inputs", "outputs", "bcast_inputs", "updates", "sliceable_shareds", "name", "target")
"""Keywords of ``function()``, whatever it is made of."""

_OPTIONS = (
    *("givens", "mode", "no_default_updates", "accept_inplace", "rebuild_strict", "profile"),
    *("allow_input_downcast", "on_unused_input", "trust_input"),
)
"""Keywords that a function of a graph has, too; the last ones are PyTensor's."""


def graph_definition(
    services: Services,
    inputs: Any,
    outputs: Any,
    bcast_inputs: Any = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    name: str | None = None,
    options: dict[str, Any] | None = None,
    finish: Callable[[int], None] | None = None,
    used: Sequence[Any] = (),
    changed: Sequence[Any] = (),
    target: Any = None,
) -> Definition:
    """What a function of graph variables is, compiled here; *options* go to ``pytensor.function``.

    *finish* runs on every rank at the end of a call (see ``FunctionSpec``): it reads the variables
    *used*, and changes some of them, *changed*.  *target* is where a graph runs that is not placed.

    Raises: InvalidType, InvalidValue for what is no graph, NotAvailable for workers on GPUs
    without JAX, or an operation of the graph that JAX lacks.
    """
    from ...graphs.graph import Graph  # noqa: PLC0415  whoever has graphs has imported it

    check_keywords("function()", options or (), [*KEYWORDS, *_OPTIONS])

    services.engine.require_ready()
    graph = Graph(inputs, bcast_inputs, outputs, updates, givens, name, options)
    linked = services.variables.linked
    if target is not None or _is_placed(services, graph):
        if finish is not None:
            raise _not_placed(graph)
        return _placed_definition(services, graph, sliceable_shareds, name, target)
    _check_used(sliceable_shareds, graph.shared, graph.name)
    compiled = compiled_graph(services, graph)
    updated = [(linked.shared(theirs), op) for theirs, op in graph.updates]
    read, written = (*compiled.variables, *used), (*(variable for variable, _ in updated), *changed)
    hand_out = functools.partial(linked.hand_out, compiled.streams)
    bridge = Bridge(linked, dict.fromkeys(read), written, hand_out)
    scattered, whole = graph.names[: graph.scattered], graph.names[graph.scattered :]
    return Definition(
        compiled, scattered, graph.modes, whole, updated, sliceable_shareds, name, finish, bridge
    )


def _is_placed(services: Services, graph: Graph) -> bool:
    from ...graphs.placed import is_placed  # noqa: PLC0415

    return is_placed(graph, services.variables.linked.place_of)


def _not_placed(graph: Graph) -> InvalidValue:
    return InvalidValue(
        f"make_train_function scatters the rows over all ranks, and the graph {graph.name!r} is placed "
        f"on devices: make the step by function(…, updates=), which runs it once over them."
    )


def _placed_definition(
    services: Services, graph: Graph, sliceable_shareds: Any, name: str | None, target: Any
) -> Definition:
    """What a function is whose graph runs once, over the devices of its variables, or on *target*."""
    from ...graphs.placed import PlacedGraph  # noqa: PLC0415

    if sliceable_shareds is not None:
        raise InvalidValue(
            f"sliceable_shareds= is for graphs whose rows are sliced; that of the function "
            f"{graph.name!r} is placed on devices, and runs once: leave it out."
        )
    variables = services.variables
    linked, master = variables.linked, variables.collectives.master_rank

    def rank_of(named: Any) -> int:
        return master if named is None else variables.targets.rank(named)

    theirs = dict.fromkeys((*graph.shared, *(variable for variable, _ in graph.updates)))
    replicas = {variable: linked.shared(variable) for variable in theirs}
    with _compiling(services, graph):
        places = linked.place_of, rank_of, rank_of(target)
        placed = PlacedGraph(graph, replicas, *places, services.engine.size, services.engine.on_gpus)
    bridge = Bridge(linked, replicas.values(), [replicas[variable] for variable, _ in graph.updates])
    return Definition(
        placed, [], None, graph.names, None, None, name, None, bridge, None, placed.assembly()
    )


def graph_function(services: Services, *args: Any, **kwargs: Any) -> Function[..., Any]:
    """A ``Function`` of graph variables in one session, of the arguments of ``graph_definition``."""
    return Function(lambda verb: services, graph_definition(services, *args, **kwargs))


def teach_transfers() -> None:
    """Let PyTensor know what ``expr.transfer("dev1")`` is, if it is there."""
    if "pytensor.tensor" in sys.modules:
        from ...graphs import transfers  # noqa: F401,PLC0415


def compiled_graph(services: Services, graph: Graph) -> Compiled:
    """*graph* as a function of arrays, with worker variables for its shared ones.

    Raises: InvalidValue for a graph that is placed.
    """
    if _is_placed(services, graph):
        raise _not_placed(graph)
    variables = services.variables
    replicas = {theirs: variables.linked.shared(theirs) for theirs in graph.shared}
    replicas |= {theirs: variables.linked.stream(theirs) for theirs in graph.streams}
    with _compiling(services, graph):
        compiled = graph.compiled(replicas, services.engine.on_gpus)
        compiled.warm()
    return compiled


@contextlib.contextmanager
def _compiling(services: Services, graph: Graph) -> Iterator[None]:
    """Say that *graph* is compiled in the block, and how long it took."""
    start, say = time.monotonic(), services.engine.say
    with announcing(say, f"Synkro is compiling the graph {graph.name!r}..."):
        yield
    say(f"Synkro compiled the graph {graph.name!r} ({time.monotonic() - start:.2g} s).")


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


Find = Callable[[str], Services]

P = ParamSpec("P")
R = TypeVar("R")

Names = str | Sequence[str] | None
Merged = Literal["mean", "sum", "prod", "max", "min", "gather"] | Callable[[Any, Any], Any]
Keep = Literal["keep"]
Nested = list[Any] | tuple[Any, ...] | dict[Any, Any]


class _Rest(TypedDict, total=False):
    """Keywords of ``function()`` that say nothing of what it returns."""

    bcast_inputs: Names
    updates: Any
    sliceable_shareds: Any
    name: str | None
    target: Any


class _WithInputs(_Rest, total=False):
    """The keywords of a decorator."""

    inputs: Names


class MakesFunctions(Protocol):
    """What ``function`` is, for type checkers: of a callable, a decorator, or of a graph."""

    @overload
    def __call__(
        self,
        fn: Callable[P, R],
        /,
        inputs: Names = ...,
        outputs: Merged = ...,
        bcast_inputs: Names = ...,
        updates: Any = ...,
        givens: None = ...,
        sliceable_shareds: Any = ...,
        name: str | None = ...,
        *,
        target: Any = ...,
    ) -> Function[P, R]: ...

    @overload
    def __call__(
        self, fn: Callable[P, R], /, inputs: Names = ..., *, outputs: None, **options: Unpack[_Rest]
    ) -> Function[P, list[R]]: ...

    @overload
    def __call__(
        self, fn: Callable[P, Any], /, inputs: Names = ..., *, outputs: Keep, **options: Unpack[_Rest]
    ) -> Function[P, Kept]: ...

    @overload
    def __call__(
        self, fn: Callable[P, Any], /, inputs: Names = ..., *, outputs: Nested, **options: Unpack[_Rest]
    ) -> Function[P, Any]: ...

    @overload
    def __call__(
        self, fn: None = ..., *, outputs: Merged = ..., **options: Unpack[_WithInputs]
    ) -> Callable[[Callable[P, R]], Function[P, R]]: ...

    @overload
    def __call__(
        self, fn: None = ..., *, outputs: None, **options: Unpack[_WithInputs]
    ) -> Callable[[Callable[P, R]], Function[P, list[R]]]: ...

    @overload
    def __call__(
        self, fn: None = ..., *, outputs: Keep, **options: Unpack[_WithInputs]
    ) -> Callable[[Callable[P, Any]], Function[P, Kept]]: ...

    @overload
    def __call__(
        self, fn: None = ..., *, outputs: Nested, **options: Unpack[_WithInputs]
    ) -> Callable[[Callable[P, Any]], Function[P, Any]]: ...

    @overload
    def __call__(
        self,
        inputs: list[Any] | tuple[Any, ...],
        outputs: Any = ...,
        bcast_inputs: Any = ...,
        updates: Any = ...,
        givens: Any = ...,
        sliceable_shareds: Any = ...,
        name: str | None = ...,
        *,
        target: Any = ...,
        **kwargs: Any,
    ) -> Function[..., Any]: ...


def make_function(find: Find, /, *args: Any, **kwargs: Any) -> Any:
    """What ``function()`` returns; *find* gives the services of the session, or raises NotForked."""
    first = args[0] if args else kwargs.get("fn")
    classic = isinstance(first, list | tuple) or (
        not callable(first) and has_graph_variables(*args, *kwargs.values())
    )
    form = of_graph if classic else of_callable
    try:
        inspect.signature(form).bind(find, *args, **kwargs)
    except TypeError as error:
        raise InvalidType(f"function() {cut(str(error))}.") from None
    return form(find, *args, **kwargs)


def of_callable(
    find: Find,
    /,
    fn: Callable[..., Any] | None = None,
    inputs: str | Sequence[str] | None = None,
    outputs: Any = DEFAULT,
    bcast_inputs: str | Sequence[str] | None = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    name: str | None = None,
    *,
    target: Any = None,
    **options: Any,
) -> Any:
    check_no_options(options if givens is None else {"givens": givens, **options})
    given = inputs, outputs, bcast_inputs, updates, sliceable_shareds, name

    def make(fn: Callable[..., Any]) -> Function[..., Any]:
        return Function(find, Definition(fn, *given, target=target))

    if fn is not None:
        return make(fn)
    for names in (inputs, bcast_inputs):
        if names is not None and not all(isinstance(each, str) for each in names):
            raise _no_graph()
    return make


def of_graph(
    find: Find,
    /,
    inputs: Any = None,
    outputs: Any = None,
    bcast_inputs: Any = None,
    updates: Any = None,
    givens: Any = None,
    sliceable_shareds: Any = None,
    name: str | None = None,
    *,
    target: Any = None,
    **kwargs: Any,
) -> Any:
    if not has_graph_variables(inputs, outputs, bcast_inputs, updates, givens):
        raise _no_graph()
    given = inputs, outputs, bcast_inputs, updates, givens, sliceable_shareds, name
    return Function(find, lambda services: graph_definition(services, *given, kwargs, target=target))


def as_method(function: Callable[..., Any]) -> inspect.Signature:
    """The signature of *function* as that of a method, with ``self`` in the place of its first
    parameter."""
    signature = inspect.signature(function)
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return signature.replace(parameters=[own, *list(signature.parameters.values())[1:]])


signature_of_function: Final = as_method(of_graph)
"""The signature of ``Session.function``: the names and the order of the classic form."""


def _no_graph() -> NotAvailable:
    return NotAvailable(
        "function() without a callable takes the variables of a graph compiler, and knows PyTensor's "
        "only: pass those, or pass a callable and the names of its parameters."
    )
