"""Compiled functions of graphs of PyTensor, on their way to the workers."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytensor
from pytensor.tensor.random.type import RandomType

from ..errors import NotAvailable, shown
from ..values.foreign import handed, is_on_gpu

Recipe = tuple[list[Any], list[Any], dict[str, Any]]  # the arguments of ``pytensor.function``


class Program:
    """A compiled function of arrays.

    It is compiled once, in the main process; the workers find the result in PyTensor's cache on the
    disk.  On GPUs it is interpreted here, and JAX compiles it there.
    """

    def __init__(self, name: str, recipe: Recipe, on_gpus: bool, late: bool = False) -> None:
        """With *late*, a worker makes the function when it runs it first: another may never run it.

        Raises: NotAvailable for what JAX cannot compile; what ``pytensor.function`` raises.
        """
        self._name = name
        self._trusted = False
        self._recipe: Recipe | None = None
        places, targets, options = recipe
        if on_gpus:
            self._function = _interpreted(name, recipe)
            self._recipe = places, targets, {**options, "mode": "JAX"}
        else:
            self._function = pytensor.function(places, targets, name=name, **options)
            self._recipe = recipe if late else None
        self._late = late

    def __getstate__(self) -> dict[str, Any]:
        function = self._function if self._recipe is None else None
        return {**vars(self), "_function": function, "_trusted": False}  # alike before and after a call

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if not self._late:
            self._make()

    def _make(self) -> None:
        if self._function is None:
            assert self._recipe is not None
            places, targets, options = self._recipe
            self._function = pytensor.function(places, targets, name=self._name, **options)

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results.  The arrays have been checked: PyTensor need not do it again."""
        if not self._trusted:
            self._make()
            self._function.trust_input = self._trusted = True
        results: list[Any] = self._function(*arrays)
        return results

    def warm(self, read_only: int) -> None:
        """Let PyTensor compile what it compiles only in a call, the first so many arrays *read_only*.

        They are as empty as they can be, so that there is nothing to compute.
        """
        arrays: list[Any] = []
        for variable in self._function.maker.fgraph.inputs:
            if isinstance(variable.type, RandomType):
                arrays.append(np.random.default_rng())
                continue
            array = np.zeros([length or 0 for length in variable.type.shape], variable.type.dtype)
            if len(arrays) < read_only:
                array.flags.writeable = False
            arrays.append(array)
        with contextlib.suppress(Exception):  # such shapes need not fit each other
            self._function(*arrays)


def _interpreted(name: str, recipe: Recipe) -> Any:
    """The function, without a compiler.  Raises: NotAvailable unless JAX can compile it."""
    places, targets, options = recipe
    mode = options.get("mode")
    if mode not in (None, "JAX", pytensor.compile.mode.JAX):
        raise NotAvailable(
            f"on GPUs, JAX compiles the graphs of PyTensor; the function {name!r} asks for "
            f'mode={shown(mode)}: leave that out, or fork(devices="cpu").'
        )
    try:
        from pytensor.link.jax.dispatch import jax_funcify  # noqa: PLC0415  it imports JAX
    except ModuleNotFoundError as error:
        raise NotAvailable(
            f'on GPUs, JAX compiles the graphs of PyTensor ({error}): pip install "jax[cuda12]", or '
            f'fork(devices="cpu").'
        ) from None
    jax = pytensor.compile.mode.JAX
    rewrites = jax.provided_optimizer.excluding(*jax.linker.incompatible_rewrites)
    interpreted = pytensor.compile.mode.Mode("py", rewrites)
    function = pytensor.function(places, targets, name=name, **{**options, "mode": interpreted})
    for node in function.maker.fgraph.apply_nodes:
        if jax_funcify.dispatch(type(node.op)) is jax_funcify.dispatch(object):
            raise NotAvailable(
                f"the function {name!r} uses {node.op}, which PyTensor cannot compile with "
                f'JAX, as it must on GPUs: fork(devices="cpu"), or write it with xp().'
            )
    return function


def typed(array: Any, dtype: Any = None) -> Any:
    """*array*, cast to *dtype* if that is given, as NumPy's; as JAX's where it lies on a GPU."""
    if is_on_gpu(array):
        return handed(array if dtype is None else array.astype(dtype, copy=False), "jax")
    return np.asarray(array, dtype)
