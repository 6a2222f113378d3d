"""What the code of a function names: globals, attributes, modules that it imports, what it rebinds."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_REBOUND_GLOBALS = {"STORE_GLOBAL", "DELETE_GLOBAL"}
_EACH_ONES = {"__builtins__", "__annotations__"}  # of each process, and of each body of a class
_REBOUND_CELLS = {"STORE_DEREF", "DELETE_DEREF"}


class Uses(NamedTuple):
    """What a function's code names, with that of the functions inside it.

    Attributes:
        names: globals, in the order in which they first come.
        attributes: all names, also of attributes.
        imports: modules that it imports, as the import statement has them, with their dots; and what it
            takes from one, which may be a module in a package.
        assigns: globals that it assigns or deletes.
        rebinds: a variable that it closes over, and assigns or deletes; or None.
    """

    names: tuple[str, ...]
    attributes: frozenset[str]
    imports: tuple[str, ...]
    assigns: tuple[str, ...]
    rebinds: str | None


@functools.lru_cache(1 << 14)
def uses(code: CodeType) -> Uses:
    """What *code* names."""
    names: dict[str, None] = {}
    attributes = set(code.co_names)
    imports: dict[str, None] = {}
    assigns: dict[str, None] = {}
    rebinds = None
    free = set(code.co_freevars)
    before: tuple[Any, Any] = (0, 0)  # the arguments of the last two instructions
    for instruction in dis.get_instructions(code):
        op, name = instruction.opname, instruction.argval
        if (op in _GLOBALS or op in _REBOUND_GLOBALS) and name not in _EACH_ONES:
            names[name] = None
        elif op == "IMPORT_NAME":
            level = before[0] if isinstance(before[0], int) else 0
            whole = "." * level + name
            imports[whole] = None
            names_of = before[1] if isinstance(before[1], tuple) else ()
            imports |= dict.fromkeys(whole + "." * (not whole.endswith(".")) + each for each in names_of)
        if op in _REBOUND_GLOBALS:
            assigns[name] = None
        if op in _REBOUND_CELLS and name in free:
            rebinds = name
        before = before[1], name
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            found = uses(inner)
            names |= dict.fromkeys(found.names)
            attributes |= found.attributes
            imports |= dict.fromkeys(found.imports)
            assigns |= dict.fromkeys(found.assigns)
            if found.rebinds is not None and found.rebinds not in code.co_cellvars:
                rebinds = found.rebinds
    return Uses(tuple(names), frozenset(attributes), tuple(imports), tuple(assigns), rebinds)


def used_by(fn: Any) -> set[Any]:
    """What a function uses, and the functions among that use, and so on: each global as a pair, the id
    of its dict and its name; and the ids of their values."""
    found: set[Any] = set()
    for plain in functions_of(fn):
        names = plain.__globals__
        for name in uses(plain.__code__).names:
            found |= {(id(names), name), id(names.get(name))}
    return found


def functions_of(
    fn: Any, enters: Callable[[FunctionType], bool] = lambda plain: True
) -> list[FunctionType]:
    """The function that is called as *fn*, the functions that it uses, and so on: those that one
    *enters*."""
    found: dict[int, FunctionType] = {}
    left = [fn]
    while left:
        plain = left.pop()
        while isinstance(plain, functools.partial | MethodType):
            plain = plain.func if isinstance(plain, functools.partial) else plain.__func__
        with contextlib.suppress(Exception):  # of an object that computes its attributes
            plain = inspect.unwrap(plain)
        if isinstance(plain, FunctionType) and id(plain) not in found and enters(plain):
            found[id(plain)] = plain
            used = uses(plain.__code__)
            left += (values := [plain.__globals__.get(name) for name in used.names] + _in_cells(plain))
            for module in (*values, *map(sys.modules.get, used.imports)):
                if isinstance(module, ModuleType) and is_own(module):
                    left += [vars(module).get(name) for name in used.attributes]
    return [*found.values()]


def _in_cells(fn: FunctionType) -> list[Any]:
    """What a function closes over, as far as it is there."""
    found = []
    for cell in fn.__closure__ or ():
        with contextlib.suppress(ValueError):  # nothing was assigned yet
            found.append(cell.cell_contents)
    return found


@functools.cache
def _installed() -> tuple[str, ...]:
    """The folders of the standard library, and of Synkro itself."""
    import sysconfig  # noqa: PLC0415  it takes a while, and no worker needs it

    paths = sysconfig.get_paths()
    ours = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    folders = {os.path.realpath(paths[name]) for name in ("stdlib", "platstdlib")} | {ours}
    folders |= {paths["stdlib"], paths["platstdlib"]}
    return tuple(folder + os.sep for folder in folders)


@functools.cache
def is_installed(path: str) -> bool:
    """Whether the file at *path* belongs to an installed package, or to the standard library."""
    parts = path.split(os.sep)
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    return path.startswith(_installed()) or os.path.realpath(path).startswith(_installed())


def is_own(module: Any) -> bool:
    """Whether *module* is one of the user's own: Python code that no package has installed."""
    name = getattr(module, "__name__", None)
    if not isinstance(module, ModuleType) or name is None or name == "__main__":
        return isinstance(module, ModuleType) and name == "__main__"
    path = getattr(module, "__file__", None)
    if path is None:
        folders = list(getattr(module, "__path__", ()))  # a package without __init__.py
        if folders:
            return not any(is_installed(os.path.abspath(folder) + os.sep) for folder in folders)
        head = sys.modules.get(name.rpartition(".")[0])
        if head is not None:  # made by an extension module, say
            return is_own(head)
        return getattr(module, "__spec__", None) is None  # made by hand: no worker could import it
    return not path.endswith((".so", ".pyd")) and not is_installed(os.path.abspath(path))


def is_own_name(name: Any) -> bool:
    """Whether the module of this name is one of the user's own."""
    module = sys.modules.get(name) if isinstance(name, str) else None
    return module is None or is_own(module)
