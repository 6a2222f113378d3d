"""Every code block of the README and of docs/ runs as it stands, and prints what the page says.

A block of ``text`` right after a block of ``python`` is what that prints to standard output.  Blocks of
the README and of PyMC are real programs, the others forks of a process that has loaded their libraries.
CI runs the README's two commands.
"""

import inspect
import re

import pytest

import synkro
from support.forked import TORCH
from support.programs import COMPILING, ROOT
from synkro import extensions
from synkro.plan.outputs import MODES

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("C*.md")), ROOT / "benchmarks" / "README.md"]
CALLS = (ROOT / "docs" / "reference" / "calls.md").read_text()

LIBRARIES = ("torch", "jax", "numba", "pandas", "polars", "h5py", "pytensor", "zarr", "dask", "sklearn")
"""CI installs them for a step of its own; PyMC comes with PyTensor, for another one."""

LOADED = {"torch": TORCH, "jax": "jax", "numba": "numba", "pytensor": "pytensor", "pymc": "pymc"}
OPTIONAL = (*LIBRARIES, "pymc", "joblib")

COMMANDS = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)


def imports(block, library):
    return re.search(rf"^(import|from) {library}\b", block, re.MULTILINE) is not None


def blocks():
    """Of each block of Python the text, and what it prints or None."""
    for page in PAGES:
        name = page.relative_to(ROOT).with_suffix("")
        found = re.findall(
            r"^```python\n(.*?)^```\n(?:\s*^```text\n(.*?)^```$)?",
            page.read_text(),
            re.DOTALL | re.MULTILINE,
        )
        for number, (block, printed) in enumerate(found):
            marks = [pytest.mark.pymc, pytest.mark.timeout(COMPILING)] * imports(block, "pymc")
            if not marks and any(imports(block, library) for library in LIBRARIES):
                marks = [pytest.mark.libraries]
            marks += [pytest.mark.programs] * (page != PAGES[0])
            if page != PAGES[0] and "pm.sample(" not in block:
                modules = [LOADED[library] for library in LOADED if imports(block, library)]
                marks.append(pytest.mark.loaded(*modules))
            marks += [pytest.mark.thorough] * ("mp.spawn" in block)  # PyTorch's own way, beside ours
            yield pytest.param(block, printed or None, id=f"{name}-{number}", marks=marks)


@pytest.mark.parametrize(("block", "printed"), list(blocks()))
def test_code_block_runs(block, printed, run_python):
    on_gpus = "cuda" in block  # which the stand-in's are
    for library in OPTIONAL:
        if imports(block, library):
            pytest.importorskip(library, reason=f"needs {library}")
    path = {"PYTHONPATH": f"{ROOT / 'tests' / 'stand_in'}:{ROOT}"} if on_gpus else {}
    done = run_python(block, env=path, timeout=COMPILING if imports(block, "pymc") else 110)
    if printed is not None:
        assert done.stdout == printed


def test_the_readme_has_a_program_with_its_output_and_is_short():
    assert re.search(r"^```python\n[^`]*^```\n\s*^```text\n", README, re.MULTILINE)
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in anchors, link


@pytest.mark.quick
@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/explanation/architecture.md"])
def test_the_files_and_names_that_are_named_exist(page):
    prose = re.sub(r"```(mermaid|console).*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    files = (*ROOT.glob("synkro/**/*.py"), *ROOT.glob("tests/**/*.py"))
    code = "\n".join(file.read_text() for file in files)
    paths = re.findall(r"(?<![\w/.])(?:\w+/)+(?:\w+(?:\.\w+)?)?", prose)
    assert len(paths) > 5
    for path in paths:
        places = [
            folder / f"{path}{suffix}"
            for folder in (ROOT, ROOT / "synkro", ROOT / "tests")
            for suffix in ("", ".py")
        ]
        assert any(place.exists() for place in places), path
    for name in re.findall(r"`(?:\w+\.)?([A-Za-z]\w+|_\w+)`", prose):
        assert re.search(rf"\b{name}\b", code), name


def test_the_reference_has_every_name():
    listed = [*synkro.__all__, *(f"extensions.{name}" for name in extensions.__all__)]
    pages = (ROOT / "docs" / "reference" / name for name in ("index.md", "errors.md"))
    found = re.findall(r"^   ([\w.]+)$", "".join(page.read_text() for page in pages), re.MULTILINE)
    assert sorted(found) == sorted(listed)


MADE_HERE = {"Data", "Function", "Ring", "RingWriter", "Shared", "StoredData", "World"}
"""Classes that users do not call."""


def public():
    """All that users call, by name."""
    for name in synkro.__all__:
        thing = getattr(synkro, name)
        if not isinstance(thing, type):
            yield name, thing
        elif not issubclass(thing, BaseException):
            yield from [(name, thing)] * (name not in MADE_HERE)
            for method in [*members(name, thing), "__call__"]:
                if inspect.isfunction(getattr(thing, method, None)):
                    yield f"{name}.{method}", getattr(thing, method)
    for name in sorted({*extensions.__all__} - {"Rule"}):
        yield f"extensions.{name}", getattr(extensions, name)


def members(name, thing):
    """What the page of a class shows."""
    conf = (ROOT / "docs" / "conf.py").read_text()
    parts = re.search(rf'^    "{name}": "([^:]*)",$', conf, re.MULTILINE)
    return re.findall(r"\w+", parts[1]) if parts else [each for each in vars(thing) if each[0] != "_"]


@pytest.mark.parametrize("name", dict(public()))
def test_a_docstring_has_every_parameter(name):
    thing = dict(public())[name]
    docs = [inspect.getdoc(thing), getattr(thing.__init__, "__doc__", None)]
    docs += [synkro.fork.__doc__] * (thing is synkro.Session)
    for parameter in inspect.signature(thing).parameters.values():
        if parameter.name not in ("self", "args", "kwargs", "unknown"):
            assert re.search(rf"\b{parameter.name}\b", "".join(filter(None, docs))), parameter.name


def test_the_reference_has_every_operation():
    for mode in filter(None, MODES):
        assert f'`"{mode}"`' in CALLS, mode


def test_commands_are_one_line_each_and_run_by_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(COMMANDS) == 2
    assert all("\n" not in command for command in COMMANDS)
    assert "demo_1_intro.py" in COMMANDS[0]
    assert "run_from_readme demo_1_intro.py" in ci
    assert "-m pytest" in COMMANDS[1]
    assert "run_from_readme '-m pytest'" in ci
