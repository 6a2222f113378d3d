"""The house, drawn in ``synkro/__init__.py``, and the rules that tools can check.

A *room* is a folder of ``synkro/`` or a module beside them; rooms lie on floors.
"""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest

import synkro
import synkro.controller
from support.house import (
    FILES,
    FOLDERS,
    PACKAGE,
    PRONOUN,
    ROOT,
    circles,
    drawn_floors,
    graph,
    house_imports,
    imports,
    lines_of_code,
    needy_docstrings,
    part,
    relative,
    room,
)

ENTRIES = {"__init__", "__main__"}  # doors to the house: above every floor
MAX_CLASS, MAX_FUNCTION = 300, 60  # lines of code
LOOSE = {*ENTRIES, "api", "cluster", "errors", "machine", "here", "plugs"}

HOMES = {
    "cupy": {
        *(f"devices/{name}.py" for name in ("cuda", "gathering", "window", "inputs", "buffers")),
        "comms/nccl.py",
    },
    "pytensor": {f"graphs/{name}.py" for name in ("cut", "graph", "placed", "programs", "transfers")},
    "jax": {"packing/pytrees.py"},
    "torch": {"worker/autograd.py", "extensions/modules.py"},
    "numba": {"packing/numba.py"},
    "tqdm": {"controller/progress.py"},
    "matplotlib": {"controller/tracing/picture.py"},
    "mpi4py": {"hosts/wire.py"},
    "h5py": {"storage/hdf5.py"},
    "zarr": {"storage/zarr.py"},
    "posix_ipc": {"memory/named.py"},
    **{name: set() for name in ("pandas", "polars", "sklearn", "theano")},
}


FLOORS = drawn_floors(synkro.__doc__)


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
    wrong = [
        f"{name}:{line} (floor {FLOORS[room(name)]}) imports {target} (floor {FLOORS.get(room(target))})"
        for line, target, _ in house_imports(file)
        if room(target) != room(name) and FLOORS.get(room(target), 99) >= FLOORS[room(name)]
    ]
    assert not wrong


def test_imports_go_down_in_the_users_process():
    """The floors of ``controller/`` are drawn, too."""
    floors = drawn_floors(synkro.controller.__doc__)
    own = {name: below for name, below in graph(types=True).items() if name.startswith("controller/")}
    edges = [
        (name, target)
        for name, below in own.items()
        for target in below & own.keys()
        if part(name) != part(target) and part(target) != "__init__"
    ]
    assert len(edges) > 50
    assert [edge for edge in edges if floors[part(edge[0])] <= floors[part(edge[1])]] == []


@pytest.mark.parametrize("types", [False, True], ids=["when it runs", "with annotations"])
def test_imports_have_no_circle(types):
    found = graph(types=types)
    assert found["api.py"] > {"controller/session.py"}  # the graph is not empty
    assert circles(found) == []


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
    found = {name.strip("/"): {t.strip("/") for t in below} for name, below in graph(rooms=True).items()}
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
    drawn = re.findall(r"^(?: {4}| {4}\d {2}| {7})([a-z_]\w*/?) {2,}\S", text, re.MULTILINE)
    files = {file.stem for file in folder.glob("*.py")} - {"__init__"}
    folders = {f"{inner.name}/" for inner in FOLDERS if inner.parent == folder}
    assert sorted(drawn) == sorted(files | folders)


def test_optional_packages_stay_in_their_homes():
    guests = {
        (package, relative(file))
        for file in FILES
        for _, dotted, _ in imports(file)
        if (package := dotted.partition(".")[0]) in HOMES
    }
    assert {(p, name) for p, name in guests if name not in HOMES[p]} == set()
    assert ("tqdm", "controller/progress.py") in guests  # the search finds what is there


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
    *("daemon", "loader", "authkey", "showwarning", "basicConfig"),
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
    is_registry = relative(file).endswith("variables/registry.py")
    assert [each[1:] for each in found] == [("variable", "name")] * is_registry


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


def defined(module):
    """The public names that a module defines by itself, which a star imports for type checkers."""
    for node in ast.parse((PACKAGE / f"{module}.py").read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def test_the_public_face_is_what_is_exported():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    named = {alias.name: node.module for node in froms if node.level for alias in node.names}
    stars = {node.module for node in froms if node.names[0].name == "*"}
    found = {name: module for module in stars for name in defined(module)} | named
    assert named.keys() - {"*"} <= set(synkro.__all__) <= found.keys()
    assert len(set(synkro.__all__)) == len(synkro.__all__)
    for name in synkro.__all__:  # type checkers see these, and programs what api and errors have
        home = importlib.import_module(f"synkro.{found[name]}")
        assert getattr(synkro, name) is getattr(home, name)


@pytest.mark.parametrize("file", FILES, ids=relative)
def test_every_module_says_what_it_is_and_docstrings_are_read_without_their_neighbours(file):
    """An editor shows a docstring alone: it begins with a noun, not with what points elsewhere."""
    assert ast.get_docstring(ast.parse(file.read_text()))
    assert list(needy_docstrings(file)) == []


def test_pointers_are_told_from_nouns():
    pointers = [
        "Those of one host.",
        "This process's end.",
        "As ``receive``, after a wait.",
        "What it holds now.",
        "Start them, one by one.",
        "One rank's end.",
        "The one that belongs to the host.",
    ]
    nouns = [
        "The mirrors of one host.",
        "This rank's rows, in order.",
        "One rank's end of the channel.",
        "What each leader answers.",
    ]
    assert [text for text in pointers + nouns if PRONOUN.match(text)] == pointers


@pytest.mark.parametrize("command", [("ruff", "check"), ("ruff", "format", "--check")], ids=" ".join)
def test_tools_are_content(command):
    done = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
