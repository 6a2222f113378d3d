"""What of modules of the user's cannot be pickled, and is made on the workers, by an import."""

from __future__ import annotations

import abc
import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

from ...errors import UsageError, WorkerError
from ...packing.code import is_own_name
from ...packing.imported import Part, made, name_of_kind, settle
from ...packing.kinds import CLASS, NAME, WHOLE, attributes_of, is_plain, kind_of
from ...packing.pickles import Reader, Space, Writer
from ...packing.refused import advice
from .registry import Parts, Registry
from .walk import Found, Walk

Trial = Callable[[Any, Parts], Exception | None]
"""What is tried with a value, beside parts that need not succeed: returns what was raised."""


def written(value: Any, parts: Parts) -> Writer:
    """*value*, pickled as it would be for workers that have nothing yet.  Raises: whatever that does."""
    registry = Registry(count().__next__, lambda owner, number: None, parts)
    writer = registry.writer(lambda fn: NotImplemented)
    writer.dump(value)
    return writer


def pickling(value: Any, parts: Parts) -> Exception | None:
    """What is raised where *value* is pickled; None if it can be."""
    try:
        written(value, parts)
    except Exception as error:
        return error
    return None


def loading(error: WorkerError) -> Trial:
    """Tries whether a worker, which has nothing of the program's, fails so when it makes a value."""

    def tried(value: Any, parts: Parts) -> Exception | None:
        try:
            _Stranger(written(value, parts), parts).load()
        except Exception as why:
            return why if isinstance(error, type(why)) else None  # it may be one rank's own failure
        return None

    return tried


class _Stranger(Reader):
    """Loads what a worker could load, and no class of the program's becomes another one by that."""

    def __init__(self, writer: Writer, parts: Parts) -> None:
        super().__init__(writer.stream, writer.buffers, {}, lambda number, name, *_: ModuleType(name))
        self._made = {part: obj for obj, part in parts.values()}

    def find_class(self, module: str, name: str) -> Any:
        if is_own_name(module) or module == "__main__":
            raise AttributeError(f"{name!r} is a name of the program's, and not of the workers'")
        found = super().find_class(module, name)
        if found is made:
            return lambda *part: self._made[Part(*part)]
        if found is settle:
            return lambda obj, state: None
        if name in ("_make_skeleton_class", "_make_skeleton_enum"):  # those known here are not to change
            return lambda *arguments: found(*arguments[:-2], None, arguments[-1])
        return found


def find_parts(walk: Walk, parts: Parts, tried: Trial = pickling) -> bool:
    """Add to *parts* what an import can make of what *walk* has found, where the trial fails: of what
    cannot be pickled, say; returns whether there is any."""
    before = len(parts)
    for each in walk.found.values():
        for module, steps, value in _named(each):
            found = _search(module, steps, value, tried, parts)
            parts.update((id(obj), (obj, part)) for obj, part in found)
    return len(parts) > before


def find_parts_of(value: Any, registry: Registry) -> bool:
    """Add to the parts of *registry* what an import can make of a *value* that is sent by itself;
    returns whether there is any."""
    walk = Walk(registry)
    with contextlib.suppress(UsageError):
        walk.visit(value, type(value).__name__)
    return find_parts(walk, registry.parts)


def _named(found: Found) -> Iterator[tuple[str, tuple[Any, ...], Any]]:
    """Where an object is a value of a module that workers can import: the module, the way, the value."""
    if found.kind is NAME and WHOLE in found.contents:
        space = Space(0, found.obj.names)
        if space.importable and not space.installed:
            yield space.module, (found.obj.name,), found.contents[WHOLE]
    elif (
        found.kind is CLASS and found.obj.__module__ != "__main__" and is_own_name(found.obj.__module__)
    ):
        steps = tuple(found.obj.__qualname__.split("."))
        value: Any = sys.modules.get(found.obj.__module__)
        for step in steps:
            value = getattr(value, step, None)
        if value is found.obj:
            yield found.obj.__module__, steps, value


_DEEP = 5  # steps


def _search(
    module: str, steps: tuple[Any, ...], value: Any, tried: Trial, parts: Parts
) -> list[tuple[Any, Part]]:
    """What fails of a *value*, or else it itself."""
    if id(value) in parts or isinstance(value, FunctionType | ModuleType) or advice(value):
        return []  # a file, say, is not to be opened once more
    if tried(value, parts) is None:
        return []
    found: list[tuple[Any, Part]] = []
    for step, inner in _inner(value) if len(steps) < _DEEP else ():
        if not is_plain(inner):
            found += _search(module, (*steps, step), inner, tried, parts)
    return found or [(value, Part(module, steps, name_of_kind(value)))]


def _inner(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a container, a class, or an instance of one of the user's classes holds, each with its step;
    nothing of what others have made, which has to be made as a whole."""
    if type(value) is dict:
        return [((key,), inner) for key, inner in value.items() if is_plain(key)]
    if type(value) in (list, tuple):
        return [((index,), inner) for index, inner in enumerate(value)]
    if isinstance(value, type):
        return list(vars(value).items()) if type(value) in (type, abc.ABCMeta) else ()
    if kind_of(type(value)) is CLASS:
        return list((attributes_of(value) or {}).items())
    return ()
