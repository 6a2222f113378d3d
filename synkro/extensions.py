"""Update rules, and training steps that are one call.

A rule works on all parameters at once, as one flat vector: so does the all-reduce of their gradients.
::

    rule = adam([w, b], learning_rate=0.01)
    train = make_train_function(loss_and_grad, [w, b], rule)
    loss = train(x, y, batch=rows)

where ``loss_and_grad(x, y)`` reads ``w.value`` and ``b.value`` and returns the mean loss over its rows,
and a list of the gradients.  Of a PyTensor graph the loss suffices::

    train = make_train_function(loss, [w, b], x, y, rule)

where *w* and *b* are shared variables of PyTensor's, and *x* and *y* inputs of the graph.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from . import api
from .errors import InvalidType, InvalidValue
from .foreign import is_graph_shared, is_graph_variable
from .function import Function
from .variable import Variable

Vector = NDArray[Any]


class Rule(ABC):
    """A first-order update rule for a list of parameters, with its state in worker variables.

    Called with the flat gradient, on the workers, it changes the parameters.

    Attributes:
        name: what the variables of its state are named by, in files: that of the rule, made unique.
        params: the parameters, worker variables of floats (for PyTensor's shared variables, those that
            stand for them).  Those without a name get one.
    """

    def __init__(
        self, params: Sequence[Any], learning_rate: float | Variable, *states: str, name: str | None
    ) -> None:
        self.params = _checked(params)
        if is_graph_shared(learning_rate):
            learning_rate = api.worker_variable(learning_rate)
        self._rate = learning_rate
        self._dtype = np.result_type(*[param.dtype for param in self.params])
        self.name = label = api.unused_name(name or type(self).__name__)
        for index, param in enumerate(self.params):
            if param.name is None:  # so that all of a training is saved, or nothing
                api.name_variable(param, f"{label}.param{index}")
        size = sum(prod(param.shape) for param in self.params)
        self.states = [api.shared(np.zeros(size, self._dtype), f"{label}.{state}") for state in states]

    @property
    def learning_rate(self) -> Any:
        """A number, or a variable without dimensions, to be changed between calls."""
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
        """What is to be added to the parameters; changes *states* in place."""


class sgd(Rule):  # noqa: N801 - the rules have the names that they have everywhere
    """Stochastic gradient descent: ``p -= rate · g``."""

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable = 0.01,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, name=name)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        return -rate * gradient


class momentum(Rule):  # noqa: N801
    """Momentum: ``v = μ v - rate · g; p += v`` (Polyak 1964)."""

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable = 0.01,
        momentum: float = 0.9,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, "velocity", name=name)
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

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable = 1.0,
        epsilon: float = 1e-6,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, "accumulator", name=name)
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        (accumulator,) = states
        accumulator += gradient**2
        return -rate * gradient / np.sqrt(accumulator + self.epsilon)


class rmsprop(Rule):  # noqa: N801
    """RMSProp (Tieleman and Hinton 2012): ``a = ρ a + (1 - ρ) g²; p -= rate · g / √(a + ε)``."""

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable = 1.0,
        rho: float = 0.9,
        epsilon: float = 1e-6,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, "accumulator", name=name)
        self.rho = rho
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        (accumulator,) = states
        accumulator *= self.rho
        accumulator += (1 - self.rho) * gradient**2
        return -rate * gradient / np.sqrt(accumulator + self.epsilon)


class adadelta(Rule):  # noqa: N801
    """AdaDelta (Zeiler 2012).

    ``a = ρ a + (1 - ρ) g²; u = g √(d + ε) / √(a + ε); p -= rate · u; d = ρ d + (1 - ρ) u²``.
    """

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable = 1.0,
        rho: float = 0.95,
        epsilon: float = 1e-6,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, "accumulator", "delta", name=name)
        self.rho = rho
        self.epsilon = epsilon

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        accumulator, delta = states
        accumulator *= self.rho
        accumulator += (1 - self.rho) * gradient**2
        update = gradient * np.sqrt(delta + self.epsilon) / np.sqrt(accumulator + self.epsilon)
        delta *= self.rho
        delta += (1 - self.rho) * update**2
        return -rate * update


class _Adaptive(Rule):
    """What Adam and AdaMax have in common: two moments, and a count of the steps."""

    def __init__(
        self,
        params: Sequence[Variable],
        learning_rate: float | Variable,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        *,
        name: str | None = None,
    ) -> None:
        super().__init__(params, learning_rate, "first", "second", name=name)
        self.beta1 = beta1
        self.beta2 = beta2
        self.epsilon = epsilon
        self._time = api.shared(np.zeros((), np.int64), f"{self.name}.time")

    def count(self) -> int:
        """The number of this step, from 1."""
        time = int(self._time.value) + 1
        self._time.value = np.int64(time)
        return time


class adam(_Adaptive):  # noqa: N801
    """Adam (Kingma and Ba 2014), with the corrections of bias in the step size (section 2, end).

    ``m = β₁ m + (1 - β₁) g; v = β₂ v + (1 - β₂) g²; p -= rate · √(1 - β₂ᵗ) / (1 - β₁ᵗ) · m / (√v + ε)``.
    """

    def __init__(
        self, params: Sequence[Variable], learning_rate: float | Variable = 0.001, **options: Any
    ) -> None:
        super().__init__(params, learning_rate, **options)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        first, second = states
        time = self.count()
        first *= self.beta1
        first += (1 - self.beta1) * gradient
        second *= self.beta2
        second += (1 - self.beta2) * gradient**2
        corrected = rate * np.sqrt(1 - self.beta2**time) / (1 - self.beta1**time)
        step: Vector = -corrected * first / (np.sqrt(second) + self.epsilon)
        return step


class adamax(_Adaptive):  # noqa: N801
    """AdaMax (Kingma and Ba 2014, section 7.1).

    ``m = β₁ m + (1 - β₁) g; u = max(β₂ u, |g|); p -= rate / (1 - β₁ᵗ) · m / (u + ε)``.
    """

    def __init__(
        self, params: Sequence[Variable], learning_rate: float | Variable = 0.002, **options: Any
    ) -> None:
        super().__init__(params, learning_rate, **options)

    def step(self, gradient: Vector, rate: float, states: list[Vector]) -> Vector:
        first, infinity = states
        time = self.count()
        first *= self.beta1
        first += (1 - self.beta1) * gradient
        np.maximum(self.beta2 * infinity, np.abs(gradient), out=infinity)
        return -rate / (1 - self.beta1**time) * first / (infinity + self.epsilon)


def flatten(arrays: Sequence[ArrayLike], params: Sequence[Variable]) -> Vector:
    """Gradients of *params*, in their order, as one vector.

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
    outputs: Any = "mean",
    name: str | None = None,
    **options: Any,
) -> Function:
    """A function whose call is a whole training step: gradient, all-reduce, update.

    ``make_train_function(loss_and_grad, params, rule)`` makes it of a Python function,
    ``make_train_function(loss, params, x, y, rule)`` of a PyTensor graph.

    Args:
        loss: a function that returns ``(loss, gradients)``: a mean over its rows (or more, as *outputs*
            says), and a gradient of that mean for each parameter, in their order.  Or a variable of a
            graph, such a mean without dimensions, whose gradient PyTensor finds.
        params: the worker variables that are trained, or the shared variables of the graph.
        inputs_and_rule: the inputs of the graph that are scattered, if there is one, and last what
            ``sgd(params, …)`` and its like have made for the same *params*.
        inputs, bcast_inputs, sliceable_shareds, name: as for ``function()``.
        outputs: the operation on the loss, or as for ``function()``: of a Python function operations,
            nested as its loss; of a graph variables.
        options: of a graph, for ``pytensor.function``, and ``givens=``.

    The call takes ``batch=``, ``batch_s=`` and ``num_slices=`` as any other.  Ranks and slices count by
    their rows, so that a step is the one that serial code makes on the whole batch; ranks without
    rows make it as well.  It returns the loss.

    Raises: InvalidType, InvalidValue; NotForked.
    """
    given, rule = inputs_and_rule[:-1], inputs_and_rule[-1] if inputs_and_rule else None
    if not isinstance(rule, Rule):
        raise InvalidType(
            f"the last argument must be an update rule, such as sgd(params); got {rule!r}."
        )
    if [id(param) for param in _found(params)] != [id(param) for param in rule.params]:
        raise InvalidValue(
            "the rule was made for other parameters, or in another session: make it for the same ones, "
            "in this order and session."
        )
    keywords = {
        "inputs": list(given) or inputs,
        "bcast_inputs": bcast_inputs,
        "sliceable_shareds": sliceable_shareds,
        "outputs": outputs,
        "name": name,
        **options,
    }
    if is_graph_variable(loss):
        function, gradient = _of_graph(loss, params, rule, keywords)
    elif given:
        raise InvalidType(
            f"inputs of a function of Python are named, in inputs= and bcast_inputs=; got {given!r}."
        )
    else:
        function, gradient = _of_callable(loss, rule, keywords)

    def step(weight: int) -> None:
        mine = gradient.value if weight else np.zeros_like(gradient.value)
        rule(api.all_reduce(mine, "mean", weight=weight))

    function.finish = step
    return function


def _of_callable(
    loss_and_grad: Callable[..., Any], rule: Rule, keywords: dict[str, Any]
) -> tuple[Function, Variable]:
    """A function that returns the loss, and the variable that the flat gradient goes to."""
    dtype = np.result_type(*[param.dtype for param in rule.params])
    gradient = api.shared(np.zeros(sum(prod(param.shape) for param in rule.params), dtype))

    @functools.wraps(loss_and_grad)
    def loss_and_flat_gradient(*args: Any, **kwargs: Any) -> Any:
        result = loss_and_grad(*args, **kwargs)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise InvalidType("loss_and_grad must return two things, the loss and a list of gradients.")
        loss, gradients = result
        return loss, [flatten(gradients, rule.params)]

    return api.function(loss_and_flat_gradient, updates=[(gradient, "mean")], **keywords), gradient


def _of_graph(
    loss: Any, params: Sequence[Any], rule: Rule, keywords: dict[str, Any]
) -> tuple[Function, Variable]:
    """The same of a graph; the parameters come to the workers before a call, and back after it."""
    from .frontends.pytensor import flat_gradient  # noqa: PLC0415  whoever has graphs has imported it

    target, flat = flat_gradient(loss, params)
    if isinstance(keywords["outputs"], str):
        keywords["outputs"] = (loss, keywords["outputs"])
    function = api.function(updates=[(target, flat)], **keywords)
    rates = [rule.learning_rate] if isinstance(rule.learning_rate, Variable) else []
    function.bridge.extend(used=rates, changed=rule.params)
    return function, api.worker_variable(target)


def _found(params: Sequence[Any]) -> list[Any]:
    """The parameters, PyTensor's shared variables as the worker variables that stand for them."""
    if not isinstance(params, list | tuple) or not params:
        raise InvalidType(f"params must be a list of worker variables, at least one; got {params!r}.")
    return [api.worker_variable(param) if is_graph_shared(param) else param for param in params]


def _checked(params: Sequence[Any]) -> list[Variable]:
    found = _found(params)
    for param in found:
        if not isinstance(param, Variable):
            raise InvalidType(f"params must be worker variables, made by shared(); got {param!r}.")
        if param.dtype.kind != "f":
            raise InvalidType(f"{param.called()} holds {param.dtype}: what is trained must be floats.")
    if len({id(param) for param in found}) < len(found):
        raise InvalidValue("params names a variable twice: name each once.")
    return found
