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

from collections.abc import Callable, Sequence
from typing import Any

from . import formulas

Updates = tuple[list[tuple[Any, Any]], list[tuple[Any, Any]], Any]
"""Updates of the variable of the gradient, updates of parameters and state, and that variable."""


def sgd(loss: Any, params: Sequence[Any], learning_rate: Any) -> Updates:
    """Updates of stochastic gradient descent: see ``formulas.sgd``.

    Args:
        loss: a variable of a graph, a float without dimensions: a mean over the rows.
        params: the shared variables to train, of floats.
        learning_rate: a number, or a variable without dimensions.

    The other rules take these, too.

    Raises: InvalidType, InvalidValue.
    """
    return _updates(formulas.sgd, loss, params, learning_rate)


def momentum(loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9) -> Updates:
    """See ``formulas.momentum``."""
    return _updates(formulas.momentum, loss, params, learning_rate, momentum, states=1)


def nesterov_momentum(
    loss: Any, params: Sequence[Any], learning_rate: Any, momentum: Any = 0.9
) -> Updates:
    """See ``formulas.nesterov_momentum``."""
    return _updates(formulas.nesterov_momentum, loss, params, learning_rate, momentum, states=1)


def adagrad(loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, epsilon: Any = 1e-6) -> Updates:
    """See ``formulas.adagrad``."""
    return _updates(formulas.adagrad, loss, params, learning_rate, epsilon, states=1)


def rmsprop(
    loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, rho: Any = 0.9, epsilon: Any = 1e-6
) -> Updates:
    """See ``formulas.rmsprop``."""
    return _updates(formulas.rmsprop, loss, params, learning_rate, rho, epsilon, states=1)


def adadelta(
    loss: Any, params: Sequence[Any], learning_rate: Any = 1.0, rho: Any = 0.95, epsilon: Any = 1e-6
) -> Updates:
    """See ``formulas.adadelta``."""
    return _updates(formulas.adadelta, loss, params, learning_rate, rho, epsilon, states=2)


def adam(
    loss: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.001,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Updates:
    """See ``formulas.adam``."""
    return _updates(
        formulas.adam, loss, params, learning_rate, beta1, beta2, epsilon, states=2, timed=True
    )


def adamax(
    loss: Any,
    params: Sequence[Any],
    learning_rate: Any = 0.002,
    beta1: Any = 0.9,
    beta2: Any = 0.999,
    epsilon: Any = 1e-8,
) -> Updates:
    """See ``formulas.adamax``."""
    return _updates(
        formulas.adamax, loss, params, learning_rate, beta1, beta2, epsilon, states=2, timed=True
    )


def _updates(
    formula: Callable[..., formulas.Step],
    loss: Any,
    params: Sequence[Any],
    learning_rate: Any,
    *constants: Any,
    states: int = 0,
    timed: bool = False,
) -> Updates:
    """The updates by *formula*, which has so many *states*, and the number of the step if *timed*."""
    from ..graphs.graph import updates_by  # noqa: PLC0415  it imports PyTensor

    return updates_by(formula, loss, params, learning_rate, constants, states, timed)
