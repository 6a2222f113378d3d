"""What type checkers see of the public names: programs are as they say, and mistakes are refused."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import synkro
from support.programs import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]

TYPED = ROOT / "tests" / "typed"
PYRIGHT = str(Path(sys.executable).with_name("basedpyright"))


def run(*command, cwd=ROOT, **environment):
    """What a program prints, and its status."""
    environment = {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode < 2, done.stderr  # 1: it found something
    return done.stdout, done.returncode


def by_mypy(file):
    """The numbers of the lines in which mypy's strict mode finds errors."""
    text, status = run(sys.executable, "-m", "mypy", "--strict", "--hide-error-context", str(file))
    found = re.findall(r"^tests/typed/[\w.]+:(\d+): error: ", text, re.MULTILINE)
    assert status == bool(found), text
    return {int(line) for line in found}


def by_pyright(file):
    """The numbers of the lines in which pyright finds errors."""
    text, _ = run(PYRIGHT, "--pythonpath", sys.executable, "--outputjson", str(file))
    found = json.loads(text)
    assert found["summary"]["filesAnalyzed"] == 1
    errors = [each for each in found["generalDiagnostics"] if each["severity"] == "error"]
    return {each["range"]["start"]["line"] + 1 for each in errors}


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_programs_are_what_they_say(checker):
    assert checker(TYPED / "programs.py") == set()


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_each_mistake_is_refused(checker):
    lines = (TYPED / "mistakes.py").read_text().splitlines()
    begin = lines.index("session = synk.Session(2)") + 2
    mistakes = {number for number, line in enumerate(lines, 1) if number > begin - 1 and line}
    found = checker(TYPED / "mistakes.py")
    assert {lines[number - 1] for number in mistakes - found} == set()
    assert found == mistakes


def test_nearly_all_names_have_a_type(tmp_path):
    command = (PYRIGHT, "--pythonpath", sys.executable, "--verifytypes", "synkro", "--ignoreexternal")
    text, _ = run(*command, "--outputjson", cwd=tmp_path, PYTHONPATH=str(ROOT))
    found = json.loads(text)["typeCompleteness"]
    assert found["exportedSymbolCounts"]["withKnownType"] > 1000
    assert found["completenessScore"] >= 0.99


def test_the_running_package_is_as_its_types_say(tmp_path):
    """But for what allowed.txt names, with reasons."""
    command = (sys.executable, "-m", "mypy.stubtest", "synkro", "--concise", "--ignore-unused-allowlist")
    files = {"--mypy-config-file": ROOT / "pyproject.toml", "--allowlist": TYPED / "allowed.txt"}
    options = (str(each) for pair in files.items() for each in pair)
    text, status = run(*command, *options, cwd=tmp_path, MYPYPATH=str(ROOT))
    assert status == 0, text


def test_editors_complete_what_is_public():
    assert {*dir(synkro)} == {*synkro.__all__, "__version__", "extensions"}
    total = synkro.function(abs)
    assert [name for name in dir(total) if name[0] != "_"] == [
        *("as_serial", "as_theano", "build_inputs", "check", "fn", "name", "options"),
        *("output_modes", "placement", "submit", "update_modes"),
    ]
    assert "``function(fn=None, inputs=None," in synkro.function.__doc__
    assert "``function(inputs, outputs=None," in synkro.function.__doc__
