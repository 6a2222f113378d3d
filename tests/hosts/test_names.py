"""Which hosts a user has named, and the ranks of each."""

import os
import re
import sys

import numpy as np
import pytest

from support.examples import given, st
from synkro.controller.session import Session
from synkro.errors import InvalidType, InvalidValue, NotAvailable
from synkro.hosts.launch import best_launcher, found_mpiexec, is_here, launcher_of, reached
from synkro.hosts.names import Host, clean, copies, expanded, named, ranks_of

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("hosts", "found"),
    [
        (["h1", "h2:4"], [("h1", None), ("h2", 4)]),
        (("localhost", "localhost"), [("localhost", None)] * 2),
        ("h1,h2:4", [("h1", None), ("h2", 4)]),
        (" a.b-c.org , 10.0.0.1:2", [("a.b-c.org", None), ("10.0.0.1", 2)]),
        (["[fe80::1%eth0]:3"], [("[fe80::1%eth0]", 3)]),
        (iter(["h1"]), [("h1", None)]),
    ],
)
def test_names(hosts, found):
    assert list(named(hosts, {})) == found


@pytest.mark.parametrize(
    ("hosts", "error", "says"),
    [
        ("mpi", InvalidValue, "Start it by mpiexec -n HOSTS -ppn 1 python -m synkro.hosts prog.py"),
        ([], InvalidValue, "hosts= names no host"),
        (7, InvalidType, 'must be a list of names, such as ["h1", "h2:4"]'),
        ({"h1": 4}, InvalidType, "must be a list of names"),
        (b"h1", InvalidType, "must be a list of names"),
        ({"h1", "h2"}, InvalidType, "must be a list of names"),
        (np.array(["h1", "h2"]), InvalidType, "must be a list of names"),
        ([("h1", 4)], InvalidType, "the name of a host is a text"),
        (["h1", ""], InvalidValue, "'' is no name of a host"),
        ("h1 h2", InvalidValue, "'h1 h2' is no name of a host"),
        ("h1:9999999999", InvalidValue, "asks for '9999999999' ranks on h1"),
        ("h1:0", InvalidValue, "asks for '0' ranks on h1: give 1 or more"),
        ("h1:", InvalidValue, "asks for '' ranks on h1"),
        ("h1:x", InvalidValue, "asks for 'x' ranks on h1"),
        ("-oProxyCommand=x", InvalidValue, "is no name of a host"),
        ("./nowhere", InvalidValue, "there is no such hostfile"),
        (os.sep, InvalidValue, "is a folder: give the path of a hostfile"),
        ("slurm", InvalidValue, "SLURM_JOB_NODELIST is not set"),
        ("pbs", InvalidValue, "PBS_NODEFILE is not set"),
    ],
)
def test_what_names_no_hosts(monkeypatch, hosts, error, says):
    monkeypatch.delenv("SYNKRO_GATEWAY", raising=False)
    with pytest.raises(error, match=re.escape(says)):
        reached(hosts, None)


def test_hostfiles(tmp_path):
    path = tmp_path / "hosts"
    path.write_text(
        "# ours\nh1\nh2:4  # MPICH\n\nh3 slots=2\nh4 slots = 3 max_slots=8\n h5\nh5\nh6:2\nh6\n"
    )
    found = [("h1", None), ("h2", 4), ("h3", 2), ("h4", 3), ("h5", 2), ("h6", 3)]
    assert list(named(path, {})) == list(named(str(path), {})) == found


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "names no host"),
        (b"# nothing\n", "names no host"),
        (b"h1\nh2 cores=4\n", "line 2 of the hostfile"),
        (b"h1 slots=0\n", "line 1 of the hostfile"),
        (b"h1:2 slots=4\n", "'h1:2 slots=4'"),
        (b"h1!\n", "'h1!' is no name of a host"),
        (b"\xff\xfe", "cannot be read"),
        (None, "cannot be read"),  # where there is none
    ],
)
def test_wrong_hostfiles(tmp_path, text, says):
    if text is not None:
        (tmp_path / "hosts").write_bytes(text)
    with pytest.raises(InvalidValue, match=re.escape(says)):
        named(tmp_path / "hosts", {})


@pytest.mark.parametrize(
    ("nodes", "names"),
    [
        ("n1", ["n1"]),
        ("n1,m2", ["n1", "m2"]),
        ("n[1-3]", ["n1", "n2", "n3"]),
        ("n[08-10,3],gpu5", ["n08", "n09", "n10", "n3", "gpu5"]),
        ("r[1-2]c[1,3]-ib", ["r1c1-ib", "r1c3-ib", "r2c1-ib", "r2c3-ib"]),
        ("a[1,2],b[1-2]", ["a1", "a2", "b1", "b2"]),
    ],
)
def test_lists_of_nodes(nodes, names):
    assert expanded(nodes) == names
    assert [host.name for host in named("slurm", {"SLURM_JOB_NODELIST": nodes})] == names


@given(st.lists(st.integers(0, 120), min_size=1, max_size=20, unique=True), st.integers(1, 4))
def test_lists_of_nodes_as_slurm_shortens_them(numbers, width):
    numbers = sorted(numbers)
    spans, start = [], 0
    for end in range(1, len(numbers) + 1):
        if end == len(numbers) or numbers[end] != numbers[end - 1] + 1:
            ends = [str(numbers[place]).zfill(width) for place in (start, end - 1)]
            spans.append(ends[0] if ends[0] == ends[1] else "-".join(ends))
            start = end
    assert expanded(f"n[{','.join(spans)}]") == [f"n{str(number).zfill(width)}" for number in numbers]


@pytest.mark.parametrize("nodes", ["n[1-", "n[a-b]", "n[]", "n]1[", "[1-2]-", "n[1-2]!"])
def test_wrong_lists_of_nodes(nodes):
    with pytest.raises(InvalidValue, match="the list of nodes"):
        expanded(nodes)


def test_the_nodes_of_a_job_of_pbs(tmp_path):
    (tmp_path / "nodes").write_text("n1\nn1\nn2\nn2\n")
    found = named("pbs", {"PBS_NODEFILE": str(tmp_path / "nodes")})
    assert found == (Host("n1"), Host("n2"))


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({}, 1),
        ({"PMI_SIZE": "3", "PMI_RANK": "0"}, 3),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, 2),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, 1),  # in a batch script, which runs once
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}, 4),
        ({"PMI_SIZE": "?"}, 1),
    ],
)
def test_copies_of_a_program(environment, count):
    assert copies(environment) == count


# ── launchers ────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Have programs of these names on PATH alone, which print this text."""

    def programs(*names, says=""):
        monkeypatch.setenv("PATH", str(tmp_path))
        if not (tmp_path / "python").exists():
            (tmp_path / "python").symlink_to(sys.executable)
        monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
        for name in names:
            (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
            (tmp_path / name).chmod(0o700)

    return programs


def test_what_reaches_hosts(programs):
    programs("ssh")
    assert [best_launcher(hosts) for hosts in (["h1"], "slurm", "pbs")] == ["ssh", "slurm", "ssh"]
    programs("pbs_tmrsh")
    assert best_launcher("pbs") == "pbs_tmrsh"


@pytest.mark.parametrize(
    ("launcher", "there", "says"),
    [
        ("nowhere", [], ": there is no such program. Give 'ssh', 'slurm', or one"),
        ("", [], ": there is no such program. Give 'ssh', 'slurm', or one"),
        ("slurm", [], " calls srun, which is not here"),
        ("slurm", ["srun"], " starts processes in a job of SLURM's, and SLURM_JOB_ID is not set"),
        ("./text", [], " is no program (chmod +x makes it one)"),
        (".", [], " is a folder"),
    ],
)
def test_what_reaches_no_hosts(programs, tmp_path, monkeypatch, launcher, there, says):
    programs(*there)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").touch()
    with pytest.raises(InvalidValue, match=re.escape(f"launcher={launcher!r}{says}")):
        launcher_of(launcher, {})


def test_the_key_and_the_environment_are_in_no_agent(programs):
    programs("srun", "ssh", "pbs_tmrsh")
    for name in ("slurm", "ssh", "pbs_tmrsh"):
        launcher = launcher_of(name, {"SLURM_JOB_ID": "7"})
        agent = launcher.agent("/the folder")
        assert ("< '/the folder'/told" in agent) == launcher.secret == (name != "pbs_tmrsh")
        assert "\n. '/the folder'/environment\n" in agent


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("HYDRA build details:", None),
        ("mpiexec (Open MPI) 5.0.11", None),
        ("mpirun (Open MPI) 4.1.6", "is another one: it says 'mpirun (Open MPI) 4.1.6'"),
        ("Something else 7", "is another one: it says 'Something else 7'"),
    ],
)
def test_which_mpi(programs, monkeypatch, says, error):
    programs("mpiexec", says=says)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    if error is None:
        assert found_mpiexec().open_mpi == ("Open MPI" in says)
        return
    with pytest.raises(NotAvailable, match=re.escape(error)):
        found_mpiexec()


def test_what_a_launcher_told_one_process_is_passed_to_none():
    told = {"PMI_RANK": "1", "PMIX_X": "", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_STEP_NUM_TASKS": "2"}
    kept = {"PATH": "/bin", "SLURM_JOB_ID": "7", "OMPI_MCA_btl": "tcp,self"}
    assert clean(told | kept) == kept


def test_copies_that_would_each_take_all_hosts(monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    with pytest.raises(InvalidValue, match="has started 2 copies of this program"):
        reached(["h1", "h2"], None)


# ── ranks ────────────────────────────────────────────────────────────────────────────────────────────


@given(st.lists(st.tuples(st.integers(1, 5), st.none() | st.integers(1, 5)), min_size=1), st.data())
def test_ranks_fill_the_hosts_in_their_order(given_hosts, data):
    hosts = [Host(f"h{number}", ranks) for number, (_, ranks) in enumerate(given_hosts)]
    devices = [count for count, _ in given_hosts]
    rooms = [ranks or count for count, ranks in given_hosts]
    wanted = data.draw(st.none() | st.integers(1, sum(rooms) + 2))
    fixed = all(host.ranks for host in hosts)
    count = wanted or sum(rooms)
    if not sum(rooms[:-1]) < count <= sum(rooms) or (fixed and count < sum(rooms)):
        with pytest.raises(InvalidValue):
            ranks_of(hosts, devices, wanted)
        return
    found = ranks_of(hosts, devices, wanted)
    assert [rank for ranks in found for rank in ranks] == list(range(count))
    assert all(found)
    assert [len(ranks) for ranks in found[:-1]] == rooms[:-1]
    assert len(found[-1]) <= rooms[-1]


@pytest.mark.parametrize(
    ("hosts", "wanted", "says"),
    [
        ("h1:2,h2:2", 3, "n_parallel=3, but hosts= asks for 4 ranks (h1 has 2, h2 has 2)"),
        ("h1,h2:2", 7, "n_parallel=7, but the hosts have 6 devices (h1 has 4, h2 has 2)"),
        ("h1,h2", 4, "n_parallel=4 leaves no rank for h2, as ranks fill the hosts in their order"),
    ],
)
def test_numbers_that_contradict_each_other(hosts, wanted, says):
    with pytest.raises(InvalidValue, match=re.escape(says)):
        ranks_of(named(hosts, {}), [4, 4], wanted)


@pytest.mark.parametrize(
    ("hosts", "options", "error", "says"),
    [
        *[
            ("h1,h2", {"n_parallel": each}, InvalidType, "number of workers")
            for each in ("2", 2.5, True)
        ],
        ("h1,h2", {"n_parallel": -2}, InvalidValue, "number of workers"),
        ("h1,h2", {"threads_per_worker": 0}, InvalidValue, "threads_per_worker"),
        ("h1,h2", {"preallocate": 3}, InvalidValue, "preallocate"),
        ("h1,h2", {"master_rank": -1}, InvalidValue, "master_rank"),
        ("h1,h2", {"devices": "gpu"}, InvalidValue, "devices"),
        ("h1,h2", {"devices": "a->cpu;a->cpu"}, InvalidValue, "devices"),
        ("h1,h2", {"host_timeout": True}, InvalidType, "host_timeout"),
        *[("h1,h2", {"trusted_network": each}, InvalidType, "trusted_network") for each in (1, "yes")],
        ("h1:1,h2:2", {"n_parallel": 5}, InvalidValue, "n_parallel=5, but hosts= asks for 3 ranks (h1"),
        (
            "h1:1,h2:2",
            {"devices": ["cpu", "cpu"]},
            InvalidValue,
            "lists 2 devices for each host (['cpu', 'cpu']), but hosts= gives",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_hosts_are_asked(hosts, options, error, says):
    """The launcher is no program, which is told when they are."""
    with pytest.raises(error, match=re.escape(says)):
        Session(hosts=hosts, launcher=os.sep, **options)


@pytest.mark.parametrize("launcher", [5, True, ["ssh"], b"ssh", object()])
def test_a_launcher_is_the_name_of_a_program(launcher):
    with pytest.raises(InvalidType, match="launcher= is 'ssh', 'slurm', or the path of a program"):
        reached(["h1", "h2"], launcher)


def test_hosts_of_mpi_have_no_launcher():
    with pytest.raises(InvalidValue, match="are there already, and launcher='ssh' would start some"):
        reached("mpi", "ssh")


def test_a_name_that_no_host_can_have_is_not_here():
    assert not is_here("x" * 5000)
