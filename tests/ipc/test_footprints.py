"""What a command reads and writes: a rank that has that, and poison elsewhere, does it all the same."""

import pickle
from contextlib import contextmanager
from itertools import pairwise

import numpy as np
import pytest

from support.examples import given, st
from support.homes import POISON, Home, Mirrored
from synkro import messages
from synkro.messages import (
    Ack,
    Assign,
    Call,
    Create,
    Distribute,
    Fill,
    Gpus,
    Reduce,
    Reduction,
    SecuredReplica,
    Start,
    Store,
    StoredPiece,
    TooLong,
    Write,
)
from synkro.plan.call import (
    Broadcast,
    CallPlan,
    Held,
    Items,
    Number,
    Picked,
    Pickled,
    Region,
    Replicated,
    Scattered,
    aligned,
)
from synkro.plan.extents import Extent, Partial, PickedRows, View
from synkro.plan.split import split

SHARE = 4096


@contextmanager
def mirrored(number=0, size=1, host=None):
    """A rank on another host, which has started."""
    home = Mirrored(number, size, host)
    try:
        outbox = Region(home.allocate(size * SHARE), 0, (size, SHARE), "|u1")
        start = Start("token", 1, False, 0, outbox, (None,) * size, None, None, False, None)
        home.view.begin(start.outbox, None)
        assert home.do(start) == messages.Started("")
        yield home
    finally:
        home.close()


def plan_of(inputs, spans, selection=None, **changes):
    usual = dict.fromkeys(("form", "subset", "held")) | {"keywords": (), "slices": 1, "unit": 1}
    world = tuple(range(len(spans)))
    return CallPlan(1, inputs, selection=selection, spans=spans, world=world, **usual | changes)


def call(home, plan, outputs=None):
    """Run a function that keeps copies of what it gets; returns these, of each piece, and the reply."""
    got = []

    def function(*args):
        got.append([pickle.loads(pickle.dumps(arg)) for arg in args])
        return np.asarray(args[0]) * 1

    home.rank.functions[1] = messages.FunctionSpec("f", function, outputs)
    reply = home.do(Call(plan))
    home.rank.end(failed=False)
    return got, reply


def in_outbox(home, reply):
    """The only output, piece by piece, as the main process finds it."""
    base = home.segments[100].base
    (leaf,) = reply.leaves
    rank = home.rank.number
    return [
        np.ndarray(piece.shape, piece.dtype, base, rank * SHARE + piece.offset) for piece in leaf.pieces
    ]


# ── calls ────────────────────────────────────────────────────────────────────────────────────────────


@st.composite
def scattered(draw):
    """An array of which a call takes some rows, as a view of another one, and what it takes."""
    rows = draw(st.integers(1, 12))
    tail = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    whole = np.arange(2 * rows * max(1, np.prod(tail, dtype=int)) * 2).astype(
        draw(st.sampled_from(["<f8", "<i2", "|b1"]))
    )
    array = whole[: 2 * rows * np.prod(tail, dtype=int)].reshape(2 * rows, *tail)
    array = array[draw(st.integers(0, 1)) :: draw(st.sampled_from([1, 2]))][:rows]
    selection = draw(
        st.one_of(
            st.just(range(rows)),
            st.builds(
                lambda start, step: range(rows)[start::step],
                st.integers(0, rows - 1),
                st.sampled_from([1, 2, 3, -1, -2]),
            ),
            st.lists(st.integers(0, rows - 1), min_size=1, max_size=9).map(np.array),
        )
    )
    return whole, array, selection


@given(scattered(), st.integers(1, 4), st.data())
def test_rows_of_inputs(case, size, data):
    whole, array, selection = case
    rank, slices = data.draw(st.integers(0, size - 1)), data.draw(st.integers(1, 3))
    with mirrored(rank, size, range(rank, rank + 1)) as home:
        given = home.give(whole)
        offset = array.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
        region = Region(given.segment, offset, array.shape, array.dtype.str, array.strides)
        if isinstance(selection, range):
            places = np.array(selection)
        else:
            places, selection = selection, Picked(home.give(selection.astype("<i8")))
        picked = array[places]
        batch = home.give(np.ascontiguousarray(picked))
        spans = split(0, len(picked), size)
        inputs = (Scattered(region), Scattered(batch, of_batch=True))
        got, reply = call(home, plan_of(inputs, spans, selection, slices=slices))
        want = picked[slice(*spans[rank])]
        if not len(want):
            assert (got, reply) == ([], messages.Done(None, None))
            return
        for column in zip(*got, strict=True):
            np.testing.assert_array_equal(np.concatenate(column), want)
        np.testing.assert_array_equal(np.concatenate(in_outbox(home, reply)), want)


def test_inputs_that_are_not_scattered():
    with mirrored(1, 2, range(1, 2)) as home:
        table = home.give(np.arange(6.0).reshape(2, 3))
        plain, typed = home.give(np.array(1.5)), home.give(np.array(7, "<i2"))
        replica = home.create(np.arange(4), number=9)
        stream, buffer = pickle.dumps(["text", None]), b"buffer"
        lengths = np.array([1, len(stream), len(buffer)], "<u8")
        room = home.give(np.full(1000, POISON, np.uint8))
        at = 0
        for part in (lengths.tobytes(), stream, buffer):
            home.seen(room)[at : at + len(part)] = np.frombuffer(part, np.uint8)
            at += aligned(len(part))
        inputs = Broadcast(table), Number(plain, True), Number(typed, False), Pickled(room)
        inputs += Replicated(9), Held(9)
        own = home.give(np.array([3, 1, 2]))
        held = range(2), Picked(Region(own.segment, 8, (2,), "<i8"))
        (got,), _ = call(home, plan_of(inputs, ((0, 2), (2, 4)), held=held))
        array, number, other, value, whole, rows = got
        np.testing.assert_array_equal(array, home.seen(table))
        assert (number, other, value) == (1.5, 7, ["text", None])
        assert type(other) is np.int16
        np.testing.assert_array_equal(whole, replica.value)
        assert rows.tolist() == [1, 2]
        (read,) = home.view.reads(call_of(home, inputs[3]), [1])
        assert read.stop < room.shape[0]  # as much as there is, not all that has been reserved


def call_of(home, *inputs):
    return Call(plan_of(inputs, ((0, 1), (1, 2))))


@pytest.mark.parametrize("strings", [True, False])
@pytest.mark.parametrize("selection", [range(5), range(4, -2, -2), [3, 0, 3, 1], None])
def test_items_of_lists(strings, selection):
    values = ["", "a", "häßlich", "", "four"] if strings else [1, None, {"a": 2}, (), "four"]
    dump = str.encode if strings else pickle.dumps
    stream = b"".join(map(dump, values))
    ends = np.cumsum([0, *(len(dump(value)) for value in values)])
    indices = range(5)
    with mirrored(1, 2, range(1, 2)) as home:
        places = home.give(np.array(list(pairwise(ends))))
        memory = home.give(np.frombuffer(stream, "u1"))
        if isinstance(selection, range):
            indices = selection
        elif selection is not None:
            indices, selection = selection, Picked(home.give(np.array(selection)))
        item = Items(places, selection is None, memory, strings)
        spans = split(0, len(indices), 2)
        array = home.give(np.arange(len(indices)))
        plan = plan_of((Scattered(array, True), item), spans, selection or range(5))
        home.rank.functions[1] = messages.FunctionSpec("f", lambda x, items: got.append(items), None)
        got = []
        home.do(Call(plan))
        home.rank.end(failed=False)
        assert got == [[values[index] for index in list(indices)[slice(*spans[1])]]]


def test_a_rank_without_rows_reads_nothing():
    with mirrored(1, 2, range(1, 2)) as home:
        inputs = Scattered(home.give(np.arange(1.0))), Broadcast(home.give(np.arange(9.0)))
        plan = plan_of(inputs, ((0, 1), (1, 1)), Picked(home.give(np.array([0]))))
        assert list(home.view.reads(Call(plan), [1])) == []
        assert len(list(home.view.reads(Call(plan), [0, 1]))) == 3


def test_ranks_of_one_host_read_their_rows_at_once():
    home = Home()
    array = home.give(np.arange(20.0))
    view = View(home.seen)
    plan = plan_of((Scattered(array),), split(0, 10, 5), range(15, 5, -1))
    assert list(view.reads(Call(plan), [1, 2, 4])) == [
        Extent(array.segment, 8 * 10, 8 * 14),
        Extent(array.segment, 8 * 6, 8 * 8),
    ]
    odd = plan_of((Scattered(array),), split(0, 10, 5), range(0, 20, 2))
    (rows,) = view.reads(Call(odd), [0])
    assert isinstance(rows, PickedRows)
    assert rows.rows.tolist() == [0, 2]
    home.close()


@given(st.integers(1, 3), st.data())
def test_large_outputs(size, data):
    """Store and Reduce on two hosts: the stages lie where they were stored, and partials are merged."""
    op = data.draw(st.sampled_from(["sum", "mean", "max"]))
    values = [np.arange(6.0) * (rank + 1) for rank in range(size)]
    number = data.draw(st.integers(0, size - 1))
    with mirrored(number, size, range(number, number + 1)) as home:
        stages = [Region(home.allocate(48), 0, (6,), "<f8") for _ in range(size)]
        target = Region(home.allocate(64), 16, (6,), "<f8")
        if data.draw(st.booleans()):  # the first rank of a host stores where it reduces
            stages[number] = target
        gathered = Region(home.allocate(48 * size), number * 48, (6,), "<f8")
        home.rank.keep([[values[number]], [values[number]]])
        placements = [()] * size
        stored = StoredPiece(0, 0, stages[number], True), StoredPiece(1, 0, gathered, False)
        placements[number] = stored
        assert home.do(Store(tuple(placements))) == Ack()
        np.testing.assert_array_equal(home.seen(gathered), values[number])
        everyone = tuple(range(size))
        reduction = Reduction(op, 3, everyone, tuple(stages), target)
        assert home.do(Reduce((reduction,), everyone)) == Ack()
        mine = home.mirrors[target.segment].array(target)
        if size == 1:
            assert home.partials == []
            mine = home.seen(target)
        else:
            assert home.partials == [Partial(op, 3, target, everyone)]
        divisor = 3 if size == 1 and op == "mean" else 1
        np.testing.assert_array_equal(mine, values[number] / divisor)
        others = tuple(rank for rank in everyone if rank != number)
        elsewhere = Reduction(op, 3, others, tuple(stages[rank] for rank in others), target)
        if others:  # the ranks of this host have nothing to reduce
            mine[...] = 7
            assert home.do(Reduce((elsewhere,), everyone)) == Ack()
            assert (mine == 7).all()
            assert len(home.partials) == 1


def test_what_gpus_have_reduced_comes_in_parts():
    reduction = Reduction("sum", 1, (), (), Region(5, 64, (2, 5), "<f4"), 0)
    command = Reduce((reduction,), (0, 2, 3))
    parts = [*View(None).writes(command, {2: Ack(), 1: Ack(), 3: Ack()})]
    assert sorted(parts) == [Extent(5, 64 + 16, 64 + 32), Extent(5, 64 + 32, 64 + 40)]
    assert [*View(None).writes(Reduce((reduction,), tuple(range(11))), {10: Ack()})] == []


def test_what_is_too_long_to_say_leaves_the_whole_outbox():
    with mirrored(1, 2) as home:
        assert [*home.view.writes(call_of(home), {1: TooLong(9)})] == [Extent(100, SHARE, 2 * SHARE)]


# ── all other commands ───────────────────────────────────────────────────────────────────────────────


def test_variables():
    with mirrored(1, 2, range(1, 2)) as home:
        replica = home.create(np.arange(6.0).reshape(2, 3))
        np.testing.assert_array_equal(replica.value, np.arange(6.0).reshape(2, 3))
        source = home.give(np.arange(30.0).reshape(10, 3))
        for selection, rows in ((range(9, -1, -3), [3, 0]), (None, slice(None))):
            spans = ((0, 2), (2, 4)) if selection else (None, (0, 10))
            home.do(Write((Fill(1, source, selection, spans),)))
            np.testing.assert_array_equal(replica.value, home.seen(source)[rows])
        picked = Picked(home.give(np.array([5, 6, 7, 8])))
        home.do(Write((Fill(1, source, picked, ((0, 1), (1, 4))),)))
        np.testing.assert_array_equal(replica.value, home.seen(source)[6:9])
        home.do(Write((Fill(1, source, None, ((0, 10), None)),)))
        np.testing.assert_array_equal(replica.value, home.seen(source)[6:9])
        shown = home.do(messages.Read((1,), (1,), "gather", False))
        np.testing.assert_array_equal(in_outbox(home, shown)[0], replica.value)
        raised = home.do(messages.Read((1,), (1,), "gather", True))
        np.testing.assert_array_equal(in_outbox(home, raised)[0], replica.value[None])
        assert home.do(messages.Read((1,), (0,), "gather", True)) == messages.Done(None, None)


def test_variables_of_a_worker_that_has_died():
    """What ``Secure`` has found on one worker, ``Restore`` makes anew on another."""
    with mirrored(0, 1) as home:
        values = {1: np.arange(6.0).reshape(2, 3), 2: np.array(7, "<i2"), 3: np.zeros((0, 4), "f4")}
        pairs = []
        for number, value in values.items():
            was = SecuredReplica(number, f"v{number}", number == 3, 0, value.shape, value.dtype.str)
            pairs.append((was, home.give(value)))
        home.do(messages.Restore(tuple(pairs), None))
        for number, value in values.items():
            replica = home.rank.variables[number]
            assert (replica.name, replica.value.dtype) == (f"v{number}", value.dtype)
            np.testing.assert_array_equal(replica.value, value)
        secured = home.do(messages.Secure(None, 0, (), ()))
        assert [each._replace(place=0) for each in secured.replicas] == [was for was, _ in pairs]
        assert (secured.called, secured.generator, secured.objects) == (False, None, ())


def test_variables_are_as_they_were_kept():
    """``Revert`` undoes what has been written since the last ``Secure``, or the one before."""
    with mirrored(0, 1) as home:
        replica = home.create(np.arange(6.0).reshape(2, 3))
        for time in (1, 2):
            replica.value[:] = time
            home.do(messages.Secure(time, time - 1, (), ()))
        for time in (2, 1):
            replica.value = np.full((4, 3), 9.0)
            home.do(messages.Revert(time))
            np.testing.assert_array_equal(replica.value, np.full((2, 3), float(time)))


def test_functions_bring_their_arrays():
    with mirrored() as home:
        memory = home.give(np.arange(100, dtype=np.uint8))
        parcel = messages.Parcel(b"", memory.segment, ((8, 20), (64, 65)))
        wanted = [Extent(memory.segment, 8, 20), Extent(memory.segment, 64, 65)]
        others = [kind(parcel) for kind in (messages.Renew, messages.Compare, messages.Changes)]
        for command in (Distribute(parcel, (), "", {}), *others):
            assert [*home.view.reads(command, [0])] == wanted
        assert [*home.view.reads(messages.Renew(messages.Parcel(b"", None, ())), [0])] == []


def test_a_command_in_another_one():
    with mirrored(1, 3) as home:
        inner = Create(5, None, home.give(np.arange(3.0)))
        value = Extent(inner.value.segment, 0, 24)
        assert [*home.view.reads(Assign({}, [], pickle.dumps(inner)), [1])] == [value]
        payload = pickle.dumps(inner)
        long = messages.Indirect(home.give(np.frombuffer(payload, np.uint8)))
        itself = Extent(long.region.segment, 0, len(payload))
        assert [*home.view.reads(long, [1])] == [itself, value]
        row = Region(7, 10, (3, 5), "|u1")
        late = Assign({}, [], pickle.dumps(messages.Deliver(row)))
        assert [*home.view.writes(late, {1: Ack()})] == [Extent(7, 15, 20)]


def test_a_map_reads_what_its_items_have_in_common():
    with mirrored() as home:
        table = home.give(np.arange(4.0))
        plan = plan_of((Broadcast(table),), ((0, 1),), keywords=("table",))
        work = messages.Work(plan, (1, 2), 0, 0, False, None, {})
        assert [*home.view.reads(work, [0])] == [Extent(table.segment, 0, 32)]


def test_gpus_look_at_the_versions_of_what_they_read():
    home = Home()
    versions, value = home.give(np.zeros(4, "<u8")), home.give(np.arange(3.0))
    start = Start("", 1, False, 0, versions, (None,), Gpus((0,), False, None), None, False, versions)
    view = View(home.seen)
    view.begin(start.outbox, start.versions)
    assert [*view.reads(messages.Release(), [0])] == []
    at = versions.offset + 8 * (value.segment % 4)
    contents, version = Extent(value.segment, 0, 24), Extent(versions.segment, at, at + 8)
    payload = home.give(np.frombuffer(pickle.dumps(Create(5, None, value)), np.uint8))
    for command in (Create(5, None, value), Assign({}, [], pickle.dumps(Create(5, None, value)))):
        assert [*view.reads(command, [0])] == [contents, version]
    assert [*view.reads(messages.Indirect(payload), [0])][-1].segment == versions.segment
    home.close()


def test_on_a_trusted_network_numbers_are_bare_and_nothing_else():
    """What is unpickled, and what says where something lies, has a digest."""
    home = Home()

    def reads(command):
        return [piece.bare for piece in View(home.seen, trusted).reads(command, [0])]

    array, picked = home.give(np.arange(20.0)), Picked(home.give(np.array([3, 1])))
    room = home.give(np.array([1, 8, 8], "<u8").view(np.uint8))
    items = Items(home.give(np.array([[0, 8], [8, 16]])), True, room, False)
    payload = home.give(np.frombuffer(pickle.dumps(messages.Release()), np.uint8))
    parcel = messages.Parcel(b"", array.segment, ((8, 16),))
    stored = Store(((StoredPiece(0, 0, array, False),),))
    reduced = Reduction("sum", 1, (0,), (array,), array)
    for trusted in (False, True):
        for command in (
            Call(plan_of((Scattered(array), Scattered(array, True)), ((0, 2),), range(2))),
            Call(plan_of((Scattered(array),), ((0, 2),), range(0, 6, 3))),
            Call(plan_of((Broadcast(array), Number(array, True)), ((0, 2),))),
            messages.Replay(plan_of((Scattered(array),), ((0, 2),), range(2)), 0, None, b"", False),
            Create(5, None, array),
            Write((Fill(1, array, None, ((0, 2),)), Fill(1, array, range(1, 3), ((0, 2),)))),
        ):
            assert set(reads(command)) == {trusted}
        for command in (
            Call(plan_of((items, Pickled(room)), ((0, 2),), range(2))),
            *(messages.Indirect(payload), Distribute(parcel, (), "", {}), messages.Renew(parcel)),
        ):
            assert set(reads(command)) == {False}
        chosen = Call(plan_of((Scattered(array),), ((0, 2),), picked))
        assert reads(chosen) == [False, trusted]  # the indices, and the rows
        view = View(home.seen, trusted)
        for owners in ((0,), (0, 1)):
            reduce = Reduce((reduced._replace(owners=owners),), (0, 1))
            (part,) = view.writes(reduce, {0: Ack()})
            assert part.bare is trusted
        for command, reply in ((stored, Ack()), (messages.Release(), TooLong(9))):
            assert {piece.bare for piece in view.writes(command, {0: reply})} <= {False}
    home.close()


SAY_ALL = """Fetch Preserve Keep Move Inspect Identify Export Secure Revert Copy Recover Initialize
Exchange Reseed Generator Release Exit"""
WITH_A_TEST = """Call Work Replay Read Store Reduce Create Write Distribute Renew Compare Changes Assign
Indirect Deliver Start Restore"""


def test_every_command_has_its_case():
    """What names memory says what of it is read or written, in a test above."""
    bases = {messages.Command, messages.objects.Parcelled, messages.calls.OfPlan}
    kinds = {kind for base in bases for kind in base.__subclasses__()} - bases
    assert {kind.__name__ for kind in kinds} == {*SAY_ALL.split(), *WITH_A_TEST.split()}
    for name in SAY_ALL.split():
        command = getattr(messages, name).__new__(getattr(messages, name))
        assert [*View(None).reads(command, [0])] == []
        assert [*View(None).writes(command, {0: Ack()})] == []
