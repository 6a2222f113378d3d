"""How a worker pickles what it has: results for the main process, and objects for another worker."""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Mapping
from operator import itemgetter
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np

from ..packing import pickles
from ..packing.imported import OwnModule
from ..packing.kinds import ARRAY, OPAQUE, SIMPLE, Kind
from ..packing.refused import refuse_open_file
from ..values.arrays import Array
from ..values.foreign import in_host_memory


class Copier(pickles.OneByOne):
    """Pickles a copy for the main process, which has the user's classes, functions and modules."""

    def __init__(self, numbers: dict[int, int], least: int = pickles.OUT_OF_BAND) -> None:
        super().__init__(least)
        self._numbers = numbers

    def reduced(self, obj: Any) -> Any:
        number = self._numbers.get(id(obj))
        reduced = self._reduced(obj) if number is None else (pickles.numbered, (number,))
        if reduced is not NotImplemented:
            self._ours = True
        return reduced

    def _reduced(self, obj: Any) -> Any:
        if isinstance(obj, OwnModule):
            return pickles.space, (obj.__name__,)
        host = in_host_memory(obj)
        if host is not None:
            return host.__reduce_ex__(5)
        if type(obj) is np.ndarray and obj.base is not None and not obj.flags.writeable:
            return np.array(obj).__reduce_ex__(5)  # of what tasks must not write to; the program may
        refuse_open_file(obj)
        given = pickles.with_attributes(obj) or pickles.for_program(obj)
        return given or cloudpickle.Pickler.reducer_override(self, obj)


class WholeObject(NamedTuple):
    """Stands for what an object holds that cannot be put into another one: the object itself."""

    obj: Any


class PickledContents(NamedTuple):
    """What some objects hold, pickled together.

    *links* are the numbers of the others that they refer to, *inside* the ids of what they hold beside
    those, and may share.
    """

    stream: bytes
    links: frozenset[int]
    inside: frozenset[int]


class Sender(Copier):
    """Pickles what objects hold, for another worker; the objects that it has, too, go by number.

    Attributes:
        parts: the numbers of those that go with what holds them, as nothing can be put into them.
    """

    def __init__(
        self, objects: Mapping[int, Any], kinds: Mapping[int, Kind], modules: Mapping[int, ModuleType]
    ) -> None:
        opaque = {number: objects[number] for number, kind in kinds.items() if kind is OPAQUE}
        self.parts: Final = frozenset(
            number
            for number, obj in opaque.items()
            if not isinstance(obj, np.ndarray) and not OPAQUE.can_travel(obj)
        )
        super().__init__({id(o): n for n, o in objects.items() if n not in self.parts}, sys.maxsize)
        self._spaces = {id(module): number for number, module in modules.items()}
        self._met: set[int] = set()
        arrays = (objects[number] for number, kind in kinds.items() if kind is ARRAY)
        whole = [(*_bounds(each), each) for each in arrays if each.nbytes and each.flags.c_contiguous]
        self._arrays = sorted(whole, key=itemgetter(0))  # by address

    def together(self, contents: Mapping[int, Any]) -> PickledContents:
        """*contents* of objects, by number, pickled as one: what several hold is there once."""
        self._met.clear()
        try:
            self.dump(contents)
            stream = self.stream
            inside = [obj for _, obj in self.memo.copy().values() if not isinstance(obj, _NEVER_SHARED)]
        finally:
            self._forget()
        inside.append(object())  # nobody else holds this one, as what pickling has made
        *held, alone = [(sys.getrefcount(obj), id(obj)) for obj in inside]
        made = {id(contents), *map(id, contents.values())}
        shared = frozenset(ident for count, ident in held if count > alone[0] and ident not in made)
        return PickledContents(stream, frozenset(self._met), shared)

    def persistent_id(self, obj: Any) -> int | None:
        number = self._numbers.get(id(obj))
        if number is not None:
            self._met.add(number)
        return number

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is np.ndarray and obj.base is not None and obj.nbytes:
            low, high = _bounds(obj)
            at = bisect_right(self._arrays, low, key=itemgetter(0)) - 1
            if at >= 0 and high <= self._arrays[at][1]:
                start, _, whole = self._arrays[at]
                address = obj.__array_interface__["data"][0]
                return _part, (whole, address - start, obj.shape, obj.strides, obj.dtype)
        return super().reducer_override(obj)

    def _reduced(self, obj: Any) -> Any:
        if id(obj) in self._spaces:
            return pickles.space, (self._spaces[id(obj)], obj.__name__, None, {})
        return pickles.without_lock(obj) or super()._reduced(obj)


_NEVER_SHARED = (
    *(*SIMPLE, tuple, frozenset, type, np.dtype),
    *(FunctionType, BuiltinFunctionType, ModuleType, CodeType),
)
"""Types of what may be there twice, and nobody can tell."""


def _bounds(array: Array) -> tuple[int, int]:
    """The addresses of the first byte of an array that is not empty, and behind the last one."""
    low = high = array.__array_interface__["data"][0]
    for size, stride in zip(array.shape, array.strides, strict=True):
        low, high = low + min(0, stride) * (size - 1), high + max(0, stride) * (size - 1)
    return low, high + array.itemsize


def _part(
    base: Array, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: np.dtype[Any]
) -> Array:
    """A view of an array."""
    array: Array = np.ndarray(shape, dtype, base.reshape(-1).view(np.uint8), offset, strides)
    return array
