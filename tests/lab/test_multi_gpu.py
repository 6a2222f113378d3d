"""The benchmark of GPUs: its arithmetic, its processes, and a tiny run of all of it on CPU workers."""

import json
import math
import os
import signal
import sys

import pytest

from support.leftovers import children
from support.programs import ROOT, all_end

sys.path.insert(0, str(ROOT))

from benchmarks import findings, ranks

pytestmark = pytest.mark.lab

RUN = ("-m", "benchmarks.multi_gpu", "--device", "cpu", "--quick", "--seconds", "200")


class TestArithmetic:
    @pytest.mark.parametrize(
        ("count", "bus"), [(1, 0.0), (2, 8.0), (4, 12.0), (8, 14.0)], ids=lambda value: f"{value:g}"
    )
    def test_bandwidths_are_those_of_nccl_tests(self, count, bus):
        assert findings.bandwidths(4_000_000_000, 0.5, count) == (8.0, bus)

    @pytest.mark.parametrize(
        ("gpus", "counts"), [(0, [1, 2]), (1, [1, 2]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])]
    )
    def test_layouts_are_powers_of_two_and_all(self, gpus, counts):
        found = findings.layouts(gpus)
        assert [layout.size for layout in found] == counts
        assert [layout.path_only for layout in found] == [gpus == 1 and count > 1 for count in counts]

    def test_ranks_that_share_a_gpu_are_named_so(self):
        shared = findings.layouts(1)[1]
        assert shared.devices == ("cuda:0", "cuda:0")
        assert str(shared) == "2 ranks on 1 GPU (path only)"
        alone, spread = findings.layouts(2)
        assert (str(alone), str(spread)) == ("1 GPU", "2 GPUs")
        assert findings.layouts(2, [3])[0].devices == ("cuda:0", "cuda:1", "cuda:0")
        assert str(findings.layouts(0, [2])[0]) == "2 CPU workers"

    def test_distance_is_relative_and_infinite_where_nothing_compares(self):
        assert findings.apart([1.0, 2.0], [1.0, 2.0]) == 0
        assert findings.apart([[1.1], [2.0]], [[1.0], [2.0]]) == pytest.approx(0.1)
        assert findings.apart([1.0], [1.0, 1.0]) == math.inf
        assert findings.apart([math.nan], [math.nan]) == math.inf

    def test_rounds_fill_the_time(self):
        assert findings.rounds_for(0.35, 0.1, 100) == 3
        assert findings.rounds_for(0.3, 10, 100) == 1
        assert findings.rounds_for(0.3, 0, 100) == 100

    def test_ratios_are_of_speeds_and_efficiency_is_a_rank(self, capsys):
        one, two = findings.layouts(2)
        found = findings.Findings()
        sides = {"Synkro": [2.0] * 3, "bare": [1.0] * 3}
        found.speeds("scaling", one, "work", "1/s", sides, lambda s: 1 / s)
        found.speeds("scaling", two, "work", "1/s", {"Synkro": [1.25] * 3}, lambda s: 1 / s)
        found.miss("scaling", two, "work", "bare", "it burnt")
        found.finish()
        found.table()
        mine, _, ratio, both = found.rows
        assert (mine["median"], ratio["side"], ratio["median"]) == (0.5, "Synkro ÷ bare", 0.5)
        assert both["efficiency beside one rank"] == pytest.approx(0.8)
        assert found.sound
        assert "not measured: bare, 2 GPUs, work: it burnt" in capsys.readouterr().out
        found.miss("scaling", two, "work", "Synkro", "it, too")
        assert not found.sound


class TestRanks:
    def test_answer_in_order_and_end(self):
        with ranks.Ranks(["cpu", "cpu"], "none", 60) as pair:
            answers = pair.ask("gemm", size=8, dtype="float32", rounds=2)
            assert len(answers) == 2
            assert all(seconds > 0 for seconds in answers)
            assert pair.ask("copy", nbytes=1 << 12)[1] > 0

    def test_failures_are_told_and_the_next_command_starts_anew(self):
        with ranks.Ranks(["cpu"], "none", 60) as alone:
            before = children()
            with pytest.raises(ranks.RanksFailed, match=r"rank 0: TypeError: .*nonsense"):
                alone.ask("gemm", size=8, dtype="nonsense", rounds=1)
            assert children() == before
            with pytest.raises(ranks.RanksFailed, match="no such command: serve"):
                alone.ask("serve")
            assert alone.ask("copy", nbytes=8)

    def test_death_is_told(self):
        with ranks.Ranks(["cpu", "cpu"], "none", 60) as pair:
            before = children()
            pair.ask("copy", nbytes=8)
            os.kill(max(children() - before), signal.SIGKILL)
            with pytest.raises(ranks.RanksFailed, match="ended with status -9: it said nothing"):
                pair.ask("copy", nbytes=8)

    def test_who_takes_too_long_is_ended(self):
        alone = ranks.Ranks(["cpu"], "none", 0.01)
        with alone, pytest.raises(ranks.RanksFailed, match=r"ranks \[0\] did not answer within 0.01 s"):
            alone.ask("gemm", size=512, dtype="float32", rounds=1_000_000)


class TestTheProgram:
    @pytest.mark.thorough
    @pytest.mark.timeout(300)
    def test_measures_all_and_agrees_with_torch(self, run_python, tmp_path):
        pytest.importorskip("torch")
        out = tmp_path / "record.json"
        done = run_python(*RUN, "--out", str(out), timeout=280)
        record = json.loads(out.read_text())
        assert {"date", "commit", "cpu", "gpus", "versions"} <= set(record["environment"])
        assert "torch" in record["environment"]["versions"]
        assert {row["section"] for row in record["rows"]} == {"all_reduce", "scaling", "resnet"}
        assert {row["layout"] for row in record["rows"]} == {"1 CPU worker", "2 CPU workers"}
        peers = {"DDP, gloo", "bare torch"}
        sides = {row["side"] for row in record["rows"] if row["section"] == "resnet"}
        assert sides >= {"Synkro", *peers, *(f"Synkro ÷ {peer}" for peer in peers)}
        for row in record["rows"]:
            assert 0 < row["p10"] <= row["median"] <= row["p90"] < math.inf
            assert row["runs"] > 0
        for check in record["checks"]:
            assert check["agree"]
            assert check["apart"]["losses"] < 1e-4
            assert check["Synkro"][0][-1] < check["Synkro"][0][0]  # it learns
        assert {(check["layout"], check["peer"]) for check in record["checks"]} == {
            ("1 CPU worker", "DDP, gloo"),
            ("1 CPU worker", "bare torch"),
            ("2 CPU workers", "DDP, gloo"),
        }
        assert record["not_measured"] == []
        assert "Synkro and DDP, gloo agree" in done.stdout.splitlines()[-1]

    def test_says_what_it_cannot_measure(self, run_python, tmp_path):
        (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')\n")
        out = tmp_path / "record.json"
        options = ("--only", "all_reduce,resnet", "--ranks", "1", "--out", str(out))
        path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        done = run_python(*RUN, *options, env=path, check=False)
        assert done.returncode == 1, done.stderr  # Synkro did not train
        record = json.loads(out.read_text())
        missing = {(each["section"], each["side"]): each["reason"] for each in record["not_measured"]}
        assert missing.keys() == {
            ("all_reduce", "torch.distributed, gloo"),
            *(("resnet", side) for side in ("Synkro", "DDP, gloo", "bare torch")),
        }
        assert all("torch is broken" in why for why in missing.values())
        assert all(f": {why}\n" in done.stdout for why in missing.values())
        assert {row["side"] for row in record["rows"]} == {"Synkro"}

    def test_refuses_cuda_where_there_is_none(self, run_python):
        command = ("-m", "benchmarks.multi_gpu", "--device", "cuda")
        done = run_python(*command, check=False, env={"CUDA_VISIBLE_DEVICES": ""})
        assert done.returncode == 2
        assert "no GPU" in done.stderr

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
    def test_ends_what_it_started(self, number):
        assert all_end([sys.executable, *RUN, "--only", "scaling"], "Synkro", number, least=2)


@pytest.mark.timeout(120)
class TestResNet:
    @pytest.fixture
    def resnet(self):
        pytest.importorskip("torch")
        from benchmarks import resnet

        return resnet

    def test_is_the_one_that_was_published(self, resnet):
        import torch

        assert resnet.parameter_count(resnet.build()) == resnet.PARAMETERS == 25_557_032
        assert resnet.build(width=4, classes=7)(torch.zeros(2, 3, 40, 40)).shape == (2, 7)

    def test_flat_training_is_plain_training(self, resnet):
        import numpy as np
        import torch

        job = resnet.Job(images=4, size=32, width=4, classes=3, bf16=False)
        gradients = np.zeros(resnet.parameter_count(resnet.build(4, 3)), np.float32)
        calls = []
        flat = resnet.Flat(job, 0, gradients, lambda: calls.append(gradients.any()))
        plain = resnet.Plain(job, 0, torch.device("cpu"), spread=False)
        ours, theirs = flat.check(3), plain.check(3)
        assert ours["losses"] == pytest.approx(theirs["losses"], rel=1e-5)
        assert ours["moved"] == pytest.approx(theirs["moved"], rel=1e-3)
        assert calls == [True] * 3
        assert flat.holds(gradients)
        assert not flat.holds(gradients.copy())
