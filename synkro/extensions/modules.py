"""A training step of a module and an optimizer of PyTorch's, which live on the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from .. import api
from ..controller.calls.function import Definition, Function
from ..errors import InvalidType, InvalidValue, shown
from ..values.variable import Variable
from .rules import mean_gradient


def module_step(
    module: torch.nn.Module, loss: Any, optimizer: Any, keywords: dict[str, Any]
) -> Function[..., Any]:
    """A ``Function`` that makes a step; *keywords* are for ``Definition``.

    Raises: InvalidType, InvalidValue; NotForked.
    """
    chosen = _check(module, loss, optimizer)
    flat = _flat([parameter.detach() for parameter in _parameters(optimizer, chosen)])
    gradient = api.shared(np.zeros(flat.numel() + len(chosen), flat.cpu().numpy().dtype))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        value = loss(module(x), y)
        return value, [_gradient(value, _parameters(optimizer, chosen))]

    definition = Definition(
        step,
        updates=[(gradient, "mean")],
        finish=_finish(gradient, optimizer, chosen),
        **{**keywords, "name": keywords["name"] or "train"},
    )
    services = api.current_session("function").services
    return Function(lambda verb: services, definition)


def _check(module: torch.nn.Module, loss: Any, optimizer: Any) -> frozenset[int]:
    """The places of the parameters that are trained, among those of the optimizer."""
    if not callable(loss):
        raise InvalidType(
            f"loss must be a function of the module's output and the target, such as "
            f"torch.nn.functional.cross_entropy; got {shown(loss)}."
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidType(
            f"the last argument must be an optimizer of PyTorch's, such as "
            f"torch.optim.SGD(module.parameters(), lr=0.1); got {shown(optimizer)}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidType("LBFGS computes the loss several times in a step: use another optimizer.")
    listed = [each for group in optimizer.param_groups for each in group["params"]]
    chosen = frozenset(place for place, each in enumerate(listed) if each.requires_grad)
    own = set(map(id, module.parameters()))
    if not any(id(listed[place]) in own for place in chosen):
        raise InvalidValue(
            "the optimizer trains no parameter of the module: make it of module.parameters()."
        )
    return chosen


def _parameters(optimizer: Any, chosen: frozenset[int]) -> list[torch.Tensor]:
    """The parameters that are trained.  Raises: InvalidValue if there are others by now."""
    listed = [each for group in optimizer.param_groups for each in group["params"]]
    if any(each.requires_grad for place, each in enumerate(listed) if place not in chosen):
        raise InvalidValue(
            "the optimizer has parameters that require grad, and did not when the training step was "
            "made: call make_train_function() again."
        )
    return [each for place, each in enumerate(listed) if place in chosen]


def _gradient(value: Any, parameters: list[torch.Tensor]) -> torch.Tensor:
    """The gradients of a loss, as one vector; at its end a 1 for each parameter that has one, else 0."""
    mean = value[0] if isinstance(value, tuple | list) and value else value
    if not isinstance(mean, torch.Tensor) or mean.ndim or not mean.requires_grad:
        raise InvalidType(
            f"the loss must be a tensor without dimensions that depends on the parameters, a mean over "
            f"the rows, or a tuple that begins with one; got {shown(value)}."
        )
    wanted = [each for each in parameters if each.requires_grad]
    found = iter(torch.autograd.grad(mean, wanted, allow_unused=True))
    gradients = [next(found) if each.requires_grad else None for each in parameters]
    pairs = zip(gradients, parameters, strict=True)
    flat = _flat([torch.zeros_like(p) if g is None else g.to_dense() for g, p in pairs])
    return torch.cat([flat, flat.new_tensor([g is not None for g in gradients])])


def _flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    """*tensors* as one vector, of floats of 32 bits at least."""
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in tensors], torch.float32)
    return torch.cat([each.reshape(-1).to(dtype) for each in tensors])


def _finish(gradient: Variable, optimizer: Any, chosen: frozenset[int]) -> Callable[[int], None]:
    """The end of a call on every rank: one all-reduce, and the optimizer's step."""

    def finish(weight: int) -> None:
        mean = torch.as_tensor(mean_gradient(gradient, weight))
        parameters = _parameters(optimizer, chosen)
        lengths = [each.numel() for each in parameters]
        *parts, found = torch.split(mean, [*lengths, len(parameters)])
        optimizer.zero_grad()
        for parameter, part, used in zip(parameters, parts, found.tolist(), strict=True):
            if used:  # on some rank: the others stay as they are, as in serial code
                parameter.grad = part.view_as(parameter).to(parameter)
        optimizer.step()
        optimizer.zero_grad()

    return finish
