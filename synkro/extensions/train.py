"""A training step in the classic form: of the graph of a loss, and a rule of ``updates``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .. import api
from ..controller.calls.forms import compiled_graph, graph_function
from ..errors import InvalidType, InvalidValue, shown


def make_train_function(
    loss: Any,
    params: Sequence[Any],
    x: Any,
    y: Any,
    update_rule: Callable[..., Any],
    *args: Any,
    **kwargs: Any,
) -> Callable[..., Any]:
    """A function ``(x_data, y_data, batch=None, num_slices=1)`` that makes a step, and returns the loss.

    Args:
        loss: a variable of a graph, a mean over the rows.
        params: the shared variables that are trained.
        x, y: the inputs of the graph, both scattered by rows.
        update_rule: a function of ``updates``, such as ``updates.adam``, or one of the same form.
        args, kwargs: for the rule, after *loss* and *params*.

    The step is one call of a ``Function``.  The gradients of ranks and slices count by their rows, and
    ranks without rows make the step, too.

    Raises: InvalidType, InvalidValue; NotForked.
    """
    from ..graphs.graph import Graph  # noqa: PLC0415  whoever has graphs has imported it

    services = api.current_session("function").services
    grad_updates, param_updates, gradient = _updates(update_rule, loss, params, *args, **kwargs)
    listed = gradient if isinstance(gradient, list | tuple) else [gradient]
    gradients = [services.variables.check(each, "the variable of the gradient") for each in listed]
    after = Graph(None, None, None, param_updates, None, "update")
    if not after.updates:
        raise InvalidValue("the rule has no updates of parameters: its second result is empty.")
    if after.streams:
        raise InvalidValue(
            "the rule draws random numbers for the parameters, of which each rank would draw its own: "
            "draw them in the main program, and put them into a shared variable."
        )
    update = compiled_graph(services, after)
    updated = [services.variables.linked.shared(theirs) for theirs, _ in after.updates]

    def finish(weight: int) -> None:
        mine = [each.value if weight else np.zeros_like(each.value) for each in gradients]
        for each, mean in zip(gradients, api.all_reduce(mine, "mean", weight=weight), strict=True):
            each.value = mean
        _, new = update()
        api.current_group("make_train_function").assign(zip(updated, new, strict=True))

    step = graph_function(
        services,
        [x, y],
        loss,
        updates=grad_updates,
        name="train",
        finish=finish,
        used=update.variables,
        changed=updated,
    )

    def train_minibatch(x_data: Any, y_data: Any, batch: Any = None, num_slices: int | str = 1) -> Any:
        return step(x_data, y_data, batch=batch, num_slices=num_slices)

    return train_minibatch


def _updates(update_rule: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
    """What the rule makes of its arguments.  Raises: InvalidType unless it is three things."""
    if not callable(update_rule) or isinstance(update_rule, type):
        raise InvalidType(
            f"update_rule must be a function of synkro.extensions.updates, such as updates.sgd; got "
            f"{shown(update_rule)}."
        )
    made = update_rule(*args, **kwargs)
    if not isinstance(made, tuple | list) or len(made) != 3:
        raise InvalidType(
            f"an update rule returns three things, the updates of the gradient's variable, those of the "
            f"parameters, and that variable; got {shown(made)}."
        )
    return made[0], made[1], made[2]
