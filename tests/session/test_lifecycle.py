"""Sessions begin, end and begin again; where workers come from and what they inherit."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

import synkro as synk
from support.sessions import ask, total
from support.waiting import gone, wait_until
from synkro.controller.placement.choice import choose
from synkro.machine import available_cores, cpu_name

pytestmark = pytest.mark.long

CORES = sorted(os.sched_getaffinity(0))
NAMED = "a->cpu0;b->cpu"
CAPS = ("OMP", "OPENBLAS", "MKL", "BLIS", "NUMEXPR", "NUMBA")


# ── fork, close, fork ────────────────────────────────────────────────────────────────────────────────


def test_close_is_idempotent(session):
    pids = session.pids
    for _ in range(3):
        session.close()
        synk.close()
    assert all(map(gone, pids))
    assert "closed" in repr(session)


@pytest.mark.fresh
@pytest.mark.parametrize("fails", [pytest.param(False, marks=pytest.mark.quick), True])
def test_session_is_a_context_manager(fails):
    end = pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext()
    with end, synk.Session(2, verbose=False) as session:
        assert session.n_parallel == len(session.pids) == 2
        assert not any(map(gone, session.pids))
        assert total(session) == 7
        assert not fails or 1 / 0
    assert all(map(gone, session.pids))


def test_two_sessions_at_once():
    """One of them is that of the module's functions."""
    synk.fork(1, verbose=False)
    with synk.Session(2, verbose=False) as two:
        x, y = synk.data(np.arange(4.0)), two.data(np.arange(6.0))
        f, g = (s.function(lambda x: x.sum(), outputs="sum") for s in (synk, two))
        assert [f(x), g(y), f(x), g(y)] == [6, 15, 6, 15]
        with pytest.raises(synk.InvalidValue, match="another session"):
            g(x)
        synk.close()
        assert g(y) == 15
        with pytest.raises(synk.InvalidValue, match="a closed session"):
            g(x)


# ── how many workers, and on what ────────────────────────────────────────────────────────────────────


def test_the_default_is_a_worker_a_core(monkeypatch):
    monkeypatch.delenv("SYNKRO_DEVICES", raising=False)
    assert synk.fork(verbose=False) == available_cores()
    assert available_cores() <= len(CORES)


def test_the_default_respects_the_affinity(run_python):
    cores = f"os.sched_setaffinity(0, [{CORES[-1]}])"
    done = run_python("-c", f"import os, synkro; {cores}; print(synkro.fork(verbose=False))")
    assert done.stdout == "1\n"


WARNED = """
import warnings, synkro as synk

class Mine(synk.Session):
    def __init__(self):
        super().__init__({count}, verbose=False)  # line 6

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    synk.fork({count}, verbose=False)  # line 10
    synk.close()
    synk.Session({count}, verbose=False).close()  # line 12
    Mine().close()
print([each.lineno for each in caught], caught[0].filename, *{{str(each.message) for each in caught}})
"""


def test_past_the_core_count_is_a_warning_at_the_line_of_the_caller(run_python, tmp_path):
    count = available_cores() + 1
    printed = run_python(WARNED.format(count=count)).stdout
    said = f"[10, 12, 6] {tmp_path / 'script.py'} {count} CPU workers on {count - 1} available core"
    assert printed.startswith(said)
    assert printed.endswith(": they will take turns.\n")
    assert printed.count("they") == 1  # all say the same


def test_one_is_singular(capsys):
    with synk.Session(1) as session:
        assert repr(session) == "<synkro.Session of 1 worker, ready>"
    printed = capsys.readouterr().err
    assert "Synkro attempting to use 1 worker on " in printed
    assert "Synkro: 1 CPU worker initialized, master rank: 0\n" in printed


@pytest.mark.quick
@pytest.mark.parametrize(
    ("devices", "count"),
    [
        ("cpu", None),
        (["cpu0"], 1),
        (["cpu", "cpu"], 2),
        (("cpu0", "cpu:0"), 2),
        ("cpu,cpu", 2),
        ("dev0->cpu;dev1->cpu", 2),
        (" a -> cpu0 ; b -> cpu:0 ", 2),
    ],
    ids=str,
)
def test_forms_of_devices(devices, count):
    value = devices if isinstance(devices, str) else ",".join(devices)
    for chosen in (choose(None, devices, "x"), choose(None, None, value)):
        assert len(chosen) == (count or available_cores())
        assert {each.device[:3] for each in chosen} == {"cpu"}


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("number", "devices", "variable", "cores"),
    [
        pytest.param(None, NAMED, "cpu,cpu,cpu", [CORES[:1], CORES], marks=pytest.mark.quick),
        pytest.param(None, None, NAMED, [CORES[:1], CORES], marks=pytest.mark.quick),
        (1, ["cpu0", "cpu"], "cpu,cpu,cpu", [CORES[:1]]),
        (None, [f"cpu{len(CORES) - 1}", "cpu", "cpu0"], "", [CORES[-1:], CORES, CORES[:1]]),
    ],
    ids=["argument", "environment", "the first ones", "of numbers"],
)
def test_workers_are_on_the_devices_that_were_chosen(number, devices, variable, cores, monkeypatch):
    monkeypatch.setenv("SYNKRO_DEVICES", variable)
    with synk.Session(number, devices=devices, verbose=False) as session:
        assert ask(session, lambda: sorted(os.sched_getaffinity(0))) == cores
        assert total(session) == 7


@pytest.mark.quick
@pytest.mark.parametrize("seconds", [-1, float("nan")])
def test_a_start_timeout_that_cannot_be(seconds):
    with pytest.raises(synk.InvalidValue, match="start_timeout"):
        synk.Session(start_timeout=seconds, verbose=False)


# ── what the user reads ──────────────────────────────────────────────────────────────────────────────


def test_status_lines_on_stderr(capsys):
    synk.fork(devices="dev0->cpu;dev1->cpu", master_rank=1)
    f = synk.function(np.sum)
    synk.distribute()
    f(np.ones(3))
    synk.close()
    printed = capsys.readouterr()
    assert printed.out == ""
    lines = printed.err.splitlines()
    assert lines[:4] == [
        f"Synkro attempting to use 2 workers on {available_cores()} detected CPU cores...",
        f"Mapped name dev0 to device cpu: {cpu_name()}",
        f"Mapped name dev1 to device cpu: {cpu_name()}",
        "Synkro: 2 CPU workers initialized, master rank: 1",
    ]
    assert lines[4] == "Synkro distributing functions..."
    assert lines[5].startswith("...distribution complete (")
    assert len(lines) == 6


@pytest.mark.fresh
def test_worker_output_reaches_the_user(capsys):
    def speak():
        from synkro import here

        print("to stdout\nof", here.rank.number)
        print("to stderr", file=sys.stderr)
        os.write(1, "half a line, grün, \xff".encode("latin-1"))

    with synk.Session(2, verbose=False) as session:
        session.function(speak, outputs=[])()
    printed = capsys.readouterr()
    for rank in (0, 1):
        mine = [line for line in printed.out.splitlines() if line.startswith(f"[rank {rank}] ")]
        texts = [line.removeprefix(f"[rank {rank}] ") for line in mine]
        assert texts == ["to stdout", f"of {rank}", "half a line, gr\ufffdn, \ufffd"]
        assert f"[rank {rank}] to stderr\n" in printed.err


def test_much_worker_output_arrives_whole(capsys):
    with synk.Session(2, verbose=False) as session:
        session.function(lambda: [print("x" * 100) for _ in range(5000)], outputs=[])()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(set(lines)) == [f"[rank {rank}] " + "x" * 100 for rank in (0, 1)]
    assert len(lines) == 10_000


# ── what workers inherit ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("workers", "threads", "environment", "expected"),
    [
        (1, None, {}, dict.fromkeys(CAPS, available_cores())),
        (2, None, {}, dict.fromkeys(CAPS, max(1, available_cores() // 2))),
        (1, None, {"MKL": 5}, dict.fromkeys(CAPS, available_cores()) | {"MKL": 5}),
        # the others look at that of OpenMP, but for numba
        (1, None, {"OMP": 3}, {"OMP": 3, "NUMBA": available_cores()}),
        (1, 7, {"OMP": 3, "NUMBA": 4}, dict.fromkeys(CAPS, 7)),
    ],
)
def test_thread_caps(workers, threads, environment, expected, monkeypatch):
    """Cores by workers, unless the user has set some; ``threads_per_worker`` wins over all."""
    for name in CAPS:
        monkeypatch.delenv(f"{name}_NUM_THREADS", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(f"{name}_NUM_THREADS", str(value))
    options = {"devices": ["cpu"] * workers, "threads_per_worker": threads, "verbose": False}
    with synk.Session(workers, **options) as session:
        found = ask(session, lambda: {n: os.environ.get(f"{n}_NUM_THREADS") for n in CAPS})
    assert [{n: int(cap) for n, cap in caps.items() if cap} for caps in found] == [expected] * workers
    assert {n: int(os.environ[f"{n}_NUM_THREADS"]) for n in environment} == environment


@pytest.mark.fresh
def test_workers_begin_in_the_folder_of_the_main_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with synk.Session(1, verbose=False) as session:
        assert os.readlink(f"/proc/{session.pids[0]}/cwd") == str(tmp_path)


@pytest.mark.fresh
def test_workers_inherit_no_descriptor(session, tmp_path):
    with open(tmp_path / "open", "w") as file:
        os.set_inheritable(file.fileno(), True)
        with synk.Session(1, verbose=False) as other:
            paths = Path(f"/proc/{other.pids[0]}/fd").iterdir()
            targets = [os.readlink(path) for path in paths]
    assert not [target for target in targets if str(tmp_path) in target]
    assert "/dev/null" in targets  # stdin


# ── where the program may come from ──────────────────────────────────────────────────────────────────

PROGRAM = """
print("this is", __name__)
import numpy as np, synkro as synk

class Scale:
    def __init__(self, by):
        self.by = by

def scaled(x):
    return Scale(3).by * x

synk.fork(2, verbose=False)
f = synk.function(scaled, outputs="gather")
print(f(np.arange(4.0)).sum())
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    "how",
    [
        ("script.py",),
        ("-m", "script"),
        ("-c", PROGRAM),
        ("-",),
        ("-O", "-c", PROGRAM),
        ("-OO", "script.py"),
        ("-W", "error", "-X", "dev", "-u", "script.py"),
        ("-I", "-c", PROGRAM),
    ],
    ids=lambda how: " ".join(how).replace(PROGRAM, "…"),
)
def test_no_main_guard_is_needed(how, run_python, tmp_path):
    (tmp_path / "script.py").write_text(PROGRAM)
    done = run_python(*how, input=PROGRAM)
    assert done.stdout == "this is __main__\n18.0\n"
    assert done.stderr == ""


def test_interpreter_flags_reach_the_workers(run_python):
    program = """
import sys, numpy as np, synkro as synk
synk.fork(1, verbose=False)
def flags():
    import warnings
    return np.array([sys.flags.optimize, "ignore::ResourceWarning" in sys.warnoptions, __debug__])
print(*synk.function(flags, outputs="max")())
"""
    done = run_python("-OO", "-W", "ignore::ResourceWarning", "-c", program)
    assert done.stdout == "2 1 0\n"


@pytest.mark.parametrize("name", ["types", "random", "socket", "numpy", "synkro"])
def test_a_file_named_like_a_module_does_no_harm(name, run_python, tmp_path):
    """One that the main process does not see, because its folder is not on the path there."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run_python(str(script), cwd=elsewhere)
    assert done.stdout == "this is __main__\n18.0\n"
    assert done.stderr == ""


def test_a_file_named_like_a_loaded_module_does_no_harm(run_python, tmp_path):
    """In the current folder of ``python -c``, which is on the path of both sides."""
    for name in ("zipimport", "site"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('the wrong module')\n")
    assert run_python("-c", PROGRAM).stdout == "this is __main__\n18.0\n"


@pytest.mark.quick
def test_import_loads_no_optional_package(run_python):
    heavy = "cupy pytensor jax torch mpi4py tqdm sklearn theano multiprocessing"
    done = run_python("-c", f"import sys, synkro; print({{*{heavy!r}.split()}} & {{*sys.modules}})")
    assert done.stdout == "set()\n"


def test_workers_load_only_what_they_need(run_python):
    """Each of these takes half a megabyte or more, in every worker."""
    script = """
import subprocess, sys, numpy as np, synkro
dear = {"numpy.random", "hashlib", "zipfile", "concurrent.futures", "multiprocessing", "asyncio"}
code = "import numpy, sys; print(*sys.modules)"
dear -= set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split())
synkro.fork(1, verbose=False)
count = synkro.function(lambda x: float(len(dear & set(sys.modules))), outputs="max")
print(len(dear) > 2, count(np.ones(2)))
"""
    assert run_python(script).stdout == "True 0.0\n"


@pytest.mark.parametrize(
    "closed", ["<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
)
def test_closed_standard_descriptors(closed, tmp_path):
    script = tmp_path / "daemon.py"
    script.write_text(
        "import pathlib, time, numpy as np, synkro\n"
        "synkro.fork(2, start_timeout=20, timeout=20)\n"
        "def late(x):\n"
        "    time.sleep(0.01)\n"
        "    return x.sum()\n"
        "f = synkro.function(late, outputs='sum')\n"
        "synkro.distribute()\n"
        "total = f(np.ones(4), num_slices=2, progress=True)\n"
        "pathlib.Path('total').write_text(str(total))\n"
    )
    command = ["sh", "-c", f"exec {sys.executable} {script} {closed}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert (tmp_path / "total").read_text() == "4.0"
    assert done.stdout == ""
    assert ("2 of 2 slices" in done.stderr) == ("2>&-" not in closed)


def test_import_starts_nothing(run_python):
    done = run_python(
        "import ctypes, os, threading, numpy\n"  # libffi, below ctypes, may hold a descriptor of itself
        "before = len(os.listdir('/proc/self/fd'))\n"
        "import synkro\n"
        "print(threading.active_count(), len(os.listdir('/proc/self/fd')) - before)\n"
    )
    assert done.stdout == "1 0\n"


@pytest.mark.fresh
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_workers_sleep_on_cores_of_their_own_and_compute_on_any():
    everywhere = set(CORES)
    with synk.Session(devices=["cpu"] * len(everywhere), verbose=False) as session:
        f = session.function(lambda: sorted(os.sched_getaffinity(0)), outputs=None)
        few = session.function(lambda: os.sched_setaffinity(0, {min(everywhere)}), outputs=[])
        homes = [{core} for core in CORES]
        for _ in range(3):
            assert wait_until(lambda: [os.sched_getaffinity(pid) for pid in session.pids] == homes)
            assert [set(map(int, found)) for found in f()] == [everywhere] * len(everywhere)
        few()
        assert [set(map(int, found)) for found in f()] == [{min(everywhere)}] * len(everywhere)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_cores_that_somebody_else_has_chosen_stay():
    chosen = CORES[::-1]
    with synk.Session(devices=["cpu"] * len(CORES), verbose=False) as session:
        f = session.function(lambda: sorted(os.sched_getaffinity(0)), outputs=None)
        f()
        assert wait_until(
            lambda: [os.sched_getaffinity(pid) for pid in session.pids] == [{core} for core in CORES]
        )
        for pid, core in zip(session.pids, chosen, strict=True):
            os.sched_setaffinity(pid, {core})
        found = [[int(core) for core in cores] for cores in f()]
    assert found == [[core] if core != home else CORES for core, home in zip(chosen, CORES, strict=True)]


# ── threads, forks and exits ─────────────────────────────────────────────────────────────────────────


@pytest.mark.fresh
def test_workers_survive_the_thread_that_forked():
    thread = threading.Thread(target=synk.fork, args=(2,), kwargs={"verbose": False})
    thread.start()
    thread.join()
    assert wait_until(lambda: not os.path.exists(f"/proc/self/task/{thread.native_id}"))
    f = synk.function(lambda x: x.sum(), outputs="sum")
    assert [f(np.arange(4.0)) for _ in range(3)] == [6, 6, 6]


FORKED = """
import multiprocessing, os, sys, time, numpy as np, synkro as synk

def slow(x, k, seconds):
    time.sleep(seconds)
    return x.sum() * k

synk.fork(2, verbose=False)
f = synk.function(slow, bcast_inputs=["k", "seconds"], outputs="sum")
x = synk.data(np.arange(4.0))
assert f(x, 2.0, 0.0) == 12

def child(own):
    for _ in range(100):
        try:
            f(x, 7.0, 0.0)
        except synk.SessionClosed as error:
            assert "belongs to the parent of this process" in str(error)
            assert "call fork() for a new one" in str(error)
            assert "closed" not in str(error)
        else:
            raise AssertionError("the child used the parent's workers")
    assert x[:].tolist() == [0, 1, 2, 3]
    synk.close()
    if own:
        assert synk.fork(1, verbose=False) == 1
        assert synk.function(lambda x: x.sum(), outputs="sum")(np.ones(3)) == 3

def by_os_fork(own):
    pid = os.fork()
    if not pid:
        child(own)
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def by_multiprocessing(own):
    process = multiprocessing.get_context("fork").Process(target=child, args=(own,))
    process.start()
    process.join()
    return process.exitcode + 7

for own in (False, True):
    future = f.submit(x, 2.0, 1.0)
    time.sleep(0.3)  # the call goes on
    assert HOW(own) == 7
    assert future.result(30) == 12
    assert f(x, 2.0, 0.0) == 12
print("the parent's workers live")
"""


@pytest.mark.parametrize("how", ["by_os_fork", "by_multiprocessing"])
def test_a_fork_of_the_main_process_leaves_the_workers_alone(how, run_python):
    done = run_python(FORKED.replace("HOW", how), env={"PYTHONWARNINGS": "ignore::DeprecationWarning"})
    assert done.stdout == "the parent's workers live\n"
    assert done.stderr == ""
