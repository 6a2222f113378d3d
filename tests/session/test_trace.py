"""Traces: what all lanes did is told whole, in order, and in the function that it belongs to."""

import json
import pstats
import re
import sys
import time
from collections import Counter
from itertools import combinations, pairwise
from pathlib import Path

import cloudpickle
import numpy as np
import pytest

import synkro as synk
from support.failing import leave
from support.inside import in_phase, marks_left
from support.programs import start_python
from support.sessions import lasting, running
from support.waiting import Watch, wait_until
from synkro import here
from synkro.controller.tracing.trace import NAMES
from synkro.errors import InvalidType, InvalidValue, NotForked, UsageError, WorkerDied, WorkerError
from synkro.messages import Phase

pytestmark = pytest.mark.long

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import this module

ROWS = np.arange(40.0).reshape(20, 2)
NAP = 0.1

session = lasting(2)


@pytest.fixture
def current(session, monkeypatch):
    monkeypatch.setattr(here, "session", session)
    return session


def late_on_rank_1(x):
    if synk.rank() == 1:
        time.sleep(NAP)
    return x.sum()


def meeting(x):
    if synk.rank() == 1:
        time.sleep(NAP)
    return synk.all_reduce(x.sum(), op="sum")


def events_of(path):
    """The calls of a trace, and the steps of each lane, both in the order of time."""
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["ph"] == "X"]
    events.sort(key=lambda event: event["ts"])
    lanes = {}
    for event in events:
        if event["cat"] == "step":
            lanes.setdefault(event["tid"] - 1, []).append(event)
    return [event for event in events if event["cat"] == "call"], lanes


def calls_of(path):
    """The names of the calls of a trace."""
    return [call["name"] for call in events_of(path)[0]]


def seconds(steps, name):
    return sum(step["dur"] for step in steps if step["name"] == name) / 1e6


def test_the_steps_of_a_lane_follow_each_other_inside_the_call(current, tmp_path):
    f = current.function(late_on_rank_1, outputs="sum")
    rows = current.data(ROWS)
    f(rows)
    with synk.trace(tmp_path / "trace.json"):
        for slices in (1, 3):
            f(rows, num_slices=slices)
    calls, lanes = events_of(tmp_path / "trace.json")
    assert [call["name"] for call in calls] == ["late_on_rank_1"] * 2
    assert sorted(lanes) == [-1, 0, 1]
    for steps in lanes.values():
        for one, other in pairwise(steps):
            assert one["dur"] >= 0
            assert one["ts"] + one["dur"] <= other["ts"] + 1e-3  # microseconds, in floats
        for step in steps:
            call = calls[step["args"]["call"]]
            assert call["ts"] <= step["ts"]
            assert step["ts"] + step["dur"] <= call["ts"] + call["dur"] + 1e-3
    names = [step["name"] for step in lanes[-1]]
    assert names == ["plan", "send", "wait", "collect"] * 2
    for rank in (0, 1):
        computed = [step for step in lanes[rank] if step["name"] == "compute"]
        assert [step["args"]["slice"] for step in computed if step["args"]["call"] == 1][:3] == [0, 1, 2]
        needed = {"begin", "inputs", "compute", "outputs"}
        assert needed <= {step["name"] for step in lanes[rank]} <= needed | {"wake", "wait for others"}
    assert seconds(lanes[1], "compute") >= 4 * NAP
    assert seconds(lanes[0], "wait for others") >= 3 * NAP
    assert seconds(lanes[1], "wait for others") == 0  # it is the last
    assert seconds(lanes[0], "compute") < seconds(lanes[1], "compute") / 2


def check_format(document):
    """What the Trace Event Format asks of metadata and complete events, and that these nest."""
    assert set(document) == {"traceEvents", "displayTimeUnit"}
    assert document["displayTimeUnit"] == "ms"
    lanes = {}
    for event in document["traceEvents"]:
        assert isinstance(event["name"], str)
        assert {type(event["pid"]), type(event["tid"])} == {int}
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            argument = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}
            assert list(event["args"]) == [argument[event["name"]]]
            continue
        assert event["ph"] == "X"
        assert isinstance(event["cat"], str)
        assert event["ts"] >= 0
        assert event["dur"] >= 0
        lanes.setdefault(event["tid"], []).append(event)
    for events in lanes.values():
        open_until = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert not open_until or end <= open_until[-1] + 1e-3  # inside of it, not across its end
            open_until.append(end)
    return lanes


def test_the_trace_of_a_training_run_accounts_for_its_time(current, tmp_path):
    rng = np.random.default_rng(0)
    x = current.data(rng.standard_normal((4000, 200)))
    w = synk.shared(np.full((200, 200), 0.01))

    def step(x):
        hidden = np.tanh(x @ w.value)
        w.value -= 0.01 * synk.all_reduce(x.T @ hidden / len(x), "mean")
        return (hidden**2).mean()

    train = current.function(step)
    train(x)
    with synk.trace(tmp_path / "trace.json"):
        start = time.perf_counter()
        for _ in range(10):
            train(x, batch=rng.permutation(4000)[:3000])
        wall = 1e6 * (time.perf_counter() - start)
    lanes = check_format(json.loads((tmp_path / "trace.json").read_text()))
    assert sorted(lanes) == [0, 1, 2]

    def spent(lane, *names):
        steps = [event for event in lanes[lane] if event["cat"] == "step"]
        return sum(step["dur"] for step in steps if not names or step["name"] in names)

    assert spent(0) >= 0.95 * wall
    for rank in (0, 1):  # from one wake-up to the next call's, step follows step
        steps = sorted((e for e in lanes[rank + 1] if e["cat"] == "step"), key=lambda e: e["ts"])
        assert [step["name"] for step in steps].count("wake") == 10
        for step, after in pairwise(steps):
            end = step["ts"] + step["dur"]
            assert end == pytest.approx(after["ts"], abs=1) or after["name"] == "wake"


def test_collectives_of_functions_and_of_the_main_process(current, tmp_path):
    f = current.function(meeting, outputs="max")
    w = synk.shared(np.zeros(3))
    f(ROWS)
    with synk.trace(tmp_path / "trace.json"):
        f(ROWS)
        synk.all_reduce(w)
    calls, lanes = events_of(tmp_path / "trace.json")
    assert [call["name"] for call in calls] == ["meeting", "exchange"]
    assert seconds(lanes[0], "collective") >= NAP / 2
    assert "reduce" in {step["name"] for step in lanes[0] if step["args"]["call"] == 1}


def test_the_summary_says_where_the_time_went(current, capsys):
    """Also while the trace goes on."""
    f = current.function(late_on_rank_1, outputs="sum")
    f(ROWS)
    with synk.trace():
        for _ in range(3):
            f(ROWS)
        synk.summary()
    synk.summary()
    titles, row, *again = (line.split() for line in capsys.readouterr().out.splitlines())
    assert again[:1] == [titles]
    for shown in (row, again[1]):
        assert shown[:2] == ["late_on_rank_1", "3"]
        shares = [int(share.rstrip("%")) for share in shown[3:]]
        compute, transfer, communication, waiting, overhead, imbalance = shares
        assert 96 <= compute + transfer + communication + waiting + overhead <= 104
        assert communication == 0
        assert min(compute, waiting) > 20  # rank 0 waits while rank 1 sleeps
        assert imbalance > 50
    assert (titles[0], titles[-1]) == ("function", "imbalance")


PICTURE = """
import pathlib, sys, time, numpy, pytest, synkro
synkro.fork(2, verbose=False)
def late(x, nap=0):
    time.sleep(nap)
    return x.sum()
def made(name):
    return synkro.function(late, bcast_inputs="nap", outputs="sum", name=name)
f, long = made("$\\\\frac{$"), made("long")
others = [made(f"a function of the number {n}") for n in range(9)]
synkro.distribute()
with synkro.trace():
    long(numpy.ones(10), nap=0.05)
    f(numpy.ones(10))
    for other in others:
        other(numpy.ones(10))
figure = synkro.plot_timeline(calls=20)
assert not pathlib.Path(sys.argv[1]).exists()
few = synkro.plot_timeline(sys.argv[1], calls=3)
assert "matplotlib.pyplot" not in sys.modules

from matplotlib.figure import Figure
from matplotlib.text import Text

def told(figure):
    texts = [each for each in figure.findobj(Text) if each.get_text() and each.get_visible()]
    figure.draw_without_rendering()
    return {each.get_text(): each.get_window_extent() for each in texts}

assert type(figure).__mro__[1] is Figure
boxes = told(figure)
page = figure.bbox
for text, box in boxes.items():
    assert 0 <= box.x0 < box.x1 <= page.x1 and 0 <= box.y0 < box.y1 <= page.y1, text
    for other, beside in boxes.items():
        assert text == other or not box.overlaps(beside), (text, other)
names = ["$\\\\frac{$", "long", *(other.name for other in others)]
assert {"11 traced calls", "main process", "rank 0", "rank 1", "ms", *names} <= boxes.keys()
assert {"compute", "wait", "send"} <= boxes.keys()
assert not {"collective", "reduce", "store", "not kept"} & boxes.keys()
last = {"the last 3 of 11 traced calls", *(other.name for other in others[-3:])}
assert last <= told(few).keys() and not {"long", *names[:-3]} & told(few).keys()
with pytest.raises(synkro.InvalidValue, match="cannot be drawn"):
    synkro.plot_timeline(sys.argv[1] + ".json")
for calls, error in ((0, synkro.InvalidValue), ("all", synkro.InvalidType)):
    with pytest.raises(error, match="calls must be"):
        synkro.plot_timeline(sys.argv[1], calls=calls)
"""


OVERLAP = """
from hypothesis import HealthCheck, given, settings, strategies as st
from synkro.controller.tracing.picture import arranged

names = st.sampled_from(["f", "g", "loss_and_gradient", "f (2)"]) | st.integers(0, 99).map(str)
calls = st.lists(st.tuples(names, st.integers(0, 300), st.integers(1, 300)), min_size=1, max_size=60)

@settings(suppress_health_check=[HealthCheck.too_slow])
@given(calls, st.sampled_from([0.001, 0.01, 0.1]))
def check(calls, scale):
    end, placed = 0, []
    for name, pause, length in calls:
        placed.append((name, end + pause, end + pause + length))
        end += pause + length
    width = lambda text: 0.1 * len(text)
    labels = arranged(placed, scale, width)[::-1]
    for index, label in enumerate(labels):
        assert 1 <= label.row <= 10
        for later in labels[index + 1:]:
            assert label.stop <= later.start
            reached = later.start * scale < label.start * scale + width(label.text)
            assert not reached or later.row < label.row  # it is below, and its pole ends there
    for label in labels:
        mine = [name for name, start, stop in placed if label.start <= start and stop <= label.stop]
        assert label.names == {name: mine.count(name) for name in mine}
    assert sum(sum(label.names.values()) for label in labels) == len(calls)

check()
crowd = [(f"f{n % 50}", n, n + 1) for n in range(20_000)]
label, = arranged(crowd, 1e-6, lambda text: 0.1 * len(text))
assert sum(label.names.values()) == 20_000 and len(label.text) <= 48
same, other = arranged([("g", 0, 9), ("f", 10, 11), ("f", 11, 12)], 1, lambda text: 4)
assert (same.text, other.text) == ("f ×2", "g")
"""


def test_labels_do_not_overlap_and_none_is_missing(run_python):
    run_python(OVERLAP)


def linear(colour):
    """The parts of red, green and blue light in "#rrggbb"."""
    parts = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(light):
    """Source: Björn Ottosson, "A perceptual color space for image processing" (2020)."""
    cones = [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
    opponents = [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
    return np.array(opponents) @ np.cbrt(np.array(cones) @ light)


EYES = {
    "all cones": np.eye(3),
    "no red": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "no green": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "no blue": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}
"""What is left of light in eyes that lack cones.

Source: Machado, Oliveira and Fernandes, "A physiologically-based model for simulation of color vision
deficiency" (2009).
"""


@pytest.mark.parametrize("eyes", EYES)
def test_colours_differ(eyes):
    from synkro.controller.tracing.picture import COLOURS

    seen = [oklab(np.clip(np.array(EYES[eyes]) @ linear(colour), 0, 1)) for colour in COLOURS.values()]
    assert min(np.linalg.norm(one - other) for one, other in combinations(seen, 2)) > 0.09


def test_every_step_has_a_colour():
    from synkro.controller.tracing.picture import COLOURS

    assert COLOURS.keys() == {"plan", "copy", "send", "wait", "collect", "wake", "wait for others"} | {
        *NAMES.values()
    }


def test_a_picture(tmp_path):  # in a process of its own: matplotlib keeps its fonts open
    program(PICTURE, tmp_path / "calls.png")
    assert (tmp_path / "calls.png").read_bytes().startswith(b"\x89PNG")


def test_calls_with_too_many_steps_are_left_out(current, capsys, tmp_path):
    f = current.function(lambda x: x.sum(), outputs="sum", name="slow")
    g = current.function(lambda x: x.sum(), outputs="sum", name="quick")
    with synk.trace(tmp_path / "trace.json"):
        g(ROWS)
        assert f(np.ones(8000), num_slices=4000) == 8000
        g(ROWS)
    synk.summary()
    out = capsys.readouterr().out
    assert "(2 calls are left out: too long ago, or with too many slices" in out
    assert [line.split()[:2] for line in out.splitlines()[1:-1]] == [["quick", "1"]]
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["tid"] for event in events if event.get("cat") == "gap"} == {1, 2}


def test_old_steps_give_way(current, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["synkro.controller.tracing.trace"], "_KEPT", 100)
    f = current.function(lambda x: x.sum(), outputs="sum", name="quick")
    f(ROWS)
    with synk.trace():
        for _ in range(50):
            f(ROWS)
    synk.summary()
    titles, row, note = capsys.readouterr().out.splitlines()
    shown, missing = int(row.split()[1]), int(note.split()[0].strip("("))
    assert (titles.split()[0], shown + missing) == ("function", 50)
    assert 5 < shown < 50
    assert sum(int(share.rstrip("%")) for share in row.split()[3:8]) in range(96, 105)


@pytest.mark.one_host
def test_functions_of_one_name_are_told_apart_and_copies_are_transfer(current, capsys):
    def make(nap):
        def f(x):
            time.sleep(nap)
            return x[:1].sum()

        return current.function(f, outputs="sum")

    one, other = make(0), make(NAP)
    big = np.ones((1 << 20, 8))
    for f in (one, other):
        f(big)
    with synk.trace():
        one(big)
        other(ROWS)
    synk.summary()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert rows[0][:2] == ["f", "1"]
    assert rows[1][:3] == ["f", "(2)", "1"]
    assert int(rows[0][4].rstrip("%")) > 50  # transfer


def test_nobody_leaves_marks_without_a_trace(current):
    f = current.function(lambda x: x.sum(), outputs="sum")
    with synk.trace():
        f(ROWS)
    before = marks_left(current, 0)
    assert before > 0
    f(ROWS)
    assert marks_left(current, 0) == before


def test_failures_are_traced_as_well(current, tmp_path):
    def failing(x):
        raise ValueError("no")

    f = current.function(failing)
    g = current.function(lambda x: x.sum(), outputs="sum", name="total")
    with synk.trace(tmp_path / "trace.json"):
        for _ in range(2):
            with pytest.raises(WorkerError):
                f(ROWS)
            with pytest.raises(InvalidType):
                g(None)
            g(ROWS)
    calls, lanes = events_of(tmp_path / "trace.json")
    assert Counter(call["name"] for call in calls) == {"failing": 2, "total": 2}  # two were refused
    assert {step["args"]["function"] for step in lanes[0]} == {"failing", "total"}


def test_a_trace_outlives_a_worker(tmp_path):
    session = synk.Session(devices=["cpu", "cpu"], verbose=False, timeout=60)
    with session:
        f = session.function(lambda x: [time.sleep(NAP), leave(3)], name="fatal")
        session.distribute()
        with pytest.raises(WorkerDied), session.trace(tmp_path / "trace.json"):
            f(ROWS)
    calls, lanes = events_of(tmp_path / "trace.json")
    assert [call["name"] for call in calls] == ["fatal"]
    assert seconds(lanes[0], "compute") >= 0.9 * NAP  # until it died


def program(code, *arguments, **options):
    """Run a program in a process of its own; what it prints."""
    running = start_python(code, *arguments, **options)
    printed, _ = running.communicate()
    assert running.returncode == 0
    return printed


@pytest.mark.parametrize("end", ["synkro.close()", "", "raise SystemExit"])
def test_the_environment_traces_a_whole_session(tmp_path, end):
    path = tmp_path / "trace.json"
    code = f"import synkro; synkro.fork(2); synkro.function(lambda x: x + 1)([1.0, 2.0]); {end}"
    program(code, env={"SYNKRO_TRACE": str(path)})
    assert "<lambda>" in calls_of(path)
    assert sorted(events_of(path)[1]) == [-1, 0, 1]


def test_profiles_of_the_workers(tmp_path, monkeypatch, capfd):
    def much_called(x):
        return sum(map(float, x[:, 0]))

    monkeypatch.chdir(tmp_path)
    with synk.Session(devices=["cpu", "cpu"], timeout=60, profile_workers=True) as session:
        session.function(much_called, outputs="sum")(ROWS)
    paths = profiles_told(capfd)
    assert sorted(tmp_path.iterdir()) == sorted(paths)
    for path, pid in zip(paths, session.pids, strict=True):
        assert f"-{pid}-" in path.name
        assert path.stat().st_mode & 0o777 == 0o600
        functions = {function for _, _, function in pstats.Stats(str(path)).stats}
        assert "much_called" in functions


def profiles_told(capfd):
    return [Path(found) for found in re.findall(r"[^ ,]+\.prof", capfd.readouterr().err)]


@pytest.mark.parametrize("there", [True, False], ids=["to a file", "to none"])
def test_a_profile_does_not_follow_a_link(tmp_path, monkeypatch, capfd, there):
    precious, folder = tmp_path / "precious", tmp_path / "shared"
    folder.mkdir()
    monkeypatch.chdir(folder)
    if there:
        precious.write_text("kept")
    with synk.Session(devices=["cpu"], timeout=60, profile_workers=True) as session:
        (path,) = profiles_told(capfd)
        path.symlink_to(precious)
        session.function(lambda x: x)(ROWS)
    assert precious.read_text() == "kept" if there else not precious.exists()
    assert f"{path} could not be written: File exists" in capfd.readouterr().err


def test_who_polls_is_soon_awake(current, tmp_path):
    f = current.function(lambda x: None, outputs=[], name="nothing")
    x = current.data(ROWS)
    f(x)
    with synk.trace(tmp_path / "trace.json"):
        for _ in range(200):
            f(x)
    calls, lanes = events_of(tmp_path / "trace.json")
    for rank in (0, 1):
        woken = [step for step in lanes[rank] if step["name"] == "wake"]
        assert len(woken) == 200
        for step, call in zip(woken, calls, strict=True):
            assert call["ts"] <= step["ts"]
            assert step["ts"] + step["dur"] <= call["ts"] + call["dur"]


def test_a_close_does_not_wait_for_a_call_in_it(tmp_path):
    session = synk.Session(devices=["cpu"], verbose=False, timeout=60)
    stay = session.function(lambda: time.sleep(60), name="stay", outputs=[])
    with session.trace(tmp_path / "trace.json"):
        future = stay.submit()
        assert wait_until(in_phase(session, Phase.RUNNING, rank=0), 30)
        with Watch():
            session.close()
    assert isinstance(future.exception(), WorkerDied | synk.SessionClosed | synk.SessionBroken)
    assert calls_of(tmp_path / "trace.json")[-1] == "stay"


def test_each_session_of_a_program_has_a_file_of_its_own(tmp_path):
    code = "import synkro, os\nfor _ in range(2):\n synkro.fork(1); os.chdir('/'); synkro.close()"
    for path, files in (("", ["trace.json"]), (f"{tmp_path}/", ["trace-2.json", "trace.json"])):
        program(code, env={"SYNKRO_TRACE": f"{path}trace.json"}, cwd=tmp_path)
        assert sorted(path.name for path in tmp_path.iterdir()) == files


class TestBadUse:
    def test_nothing_was_traced(self, tmp_path):
        with running(1):
            for ask in (synk.summary, lambda: synk.plot_timeline(tmp_path / "calls.png")):
                with pytest.raises(UsageError, match=r"no call of this session was traced.*trace\(\)"):
                    ask()

    def test_two_at_once(self, current):
        with synk.trace():
            with pytest.raises(InvalidValue, match="traced already"), synk.trace():
                """Never here."""
            current.function(lambda x: x.sum())(ROWS)
        synk.summary()

    def test_no_place_to_write_to(self, current, tmp_path):
        for path in (tmp_path, tmp_path / "no folder" / "trace.json"):
            with pytest.raises(InvalidValue, match="cannot be written"), synk.trace(path):
                """Never here."""
        with pytest.raises(InvalidType, match="path of a file"), synk.trace(7.5):
            """Never here."""

    def test_the_environment_names_no_place_to_write_to(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SYNKRO_TRACE", str(tmp_path))
        with pytest.raises(InvalidValue, match=r"SYNKRO_TRACE: .* cannot be written"):
            synk.Session(devices=["cpu"], verbose=False)

    def test_what_cannot_be_written_hides_no_error(self, current, tmp_path, capsys):
        folder = tmp_path / "folder"

        def fail():
            folder.rmdir()
            raise KeyError("mine")

        folder.mkdir()
        with pytest.raises(KeyError, match="mine"), synk.trace(folder / "trace.json"):
            fail()
        assert "the trace could not be written" in capsys.readouterr().err
        folder.mkdir()
        with pytest.raises(InvalidValue, match="could not be written"), synk.trace(folder / "t.json"):
            folder.rmdir()

    def test_no_session(self, monkeypatch):
        monkeypatch.setattr(here, "session", None)
        with pytest.raises(NotForked, match=r"trace\(\)"), synk.trace():
            """Never here."""


def test_a_fork_of_the_process_leaves_the_trace_alone(tmp_path):
    """In a process of its own: the fork has copies of all descriptors."""
    script = """
import json, os, sys, numpy as np, synkro
synkro.fork(2, verbose=False)
f = synkro.function(lambda x: x.sum(), outputs="sum")
x = synkro.data(np.ones(10))
f(x)
ready, go = os.pipe()
with synkro.trace("trace.json"):
    f(x)
    for late in (False, True):
        pid = os.fork()
        if pid == 0:
            if late:
                os.close(go)
                os.read(ready, 1)
            sys.exit(0)
        if not late:
            os.waitpid(pid, 0)
    for _ in range(5):
        f(x)
os.close(go)
os.waitpid(pid, 0)
events = json.load(open("trace.json"))["traceEvents"]
print(sum(event["name"] == "compute" for event in events))
"""
    assert program(script, cwd=tmp_path) == "12\n"
