"""Transfers in graphs of PyTensor: ``expr.transfer("dev1")`` marks where a value is wanted.

In a function of Synkro's they say where operations run.  In a function of PyTensor's own, which runs in
one process, they are nothing: a rewrite removes them.
"""

from __future__ import annotations

from typing import Any, Final

from pytensor.compile import optdb  # noqa: F401  the registry of rewrites, which must be there first
from pytensor.gradient import DisconnectedType
from pytensor.graph.basic import Apply
from pytensor.graph.basic import Variable as GraphVariable
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter
from pytensor.tensor.basic import register_transfer
from pytensor.tensor.rewriting.basic import register_canonicalize
from pytensor.tensor.type import TensorType


class FirstValue(Op):  # type: ignore[misc]
    """The first of some values, as it is."""

    view_map: Final = {0: [0]}

    def make_node(self, *values: Any) -> Any:
        return Apply(self, list(values), [values[0].type()])

    def perform(self, node: Any, inputs: Any, outputs: Any) -> None:
        outputs[0][0] = inputs[0]

    def grad(self, inputs: Any, cotangents: Any) -> Any:  # the name that PyTensor 2 has for it
        return self.pullback(inputs, None, cotangents)

    def infer_shape(self, *node_and_shapes: Any) -> Any:  # before the node PyTensor 2 has the graph
        return [node_and_shapes[-1][0]]


class TransferTo(FirstValue):
    """The value, on the device with the name *target*."""

    __props__: Final = ("target",)

    def __init__(self, target: str | int | None) -> None:
        self.target = target

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> Any:
        return [back(cotangents[0], inputs[0])]

    def __str__(self) -> str:
        return f"Transfer{{{self.target}}}"


class TransferBack(FirstValue):
    """The first value, where the second one is, which stays there: the gradient of a transfer."""

    __props__: Final = ()

    def connection_pattern(self, node: Any) -> Any:
        return [[True], [False]]

    def pullback(self, inputs: Any, outputs: Any, cotangents: Any) -> Any:
        return [back(cotangents[0], inputs[0]), DisconnectedType()()]


_back = TransferBack()


def back(value: Any, like: Any) -> Any:
    """*value*, where *like* is; as it is, if it is the gradient of nothing."""
    return value if isinstance(value.type, DisconnectedType) else _back(value, like)


def transferred(value: Any, target: Any) -> Any:
    """What ``value.transfer(target)`` is; None for what PyTensor may know itself."""
    if not isinstance(target, str | int | None) or not isinstance(value, GraphVariable):
        return None
    return TransferTo(target)(value) if isinstance(value.type, TensorType) else None


@register_canonicalize  # type: ignore[untyped-decorator]
@node_rewriter([TransferTo, TransferBack])  # type: ignore[untyped-decorator]
def local_remove_transfers(fgraph: Any, node: Any) -> Any:
    return [node.inputs[0]]


register_transfer(transferred)
