"""Update rules: how the flat gradient of all parameters changes them.

Each of the known rules is one class.  Its fields are its constants with their defaults, and its formula
works on arrays and on graphs of PyTensor alike: ``updates`` makes the classic form of the same class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .. import api
from ..controller.variables.registry import Variables
from ..controller.variables.shared import Shared, check_once
from ..errors import InvalidType, InvalidValue, shown
from ..values.foreign import is_graph_shared
from ..values.variable import Variable

Vector = NDArray[Any]
Params = Sequence[Any]
Rate = Any
Name = str | None
State = Sequence[Any]
Step = tuple[Any, list[Any]]


@dataclass(eq=False, repr=False)
class Rule(ABC):
    """A first-order update rule for a list of parameters, with its state in worker variables.

    Called with the flat gradient, on the workers, it changes the parameters.

    Attributes:
        STATES: the names of its state's vectors, each as long as all parameters together.
        name: the unique name of the rule, with which the names of its state's variables begin.
        params: the parameters, worker variables of floats (for PyTensor's shared variables, those that
            stand for them).  Those without a name get one.
        learning_rate: a number, or a variable without dimensions, which can be changed between calls.
    """

    STATES: ClassVar[tuple[str, ...]] = ()

    params: Params
    learning_rate: Rate = 0.01
    name: Name = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        self.params = parameters(self.params)
        variables = session_variables()
        if is_graph_shared(self.learning_rate):
            self.learning_rate = variables.check(self.learning_rate, "a rule")
        self.name = variables.unused_name(self.name or type(self).__name__)
        for index, param in enumerate(self.params):
            if param.name is None:  # a training is saved as a whole, or not at all
                variables.name(param, f"{self.name}.param{index}")
        zeros = self.zeros()
        self.states: list[Shared[Any]] = [
            api.shared(zeros, f"{self.name}.{state}") for state in self.STATES
        ]

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "learning_rate" and hasattr(self, "states"):
            raise InvalidValue(
                f"the rule {self.name!r} may be on the workers by now: to change its learning rate "
                f"between calls, make it with a variable, "
                f"learning_rate=synkro.shared({self.learning_rate!r}), and set that."
            )
        super().__setattr__(name, value)

    def zeros(self) -> Vector:
        """Zeros, as many as all parameters have elements, of the dtype of their gradient."""
        dtype = np.result_type(*[param.dtype for param in self.params])
        return np.zeros(sum(param.size for param in self.params), dtype)

    def __call__(self, gradient: Vector) -> None:
        """Change the parameters by their flat *gradient*, on this rank."""
        rate = self.learning_rate
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
        api.current_group(f"{self.name}").assign([*pairs, *self.counted()])

    def counted(self) -> list[tuple[Variable, Any]]:
        """Variables of the state that are no vectors, with their new values."""
        return []

    @abstractmethod
    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        """The change of the parameters, to be added to them, and the new state."""


class FormulaRule(Rule):
    """A rule whose step is a formula, for arrays and for graphs of PyTensor alike.

    Attributes:
        formula: takes the array module *xp*, the flat gradient *g*, the learning rate, the state (a list
            of vectors as long as *g*, zeros at first) and the constants.  It returns the change of the
            parameters, to be added to them, and the new state.
    """

    formula: ClassVar[Callable[..., Step]]

    def constants(self) -> list[Any]:
        """The constants of the formula, which are the fields of the rule."""
        return [getattr(self, each.name) for each in fields(self)[len(fields(Rule)) :]]

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Step:
        return self.formula(api.xp(), gradient, rate, states, *self.constants())


class sgd(FormulaRule):  # noqa: N801 - the rules have the names that they have everywhere
    """Stochastic gradient descent: ``p -= rate · g``.  It takes *params*, *learning_rate* and *name*."""

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State) -> Step:
        return -rate * g, []


@dataclass(eq=False, repr=False)
class momentum(FormulaRule):  # noqa: N801
    """Momentum: ``v = μ v - rate · g; p += v`` (Polyak 1964).

    It takes *params*, *learning_rate*, *momentum* (μ) and *name*.
    """

    STATES: ClassVar[tuple[str, ...]] = ("velocity",)

    momentum: float = 0.9

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State, momentum: float) -> Step:
        velocity = momentum * state[0] - rate * g
        return velocity, [velocity]


class nesterov_momentum(momentum):  # noqa: N801
    """Nesterov's momentum, as in Sutskever et al. 2013: ``v = μ v - rate · g; p += μ v - rate · g``.

    It takes *params*, *learning_rate*, *momentum* (μ) and *name*.
    """

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State, momentum: float) -> Step:
        velocity = momentum * state[0] - rate * g
        return momentum * velocity - rate * g, [velocity]


@dataclass(eq=False, repr=False)
class adagrad(FormulaRule):  # noqa: N801
    """AdaGrad (Duchi et al. 2011): ``a += g²; p -= rate · g / √(a + ε)``.

    It takes *params*, *learning_rate*, *epsilon* (ε) and *name*.
    """

    STATES: ClassVar[tuple[str, ...]] = ("accumulator",)

    learning_rate: Rate = 1.0
    epsilon: float = 1e-6

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State, epsilon: float) -> Step:
        squares = state[0] + g**2
        return -rate * g / xp.sqrt(squares + epsilon), [squares]


@dataclass(eq=False, repr=False)
class rmsprop(FormulaRule):  # noqa: N801
    """RMSProp (Tieleman and Hinton 2012): ``a = ρ a + (1 - ρ) g²; p -= rate · g / √(a + ε)``.

    It takes *params*, *learning_rate*, *rho* (ρ), *epsilon* (ε) and *name*.
    """

    STATES: ClassVar[tuple[str, ...]] = ("accumulator",)

    learning_rate: Rate = 1.0
    rho: float = 0.9
    epsilon: float = 1e-6

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State, rho: float, epsilon: float) -> Step:
        squares = rho * state[0] + (1 - rho) * g**2
        return -rate * g / xp.sqrt(squares + epsilon), [squares]


@dataclass(eq=False, repr=False)
class adadelta(rmsprop):  # noqa: N801
    """AdaDelta (Zeiler 2012).

    ``a = ρ a + (1 - ρ) g²; u = g √(d + ε) / √(a + ε); p -= rate · u; d = ρ d + (1 - ρ) u²``.
    It takes *params*, *learning_rate*, *rho* (ρ), *epsilon* (ε) and *name*.
    """

    STATES: ClassVar[tuple[str, ...]] = ("accumulator", "delta")

    rho: float = 0.95

    @staticmethod
    def formula(xp: Any, g: Any, rate: Any, state: State, rho: float, epsilon: float) -> Step:
        squares, changes = state
        squares = rho * squares + (1 - rho) * g**2
        change = g * xp.sqrt(changes + epsilon) / xp.sqrt(squares + epsilon)
        return -rate * change, [squares, rho * changes + (1 - rho) * change**2]


@dataclass(eq=False, repr=False)
class adam(FormulaRule):  # noqa: N801
    """Adam (Kingma and Ba 2014), with the corrections of bias in the step size (section 2, end).

    ``m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; p -= rate · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)``.
    It takes *params*, *learning_rate*, *beta1* (β₁), *beta2* (β₂), *epsilon* (ε) and *name*.
    """

    STATES: ClassVar[tuple[str, ...]] = ("first", "second")

    learning_rate: Rate = 0.001
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        self._time = api.shared(np.zeros((), np.int64), f"{self.name}.time")

    def count(self) -> int:
        """The number of this step, from 1."""
        return int(self._time.value) + 1

    def counted(self) -> list[tuple[Variable, Any]]:
        return [(self._time, np.int64(self.count()))]

    def constants(self) -> list[Any]:
        return [self.count(), *super().constants()]

    @staticmethod
    def formula(
        xp: Any, g: Any, rate: Any, state: State, time: Any, beta1: float, beta2: float, epsilon: float
    ) -> Step:
        first, second = state
        first = beta1 * first + (1 - beta1) * g
        second = beta2 * second + (1 - beta2) * g**2
        corrected = rate * (1 - beta2**time) ** 0.5 / (1 - beta1**time)
        return -corrected * first / (xp.sqrt(second) + epsilon), [first, second]


@dataclass(eq=False, repr=False)
class adamax(adam):  # noqa: N801
    """AdaMax (Kingma and Ba 2014, section 7.1).

    ``m = β₁ m + (1 - β₁) g; u = max(β₂ u, |g|); p -= rate / (1 - β₁ᵗ) · m / (u + ε)``.
    It takes *params*, *learning_rate*, *beta1* (β₁), *beta2* (β₂), *epsilon* (ε) and *name*.
    """

    learning_rate: Rate = 0.002

    @staticmethod
    def formula(
        xp: Any, g: Any, rate: Any, state: State, time: Any, beta1: float, beta2: float, epsilon: float
    ) -> Step:
        first, infinity = state
        first = beta1 * first + (1 - beta1) * g
        infinity = xp.maximum(beta2 * infinity, abs(g))
        return -rate / (1 - beta1**time) * first / (infinity + epsilon), [first, infinity]


def parameters(params: Sequence[Any]) -> list[Shared]:
    """The parameters, with PyTensor's shared variables replaced by their worker variables.

    Raises: InvalidType, InvalidValue unless they are variables of floats, each named once.
    """
    if not isinstance(params, list | tuple) or not params:
        raise InvalidType(
            f"params must be a list of worker variables, at least one; got {shown(params)}."
        )
    found = [session_variables().check(param, "params") for param in params]
    for param in found:
        if param.dtype.kind != "f":
            raise InvalidType(f"{param.called()} holds {param.dtype}: what is trained must be floats.")
    check_once(found, "params")
    return found


def mean_gradient(gradient: Variable, weight: int) -> Vector:
    """The mean of all ranks' replicas of *gradient*, in which this rank's counts *weight* times.

    It is for the end of a call: what is left in the replica of a rank without rows does not matter.
    """
    mine = gradient.value if weight else np.zeros_like(gradient.value)
    mean: Vector = api.all_reduce(mine, "mean", weight=weight)
    return mean


def session_variables() -> Variables:
    """The variables of the current session.  Raises: NotForked, UsageError."""
    return api.current_session("shared").services.variables
