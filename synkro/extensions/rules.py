"""Update rules: how the flat gradient of all parameters changes them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import api
from ..controller.variables.registry import Variables
from ..controller.variables.shared import Shared, check_once
from ..errors import InvalidType, InvalidValue
from ..values.foreign import is_graph_shared
from ..values.variable import Variable

Vector = NDArray[Any]
Params = Sequence[Variable]
Rate = float | Variable
Name = str | None


class Rule(ABC):
    """A first-order update rule for a list of parameters, with its state in worker variables.

    Called with the flat gradient, on the workers, it changes the parameters.

    Attributes:
        STATES: the names of its state's vectors, each as long as all parameters together.
        name: the unique name of the rule, with which the names of its state's variables begin.
        params: the parameters, worker variables of floats (for PyTensor's shared variables, those that
            stand for them).  Those without a name get one.
    """

    STATES: tuple[str, ...] = ()

    def __init__(self, params: Params, learning_rate: Rate = 0.01, *, name: Name = None) -> None:
        self.params = parameters(params)
        variables = session_variables()
        of_graph = is_graph_shared(learning_rate)
        self._rate = variables.check(learning_rate, "a rule") if of_graph else learning_rate
        self.name = variables.unused_name(name or type(self).__name__)
        for index, param in enumerate(self.params):
            if param.name is None:  # a training is saved as a whole, or not at all
                variables.name(param, f"{self.name}.param{index}")
        zeros = self.zeros()
        self.states = [api.shared(zeros, f"{self.name}.{state}") for state in self.STATES]

    def zeros(self) -> Vector:
        """As many zeros as all parameters have elements, of the dtype of their gradient."""
        dtype = np.result_type(*[param.dtype for param in self.params])
        return np.zeros(sum(param.size for param in self.params), dtype)

    @property
    def learning_rate(self) -> Any:
        """A number, or a variable without dimensions, which can be changed between calls."""
        return self._rate

    @learning_rate.setter
    def learning_rate(self, rate: Any) -> None:
        raise InvalidValue(
            f"the rule {self.name!r} may be on the workers by now: to change its learning rate between "
            f"calls, make it with a variable, learning_rate=synkro.shared({self._rate!r}), and set that."
        )

    def __call__(self, gradient: Vector) -> None:
        """Change the parameters by their flat *gradient*, on this rank."""
        rate = self._rate
        rate = float(rate.value) if isinstance(rate, Variable) else rate
        states = [state.value for state in self.states]
        step = self.step(gradient, rate, states)
        for state, value in zip(self.states, states, strict=True):
            state.value = value
        start = 0
        for param in self.params:
            value = param.value
            stop = start + value.size
            value += step[start:stop].reshape(value.shape).astype(value.dtype, copy=False)
            param.value = value
            start = stop

    @abstractmethod
    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        """The change of the parameters, to be added to them; changes *states* in place."""


class sgd(Rule):  # noqa: N801 - the rules have the names that they have everywhere
    """Stochastic gradient descent: ``p -= rate · g``."""

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        return -rate * gradient


class momentum(Rule):  # noqa: N801
    """Momentum: ``v = μ v - rate · g; p += v`` (Polyak 1964)."""

    STATES = ("velocity",)

    def __init__(
        self, params: Params, learning_rate: Rate = 0.01, momentum: float = 0.9, *, name: Name = None
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.momentum = momentum

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        (velocity,) = states
        velocity *= self.momentum
        velocity -= rate * gradient
        return velocity


class nesterov_momentum(momentum):  # noqa: N801
    """Nesterov's momentum, as in Sutskever et al. 2013: ``v = μ v - rate · g; p += μ v - rate · g``."""

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        velocity = super().step(gradient, rate, states)
        return self.momentum * velocity - rate * gradient


class adagrad(Rule):  # noqa: N801
    """AdaGrad (Duchi et al. 2011): ``a += g²; p -= rate · g / √(a + ε)``."""

    STATES = ("accumulator",)

    def __init__(
        self, params: Params, learning_rate: Rate = 1.0, epsilon: float = 1e-6, *, name: Name = None
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        (accumulator,) = states
        accumulator += gradient**2
        return -rate * gradient / np.sqrt(accumulator + self.epsilon)


class rmsprop(Rule):  # noqa: N801
    """RMSProp (Tieleman and Hinton 2012): ``a = ρ a + (1 - ρ) g²; p -= rate · g / √(a + ε)``."""

    STATES: tuple[str, ...] = ("accumulator",)

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1.0,
        rho: float = 0.9,
        epsilon: float = 1e-6,
        *,
        name: Name = None,
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.rho = rho
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        (accumulator,) = states
        _update_mean(accumulator, self.rho, gradient**2)
        return -rate * gradient / np.sqrt(accumulator + self.epsilon)


class adadelta(rmsprop):  # noqa: N801
    """AdaDelta (Zeiler 2012).

    ``a = ρ a + (1 - ρ) g²; u = g √(d + ε) / √(a + ε); p -= rate · u; d = ρ d + (1 - ρ) u²``.
    """

    STATES = ("accumulator", "delta")

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 1.0,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        *,
        name: Name = None,
    ) -> None:
        super().__init__(params, learning_rate, rho, epsilon, name=name)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        accumulator, delta = states
        _update_mean(accumulator, self.rho, gradient**2)
        update = gradient * np.sqrt(delta + self.epsilon) / np.sqrt(accumulator + self.epsilon)
        _update_mean(delta, self.rho, update**2)
        return -rate * update


class adam(Rule):  # noqa: N801
    """Adam (Kingma and Ba 2014), with the corrections of bias in the step size (section 2, end).

    ``m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; p -= rate · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)``.
    """

    STATES = ("first", "second")

    def __init__(
        self,
        params: Params,
        learning_rate: Rate = 0.001,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        name: Name = None,
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self._time = api.shared(np.zeros((), np.int64), f"{self.name}.time")

    def count(self) -> int:
        """The number of this step, from 1."""
        time = int(self._time.value) + 1
        self._time.value = np.int64(time)
        return time

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        first, second = states
        time = self.count()
        _update_mean(first, self.beta1, gradient)
        _update_mean(second, self.beta2, gradient**2)
        corrected = rate * np.sqrt(1 - self.beta2**time) / (1 - self.beta1**time)
        step: Vector = -corrected * first / (np.sqrt(second) + self.epsilon)
        return step


class adamax(adam):  # noqa: N801
    """AdaMax (Kingma and Ba 2014, section 7.1).

    ``m = β₁ m + (1 - β₁) g; u = max(β₂ u, |g|); p -= rate / (1 - β₁ᵗ) · m / (u + ε)``.
    """

    def __init__(self, params: Params, learning_rate: Rate = 0.002, **options: Any) -> None:
        super().__init__(params, learning_rate, **options)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        first, infinity = states
        time = self.count()
        _update_mean(first, self.beta1, gradient)
        np.maximum(self.beta2 * infinity, np.abs(gradient), out=infinity)
        return -rate / (1 - self.beta1**time) * first / (infinity + self.epsilon)


def _update_mean(mean: Vector, decay: float, value: Vector) -> None:
    """Bring *value* into a running *mean*, in place."""
    mean *= decay
    mean += (1 - decay) * value


def parameters(params: Sequence[Any]) -> list[Shared]:
    """The parameters, with PyTensor's shared variables replaced by their worker variables.

    Raises: InvalidType, InvalidValue unless they are variables of floats, each named once.
    """
    if not isinstance(params, list | tuple) or not params:
        raise InvalidType(f"params must be a list of worker variables, at least one; got {params!r}.")
    found = [session_variables().check(param, "params") for param in params]
    for param in found:
        if param.dtype.kind != "f":
            raise InvalidType(f"{param.called()} holds {param.dtype}: what is trained must be floats.")
    check_once(found, "params")
    return found


def session_variables() -> Variables:
    """The variables of the current session.  Raises: NotForked, UsageError."""
    return api.current_session("shared").functions.variables
