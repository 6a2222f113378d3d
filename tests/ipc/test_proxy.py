"""The channel, where some ranks are on another host."""

import select
import threading
import time

import pytest

from ipc.test_channel import Wire
from synkro.ipc.proxy import Proxy

pytestmark = pytest.mark.quick
SIZE = 3


class Proxied(Wire):
    """A controller, the listener of rank 0, and a proxy for ranks 1 and 2."""

    def __init__(self):
        super().__init__(SIZE)
        self.listener = self.listeners[0]
        self.proxy = Proxy(self.memory, SIZE, [1, 2], self.inherited)

    def send(self, command, housekeeping=b"", ranks=(0, 1, 2)):
        lane = self.controller.lane(ranks)
        lane.send(command, housekeeping)
        return lane

    def close(self):
        del self.listener, self.proxy
        super().close()


@pytest.fixture
def wire():
    wire = Proxied()
    yield wire
    wire.close()


def test_a_command_comes_once_for_all_its_ranks(wire):
    lane = wire.send(b"do", b"news")
    (order,) = wire.proxy.hear()
    assert (order.ranks, order.command, order.housekeeping) == ((1, 2), b"do", b"news")
    assert list(wire.proxy.hear()) == []
    assert wire.proxy.lane(order.number) == [0, 1, 2]
    assert wire.proxy.number(1) == order.number
    assert wire.listener.receive(0) == (b"do", b"news")
    wire.listener.reply(b"mine", 0)
    assert lane.unanswered() == [1, 2]
    wire.proxy.answer(order.number, {2: b"two"})
    assert lane.unanswered() == [1]
    wire.proxy.answer(order.number, {1: b"one"})
    assert lane.replies() == [b"mine", b"one", b"two"]


def test_it_sees_in_a_word_that_something_was_sent(wire):
    seen = [wire.proxy.called()]
    for ranks in ((0, 1, 2), (2,), (0,)):
        wire.send(b"do", b"", ranks)
        seen.append(wire.proxy.called())
        list(wire.proxy.hear())
        seen.append(wire.proxy.called())
    assert seen == [False, True, False, True, False, True, False]


def test_in_the_middle_of_a_command_it_knows_what_is_expected(wire):
    wire.send(b"do")
    wire.controller.expect(3, 10)
    assert [number for number in range(12) if wire.proxy.is_expected(number, 1)] == [3, 10, 11]
    wire.controller.expect()
    assert not wire.proxy.is_expected(3, 1000)
    wire.controller.read_block(1)
    assert wire.proxy.blocks_read(1) == 1
    wire.listener.report(9, 0)
    assert wire.proxy.whereabouts(0) == (9, 0)


def test_it_knows_whether_a_command_is_wanted(wire):
    lane = wire.send(b"do")
    assert not wire.proxy.unwanted(1)
    lane.give_up()
    assert wire.proxy.unwanted(1)
    wire.send(b"do")
    assert not wire.proxy.unwanted(1)


def test_the_same_command_again_has_the_edition_of_before_and_no_housekeeping(wire):
    command = b"do"
    lane = wire.send(command, b"news", (1, 2))
    (first,) = wire.proxy.hear()
    wire.proxy.answer(first.number, {1: b"a", 2: b"b"})
    replies = lane.replies()
    lane.send(command, b"")
    (second,) = wire.proxy.hear()
    assert second.edition == first.edition
    assert second.housekeeping == b""
    wire.proxy.answer(second.number, {1: b"a", 2: b"b"})
    assert lane.replies() is replies
    lane.send(b"do else", b"")
    (third,) = wire.proxy.hear()
    assert third.edition != second.edition
    assert third.number > second.number


def test_lanes_have_commands_of_their_own(wire):
    one, two, own = (wire.send(name, b"", ranks) for name, ranks in LANES.items())
    orders = list(wire.proxy.hear())
    assert [(order.ranks, order.command) for order in orders] == [((1,), b"one"), ((2,), b"two")]
    wire.proxy.answer(orders[1].number, {2: b"done"})
    assert two.all_answered()
    assert not one.all_answered()
    assert own.unanswered() == [0]


LANES = {b"one": (1,), b"two": (2,), b"own": (0,)}


def test_the_proxy_wakes_and_is_woken(wire):
    """No side looks again before a second is over, unless the other one wakes it."""

    def serve():
        while not (orders := list(wire.proxy.hear())):
            wire.proxy.sleeping(lambda fds: select.select(fds, [], [], 60))
        wire.proxy.answer(orders[0].number, {1: b"", 2: b""})

    thread = threading.Thread(target=serve)
    thread.start()
    lane = wire.send(b"do", b"", (1, 2))
    assert lane.wait(time.monotonic() + 30, []) == []
    assert lane.unanswered() == []
    thread.join(30)
    assert not thread.is_alive()


def test_it_says_what_its_ranks_do(wire):
    wire.proxy.report(2, 3, 14)
    assert wire.controller.whereabouts(2) == (3, 14)
