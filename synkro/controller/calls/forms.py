"""The two forms of ``function()``: of a callable, and of a graph of PyTensor's."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, Protocol, TypedDict, TypeVar, overload

from ...errors import InvalidType, NotAvailable, cut
from ...plan.outputs import DEFAULT
from ...values.foreign import has_graph_variables
from ..variables.shared import Kept
from .distribution import Services
from .function import Definition, Function
from .graphs import check_no_options, graph_definition

if TYPE_CHECKING:
    from typing_extensions import Unpack

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
