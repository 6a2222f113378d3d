"""The reduce operations, on arrays: how the values of pieces merge, and in which dtype.

A value goes through three stages.  ``lift`` turns the output of one piece (a slice of a rank) into a
*partial* in the accumulation dtype, for a mean multiplied by its weight, the number of its rows.
``merge`` makes one partial of two, always in the order of the rows.  ``finish`` turns the last one into
the result, for a mean divided by the sum of all weights: so a mean is exact for uneven pieces, which an
average of averages is not.

Arrays are NumPy's or a GPU's: NumPy's functions hand the latter to their own library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import InvalidType, InvalidValue, shown
from ..plan.outputs import ALIASES, suggested
from ..plan.split import split
from ..values.arrays import Array, is_numeric

FOR_ANY_INT = (
    "reduce float(…) of them, or return them, with a function op(a, b) in outputs=, such as "
    "operator.add, which gets any int"
)
"""What to do about Python's integers that no integers of 64 bits hold."""

_BLOCK_BYTES = 1 << 18
"""Elements are reduced in blocks of this size, which stay in a core's L2 cache from one source to
the next: the target is then read and written once, however many sources there are."""

_SINGLE, _DOUBLE, _LONG = np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.int64)


@dataclass(frozen=True)
class Operation:
    """One reduce operation.

    Attributes:
        ufunc: merges two partials.
        weighted: a partial is multiplied by its rows, and the result divided by the rows of all.
        accumulates: merging can lose digits or range; so bools are counted in int64, and float16 and
            bfloat16 accumulate in float32, as in NumPy's own sums.
    """

    name: str
    ufunc: np.ufunc
    weighted: bool = False
    accumulates: bool = True

    def takes(self, dtype: np.dtype[Any]) -> bool:
        """Whether the operation makes one value of *dtype* of two: what NumPy's ufunc does with them.

        It has no mean of what is no number: the mean of a piece would be rounded to its unit.
        """
        if is_numeric(dtype):
            return True
        two = np.zeros((2, 0), dtype)
        try:
            return not self.weighted and bool(self.ufunc(*two).dtype == dtype)
        except TypeError:
            return False

    def check(self, dtype: np.dtype[Any], called: str) -> None:
        """Raises: InvalidType if the operation does not take *dtype*."""
        if refusal := self.refusal(dtype):
            raise InvalidType(f"{called}: {refusal}.")

    def refusal(self, dtype: np.dtype[Any]) -> str:
        """Why the operation does not take *dtype*, and which ones do; empty if it does."""
        if self.takes(dtype):
            return ""
        others = [f'"{each.name}"' for each in OPERATIONS.values() if each.takes(dtype)]
        what = f'there is no "{self.name}" of {dtype}'
        if self.weighted and dtype.kind == "m":
            return f'{what}, which each rank would round: take "sum", and divide by the number of rows'
        return f"{what}, only {', '.join(others)}" if others else f"{what}, nor any other reduction"

    def partial_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype that outputs of *dtype* accumulate in."""
        if not self.accumulates:
            return dtype
        if dtype.itemsize == 2 and dtype.kind in "fV":  # float16 and bfloat16; dtype.name is slow
            return _SINGLE
        return self.result_dtype(dtype)

    def result_dtype(self, dtype: np.dtype[Any]) -> np.dtype[Any]:
        """The dtype of the result for outputs of *dtype*.

        A mean of bools or integers is float64, a sum or product of bools int64; all else stays.
        """
        if self.weighted and dtype.kind in "biu":
            return _DOUBLE
        if self.accumulates and dtype.kind == "b":
            return _LONG
        return dtype

    def lift(self, value: Array, weight: int, dtype: np.dtype[Any] | None = None) -> Array:
        """The partial of one piece's output, of the partial *dtype*; may be *value* itself."""
        dtype = dtype or self.partial_dtype(value.dtype)
        if self.weighted and weight != 1:
            return _array(np.multiply(value, weight, dtype=dtype))
        return value if value.dtype == dtype else value.astype(dtype)

    def merge(self, one: Array, other: Array, out: Array | None = None) -> Array:
        """Two partials as one, written to *out* if given."""
        return _array(self.ufunc(one, other, out=out))

    def finish(self, partial: Array, total_weight: float, out: Array | None = None) -> Array:
        """The merged partial, divided by *total_weight* if it is a weighted one."""
        if self.weighted and total_weight != 1:
            return _array(np.true_divide(partial, total_weight, out=out))
        return partial


def _array(result: Any) -> Array:
    """*result* as an array: NumPy's functions make scalars of arrays without dimensions."""
    return np.asarray(result) if isinstance(result, np.generic) else result


OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("mean", np.add, weighted=True),
        Operation("sum", np.add),
        Operation("prod", np.multiply),
        Operation("max", np.maximum, accumulates=False),
        Operation("min", np.minimum, accumulates=False),
    )
}


def operation_named(op: Any) -> Operation:
    """The operation with this name or alias.  Raises: InvalidValue for an unknown one."""
    name = ALIASES.get(op, op) if isinstance(op, str) else None
    if name not in OPERATIONS:
        raise InvalidValue(
            f"op={shown(op)} is no reduce operation: expected {', '.join(OPERATIONS)}."
            f"{suggested(op, tuple(OPERATIONS))}"
        )
    return OPERATIONS[name]


def reduce_share(
    operation: Operation,
    divisor: float,
    sources: Sequence[Array],
    targets: Sequence[Array],
    place: int = 0,
    count: int = 1,
) -> None:
    """Reduce share *place* of *count* of the elements of *sources*, in their order, into all *targets*.

    The arrays are C-contiguous; targets may be sources.
    """
    flat = [source.reshape(-1) for source in sources]
    into = [target.reshape(-1) for target in targets]
    start, stop = split(0, sources[0].size, count)[place]
    step = max(1, _BLOCK_BYTES // sources[0].itemsize)
    # a target that is a later source must not be written before that source is merged
    pairs = ((target, source) for target in targets for source in sources[2:])
    apart = any(np.may_share_memory(target, source) for target, source in pairs)
    spare = np.empty(min(step, stop - start), sources[0].dtype) if apart else None
    for low in range(start, stop, step):
        block = slice(low, min(low + step, stop))
        out = into[0][block] if spare is None else spare[: block.stop - low]
        if len(flat) == 1:
            np.copyto(out, flat[0][block])
        else:
            operation.merge(flat[0][block], flat[1][block], out=out)
        for source in flat[2:]:
            operation.merge(out, source[block], out=out)
        operation.finish(out, divisor, out=out)
        for target in into[1:] if spare is None else into:
            np.copyto(target[block], out)
