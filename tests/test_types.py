"""What type checkers see of the public names: programs are as they say, and mistakes are refused."""

import re
import subprocess
import sys

import pytest

import synkro
from support.programs import ROOT

pytestmark = [pytest.mark.programs, pytest.mark.timeout(600)]


def checked(file):
    """The numbers of the lines in which mypy's strict mode finds errors, with these."""
    command = [sys.executable, "-m", "mypy", "--strict", "--hide-error-context", f"tests/typed/{file}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    found = re.findall(r"^tests/typed/[\w.]+:(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    assert done.returncode == bool(found), done.stdout + done.stderr
    return [(int(line), text) for line, text in found]


def test_programs_are_what_they_say():
    assert checked("programs.py") == []


def test_each_mistake_is_refused():
    lines = (ROOT / "tests" / "typed" / "mistakes.py").read_text().splitlines()
    begin = lines.index("session = synk.Session(2)") + 2
    mistakes = {number for number, line in enumerate(lines, 1) if number > begin - 1 and line}
    found = dict(checked("mistakes.py"))
    assert {lines[number - 1] for number in mistakes - found.keys()} == set()
    assert found.keys() == mistakes


def test_editors_complete_what_is_public():
    assert {*dir(synkro)} == {*synkro.__all__, "__version__", "extensions"}
    total = synkro.function(abs)
    assert [name for name in dir(total) if name[0] != "_"] == [
        *("as_serial", "as_theano", "build_inputs", "check", "fn", "name", "options"),
        *("output_modes", "placement", "submit", "update_modes"),
    ]
    assert "``function(fn=None, inputs=None," in synkro.function.__doc__
    assert "``function(inputs, outputs=None," in synkro.function.__doc__
