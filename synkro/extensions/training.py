"""Training steps that are one call: gradient, all-reduce, update."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from numpy.typing import ArrayLike

from .. import api
from ..controller.calls.forms import check_no_options, graph_function
from ..controller.calls.function import Definition, Function
from ..errors import InvalidType, InvalidValue, shown
from ..plan.outputs import DEFAULT
from ..values.foreign import is_graph_variable, module_of
from ..values.variable import Variable
from .rules import Rule, Vector, mean_gradient, parameters, session_variables


def flatten(arrays: Sequence[ArrayLike], params: Sequence[Variable]) -> Vector:
    """Gradients of *params*, *arrays* in their order, as one vector.

    Raises: InvalidValue if their number or a shape is not that of the parameters.
    """
    xp = api.xp()
    given = [xp.asarray(array) for array in arrays]
    wanted = [param.shape for param in params]
    if [array.shape for array in given] != wanted:
        raise InvalidValue(
            f"the gradients have the shapes {[array.shape for array in given]}, and the parameters "
            f"{wanted}: return one gradient for each parameter, in their order."
        )
    flat: Vector = xp.concatenate([array.reshape(-1) for array in given])
    return flat


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    *inputs_and_rule: Any,
    inputs: Any = None,
    bcast_inputs: Any = None,
    sliceable_shareds: Any = None,
    outputs: Any = DEFAULT,
    name: str | None = None,
    **options: Any,
) -> Function[..., Any]:
    """A function whose call is a whole training step: gradient, all-reduce, update.

    ``make_train_function(loss_and_grad, params, rule)`` makes it of a Python function,
    ``make_train_function(loss, params, x, y, rule)`` of a PyTensor graph,
    ``make_train_function(module, loss, optimizer)`` of a module of PyTorch's: its call ``train(x, y)``
    makes the optimizer's step for the mean ``loss(module(x), y)`` over the rows.  All three live on the
    workers then; ``fetch(module)`` is the trained one.  Where *loss* returns a tuple, its first element
    is trained on.

    Args:
        loss: a function that returns ``(loss, gradients)``: a mean over its rows (or more, as *outputs*
            says), and a gradient of that mean for each parameter, in their order.  Or a variable of a
            graph: such a mean, without dimensions, of which PyTensor derives the gradients.
        params: the worker variables that are trained, or the shared variables of the graph.
        inputs_and_rule: the scattered inputs of the graph, if *loss* is of one; and last the rule, made
            by ``sgd(params, …)`` or its like for the same *params*.
        inputs, bcast_inputs, sliceable_shareds, name: as for ``function()``.
        outputs: the operation on the loss, or as for ``function()``: operations nested as the loss of a
            Python function, or variables of the graph.
        options: for a graph, those of ``pytensor.function``, and ``givens=``.

    The call takes ``batch=``, ``batch_s=`` and ``num_slices=`` as any other, and returns the loss.
    Ranks and slices are weighted by their rows, so that a step is the one that serial code makes on the
    whole batch; ranks without rows make it as well.

    Raises: InvalidType, InvalidValue; NotForked.
    """
    given, rule = inputs_and_rule[:-1], inputs_and_rule[-1] if inputs_and_rule else None
    keywords = {
        "inputs": list(given) or inputs,
        "bcast_inputs": bcast_inputs,
        "sliceable_shareds": sliceable_shareds,
        "outputs": outputs,
        "name": name,
    }
    if loss is not None and module_of(loss) is loss:
        _check_python(given, options)
        from .modules import module_step  # noqa: PLC0415  whoever has modules has imported PyTorch

        return module_step(loss, params, rule, keywords)
    if not isinstance(rule, Rule):
        raise InvalidType(
            f"the last argument must be an update rule, such as sgd(params); got {shown(rule)}."
        )
    if [id(param) for param in parameters(params)] != [id(param) for param in rule.params]:
        raise InvalidValue(
            "the rule was made for other parameters, or in another session: make it for the same ones, "
            "in this order and session."
        )
    if is_graph_variable(loss):
        return _of_graph(loss, params, rule, keywords, options)
    _check_python(given, options)
    return _of_callable(loss, rule, keywords)


def _check_python(given: Sequence[Any], options: dict[str, Any]) -> None:
    """Raises: InvalidType for arguments that are for graphs only."""
    if given:
        raise InvalidType(
            f"inputs of a function of Python are named, in inputs= and bcast_inputs=; got "
            f"{shown(given)}."
        )
    check_no_options(options, "make_train_function()")


def _finish(rule: Rule, gradient: Variable) -> Callable[[int], None]:
    """The end of a call on every rank: it reduces the *gradient* and applies the rule."""
    return lambda weight: rule(mean_gradient(gradient, weight))


def _of_callable(
    loss_and_grad: Callable[..., Any], rule: Rule, keywords: dict[str, Any]
) -> Function[..., Any]:
    """A step whose function leaves the flat gradient in a variable."""
    gradient = api.shared(rule.zeros())

    @functools.wraps(loss_and_grad)
    def loss_and_flat_gradient(*args: Any, **kwargs: Any) -> Any:
        result = loss_and_grad(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InvalidType("loss_and_grad must return two things, the loss and a list of gradients.")
        loss, gradients = result
        return loss, [flatten(gradients, rule.params)]

    services = api.current_session("function").services
    updates, finish = [(gradient, "mean")], _finish(rule, gradient)
    definition = Definition(loss_and_flat_gradient, updates=updates, finish=finish, **keywords)
    return Function(lambda verb: services, definition)


def _of_graph(
    loss: Any, params: Sequence[Any], rule: Rule, keywords: dict[str, Any], options: dict[str, Any]
) -> Function[..., Any]:
    """A step of a graph; the parameters are copied to the workers before a call, and back after it."""
    from ..graphs.graph import flat_gradient  # noqa: PLC0415  whoever has graphs has imported it

    target, flat = flat_gradient(loss, params)
    if isinstance(keywords["outputs"], str):
        keywords["outputs"] = (loss, keywords["outputs"])
    rates = [rule.learning_rate] if isinstance(rule.learning_rate, Variable) else []
    gradient = session_variables().check(target, "a rule")
    return graph_function(
        api.current_session("function").services,
        updates=[(target, flat)],
        givens=options.pop("givens", None),
        options=options,
        finish=_finish(rule, gradient),
        used=[*rates, *rule.params],
        changed=rule.params,
        **keywords,
    )
