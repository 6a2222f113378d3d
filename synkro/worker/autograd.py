"""The gradients of collectives, for PyTorch's tensors: each is another collective.

The gradient is that of the sum of the losses of all ranks::

    forward                     backward
    ───────                     ────────
    all_reduce      sum         all_reduce of the gradients, by sum
                    mean        the same, times this rank's part of the weights
                    max, min    the same, where this rank's element was the result; shared among equals
                    prod        the same, times the product of the others
    reduce_scatter              as all_reduce, but the gradients are gathered
    all_gather                  this rank's rows of the sum of the gradients
    all_to_all                  all_to_all, each row back to where it was
    broadcast                   their sum to the root
    scatter                     each rank's rows back to the root
    exchange                    exchange

A collective is computed first, as ever.  Then, where a tensor has a history on any rank, it becomes a
node of the graph of every rank, so that backward comes to it on all of them, in the reverse order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch.autograd.function import once_differentiable

from ..comms.members import Members
from ..comms.records import Entry, Record
from ..errors import InvalidType, UsageError, shown
from ..plan.split import split
from ..values.foreign import handed

Tensors = list[torch.Tensor]

Group = Any
"""The ``group.Group`` whose collectives these are, and which imports this module when it needs it: the
gradients are computed by its ``backward``, in which they are collectives of its own."""


@dataclass(frozen=True)
class Entered:
    """A collective that gave tensors with a history.

    Attributes:
        group, members, records, entry: who entered it, what they said, and which it was.
        op: the name of its operation.
        other: the other rank of an exchange.
        forms: the shape, the dtype and the device of each tensor that this rank gave.
    """

    group: Group
    members: Members
    records: Sequence[Record]
    entry: Entry
    op: str
    other: int
    forms: Sequence[tuple[Any, Any, Any]]

    @property
    def rows(self) -> list[int]:
        """How many rows each rank gave."""
        return [record.given[0][0][0] for record in self.records]

    @property
    def part(self) -> float:
        """This rank's weight, as a part of those of all."""
        return self.records[self.members.place].weight / sum(record.weight for record in self.records)

    def zeros(self) -> Tensors:
        return [torch.zeros(shape, dtype=dtype, device=at) for shape, dtype, at in self.forms]


def with_history(
    group: Group, values: Sequence[Any], results: Sequence[Any], op: str, entry: Entry, other: int
) -> list[Any]:
    """*results* of a collective of *values*, those with a history on any rank with one here.

    *op*, *entry* and *other* are as in ``Entered``.

    Raises: InvalidType, UsageError if this rank cannot take part in the backward.
    """
    tracked = group.comm.agreement.tracked()
    records = group.comm.agreement.records
    kind, rooted = records[0].kind, records[0].root >= 0
    chosen = [index for index in range(len(values)) if tracked >> index & 1]
    if not torch.is_grad_enabled():
        raise UsageError(
            f"{kind}: another rank gave a tensor that requires grad, but this one is in "
            f"torch.no_grad(): all ranks have to take part in backward(), or none."
        )
    for value in [] if rooted else [values[index] for index in chosen]:
        if not isinstance(value, torch.Tensor):
            raise InvalidType(
                f"{kind}: another rank gave a tensor that requires grad, but this one gave "
                f"{shown(value)}, which backward() does not come to: give tensors on all ranks."
            )
    for index in chosen:
        if not (rooted or results[index].is_floating_point() or results[index].is_complex()):
            raise InvalidType(
                f"{kind}: one rank gave a tensor that requires grad, and got one of "
                f"{results[index].dtype}, through which no gradient comes back: give floats on both."
            )
    inputs = [values[index] for index in chosen if isinstance(values[index], torch.Tensor)]
    forms = [(each.shape, each.dtype, each.device) for each in inputs]
    outputs = [_tensor(results[index]) for index in chosen]
    entered = Entered(group, group.comm.agreement.meeting.members, records, entry, op, other, forms)
    anchor = torch.empty(0, device="cpu", requires_grad=True)  # so that every rank gets a node
    nodes: Any = Collective.apply(entered, outputs, anchor, *inputs)
    found = list(results)
    for index, output in zip(chosen, nodes, strict=True):
        found[index] = output
    return found


def _tensor(result: Any) -> torch.Tensor:
    """A result as a tensor: a rank that is no root may have given anything."""
    if isinstance(result, torch.Tensor):
        return result
    array = np.asarray(result) if isinstance(result, np.generic) else result
    return cast("torch.Tensor", handed(array, "torch"))


class Collective(torch.autograd.Function):  # type: ignore[misc]
    """A collective in the graph of one rank."""

    @staticmethod
    def forward(ctx: Any, entered: Entered, outputs: Tensors, anchor: Any, *inputs: Any) -> Any:
        ctx.entered = entered
        kept = {"prod": inputs, "max": (*inputs, *outputs), "min": (*inputs, *outputs)}
        ctx.save_for_backward(*kept.get(entered.op, ()))
        return tuple(outputs)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Any) -> Any:
        entered, kept = ctx.entered, ctx.saved_tensors
        work = functools.partial(BACKWARD[entered.records[0].kind], entered, list(gradients), kept)
        found = entered.group.backward(entered.entry, entered.members, work)
        needed = ctx.needs_input_grad[3:]
        return None, None, None, *[f if need else None for f, need in zip(found, needed, strict=True)]


# ── the backward of each: from the gradients of the results to those of what this rank gave ──────────


def _all_reduce(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    group, op = entered.group, entered.op
    if op == "mean":  # of the gradients, too: a sum of halves could overflow
        return _parts(group.all_reduce(gradients, "mean"), entered.part * group.size)
    sums: Tensors = group.all_reduce(gradients, "sum")
    inputs, outputs = kept[: len(sums)], kept[len(sums) :]
    return sums if op == "sum" else _shares(entered, sums, inputs, outputs)


def _reduce_scatter(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    group, op = entered.group, entered.op
    whole = [group.all_gather(gradients[0])]
    if op in ("sum", "mean"):
        return whole if op == "sum" else _parts(whole, entered.part)
    return _shares(entered, whole, kept[:1], [group.all_gather(each) for each in kept[1:]])


def _parts(gradients: Tensors, part: float) -> Tensors:
    """The gradients times *part*; without a weight they are zero, also where they are nan."""
    return [each * part if part else torch.zeros_like(each) for each in gradients]


def _shares(entered: Entered, gradients: Tensors, inputs: Tensors, outputs: Tensors) -> Tensors:
    """This rank's shares of the gradients of products or extrema of *inputs*."""
    if entered.op == "prod":
        return [g * _others(entered.group, x).conj() for g, x in zip(gradients, inputs, strict=True)]
    pairs = zip(inputs, outputs, strict=True)
    mine = [(x == y) | ((x != x) & (y != y)) for x, y in pairs]  # noqa: PLR0124  only nan is not itself
    equals = entered.group.all_reduce(mine, "sum")
    return [
        torch.where(here, g / count, torch.zeros_like(g))
        for here, g, count in zip(mine, gradients, equals, strict=True)
    ]


def _others(group: Group, tensor: torch.Tensor) -> torch.Tensor:
    """The product of the tensors of the other ranks, exact also where there are zeros."""
    every = group.all_gather(tensor, 1)
    exact = every.float() if every.dtype in (torch.float16, torch.bfloat16) else every
    others = torch.cat([exact[: group.rank], exact[group.rank + 1 :]])
    return others.prod(dim=0).to(every.dtype)


def _all_gather(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    group, rows, ((shape, _, _),) = entered.group, entered.rows, entered.forms
    if rows == _lengths(sum(rows), group.size):
        return [group.reduce_scatter(gradients[0], "sum").reshape(shape)]
    stop = sum(rows[: group.rank + 1])
    total = group.all_reduce(gradients[0], "sum")
    return [total[stop - rows[group.rank] : stop].reshape(shape)]


def _all_to_all(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    """Every rank sends the parts back, filled up with zeros to the same length, so that they split."""
    group = entered.group
    parts = [_lengths(rows, group.size) for rows in entered.rows]  # parts[r][s]: from rank r to rank s
    most = max(map(max, parts))
    if not most:
        return entered.zeros()
    sent = []
    for part in torch.split(gradients[0], [to[group.rank] for to in parts]):
        sent += [part, part.new_zeros((most - len(part), *part.shape[1:]))]
    back = torch.split(group.all_to_all(torch.cat(sent)), most)
    return [torch.cat([part[:own] for part, own in zip(back, parts[group.rank], strict=True)])]


def _broadcast(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    total = entered.group.reduce(gradients[0], "sum", root=entered.records[0].root)
    return entered.zeros() if total is None else [total]


def _scatter(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    whole = entered.group.gather(gradients[0], root=entered.records[0].root)
    return entered.zeros() if whole is None else [whole]


def _exchange(entered: Entered, gradients: Tensors, kept: Tensors) -> Tensors:
    return [entered.group.exchange(gradients[0], entered.other)]


def _lengths(rows: int, size: int) -> list[int]:
    """How many of so many rows each rank gets when they are split."""
    return [stop - start for start, stop in split(0, rows, size)]


BACKWARD: dict[str, Callable[[Entered, Tensors, Tensors], Tensors]] = {
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "scatter": _scatter,
    "exchange": _exchange,
}
