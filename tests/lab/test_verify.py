"""The verification of GPUs, on the stand-in for CuPy: it runs, and says that this was no GPU."""

import json
import os
import signal
import subprocess
import sys

import pytest

from support.leftovers import children
from support.programs import ROOT, all_end

pytestmark = pytest.mark.lab

STAND_IN = ROOT / "tests" / "stand_in"
RUN = ("-m", "benchmarks.gpu.verify", "--quick")


@pytest.fixture
def machine(monkeypatch):
    """The environment of a machine with one make-believe GPU."""
    monkeypatch.syspath_prepend(ROOT)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(STAND_IN), str(ROOT)]))
    monkeypatch.setenv("FAKE_CUDA_DEVICES", "1")
    return monkeypatch


@pytest.fixture
def verify(machine):
    from benchmarks.gpu import verify

    return verify


@pytest.fixture
def sections(machine):
    from benchmarks.gpu import sections

    return sections


@pytest.fixture
def section(sections, tmp_path):
    """A section that has just begun, of a machine with one GPU that torch sees."""
    return sections.Section("some", "Asks?", "test", 60, str(tmp_path / "found.json"), 1, True, {})


@pytest.fixture
def stuck(machine):
    """What is told of processes that do not end; here each stops where it is to be killed."""
    from benchmarks import ranks

    before, killpg = children(), os.killpg
    machine.setattr(ranks, "ENDING", 0.5)
    machine.setattr(os, "killpg", lambda group, _: killpg(group, signal.SIGSTOP))
    machine.setattr(subprocess.Popen, "kill", lambda process: process.send_signal(signal.SIGSTOP))
    machine.delattr(subprocess.Popen, "__del__")  # it warns of a process that was not waited for
    yield ranks.stuck
    ranks.stuck.clear()
    for pid in children() - before:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def run(*args):
    command = [sys.executable, *RUN, *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


@pytest.fixture
def measured(machine, tmp_path):
    """Runs sections: the record, and what was printed."""
    out = tmp_path / "record.json"

    def measure(only, *options):
        done = run("--only", only, "--out", str(out), *options)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(out.read_text()), done.stdout

    return measure


@pytest.fixture
def tested(sections, section, tmp_path):
    """Runs a file of tests: the section's record."""

    def test(text, *options):
        file = tmp_path / "test_some.py"
        file.write_text(text)
        sections.tests(section, "none", str(file), list(options))
        return section.record

    return test


@pytest.fixture
def demos(sections, machine, tmp_path):
    """Has these demos, by their names, and says how long each may take."""

    def write(seconds=2.0, **texts):
        (tmp_path / "demos").mkdir()
        for name, text in texts.items():
            (tmp_path / "demos" / f"demo_{name}.py").write_text(text)
        machine.setattr(sections, "ROOT", tmp_path)
        machine.setattr(sections, "DEMO_SECONDS", seconds)

    return write


def values(found):
    """What the figures are, by their names."""
    return {figure["name"]: figure["value"] for figure in found["figures"]}


def lacks(machine, folder, *modules):
    """In processes that start from now on these modules are not there, and pytest has no plugins."""
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.modules |= dict.fromkeys({modules})\n")
    machine.setenv("PYTHONPATH", os.pathsep.join([str(folder), os.environ["PYTHONPATH"]]))
    machine.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")


class TestTheProgram:
    def test_a_record_of_the_stand_in_is_none_of_a_gpu(self, measured):
        record, out = measured("transfer,memory")
        assert record["finished"]
        assert not record["is_gpu"]
        assert record["machine"]["gpus"] == ["Stand-in"]
        assert {"date", "commit", "changed_files", "python", "versions"} <= set(record["environment"])
        assert {"numpy", "cupy", "cuda driver"} <= set(record["environment"]["versions"])
        assert list(record["sections"]) == ["transfer", "memory"]
        for found in record["sections"].values():
            assert found["checks"]
            assert all(check["ok"] for check in found["checks"])
            assert any("target" in figure for figure in found["figures"])
            assert not any("met" in figure for figure in found["figures"])
        assert record["sections"]["transfer"]["tables"][0]["samples"]["Synkro"]
        table = out[out.index("record: ") :].splitlines()[1:]
        assert len(table) <= 60
        assert "NOT A GPU" in table[1]
        assert not any(line.endswith((" met", " missed")) for line in table)

    def test_several_ranks_and_many_sessions(self, machine, measured):
        machine.setenv("FAKE_NCCL", "none")
        found = measured("endurance,collectives,training", "--cycles", "1")[0]["sections"]
        assert list(found["collectives"]["ways"]) == ["through host memory"]
        assert any("growth of device memory" in name for name in values(found["endurance"]))
        assert any("all-reduce" in name for name in values(found["collectives"]))
        assert [miss["name"] for miss in found["training"]["not_measured"]] == ["ResNet-50"]

    @pytest.mark.parametrize(
        ("version", "ways"),
        [(22800, ["through host memory", "NCCL over loopback sockets"]), (23203, ["NCCL"])],
    )
    def test_each_way_of_collectives_has_rows_of_its_own(self, machine, measured, version, ways):
        machine.setenv("FAKE_NCCL_VERSION", str(version))
        machine.setenv("SYNKRO_NCCL_SOCKETS", "1")  # what is measured is not left to it
        record, out = measured("collectives")
        found = record["sections"]["collectives"]
        assert list(found["ways"]) == ways
        sizes = [f"all-reduce, {size}, {way}" for way in ways for size in ("1.0 KB", "64.0 KB")]
        timed = [figure["name"] for figure in found["figures"] if figure["unit"] == "s"]
        assert timed == sizes
        table = out[out.index("record:") :]
        for way in ways:
            assert f"collectives {way}: 1.0 KB " in table
            assert f"all-reduce, 64.0 KB, {way} " in table

    def test_ranks_that_open_each_others_memory(self, machine, measured):
        found = measured("peers")[0]["sections"]["peers"]
        assert [check["ok"] for check in found["checks"]] == [True]
        assert list(values(found)) == [
            f"{what} of {size}" for size in ("1.0 KB", "256.0 KB") for what in ("all-reduce", "exchange")
        ]
        machine.setenv("FAKE_CUDA_IPC", "0")
        found = measured("peers")[0]["sections"]["peers"]
        why = "the ranks do not open it"
        assert found["not_measured"] == [{"name": "each other's device memory", "reason": why}]

    def test_a_way_that_cannot_be_is_not_measured(self, machine, measured):
        machine.setenv("FAKE_NCCL_VERSION", "22800")
        machine.setenv("FAKE_NCCL", "broken")
        found = measured("collectives")[0]["sections"]["collectives"]
        assert list(found["ways"]) == ["through host memory"]
        why = {miss["name"]: miss["reason"] for miss in found["not_measured"]}
        assert "NCCL_ERROR_SYSTEM_ERROR" in why["NCCL over loopback sockets"]

    def test_tests_run_where_their_plugins_are_missing(self, machine, measured, tmp_path):
        lacks(machine, tmp_path, "pytest_timeout", "hypothesis")
        record, out = measured("tests")
        found = record["sections"]["tests"]
        assert values(found)["tests passed"] > 10
        assert values(found)["tests failed"] == 0
        assert "pytest-timeout is missing" in found["notes"][0]
        assert "pytest-timeout is missing" in out[out.index("record:") :]

    @pytest.mark.parametrize("error", ["OSError", "RuntimeError", "AttributeError"])
    def test_goes_on_without_a_broken_torch(self, machine, measured, tmp_path, error):
        why = f"{error}: libcudart.so.12 is missing"
        (tmp_path / "torch.py").write_text(f"raise {error}('libcudart.so.12 is missing')\n")
        machine.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
        record, out = measured("training")
        assert record["machine"]["broken"] == {"torch": why}
        (miss,) = record["sections"]["training"]["not_measured"]
        assert miss["reason"] == why
        assert f"torch: {why}" in out.splitlines()

    def test_refuses_where_there_is_no_gpu(self, machine):
        machine.setenv("CUDA_VISIBLE_DEVICES", "")
        done = run()
        assert done.returncode == 2
        assert "no GPU" in done.stderr
        assert "cudaErrorNoDevice" in done.stderr

    def test_what_does_not_fit_is_listed(self, measured):
        record, out = measured("overlap,call", "--seconds", "4")
        assert "only" in record["sections"]["overlap"]["not_measured"][0]["reason"]
        assert "call        not measured: all of it: of 4 s only" in out

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
    def test_ends_what_it_started(self, machine, number):
        command = [sys.executable, *RUN, "--only", "endurance", "--cycles", "100000"]
        assert all_end(command, "the last call is right", number)


GIVEN = {"name": "endurance", "scale": "test", "seconds": 60, "gpus": 1, "torch": False, "broken": {}}


class TestSections:
    def test_one_that_takes_too_long_is_ended_and_what_it_found_stays(self, verify):
        before = children()
        given = {**GIVEN, "settings": {"calls": 8, "cycles": 1000}}
        record = verify.run_section(given, 5.0)
        assert record["not_measured"][-1]["reason"].startswith("it was stopped after")
        assert record["checks"] == [{"name": "the last call is right", "ok": True, "detail": ""}]
        assert children() <= before

    def test_one_that_breaks_has_failed(self, verify, capfd):
        record = verify.run_section({**GIVEN, "settings": {}}, 20.0)
        (check,) = record["checks"]
        assert not check["ok"]
        assert "TypeError" in check["detail"]
        assert "TypeError" in capfd.readouterr().out

    def test_one_that_cannot_be_ended_is_told(self, verify, stuck):
        record = verify.run_section({**GIVEN, "settings": {"calls": 8, "cycles": 8}}, 0.1)
        assert record["not_measured"][-1]["reason"].startswith("it was stopped after")
        assert "-m benchmarks.gpu.sections) could not be ended" in stuck[0]

    def test_a_program_that_cannot_be_ended_is_told(self, sections, stuck, demos, tmp_path):
        demos(seconds=1.0, long="import time\ntime.sleep(99)\n")
        file = tmp_path / "found.json"
        given = {**GIVEN, "name": "demos", "file": str(file), "settings": {"pattern": "demo_*.py"}}
        sections.run(**given)
        demo, end = json.loads(file.read_text())["checks"]
        assert demo["detail"].startswith("stopped after 1 s")
        assert not end["ok"]
        assert "demo_long.py" in end["detail"]

    def test_ranks_that_cannot_be_ended_are_told(self, stuck):
        from benchmarks.ranks import Ranks, RanksFailed

        with Ranks(["cpu"], "none", 0.01) as alone, pytest.raises(RanksFailed, match="did not answer"):
            alone.ask("gemm", size=512, dtype="float32", rounds=1_000_000)
        assert "-m benchmarks.ranks) could not be ended" in stuck[0]

    def test_outcomes_of_tests_are_told(self, tested):
        found = tested(
            "import pytest\n"
            "def test_good(): pass\n"
            "def test_bad(): assert 1 == 2\n"
            "@pytest.mark.skip('no such thing here')\n"
            "def test_later(): pass\n"
        )
        assert values(found) == {"tests passed": 1, "tests failed": 1, "tests skipped": 1}
        (check,) = found["checks"]
        assert check["name"].endswith("test_some.py::test_bad")
        assert not check["ok"]
        assert "1 == 2" in found["tests"]["failures"][check["name"]]
        assert "1 skipped: Skipped: no such thing here" in found["notes"]

    def test_only_what_needs_a_missing_library_is_skipped(self, sections, section, machine, tmp_path):
        lacks(machine, tmp_path, "hypothesis")
        chosen = "stand-in-two and (test_scalars or test_all_operations)"
        sections.tests(section, "none", "tests/gpu/test_exact.py", ["-m", "make_believe", "-k", chosen])
        assert values(section.record) == {"tests passed": 6, "tests failed": 0, "tests skipped": 1}
        assert "1 skipped: Skipped: hypothesis is missing" in section.record["notes"]

    def test_a_file_that_is_skipped_is_told(self, tested):
        found = tested("import pytest\npytest.importorskip('no_such', reason='needs some library')\n")
        assert found["figures"][2]["value"] == 1
        assert "1 skipped: Skipped: needs some library" in found["notes"]

    def test_a_test_that_fails_only_beside_others_is_told(self, tested):
        found = tested(
            "import pathlib\n"
            "def test_good_at_last():\n"
            "    mark = pathlib.Path(__file__).with_name('mark')\n"
            "    there = mark.exists()\n"
            "    mark.touch()\n"
            "    assert there\n"
        )
        assert not found["checks"]
        (recovered,) = found["tests"]["recovered"]
        assert recovered.endswith("test_some.py::test_good_at_last")
        assert any("passed alone" in note for note in found["notes"])

    def test_tests_that_do_not_end_are_told(self, section, tested, monkeypatch):
        monkeypatch.setattr(section, "left", lambda: 8.0)
        found = tested(
            "import time\ndef test_a(): pass\ndef test_b(): time.sleep(99)\ndef test_c(): pass\n"
        )
        assert not found["checks"]
        (miss,) = found["not_measured"]
        assert miss["name"] == "test_some.py: 2 of 3 tests"
        assert miss["reason"].endswith("test_some.py::test_b")

    def test_a_file_leaves_half_of_the_time_to_others(self, sections, tmp_path):
        for name, body in (("test_alone", "time.sleep(99)"), ("test_other", "pass")):
            (tmp_path / f"{name}.py").write_text(f"import time\ndef test_it(): {body}\n")
        found = str(tmp_path / "found.json")
        section = sections.Section("some", "Asks?", "test", 20, found, 1, True, {})
        sections.tests(section, str(tmp_path / "test_alone.py"), str(tmp_path / "test_*.py"), [])
        assert list(section.record["tests"]["outcomes"].values()) == ["passed"]
        (miss,) = section.record["not_measured"]
        assert miss["name"] == "test_alone.py: 1 of 1 tests"
        assert section.left() > 0

    def test_a_pytest_that_does_not_start_has_failed(self, tested):
        assert not tested("", "--no-such-option")["checks"][0]["ok"]

    def test_outcomes_of_demos_are_told(self, sections, section, demos):
        demos(
            a_good="import os\nassert os.environ['SYNKRO_DEVICES'] == 'cuda:0,cuda:0'\n"
            "print('All assertions passed.')\n",
            b_bad="raise ValueError('this one')\n",
            c_lacks="import no_such_library\n",
            d_long="import time\ntime.sleep(99)\n",
            e_of_cpus='import synkro\nsynkro.fork(2, devices="cpu")\n',
        )
        sections.demos(section, "demo_*.py")
        told = {check["name"]: (check["ok"], check["detail"]) for check in section.record["checks"]}
        assert told.pop("demo_a_good")[0]
        assert told == {
            "demo_b_bad": (False, "exit status 1: ValueError: this one"),
            "demo_d_long": (False, "stopped after 2 s: it said nothing"),
        }
        (miss,) = section.record["not_measured"]
        assert miss["name"] == "demo_c_lacks"
        assert "no_such_library" in miss["reason"]

    def test_demos_of_a_broken_library_are_not_run(self, sections, section, demos):
        demos(net="import torch\n")
        section.broken = {"torch": "OSError: libcudart.so.12"}
        sections.demos(section, "demo_*.py")
        assert not section.record["checks"]
        why = "torch: OSError: libcudart.so.12"
        assert section.record["not_measured"] == [{"name": "demo_net", "reason": why}]

    def test_training_is_judged_by_its_peers(self, sections, section, monkeypatch):
        place = {"layout": "1 GPU", "ranks": 1, "what": "ResNet"}
        both = {"layout": "2 GPUs", "ranks": 2, "what": "ResNet"}
        record = {
            "checks": [{"layout": "1 GPU", "peer": "bare torch", "agree": True}],
            "rows": [
                {**place, "side": "Synkro", "unit": "images/s", "median": 98.0},
                {**place, "side": "Synkro ÷ bare torch", "unit": "×", "median": 0.98},
                {**place, "side": "Synkro ÷ DDP, nccl", "unit": "×", "median": 0.99},
                {**both, "side": "Synkro ÷ DDP, nccl", "unit": "×", "median": 1.01},
            ],
            "ways": {"2 GPUs": "through host memory"},
            "not_measured": [{**place, "side": "Synkro", "reason": "it burnt"}],
            "not_ended": [],
        }

        def run_program(command, seconds):
            with open(command[command.index("--out") + 1], "w") as file:
                json.dump(record, file)
            return 0, ""

        monkeypatch.setattr(sections, "run_program", run_program)
        sections.training(section, [])
        met = {figure["name"]: figure.get("met") for figure in section.record["figures"]}
        assert met == {
            "1 GPU: Synkro": None,
            "1 GPU: Synkro ÷ bare torch": True,
            "1 GPU: Synkro ÷ DDP, nccl": False,
            "2 GPUs, through host memory: Synkro ÷ DDP, nccl": True,
        }
        assert [check["ok"] for check in section.record["checks"]] == [True, False]


class TestTheTable:
    def record(self, figures, **more):
        section = {"question": "call", "checks": [], "figures": figures, "not_measured": [], **more}
        about = {"versions": {}, "commit": "c0ffee", "changed_files": 0, "python": "3", "date": ""}
        return {
            "is_gpu": True,
            "scale": "full",
            "seconds": 1.0,
            "machine": {"gpus": ["NVIDIA H200"], "driver": "580", "broken": {}},
            "environment": about,
            "sections": {"call": section},
            "not_ended": [],
        }

    def test_figures_without_a_target_give_way_and_ways_never(self, verify):
        light = [{"name": f"light {number}", "unit": "s", "value": 1.0} for number in range(60)]
        heavy = [
            {"name": f"heavy {number}", "unit": "bytes", "value": 3.0, "target": "≤ 1 KB", "met": True}
            for number in range(30)
        ]
        table = verify.table(self.record([*light, *heavy]))
        assert len(table) <= 60
        assert sum("heavy" in line for line in table) == 30
        shown = sum("light" in line for line in table) + 30
        assert table[-1] == f"… {90 - shown} more in the record"
        assert "≤ 1 KB met" in table[-2]
        assert "NVIDIA H200" in table[1]
        assert "NOT A GPU" not in "".join(table)
        ways = {"NCCL": ["2 GPUs: NCCL", "NCCL: 1.0 KB 20 us"]}
        table = verify.table(self.record(light * 2, ways=ways))
        assert "call        2 GPUs: NCCL" in table
        assert "call        NCCL: 1.0 KB 20 us" in table

    def test_failures_and_reasons_are_shown(self, verify):
        right = {"name": "right", "ok": True, "detail": ""}
        wrong = {"name": "sum", "ok": False, "detail": "no"}
        misses = [{"name": f"size {number}", "reason": "torch is missing"} for number in range(3)]
        table = verify.table(self.record([], checks=[right, wrong], not_measured=misses))
        assert any(line.startswith("call        checks") and line.endswith("1 ok") for line in table)
        assert any("sum: no" in line and line.endswith("FAILED") for line in table)
        assert table[-1] == "call        not measured: size 0 and 2 more: torch is missing"
        text = "process 7 (-m pytest) could not be ended"
        assert text in verify.table({**self.record([]), "not_ended": [text]})
