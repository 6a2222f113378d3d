"""Every benchmark runs, at its smallest, and leaves a record; how long it took is not looked at."""

import contextlib
import json
import math
import os
import signal
import subprocess
import sys

import pytest

from support.programs import ROOT
from support.waiting import wait_until

RUN = ROOT / "benchmarks" / "run.py"
sys.path.insert(0, str(ROOT))

from benchmarks.run import QUESTIONS, unwritable  # noqa: E402

pytestmark = pytest.mark.lab

OVER_HOSTS = ("hosts", "model")
"""Questions that CI asks where there is MPI."""

TURN = int(os.environ.get("TURN", 0)) % 3
"""Which third of the other questions CI asks; it counts commits."""


def in_turn():
    """These questions; those of other turns are for thorough runs."""
    for number, question in enumerate(sorted(set(QUESTIONS) - set(OVER_HOSTS))):
        yield pytest.param(question, marks=[pytest.mark.thorough] * (number % 3 != TURN))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("question", list(in_turn()))
def test_leaves_a_record_with_medians(question, run_python, tmp_path):
    for module in QUESTIONS[question]:
        pytest.importorskip(module)
    leaves_a_record(question, run_python, tmp_path)


@pytest.mark.hosts
@pytest.mark.parametrize("question", OVER_HOSTS)
def test_leaves_a_record_of_several_hosts(question, run_python, tmp_path):
    record = leaves_a_record(question, run_python, tmp_path)
    assert "host" in " ".join(figure["name"] for figure in record["figures"])


def leaves_a_record(question, run_python, tmp_path):
    """Run it at its smallest; returns the record."""
    out = tmp_path / "records.json"
    # the first compilation of a graph on a machine takes long
    done = run_python(str(RUN), question, "--smoke", "--out", str(out), timeout=240)
    assert "Traceback" not in done.stderr
    assert list(json.loads(out.read_text())) == [question]
    record = json.loads(out.read_text())[question]
    assert record["scale"] == "smoke"
    assert {"date", "commit", "cpu", "python", "versions"} <= set(record["environment"])
    assert record["tables"]
    for table in record["tables"]:
        assert table["title"] in done.stdout
        for row in table["rows"]:
            assert 0 <= row["p10"] <= row["median"] <= row["p90"] < math.inf
            assert row["runs"] > 0
    for figure in record["figures"]:
        assert math.isfinite(figure["value"])
        assert not {"target", "met"} & set(figure)  # nobody has asked for a judgement
    return record


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_a_question_that_is_ended_removes_its_files(tmp_path, by):
    pytest.importorskip("h5py")
    pytest.importorskip("zarr")
    command = [sys.executable, "-m", "benchmarks.files", "--quick"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.DEVNULL)
    assert wait_until(lambda: list(tmp_path.glob("*/x.h5")), 30)
    for _ in range(100):
        process.send_signal(by)
        with contextlib.suppress(subprocess.TimeoutExpired):  # it was lost in a callback
            process.wait(0.3)  # before the question ends by itself
            break
    assert process.returncode == 128 + by
    assert list(tmp_path.iterdir()) == []


def test_two_versions_take_turns(run_python, tmp_path):
    out, kinds = tmp_path / "record.json", ["empty", "new number", "two tasks", "start"]
    few = ["--starts", "2", "--runs", "1", "--calls", "3", "--neighbours", "0", "1", "--json", str(out)]
    done = run_python("-m", "benchmarks.against", str(ROOT), *few, "--kinds", *kinds)
    record = json.loads(out.read_text())["kinds"]
    assert list(record) == [*kinds, "empty, beside 1 busy", "reduced scalar, beside 1 busy"]
    for kind, found in record.items():
        assert kind in done.stdout
        assert all(0 < found[side]["median"] < math.inf for side in ("this checkout", "the other"))
    late = run_python("-m", "benchmarks.against", str(ROOT), *few, "--limit", "0.001", check=False)
    assert (late.returncode, "slower than 0.001 x: empty, reduced" in late.stderr) == (1, True)
    refused = run_python("-m", "benchmarks.against", str(tmp_path), check=False)
    assert (refused.returncode, "synkro/" in refused.stderr) == (2, True)


def test_the_report_is_one_page_with_its_plots(run_python, tmp_path):
    pytest.importorskip("matplotlib")
    done = run_python("-m", "synkro", "bench", "memory", "--smoke", "--out", str(tmp_path / "lab"))
    assert str(tmp_path / "lab" / "report.html") in done.stdout
    page = (tmp_path / "lab" / "report.html").read_text()
    record = json.loads((tmp_path / "lab" / "records.json").read_text())["memory"]
    pictures = sorted(path.name for path in (tmp_path / "lab").glob("*.png"))
    assert pictures == [f"memory_{number}.png" for number in range(len(record["tables"]))]
    assert page.count("<img") == page.count("data:image/png;base64,") == len(pictures)
    assert "http" not in page  # self-contained
    for table in record["tables"]:
        assert all(row["name"] in page for row in table["rows"])
    for figure in record["figures"]:
        assert figure["name"] in page


FIGURES = """
from benchmarks import common

def ask(report):
    report.figure("a call", 26e-6, "s", at_most=25e-6)
    report.figure("speed-up", 2.0, "×", at_least=1.9)
    report.figure("rows", 7.0, "")

if __name__ == "__main__":
    common.main("kmeans.py", "How fast?", ask, full={}, quick={}, smoke={})
"""
"""A question that two targets belong to, one of them out of reach."""


@pytest.fixture
def asked(tmp_path, run_python):
    """Ask the question above in place of ``kmeans``: what the program ends with, and its record."""

    def ask(*options, figures=FIGURES):
        question, out = tmp_path / "question.py", tmp_path / "records.json"
        question.write_text(figures)
        code = (
            "import sys; sys.path.insert(0, '.')\n"
            "from benchmarks import run\n"
            "popen = run.subprocess.Popen\n"
            "def instead(command, **options):\n"
            f"    return popen([command[0], {str(question)!r}, *command[3:]], **options)\n"
            "run.subprocess.Popen = instead\n"
            "sys.exit(run.main(sys.argv[1:]))\n"
        )
        options = ("-c", code, "kmeans", "--out", str(out), *options)
        done = run_python(*options, check=False)
        return done, json.loads(out.read_text()).get("kmeans")

    return ask


def test_figures_are_shown_and_not_judged(asked):
    done, record = asked()
    assert done.returncode == 0
    assert "a call: 26 us\n" in done.stdout
    assert not any(word in done.stdout + done.stderr for word in ("target", "met", "missed"))
    assert [set(figure) for figure in record["figures"]] == [{"name", "unit", "value"}] * 3


@pytest.mark.parametrize("quiet", [[], ["--quiet"]])
def test_they_are_judged_when_asked(asked, quiet):
    done, record = asked("--judge", *quiet)
    assert done.returncode == 1
    assert ("a call: 26 us   target ≤ 25 us: missed\n" in done.stdout) == (not quiet)
    assert ("speed-up: 2 ×   target ≥ 1.9 ×: met\n" in done.stdout) == (not quiet)
    assert "targets: 1 of 2 met\n" in done.stdout
    assert done.stderr.endswith("missed: kmeans: a call is 26 us, target ≤ 25 us\n")
    assert [figure.get("met") for figure in record["figures"]] == [False, True, None]


def test_all_targets_met_is_a_success(asked):
    done, _ = asked("--judge", "--quick", figures=FIGURES.replace("26e-6", "24e-6"))
    assert (done.returncode, "targets: 2 of 2 met\n" in done.stdout) == (0, True)


def test_a_question_that_breaks_is_no_missed_target(asked):
    done, _ = asked("--judge", "--quick", figures=FIGURES.replace("2.0, ", "1 / 0, "))
    assert (done.returncode, "failed: kmeans (exit status 1)" in done.stderr) == (1, True)
    assert "missed:" not in done.stderr


def test_what_measures_nothing_is_not_judged(run_python):
    done = run_python(str(RUN), "kmeans", "--smoke", "--judge", check=False)
    assert done.returncode == 2
    assert "not allowed with argument" in done.stderr


@pytest.mark.parametrize("judged", [False, True])
def test_the_page_has_verdicts_where_there_are_some(judged, tmp_path):
    """And it lists the peers that are not here."""
    pytest.importorskip("matplotlib")
    from benchmarks.common import Report
    from benchmarks.report import write

    report = Report("quiz", "What?", "full", judged)
    report.figure("a call", 26e-6, "s", at_most=25e-6)
    report.figure("rows", 7.0, "")
    report.absent("Ray <3", "ray is not installed")
    page = write({"quiz": report.record}, tmp_path).read_text()
    assert "<td>26 us" in page
    assert ("0 of 1 targets met; missed:<" in page) == judged
    assert ("<td>≤ 25 us<td class=missed>missed" in page) == judged
    assert ("target" in page) == judged
    assert "Not measured: Ray &lt;3 (ray is not installed)" in page


def test_every_question_is_described(run_python):
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = run_python(str(RUN), "--help").stdout
    for question in QUESTIONS:
        assert (ROOT / "benchmarks" / f"{question}.py").exists()
        assert f"`{question}`" in text
        assert question in listed


def test_records_of_other_questions_are_kept(run_python, tmp_path):
    out = tmp_path / "records.json"
    out.write_text(json.dumps({name: {"question": name} for name in ("kmeans", "endurance")}))
    run_python(str(RUN), "endurance", "--smoke", "--out", str(out))
    records = json.loads(out.read_text())
    assert list(records) == ["kmeans", "endurance"]
    assert records["kmeans"] == {"question": "kmeans"}
    assert records["endurance"]["tables"]


def test_a_question_that_fails_is_in_the_report(run_python, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "sklearn.py").write_text("raise OSError('broken')\n")
    lab = tmp_path / "lab"
    path = {"PYTHONPATH": str(tmp_path)}
    command = (str(RUN), "kmeans", "--smoke", "--out", str(lab))
    done = run_python(*command, check=False, env=path)
    assert done.returncode == 1
    assert "failed: kmeans (exit status 1)" in done.stderr
    assert "Failed: exit status 1" in (lab / "report.html").read_text()


@pytest.mark.parametrize("text", ["[]", "{broken"])
def test_other_files_are_not_written_to(tmp_path, text):
    file = tmp_path / "other.json"
    file.write_text(text)
    assert "is no file of records" in unwritable(file, None)
    assert file.read_text() == text


def test_what_cannot_be_written_is_said_at_once(tmp_path):
    (tmp_path / "file").touch()
    assert "--out cannot be written" in unwritable(tmp_path / "file" / "records.json", None)
    assert unwritable(tmp_path / "new" / "records.json", None) is None
    assert list((tmp_path / "new").iterdir()) == []
