"""``python -m synkro``: what it tells, what it finds wrong, and what it answers to nonsense."""

import json
import os
import resource
import shutil

import pytest

from support.gpus import environment
from support.leftovers import nothing_left
from synkro.cli import doctor, info
from synkro.cli.commands import main
from synkro.devices.cpu import THREAD_VARIABLES

pytestmark = pytest.mark.programs


def run(capsys, *arguments):
    status = main(arguments)
    return status, capsys.readouterr().out


def test_info_tells_what_there_is(capsys, nothing_slow):
    status, out = run(capsys, "info", "--json")
    facts = json.loads(out)
    assert status == 0
    assert set(facts) == {"Versions", "Extras", "Processor and memory", "GPUs", "Settings"}
    assert facts["Versions"]["numpy"] == __import__("numpy").__version__
    assert facts["Extras"]["tqdm"] == __import__("tqdm").__version__
    assert facts["Extras"]["torch"] == "0.0"
    assert all(isinstance(fact, str) and fact for section in facts.values() for fact in section.values())
    assert f"numpy{'':>10}" in run(capsys, "info")[1]


def test_extras_that_are_broken_are_told_apart_from_absent_ones(
    tmp_path, monkeypatch, capsys, nothing_slow
):
    (tmp_path / "mpi4py.py").write_text("raise OSError('libmpi.so is missing')")
    monkeypatch.syspath_prepend(str(tmp_path))
    told = json.loads(run(capsys, "info", "--json")[1])["Extras"]
    assert told["mpi4py"] == "installed, but does not work: OSError: libmpi.so is missing"


def test_the_doctor_finds_this_machine_well(capsys, monkeypatch):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    status, out = run(capsys, "doctor", "--data", "16M", "--devices", "cpu,cpu", "--json")
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert status == 0
    for check in ("shared memory", "workers", "exactness", "clocks", "threads"):
        assert found[check]["status"] == "ok", found[check]
    assert found["reduction"]["status"] in ("ok", "warning")  # others may use the machine
    assert "GB/s" in found["reduction"]["says"]
    for finding in found.values():
        assert set(finding) == {"check", "status", "says", "remedy"}
        assert bool(finding["remedy"]) == (finding["status"] in ("warning", "failure"))


def test_a_failure_is_the_exit_status(capsys):
    status, out = run(capsys, "doctor", "--data", "900T", "--devices", "cuda")
    assert status == 1
    assert "FAILURE  shared memory: 900.0 TB of shared memory were asked for" in out
    assert "→ Free memory" in out
    assert "FAILURE  workers: devices= asks for GPUs" in out
    quiet = run(capsys, "doctor", "--data", "900T", "--devices", "cuda", "--quiet")
    assert quiet[0] == 1
    assert "FAILURE  workers" in quiet[1]
    assert "OK" not in quiet[1]
    assert "exactness" not in out


def test_little_shared_memory_is_no_failure(monkeypatch, nothing_slow):
    monkeypatch.setattr(doctor, "shm_free", lambda: 64 << 20)
    found = doctor.shared_memory(128 << 20)
    assert (found.status, "64.0 MB free" in found.says) == ("warning", True)
    assert "--shm-size" in found.remedy

    def gone(folder):
        raise FileNotFoundError(folder)

    monkeypatch.setattr(shutil, "disk_usage", gone)
    monkeypatch.setattr(doctor, "shm_free", lambda: 0)
    assert doctor.shared_memory(1 << 20).status == "warning"
    assert "none" in info.facts()["Processor and memory"]["shared memory"]


@pytest.mark.parametrize(
    ("limits", "status", "remedy"),
    [
        ((256, 4096), "warning", "ulimit -n 1024"),
        ((256, 512), "warning", "Raise the hard limit, 512, to 1024"),
        ((4096, 4096), "ok", ""),
        ((resource.RLIM_INFINITY,) * 2, "ok", ""),
    ],
)
def test_few_open_files(monkeypatch, limits, status, remedy):
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    found = doctor.open_files()
    assert found.status == status
    assert remedy in found.remedy


def test_too_many_threads(monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    _, out = run(capsys, "doctor", "--data", "1M", "--devices", "cpu,cpu")
    assert "warning  threads: 2 workers: each may start 64 threads, on " in out
    assert "→ Unset OMP_NUM_THREADS" in out


def test_gpus_in_pairs(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_REDUCED", 1 << 18)  # a make-believe GPU reduces slowly
    with nothing_left(), environment("stand-in", FAKE_CUDA_DEVICES="3"):
        status, out = run(capsys, "doctor", "--data", "1M", "--json")
    found = {finding["check"]: finding for finding in json.loads(out)}
    assert status == 0
    assert found["workers"]["says"].startswith("3 started")
    assert found["peer access of GPUs"]["status"] == "ok"
    assert found["NCCL between all pairs"]["says"].startswith("all 3 work")
    opened = found["device memory of other processes"]["says"]
    assert opened.startswith("4 ranks open that of each other")


def test_gpus_whose_memory_others_cannot_open():
    with nothing_left(), environment("stand-in", FAKE_CUDA_DEVICES="1", FAKE_CUDA_IPC="0"):
        found = doctor.device_memory(1, "")
        assert "SYNKRO_GPU_PATHS" not in os.environ
    assert (found.status, found.says) == ("warning", "cudaErrorInvalidValue: invalid argument")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["cure"], "invalid choice: 'cure'"),
        (["doctor", "--data", "much"], "a size is a number of bytes, or such as 8G; got 'much'"),
        (["doctor", "--data", "-1"], "expected one argument|a size is"),
        (["info", "--fast"], "unknown: --fast"),
    ],
)
def test_nonsense_is_answered(arguments, message, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    told = capsys.readouterr().err
    assert any(part in told for part in message.split("|"))


def test_bench_passes_on_to_the_benchmarks(capfd, monkeypatch, tmp_path):
    assert main(["bench", "no_such_question"]) == 2
    told = capfd.readouterr().err
    assert "no such question: no_such_question" in told
    assert told.startswith("usage: python -m synkro bench")
    assert main(["bench", "kmeans", "--smoke", "--out", "/proc/lab"]) == 2
    assert "--out cannot be written" in capfd.readouterr().err
    monkeypatch.setattr("synkro.cli.commands._BENCHMARKS", tmp_path / "benchmarks")
    assert main(["bench"]) == 1
    assert "get the sources" in capfd.readouterr().err
