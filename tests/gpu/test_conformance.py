"""The conformance of communicators, where the ranks are GPU workers."""

import cloudpickle
import numpy as np
import pytest

import synkro.here
from comms import test_conformance as cpu
from support.gpus import MOST, pools, serving
from support.together import good
from synkro.comms.ops import OPERATIONS


class OnDevice:
    """A communicator that takes NumPy arrays and gives NumPy arrays, and moves device arrays."""

    def __init__(self, comm, xp):
        self.comm = comm
        self.xp = xp
        self.twins = []  # arrays of the host, each with that of the device that stands for it

    place = property(lambda self: self.comm.place)
    count = property(lambda self: self.comm.count)

    def there(self, value):
        if isinstance(value, list | tuple):
            return [self.there(each) for each in value]
        return None if value is None else self.xp.asarray(value)

    def here(self, value):
        if isinstance(value, list | tuple):
            return [self.here(each) for each in value]
        if value is None:
            return None
        assert isinstance(value, self.xp.ndarray), type(value)  # where it came from
        return value.get()

    def empty(self, shape, dtype):
        device = self.comm.empty(shape, dtype)
        assert isinstance(device, self.xp.ndarray)
        host = np.empty(shape, dtype)
        self.twins.append((host, device))
        return host

    def all_reduce_in_place(self, arrays, operation):
        devices = [next(d for h, d in self.twins if h is array) for array in arrays]
        for array, device in zip(arrays, devices, strict=True):
            device.set(array)
        self.comm.all_reduce_in_place(devices, operation)
        for array, device in zip(arrays, devices, strict=True):
            array[...] = device.get()

    def send(self, array, to):
        self.comm.send(self.there(array), to)

    def recv(self, source):
        return self.here(self.comm.recv(source))

    def barrier(self):
        self.comm.barrier()

    def __getattr__(self, name):
        method = getattr(self.comm, name)
        return lambda arrays, *args: self.here(method(self.there(arrays), *args))


def carried_out(body):
    """Run *body* on this rank; its outcome stays here, and goes home as bytes where all is well."""
    replica = synkro.here.rank
    replica.test_outcome = cloudpickle.dumps(None)
    try:
        outcome = body(OnDevice(replica.comm, synkro.xp()))
    except Exception as error:
        replica.test_outcome = cloudpickle.dumps(error)
        raise
    replica.test_outcome = cloudpickle.dumps(outcome)
    return np.frombuffer(replica.test_outcome, np.uint8)


def told():
    return np.frombuffer(synkro.here.rank.test_outcome, np.uint8)


class GpuWorld:
    """GPU workers: what the rank of a thread would do, a function does on them."""

    def __init__(self, session):
        self.session = session
        self.size = session.n_parallel
        self.told = session.function(told, outputs=None)

    def run(self, body, ranks=None):
        """``body(comm)`` on the first ranks, all of them by default: results or exceptions, by rank."""
        count = self.size if ranks is None else len(ranks)
        assert ranks is None or tuple(ranks) == tuple(range(count))

        def work(rows):
            return carried_out(body)

        try:
            outcomes = self.session.function(work, outputs=None)(np.zeros(count))
        except synkro.WorkerError:
            outcomes = self.told()
        return [cloudpickle.loads(outcome.tobytes()) for outcome in outcomes[:count]]


@pytest.fixture(scope="module", params=MOST)
def world(request):
    with serving(request.param) as session:
        world = GpuWorld(session)
        world.link = request.param.link
        yield world


@pytest.fixture
def several(world):
    """A world of more than one rank."""
    if world.size == 1:
        pytest.skip("one rank sends nothing")
    return world


@pytest.fixture(scope="module", params=pools("two", "sockets"))
def pair(request):
    with serving(request.param) as session:
        yield GpuWorld(session)


class TestConformance(cpu.TestConformance):
    """The class of all communicators; below, what must be asked otherwise of processes."""

    def test_floats_are_added_in_the_order_of_the_ranks(self, world):
        """NCCL adds in an order of its own, the same on all ranks and each time."""
        inputs, sums = self.summed(world)
        want = cpu.serial("sum", inputs, [1] * world.size)
        for new, mine in sums:
            np.testing.assert_allclose(new, want, rtol=0, atol=1e-14 * world.size)
            cpu.check(new, sums[0][0])
            cpu.check(mine, sums[0][0])
        for (new, _), (again, _) in zip(sums, self.summed(world)[1], strict=True):
            cpu.check(new, again)

    def test_some_of_the_ranks(self, world):
        for count in range(1, world.size + 1):
            for found, got in good(world.run(cpu.who, tuple(range(count)))):
                assert found == count
                assert got.tolist() == list(range(count))


class TestWhatDoesNotFit(cpu.TestWhatDoesNotFit):
    """Every rank is told, nobody hangs, and the next call works."""


LAYOUTS = {
    "F": lambda a: a.copy("F"),
    "every other": lambda a: a[::2],
    "backwards": lambda a: a[::-1],
    "column": lambda a: a[:, 1],
}


def reduced(inputs, op):
    return lambda comm: comm.all_reduce([inputs[comm.place]], OPERATIONS[op], 1)[0]


class TestOnTheDevice:
    """What only device arrays have."""

    @pytest.mark.parametrize("op", OPERATIONS)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_any_strides(self, world, op, layout):
        inputs = [cpu.values(rank, (6, 4), "f4") for rank in range(world.size)]
        view = LAYOUTS[layout]

        def body(comm):
            comm, xp = comm.comm, comm.xp
            mine = view(xp.asarray(inputs[comm.place]))
            first = comm.all_reduce([mine], OPERATIONS[op], 1)[0]
            rows = comm.all_gather([mine])[0]
            share = comm.reduce_scatter([mine], OPERATIONS[op], 1)[0]
            root = comm.broadcast([mine] if comm.place == 0 else None, 0)[0]
            return [each.get() for each in (first, rows, share, root, mine)]

        cut = [view(array) for array in inputs]
        want = cpu.serial(op, cut, [1] * world.size)
        results = good(world.run(body))
        for (first, rows, _, root, mine), given in zip(results, cut, strict=True):
            cpu.check(first, want)
            cpu.check(rows, np.concatenate(cut))
            cpu.check(root, cut[0])
            cpu.check(mine, given)  # what went in is as it was
        cpu.check(np.concatenate([result[2] for result in results]), want)

    def test_results_are_new(self, world):
        """What a collective gave is not what the next one works on."""

        def body(comm):
            results = [
                comm.all_reduce([np.full(3, float(i))], OPERATIONS["max"], 1)[0] for i in range(9)
            ]
            given = np.arange(3.0)
            kept = comm.broadcast([given], 0)[0]
            kept += 1
            return results, given

        for results, given in good(world.run(body)):
            assert [result.tolist() for result in results] == [[i] * 3 for i in range(9)]
            assert given.tolist() == [0, 1, 2]

    @pytest.mark.parametrize("op", ["sum", "mean", "prod"])
    def test_float16_accumulates_in_float32(self, world, op):
        """Terms that float16 would lose, one by one, beside the first."""
        first = {"sum": 2048, "mean": 2048, "prod": 1.001}[op]
        inputs = [
            np.array([1 if rank and op != "prod" else first, 3, 0.5], "f2") for rank in range(world.size)
        ]
        wide = [array.astype("f4") for array in inputs]
        want = getattr(np, op)(wide, axis=0).astype("f2")
        for result in good(world.run(reduced(inputs, op))):
            cpu.check(result, want)

    @pytest.mark.parametrize("op", ["max", "min"])
    @pytest.mark.parametrize("dtype", ["f2", "f4", "f8", "c8"])
    def test_nan_is_carried(self, world, op, dtype):
        inputs = [cpu.values(rank, (5,), dtype) for rank in range(world.size)]
        for rank, array in enumerate(inputs):
            array[rank % 5] = np.nan
        want = cpu.serial(op, inputs, [1] * world.size)
        assert np.isnan(want).any()
        for result in good(world.run(reduced(inputs, op))):
            cpu.check(result, want)

    def test_a_rank_of_weight_zero_counts_for_nothing_even_if_it_is_nan(self, several):
        def body(comm):
            mine = np.array([np.nan, np.inf]) if comm.place else np.array([3.0, 4.0])
            return comm.all_reduce([mine], OPERATIONS["mean"], 0 if comm.place else 2)[0]

        for result in good(several.run(body)):
            assert result.tolist() == [3, 4]
