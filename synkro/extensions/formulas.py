"""The update rules as formulas, for arrays and for graphs of PyTensor alike.

Each takes the array module *xp*, the flat gradient *g* of all parameters, the learning rate, the state
(a list of vectors as long as *g*, zeros at first) and its constants.  It returns the change of the
parameters, to be added to them, and the new state.  *time* is the number of the step, from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

State = Sequence[Any]
Step = tuple[Any, list[Any]]


def sgd(xp: Any, g: Any, rate: Any, state: State) -> Step:
    """Stochastic gradient descent: ``p -= rate · g``."""
    return -rate * g, []


def momentum(xp: Any, g: Any, rate: Any, state: State, momentum: float) -> Step:
    """Momentum: ``v = μ v - rate · g; p += v`` (Polyak 1964)."""
    velocity = momentum * state[0] - rate * g
    return velocity, [velocity]


def nesterov_momentum(xp: Any, g: Any, rate: Any, state: State, momentum: float) -> Step:
    """Nesterov's momentum, as in Sutskever et al. 2013: ``v = μ v - rate · g; p += μ v - rate · g``."""
    velocity = momentum * state[0] - rate * g
    return momentum * velocity - rate * g, [velocity]


def adagrad(xp: Any, g: Any, rate: Any, state: State, epsilon: float) -> Step:
    """AdaGrad (Duchi et al. 2011): ``a += g²; p -= rate · g / √(a + ε)``."""
    squares = state[0] + g**2
    return -rate * g / xp.sqrt(squares + epsilon), [squares]


def rmsprop(xp: Any, g: Any, rate: Any, state: State, rho: float, epsilon: float) -> Step:
    """RMSProp (Tieleman and Hinton 2012): ``a = ρ a + (1 - ρ) g²; p -= rate · g / √(a + ε)``."""
    squares = rho * state[0] + (1 - rho) * g**2
    return -rate * g / xp.sqrt(squares + epsilon), [squares]


def adadelta(xp: Any, g: Any, rate: Any, state: State, rho: float, epsilon: float) -> Step:
    """AdaDelta (Zeiler 2012).

    ``a = ρ a + (1 - ρ) g²; u = g √(d + ε) / √(a + ε); p -= rate · u; d = ρ d + (1 - ρ) u²``.
    """
    squares, changes = state
    squares = rho * squares + (1 - rho) * g**2
    change = g * xp.sqrt(changes + epsilon) / xp.sqrt(squares + epsilon)
    return -rate * change, [squares, rho * changes + (1 - rho) * change**2]


def adam(
    xp: Any, g: Any, rate: Any, state: State, time: Any, beta1: float, beta2: float, epsilon: float
) -> Step:
    """Adam (Kingma and Ba 2014), with the corrections of bias in the step size (section 2, end).

    ``m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; p -= rate · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)``.
    """
    first, second = state
    first = beta1 * first + (1 - beta1) * g
    second = beta2 * second + (1 - beta2) * g**2
    corrected = rate * (1 - beta2**time) ** 0.5 / (1 - beta1**time)
    return -corrected * first / (xp.sqrt(second) + epsilon), [first, second]


def adamax(
    xp: Any, g: Any, rate: Any, state: State, time: Any, beta1: float, beta2: float, epsilon: float
) -> Step:
    """AdaMax (Kingma and Ba 2014, section 7.1).

    ``m = β₁ m + (1 - β₁) g; u = max(β₂ u, |g|); p -= rate / (1 - β₁ᵗ) · m / (u + ε)``.
    """
    first, infinity = state
    first = beta1 * first + (1 - beta1) * g
    infinity = xp.maximum(beta2 * infinity, abs(g))
    return -rate / (1 - beta1**time) * first / (infinity + epsilon), [first, infinity]
