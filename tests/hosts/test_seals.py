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


def attacked(attack):
    """What *attack* makes of the messages 0 → 1, as they come to process 1 as such of process 0."""
    gateway, leader, third = seals()
    sent = [gateway.head(1, text) for text in (b"first", b"second", b"third")]
    return leader, {
        "replayed": [sent[0], sent[0]],
        "replayed later": [*sent, sent[1]],
        "reordered": [sent[1], sent[0]],
        "left out": [sent[0], sent[2]],
        "for another": [gateway.head(2, b"first")],
        "of another": [third.head(1, b"first")],
        "its own": [leader.head(0, b"first")],
        "truncated": [sent[0][:-1]],
        "truncated to nothing": [b""],
        "truncated to the digest": [sent[0][:DIGEST_BYTES]],
        "spliced": [sent[0][: DIGEST_BYTES + 16] + sent[2][DIGEST_BYTES + 16 :]],
        "lengthened": [sent[0] + sent[1]],
        "another key": [seals(os.urandom(32))[0].head(1, b"first")],
        "no key": [hashlib.blake2b(b"", digest_size=DIGEST_BYTES).digest() + bytes(16)],
    }[attack]


@pytest.mark.parametrize(
    ("attack", "what"),
    [
        ("replayed", REPLAYED),
        ("replayed later", REPLAYED),
        ("reordered", EARLY),
        ("left out", EARLY),
        ("for another", REDIRECTED),
        ("of another", REDIRECTED),
        ("its own", REDIRECTED),
        ("truncated", CUT),
        ("truncated to nothing", CUT),
        ("truncated to the digest", CUT),
        ("spliced", CHANGED),
        ("lengthened", LONG),
        ("another key", CHANGED),
        ("no key", CHANGED),
    ],
)
def test_what_is_done_to_heads_is_told(attack, what):
    leader, messages = attacked(attack)
    for message in messages[:-1] if what is not EARLY else messages[: attack == "left out"]:
        opened(leader, 0, message)
    with pytest.raises(ForgedError) as caught:
        opened(leader, 0, messages[0] if attack == "reordered" else messages[-1])
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


LOADS = {
    "changed": lambda one, other: load(one[0], b"ab", b"cX").digest(),
    "cut off": lambda one, other: load(one[0], b"ab", b"c").digest(),
    "reordered": lambda one, other: load(one[0], b"cd", b"ab").digest(),
    "of the message before": lambda one, other: load(other[0], b"ab", b"cd").digest(),
    "the second of the message": lambda one, other: load(one[1], b"ab", b"cd").digest(),
    "empty": lambda one, other: b"",
}


@pytest.mark.parametrize("attack", LOADS)
def test_what_is_done_to_loads_is_told(attack):
    gateway, leader, _ = seals()
    ways = []
    for text in (b"first", b"second"):
        opened(leader, 0, gateway.head(1, text))
        ways.append([gateway.load_to(1), gateway.load_to(1)])
    got = load(leader.load_from(0), b"ab", b"cd")
    with pytest.raises(ForgedError) as caught:
        leader.check_load(0, got, LOADS[attack](ways[1], ways[0]))
    assert caught.value.what == CHANGED
    leader.check_load(0, got, load(ways[1][0], b"abcd").digest())


def test_a_load_is_for_one_process_and_is_no_head():
    gateway, leader, third = seals()
    for number, receiver in ((1, leader), (2, third)):
        opened(receiver, 0, gateway.head(number, b"same"))
    for_third = load(gateway.load_to(2), b"same")
    with pytest.raises(ForgedError):
        leader.check_load(0, load(leader.load_from(0), b"same"), for_third.digest())
    head = gateway.head(1, b"same")
    opened(leader, 0, head)
    with pytest.raises(ForgedError):
        leader.check_load(0, load(leader.load_from(0), b"same"), head[:DIGEST_BYTES])


def test_beats_come_once_and_in_order():
    gateway, leader, third = seals()
    first, second = gateway.beat(1), gateway.beat(1)
    leader.check_beat(0, first)
    for forged in (first, b"", third.beat(1), gateway.beat(2)):
        with pytest.raises(ForgedError, match="process 0 of MPI's to process 1"):
            seals()[1].check_beat(0, forged) if forged != first else leader.check_beat(0, forged)
    fresh = seals()[1]
    with pytest.raises(ForgedError):
        fresh.check_beat(0, second)


def test_a_beat_tells_of_heads_that_were_left_out():
    """Where none follows.  Those that were sent since the beat before may be on their way."""
    gateway, leader, _ = seals()
    first, second = (gateway.head(1, text) for text in (b"first", b"second"))
    assert not leader.check_beat(0, gateway.beat(1))
    opened(leader, 0, first)
    assert leader.check_beat(0, gateway.beat(1))
    opened(leader, 0, second)
    assert not leader.check_beat(0, gateway.beat(1))


def test_a_beat_cannot_say_another_number_of_heads():
    gateway, leader, _ = seals()
    beat = bytearray(gateway.beat(1))
    beat[-8] ^= 1
    with pytest.raises(ForgedError, match=re.escape(CHANGED)):
        leader.check_beat(0, beat)


# ── what is on its way ───────────────────────────────────────────────────────────────────────────────


class Network:
    """What has been sent, and when that is done: as soon as *taken* says so."""

    def __init__(self):
        self.sent = []
        self.taken = 0

    def begin(self, chunk, is_digest):
        number = len(self.sent)
        self.sent.append((chunk, is_digest))
        network = self

        class Request:
            def Test(self):
                return number < network.taken

        return Request()


def everything(conveyor, network):
    """What has come when all is sent."""
    came = []
    while not conveyor.push():
        came += [(bytes(chunk), is_digest) for chunk, is_digest in network.sent[network.taken :]]
        network.taken = len(network.sent)
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
    conveyor = Conveyor(network.begin, tuple, [])
    loads = [Load([rng.bytes(n) for n in sizes], sealed) for sizes, sealed in wanted]
    conveyor.add([(each, hashlib.blake2b() if each.sealed else None) for each in loads])
    came = everything(conveyor, network)
    expected = []
    for each in loads:
        expected += [(bytes(chunk), False) for chunk in in_chunks(each)]
        if each.sealed:
            expected.append((hashlib.blake2b(b"".join(each.bodies)).digest(), True))
    assert came == expected


def test_what_changes_while_it_is_sent_goes_as_it_was_digested():
    memory = np.zeros(3 << 21, np.uint8)
    network = Network()
    conveyor = Conveyor(network.begin, tuple, [])
    goes_on = conveyor.add([(Load([memory]), hashlib.blake2b())])
    digest, came = hashlib.blake2b(), []
    while not conveyor.push():
        memory += 1
        for chunk, is_digest in network.sent[network.taken :]:
            if not is_digest:
                digest.update(chunk)
            came.append(bytes(chunk))
        network.taken = len(network.sent)
    assert came[-1] == digest.digest()
    assert not goes_on()


def test_no_more_is_on_its_way_than_some_pieces_and_their_copies_are_used_again():
    network, spare = Network(), []
    conveyor = Conveyor(network.begin, tuple, spare)
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
    assert len(spare) == 4
    assert not goes_on()


def test_a_message_waits_for_those_before_it():
    network = Network()
    conveyor = Conveyor(network.begin, tuple, [])
    first = conveyor.add([(Load([np.zeros(9 << 21, np.uint8)]), hashlib.blake2b())])
    second = conveyor.add([(Load([b"bare"], sealed=False), None)])
    assert first()
    assert second()
    came = everything(conveyor, network)
    assert [len(chunk) for chunk, _ in came] == [1 << 21] * 9 + [64, 4]
    assert came[-1] == (b"bare", False)
    assert not first()
    assert not second()
