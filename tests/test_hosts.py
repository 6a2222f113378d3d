"""Which hosts a user has named, and the ranks of each."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from synkro.errors import InvalidType, InvalidValue
from synkro.plan.hosts import Host, expanded, named, ranks_of

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
        ([], InvalidValue, "hosts= names no host"),
        (7, InvalidType, 'must be a list of names, such as ["h1", "h2:4"]'),
        ({"h1": 4}, InvalidType, "must be a list of names"),
        (b"h1", InvalidType, "must be a list of names"),
        ([("h1", 4)], InvalidType, "the name of a host is a text"),
        (["h1", ""], InvalidValue, "'' is no name of a host"),
        ("h1 h2", InvalidValue, "'h1 h2' is no name of a host"),
        ("h1:0", InvalidValue, "asks for '0' ranks on h1: give 1 or more"),
        ("h1:", InvalidValue, "asks for '' ranks on h1"),
        ("h1:x", InvalidValue, "asks for 'x' ranks on h1"),
        ("-oProxyCommand=x", InvalidValue, "is no name of a host"),
        ("./nowhere", InvalidValue, "there is no such hostfile"),
        ("slurm", InvalidValue, "SLURM_JOB_NODELIST is not set"),
        ("pbs", InvalidValue, "PBS_NODEFILE is not set"),
    ],
)
def test_what_names_no_hosts(hosts, error, says):
    with pytest.raises(error, match=re.escape(says)):
        named(hosts, {})


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
        ("", "names no host"),
        ("# nothing\n", "names no host"),
        ("h1\nh2 cores=4\n", "line 2 of the hostfile"),
        ("h1 slots=0\n", "line 1 of the hostfile"),
        ("h1:2 slots=4\n", "'h1:2 slots=4'"),
        ("h1!\n", "'h1!' is no name of a host"),
    ],
)
def test_wrong_hostfiles(tmp_path, text, says):
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(InvalidValue, match=re.escape(says)):
        named(tmp_path / "hosts", {})


def test_a_hostfile_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidValue, match="cannot be read"):
        named(tmp_path / "nowhere", {})
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidValue, match="cannot be read"):
        named(tmp_path / "bytes", {})


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
