"""Every benchmark runs, at its smallest, and leaves a record; how long it took is not looked at."""

import json
import math

import pytest

from conftest import ROOT

RUN = ROOT / "benchmarks" / "run.py"
NEEDS = {
    "call_overhead": ("joblib", "posix_ipc"),
    "pools": (),
    "input_size": (),
    "shuffled_batch": (),
    "compute_bound": ("threadpoolctl",),
    "scaling": ("threadpoolctl",),
    "reduction": (),
    "collectives": (),
    "start_up": (),
    "training": ("threadpoolctl",),
    "memory": (),
    "mapped": (),
    "recovery": (),
    "model": (),
    "kmeans": ("sklearn", "threadpoolctl"),
    "compiled": ("pytensor", "threadpoolctl"),
    "endurance": (),
}


@pytest.mark.parametrize("question", NEEDS)
def test_leaves_a_record_with_medians(question, run_python, tmp_path):
    for module in NEEDS[question]:
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


def test_peers_that_are_not_here_are_listed(run_python, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.common import Report
    from benchmarks.report import write

    report = Report("quiz", "What?", "smoke")
    report.absent("Ray <3", "ray is not installed")
    page = write({"quiz": report.record}, tmp_path).read_text()
    assert "Not measured: Ray &lt;3 (ray is not installed)" in page


def test_every_question_is_described_and_tried(run_python, monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.run import QUESTIONS

    assert set(QUESTIONS) == set(NEEDS)
    text = (ROOT / "benchmarks" / "README.md").read_text()
    listed = run_python(str(RUN), "--help").stdout
    for question in NEEDS:
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
