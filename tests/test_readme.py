"""Every code block of the README and of docs/ runs as it stands; CI runs the README's two commands."""

import re

import pytest

import synkro
from support.programs import ROOT

README = (ROOT / "README.md").read_text()


def imports(block, library):
    return re.search(rf"^(import|from) {library}\b", block, re.MULTILINE) is not None


def needs_libraries(block):
    """Whether the block needs what CI installs in a step of its own."""
    return any(imports(block, library) for library in ("torch", "jax"))


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCKS = [
    pytest.param(
        block, id=f"{page.stem}-{number}", marks=[pytest.mark.libraries] * needs_libraries(block)
    )
    for page in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]
COMMANDS = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS)
def test_code_block_runs(block, run_python):
    on_gpus = "cuda" in block  # which the stand-in's are
    for library in ("pytensor", "torch", "jax", "joblib"):
        if imports(block, library):
            pytest.importorskip(library, reason=f"needs {library} (the extra {library})")
    path = {"PYTHONPATH": f"{ROOT / 'tests' / 'stand_in'}:{ROOT}"} if on_gpus else {}
    run_python(block, env=path)


def test_the_api_reference_is_built_without_warnings(run_python, tmp_path):
    pytest.importorskip("pdoc", reason="needs pdoc (the extra docs)")
    command = re.search(r"`python (-m pdoc .*?)`", README).group(1).split()
    run_python("-W", "error", *command, "-o", str(tmp_path / "api"))
    page = (tmp_path / "api" / "synkro.html").read_text()
    for name in synkro.__all__:
        assert f'id="{name}"' in page
        assert getattr(synkro, name).__doc__
    assert 'id="make_train_function"' in (tmp_path / "api" / "synkro" / "extensions.html").read_text()


def test_commands_are_one_line_each_and_run_by_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    assert len(COMMANDS) == 2
    assert all("\n" not in command for command in COMMANDS)
    assert "demo_1_intro.py" in COMMANDS[0]
    assert "run_from_readme demo_1_intro.py" in ci
    assert "-m pytest" in COMMANDS[1]
    assert "run_from_readme '-m pytest'" in ci
