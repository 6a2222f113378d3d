"""Where the program stands: workers follow it, and a directory that is no longer there is told."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import pytest

import synkro as synk
from support.programs import ROOT
from synkro import InvalidValue, UsageError
from synkro.packing import place

pytestmark = pytest.mark.long

DELETED = r"the working directory .*was deleted.* os\.chdir\(path\)"


@pytest.fixture
def deleted(tmp_path, monkeypatch):
    """Enter a directory; ``deleted()`` deletes it."""
    folder = tmp_path / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    yield folder.rmdir
    os.chdir(tmp_path)


@pytest.mark.quick
def test_a_session_does_not_begin_where_there_is_nothing(deleted):
    deleted()
    with pytest.raises(UsageError, match=DELETED):
        synk.fork(2, verbose=False)


@pytest.mark.quick
def test_what_the_workers_have_needs_no_directory(session, deleted):
    f = session.function(lambda x: x.sum(), outputs="sum")
    session.distribute()
    deleted()
    assert f(np.ones(4)) == 4
    data = session.data(np.ones(5))
    data.set_length(7)
    assert f(data) == 5
    session.shared(np.zeros(3)).set_value(np.ones(3))
    assert session.function(np.sum).as_serial(np.ones(2)) == 2


@pytest.mark.parametrize("how", ["distribute", "call", "submit"])
def test_functions_are_not_distributed_from_nowhere(session, deleted, tmp_path, how):
    f = session.function(lambda x: x.sum(), outputs="sum")
    deleted()
    distributing = {
        "distribute": session.distribute,
        "call": lambda: f(np.ones(4)),
        "submit": lambda: f.submit(np.ones(4)).result(30),
    }
    for _ in range(2):
        with pytest.raises(UsageError, match=DELETED):
            distributing[how]()
    os.chdir(tmp_path)
    assert f(np.ones(4)) == 4


def test_a_directory_that_goes_while_functions_are_on_their_way(session, deleted, tmp_path):
    """The program still sees it; the workers do not."""

    class Deletes:
        def __reduce__(self):
            with contextlib.suppress(FileNotFoundError):  # it is looked at, and then pickled
                deleted()
            return int, (3,)

    part = Deletes()
    f = session.function(lambda x: x.sum() * part, outputs="sum")
    with pytest.raises(UsageError, match=DELETED):
        f(np.ones(4))
    part = 5
    os.chdir(tmp_path)
    assert f(np.ones(4)) == 20
    assert {os.readlink(f"/proc/{pid}/cwd") for pid in session.pids} == {str(tmp_path)}


def test_a_directory_that_may_not_be_entered_is_named(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "chdir", refuse)
    monkeypatch.setattr(place, "getcwd", refuse)
    message = r"working directory .*cannot be entered \(Permission denied\).* os\.chdir\(path\)"
    with pytest.raises(UsageError, match=message):
        place.found()
    with pytest.raises(UsageError, match=f"/a/folder.*{message[-20:]}"):
        place.enter(sys.path, "/a/folder")


def test_a_trace_cannot_be_named_from_nowhere(session, deleted, tmp_path):
    deleted()
    told = pytest.raises(InvalidValue, match=r"trace\.json (is relative|cannot be written)")
    with told, session.trace("trace.json"):
        """Never here."""
    with session.trace(tmp_path / "trace.json"):
        session.shared(1.0)
    assert (tmp_path / "trace.json").exists()


@pytest.mark.parametrize(
    ("command", "status", "said"),
    [
        (("info", "--json"), 0, '"Versions"'),
        (("doctor", "--data", "1M", "--devices", "cpu"), 1, "FAILURE  workers: the working directory"),
        (("bench", "memory", "--smoke", "--out", "lab"), 2, "name an absolute path"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else None,
)
def test_commands_where_there_is_nothing(deleted, nothing_slow, command, status, said):
    deleted()
    done = subprocess.run(
        [sys.executable, "-m", "synkro", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(nothing_slow), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert done.returncode == status
