"""The floors of the house, drawn in ``synkro/__init__.py``, and the rules that tools can check."""

import ast
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
ENTRIES = {"__init__", "__main__"}  # doors to the house: above every floor
MAX_LINES = 500

HOMES = {
    "cupy": {"devices/cuda.py", "comms/nccl.py"},
    "pytensor": {"frontends/pytensor.py"},
    "jax": {"frontends/jax.py"},
    "torch": {"frontends/torch.py"},
    "numba": {"frontends/numba.py"},
    "tqdm": {"progress.py"},
    "mpi4py": {"comms/mpi.py"},
    "sklearn": set(),
    "theano": set(),
}


def drawn_floors():
    """Floor by name, as drawn in the package's docstring; a folder's name ends with a slash."""
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


def unit(name):
    """The name in the drawing of a module's path, such as ``plan/`` of ``plan/split.py``."""
    head, slash, _ = name.partition("/")
    return head + slash if slash else head.removesuffix(".py")


def imports(file):
    """All modules that *file* imports, anywhere in it: ``(line, dotted name)``, without dots before."""
    package = ["synkro", *file.relative_to(PACKAGE).parent.parts]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            dotted = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:  # a module of a package, or a name in a module
                yield node.lineno, dotted if is_module(dotted) else f"{dotted}.{alias.name}"


def is_module(dotted):
    return not dotted.startswith("synkro") or (ROOT / f"{dotted.replace('.', '/')}.py").exists()


def house_imports(file):
    """The modules of Synkro that *file* imports, as paths below the package."""
    for line, dotted in imports(file):
        if dotted == "synkro" or dotted.startswith("synkro."):
            path = ROOT / dotted.replace(".", "/")
            found = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
            yield line, relative(found) if found.exists() else relative(path.parent / "__init__.py")


@pytest.mark.quick
def test_the_drawing_shows_every_module():
    built = {unit(relative(file)) for file in FILES} - ENTRIES
    assert built <= FLOORS.keys(), built - FLOORS.keys()
    assert FLOORS.keys() <= built, FLOORS.keys() - built
    assert set(FLOORS.values()) == set(range(max(FLOORS.values()) + 1))


@pytest.mark.quick
@pytest.mark.parametrize("file", FILES, ids=relative)
def test_imports_go_down(file):
    name = relative(file)
    if unit(name) in ENTRIES:
        assert "__main__.py" not in {target for _, target in house_imports(file)}
        return
    wrong = []
    for line, target in house_imports(file):
        same_folder = Path(target).parent == file.relative_to(PACKAGE).parent
        own, other = FLOORS[unit(name)], FLOORS.get(unit(target), 99)
        if not (other < own or (other == own and same_folder)):
            wrong.append(f"{name}:{line} (floor {own}) imports {target} (floor {other})")
    assert not wrong


@pytest.mark.quick
def test_imports_have_no_circle():
    graph = {relative(file): {target for _, target in house_imports(file)} for file in FILES}
    assert set(graph["api.py"]) > {"session.py"}  # the graph is not empty
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.quick
def test_plan_knows_no_process_and_channel_no_command():
    loaded = {
        name: {target for _, target in house_imports(PACKAGE / name)}
        for name in map(relative, FILES)
        if name.startswith(("plan/", "ipc/", "comms/"))
    }
    for name, targets in loaded.items():
        allowed = {
            "plan/": ("plan/", "errors", "foreign"),
            "ipc/": ("ipc/", "plan/", "errors", "machine"),
        }
        folder = unit(name)
        if folder in allowed:
            assert all(target.startswith(allowed[folder]) for target in targets), (name, targets)
        else:
            assert not any(t.startswith(("messages", "frontends/", "ipc/channel")) for t in targets)


@pytest.mark.quick
def test_optional_packages_stay_in_their_homes():
    guests = {
        (package, relative(file))
        for file in FILES
        for _, dotted in imports(file)
        if (package := dotted.partition(".")[0]) in HOMES
    }
    assert {(p, name) for p, name in guests if name not in HOMES[p]} == set()
    assert ("tqdm", "progress.py") in guests  # the search finds what is there


@pytest.mark.quick
def test_files_are_short():
    lengths = {relative(file): len(file.read_text().splitlines()) for file in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


@pytest.mark.quick
@pytest.mark.parametrize("name", synkro.__all__)
def test_public_names_are_documented(name):
    value = getattr(synkro, name)
    assert value.__doc__
    if inspect.isclass(value):
        assert vars(value).get("__doc__")  # its own, not an inherited one
        methods = {n: m for n, m in vars(value).items() if n[0] != "_" and inspect.isfunction(m)}
        assert [n for n, m in methods.items() if not m.__doc__] == []


@pytest.mark.quick
def test_the_public_face_is_what_is_exported():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    froms = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    assert sorted(alias.name for node in froms for alias in node.names) == sorted(synkro.__all__)


@pytest.mark.quick
@pytest.mark.parametrize("file", FILES, ids=relative)
def test_every_module_says_what_it_is(file):
    assert ast.get_docstring(ast.parse(file.read_text()))


@pytest.mark.parametrize(
    "command", [("ruff", "check"), ("ruff", "format", "--check"), ("mypy",)], ids=" ".join
)
def test_tools_are_content(command):
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
