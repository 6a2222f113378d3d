"""The arguments of a call on their way to the workers: arrays and numbers are put into shared memory."""

from __future__ import annotations

import contextlib
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from ...errors import InvalidType, InvalidValue, counted, how_to_await, reason, shortened, shown
from ...memory.segment import Segment
from ...messages import FunctionSpec
from ...packing.pickles import check_cause
from ...plan import call as plans
from ...plan.binding import Bound
from ...plan.call import Region, aligned
from ...plan.outputs import Tree, flatten, leaf_paths
from ...storage.files import describe, is_stored
from ...values import arrays, foreign
from ...values.foreign import library_of
from ..data.data import Data, make_data
from ..data.outgoing import Outgoing, Placed
from ..data.stored import StoredData, make_stored
from ..engine.engine import Engine
from ..objects.walk import refused_generator
from ..variables.shared import Shared, check_there, check_whole
from .distribution import Services

SCALARS = (bool, int, float, complex, np.number, np.bool_)

_MANY = 64
"""A dict of more numbers and strings is pickled as a whole."""

_VIEWED = 1 << 20
"""Arrays in what is pickled, if they have so many bytes, lie in shared memory: they are not copied."""

_LONG = range(-(2**63), 2**63)
_PLACE, _PLACES = 16, 256  # bytes of a number's place, and how many places are reserved at once


@dataclass(frozen=True)
class Input:
    """One argument, or a leaf of one, on its way to the workers.

    Attributes:
        name: its name in errors.
        argument: what the plan has of it.
        placed: where it lies, if that is in shared memory.
        variable: the variable, if it is one.
        reusable: the short way for such an argument in the next call, or None.
    """

    name: str
    argument: plans.Argument
    placed: Placed | None = None
    variable: Shared | None = None
    reusable: Reusable | None = None


class Whole:
    """A broadcast argument that is pickled as it is.

    Attributes:
        value: the argument.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class Reusable:
    """Where an argument of the last call lies, and which values can take its place there."""

    def takes(self, value: Any) -> bool:
        """Whether *value* is ``Data``."""
        return isinstance(value, Data)

    def region(self, value: Any) -> Region | None:
        """Where *value* lies, after it was copied there."""
        data: Data = value
        return data.region


class ReusableArray(Reusable):
    """Where an array was copied to a buffer; arrays of its shape and dtype can take its place."""

    def __init__(self, buffer: Outgoing, placed: Placed) -> None:
        self._buffer = buffer
        self._placed = placed
        self._shape, self._dtype = buffer.array.shape, buffer.array.dtype

    def takes(self, value: Any) -> bool:
        return (
            type(value) is np.ndarray
            and value.shape == self._shape
            and value.dtype == self._dtype
            and self._buffer.placed is self._placed
        )

    def region(self, value: Any) -> Region:
        self._buffer.refill(value)
        return self._placed.region


class ReusableNumber(Reusable):
    """Where a number lies; numbers of its type can take its place.

    Attributes:
        placed: where the number lies.
    """

    def __init__(self, engine: Engine, placed: Placed, scalar: type) -> None:
        self.placed = placed
        self._engine = engine
        self._array = placed.segment.array(placed.region)
        self._scalar = scalar

    def takes(self, value: Any) -> bool:
        return type(value) is self._scalar and (self._scalar is not int or value in _LONG)

    def region(self, value: Any) -> Region:
        self._array[...] = value
        self._engine.touch(self.placed.segment)
        return self.placed.region


_DATA = Reusable()


class Arguments:
    """The arguments of one function's calls; a buffer for each of its inputs that is no ``Data``."""

    def __init__(self, services: Services, spec: FunctionSpec, world: tuple[int, ...]) -> None:
        """*world* are the ranks on which the function of *spec* runs."""
        engine = services.engine
        self._engine, self._objects, self._variables = engine, services.objects, services.variables
        self._world = world
        self._function = spec.name
        self._types: Mapping[str, Any] = getattr(spec.fn, "input_types", {})  # of a graph, by name
        self._buffers: dict[int, Outgoing] = {}  # by the argument's number
        self._pickles: dict[int, Outgoing] = {}  # of what is no array, by the argument's number
        self._items_of: dict[int, Outgoing] = {}  # of lists, by the argument's number
        self._numbers: dict[tuple[int, type], ReusableNumber] = {}  # by their arguments, and their types
        self._segment: Segment | None = None  # of numbers, side by side
        self._end = 0  # of what is taken of the segment
        self._files: dict[int, tuple[Any, Data]] = {}
        self._stored: dict[int, tuple[weakref.ref[Any], StoredData]] = {}
        self.copied: bool = False  # whether the last call copied something that ``again`` would take
        self._reusable: Sequence[Reusable] = ()  # of the last call's values

    def again(self, values: Sequence[Any]) -> list[Region | None] | None:
        """Copy arrays and numbers into the last call's buffers if they fit; returns the regions.

        None, and nothing is copied, where one does not fit.
        """
        reusable = self._reusable
        if len(values) != len(reusable):
            return None
        for value, where in zip(values, reusable, strict=True):
            if not where.takes(value):
                return None
        trace = self._engine.trace
        if trace is not None:
            trace.mark("copy")
        if self._engine.interrupted:
            self._engine.settle()  # the interrupted call may still read the buffers
        regions = [where.region(value) for value, where in zip(values, reusable, strict=True)]
        if trace is not None:
            trace.mark("plan")
        return regions

    def reuse(self, inputs: Sequence[Input] | None) -> bool:
        """Remember where *inputs* lie for ``again``; whether the call can be recognised by that."""
        found = [each.reusable for each in inputs or () if each.reusable is not None]
        known = inputs is not None and len(found) == len(inputs)
        self._reusable = found if known else ()
        self.copied = any(each is not _DATA for each in self._reusable)
        return known

    def opened(self, arguments: list[Bound]) -> tuple[list[Bound], plans.Form | None]:
        """The leaves of *arguments*, and how to build these again; None if they are their own leaves."""
        leaves: list[Bound] = []
        trees: list[Tree] = []
        for bound in arguments:
            opens = _is_tree if bound.broadcast else _is_record
            values, tree = flatten(bound.value, opens, self._called(bound))
            trees.append(tree)
            for path, value in zip(leaf_paths(tree), values, strict=True):
                own = value.library if isinstance(value, Data) else library_of(value)
                leaves.append(Bound(bound.name + path, bound.broadcast, value, bound.library or own))
        libraries = tuple([leaf.library for leaf in leaves])
        if not any(trees) and {None, "numpy"}.issuperset(libraries):
            return leaves, None
        return leaves, plans.Form(tuple(trees), libraries)

    def travelling(self, form: plans.Form | None) -> plans.Form | None:
        """A *form* for the workers.  Raises: InvalidType for keys that cannot be pickled."""
        if form is None or all(tree is None or tree.is_plain for tree in form.trees):
            return form
        called = f"an argument of the function {self._function!r}"
        try:
            stream, _ = self._written(form.trees)
        except Exception as error:
            check_cause(error, called)
            raise InvalidType(
                f"{called} holds arrays under keys that cannot be pickled: {reason(error)}. Give names, "
                f"numbers, or tuples of these as keys."
            ) from None
        return plans.Form((), form.libraries, stream)

    def input(self, index: int, bound: Bound) -> Input:
        """Argument number *index*, in shared memory if it has to be.

        Raises: InvalidType, InvalidValue; SharedMemoryError.
        """
        called = self._called(bound)
        value = self._stored_as(index, bound)
        if isinstance(value, Whole):
            return self._pickled(index, bound, value.value)
        if foreign.is_generator(value):
            raise InvalidType(refused_generator(called, value))
        wanted = self._types.get(bound.name)
        if wanted is not None:
            value = _typed(value, wanted, called)
        if isinstance(value, Shared | StoredData):
            return self._elsewhere(bound, value, called)
        if isinstance(value, SCALARS) and bound.broadcast:
            way = self._number if _fits(value) else self._pickled
            return way(index, bound, value)
        reusable: Reusable | None = _DATA
        if isinstance(value, np.memmap):
            value, reusable = self._mapped(index, bound.name, value), None
        if isinstance(value, Data):
            placed = value.input(self._engine, called)
            argument = _by_rows(bound, placed.region, value.minibatch)
            return Input(bound.name, argument, placed, reusable=reusable)
        try:
            if bound.broadcast and (self._stays(value) or not _is_array(value)):
                raise InvalidType  # it arrives as it is
            if arrays.is_of_own_class(value) and not isinstance(value, np.ma.MaskedArray):
                raise InvalidType(
                    f"{called} is {shortened(value)}, whose rows would be plain arrays: give "
                    f"np.asarray(…), and make it of that in the function, or name it in bcast_inputs."
                )
            array = arrays.as_array(value, called)
        except InvalidType as error:
            return self._other(index, bound, value, error)
        if self._engine.on_gpus:
            array = arrays.native(array)
        buffer, placed = self._put(index, array, called)
        reusable = ReusableArray(buffer, placed) if array is bound.value else None
        return Input(bound.name, _by_rows(bound, placed.region), placed, reusable=reusable)

    def _stays(self, value: Any) -> bool:
        """Whether *value* is no number, and either one element, or an array for GPUs, which have no
        such."""
        array = isinstance(value, np.ndarray) and self._engine.on_gpus
        return (array or isinstance(value, np.generic)) and not arrays.is_numeric(value.dtype)

    def _elsewhere(self, bound: Bound, value: Shared | StoredData, called: str) -> Input:
        """What the workers have, or read from a file by themselves."""
        if isinstance(value, StoredData):
            return Input(bound.name, _by_rows(bound, value.input(self._engine, called), value.minibatch))
        variable = self._variables.check(value, called)
        check_there(variable, called, self._world)
        check_whole(variable, called, self._world)
        held = plans.Replicated if bound.broadcast else plans.Held
        return Input(bound.name, held(variable.number), variable=variable)

    def _number(self, index: int, bound: Bound, value: Any) -> Input:
        """A number that every rank gets as it is: by shared memory, so that a new one needs no plan.

        It lies where the last number of its type has lain in this argument.
        """
        key = index, type(value)
        if key not in self._numbers:
            if self._segment is None or self._end + _PLACE > self._segment.nbytes:
                self._segment, self._end = self._engine.allocate(_PLACES * _PLACE), 0
            region = Region(self._segment.number, self._end, (), arrays.code_of(np.asarray(value).dtype))
            self._end += _PLACE
            self._numbers[key] = ReusableNumber(self._engine, Placed(region, self._segment), type(value))
        number = self._numbers[key]
        number.region(value)
        argument = plans.Number(number.placed.region, not isinstance(value, np.generic))
        return Input(bound.name, argument, number.placed, reusable=number)

    def _other(self, index: int, bound: Bound, value: Any, error: InvalidType) -> Input:
        """What is no array and no number, because of *error*."""
        if foreign.is_future(value):
            raise InvalidType(
                f"{self._called(bound)} is a future: give its result(), or submit() the call, which "
                f"waits for it."
            ) from None
        if foreign.is_graph_shared(value):
            raise InvalidType(_shared_of_graph(self._called(bound))) from None
        if foreign.is_on_gpu(value) or foreign.is_key(value):
            raise error from None
        if bound.broadcast:
            return self._pickled(index, bound, value)
        if isinstance(error, arrays.Rounded) or foreign.is_sparse(value):
            raise error from None
        if type(value) in (list, tuple):
            if arrays.lost_in(value) and len(set(map(np.shape, value))) == 1:
                raise error from None  # as a list of rows it would be one array
            return self._items(index, bound, value)
        if foreign.offers(value, "__array__"):
            raise error from None
        advice = how_to_await(value) or "Name it in bcast_inputs to give it to every rank whole."
        if isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping):
            advice = f"Give list(…) to split it by rows. {'' if isinstance(value, Iterator) else advice}"
        raise InvalidType(
            f"{self._called(bound)} is scattered by rows, but has none: it is {shortened(value)}. "
            f"{advice.rstrip()}"
        ) from None

    def _pickled(self, index: int, bound: Bound, value: Any) -> Input:
        """What is no array and no number: pickled, in memory with room for another one."""
        stream, buffers = self._dump(value, self._called(bound), _VIEWED)
        table = [len(buffers), len(stream), *map(len, buffers)]
        head = b"".join(length.to_bytes(plans.LENGTH, "little") for length in table)
        parts: list[bytes | memoryview] = [head, stream, *buffers]
        ends = list(accumulate(aligned(len(part)) for part in parts))
        buffer = self._pickles.get(index)
        if buffer is None or not ends[-1] <= len(buffer.array) <= 8 * ends[-1]:
            room = ends[-1] if buffers else 1 << ends[-1].bit_length()
            buffer = self._pickles[index] = Outgoing(self._engine)
            buffer.resize((room,), np.dtype(np.uint8), self._called(bound))
        assert buffer.placed is not None
        for part, end in zip(parts, ends, strict=True):
            place = buffer.array[end - aligned(len(part)) :][: len(part)]
            new = np.frombuffer(part, np.uint8)
            if not np.array_equal(place, new):
                place[...] = new
                buffer.touch()
        return Input(bound.name, plans.Pickled(buffer.placed.region), buffer.placed)

    def _items(self, index: int, bound: Bound, value: Sequence[Any]) -> Input:
        """A list that is no array, by rows."""
        called = self._called(bound)
        _check_items(value, called)
        strings = all(isinstance(item, str) for item in value)
        if strings:
            items = [item.encode("utf-8", "surrogatepass") for item in value]
        else:
            items = [self._dump(item, called)[0] for item in value]
        ends = np.cumsum([0, *map(len, items)], dtype=np.int64)
        _, placed = self._put(index, np.stack([ends[:-1], ends[1:]], axis=1), called)
        memory = self._items_of.setdefault(index, Outgoing(self._engine))
        content = np.frombuffer(b"".join(items) or b"\0", np.uint8)
        argument = plans.Items(placed.region, items=memory.put(content, called).region, strings=strings)
        return Input(bound.name, argument, placed)

    def _dump(self, value: Any, called: str, least: int = sys.maxsize) -> tuple[bytes, list[memoryview]]:
        """*value*, pickled, beside buffers of *least* bytes."""
        try:
            return self._written(value, least)
        except Exception as error:
            check_cause(error, called)
            advice = how_to_await(value) or "Give what it is made of, or make it in the function."
            raise InvalidType(
                f"{called} is no array and no number, and cannot be pickled: {reason(error)}. {advice}"
            ) from None

    def _written(self, value: Any, least: int = sys.maxsize) -> tuple[bytes, list[memoryview]]:
        """*value*, pickled, after the workers have what it relies on.  Raises: what pickling raises."""
        values = self._objects.values(least)
        stream, buffers, _ = values.pickled(value)
        values.settle()
        return stream, buffers

    def _put(self, index: int, array: arrays.Array, called: str) -> tuple[Outgoing, Placed]:
        buffer = self._buffers.get(index)
        if buffer is None:
            buffer = self._buffers[index] = Outgoing(self._engine)
        trace = self._engine.trace
        if trace is not None:
            trace.mark("copy")
        placed = buffer.put(array, called)
        if trace is not None:
            trace.mark("plan")
        return buffer, placed

    def _mapped(self, index: int, name: str, array: np.memmap[Any, Any]) -> Data:
        """A memory-mapped array as Data, which is made once as long as the same array comes again."""
        source, data = self._files.get(index, (None, None))
        if source is not array or data is None:
            made = make_data(self._engine, array, name=name)
            assert isinstance(made, Data)
            data = made
            # if the file could not be mapped, this is a copy, which the next call must not take
            self._files[index] = (None if data.data.flags.writeable else array, data)
        return data

    def _stored_as(self, index: int, bound: Bound) -> Any:
        """The value of argument number *index*; an array in a file as StoredData.

        One that the workers cannot open as it is, as where it is open for writing, is read here.
        """
        value = bound.value
        if not is_stored(value):
            return value
        try:
            found = describe(value, 0)
            source, known = self._stored.get(index, (None, None))
            if source is None or known is None or not known.is_of(found, source() is value):
                known = make_stored(self._engine, value, name=bound.name)
                self._stored[index] = weakref.ref(value), known
        except InvalidValue:
            return value
        return known

    def _called(self, bound: Bound) -> str:
        return f"the argument {shown(bound.name)} of the function {self._function!r}"


def _check_items(items: Sequence[Any], called: str) -> None:
    """Raises: InvalidType for a list of arrays in files that NumPy makes no array of."""
    stored = [item for item in items if is_stored(item)]
    for item in stored:
        with contextlib.suppress(InvalidValue):
            describe(item, 0)  # it may be a group, or closed
    if stored:
        shapes = ", ".join(str(shape) for shape in dict.fromkeys(item.shape for item in stored))
        raise InvalidType(
            f"{called} is a list with arrays in files, of the shapes {shapes}, and no array, as their "
            f"lengths differ: give [x[:] for x in …] to split the list, or each as an argument."
        )


def _shared_of_graph(called: str) -> str:
    return f"{called} is a shared variable of PyTensor's: give its values, .get_value()."


def _is_array(value: Any) -> bool:
    """Whether *value* is an array, of any library, or a list or a tuple, which may be one of numbers."""
    if isinstance(value, np.ndarray | np.generic) or type(value) in (list, tuple):
        return True
    in_file = is_stored(value) or foreign.is_view_of_hdf5(value)
    return in_file or library_of(value) is not None or foreign.is_on_gpu(value)


def _fits(number: Any) -> bool:
    """Whether *number* can lie in an array, and be the same again when it is read from there."""
    if isinstance(number, np.generic):
        plain = type(number) is number.dtype.type
        return plain and number.dtype.kind in "biufc" and number.dtype.char not in "gG"
    return type(number) in (bool, float, complex) or (type(number) is int and number in _LONG)


def _by_rows(
    bound: Bound, array: Region | plans.FileArray, of_batch: bool = False
) -> plans.Broadcast | plans.Scattered:
    """An argument that lies in *array*: split by rows, unless it is broadcast."""
    return plans.Broadcast(array) if bound.broadcast else plans.Scattered(array, of_batch)


def _typed(value: Any, wanted: Any, called: str) -> Any:
    """The argument, of the type that the function's input has.

    Raises: InvalidType, InvalidValue.
    """
    if foreign.is_graph_shared(value):
        raise InvalidType(_shared_of_graph(called))
    if not isinstance(value, Data | StoredData | Shared | np.memmap):
        advice = "convert the values yourself, or make the function with allow_input_downcast=True"
        value = arrays.cast(value, wanted.dtype, wanted.downcast, called, advice)
    if value.ndim != len(wanted.shape):
        raise InvalidValue(
            f"{called} has {counted(len(wanted.shape), 'dimension')} in the graph, got "
            f"{value.ndim} (shape {value.shape})."
        )
    if any(wanted.shape) and not isinstance(value, Shared):
        pairs = zip(wanted.shape, value.shape, strict=True)
        if any(length not in (None, given) for length, given in pairs):
            lengths = ", ".join("any" if length is None else str(length) for length in wanted.shape)
            raise InvalidValue(
                f"{called} has the shape ({lengths}) in the graph, got the shape {value.shape}."
            )
    if not (wanted.downcast or np.can_cast(value.dtype, wanted.dtype, "safe")):
        raise InvalidType(
            f"{called} is {wanted.dtype} in the graph, got {value.dtype}: make the Data of that "
            f"dtype, with data(…, dtype=…, force_cast=True), or the function with "
            f"allow_input_downcast=True."
        )
    return value


def _is_record(value: Any) -> bool:
    """Whether *value* holds arguments, each by its name."""
    names = isinstance(value, tuple) and hasattr(value, "_fields")
    return names or (isinstance(value, dict) and not foreign.is_sparse(value))


def _is_tree(value: Any) -> bool:
    """Whether *value* holds arguments, nested as it may be; a list of numbers is an array.

    Dicts of many numbers and strings, and those of classes of their own, are pickled as a whole; these
    open only for ``Data`` and variables, which cannot be pickled.
    """
    if isinstance(value, dict):
        if type(value) is not dict:
            return holds_data(value)
        few = len(value) <= _MANY
        return few or any(isinstance(v, list) or _holds_arrays(v) for v in value.values())
    return (isinstance(value, tuple) and hasattr(value, "_fields")) or _holds_arrays(value)


def holds_data(value: Any) -> bool:
    """Whether *value* is ``Data`` or a variable, or holds one, however deep."""
    if isinstance(value, dict | list | tuple):
        return any(map(holds_data, value.values() if isinstance(value, dict) else value))
    return isinstance(value, Data | StoredData | Shared)


def _holds_arrays(value: Any) -> bool:
    """Whether *value* is an array, or holds one, however deep."""
    if isinstance(value, dict | list | tuple):
        return any(map(_holds_arrays, value.values() if isinstance(value, dict) else value))
    known = isinstance(value, np.ndarray | Data | StoredData | Shared)
    return known or library_of(value) is not None or is_stored(value)
