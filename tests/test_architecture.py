"""The house, drawn in ``synkro/__init__.py``, and the rules that tools can check.

A *room* is a folder of ``synkro/`` or a module beside them; rooms lie on floors.
"""

import ast
import functools
import importlib
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import synkro

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "synkro"
FILES = sorted(PACKAGE.rglob("*.py"))
FOLDERS = sorted({file.parent for file in FILES} - {PACKAGE})
ENTRIES = {"__init__", "__main__"}  # doors to the house: above every floor
MAX_CLASS, MAX_FUNCTION = 300, 60  # lines of code
LOOSE = {*ENTRIES, "api", "errors", "machine", "messages", "here"}

HOMES = {
    "cupy": {"devices/cuda.py", "comms/nccl.py"},
    "pytensor": {f"graphs/{name}.py" for name in ("cut", "graph", "placed", "programs", "transfers")},
    "jax": set(),
    "torch": {"worker/autograd.py", "extensions/modules.py"},
    "numba": {"packing/numba.py"},
    "pandas": set(),
    "polars": set(),
    "tqdm": {"controller/progress.py"},
    "matplotlib": {"controller/tracing/picture.py"},
    "mpi4py": {"cluster/wire.py"},
    "h5py": {"storage/hdf5.py"},
    "zarr": {"storage/zarr.py"},
    "posix_ipc": {"memory/named.py"},
    "sklearn": set(),
    "theano": set(),
}


def drawn_floors():
    """Floor by room, as drawn in the package's docstring; a folder's name ends with a slash."""
    drawing = synkro.__doc__.partition("::\n\n")[2].partition("\n\n")[0]
    floors, floor = {}, None
    for line in drawing.splitlines():
        number, name = re.match(r" {3}( \d|\d\d|  ) {2}(\w+/?) {2,}\S", line).groups()
        floor = floor if number.isspace() else int(number)
        floors[name] = floor
    return floors


FLOORS = drawn_floors()


def relative(file):
    return file.relative_to(PACKAGE).as_posix()


def room(name):
    """The room of a module's path, such as ``plan/`` of ``plan/split.py``."""
    head, slash, _ = name.partition("/")
    return head + slash if slash else head.removesuffix(".py")


def is_for_types(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


@functools.cache
def imports(file):
    """All modules that *file* imports: ``(line, dotted name, whether for type checkers only)``."""
    package = ["synkro", *file.relative_to(PACKAGE).parent.parts]
    tree = ast.parse(file.read_text())
    for_types = {id(inner) for node in ast.walk(tree) if is_for_types(node) for inner in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name, id(node) in for_types) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            dotted = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:  # a module of a package, or a name in a module
                full = dotted if is_module(dotted) else f"{dotted}.{alias.name}"
                found.append((node.lineno, full, id(node) in for_types))
    return found


def is_module(dotted):
    return not dotted.startswith("synkro") or (ROOT / f"{dotted.replace('.', '/')}.py").exists()


def house_imports(file):
    """The modules of Synkro that *file* imports: ``(line, path below the package, for types)``."""
    for line, dotted, for_types in imports(file):
        if dotted == "synkro" or dotted.startswith("synkro."):
            path = ROOT / dotted.replace(".", "/")
            found = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            found = found if found.exists() else path.parent / "__init__.py"
            if not found.exists():
                found = path.parent.with_suffix(".py")
            yield line, relative(found), for_types


def graph(*, rooms=False):
    """What each module, or each room, imports when it runs."""
    found = {}
    for file in FILES:
        targets = {target for _, target, for_types in house_imports(file) if not for_types}
        if rooms:
            targets = {room(target) for target in targets} - {room(relative(file))}
        found.setdefault(room(relative(file)) if rooms else relative(file), set()).update(targets)
    return found


def test_the_drawing_shows_every_room():
    built = {room(relative(file)) for file in FILES} - ENTRIES
    assert built == FLOORS.keys()
    assert set(FLOORS.values()) == set(range(max(FLOORS.values()) + 1))
    assert {file.stem for file in PACKAGE.glob("*.py")} == LOOSE


def test_there_are_at_most_two_dozen_rooms_on_a_dozen_floors():
    found = graph(rooms=True)
    assert len(found) <= 24
    height = {}
    for name in TopologicalSorter(found).static_order():  # raises CycleError
        height[name] = 1 + max((height[below] for below in found[name]), default=0)
    assert height["api"] > height["controller/"] > height["worker/"] > height["plan/"] > 1
    assert max(height.values()) <= 12


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_go_down(file):
    name = relative(file)
    if room(name) in ENTRIES:
        assert "__main__.py" not in {target for _, target, _ in house_imports(file)}
        return
    own = FLOORS[room(name)]
    wrong = []
    for line, target, for_types in house_imports(file):
        other = FLOORS.get(room(target), 99)
        inside = room(target) == room(name)
        if not (other < own or inside or (for_types and name == "here.py")):
            wrong.append(f"{name}:{line} (floor {own}) imports {target} (floor {other})")
    assert not wrong


def test_imports_have_no_circle():
    found = graph()
    assert found["api.py"] > {"controller/session.py"}  # the graph is not empty
    TopologicalSorter(found).prepare()  # raises CycleError


def test_the_two_sides_meet_in_one_file():
    """The user's process runs code of the workers only where it does by itself what they do."""
    found = graph()
    crossing = {name for name in found if name.startswith("controller/")} & {
        name for name, targets in found.items() if any(t.startswith("worker/") for t in targets)
    }
    assert crossing == {"controller/calls/serial.py"}


def test_the_map_shows_the_imports():
    """CONTRIBUTING.md draws the imports between rooms, except where a longer way shows them."""
    picture = re.search(r"```mermaid\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[1]
    arrows = re.findall(r"^ *([\w &]+) -->(?:\|.*\|)? ([\w &]+)$", picture, re.MULTILINE)
    drawn = {
        (upper, lower)
        for uppers, lowers in arrows
        for upper in uppers.split(" & ")
        for lower in lowers.split(" & ")
    }
    found = {
        name.rstrip("/"): {t.rstrip("/") for t in targets} for name, targets in graph(rooms=True).items()
    }
    below = {}
    for name in TopologicalSorter(found).static_order():
        below[name] = found[name].union(*(below[target] for target in found[name]))
    assert drawn == {
        (name, target)
        for name in found.keys() - ENTRIES
        for target in found[name]
        if not any(target in below[other] for other in found[name])
    }


@pytest.mark.parametrize("folder", FOLDERS, ids=relative)
def test_every_folder_says_what_is_in_it(folder):
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    drawn = re.findall(r"^ {4}(\w+/?) {2,}\S", text, re.MULTILINE)
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    folders = {f"{inner.name}/" for inner in FOLDERS if inner.parent == folder}
    assert sorted(drawn) == sorted(files | folders)


def test_comms_and_the_channel_know_no_command():
    found = graph()
    for name in found:
        if name.startswith(("comms/", "ipc/", "memory/")):
            assert not any(t.startswith(("messages", "packing/")) for t in found[name]), name


def test_optional_packages_stay_in_their_homes():
    guests = {
        (package, relative(file))
        for file in FILES
        for _, dotted, _ in imports(file)
        if (package := dotted.partition(".")[0]) in HOMES
    }
    assert {(p, name) for p, name in guests if name not in HOMES[p]} == set()
    assert ("tqdm", "controller/progress.py") in guests  # the search finds what is there


def lines_of_code(node, text):
    """How many lines of *node* hold code: no comments, no blank lines, no docstrings."""
    docs = {
        line
        for inner in ast.walk(node)
        if isinstance(inner, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(inner) is not None
        for line in range(inner.body[0].lineno, inner.body[0].end_lineno + 1)
    }
    lines = {number: line.strip() for number, line in enumerate(text.splitlines(), 1)}
    own = set(range(node.lineno, node.end_lineno + 1)) - docs
    return sum(1 for number in own if lines[number] and not lines[number].startswith("#"))


def test_classes_and_functions_are_short():
    too_long = {}
    for file in FILES:
        text = file.read_text()
        for node in ast.walk(ast.parse(text)):
            limit = {ast.ClassDef: MAX_CLASS, ast.FunctionDef: MAX_FUNCTION}.get(type(node))
            if limit and lines_of_code(node, text) > limit:
                too_long[f"{relative(file)}:{node.name}"] = lines_of_code(node, text)
    assert too_long == {}


def stores(file):
    """What *file* stores in attributes of other objects: ``(line, object, attribute)``."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            owner = ast.unparse(node.value)
            if owner not in ("self", "cls"):
                yield node.lineno, owner, node.attr


FOREIGN = {
    *("writeable", "restype", "argtypes", "state", "data", "trust_input", "atexit", "cell_contents"),
    *("args", "_unique_ids", "entered", "grad"),
}
"""Attributes of other libraries' objects that are there to be set."""


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_nothing_is_set_from_outside(file):
    """An object's attributes are its own to set; a variable's ``value`` is there to be set."""
    library = {"sys", "dispatcher", "fn", "here"}
    found = [
        (line, owner, name)
        for line, owner, name in stores(file)
        if name not in {*FOREIGN, "value"} and name[:2] != "__" and owner not in library
    ]
    assert found == (
        [(found[0][0], "variable", "name")] if relative(file).endswith("registry.py") else []
    )


def test_no_two_classes_have_one_name():
    names = [
        node.name
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert sorted({name for name in names if names.count(name) > 1}) == []


@pytest.mark.parametrize("name", synkro.__all__)
def test_public_names_are_documented(name):
    value = getattr(synkro, name)
    assert value.__doc__
    if inspect.isclass(value):
        assert vars(value).get("__doc__")  # its own, not an inherited one
        methods = {n: m for n, m in vars(value).items() if n[0] != "_" and inspect.isfunction(m)}
        assert [n for n, m in methods.items() if not m.__doc__] == []


def test_the_public_face_is_what_is_exported():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]
    found = {alias.name: node.module for node in froms for alias in node.names if node.module}
    assert sorted(found) == sorted(synkro.__all__)
    for name, home in found.items():  # type checkers see these, and programs what api has
        assert getattr(synkro, name) is getattr(importlib.import_module(f"synkro.{home}"), name)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text()))


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check")], ids=" ".join)
def test_tools_are_content(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
