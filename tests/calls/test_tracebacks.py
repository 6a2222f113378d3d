"""What a worker's traceback shows: the user's frames and their source, wherever that was typed."""

import re
import sys
import traceback

import numpy as np
import pytest

import synkro as synk
from support.sessions import two_mapping
from synkro.errors import HOME
from synkro.packing.failures import TEXT_LIMIT, sent, shown

two_forked = two_mapping

PROGRAM = """
import numpy as np, synkro as synk

synk.fork(2, verbose=False)

def divide(x):
    return 1 // int(0 * x[0])

def half(x):
    return synk.all_reduce(divide(x))

synk.function(half)(np.ones(2))
"""


def remote(text):
    """The worker's part of a traceback, without the lines that point to columns."""
    head, _, _ = text.partition("The above exception was the direct cause")
    return [line.strip() for line in head.splitlines() if line.strip(" ~^")]


def expected(file, source=True):
    lines = [
        "... N frames of Synkro ...",
        f'File "{file}", line 10, in half',
        "return synk.all_reduce(divide(x))",
        f'File "{file}", line 7, in divide',
        "return 1 // int(0 * x[0])",
        "ZeroDivisionError: integer division or modulo by zero",
    ]
    return [line for line in lines if source or not line.startswith("return")]


def told(done):
    assert done.returncode == 1
    header, first, *lines = remote(done.stderr)
    assert header == "synkro.errors.RemoteTraceback:"
    assert first == "Traceback (most recent call last):"
    return [re.sub(r"\d+ frames", "N frames", line) for line in lines]


EXECUTED = f"""
import linecache
source = '''{PROGRAM}'''
linecache.cache["<cell 1>"] = len(source), None, source.splitlines(True), "<cell 1>"
exec(compile(source, "<cell 1>", "exec"))
"""
FROM_A_FILE = f"""
import os
os.dup2(os.open("program", os.O_RDONLY), 0)
os.execv({sys.executable!r}, [{sys.executable!r}, "-"])
"""


@pytest.mark.parametrize(
    ("args", "text", "file", "source"),
    [
        ([PROGRAM], None, "{folder}/script.py", True),
        (["-c", PROGRAM], None, "<string>", True),
        (["-c", FROM_A_FILE], None, "<stdin>", True),
        (["-"], PROGRAM, "<stdin>", False),  # nobody keeps what came through the pipe
        ([EXECUTED], None, "<cell 1>", True),  # whose source the main process alone knows
        (["-c", 11 * "\n" + f"exec('''{PROGRAM}''')"], None, "<string>", False),  # named as a command
    ],
    ids=["script", "command", "file", "pipe", "cell", "executed"],
)
def test_where_the_program_was_typed(run_python, tmp_path, args, text, file, source):
    (tmp_path / "program").write_text(PROGRAM)
    done = run_python(*args, input=text, check=False)
    assert told(done) == expected(file.format(folder=tmp_path), source)


# ── all that a traceback can show ────────────────────────────────────────────────────────────────────

TYPED = "def cell(x):\n    return 1 / (x - x)\n"
SPACE = {}
exec(compile(TYPED, "/tmp/ipykernel_1/2.py", "exec"), SPACE)
exec(compile("def house(f, *args):\n    return f(*args)\n", f"{HOME}worker/room.py", "exec"), SPACE)
cell, house = SPACE["cell"], SPACE["house"]


@pytest.fixture
def told_of(monkeypatch):
    """What the main process shows of what a worker has raised, which lacks the source of a cell."""
    import linecache

    def tell(fn):
        with pytest.raises(BaseException) as caught:  # noqa: PT011
            fn()
        parts = sent(caught.value)
        with monkeypatch.context() as patch:
            lines = TYPED.splitlines(True)
            patch.setitem(linecache.cache, "/tmp/ipykernel_1/2.py", (len(TYPED), None, lines, "2"))
            text = shown(parts)
            if not any(name in text for name in ("house", "Synkro", "unprintable")):
                assert text == "".join(traceback.format_exception(caught.value))
        return text

    return tell


def failing(fn, *args):
    try:
        fn(*args)
    except Exception as error:
        return error


def test_runs_of_our_frames_are_one_line(told_of):
    text = told_of(lambda: house(house, house, cell, 1))
    assert "  ... 3 frames of Synkro ...\n" in text
    assert "room.py" not in text
    assert "    return 1 / (x - x)\n" in text
    assert "  ... 1 frame of Synkro ...\n" in told_of(lambda: house(cell, 1))


# ── where errors leave Synkro ────────────────────────────────────────────────────────────────────────


def _broken():
    yield 1.0
    raise LookupError("of the program")


def ways(f, variable):
    """Calls that raise."""
    return {
        "function": lambda: synk.function(lambda x: x, outputs="sume"),
        "a call": lambda: f(np.zeros(4), 3),
        "with options": lambda: f.options(timeout=60)(np.zeros(4), np.zeros(5)),
        "on a worker": lambda: synk.function(divide)(np.zeros(4)),
        "map": lambda: synk.map(divide, [np.ones(2)]),
        "imap": lambda: next(synk.imap(divide, [np.ones(2)])),
        "items": lambda: synk.map(abs, _broken()),
        "a collective": lambda: synk.all_reduce(variable, "summ"),
        "data": lambda: synk.data(object()),
        "a keyword": lambda: synk.map(abs, [1], chunks=2),
    }


def divide(x):
    return 1 // int(0 * x[0])


@pytest.mark.parametrize("way", ways(None, None))
def test_frames_of_ours_are_left_out(two, monkeypatch, way):
    f, variable = synk.function(lambda x: x.sum(), outputs="sum"), synk.shared(np.zeros(3))
    act = ways(f, variable)[way]
    counts = []
    for full in ("", "full"):
        monkeypatch.setenv("SYNKRO_TRACEBACK", full)
        with pytest.raises(Exception) as info:  # noqa: PT011  of any kind
            act()
        files = [frame.filename for frame in traceback.extract_tb(info.value.__traceback__)]
        assert files[0] == files[1] == __file__
        counts.append(sum(file.startswith(HOME) for file in files))
        assert (files[-1] == __file__) == (way == "items")
        if way == "on a worker":
            there = str(info.value.__cause__)
            assert ("frames of Synkro" in there) == (not full)
            assert (there.count(HOME) > 1) == bool(full)
    assert counts[0] == 1 < counts[1]


def _of_no_line(_):
    raise LookupError("of no line")


# as where an interrupt comes before the first line of a function
_NO_LINES = b"\xff" * 20 if sys.version_info >= (3, 11) else b"\xfe\x80"  # no line for 160 instructions
_of_no_line.__code__ = _of_no_line.__code__.replace(co_linetable=_NO_LINES)


def test_frames_without_a_line(two):
    with pytest.raises(LookupError, match="of no line"):
        synk.map(abs, map(_of_no_line, [1]))
    with pytest.raises(synk.WorkerError, match="of no line"):
        synk.function(_of_no_line)(np.zeros(4))
    with pytest.raises(synk.WorkerError, match="of no line"):
        synk.map(_of_no_line, [1])


def test_where_all_frames_are_ours_they_are_shown():
    error = failing(house, 3)
    text = shown(sent(error.with_traceback(error.__traceback__.tb_next)))
    assert 'room.py", line 2, in house' in text


def chained():
    raise KeyError("second") from failing(cell, 1)


def in_a_handler():
    try:
        cell(1)
    except ZeroDivisionError:
        int("x")


def noted():
    error = ValueError("bad")
    error.__notes__ = ["a note", 3]
    raise error


def grouped():
    raise ExceptionGroup("two", [failing(cell, 1), failing(house, cell, 1)])  # noqa: F821


def deep(n=0):
    return deep(n + 1)


CASES = {
    chained: ("direct cause", "    return 1 / (x - x)\n", "KeyError: 'second'"),
    in_a_handler: ("During handling", "    return 1 / (x - x)\n", "ValueError: invalid literal"),
    deep: ("in deep", "[Previous line repeated ", "RecursionError: maximum recursion"),
    lambda: compile("x = (", "<typed>", "exec"): ('File "<typed>", line 1', "    x = (", "SyntaxError"),
}
if sys.version_info >= (3, 11):
    CASES[noted] = ("ValueError: bad\na note\n3\n",)
    CASES[grouped] = (
        "  + Exception Group Traceback",
        "    |     return 1 / (x - x)",
        "1 frame of Synkro",
    )


@pytest.mark.parametrize("fail", CASES)
def test_it_looks_as_pythons_own(fail, told_of):
    text = told_of(fail)
    for part in CASES[fail]:
        assert part in text


class Strange(Exception):
    def __str__(self):
        raise SystemExit(3)


class Unknown(Exception):
    """No class of the user's is needed where the traceback is shown."""

    __module__ = "nowhere"


@pytest.mark.parametrize(
    ("error", "end"), [(Strange(), "Strange: <"), (Unknown("x"), "nowhere.Unknown: x")]
)
def test_of_classes_that_are_not_there(error, end):
    assert end in shown(sent(failing(lambda: exec("raise error", {"error": error}))))


def endless():
    error = None
    for number in range(3000):
        following = ValueError(number)
        following.__cause__ = error
        error = following
    raise error


def wordy():
    raise ValueError("x" * 10_000_000)


@pytest.mark.parametrize("fail", [endless, wordy], ids=["chain", "text"])
def test_it_is_bounded(fail):
    error = failing(fail)
    parts = sent(error)
    assert len(parts) < 50 * TEXT_LIMIT
    assert len(shown(parts)) <= TEXT_LIMIT
    assert shown(parts).endswith(traceback.format_exception_only(error)[-1][-100:])
