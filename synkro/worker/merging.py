"""The outputs of a call on one rank: merged over its pieces, and laid out in its outbox."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..comms.ops import OPERATIONS, Operation
from ..devices.base import Device
from ..errors import InvalidValue, OutputError, cut, reason, shortened
from ..messages import Done, Leaf, Piece
from ..packing.pickles import INTEGER, check_cause
from ..plan import outputs as plans
from ..plan.call import aligned
from ..values import arrays
from ..values.arrays import Array
from ..values.foreign import columns_of, host_array, is_key, is_on_gpu, is_table, library_of, offers
from ..values.variable import Variable

_NUMBERS = (bool, int, float, complex, np.generic)

Found = Array | list[Array] | int
"""An output: an array; of what is pickled a list of bytes; an integer of Python's that merges."""


class Merger:
    """Merges the outputs of one rank's pieces, leaf by leaf; serves one call after the other.

    Attributes:
        tree: how the outputs are nested.
        modes, dtypes: the operation and the dtype of each leaf.
        leaves: the merged partial of each leaf, or its pieces if they do not merge; of what is no
            array, for each piece, the pickle and its buffers.
        nothing: whether the call has no outputs, whatever the function returns.
    """

    def __init__(
        self, name: str, outputs: Any, several: bool, pickled: Callable[[Any], list[Array]] | None = None
    ) -> None:
        """*several* says whether there is more than one piece; *pickled* pickles what is no array."""
        self.tree: plans.Tree = None
        self.modes: list[str | None] = []
        self.dtypes: list[np.dtype[Any]] = []
        self.leaves: list[list[Array]] = []
        self._operations: list[Operation | None] = []
        self._partials: list[np.dtype[Any] | None] = []  # the dtypes that leaves accumulate in
        self._integers: dict[int, int] = {}  # by leaf: the integers of Python's, merged
        self._name = name
        self._called = f"output of the function {name!r}"
        self._outputs = outputs
        self.nothing: Final = isinstance(outputs, tuple | list | dict) and not outputs
        self._several = several
        self._pickle = pickled

    def reset(self) -> None:
        """The call is over: let go of its outputs."""
        self.leaves = []
        self._integers.clear()

    def add(self, value: Any, weight: int, device: Device) -> None:
        """Merge what the function has returned for a piece that counts *weight* times.

        Raises: OutputError for what is no array, or does not fit what other pieces gave.
        """
        found = self.find(value, device)
        device.settle()
        self.merge(found, weight, device)

    def find(self, value: Any, device: Device) -> list[Found]:
        """The outputs in what the function has returned, which the device may still compute.

        Raises: OutputError.
        """
        if self.nothing:
            return []  # outputs=[]: the function's result is not wanted
        if self._is_known(value, device):
            return [np.asarray(value) if isinstance(value, np.generic) else value]
        return self._found(value, device)

    def merge(self, found: list[Found], weight: int, device: Device) -> None:
        """Merge the outputs of a piece, which have been computed.  Raises: OutputError."""
        if not self.leaves:
            self.leaves = [[] for _ in found]
        for index, output in enumerate(found):
            if isinstance(output, list):
                self.leaves[index] += output
            elif isinstance(output, int):
                self.leaves[index] = self._merged(index, output)
            else:
                self._merge(index, output, weight, device)

    def _is_known(self, value: Any, device: Device) -> bool:
        """Whether *value* is one array of the device's or number of NumPy's, of the last one's dtype."""
        if self.tree is not None or len(self.dtypes) != 1:
            return False
        known = type(value) is np.ndarray or isinstance(value, np.generic) or device.holds(value)
        return known and value.dtype == self.dtypes[0]

    def _found(self, value: Any, device: Device) -> list[Found]:
        values, tree = plans.flatten_by(self._outputs, value, _has_objects, self._called)
        try:
            modes = plans.leaf_modes(self._outputs, tree)
        except OutputError as error:
            raise OutputError(f"the function {self._name!r}: {error}") from None
        found: list[Found] = []
        for index, (leaf, mode) in enumerate(zip(values, modes, strict=True)):
            try:
                if _is_pickled(leaf, mode):
                    found.append(self._pickled(leaf, device))
                    continue
                merges = self._pickle is not None and mode in plans.WHOLE and type(leaf) is int
                if merges and (not self.leaves or index in self._integers):
                    found.append(leaf)
                    continue
                _check_no_table(leaf, mode)
                array = device.adopt(leaf)
                found.append(_output(leaf if array is None else array, mode))
            except OutputError as error:
                raise self._error(tree, index, str(error)) from None
        if not self.leaves:
            self._learn(tree, modes, found)
        elif tree != self.tree:
            raise OutputError(
                f"the function {self._name!r} returned {plans.describe(self.tree)} for one slice and "
                f"{plans.describe(tree)} for another: it must return the same for every slice."
                f"{plans.advice_on_keys(self.tree, tree)}"
            )
        return found

    def _pickled(self, value: Any, device: Device) -> list[Array]:
        """What is no array, as bytes; arrays in it are NumPy's, as they are outside of containers."""
        assert self._pickle is not None
        device.settle()
        value = in_host_memory(value, device)
        try:
            return self._pickle(value)
        except Exception as error:
            check_cause(error, "what it returned", OutputError)
            raise OutputError(
                f"{shortened(value)} cannot be pickled, so it stays on its worker: {reason(error)}"
            ) from None

    def _merged(self, index: int, number: int) -> list[Array]:
        """An integer of Python's, merged with those of earlier pieces, as it travels."""
        assert self._pickle is not None
        if index in self._integers:
            number = plans.WHOLE[self.modes[index] or ""](self._integers[index], number)
        self._integers[index] = number
        if -(1 << 63) <= number < 1 << 63:
            return [np.array(number, INTEGER)]
        return self._pickle(number)

    def _learn(self, tree: plans.Tree, modes: list[str | None], found: list[Found]) -> None:
        """Learn from the first piece of a call how outputs are nested, and their dtypes."""
        self.tree, self.modes = tree, modes
        self._operations = [OPERATIONS.get(mode or "") for mode in modes]
        first = [each[0] if isinstance(each, list) else each for each in found]
        self.dtypes = [np.dtype(INTEGER) if isinstance(each, int) else each.dtype for each in first]
        self._partials = [
            None if operation is None else operation.partial_dtype(dtype)
            for operation, dtype in zip(self._operations, self.dtypes, strict=True)
        ]

    def _merge(self, index: int, array: Array, weight: int, device: Device) -> None:
        operation, pieces = self._operations[index], self.leaves[index]
        if index in self._integers and not array.ndim and array.dtype.kind in "iu":
            self.leaves[index] = self._merged(index, int(array))
            return
        if array.dtype != self.dtypes[index] and self.modes[index] not in (None, plans.MERGE):
            gathers = self.modes[index] == "gather"
            both = arrays.longer(self.dtypes[index], array.dtype) if gathers else None
            if both is None:
                known = self.dtypes[index].newbyteorder("=")
                what = f"dtype {known} for one slice, {array.dtype} for another"
                raise self._error(self.tree, index, what)
            self.dtypes[index] = both
        if operation is None:
            mode = self.modes[index]
            if mode in ("gather", "keep") and array.ndim == 0:
                what = f'"{mode}" concatenates rows, got a scalar: return an array, or say outputs=None'
                raise self._error(self.tree, index, what)
            if mode == "keep" and device.xp is not np and not arrays.is_numeric(array.dtype):
                what = f'GPUs do not have {array.dtype}, so they cannot keep it: say outputs="gather"'
                raise self._error(self.tree, index, what)
            if self._several:
                array = array.copy() if mode == "keep" else device.stow(array)
            pieces.append(array)
            return
        partial = operation.lift(array, weight, self._partials[index])
        if not pieces:
            # the function may return the same array for every slice
            pieces.append(partial.copy() if self._several and partial is array else partial)
            return
        partial = device.beside(partial, pieces[0])  # in host memory, or on the device
        if partial.shape != pieces[0].shape:
            raise self._error(
                self.tree,
                index,
                f"shape {pieces[0].shape} for one slice and {partial.shape} for another cannot be "
                f'reduced with "{self.modes[index]}". To concatenate rows say outputs="gather".',
            )
        if partial.ndim == 0:
            pieces[0] = operation.merge(pieces[0], partial)
        else:
            operation.merge(pieces[0], partial, out=pieces[0])

    def _error(self, tree: plans.Tree, index: int, what: str) -> OutputError:
        return OutputError(
            f"output{cut(plans.leaf_paths(tree)[index])} of the function {self._name!r}: {what}"
        )


class Layout:
    """Where the outputs of a call lie; kept while they stay the same from call to call.

    Attributes:
        done: what lies where.
        keeps: whether some outputs wait with the rank: they do not fit the outbox, or are to stay.
    """

    def __init__(self) -> None:
        self.keeps: bool = False
        self._seen: Any = None  # how outputs are nested, how many pieces each has, and their forms
        self.done: Done = Done(None, None)
        self._slots: list[tuple[int, Array]] = []  # pieces that fit, by their number, and where
        self._slot: Array | None = None  # where the only output lies, if ``take`` may put it there

    def take(self, value: Any, weight: int) -> bool:
        """Put the only output of the only piece straight into the outbox, if it is like the last one."""
        slot = self._slot
        kind: Any = type(value)
        if slot is None or kind is not self._kind:
            return False
        if self._kind is np.ndarray and (value.dtype != self._dtype or value.shape != slot.shape):
            return False
        if self._weighted and weight != 1:
            np.multiply(value, weight, out=slot, dtype=slot.dtype)
        else:
            slot[...] = value
        return True

    def expect(self, value: Any, merger: Merger) -> None:
        """Remember *value*, which has been placed, for ``take``: an array or a number, to be reduced."""
        self._kind = type(value)
        simple = self._kind is np.ndarray or isinstance(value, float | np.number | np.bool_)
        operation = OPERATIONS.get(merger.modes[0] or "") if len(merger.modes) == 1 else None
        self._slot = None
        if simple and operation is not None and self._slots:
            self._slot, self._dtype = self._slots[0][1], merger.dtypes[0]
            self._weighted = operation.weighted

    def place(self, merger: Merger, outbox: NDArray[np.uint8], device: Device) -> Done:
        """Copy what fits into the outbox, and say what lies where."""
        pieces = [piece for leaf in merger.leaves for piece in leaf]
        forms = [(piece.shape, piece.dtype) for piece in pieces]
        seen = merger.tree, [*map(len, merger.leaves)], forms
        if seen != self._seen:
            self._seen = None  # an interrupt may leave the arrangement half-done
            self._arrange(merger, outbox)
            self._seen = seen
        device.copy_out([(slot, pieces[number]) for number, slot in self._slots])
        return self.done

    def _arrange(self, merger: Merger, outbox: NDArray[np.uint8]) -> None:
        listed = zip(merger.modes, merger.leaves, strict=True)
        pieces = [(mode, array) for mode, leaf in listed for array in leaf]
        # Reduced leaves first: they have one size on all ranks, so that they get the same place.
        order = sorted(range(len(pieces)), key=lambda number: pieces[number][0] not in OPERATIONS)
        offsets: list[int | None] = [None] * len(pieces)
        self._slots = []
        end = 0
        for number in order:
            mode, array = pieces[number]
            if mode != "keep" and end + array.nbytes <= len(outbox):
                offsets[number] = end
                slot: Array = np.ndarray(array.shape, array.dtype, buffer=outbox, offset=end)
                self._slots.append((number, slot))
                end += aligned(array.nbytes)
        self.keeps = None in offsets
        places = iter(offsets)
        leaves = []
        for dtype, leaf in zip(merger.dtypes, merger.leaves, strict=True):
            laid = [Piece(array.shape, arrays.code_of(array.dtype), next(places)) for array in leaf]
            leaves.append(Leaf(arrays.code_of(dtype), tuple(laid)))
        self.done = Done(merger.tree, tuple(leaves))


def _is_pickled(value: Any, mode: str | None) -> bool:
    """Whether an output is no array or number, and does not have to be.

    Python's own numbers reach the user's operation as they are: integers have any number of digits.
    """
    if mode in (plans.MERGE, None) and arrays.is_of_own_class(value):
        return True  # it stays what it is
    if mode == plans.MERGE:
        return type(value) in (bool, int, float, complex) or not _is_array(value)
    if mode is None:
        fixed = type(value) is np.ndarray and arrays.is_fixed(value.dtype)
        return not (fixed or _is_array(value))
    return type(value) is list and mode == "gather"


def _check_no_table(value: Any, mode: str | None) -> None:
    """Raises: OutputError for a table that would lose its labels."""
    kinds = f"{type(value).__name__.removesuffix('s')}s"
    if mode in OPERATIONS and is_table(value):
        raise OutputError(
            f"{kinds} are not reduced: they would be by position, without a look at their labels. "
            f"Return .to_numpy(), or say outputs=None, or a function op(a, b), such as "
            f"lambda a, b: a.add(b, fill_value=0)."
        )
    if mode in ("gather", "keep") and columns_of(value) is not None:
        raise OutputError(
            f'{kinds} do not go through "{mode}": their columns would lose names and types. Say '
            f"outputs=None for a list, one of each rank, or a function op(a, b), such as "
            f"lambda a, b: pd.concat([a, b]); or return .to_numpy()."
        )


def _is_array(value: Any) -> bool:
    """Whether *value* is an array or a number; not a table, say, which could become one."""
    if isinstance(value, np.ndarray):
        return arrays.is_numeric(value.dtype) and not arrays.lost_in(value)
    if isinstance(value, _NUMBERS):
        return arrays.is_numeric(np.asarray(value).dtype)
    known = isinstance(value, Variable) or library_of(value) is not None
    return (known or is_on_gpu(value)) and not is_key(value)


def _has_objects(value: list[Any]) -> bool:
    """Whether a list holds anything but arrays with rows, or nothing."""
    try:
        leaves = [plans.flatten(child)[0] for child in value]
    except InvalidValue:  # it is nested too deeply
        return True
    rows = all(_is_array(leaf) and getattr(leaf, "ndim", 0) for below in leaves for leaf in below)
    return not (value and all(leaves) and rows)


def in_host_memory(value: Any, device: Device) -> Any:
    """*value* with the arrays in containers as NumPy's."""
    with contextlib.suppress(InvalidValue):  # a list may hold itself
        leaves, tree = plans.flatten(value, _is_plain)
        if tree is not None:
            return plans.unflatten(tree, iter([_in_container(leaf, device) for leaf in leaves]))
    return value


def _is_plain(value: Any) -> bool:
    """Whether a container can be made again from what it holds: those of classes of their own cannot."""
    return type(value) in (dict, list, tuple) or hasattr(type(value), "_fields")


def _in_container(value: Any, device: Device) -> Any:
    """An array of another library's as one of NumPy's, in host memory; everything else as it is."""
    if isinstance(value, (np.ndarray, *_NUMBERS)) or not _is_array(value):
        return value
    array = device.adopt(value)
    array = _output(value if array is None else array)
    return array if isinstance(array, np.ndarray) else device.stow(array)


def _output(value: Any, mode: str | None = None) -> Array:
    """One leaf of a function's result as an array; an array on the device stays there.

    Raises: OutputError for what is no array and no number, or of a dtype that *mode* does not take.
    """
    array: Array = value if type(value) is np.ndarray else _as_array(value, mode)
    if arrays.is_fixed(array.dtype):
        operation = OPERATIONS.get(mode or "")
        refusal = operation.refusal(array.dtype) if operation else ""
        if refusal:
            raise OutputError(f'{refusal}. "gather", "keep" and outputs=None take it.')
        return arrays.native(array)
    if isinstance(value, int):
        raise OutputError(
            f"an int of {value.bit_length()} bits does not fit the 64 bits of NumPy's. Return float(…), "
            f"or say outputs=None, or a function op(a, b), such as operator.add: it gets any int."
        )
    raise OutputError(
        f"expected numbers, dates, strings or records of a fixed size, got an array of dtype "
        f"{array.dtype}. Lists are gathered as they are: return .tolist()."
    )


def _as_array(value: Any, mode: str | None) -> Array:
    """Raises: OutputError for what is neither an array nor a number."""
    if isinstance(value, _NUMBERS):
        return np.asarray(value)
    if is_key(value):
        raise OutputError("a random key of JAX's is no number: return jax.random.key_data(key).")
    value = host_array(value)
    if is_on_gpu(value):
        array: Array = value  # on this worker's GPU, where it stays
        return array
    if offers(value, "__array__"):
        array, lost = arrays.plain(value)
        if lost:
            raise OutputError(
                f"{shortened(value)}, would lose {lost} With outputs=None, or a function op(a, b), it "
                f"stays what it is."
            )
        return array
    if mode == "gather":
        raise OutputError(
            f'"gather" concatenates arrays and lists, got {shortened(value)}. Return one list, or say '
            f"outputs=None, or a function op(a, b) that merges two of them."
        )
    raise OutputError(
        f"expected an array or a number, got {shortened(value)}. Other values are not reduced: with "
        f"outputs=None they come as a list, one of each rank, and with outputs=[] not at all."
    )
