"""From which program workers are started: never from one that is no Python."""

import os
import sys

import pytest

import synkro as synk
from synkro import machine

pytestmark = pytest.mark.fresh

RIGHT = sys.executable


@pytest.fixture(autouse=True)
def as_before():
    yield
    machine.choose_python(None)


def program(path, code):
    """A program of the shell in the file *path*."""
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o700)
    return str(path)


@pytest.fixture
def application(tmp_path):
    """A program that notes that it was started; and a condition, whether it was."""
    note = tmp_path / "started"
    return program(tmp_path / "application", f"echo started >> {note}"), note.exists


@pytest.fixture
def frozen(application, monkeypatch):
    """This program is that one, and frozen; whether it was started."""
    path, started = application
    monkeypatch.setattr(sys, "executable", path)
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    return started


FROZEN = pytest.raises(
    synk.NotAvailable, match=r"this program is frozen, .*fork\(python=…\) the path of"
)
OTHER = pytest.raises(synk.NotAvailable, match=r"is not called as a Python is: give fork\(python=…\)")


@pytest.mark.parametrize("executable", ["frozen", "application", "", None])
def test_what_is_no_python_is_not_started(application, monkeypatch, executable):
    path, started = application
    monkeypatch.setattr(sys, "executable", path if executable else executable)
    monkeypatch.setattr(sys, "frozen", executable == "frozen", raising=False)
    for start in (lambda: synk.fork(2, verbose=False), lambda: machine.start("print()")) * 2:
        with FROZEN if executable == "frozen" else OTHER:
            start()
    assert not started()


def test_a_python_that_is_gone_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python3"))
    with pytest.raises(synk.NotAvailable, match="is not there, or cannot be started: give fork"):
        synk.fork(2, verbose=False)


@pytest.mark.parametrize("name", ["Python", "python3.12-dbg", "pypy3", "mypython"])
def test_links_to_pythons_are_pythons(tmp_path, monkeypatch, name):
    python = tmp_path / name
    python.symlink_to(sys.executable)
    link = tmp_path / "py"
    link.symlink_to(python)
    for path in (python, link):
        monkeypatch.setattr(sys, "executable", str(path))
        assert machine.python() == str(path)


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="links are told by what they lead to")
def test_a_frozen_program_names_a_python(frozen, name):
    """With named memory, whose keeper is an interpreter, too."""
    assert synk.fork(2, devices="cpu", verbose=False, python=RIGHT) == 2
    assert synk.function(lambda x: x.sum(), outputs="sum")(synk.data([3.0, 4.0], shm_name=name)) == 7
    assert set(synk.function(lambda: sys.executable, outputs=None)()) == {RIGHT}
    assert synk.fork(2, devices="cpu", verbose=False, python=RIGHT) == 2
    with pytest.raises(synk.UsageError, match="another python="):
        synk.fork(2, devices="cpu", verbose=False)
    synk.close()
    assert not frozen()


def test_another_python_finds_its_own_packages(tmp_path, monkeypatch):
    """Its own come before those of the program, which are there, too."""
    for folder in ("theirs", "ours"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "both_have.py").write_text(f"where = {folder!r}\n")
        (tmp_path / folder / f"{folder}_alone.py").write_text("")
    python = program(tmp_path / "python", f'PYTHONPATH="{tmp_path}/theirs" exec {RIGHT} "$@"')
    monkeypatch.syspath_prepend(tmp_path / "ours")
    with synk.Session(1, devices="cpu", verbose=False, python=python) as session:

        @session.function(outputs=None)
        def where():
            import both_have
            import ours_alone
            import theirs_alone

            return both_have.where, ours_alone.__name__, theirs_alone.__name__

        assert where() == [("theirs", "ours_alone", "theirs_alone")]


def test_a_python_without_synkro_is_refused(tmp_path, monkeypatch):
    bare = program(tmp_path / "python", f'exec {RIGHT} -I -S "$@"')
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(synk.InvalidValue, match=r"has no synkro and no numpy and no cloudpickle: give"):
        machine.choose_python(bare)


def test_a_session_that_is_refused_leaves_the_python_that_was_named(frozen):
    synk.fork(1, devices="cpu", verbose=False, python=RIGHT)
    with pytest.raises(synk.NotAvailable, match="this program is frozen"):
        synk.Session(1, devices="cpu", verbose=False)
    assert machine.python() == RIGHT


ODD = ["3", "null", "[3, [], []]", "[[3, 11], 3, []]", "[[3, 11], [[]], []]", "[[3], [], []]", "{}"]
NONE = "does not answer as a Python does"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be started .No such file"),
        ("exit 1", NONE),
        ("echo hello", NONE),
        ("echo '[[3, 2], [], []]'", r"is of version 3\.2, and functions travel within one"),
        *((f"echo '{json}'", NONE) for json in ODD),
    ],
)
def test_what_is_no_such_python_is_refused(tmp_path, content, says):
    path = tmp_path / "python"
    if content:
        program(path, content)
    with pytest.raises(synk.InvalidValue, match=rf"python='{path}' {says}.*: give fork\(python=…\)"):
        synk.fork(2, verbose=False, python=os.fspath(path))
    with pytest.raises(synk.InvalidType, match="python= is the path of a Python; got a int"):
        synk.fork(2, verbose=False, python=3)
