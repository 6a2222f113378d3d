"""Every benchmark runs, at its smallest, and leaves a record; how long it took is not looked at."""

import json
import math
import sys

import pytest

from support.programs import ROOT

RUN = ROOT / "benchmarks" / "run.py"
sys.path.insert(0, str(ROOT))

from benchmarks.run import QUESTIONS, unwritable  # noqa: E402

pytestmark = pytest.mark.lab


@pytest.mark.parametrize("question", QUESTIONS)
def test_leaves_a_record_with_medians(question, run_python, tmp_path):
    for module in QUESTIONS[question]:
        pytest.importorskip(module)
    out = tmp_path / "records.json"
    done = run_python(str(RUN), question, "--smoke", "--out", str(out))
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
        assert ("target" in figure) == ("met" in figure)


def test_two_versions_take_turns(run_python, tmp_path):
    out, kinds = tmp_path / "record.json", ["empty", "new number"]
    few = ["--starts", "2", "--runs", "1", "--calls", "3", "--neighbours", "0", "1", "--json", str(out)]
    done = run_python("-m", "benchmarks.against", str(ROOT), *few, "--kinds", *kinds)
    record = json.loads(out.read_text())["kinds"]
    assert list(record) == [*kinds, "empty, beside 1 busy", "reduced scalar, beside 1 busy"]
    for kind, found in record.items():
        assert kind in done.stdout
        assert all(0 < found[side]["median"] < math.inf for side in ("this checkout", "the other"))
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


def test_peers_that_are_not_here_are_listed(tmp_path):
    from benchmarks.common import Report
    from benchmarks.report import write

    report = Report("quiz", "What?", "smoke")
    report.absent("Ray <3", "ray is not installed")
    page = write({"quiz": report.record}, tmp_path).read_text()
    assert "Not measured: Ray &lt;3 (ray is not installed)" in page


def test_every_question_is_described(run_python):
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = run_python(str(RUN), "--help").stdout
    for question in QUESTIONS:
        assert (ROOT / "benchmarks" / f"{question}.py").exists()
        assert f"`{question}`" in text
        assert question in listed


def test_refuses_an_unknown_question(run_python):
    done = run_python(str(RUN), "speed", check=False)
    assert done.returncode == 2
    assert "no such question: speed" in done.stderr


def test_records_of_other_questions_are_kept(run_python, tmp_path):
    out = tmp_path / "records.json"
    out.write_text(
        json.dumps({"kmeans": {"question": "kmeans"}, "endurance": {"question": "endurance"}})
    )
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
