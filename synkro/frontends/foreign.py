"""Objects of libraries that the user has imported, told apart without importing any of them."""

from __future__ import annotations

import importlib
import sys
from typing import Any


def is_graph_variable(value: Any) -> bool:
    """Whether *value* is a variable of a PyTensor graph."""
    return _is(value, "pytensor.graph.basic", "Variable")


def is_graph_shared(value: Any) -> bool:
    """Whether *value* is a shared variable of PyTensor's."""
    return _is(value, "pytensor.compile.sharedvalue", "SharedVariable")


def has_graph_variables(*values: Any) -> bool:
    """Whether there are variables of a PyTensor graph among *values*, nested as they may be."""
    if "pytensor" not in sys.modules:
        return False
    stack = list(values)
    while stack:
        value = stack.pop()
        if is_graph_variable(value):
            return True
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            stack += value
    return False


def tensor_as_array(value: Any) -> Any:
    """A tensor of PyTorch's as an array in host memory, without its history; anything else as it is.

    Raises: ImportError for bfloat16 without ml_dtypes.
    """
    if not _is(value, "torch", "Tensor"):
        return value
    torch = sys.modules["torch"]
    tensor = value.detach().cpu().resolve_conj().resolve_neg()
    if tensor.dtype is torch.bfloat16:
        bits = tensor.contiguous().view(torch.int16).numpy()
        return bits.view(importlib.import_module("ml_dtypes").bfloat16)
    return tensor.numpy()


def _is(value: Any, module: str, name: str) -> bool:
    """Whether *value* is an instance of a class that nobody has one of unless it is imported."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
