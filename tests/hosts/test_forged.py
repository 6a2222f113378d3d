"""Somebody between two hosts who has no key does something to what passes: it is told, without effect.

The man in the middle stands where messages leave a process, with their digests, for the network.
"""

import json
import sys

import pytest

from support.hosts import MPIEXEC, OPEN_MPI, tap
from synkro.hosts.seals import CHANGED, CUT, EARLY, LEFT_OUT, LONG, REDIRECTED, REPLAYED

pytestmark = [
    pytest.mark.hosts,
    pytest.mark.counted_once,
    pytest.mark.timeout(200),
    pytest.mark.usefixtures("nothing_left_there"),
]

PLANTED = """
HEAD, BODY, SEAL, BEAT = 1, 2, 3, 4
KINDS = {"head": HEAD, "body": BODY, "digest": SEAL, "beat": BEAT}
ONCE = {  # what is sent in the place of one message
    "changed": lambda data: [data[:-1] + bytes([data[-1] ^ 1])],
    "truncated": lambda data: [data[:-1]],
    "lengthened": lambda data: [data + data],
    "replayed": lambda data: [data, data],
    "redirected": lambda data: [data],
}

class Evil:
    def __reduce__(self):
        return open, (FLAG + "-evil", "w")

class Tapped(Tap):
    def begin(self):
        self.held = []
        self.over = False

    def Isend(self, message, to, tag):
        self.attack = open(FLAG).read().split() if os.path.exists(FLAG) else []
        data = bytes(message[0])
        if not self.attack or self.over or tag != KINDS[self.attack[0]] or to == 2:
            return self.comm.Isend(message, to, tag)
        return getattr(self, self.attack[1], self.once)(data, to, tag)

    def evil(self, data, to, tag):
        return self.sent(pickle.dumps(Evil()).ljust(len(data), b"."), to, tag)

    def reordered(self, data, to, tag):
        self.held.append((data, to, tag))
        self.over = len(self.held) == 2
        while self.over and self.held:
            request = self.sent(*self.held.pop())
        return request if self.over else wire.MPI.REQUEST_NULL

    def dropped(self, data, to, tag):
        return wire.MPI.REQUEST_NULL

    def spliced(self, data, to, tag):
        self.held.append(data)
        return self.sent(self.held[0] if len(self.held) == 5 else data, to, tag)

    def once(self, data, to, tag):
        self.over = True
        for each in ONCE[self.attack[1]](data):
            request = self.sent(each, 2 if self.attack[1] == "redirected" else to, tag)
        return request

    def sent(self, data, to, tag):
        self.kept = data
        return self.comm.Isend([data, wire.MPI.BYTE], to, tag)
"""

PROGRAM = """
import json, os, sys
import numpy as np
import synkro as synk

launcher, flag, *attacks = sys.argv[1:]
for attack in attacks:
    hosts = ["h1:1", "h2:1", "h3:1"] if "redirected" in attack else ["h1:1", "h2:1"]
    options = {"trusted_network": os.environ.get("TRUSTED") == "yes"}
    if "dropped" in attack:
        options["host_timeout"] = 6  # two beats tell, which may come late
    synk.fork(hosts=hosts, devices="cpu", launcher=launcher, verbose=False, **options)
    data = synk.data(np.arange(1.0 * (1 << 20)).reshape(1 << 10, -1))
    rows = synk.function(lambda x: x + 1, outputs="gather")
    assert (rows(data) == data[:] + 1).all()
    with open(flag, "w") as file:
        file.write(attack)
    try:
        for _ in range(200):
            if "evil" in attack or "dropped" in attack:
                synk.map(lambda text: text + ["y"], [["x" * 50_000]] * 20)
            elif "beat" in attack:
                synk.function(lambda: __import__("time").sleep(0.1), outputs=[])()
            else:
                data[:] += 1
                assert (rows(data) == data[:] + 1).all()
        told = "nothing", "", ""
    except synk.SynkroError as error:
        told = type(error).__name__, error.host, str(error)
    os.unlink(flag)
    synk.close()
    print(json.dumps(told), flush=True)
"""

HEADS = {
    "head changed": CHANGED,
    "head truncated": CUT,
    "head replayed": REPLAYED,
    "head reordered": EARLY,
    "head redirected": REDIRECTED,
    "beat changed": CHANGED,
    "beat replayed": CHANGED,
}
LOADS = {
    "body changed": CHANGED,
    "body evil": CHANGED,
    "body truncated": CUT,
    "body lengthened": LONG,
    "body replayed": CHANGED,
    "body reordered": CHANGED,
    "body spliced": CHANGED,
    "digest changed": CHANGED,
    "digest truncated": CUT,
}
LEFT = {  # and all that follows; but beats
    "head dropped": LEFT_OUT,
    "body dropped": LEFT_OUT,
    "digest dropped": LEFT_OUT,
}


TRUSTED = {"body evil": CHANGED, "head changed": CHANGED}  # pickles and heads have digests there, too

BOTH_ENDS = pytest.mark.parametrize(("at", "to"), [("h1", "h2"), ("h2", "h1")], ids=["to h2", "from h2"])


@pytest.fixture
def planted(tmp_path):
    """Have a man in the middle at a host; returns the path where he finds what to do."""

    def planted(at):
        tap(tmp_path, [at], f"FLAG = {str(tmp_path / 'flag')!r}\n{PLANTED}")
        return tmp_path / "flag"

    return planted


@pytest.mark.parametrize(
    "attacks", [HEADS, LOADS, LEFT, TRUSTED], ids=["heads", "loads", "left out", "trusted network"]
)
@BOTH_ENDS
def test_it_is_told_and_has_no_effect(hosts, tmp_path, planted, attacks, at, to):
    trusted = "yes" if attacks is TRUSTED else "no"
    if at == "h2":  # who does not talk to h3 here
        attacks = {attack: what for attack, what in attacks.items() if "redirected" not in attack}
    program = [PROGRAM, hosts.launcher, planted(at), *attacks]
    done = hosts.python(tmp_path, *program, timeout=180, TRUSTED=trusted)
    told = dict(zip(attacks, map(json.loads, done.stdout.splitlines()), strict=False))
    assert done.returncode == 0, done.stderr
    says = {attack: f"a message from {at} to {to} {what}" for attack, what in attacks.items()}
    if "head redirected" in attacks:
        says["head redirected"] = f"a message from h1 to h3 {REDIRECTED}"
    for attack, sentence in says.items():
        kind, host, text = told[attack]
        assert kind == "HostLost", (attack, told[attack])
        assert sentence in text, (attack, text)
        assert host == ("h3" if "redirected" in attack else "h2"), (attack, host)
    assert not (tmp_path / "flag-evil").exists()


CHANGES = """
import sys
import numpy as np
import synkro as synk

synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=sys.argv[1], trusted_network=True)
data = synk.data(np.ones((1 << 10, 1 << 10)))
total = synk.function(lambda x: x.sum(), outputs="sum")
assert total(data) == 1 << 20
data[:] += 1
open(sys.argv[2], "w").write("body changed")
print(total(data) == 1 << 21)
"""


def test_rows_have_none_on_a_trusted_network(hosts, tmp_path, planted):
    """As the documents say: so that somebody can change a result."""
    done = hosts.python(tmp_path, CHANGES, hosts.launcher, planted("h1"))
    assert done.stdout == "False\n", done.stderr
    assert "Synkro: rows between them have no digests (trusted_network=True)\n" in done.stderr


JOINED = """
import os, sys
import synkro as synk

with synk.Session(hosts="mpi", devices="cpu", verbose=False) as session:
    call = session.function(lambda: __import__("time").sleep(0.01), outputs=[])
    call()
    open(sys.argv[1], "w").write("head replayed")
    try:
        while True:
            call()
    except synk.HostLost as error:
        os.unlink(sys.argv[1])
        print(error.host, error)
"""


@BOTH_ENDS
@pytest.mark.skipif(OPEN_MPI, reason="another mpiexec's arguments")
def test_it_is_told_where_mpiexec_has_started_the_program(hosts, tmp_path, planted, at, to):
    reach = ["-launcher", "ssh", "-launcher-exec", hosts.launcher]
    where = ["-hosts", "h1,h2", "-n", "2", "-ppn", "1"]
    program = [sys.executable, "-B", "-m", "synkro.hosts", "-c", JOINED, planted(at)]
    done = hosts.done(tmp_path, MPIEXEC.path, *reach, *where, *program)
    lost = f" is lost: a message from {at} to {to} {REPLAYED}"
    assert done.stdout.startswith("h2 the host h2 (ranks "), (done.stdout, done.stderr)
    assert lost in done.stdout


SWITCHED = """
import sys, time
import synkro as synk

synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=sys.argv[1], verbose=False)
word = "-".join(["word", "7", "of", "mine"])  # which is nowhere else
filler = ["x" * 30_000] if sys.argv[2] == "body" else []
items = [[word, *filler]] * 9
try:
    print(synk.map(lambda item: (time.sleep(0.1), item[0][::-1]), items))  # some of them there
except synk.HostLost as error:
    print(error.host, error)
"""


@pytest.mark.parametrize("kind", ["head", "body"])
def test_a_switch_on_the_way_changes_a_pickle(hosts, tmp_path, kind):
    """Really on the way: in the packets."""
    with hosts.switched("h2", "word-7-of-mine", "word-7-of-them") as switch:
        done = hosts.python(tmp_path, SWITCHED, hosts.launcher, kind)
        lost = f"the host h2 (rank 1) is lost: a message from h1 to h2 {CHANGED}; look for"
        assert done.stdout.startswith("h2 in a map of "), (done.stdout, done.stderr)
        assert lost in done.stdout
        assert switch.stdout.readline() == "changed\n"
