"""Nested outputs as flat leaves, and the reduction of each leaf.

A function may return a number, an array, or tuples, lists and dicts of them, nested.  ``flatten``
takes such a value apart into its leaves and a *tree*, a hashable description of the nesting;
``unflatten`` puts it together again.  The user's ``outputs=`` is a prefix of that tree: one
operation for a whole subtree, or a tuple, list or dict with an entry for each child.  What is not
reduced by an operation of Synkro's may be anything, and stays whole.
"""

from __future__ import annotations

import inspect
import operator
import sys
import zlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

from .. import errors

MODES = ("mean", "sum", "prod", "max", "min", "gather", "keep", None)
ALIASES = {"avg": "mean"}

_KNOWN = ", ".join(map(repr, MODES))

MERGE = "merge"
"""Stands on the workers for a function ``op(a, b)`` of the user's, which runs in the main process."""


Whole = Callable[[int, int], int]
WHOLE: dict[str, Whole] = {"sum": operator.add, "prod": operator.mul, "max": max, "min": min}
"""The operations that merge Python's integers as what they are: with any number of digits."""


class Default(str):
    """An operation that stands where ``outputs=`` says nothing; equal to the one of its name."""


DEFAULT = Default("mean")


def only_one(first: Any, second: Any) -> Any:
    """The operation of a function on one rank, where ``outputs=`` says nothing: its value is the result.

    Raises: OutputError for the values of several slices.
    """
    raise errors.OutputError(
        "a function on one rank returns one value, and num_slices= made several: say by outputs= how to "
        'merge them ("sum", "gather" …), or leave num_slices= out.'
    )


_MEANT = {
    **dict.fromkeys(("average", "nanmean"), "mean"),
    **dict.fromkeys(("add", "plus", "total", "nansum"), "sum"),
    **dict.fromkeys(("product", "mul", "multiply"), "prod"),
    **dict.fromkeys(("maximum", "amax"), "max"),
    **dict.fromkeys(("minimum", "amin"), "min"),
    **dict.fromkeys(("concat", "concatenate", "cat", "append", "vstack", "hstack"), "gather"),
    **dict.fromkeys(("stack", "list", "none", "each"), None),
}
"""What other libraries call these operations."""

_OF_TWO = {
    max: "lambda a, b: max(a, b)",
    min: "lambda a, b: min(a, b)",
    sum: "lambda a, b: a + b",
    any: "lambda a, b: a or b",
    all: "lambda a, b: a and b",
}
"""Python's functions of one iterable, as operations."""

_CONTAINERS = (dict, tuple, list)

_FEW = 10  # keys that a message names
_LONG_KEY = 40  # characters of a key there
_NAMES = 200  # characters of names that are spelled out


@dataclass(frozen=True)
class Node:
    """A container: how to build it again, the names of its children, and their trees."""

    kind: type
    keys: tuple[Hashable, ...]
    children: tuple[Tree, ...]

    @property
    def is_plain(self) -> bool:
        """Whether pickle takes it for what it is anywhere: it has no classes of the user's."""
        plain = self.kind in _CONTAINERS and {str, int}.issuperset(map(type, self.keys))
        return plain and all(child is None or child.is_plain for child in self.children)

    def build(self, values: Sequence[Any]) -> Any:
        if self.kind is dict:
            return dict(zip(self.keys, values, strict=True))
        if self.kind in (tuple, list):
            return self.kind(values)
        return self.kind(*values)  # a named tuple


Tree = Node | None
"""The nesting of a value; None stands for a leaf."""

Flat = tuple[list[Any], Tree]  # the leaves of a value, and its nesting
Test = Callable[[Any], bool]


def _children(value: Any) -> tuple[type, tuple[Hashable, ...], Sequence[Any]]:
    """The class to rebuild a container with, its keys and its children."""
    if isinstance(value, dict):
        return dict, tuple(value), list(value.values())
    kind: type = list
    if isinstance(value, tuple):
        kind = type(value) if hasattr(value, "_fields") else tuple
    return kind, tuple(range(len(value))), value


def levels() -> int:
    """How deep may be nested what is taken apart: to pickle a level, and to take it apart and put it
    together again, takes up to four calls of those that Python allows; the others are the program's."""
    return sys.getrecursionlimit() // 8


def flatten(value: Any, opens: Test | None = None, called: str = "a value") -> Flat:
    """The leaves of *value*, from left to right, and its tree; *opens* says which containers open.

    Raises: InvalidValue if what is *called* so has more than so many ``levels``, or holds itself.
    """
    try:
        return _flatten(value, opens, levels())
    except RecursionError:
        raise errors.too_deep(called) from None


def _flatten(value: Any, opens: Test | None, left: int) -> Flat:
    """Raises: RecursionError if there are more than so many levels *left*."""
    if not isinstance(value, _CONTAINERS) or (opens is not None and not opens(value)):
        return [value], None
    if not left:
        raise RecursionError
    kind, keys, children = _children(value)
    leaves: list[Any] = []
    trees = []
    for child in children:
        below, tree = _flatten(child, opens, left - 1)
        leaves += below
        trees.append(tree)
    return leaves, Node(kind, keys, tuple(trees))


def flatten_by(spec: Any, value: Any, is_whole: Test, called: str) -> Flat:
    """``flatten``, but what *spec* does not reduce, and lists to gather that are *whole*, stay whole.

    Raises: OutputError if what is *called* so is nested too deeply.
    """
    try:
        return _flatten_by(spec, value, is_whole, levels())
    except RecursionError:
        raise errors.too_deep(called, errors.OutputError) from None


def _flatten_by(spec: Any, value: Any, is_whole: Test, left: int) -> Flat:
    if spec in (None, MERGE) or (spec == "gather" and type(value) is list and is_whole(value)):
        return [value], None
    if not isinstance(spec, _CONTAINERS) or not isinstance(value, _CONTAINERS):
        return _flatten(value, None, left)
    kind, keys, children = _children(value)
    by_name = isinstance(spec, dict)
    entries: Any = spec
    if len(spec) != len(keys) or by_name != (kind is dict) or (by_name and set(spec) != set(keys)):
        return _flatten(value, None, left)  # which fits nothing: ``leaf_modes`` tells
    leaves: list[Any] = []
    trees = []
    for entry, child in zip([entries[key] for key in keys], children, strict=True):
        below, tree = _flatten_by(entry, child, is_whole, left - 1)
        leaves += below
        trees.append(tree)
    return leaves, Node(kind, keys, tuple(trees))


def unflatten(tree: Tree, leaves: Iterator[Any]) -> Any:
    """The inverse of ``flatten``: takes as many *leaves* as the tree has."""
    if tree is None:
        return next(leaves)
    return tree.build([unflatten(child, leaves) for child in tree.children])


def leaf_paths(tree: Tree, path: str = "") -> list[str]:
    """A name for each leaf, such as ``[0]["loss"]``; empty where there is only one."""
    if tree is None:
        return [path]
    return [
        name
        for key, child in zip(tree.keys, tree.children, strict=True)
        for name in leaf_paths(child, f"{path}[{key!r}]")
    ]


@lru_cache(64)
def by_name(tree: Tree) -> tuple[tuple[int, ...], str]:
    """The leaves sorted by name, whatever the order of dicts, and all names in one text.

    Values with the same leaves have the same text; it is empty for a leaf by itself.
    """
    names = leaf_paths(tree)
    order = tuple(sorted(range(len(names)), key=names.__getitem__))
    text = ", ".join(names[index] for index in order)
    if len(text) > _NAMES:
        text = f"{text[:_NAMES]}… ({len(names)} in all, {zlib.crc32(text.encode()):08x})"
    return order, text


def check_modes(spec: Any) -> Any:
    """The user's ``outputs=`` with every operation checked and aliases resolved; functions stay.

    Raises: InvalidValue for an unknown operation, InvalidType for other objects.
    """
    leaves, tree = flatten(spec, called="outputs=")
    return unflatten(tree, map(_check_mode, leaves))


def _check_mode(spec: Any) -> Any:
    if spec is not None and not isinstance(spec, str):
        hint = suggested(getattr(spec, "__name__", ""), MODES)
        of_two = getattr(spec, "nin", 0) == 2 or getattr(spec, "__module__", "") == "_operator"
        named = isinstance(spec, type) or hint  # which may take two, and means something else
        own = isinstance(spec, FunctionType) or (callable(spec) and not named)
        if of_two or (own and _takes_two(spec)):
            return spec
        for builtin, operation in _OF_TWO.items():
            if spec is builtin:
                hint += f" To merge values of any kind by it, tuples say, give {operation}."
        raise errors.InvalidType(
            f"outputs= takes {_KNOWN}, a function op(a, b) that merges two values, or a tuple, list "
            f"or dict of these; got {errors.shortened(spec)}.{hint}"
        )
    mode = ALIASES.get(spec, spec) if spec is not None else None
    if mode not in MODES:
        raise errors.InvalidValue(
            f"outputs= has the unknown operation {errors.shown(spec)}: expected "
            f"{_KNOWN}.{suggested(spec, MODES)}"
        )
    return mode


def _takes_two(fn: Any) -> bool:
    """Whether *fn* may be called with two values, as far as its signature is known."""
    try:
        inspect.signature(fn).bind(None, None)
    except TypeError:
        return False
    except ValueError:  # it has none
        return True
    return True


def for_workers(modes: Any) -> Any:
    """The checked ``outputs=`` without the user's own operations."""
    leaves, tree = flatten(modes)
    return unflatten(tree, iter([MERGE if callable(mode) else mode for mode in leaves]))


def suggested(name: Any, known: Sequence[str | None]) -> str:
    """A question for which of the *known* operations an unknown *name* may stand, or an empty text."""
    if not isinstance(name, str):
        return ""
    name = name.strip().lower().removeprefix("c_")  # as Theano called those that concatenate
    name = ALIASES.get(name, name)
    near = errors.nearest(name, filter(None, known), 0.81)
    meant = name if name in known else _MEANT.get(name, near or "")
    return f" Did you mean {meant!r}?" if meant != "" and meant in known else ""


def leaf_modes(spec: Any, tree: Tree, path: str = "") -> list[str | None]:
    """The operation for each leaf of *tree*; *spec* has gone through ``check_modes``.

    Raises: OutputError where the nesting of *spec* is not that of the result.
    """
    if not isinstance(spec, _CONTAINERS):
        return [spec] if tree is None else [spec] * len(leaf_paths(tree))
    modes: list[str | None] = []
    for entry, child, below in zip(*_matched(spec, tree, path), strict=True):
        modes += leaf_modes(entry, child, below)
    return modes


def _matched(spec: Any, tree: Tree, path: str) -> tuple[list[Any], tuple[Tree, ...], list[str]]:
    """The entries of *spec* beside the children of *tree* that they are for, with their paths."""
    where = f"its result{path}"
    if isinstance(spec, dict):
        if tree is None or tree.kind is not dict or set(tree.keys) != set(spec):
            raise errors.OutputError(
                f"outputs= names the keys {_keys(sorted(map(str, spec)))}, but {where} is "
                f"{describe(tree)}: name exactly the keys that the function returns."
            )
        entries = [spec[key] for key in tree.keys]
    else:
        if tree is None or tree.kind is dict or len(tree.children) != len(spec):
            count = "1 entry" if len(spec) == 1 else f"{len(spec)} entries"
            raise errors.OutputError(
                f"outputs= has {count}, but {where} is {describe(tree)}: give one "
                f"operation for all, or one for each."
            )
        entries = list(spec)
    return entries, tree.children, [f"{path}[{key!r}]" for key in tree.keys]


def describe(tree: Tree) -> str:
    """A tree in words, for messages."""
    if tree is None:
        return "a single value"
    if tree.kind is dict:
        count = f"{len(tree.keys)} keys" if len(tree.keys) > _FEW else "the keys"
        return f"a dict with {count} {_keys(tree.keys)}, in this order"
    return f"{'a list' if tree.kind is list else 'a tuple'} of {len(tree.children)}"


def _keys(keys: Iterable[Hashable]) -> str:
    names = [_shortened(key) for key in keys]
    return str(names) if len(names) <= _FEW else f"{str(names[:_FEW])[:-1]}, …]"


def _shortened(key: Hashable) -> str:
    text = str(key)
    return text if len(text) <= _LONG_KEY else f"{text[:_LONG_KEY]}…"


def advice_on_keys(one: Tree, other: Tree) -> str:
    """What to do about two results that differ in the keys of a dict; else an empty text."""
    if one is None or other is None or not one.kind is other.kind is dict:
        return ""
    apart = [key for key in one.keys if key not in other.keys] or [
        key for key in other.keys if key not in one.keys
    ]
    if not apart:
        return ""
    return (
        f" Only one of them has the key {_shortened(apart[0])!r}. Where keys depend on the rows, merge "
        f"the dicts by a function op(a, b): for a Counter outputs=operator.add."
    )


def assemble(spec: Any, tree: Tree, leaves: Iterator[Any]) -> Any:
    """The user's result out of merged *leaves*.

    A leaf without reduction comes as the list of its pieces' values; a whole subtree without
    reduction becomes the list of the pieces' subtrees.
    """
    if spec is None:
        columns = [next(leaves) for _ in leaf_paths(tree)]
        return [unflatten(tree, iter(row)) for row in zip(*columns, strict=True)]
    if not isinstance(spec, _CONTAINERS):
        return unflatten(tree, leaves)
    assert tree is not None  # leaf_modes has checked that spec and tree match
    entries, children, _ = _matched(spec, tree, "")
    values = [assemble(entry, child, leaves) for entry, child in zip(entries, children, strict=True)]
    return tree.build(values)


def check_subset(subset: Any) -> tuple[Any, ...] | None:
    """``output_subset=`` as a tuple of top-level indices or keys; None for all outputs."""
    if subset is None:
        return None
    if isinstance(subset, str) or not isinstance(subset, Sequence):
        raise errors.InvalidType(
            f"output_subset takes a list of indices or keys of the outputs; got {errors.shown(subset)}."
        )
    if not subset:
        raise errors.InvalidValue("output_subset is empty: name at least one output, or leave it out.")
    return tuple(subset)


def take_subset(subset: tuple[Any, ...], value: Any, noun: str) -> Any:
    """The children *subset* of *value* (a result, or the ``outputs=`` for it), in that order.

    Raises: OutputError if *value* has no children, InvalidIndex for a child that does not exist.
    """
    if not isinstance(value, _CONTAINERS):
        raise errors.OutputError(
            f"output_subset={errors.shown(list(subset))} chooses among outputs, but {noun} is one."
        )
    try:
        if isinstance(value, dict):
            return {key: value[key] for key in subset}
        taken = [value[index] for index in subset]
        return taken if isinstance(value, list) else tuple(taken)
    except (LookupError, TypeError):
        raise errors.InvalidIndex(
            f"output_subset={errors.shown(list(subset))} names an output that is not there: {noun} has "
            f"{_keys(value) if isinstance(value, dict) else len(value)}."
        ) from None


def modes_of(subset: Sequence[Any] | None, modes: Any) -> Any:
    """The *modes* of the outputs in a *subset*, if it is one: one mode for all stays as it is."""
    if subset is None or not isinstance(modes, _CONTAINERS):
        return modes
    return take_subset(tuple(subset), modes, "outputs=")


def pair_of(value: Any, count: int, name: str) -> tuple[Any, tuple[Any, ...]]:
    """The outputs and the *count* new values that a function with ``updates=`` returned.

    Raises: OutputError.
    """
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise errors.OutputError(
            f"the function {name!r} has updates=, so it returns two things, its outputs and the new "
            f"values; it returned {describe(flatten(value)[1])}."
        )
    outputs, new = value
    if not isinstance(new, tuple | list):
        new = (new,)
    if len(new) != count:
        raise errors.OutputError(
            f"the function {name!r} returned {errors.counted(len(new), 'new value')} for the "
            f"{errors.counted(count, 'variable')} in "
            f"updates=: return one for each, in their order."
        )
    return outputs, tuple(new)
