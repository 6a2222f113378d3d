"""The update rules in the classic form: of the graph of a loss, as updates of shared variables.

::

    grad_updates, param_updates, gradient = adam(loss, params)
    f_gradient = function([x, y], outputs=loss, updates=grad_updates)
    f_update = function([], updates=param_updates)

    f_gradient(x_data, y_data)   # each rank's gradient, flat, into its replica of the variable
    all_reduce(gradient)         # the mean over the ranks
    f_update()                   # the same step on every rank

``train.make_train_function`` makes one function of the three, whose mean is by rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Concatenate, Final, ParamSpec, cast

from .. import api
from . import rules

Updates = tuple[list[tuple[Any, Any]], list[tuple[Any, Any]], Any]
"""Updates of the variable of the gradient, updates of parameters and state, and that variable."""

P = ParamSpec("P")


def _classic(
    made: Callable[P, rules.Rule], rated: bool = True
) -> Callable[Concatenate[Any, P], Updates]:
    """The classic form of a rule of ``rules``; its learning rate has a default where it is *rated*."""
    rule = cast(type[rules.FormulaRule], made)
    name, signature = rule.__name__, inspect.signature(rule)
    loss = inspect.Parameter("loss", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation="Any")
    params, rate, *constants, called = signature.parameters.values()
    rate = rate if rated else rate.replace(default=inspect.Parameter.empty)
    signature = signature.replace(
        parameters=[loss, params, rate, *constants, called], return_annotation="Updates"
    )

    def updates(*args: Any, **kwargs: Any) -> Updates:
        """Updates of shared variables by the rule, in the classic form.

        Args:
            loss: a variable of a graph, a float without dimensions: a mean over the rows.
            params: the shared variables to train, of floats.
            learning_rate: a number, or a variable without dimensions.
            name: what the names of the state's variables begin with; None for variables without names.

        The constants of the rule follow the rate.

        Raises: InvalidType, InvalidValue.
        """
        api.check_arguments(name, signature, args, kwargs)
        from ..graphs.graph import updates_by  # noqa: PLC0415  it imports PyTensor

        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        loss, params, rate, *constants = given.args
        timed = issubclass(rule, rules.adam)
        return updates_by(rule, loss, params, rate, tuple(constants), timed, given.arguments["name"])

    updates.__name__ = updates.__qualname__ = name
    updates.__doc__ = f"{inspect.getdoc(rule)}\n\n{inspect.getdoc(updates)}"
    updates.__dict__["__signature__"] = signature
    return updates


sgd: Final = _classic(rules.sgd, rated=False)
momentum: Final = _classic(rules.momentum, rated=False)
nesterov_momentum: Final = _classic(rules.nesterov_momentum, rated=False)
adagrad: Final = _classic(rules.adagrad)
rmsprop: Final = _classic(rules.rmsprop)
adadelta: Final = _classic(rules.adadelta)
adam: Final = _classic(rules.adam)
adamax: Final = _classic(rules.adamax)
