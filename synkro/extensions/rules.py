"""Update rules: how the flat gradient of all parameters changes them.

Their formulas are in ``formulas``.
"""

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
from . import formulas
from .formulas import Step

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
        step, new = self.step(gradient, rate, [state.value for state in self.states])
        pairs = [(s, v.astype(s.dtype, copy=False)) for s, v in zip(self.states, new, strict=True)]
        start = 0
        for param in self.params:
            value = param.value
            stop = start + value.size
            change = step[start:stop].reshape(value.shape).astype(value.dtype, copy=False)
            pairs.append((param, value + change))
            start = stop
        api.current_group(self.name).assign([*pairs, *self.counted()])

    def counted(self) -> list[tuple[Variable, Any]]:
        """Variables of the state that are no vectors, with their new values."""
        return []

    @abstractmethod
    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        """The change of the parameters, to be added to them, and the new state."""


class sgd(Rule):  # noqa: N801 - the rules have the names that they have everywhere
    """Stochastic gradient descent."""

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.sgd(api.xp(), gradient, rate, states)


class momentum(Rule):  # noqa: N801
    """Momentum (Polyak 1964)."""

    STATES = ("velocity",)

    def __init__(
        self, params: Params, learning_rate: Rate = 0.01, momentum: float = 0.9, *, name: Name = None
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.momentum = momentum

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.momentum(api.xp(), gradient, rate, states, self.momentum)


class nesterov_momentum(momentum):  # noqa: N801
    """Nesterov's momentum, as in Sutskever et al. 2013."""

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.nesterov_momentum(api.xp(), gradient, rate, states, self.momentum)


class adagrad(Rule):  # noqa: N801
    """AdaGrad (Duchi et al. 2011)."""

    STATES = ("accumulator",)

    def __init__(
        self, params: Params, learning_rate: Rate = 1.0, epsilon: float = 1e-6, *, name: Name = None
    ) -> None:
        super().__init__(params, learning_rate, name=name)
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.adagrad(api.xp(), gradient, rate, states, self.epsilon)


class rmsprop(Rule):  # noqa: N801
    """RMSProp (Tieleman and Hinton 2012)."""

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

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.rmsprop(api.xp(), gradient, rate, states, self.rho, self.epsilon)


class adadelta(rmsprop):  # noqa: N801
    """AdaDelta (Zeiler 2012)."""

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

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return formulas.adadelta(api.xp(), gradient, rate, states, self.rho, self.epsilon)


class adam(Rule):  # noqa: N801
    """Adam (Kingma and Ba 2014), with the corrections of bias in the step size (section 2, end)."""

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
        return int(self._time.value) + 1

    def counted(self) -> list[tuple[Variable, Any]]:
        return [(self._time, np.int64(self.count()))]

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        constants = self.count(), self.beta1, self.beta2, self.epsilon
        return formulas.adam(api.xp(), gradient, rate, states, *constants)


class adamax(adam):  # noqa: N801
    """AdaMax (Kingma and Ba 2014, section 7.1)."""

    def __init__(self, params: Params, learning_rate: Rate = 0.002, **options: Any) -> None:
        super().__init__(params, learning_rate, **options)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        constants = self.count(), self.beta1, self.beta2, self.epsilon
        return formulas.adamax(api.xp(), gradient, rate, states, *constants)


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
