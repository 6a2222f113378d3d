"""Debuggers and ``input()`` in functions: they ask the user, in the terminal of the main program."""

import builtins
import os
import pdb
import pty
import re
import signal
import subprocess
import sys
import threading
import time
import types

import numpy as np
import pytest

import synkro as synk
from support.leftovers import descendants
from support.programs import ROOT
from support.sessions import two_mapping
from support.waiting import Watch, gone, wait_until

workers = two_mapping
quick = pytest.mark.quick


@pytest.fixture
def user(monkeypatch):
    """The user, who answers with the next of some lines; then there are no more."""
    found = types.SimpleNamespace(lines=[], asked=[])

    def answer(prompt=""):
        found.asked.append(prompt)
        if not found.lines:
            raise EOFError
        line = found.lines.pop(0)
        return line() if callable(line) else line

    monkeypatch.setattr(builtins, "input", answer)
    return found


def name_of(item):
    return f"{item} {input('name? ')}"


@quick
@pytest.mark.parametrize("submitted", [False, True], ids=["call", "submitted"])
def test_input_asks_the_user(user, workers, submitted):
    user.lines = ["Ann", "Bob"]
    f = workers.function(lambda: input("name? "), outputs=None)
    found = f.submit().result(timeout=30) if submitted else f()
    assert sorted(found) == ["Ann", "Bob"]
    assert sorted(user.asked) == ["[rank 0] name? ", "[rank 1] name? "]


def test_the_end_of_input_is_that_of_the_worker(user, workers):
    with pytest.raises(EOFError):
        workers.function(lambda: input("name? "), outputs=[])()
    assert workers.function(np.sum, outputs="sum")(np.ones(3)) == 3


def test_in_tasks(user, workers):
    user.lines = ["Ann", "ß → 🙂", "Bob"]
    assert workers.map(name_of, ["a"]) == ["a Ann"]
    with synk.Executor(1) as executor:
        assert executor.submit(name_of, "b").result() == "b ß → 🙂"
    assert list(workers.imap(name_of, ["c"])) == ["c Bob"]
    user.lines = [long := "x" * 3_000_000]
    assert workers.map(name_of, ["d"]) == [f"d {long}"]
    del user.asked[3:]
    assert [prompt.rpartition("] ")[2] for prompt in user.asked] == ["name? "] * 3
    assert user.asked[1] == "[rank 0] name? "


def stops(number):
    here = number + 1
    breakpoint()
    return here


def stops_by_pdb(number):
    here = number + 1
    pdb.set_trace()
    return here


@quick
@pytest.mark.parametrize("stop", [stops, stops_by_pdb])
def test_a_debugger_stops_at_the_line(user, stop, workers, capfd):
    user.lines = ["p here * 2", "!here = 7", "c"]
    f = workers.function(stop, outputs="max", bcast_inputs="number", target=1)
    assert f(41) == 7
    assert user.asked == ["[rank 1] (Pdb) "] * 3
    said = capfd.readouterr().out
    assert f"[rank 1] > {__file__}" in said
    assert re.search(r"\[rank 1\] -> (return here|breakpoint|pdb.set_trace)", said)  # as from 3.14 on
    assert "[rank 1] 84\n" in said


def test_a_debugger_steps_into_what_a_task_calls(user, workers, capfd):
    def inner(x):
        return x + 1

    def task(x):
        breakpoint()
        return inner(x)

    user.lines = ["s", "s", "w", "!x = 20", "c"]
    assert workers.map(task, [1]) == [21]
    assert "inner" in capfd.readouterr().out


def test_one_rank_after_the_other(workers, monkeypatch, capfd):
    """The user stays with a rank, and what others print comes when no prompt is there."""
    lines = {rank: ["p 1", "p 2", "p 3", "c"] for rank in range(2)}
    asked = []

    def answer(prompt=""):
        asked.append(int(prompt[6]))
        time.sleep(0.02)
        said.append(capfd.readouterr().out)
        return lines[asked[-1]].pop(0)

    def work():
        print("before")
        breakpoint()
        return 1

    said = []
    monkeypatch.setattr(builtins, "input", answer)
    assert workers.function(work, outputs="sum")() == 2
    assert asked in ([0] * 4 + [1] * 4, [1] * 4 + [0] * 4)
    for rank, text in zip(asked, said, strict=True):
        if text and asked.index(rank) != 0:
            assert text.rstrip().splitlines()[-1].startswith(f"[rank {rank}]")


def test_who_quits_the_debugger_fails_the_call(user, workers):
    user.lines = ["q", "y"]
    with pytest.raises(synk.WorkerError, match=r"BdbQuit|SystemExit"):
        workers.map(stops, [1])
    assert workers.map(abs, [-1]) == [1]


def test_nobody_is_in_a_hurry_meanwhile(user, workers):
    """The time in which the user thinks counts for no limit, of a call, of a map, or of an item."""

    def thinks():
        time.sleep(1.2)
        return "Ann"

    user.lines = [thinks] * 3
    asks = workers.function(lambda: input("name? ") if synk.rank() else "none", outputs=None)
    assert asks.options(timeout=1)() == ["none", "Ann"]
    assert workers.map(name_of, ["a"], timeout=1) == ["a Ann"]
    assert workers.map(name_of, ["b"], item_timeout=1) == ["b Ann"]


def test_other_ranks_wait_in_a_collective(user, workers):
    def work():
        if synk.rank() == 0:
            breakpoint()
        return synk.all_reduce(synk.rank() + 1, op="sum")

    user.lines = [lambda: time.sleep(0.3) or "c"]
    assert workers.function(work, outputs="max")() == 3


def test_who_asks_where_nobody_can_wait_is_told(user, workers):
    def in_a_thread():
        found = []

        def ask():
            try:
                input("name? ")
            except synk.UsageError as error:
                found.append(str(error))

        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
        return found[0]

    (text,) = workers.map(lambda _: in_a_thread(), [0])
    assert "only the function itself can ask" in text
    with pytest.raises(synk.UsageError, match="in an initializer"):
        synk.Session(1, verbose=False, initializer=stops, initargs=(1,))
    assert user.asked == []


def test_a_file_that_nobody_writes_to_has_ended(workers):
    assert workers.function(lambda: sys.stdin.read(), outputs=None)() == ["", ""]


def test_an_input_that_cannot_be_read_is_no_input(monkeypatch, workers, capfd):
    def refuses(prompt=""):
        raise RuntimeError("raw_input was called, but this frontend does not support input requests")

    monkeypatch.setattr(builtins, "input", refuses)
    with pytest.raises(EOFError):
        workers.map(name_of, [1])
    assert "name? gets no answer: raw_input was called" in capfd.readouterr().err


def test_ctrl_c_at_the_prompt_ends_the_call(user, workers):
    def interrupt():
        raise KeyboardInterrupt

    asks = workers.function(stops, outputs="max", bcast_inputs="number")
    for _ in range(3):
        user.lines, user.asked = [interrupt], []
        with Watch(), pytest.raises(KeyboardInterrupt):
            asks(1)
        assert len(user.asked) == 1  # the other rank's question is not asked any more
        assert workers.map(abs, [-1, -2]) == [1, 2]
        user.lines = [interrupt]
        with Watch(), pytest.raises(KeyboardInterrupt):
            workers.map(stops, [1, 2, 3])
    user.lines = ["c", "c"]
    assert asks(1) == 2


def test_ctrl_c_after_the_prompt(user, workers):
    """pdb handles SIGINT by itself from the first ``c`` on, and that must not outlive the function."""

    def goes_on():
        breakpoint()
        time.sleep(60)

    asks = workers.function(goes_on, outputs=[])
    quickly = workers.function(stops, outputs="max", bcast_inputs="number")
    for _ in range(3):
        user.lines = ["c", "c"]
        timer = threading.Timer(1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with Watch(), pytest.raises(KeyboardInterrupt):
            asks()
        user.lines = ["c", "c"]
        assert quickly(1) == 2
        assert workers.map(abs, [-1, -2]) == [1, 2]


def test_a_worker_that_dies_at_the_prompt(user):
    with synk.Session(2, verbose=False) as session, Watch():
        (pid,) = session.map(lambda _: os.getpid(), [0])
        user.lines = [lambda: os.kill(pid, signal.SIGKILL) or "c"] * 4
        with pytest.raises(synk.WorkerDied):
            session.map(stops, range(4), chunksize=1)


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────

DEBUGGED = """
import numpy as np, synkro as synk

synk.fork(2, verbose=False)

@synk.function(outputs="sum")
def total(x):
    number = 40 + 2
    if synk.rank() == 0:
        breakpoint()
    return x.sum()

print("it is", total{}(np.ones(3)))
"""
EXECUTOR = """
import synkro as synk

def task(x):
    number = 40 + 2
    breakpoint()
    return x

with synk.Executor(1) as executor:
    print("it is", executor.submit(task, 3).result())
"""


@pytest.mark.programs
@pytest.mark.parametrize(
    ("text", "end"),
    [(DEBUGGED.format(""), "3.0"), (DEBUGGED.format(".as_serial"), "3.0"), (EXECUTOR, "3")],
    ids=["call", "serial", "executor"],
)
def test_a_program_stops_in_the_debugger(run_python, text, end):
    done = run_python("-c", text, input="p number\nc\n")
    assert "42\n" in done.stdout
    assert done.stdout.endswith(f"it is {end}\n")


@pytest.mark.programs
def test_a_breakpoint_can_be_switched_off(run_python):
    done = run_python("-c", DEBUGGED.format(""), env={"PYTHONBREAKPOINT": "0"})
    assert done.stdout == "it is 3.0\n"


@pytest.mark.programs
def test_another_debugger_is_called(run_python, tmp_path):
    (tmp_path / "mine.py").write_text("def stop():\n    raise ValueError('my own')\n")
    done = run_python(
        "-c",
        DEBUGGED.format(""),
        env={"PYTHONBREAKPOINT": "mine.stop", "PYTHONPATH": f"{ROOT}:{tmp_path}"},
        check=False,
    )
    assert "ValueError: my own" in done.stderr


@pytest.mark.programs
@pytest.mark.parametrize("text", [DEBUGGED.format(""), EXECUTOR], ids=["call", "executor"])
def test_ctrl_c_at_a_terminal(tmp_path, text):
    """The terminal sends SIGINT to the program, which has read no line."""
    script = tmp_path / "script.py"
    script.write_text(text)
    above, below = pty.openpty()
    program = subprocess.Popen(
        [sys.executable, str(script)],
        stdin=below,
        stdout=below,
        stderr=below,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TERM": "dumb"},
        preexec_fn=lambda: __import__("fcntl").ioctl(0, 0x540E, 0),  # TIOCSCTTY
    )
    os.close(below)
    try:
        said = b""
        while b"(Pdb) " not in said:
            said += os.read(above, 1000)
        workers = descendants(program.pid)
        os.write(above, b"p number\n")
        while b"42" not in said:
            said += os.read(above, 1000)
        os.write(above, b"\x03")
        assert wait_until(lambda: program.poll() is not None, 30)
        assert program.returncode in (1, -signal.SIGINT)
        assert wait_until(lambda: all(map(gone, workers)), 10)
    finally:
        program.kill()
        program.wait()
        os.close(above)
