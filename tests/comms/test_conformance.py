"""One conformance class for every communicator: world sizes, dtypes, operations, odd lengths.

The ranks are threads, over the memory of one host or of several; the code under test cannot tell.
"""

import itertools
import os

import numpy as np
import pytest

from support.together import good
from support.worlds import HostsWorld, ShmWorld, serial
from synkro.comms.ops import OPERATIONS
from synkro.errors import CollectiveError
from synkro.plan.split import split

DTYPES = ["?", "i1", "u2", "i4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]
SIZES = [1, 2, 3, 4]
LENGTHS = [0, 1, 2, 5, 64, 1000]
SUM = OPERATIONS["sum"]


WORLDS = [(ShmWorld, size) for size in SIZES]
LAYOUTS = [(1, 1), (2, 2), (3, 1), (1, 1, 2)]
WORLDS += [pytest.param((HostsWorld, layout), marks=pytest.mark.hosts) for layout in LAYOUTS]


def called(world):
    """Its name in a test's."""
    _, size = world
    return f"{size} ranks" if isinstance(size, int) else "hosts of " + "+".join(map(str, size))


def worlds(params, scope="module"):
    """A fixture: a world of each of these."""

    @pytest.fixture(scope=scope, params=params, ids=called)
    def world(request):
        make, size = request.param
        world = make(size)
        yield world
        world.close()

    return world


world = worlds(WORLDS)
several = worlds(WORLDS[1:])  # of more than one rank
pair = worlds([(ShmWorld, 2), (HostsWorld, (1, 1))], "function")


def values(rank, shape, dtype, seed=0):
    """Arbitrary values that are the same whoever asks: small integers, so that nothing is rounded."""
    rng = np.random.default_rng((rank, seed))
    integers = rng.integers(0 if np.dtype(dtype).kind in "?bu" else -3, 4, shape)
    made = integers.astype(dtype)
    return (
        made + 1j * integers[..., ::-1].astype(dtype) if np.dtype(dtype).kind == "c" and shape else made
    )


def who(comm):
    """How many ranks there are, and the places of all."""
    return comm.count, comm.all_gather([np.array([comm.place])])[0]


def check(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
class TestConformance:
    @pytest.mark.parametrize("op", OPERATIONS)
    def test_all_reduce(self, world, op):
        types = list(itertools.product(DTYPES, LENGTHS))
        inputs = [
            [values(rank, (length,), dtype) for dtype, length in types] for rank in range(world.size)
        ]

        def body(comm):
            return [comm.all_reduce([array], OPERATIONS[op], 1)[0] for array in inputs[comm.place]]

        wants = [serial(op, arrays, [1] * world.size) for arrays in zip(*inputs, strict=True)]
        for results in good(world.run(body)):
            for result, want in zip(results, wants, strict=True):
                check(result, want)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_weighted_mean_counts_a_rank_as_often_as_it_weighs(self, world, dtype):
        inputs = [values(rank, (7,), dtype) for rank in range(world.size)]
        mean = OPERATIONS["mean"]
        results = good(
            world.run(lambda comm: comm.all_reduce([inputs[comm.place]], mean, comm.place + 1)[0])
        )
        want = serial("mean", inputs, [rank + 1 for rank in range(world.size)])
        for result in results:
            check(result, want)

    def test_several_arrays_of_several_shapes_and_dtypes_at_once(self, world):
        shapes = [((3, 2), "f4"), ((), "f8"), ((0,), "i8"), ((1000,), "i4"), ((1,), "c8")]
        inputs = [
            [values(rank, shape, dtype, 9) for shape, dtype in shapes] for rank in range(world.size)
        ]
        results = good(world.run(lambda comm: comm.all_reduce(inputs[comm.place], SUM, 1)))
        for result in results:
            for index, got in enumerate(result):
                check(got, serial("sum", [mine[index] for mine in inputs], [1] * world.size))

    @pytest.mark.parametrize(
        ("op", "dtype"),
        [
            (op, dtype)
            for op, dtype in itertools.product(OPERATIONS, ["f2", "f4", "f8", "i4", "c16"])
            if (op, dtype) != ("mean", "i4")  # that mean is no integer
        ],
    )
    def test_all_reduce_in_place(self, world, op, dtype):

        def body(comm):
            arrays = [comm.empty((length,), dtype) for length in LENGTHS]
            for length, array in zip(LENGTHS, arrays, strict=True):
                array[...] = values(comm.place, (length,), dtype)
            comm.all_reduce_in_place(arrays, OPERATIONS[op])
            return arrays

        for result in good(world.run(body)):
            for length, got in zip(LENGTHS, result, strict=True):
                inputs = [values(rank, (length,), dtype) for rank in range(world.size)]
                check(got, serial(op, inputs, [1] * world.size))

    @staticmethod
    def summed(world):
        """Long vectors of floats, and their sums on each rank: a new one, and one in place."""
        inputs = [np.random.default_rng(rank).standard_normal(100_003) for rank in range(world.size)]

        def body(comm):
            mine = comm.empty((100_003,), "f8")
            mine[...] = inputs[comm.place]
            new = comm.all_reduce([inputs[comm.place]], SUM, 1)[0]
            comm.all_reduce_in_place([mine], SUM)
            return new, mine

        return inputs, good(world.run(body))

    def test_floats_are_added_in_the_order_of_the_ranks(self, world):
        inputs, sums = self.summed(world)
        want = world.total("sum", inputs, [1] * world.size)
        for new, mine in sums:
            check(new, want)
            check(mine, want)

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_reduce_gives_the_root_alone_what_all_reduce_gives_all(self, world, op):
        inputs = [values(rank, (5, 3), "f4") for rank in range(world.size)]
        for root in range(world.size):

            def body(comm, root=root):
                return comm.reduce([inputs[comm.place]], OPERATIONS[op], 1, root)

            for place, result in enumerate(good(world.run(body))):
                if place == root:
                    check(result[0], serial(op, inputs, [1] * world.size))
                else:
                    assert result is None

    @pytest.mark.parametrize("op", OPERATIONS)
    def test_reduce_scatter(self, world, op):
        for dtype, rows in itertools.product(["?", "i4", "f2", "f8"], [0, 1, 3, 10]):
            inputs = [values(rank, (rows, 3), dtype) for rank in range(world.size)]
            want = serial(op, inputs, [1] * world.size)

            def body(comm, inputs=inputs):
                return comm.reduce_scatter([inputs[comm.place]], OPERATIONS[op], 1)[0]

            spans = split(0, rows, world.size)
            for result, (start, stop) in zip(good(world.run(body)), spans, strict=True):
                check(result, want[start:stop])

    def test_broadcast(self, world):
        for root, dtype in itertools.product(range(world.size), DTYPES):
            given = [values(7, (4, 2), dtype), values(8, (), dtype), values(9, (0, 3), dtype)]

            def body(comm, root=root, given=given):
                return comm.broadcast(given if comm.place == root else None, root)

            for result in good(world.run(body)):
                for got, want in zip(result, given, strict=True):
                    check(got, want)

    @pytest.mark.parametrize("tail", [(), (3,), (0,), (2, 2)])
    def test_gathers_of_different_lengths(self, world, tail):
        root = world.size - 1
        for dtype in DTYPES:
            inputs = [values(rank, ((rank * 5) % 4, *tail), dtype) for rank in range(world.size)]
            want = np.concatenate(inputs)

            def body(comm, inputs=inputs):
                mine = [inputs[comm.place]]
                return comm.all_gather(mine), comm.gather(mine, root)

            for place, (everywhere, at_root) in enumerate(good(world.run(body))):
                check(everywhere[0], want)
                if place == root:
                    check(at_root[0], want)
                else:
                    assert at_root is None

    def test_scalars_are_gathered_as_rows(self, world):
        results = good(world.run(lambda comm: comm.all_gather([np.float32(comm.place)])))
        for result in results:
            want = np.arange(world.size, dtype="f4")
            check(result[0] if world.size > 1 else np.atleast_1d(result[0]), want)

    @pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 11])
    def test_scatter(self, world, rows):
        given = [values(1, (rows, 2), "f8"), values(2, (rows,), "i4")]
        for root in range(world.size):

            def body(comm, root=root):
                return comm.scatter(given if comm.place == root else None, root)

            spans = split(0, rows, world.size)
            for result, (start, stop) in zip(good(world.run(body)), spans, strict=True):
                for got, whole in zip(result, given, strict=True):
                    check(got, whole[start:stop])

    def test_all_to_all_transposes_the_blocks(self, world):
        inputs = [values(rank, (3 + 4 * rank, 2), "f4") for rank in range(world.size)]
        results = good(world.run(lambda comm: comm.all_to_all([inputs[comm.place]])[0]))
        for place, result in enumerate(results):
            pieces = []
            for array in inputs:
                start, stop = split(0, len(array), world.size)[place]
                pieces.append(array[start:stop])
            check(result, np.concatenate(pieces))

    def test_messages_arrive_in_order_and_need_not_be_waited_for(self, several):
        shapes = [(), (3,), (0, 2), (100, 100), (1,) * 20]

        def body(comm):
            right, left = (comm.place + 1) % comm.count, (comm.place - 1) % comm.count
            for turn, shape in enumerate(shapes):
                comm.send(values(comm.place, shape, "f8", turn), right)
            return [comm.recv(left) for _ in shapes]

        for _ in range(3):
            for place, result in enumerate(good(several.run(body))):
                for turn, (got, shape) in enumerate(zip(result, shapes, strict=True)):
                    check(got, values((place - 1) % several.size, shape, "f8", turn))

    def test_exchange(self, world):
        def body(comm):
            other = comm.count - 1 - comm.place
            given = values(comm.place, (3 + comm.place, 2), "f4" if comm.place else "i2")
            first = comm.exchange(given, other)
            for number in range(20):
                assert comm.exchange(np.array(number + comm.place), other) == number + other
            return first, comm.exchange(given, comm.place), given

        for place, (got, own, given) in enumerate(good(world.run(body))):
            other = world.size - 1 - place
            check(got, values(other, (3 + other, 2), "f4" if other else "i2"))
            check(own, given)
            assert own is not given

    def test_a_full_box_waits_until_it_is_emptied(self, several):

        def body(comm):
            if comm.place == 0:
                for number in range(100):
                    comm.send(np.array(number), 1)
            elif comm.place == 1:
                return [int(comm.recv(0)) for _ in range(100)]
            return None

        assert good(several.run(body))[1] == list(range(100))

    def test_what_nobody_received_is_forgotten_with_its_call(self, several):
        right = lambda comm: (comm.place + 1) % comm.count  # noqa: E731
        good(several.run(lambda comm: comm.send(np.array(-1), right(comm))))

        def body(comm):
            comm.send(np.array(comm.place), right(comm))
            return int(comm.recv((comm.place - 1) % comm.count))

        assert good(several.run(body)) == [(p - 1) % several.size for p in range(several.size)]

    def test_nobody_passes_a_barrier_before_all_are_there(self, world, tmp_path):
        path = str(tmp_path / "arrived")

        def body(comm):
            file = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
            for turn in range(50):
                os.write(file, b".")
                comm.barrier()
                assert os.path.getsize(path) == comm.count * (turn + 1)
                comm.barrier()
            os.close(file)

        good(world.run(body))

    def test_many_collectives_in_one_call(self, world):
        def body(comm):
            total = np.zeros(3)
            for turn in range(200):
                total += comm.all_reduce([np.full(3, comm.place + turn)], SUM, 1)[0]
                if turn % 7 == comm.place:
                    total = total.copy()
                total = comm.broadcast([total], turn % comm.count)[0]
            return total

        per_turn = sum(range(world.size))
        want = np.full(3, 200 * per_turn + world.size * sum(range(200)), float)
        for result in good(world.run(body)):
            check(result, want)

    def test_some_of_the_ranks(self, world):
        for ranks in [(0,), tuple(range(world.size - 1, world.size)), tuple(range(0, world.size, 2))]:
            for count, got in good(world.run(who, ranks)):
                assert count == len(ranks)
                assert got.tolist() == list(range(len(ranks)))


DO_NOT_FIT = {
    "shapes": (
        lambda comm: comm.all_reduce([np.zeros(2 + comm.place)], SUM, 1),
        ["shape (2,)", "shape (3,)", "rank 1", "all_reduce"],
    ),
    "dtypes": (
        lambda comm: comm.reduce([np.zeros(2, ("f4", "f8")[comm.place])], OPERATIONS["max"], 1, 0),
        ["float32", "float64"],
    ),
    "dtypes of one partial dtype": (
        lambda comm: comm.all_reduce([np.zeros(2, ("i4", "i8")[comm.place])], OPERATIONS["mean"], 1),
        ["int32", "int64"],
    ),
    "operations": (
        lambda comm: comm.all_reduce([np.zeros(2)], OPERATIONS[("sum", "max")[comm.place]], 1),
        ['"sum"', '"max"'],
    ),
    "collectives": (
        lambda comm: comm.barrier() if comm.place else comm.all_gather([np.zeros(2)]),
        ["barrier", "all_gather"],
    ),
    "roots": (
        lambda comm: comm.broadcast([np.zeros(2)], comm.place),
        ["from or to rank 0", "from or to rank 1"],
    ),
    "numbers of arrays": (
        lambda comm: comm.all_reduce([np.zeros(2)] * (1 + comm.place), SUM, 1),
        ["rank 0 gave"],
    ),
    "rows": (lambda comm: comm.all_gather([np.zeros((2, 1 + comm.place))]), ["(2, 2)"]),
    "no rows": (lambda comm: comm.scatter([np.array(3.0)], 0), ["without dimensions"]),
}

CIRCLES = {
    "both receive": lambda comm: comm.recv(1 - comm.place),
    "one receives, one waits": lambda comm: comm.barrier() if comm.place else comm.recv(1),
    "both send too much": lambda comm: [comm.send(np.zeros(1), 1 - comm.place) for _ in range(100)],
}


class TestWhatDoesNotFit:
    """Every rank is told, nobody hangs, and the next call works."""

    @pytest.fixture(autouse=True)
    def works(self, pair):
        yield
        good(pair.run(lambda comm: comm.barrier()))

    @pytest.mark.parametrize("what", DO_NOT_FIT)
    def test_other(self, pair, what):
        body, words = DO_NOT_FIT[what]
        outcomes = pair.run(body)
        assert [type(outcome) for outcome in outcomes] == [CollectiveError] * 2, outcomes
        for word in words:
            assert any(word in str(outcome) for outcome in outcomes), (word, outcomes)

    def test_who_goes_on_after_an_error_stays_in_step(self, pair):
        def body(comm):
            with pytest.raises(CollectiveError):
                comm.all_reduce([np.zeros(2 + comm.place)], SUM, 1)
            return comm.all_reduce([np.ones(2)], SUM, 1)[0].tolist()

        assert good(pair.run(body)) == [[2, 2], [2, 2]]

    def stranded(self, outcome, strays, *words):
        assert isinstance(outcome, CollectiveError)
        assert outcome.strays == strays
        for word in words:
            assert word in str(outcome)

    def test_a_rank_that_returns_strands_nobody(self, pair):
        outcomes = pair.run(lambda comm: None if comm.place else comm.barrier())
        self.stranded(outcomes[0], False, "rank 1 returned", "barrier")

    def test_a_rank_that_fails_strands_nobody(self, pair):
        def body(comm):
            comm.barrier()
            if comm.place:
                raise ZeroDivisionError
            comm.all_reduce([np.zeros(1)], SUM, 1)

        outcomes = pair.run(body)
        assert isinstance(outcomes[1], ZeroDivisionError)
        self.stranded(outcomes[0], True, "rank 1 failed", "all_reduce (collective 2")

    def test_a_rank_that_never_sends(self, pair):
        outcomes = pair.run(lambda comm: None if comm.place else comm.recv(1))
        self.stranded(outcomes[0], False, "recv from rank 1")

    @pytest.mark.parametrize("what", CIRCLES)
    def test_ranks_that_wait_for_each_other_are_told(self, pair, what):
        outcomes = pair.run(CIRCLES[what])
        assert all(isinstance(outcome, CollectiveError) for outcome in outcomes)
        assert any("wait for each other" in str(outcome) for outcome in outcomes)
