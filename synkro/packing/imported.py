"""What of a module of the user's cannot travel, such as a lock: a worker makes it, by an import.

On a worker such a module has two forms: the ``OwnModule``, whose names are those that functions use, and
as they are in the program; and, where something has to be made there, what an import makes of its file.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import queue
import sys
import threading
from collections import deque
from collections.abc import Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from ..errors import InvalidType, reason, shown, with_article
from . import kinds
from .code import is_own
from .kinds import Contents, Kind, alike, holds_only_plain, is_plain, kind_of


class Part(NamedTuple):
    """What is made by an import: the name of a module, the way from there, and the name of its type.

    Each step is the name of an attribute, or the index or key of an item in a tuple of one.
    """

    module: str
    steps: tuple[Any, ...]
    kind: str

    def __str__(self) -> str:
        return self.module + "".join(
            f"[{s[0]!r}]" if isinstance(s, tuple) else f".{s}" for s in self.steps
        )


class OwnModule(ModuleType):
    """A module of the user's on a worker: it has the names that functions use."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(
            f"the module {self.__name__!r} has no {name!r} on the workers: only what the code of a "
            f"function names goes there. Write {self.__name__}.{name} in the function, or pass it as an "
            f"argument."
        )


_imported: dict[str, ModuleType] = {}


def made(module: str, steps: tuple[Any, ...], kind: str) -> Any:
    """On a worker: what a part is there.  Raises: InvalidType if the import does not make it."""
    part = Part(module, steps, kind)
    if module not in _imported:
        try:
            with _without_own_modules(), contextlib.redirect_stdout(io.StringIO()):
                importlib.import_module(module)
        except Exception as error:
            raise InvalidType(
                f"{part} cannot be pickled, so the workers import {module!r} to make it, and that "
                f"failed: {reason(error)}"
            ) from error
    found: Any = _imported.get(module)
    with contextlib.suppress(AttributeError, LookupError, TypeError):
        for step in steps:
            found = found[step[0]] if isinstance(step, tuple) else getattr(found, step)
        if name_of_kind(found) == kind:
            return found
    kind = with_article(kind.rpartition(".")[2])
    raise InvalidType(
        f"{part}, {kind}, cannot be pickled, and an import of {module!r} on a worker does not make it: "
        f"make it where the module begins, or inside the function."
    )


def name_of_kind(obj: Any) -> str:
    """The full name of the type of *obj*."""
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


@contextlib.contextmanager
def _without_own_modules() -> Iterator[None]:
    """A block in which modules of the user's are what imports make of them."""
    own = {name: each for name, each in sys.modules.items() if isinstance(each, OwnModule)}
    own.pop("__main__", None)
    for name in own:
        del sys.modules[name]
    before = set(sys.modules)
    sys.modules.update(_imported)
    try:
        yield
    finally:
        for name in sys.modules.keys() - before:
            if is_own(sys.modules[name]):
                _imported[name] = sys.modules.pop(name)
        sys.modules.update(own)


def taken_over(obj: Any) -> tuple[int, Contents, bool] | None:
    """What a part that an import makes has to be on a worker, as it is here: the number of its kind, its
    contents, and whether these are only compared there.  None: nobody can tell.

    Of a class of the user's, whose import may have another value of what the program has changed, that
    are numbers, strings and functions; of an object of a package's its numbers and strings.  An event or
    a semaphore is set to what it is here, and so is what a queue holds.
    """
    kind = kind_of(obj)
    if kind is None or kind not in (kinds.CLASS, kinds.INSTANCE):
        return None
    compared = kind is kinds.INSTANCE and not isinstance(obj, _COUNTING)
    return kinds.KINDS.index(kind), kept_of_part(kind, kind.look(obj)), compared


def kept_of_part(kind: Kind, contents: Contents) -> Contents:
    """What is taken over of the *contents* of a part."""
    cls = contents.get(kinds.CLASS_OF, object) if kind is kinds.INSTANCE else object
    counts, queues = issubclass(cls, _COUNTING), issubclass(cls, queue.Queue)
    return {
        name: value
        for name, value in contents.items()
        if isinstance(name, str) and (counts or not name.startswith("_"))
        if is_plain(value)
        or (kind is kinds.CLASS and _is_function(value))
        or (queues and _is_container(value))
    }


def _is_container(value: Any) -> bool:
    return isinstance(value, list | deque) and holds_only_plain(value)


_COUNTING = (threading.Event, threading.Semaphore, threading.Barrier)
"""Types whose numbers and strings are all that they are."""


def _is_function(value: Any) -> bool:
    if isinstance(value, staticmethod | classmethod):
        value = value.__func__
    return isinstance(value, FunctionType | property) and kinds.is_sent_by_value(
        value.fget if isinstance(value, property) else value
    )


def settle(obj: Any, state: tuple[int, Contents, bool]) -> None:
    """On a worker: have what was made be what it is in the program.  Raises: InvalidType if it is not,
    and cannot be changed."""
    number, contents, compared = state
    kind = kinds.KINDS[number]
    if not compared:
        kind.change(obj, contents, ())
        return
    there = kind.look(obj)
    for name, value in contents.items():
        contained = _is_container(value) and repr(there.get(name)) == repr(value)
        if contained:
            setattr(obj, name, value)  # this one, in which later changes arrive
        elif name not in there or not alike(there[name], value):
            raise InvalidType(
                f"an object of type {type(obj).__name__} cannot be pickled, and what the workers make "
                f"by an import is not as it is in the program, where its {name!r} is {shown(value)}: "
                f"set that where its module begins, or make the object inside the function."
            )
