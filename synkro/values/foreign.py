"""Objects of libraries that the user may have imported, recognized without importing them."""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Sequence
from types import NoneType
from typing import Any, get_args

import numpy as np

from ..errors import InvalidType, reason


def is_graph_variable(value: Any) -> bool:
    """Whether *value* is a variable of a PyTensor graph."""
    return _is(value, "pytensor.graph.basic", "Variable")


def is_graph_shared(value: Any) -> bool:
    """Whether *value* is a shared variable of PyTensor's."""
    return _is(value, "pytensor.compile.sharedvalue", "SharedVariable")


def has_graph_variables(*values: Any) -> bool:
    """Whether there are variables of a PyTensor graph in *values*, at any depth."""
    if "pytensor" not in sys.modules:
        return False
    stack = list(values)
    opened = set()  # a container may contain itself
    while stack:
        value = stack.pop()
        if is_graph_variable(value):
            return True
        if isinstance(value, dict | list | tuple) and id(value) not in opened:
            opened.add(id(value))
            stack += [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return False


def is_numba(value: Any) -> bool:
    """Whether *value* is a function of numba's: made by ``@njit`` or ``@vectorize``."""
    dispatcher = _is(value, "numba.core.dispatcher", "Dispatcher")
    return dispatcher or _is(value, "numba.np.ufunc.dufunc", "DUFunc")


def is_future(value: Any) -> bool:
    """Whether *value* is a ``concurrent.futures.Future``."""
    return _is(value, "concurrent.futures._base", "Future")


def is_generator(value: Any) -> bool:
    """Whether *value* is a random generator: NumPy's, Python's or PyTorch's."""
    kinds = ("Generator", "BitGenerator", "RandomState")
    of_numpy = any(_is(value, "numpy.random", kind) for kind in kinds)
    return of_numpy or _is(value, "random", "Random") or _is(value, "torch", "Generator")


def is_view_of_hdf5(value: Any) -> bool:
    """Whether *value* is what ``dataset.fields(…)`` of h5py is: ``value[()]`` are its elements.

    NumPy's ``asarray`` repeats the elements of a field that is an array.
    """
    return any(_is(value, "h5py._hl.dataset", name) for name in ("FieldsView", "FieldsWrapper"))


def is_tensor(value: Any) -> bool:
    """Whether *value* is one of PyTorch's tensors."""
    return _is(value, "torch", "Tensor")


def has_history(value: Any) -> bool:
    """Whether PyTorch records what becomes of *value*, for gradients."""
    return is_tensor(value) and value.requires_grad and sys.modules["torch"].is_grad_enabled()


def in_backward() -> bool:
    """Whether PyTorch computes gradients in this thread, which may be one of its own."""
    torch = sys.modules.get("torch")
    task = getattr(torch and torch._C, "_current_graph_task_id", None)
    return task is not None and task() != -1


def times_written(tensor: Any) -> int:
    """How often PyTorch has written to one of its tensors in place."""
    return int(tensor._version)


def tensor_bytes(tensor: Any) -> tuple[Any, Any]:
    """The form of one of PyTorch's tensors, and its elements, as an array of bytes."""
    torch = sys.modules["torch"]
    form = (tuple(tensor.shape), str(tensor.dtype), str(tensor.layout))
    if tensor.is_meta or tensor.layout is not torch.strided:
        return form, np.frombuffer(repr(tensor.detach()).encode(), np.uint8)
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return form, host.reshape(-1).view(torch.uint8).numpy()


def put_into_tensor(tensor: Any, values: Any, requires_grad: bool) -> None:
    """Let one of PyTorch's tensors have other *values* (None: its own); it stays the same object, where
    it lies."""
    if values is None:
        values = tensor.detach()
    elif (tensor.shape, tensor.dtype) == (values.shape, values.dtype):
        tensor.detach().copy_(values)
    else:
        tensor.data = values.to(tensor.device)
    if tensor.is_leaf:
        tensor.requires_grad_(requires_grad)


def offers(value: Any, name: str) -> bool:
    """Whether *value* has the special attribute *name*, such as ``__array__``.

    Its class is asked first, as Python does: an instance with a ``__getattr__`` may raise anything.  So
    may the attribute itself, of a sparse tensor of PyTorch's.
    """
    try:
        return hasattr(type(value), name) and hasattr(value, name)
    except Exception:
        return False


def is_outcome(value: Any) -> bool:
    """Whether *value* is an exception by which pytest ends a test."""
    return _is(value, "_pytest.outcomes", "OutcomeException")


def is_sparse(value: Any) -> bool:
    """Whether *value* is a sparse matrix, or array, of SciPy's."""
    known = getattr(sys.modules.get("scipy.sparse"), "issparse", None)
    return known is not None and bool(known(value))


def is_on_gpu(value: Any) -> bool:
    """Whether *value* is an array that lies on a GPU, of any library."""
    return offers(value, "__cuda_array_interface__")


def in_host_memory(value: Any) -> Any:
    """A copy in host memory of an array that lies on a GPU; None for everything else."""
    if is_tensor(value) and value.device.type not in ("cpu", "meta"):
        copy = value.detach().cpu()
        is_parameter = _is(value, "torch.nn", "Parameter")
        return type(value)(copy, value.requires_grad) if is_parameter else copy
    if is_on_gpu(value) and callable(getattr(value, "get", None)):
        return value.get()  # CuPy's
    return None


def library_of(value: Any) -> str | None:
    """The library of an array: "torch", "jax", or None for all others."""
    if _is(value, "torch", "Tensor"):
        return "torch"
    return "jax" if _is(value, "jax", "Array") else None


def columns_of(value: Any) -> list[tuple[str, Any]] | None:
    """The columns of a DataFrame of pandas or polars, each beside its name; None for all else."""
    if _is(value, "pandas", "DataFrame"):
        return list(value.items())
    if _is(value, "polars", "DataFrame"):
        return list(zip(value.columns, value.get_columns(), strict=True))
    return None


def is_table(value: Any) -> bool:
    """Whether *value* is a DataFrame or a Series of pandas or polars."""
    is_series = any(_is(value, library, "Series") for library in ("pandas", "polars"))
    return is_series or columns_of(value) is not None


def is_mock(value: Any) -> bool:
    """Whether *value* is a mock of the standard library's, which notes how it is called."""
    return _is(value, "unittest.mock", "NonCallableMock")


def is_key(value: Any) -> bool:
    """Whether *value* is an array of JAX's random keys, which are not numbers."""
    return _is(value, "jax", "Array") and str(value.dtype).startswith("key<")


def module_of(fn: Any) -> Any:
    """PyTorch's module that *fn* is, or is a method of; None for all others."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    fn = getattr(fn, "__self__", fn)
    return fn if _is(fn, "torch.nn", "Module") else None


def library_instead(fn: Any) -> str | None:
    """The library whose arrays *fn* takes on GPUs instead of CuPy's: that of ``library_of_function``,
    or "jax" for functions of ``jax.jit``."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return "jax" if _is(fn, "jax.stages", "Wrapped") else library_of_function(fn)


def is_module(value: Any) -> bool:
    """Whether *value* is one of PyTorch's modules."""
    return _is(value, "torch.nn", "Module")


def is_movable(value: Any) -> bool:
    """Whether ``move`` takes *value*: a module or an optimizer of PyTorch's."""
    return is_module(value) or _is(value, "torch.optim", "Optimizer")


def move(things: Sequence[Any], device: Any) -> None:
    """Move modules and optimizers, with their parameters and state, to *device*.

    Parameters stay the same objects, so that optimizers keep them.  Modules without values, on PyTorch's
    device "meta", stay there.  Raises: InvalidType.
    """
    for thing in things:
        try:
            if _is(thing, "torch.optim", "Optimizer"):
                _move_optimizer(thing, device)
            elif not any(tensor.is_meta for tensor in (*thing.parameters(), *thing.buffers())):
                thing.to(device)
        except Exception as error:
            raise InvalidType(
                f"the {type(thing).__name__} that a function brings along cannot be moved to {device}: "
                f"{reason(error)}"
            ) from error


def _move_optimizer(optimizer: Any, device: Any) -> None:
    """Move an optimizer, as ``Optimizer.load_state_dict`` does it, but in place, and every tensor keeps
    its dtype.

    Counts of steps stay on the CPU, unless the optimizer was told to have them on the device.
    """

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: moved(each) for key, each in value.items()}
        if isinstance(value, list):
            return [moved(each) for each in value]
        return value.to(device) if library_of(value) == "torch" else value

    for group in optimizer.param_groups:
        counts_there = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            if parameter.device != device and not parameter.is_meta:  # a parameter of no module
                parameter.data = parameter.data.to(device)
            state = optimizer.state.get(parameter, {})
            for key, value in state.items():
                if key != "step" or counts_there:
                    state[key] = moved(value)


def exposed(value: Any) -> tuple[Any, Any]:
    """*value* as an array with a correct ``__cuda_array_interface__`` (None: it lies on no GPU), and the
    dtype to view it as (None: its own).

    PyTorch's interface leaves out lazy negation and conjugation, and knows no bfloat16.
    """
    dtype = None
    if _is(value, "torch", "Tensor"):
        value = value.detach().resolve_conj().resolve_neg()
        if value.is_cuda and value.dtype is sys.modules["torch"].bfloat16:
            value, dtype = value.view(sys.modules["torch"].int16), bfloat16()
    try:
        return (value if value.__cuda_array_interface__ else None), dtype
    except (AttributeError, KeyError):  # KeyError: a dtype that it has no name for
        return None, None


def bfloat16() -> Any:
    """ml_dtypes' dtype of that name.  Raises: ImportError."""
    return importlib.import_module("ml_dtypes").bfloat16


def library_of_function(fn: Any) -> str | None:
    """The library whose arrays *fn* certainly takes: "torch" (modules, compiled or not), "numpy"
    (functions of numba's), or None."""
    if module_of(fn) is not None or hasattr(fn, "_torchdynamo_orig_callable"):
        return "torch"
    return "numpy" if is_numba(fn) else None


def library_named(annotation: Any) -> str | None:
    """The library whose arrays a parameter takes by its annotation: ``torch.Tensor`` or ``jax.Array``,
    or an optional one."""
    if isinstance(annotation, str):
        words = annotation.replace("[", " ").replace("]", " ").replace("|", " ").split()
        named = {"torch.Tensor": "torch", "jax.Array": "jax"}
        rest = {"Optional", "typing.Optional", "None"}
        found = {named.get(word) for word in words if word not in rest}
        return found.pop() if len(found) == 1 else None
    kinds = [kind for kind in get_args(annotation) if kind is not NoneType] or [annotation]
    for library, name in (("torch", "Tensor"), ("jax", "Array")):
        if kinds == [getattr(sys.modules.get(library), name, library)]:
            return library
    return None


def host_array(value: Any) -> Any:
    """A tensor of PyTorch's as an array in host memory, without its history; anything else as it is.

    Raises: TypeError for tensors that NumPy has no array for, and for JAX's tracers; ImportError for
    bfloat16 without ml_dtypes.
    """
    if _is(value, "jax.core", "Tracer"):
        raise TypeError(
            f"{value} has no values while JAX traces the function: let jax.jit or jax.grad make a part "
            f"of it, and do this outside of that part."
        )
    if not _is(value, "torch", "Tensor"):
        return value
    torch = sys.modules["torch"]
    try:
        tensor = value.detach().cpu().resolve_conj().resolve_neg()
        if tensor.dtype is not torch.bfloat16:
            return tensor.numpy()
        bits = tensor.contiguous().view(torch.int16).numpy()
    except (TypeError, RuntimeError) as error:  # of PyTorch's, in many words
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise TypeError(
                "a tensor has no values while torch.func transforms a function: take the gradient with "
                "backward() or torch.autograd.grad, or do this outside of that function."
            ) from None
        raise TypeError(
            f"NumPy has no array for a {value.layout} tensor of {value.dtype} on the device "
            f"{value.device}: make another one of it first, with .to_dense(), .dequantize() or .float() "
            f"({str(error).splitlines()[0]})"
        ) from None
    return bits.view(bfloat16())


def handed(array: Any, library: str | None) -> Any:
    """*array*, NumPy's or CuPy's, as an array of *library* (None: as it is), in the same memory where
    possible.  PyTorch and JAX know only the machine's byte order."""
    if library in ("torch", "jax") and not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if library == "numpy" and is_on_gpu(array):
        return array.get()
    if library == "torch":
        return _tensor(array)
    if library == "jax":
        jax = importlib.import_module("jax")
        if not is_on_gpu(array):
            return jax.device_put(array, may_alias=True)
        return jax.dlpack.from_dlpack(array if array.flags.c_contiguous else array.copy())
    return array


def _tensor(array: Any) -> Any:
    torch = importlib.import_module("torch")
    if any(stride < 0 for stride in array.strides):  # which tensors cannot have
        array = array.copy()
    if is_on_gpu(array):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":
        return _tensor(array.view("i2")).view(torch.bfloat16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the memory is read-only
        return torch.from_numpy(array)


def _is(value: Any, module: str, name: str) -> bool:
    """``isinstance`` without an import: a module that is not imported, or is just being imported by
    another thread, has no instances."""
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(value, kind)
