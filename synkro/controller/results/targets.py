"""Where the user wants gathered outputs: ``f.options(out=target)``.

::

    parse    which targets there are, and for which outputs, when ``options`` is called
    open     before anything runs: each can be written, holds no input, and shares nothing with another
    fit      when the functions have run, before a byte is written: shapes and dtypes
    receive  an array is filled here; the workers write to ``Data``, maps of files and zarr arrays
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, NoReturn

import numpy as np

from ... import errors
from ...ipc.channel import Lane
from ...messages import Export
from ...packing.pickles import PICKLED
from ...plan.call import CallPlan
from ...plan.outputs import Tree, describe, flatten, modes_of, take_subset, unflatten
from ...storage.targets import chunked
from ...values.arrays import Array
from ...values.foreign import library_of
from ...values.variable import Variable
from ..data.data import Data
from ..data.outgoing import Placed
from ..data.stored import StoredData
from ..engine.engine import Engine
from .transfer import Bytes, Leaves, Outputs, Windows, bytes_of, bytes_of_map, mapped_below

_NESTED = (dict, tuple, list)


class Target(ABC):
    """Where one gathered output goes.

    Attributes:
        value: what the user gave, which the call returns.
        called: what errors call it.
        place: where the workers write rows straight, if these have its dtype; None if they cannot.
        bytes: which bytes of a file it is, as far as that is known.
    """

    place: Placed | None = None
    bytes: Bytes | None = None

    def __init__(self, value: Any, called: str, array: Any) -> None:
        """*array* is the memory, or what other processes know of an array."""
        self.value: Final = value
        self.called: Final = called
        self._array = array
        self.shape: tuple[int, ...] = array.shape
        self.dtype: np.dtype[Any] = array.dtype

    @abstractmethod
    def shares(self, other: Target) -> bool:
        """Whether the target has memory in common with another one."""

    @abstractmethod
    def receive(self, placed: Placed, engine: Engine, lane: Lane) -> None:
        """Take an output that lies in shared memory as a whole; *lane* has computed it."""

    def touch(self) -> None:
        """The contents of the target may have changed."""

    def check(self, output: Leaves, called: str, foreseen: bool) -> None:
        """Raises: OutputError for an *output* that the target does not hold as it is.

        One that is only *foreseen*, by an earlier call, may have other lengths in this one.
        """
        if output.dtype == PICKLED:
            raise errors.OutputError(
                f"{called} is a list of what is no array, and out= takes arrays: leave it out of out=, "
                f"with None in its place, or return an array. Nothing was written."
            )
        shapes = [piece.shape for _, _, piece in output.pieces]
        shape = sum(each[0] for each in shapes), *shapes[0][1:]
        fits = len(shape) == len(self.shape) if foreseen else shape == self.shape
        if not fits or output.dtype.newbyteorder("=") != self.dtype.newbyteorder("="):
            raise errors.OutputError(
                f"{called} has shape {shape} and dtype {output.dtype}, the rows of all ranks together, "
                f"but its target in out=, {self.called}, has shape {self.shape} and dtype "
                f"{self.dtype}: they have to be equal. Give a target like the output, or let the "
                f"function return what fits, by .astype(…) say. Nothing was written."
            )


class InMemory(Target):
    """An array, a ``Data`` or a memory-mapped array."""

    def __init__(self, value: Any, called: str, array: Array, window: Placed | None) -> None:
        """*window* is how the workers write to the memory."""
        super().__init__(value, called, array)
        self._map = getattr(mapped_below(array), "_mmap", None)
        if window is not None:
            self.bytes: Bytes | None = bytes_of(window)
            if array.flags.c_contiguous:
                self.place: Placed | None = window

    def shares(self, other: Target) -> bool:
        if not isinstance(other, InMemory):
            return False
        if np.shares_memory(self._array, other._array):
            return True
        if self._map is not None and self._map is other._map:
            return False  # their addresses have told all
        return self.bytes is not None and other.bytes is not None and self.bytes.overlap(other.bytes)

    def fill(self, pieces: Sequence[Array]) -> None:
        """Put *pieces* in, one behind the other."""
        np.concatenate(pieces, out=self._array)

    def receive(self, placed: Placed, engine: Engine, lane: Lane) -> None:
        self.fill([placed.segment.array(placed.region)])

    def touch(self) -> None:
        if isinstance(self.value, Data):
            self.value.wrote()


class InStore(Target):
    """A zarr array, of which each rank on this host writes chunks."""

    def shares(self, other: Target) -> bool:
        return isinstance(other, InStore) and os.path.samefile(self._array.folder, other._array.folder)

    def receive(self, placed: Placed, engine: Engine, lane: Lane) -> None:
        writers = [rank for rank in lane.ranks if rank in engine.workers.pool.ranks]
        shares = dict(zip(writers, self._array.shares(len(writers)), strict=True))
        spans = tuple(shares.get(rank, (0, 0)) for rank in range(engine.size))
        command = Export(self._array.store, self._array.path, self._array.layout, placed.region, spans)
        replies = engine.run(command, lane=lane)
        first = next((reply for reply in replies if reply.problem), None)
        if first is None:
            return
        starts = [spans[rank][0] for rank in lane.ranks]
        whole = _rows_in_words(zip(starts, [each.done for each in replies], strict=True))
        parts = _rows_in_words((each.done, each.reached) for each in replies)
        text = (
            f"{first.problem}: {self.called} could not be written as a whole. Written are {whole}; "
            f"perhaps written in part are {parts}; all other rows are as they were"
        )
        raise OSError(first.errno, text) if first.errno else OSError(text)


def _rows_in_words(spans: Iterable[tuple[int, int]]) -> str:
    some = [f"{start} to {stop - 1}" for start, stop in spans if stop > start]
    return f"the rows {', '.join(some)}" if some else "no rows"


@dataclass(frozen=True)
class OpenTargets:
    """The targets of one call, nested as its outputs; None for outputs that come back as usual."""

    nested: Any

    def fitting(
        self, name: str, tree: Tree, outputs: Sequence[Leaves], foreseen: bool = False
    ) -> dict[int, Target]:
        """The targets by the number of their output.

        *tree* is how what the function *name* returned is nested, or did, where that is *foreseen*.

        Raises: OutputError for what does not fit; nothing has been written then.
        """
        targets = {}
        for index, (path, target) in enumerate(list(_by_leaf(self.nested, tree, "", name))):
            if target is not None:
                called = f"output{errors.cut(path)} of the function {name!r}"
                target.check(outputs[index], called, foreseen)
                targets[index] = target
        return targets


class Destinations:
    """What ``out=`` says: targets, nested as the outputs of a function."""

    def __init__(self, out: Any) -> None:
        """Raises: InvalidType for what is no target."""
        targets = [leaf for leaf in flatten(out, called="out=")[0] if leaf is not None]
        for target in targets:
            _check_kind(target)
        if not targets:
            raise errors.InvalidValue(
                f"out={errors.shown(out)} names no target: give one, or leave it out."
            )
        self._out = out

    def opened(self, home: Outputs, name: str, modes: Any, plan: CallPlan, given: Any) -> OpenTargets:
        """The targets, for a call of the function *name*, as *plan* says, with the arguments *given*.

        *modes* are the operations of its outputs.

        Raises: UsageError for what cannot be written, or must not be; OSError for a full disk.
        """
        out = self._out
        if plan.subset is not None:
            modes = modes_of(plan.subset, modes)
            chosen = set(plan.subset) if isinstance(out, dict) else len(plan.subset)
            if isinstance(out, _NESTED) and _keys(out) != chosen:  # so it is nested as all outputs are
                out = take_subset(plan.subset, out, "out=")
        _check_modes(out, modes, "", name)
        leaves, tree = flatten(out)
        opened = [
            None if leaf is None else _opened(leaf, home.engine, home.windows, plan.world)
            for leaf in leaves
        ]
        targets = [target for target in opened if target is not None]
        for one, other in combinations(targets, 2):
            if one.shares(other):
                raise errors.InvalidValue(
                    f"two targets in out= overlap, {one.called} and {other.called}: one output would "
                    f"overwrite the other. Give each memory of its own."
                )
        straight = [target for target in targets if target.place is not None]
        if straight:
            _check_apart(straight, given, home.engine, name)
        return OpenTargets(unflatten(tree, iter(opened)))


def _check_kind(value: Any) -> None:
    """Raises: InvalidType unless *value* is a target."""
    package = type(value).__module__.partition(".")[0]
    plain = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    if plain or isinstance(value, Data) or (package == "zarr" and chunked(value)):
        return
    advice = "give one of these."
    if package == "h5py":
        advice = (
            "an HDF5 file has one writer at a time, so the workers cannot share it. Take the result, "
            "and then write it, by dataset[...] = result."
        )
    elif isinstance(value, StoredData):
        advice = (
            "it is read-only. Give the zarr array itself, open for writing; into an HDF5 file write the "
            "result, by dataset[...] = result."
        )
    elif isinstance(value, int | float | complex | np.generic):
        advice = "that is a number, and a list of numbers is no array: give np.zeros(…), say."
    elif isinstance(value, str | os.PathLike):
        advice = (
            "open the file: numpy.lib.format.open_memmap(path, mode='w+', dtype=…, shape=…), or "
            "zarr.create_array(path, …)."
        )
    elif isinstance(value, Variable):
        advice = 'a variable lives on the workers: set it in the function, or say outputs="keep".'
    elif library_of(value) == "torch":
        advice = "give tensor.numpy(), an array of the same memory."
    elif library_of(value) == "jax":
        advice = "arrays of JAX's never change."
    raise errors.InvalidType(
        f"out= takes an array of NumPy's, a Data, a memory-mapped array or a zarr array, or a dict, "
        f"tuple or list of these, nested as the outputs, with None for outputs that come back as usual; "
        f"got {errors.shortened(value)}: {advice}"
    )


def _check_modes(out: Any, modes: Any, path: str, name: str) -> None:
    """Raises: OutputError unless the outputs that have targets are gathered."""
    nested = isinstance(modes, _NESTED)
    if nested and out is not None and not (isinstance(out, _NESTED) and _keys(out) == _keys(modes)):
        _refuse_nesting(out, path, name, f"its outputs= are {describe(flatten(modes)[1])}")
    if isinstance(out, _NESTED):
        for key in out if isinstance(out, dict) else range(len(out)):
            _check_modes(out[key], modes[key] if nested else modes, f"{path}[{key!r}]", name)
    elif out is not None and modes != "gather":
        by = "as a list" if modes is None else f"by {getattr(modes, '__name__', modes)!r}"
        raise errors.OutputError(
            f"output{errors.cut(path)} of the function {name!r} comes back {by}, and out= takes outputs "
            f'that are gathered, the rows of all ranks: say outputs="gather" for it, or give None in '
            f"its place."
        )


def _by_leaf(out: Any, tree: Tree, path: str, name: str) -> Iterator[tuple[str, Target | None]]:
    """For each leaf of *tree* its path, and the target that *out* has for it.

    Raises: OutputError where they are not nested alike.
    """
    if tree is None:
        if isinstance(out, _NESTED):
            _refuse_nesting(out, path, name, "it returned a single value")
        yield path, out
        return
    if out is not None and not (isinstance(out, _NESTED) and _keys(out) == _keys_of(tree)):
        _refuse_nesting(out, path, name, f"it returned {describe(tree)}")
    keys: tuple[Any, ...] = tree.keys
    for key, child in zip(keys, tree.children, strict=True):
        yield from _by_leaf(None if out is None else out[key], child, f"{path}[{key!r}]", name)


def _keys(value: Any) -> Any:
    return set(value) if isinstance(value, dict) else len(value)


def _keys_of(tree: Any) -> Any:
    return set(tree.keys) if tree.kind is dict else len(tree.keys)


def _refuse_nesting(out: Any, path: str, name: str, outputs: str) -> NoReturn:
    has = describe(flatten(out)[1]) if isinstance(out, _NESTED) else "one target"
    where = f" at {path}" if path else ""
    raise errors.OutputError(
        f"out= has {has}{where} for the function {name!r}, but {outputs}: nest the targets as the "
        f"outputs are, with None for outputs that come back as usual. Nothing was written."
    )


def _opened(out: Any, engine: Engine, windows: Windows, world: tuple[int, ...]) -> Target:
    """The target that can be written for what the user gave.

    Raises: as ``Destinations.opened``.
    """
    if isinstance(out, Data):
        return _of_data(out, engine, windows)
    if not isinstance(out, np.ndarray):
        array = chunked(out)
        if not any(rank in engine.workers.pool.ranks for rank in world):
            raise errors.NotAvailable(
                f"{array} is written by workers of this host, and the function runs on others only: "
                f"take the result, and then array[...] = result."
            )
        array.check()
        return InStore(out, str(array), array)
    kind = "array" if mapped_below(out) is None else "memory-mapped array"
    called = errors.with_article(kind)
    if not out.flags.writeable:
        cure = "give one that can be written" if kind == "array" else 'open the file with mode="r+"'
        raise errors.InvalidValue(f"out= has {called} of shape {out.shape} that is read-only: {cure}.")
    if _may_overlap_itself(out):
        raise errors.InvalidValue(
            f"out= has {called} of shape {out.shape} and strides {out.strides}, elements of which share "
            f"memory: one row would overwrite another. Give an array with memory for each, as a copy of "
            f"it, target.copy()."
        )
    return InMemory(out, called, out.view(np.ndarray), windows.on_map(out))


def _may_overlap_itself(array: Array) -> bool:
    """Whether an axis does not step over all that the axes of smaller steps reach."""
    reach = array.itemsize
    for step, length in sorted((abs(s), n) for s, n in zip(array.strides, array.shape, strict=True)):
        if length > 1:
            if step < reach and array.size:
                return True
            reach += step * (length - 1)
    return False


def _of_data(data: Data, engine: Engine, windows: Windows) -> InMemory:
    called = f"the Data {data.name!r}" if data.name else "a Data"
    placed = data.input(engine, f"{called} in out=")
    array = placed.segment.array(placed.region)
    if not array.flags.writeable:
        raise errors.InvalidValue(
            f"{called} in out= is read-only. If it shows a file, give the file itself, mapped by "
            f'numpy.load(path, mmap_mode="r+") or numpy.memmap(path, mode="r+", …); memory of another '
            f"program is opened by attach(…, writable=True)."
        )
    return InMemory(data, called, array, windows.on_data(placed))


def _check_apart(targets: Sequence[Target], given: Any, engine: Engine, name: str) -> None:
    """Raises: InvalidValue if the workers would write to an input, one of those *given*."""
    for leaf in flatten(given)[0]:
        if isinstance(leaf, Data):
            found: Bytes | None = bytes_of(leaf.input(engine, "an input"))
        elif isinstance(leaf, np.memmap):
            found = bytes_of_map(leaf)
        else:
            continue  # an array, which was copied
        for target in targets:
            if found is not None and target.bytes is not None and target.bytes.overlap(found):
                raise errors.InvalidValue(
                    f"{target.called} in out= is also an input of the function {name!r}, in whole or in "
                    f"part: the workers would write to what they read. Give another target, or take the "
                    f"result, and then x[...] = result."
                )
