"""Digests of messages between hosts, and what is done to these on the way: ``hosts.seals``."""

import hashlib
import os
import re

import numpy as np
import pytest

from support.examples import given, st
from synkro.hosts.parcels import Conveyor, Load, are_apart, in_chunks
from synkro.hosts.seals import (
    CHANGED,
    CUT,
    DIGEST_BYTES,
    EARLY,
    LONG,
    REDIRECTED,
    REPLAYED,
    ForgedError,
    Seals,
)

pytestmark = pytest.mark.quick
COUNT = 3


def seals(key=bytes(32)):
    return [Seals(key, number, COUNT) for number in range(COUNT)]


def opened(receiver, source, message):
    return bytes(receiver.opened(source, memoryview(message)))


PAIRS = st.sampled_from([(one, other) for one in range(COUNT) for other in range(COUNT) if one != other])


@given(
    st.lists(st.tuples(PAIRS, st.binary(max_size=50)), max_size=20), st.binary(min_size=1, max_size=64)
)
def test_what_is_sent_arrives(messages, key):
    all_seals = seals(key)
    for (one, other), payload in messages:
        message = all_seals[one].head(other, payload)
        assert opened(all_seals[other], one, message) == payload
        said = all_seals[one].load_to(other)
        said.update(payload)
        got = all_seals[other].load_from(one)
        got.update(payload)
        all_seals[other].check_load(one, got, said.digest())
        all_seals[other].check_beat(one, all_seals[one].beat(other))


def attacks():
    """The leader, process 1; and for each attack what comes to it as from process 0, and what it says.

    The last message of an attack is not taken, those before it are.
    """
    gateway, leader, third = seals()
    first, second, last = (gateway.head(1, text) for text in (b"first", b"second", b"third"))
    spliced = first[: DIGEST_BYTES + 16] + last[DIGEST_BYTES + 16 :]
    bare = hashlib.blake2b(b"", digest_size=DIGEST_BYTES).digest() + bytes(16)
    return leader, {
        "replayed": (REPLAYED, first, first),
        "replayed later": (REPLAYED, first, second, last, second),
        "reordered": (EARLY, second),
        "left out": (EARLY, first, last),
        "for another": (REDIRECTED, gateway.head(2, b"first")),
        "of another": (REDIRECTED, third.head(1, b"first")),
        "its own": (REDIRECTED, leader.head(0, b"first")),
        "truncated": (CUT, first[:-1]),
        "truncated to nothing": (CUT, b""),
        "truncated to the digest": (CUT, first[:DIGEST_BYTES]),
        "spliced": (CHANGED, spliced),
        "lengthened": (LONG, first + second),
        "another key": (CHANGED, seals(os.urandom(32))[0].head(1, b"first")),
        "no key": (CHANGED, bare),
    }


@pytest.mark.parametrize("attack", attacks()[1])
def test_what_is_done_to_heads_is_told(attack):
    leader, of_attacks = attacks()
    what, *messages, last = of_attacks[attack]
    for message in messages:
        opened(leader, 0, message)
    with pytest.raises(ForgedError) as caught:
        opened(leader, 0, last)
    assert (caught.value.host, caught.value.at, caught.value.what) == (0, 1, what)
    assert str(caught.value) == f"a message from process 0 of MPI's to process 1 {what}."


@given(st.binary(min_size=1, max_size=40), st.data())
def test_no_byte_of_a_message_can_be_changed(payload, data):
    gateway, leader, _ = seals()
    message = bytearray(gateway.head(1, payload))
    message[data.draw(st.integers(0, len(message) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ForgedError, match=f"{re.escape(CHANGED)}|{re.escape(CUT)}|{re.escape(LONG)}"):
        opened(leader, 0, message)


def load(digest, *chunks):
    digest = digest.copy()
    for chunk in chunks:
        digest.update(chunk)
    return digest


def test_what_is_done_to_loads_is_told():
    gateway, leader, third = seals()
    opened(leader, 0, gateway.head(1, b"ab"))
    before = gateway.load_to(1)
    for number, receiver in ((2, third), (2, third), (1, leader)):
        head = gateway.head(number, b"abcd")
        opened(receiver, 0, head)
    message, second = gateway.load_to(1), gateway.load_to(1)
    got = load(leader.load_from(0), b"ab", b"cd")
    for name, digest in {
        "changed": load(message, b"ab", b"cX").digest(),
        "cut off": load(message, b"ab", b"c").digest(),
        "reordered": load(message, b"cd", b"ab").digest(),
        "of the message before": load(before, b"abcd").digest(),
        "the second of the message": load(second, b"abcd").digest(),
        "for another": load(gateway.load_to(2), b"abcd").digest(),
        "empty": b"",
        "of a head": head[:DIGEST_BYTES],
    }.items():
        with pytest.raises(ForgedError) as caught:
            leader.check_load(0, got, digest)
        assert caught.value.what == CHANGED, name
    leader.check_load(0, got, load(message, b"abcd").digest())


def test_beats_come_once_and_in_order():
    gateway, leader, third = seals()
    first, second = gateway.beat(1), gateway.beat(1)
    other_number = bytearray(first)  # of heads that were sent
    other_number[-8] ^= 1
    for forged in (second, b"", third.beat(1), gateway.beat(2), other_number):
        with pytest.raises(ForgedError, match="process 0 of MPI's to process 1"):
            seals()[1].check_beat(0, forged)
    leader.check_beat(0, first)
    with pytest.raises(ForgedError, match="process 0 of MPI's to process 1"):
        leader.check_beat(0, first)


def test_a_beat_tells_of_heads_that_were_left_out():
    """Where none follows.  Those that were sent since the beat before may be on their way."""
    gateway, leader, _ = seals()
    first, second = (gateway.head(1, text) for text in (b"first", b"second"))
    assert not leader.check_beat(0, gateway.beat(1))
    opened(leader, 0, first)
    assert leader.check_beat(0, gateway.beat(1))
    opened(leader, 0, second)
    assert not leader.check_beat(0, gateway.beat(1))


# ── what is on its way ───────────────────────────────────────────────────────────────────────────────


class Network:
    """What has been sent, and when that is done: as soon as *taken* says so."""

    def __init__(self):
        self.sent = []
        self.taken = 0
        self.spare = []
        self.conveyor = Conveyor(self.begin, tuple, self.spare)

    def begin(self, chunk, is_digest):
        number = len(self.sent)
        self.sent.append((chunk, is_digest))
        network = self

        class Request:
            def Test(self):
                return number < network.taken

        return Request()

    def everything(self, meanwhile=lambda: None):
        """What has come when all is sent, if *meanwhile* something happens before each look."""
        came = []
        while not self.conveyor.push():
            meanwhile()
            came += [(bytes(chunk), is_digest) for chunk, is_digest in self.sent[self.taken :]]
            self.taken = len(self.sent)
        return came


def test_pieces_that_share_memory_are_told():
    memory = memoryview(bytearray(100))
    assert are_apart([])
    assert are_apart([memory[50:], memory[:50], bytes(7), np.zeros(3, np.uint8)])
    assert not are_apart([memory[:50], bytes(7), memory[49:]])
    assert not are_apart([memory[10:20], memory[10:20]])


SIZES = st.lists(
    st.sampled_from([0, 1, 1000, 1 << 16, (1 << 16) + 1, 1 << 21, (1 << 21) + 5]), max_size=6
)


@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=3))
def test_loads_go_in_order_each_with_its_digest(wanted):
    rng = np.random.default_rng(1)
    network = Network()
    loads = [Load([rng.bytes(n) for n in sizes], sealed) for sizes, sealed in wanted]
    network.conveyor.add([(each, hashlib.blake2b() if each.sealed else None) for each in loads])
    expected = []
    for each in loads:
        expected += [(bytes(chunk), False) for chunk in in_chunks(each)]
        if each.sealed:
            expected.append((hashlib.blake2b(b"".join(each.bodies)).digest(), True))
    assert network.everything() == expected


def test_what_changes_while_it_is_sent_goes_as_it_was_digested():
    memory, network = np.zeros(3 << 21, np.uint8), Network()
    goes_on = network.conveyor.add([(Load([memory]), hashlib.blake2b())])
    *chunks, (digest, _) = network.everything(lambda: np.add(memory, 1, memory))
    assert digest == hashlib.blake2b(b"".join(chunk for chunk, _ in chunks)).digest()
    assert not goes_on()


def test_no_more_is_on_its_way_than_some_pieces_and_their_copies_are_used_again():
    network = Network()
    conveyor = network.conveyor
    goes_on = conveyor.add([(Load([np.zeros(40 << 21, np.uint8)]), hashlib.blake2b())])
    most = 0
    while not conveyor.push():
        before = len(network.sent)
        conveyor.push()
        if len(network.sent) == before:  # until it goes on
            most = max(most, len(network.sent) - network.taken)
            assert goes_on()
            network.taken += 1
    assert most == 4
    assert len(network.spare) == 4
    assert not goes_on()


def test_a_message_waits_for_those_before_it():
    network = Network()
    first = network.conveyor.add([(Load([np.zeros(9 << 21, np.uint8)]), hashlib.blake2b())])
    second = network.conveyor.add([(Load([b"bare"], sealed=False), None)])
    assert first()
    assert second()
    came = network.everything()
    assert [len(chunk) for chunk, _ in came] == [1 << 21] * 9 + [64, 4]
    assert came[-1] == (b"bare", False)
    assert not first()
    assert not second()
