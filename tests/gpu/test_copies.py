"""How arrays come to a GPU and leave it: in order, in its byte order, pinned, without waiting."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import threading
import time
import types

import numpy as np
import pytest

import synkro as synk
from support.gpus import SINGLE
from support.waiting import wait_until
from synkro import here
from synkro.devices.base import Source

POISON = 0xAB


@pytest.fixture
def session(machine):
    with machine.session(["cuda:0"]) as session:
        yield session


@pytest.fixture
def watched(make_believe):
    """A session on a make-believe GPU, which counts."""
    with make_believe.session(["cuda:0"]) as session:
        yield session


def counted():
    """What this worker's stand-in has counted."""
    return synk.xp().cuda.runtime.statistics.copy()


def differences(session, call):
    """By how much the counts of rank 0 grow while *call* is made, once all that it needs is there."""
    look = session.function(lambda: tuple(counted().items()), outputs=None, name="look")
    call()
    before = dict(look()[0])
    call()
    return {name: count - before[name] for name, count in look()[0]}


def late(value, keep, device=None):
    """An array that is filled as soon as a copy on a stream that nobody else knows is over."""
    xp = synk.xp()
    with xp.cuda.Device(device):
        stream = xp.cuda.Stream(non_blocking=True)
        host = np.frombuffer(xp.cuda.alloc_pinned_memory(8 * 1000), "f8", 1000)
        host[:] = value
        array = xp.empty(1000)
        xp.cuda.get_current_stream().synchronize()
        array.data.copy_from_host_async(host.ctypes.data, array.nbytes, stream)
    keep.extend([host, array, stream])
    return array


def slow_down(seconds, before=lambda: None, after=lambda: None):
    """Have buffers be filled slowly on this rank."""
    from synkro.devices import inputs

    fill = inputs.fill

    def slow(*args):
        before()
        time.sleep(seconds)
        fill(*args)
        after()

    inputs.fill = slow


# ── in order ─────────────────────────────────────────────────────────────────────────────────────


def test_what_a_function_assigns_goes_its_way_beside_the_next_slice(session):
    """Both pass through the same pinned buffers, one from the main thread and one from another."""
    table = np.arange(1 << 22, dtype="f8").reshape(-1, 2)
    x, rows = session.data(table), slice(None, None, -1)
    w = session.shared(np.zeros(3 << 20))

    def prepare():
        from synkro.devices import inputs

        inputs.BUFFER = 1 << 18  # so that the two meet often

    def f(x):
        w.value = np.arange(3 << 20, dtype="f8")
        return x, (w.value == synk.xp().arange(3 << 20)).all()

    session.function(prepare, outputs=[])()
    f = session.function(f, outputs=("gather", "min"))
    for _ in range(3):
        got, assigned = f(x, batch=rows, num_slices=4)
        assert assigned
        assert np.array_equal(got, table[rows])


class Tensor:
    """As PyTorch's on a GPU: what it does when it is read, its interface does not tell."""

    is_cuda = True

    def __init__(self, array, dtype=None, requires_grad=False, conj=False, neg=False):
        self.array, self.dtype, self.requires_grad, self.bits = array, dtype, requires_grad, (conj, neg)

    def detach(self):
        return Tensor(self.array, self.dtype, False, *self.bits)

    def resolve_conj(self):
        return Tensor(self.array.conj() if self.bits[0] else self.array, self.dtype, neg=self.bits[1])

    def resolve_neg(self):
        return Tensor(-self.array if self.bits[1] else self.array, self.dtype, conj=self.bits[0])

    def view(self, dtype):
        return Tensor(self.array.view(dtype), dtype)

    @property
    def __cuda_array_interface__(self):
        if self.requires_grad:
            raise RuntimeError("Use var.detach().__cuda_array_interface__ instead")
        if self.dtype == "bfloat16":
            return {**self.array.__cuda_array_interface__, "typestr": "<V2"}
        return self.array.__cuda_array_interface__


@pytest.fixture
def with_tensors(watched):
    """A session whose worker takes ``Tensor`` for PyTorch's."""

    def pretend():
        sys.modules["torch"] = types.SimpleNamespace(
            Tensor=Tensor,
            bfloat16="bfloat16",
            int16="i2",
            from_dlpack=lambda array: array,
            float32=None,
            set_default_dtype=lambda dtype: None,
        )

    watched.function(pretend, outputs=[])()
    return watched


def test_tensors_are_taken_as_they_are_read(with_tensors):
    def f(x):
        xp = synk.xp()
        conj = Tensor(x, conj=True), Tensor(x.imag, neg=True), Tensor(x.real, requires_grad=True)
        w.value = Tensor(x.sum(axis=0), requires_grad=True, conj=True)
        total = synk.all_reduce(Tensor(x.sum(axis=0), conj=True, neg=True), "sum")
        half = xp.asarray(x.real, "f4").view("i4") >> 16
        return (*conj, total, Tensor(half.astype("i2"), "bfloat16"))

    x = np.array([[1 + 2j, 3 - 4j], [5j, -7]])
    w = with_tensors.shared(np.zeros(2, "c16"))
    f = with_tensors.function(f, outputs=("gather", "gather", "gather", "sum", "gather"))
    for slices in (1, 2):
        conj, neg, real, total, half = f(x, num_slices=slices)
        assert np.array_equal(conj, x.conj())
        assert np.array_equal(neg, -x.imag)
        assert np.array_equal(real, x.real)
        assert np.array_equal(total, -x.sum(axis=0).conj())
        assert half.dtype.name == "bfloat16"
        assert np.array_equal(half.astype("f8"), x.real)
    assert np.array_equal(w.get_value(), x[1].conj())


def test_an_array_of_another_library_may_still_be_computed(machine):
    """Its library computes on a stream of its own, of which its interface need not tell."""

    def theirs(keep):
        interface = {**late(1, keep).__cuda_array_interface__, "version": 2}
        del interface["stream"]
        return types.SimpleNamespace(__cuda_array_interface__=interface)

    def run():
        keep = []
        return synk.all_reduce(theirs(keep), "sum"), synk.all_gather(theirs(keep))

    with machine.session() as session:
        for total, gathered in session.function(run, outputs=None)():
            assert total.tolist() == [2] * 1000
            assert gathered.tolist() == [1] * 2000


def test_copies_to_the_gpu_wait_until_their_place_is_free(session):
    """Before them, copies of what lies there are still to be made on the GPU."""

    def table():
        return np.arange(12 << 14, dtype="f8").reshape(12, -1)

    def later(array):
        copy = synk.xp().empty_like(array)
        copy.data.copy_from_device_async(array.data, array.nbytes)
        return copy

    def feed():
        pieces = [[Source(row[::2])] for row in table()]  # which pass through small pinned buffers
        with contextlib.closing(here.rank.device.feed(pieces)) as feeding:
            seen = [later(x) for (x,) in feeding]
        return synk.xp().stack(seen)

    def assign():
        array = synk.xp().zeros(1 << 16)
        before = later(array)
        here.rank.device.assign(array, np.ones(1 << 16))
        return before.max(), array.min()

    assert np.array_equal(session.function(feed, outputs="gather")(), table()[:, ::2])
    assert session.function(assign, outputs=("max", "min"))() == (0, 1)


# ── big-endian ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [">f8", ">i2", ">c8", ">u4"])
def test_big_endian_inputs(session, tmp_path, dtype):
    table = (np.arange(60_000).reshape(-1, 6) % 251).astype(dtype)
    factor = np.array([3, 1, 4, 1, 5, 9], dtype)
    np.save(tmp_path / "table.npy", table)
    mapped = np.load(tmp_path / "table.npy", mmap_mode="r")
    rows = np.random.default_rng(0).permutation(len(table))[:3333].astype(">i8")

    def f(x, y):
        assert x.dtype.isnative
        assert y.dtype.isnative
        return (x * y).sum(axis=0), x

    f = session.function(f, outputs=("sum", "gather"), bcast_inputs=["y"])
    for x in (table, session.data(table), session.data(mapped), mapped):
        for y in (factor, session.data(factor)):
            for batch in (None, rows, slice(None, None, -3)):
                chosen = table if batch is None else table[batch]
                for slices in (1, 3):
                    total, got = f(x, y, batch=batch, num_slices=slices)
                    assert np.array_equal(got, chosen)
                    assert np.array_equal(total, (chosen * factor).sum(axis=0, dtype=total.dtype))


def test_data_are_native_on_gpus_and_files_as_they_are(session, tmp_path):
    assert session.data(np.ones(3, ">f4")).dtype == np.dtype("f4")
    assert session.data([1, 2], dtype=">i4").dtype == np.dtype("i4")
    np.save(tmp_path / "a.npy", np.ones(3, ">f4"))
    x = session.data(np.load(tmp_path / "a.npy", mmap_mode="r"))
    assert x.dtype == x[:].dtype == np.dtype(">f4")
    x.set_value([1, 2, 3, 4])
    assert session.function(lambda x: x.sum(), outputs="sum")(x) == 10


def test_big_endian_values_of_variables(machine, tmp_path):
    values = np.arange(5, dtype=">f8")
    np.save(tmp_path / "v.npy", values)
    mapped = np.load(tmp_path / "v.npy", mmap_mode="r")
    with machine.session() as session:
        double = session.function(lambda: w.value * 2, outputs=None)
        w = session.shared(values)
        assert [each.tolist() for each in double()] == [[0, 2, 4, 6, 8]] * 2
        for given in (values + 1, session.data(values + 1), mapped, session.data(mapped)):
            w.set_value(np.zeros(5))
            w.set_value(given)
            want = (np.asarray(given) * 2).tolist()
            assert [each.tolist() for each in double()] == [want] * 2
            session.scatter(w, given)
            assert np.concatenate(double()).tolist() == want
        assign = session.function(lambda y: setattr(w, "value", y), outputs=[], bcast_inputs=["y"])
        assign(values)
        assert [each.tolist() for each in double()] == [[0, 2, 4, 6, 8]] * 2


# ── through pinned memory, without waiting ───────────────────────────────────────────────────────


def test_the_host_does_not_wait_for_inputs(watched):
    """A function begins before its piece has arrived: what it computes waits on the GPU."""

    def f(x):
        arrived = ctypes.string_at(x.data.ptr, 1)[0] != POISON
        return x.sum(), int(arrived)

    f = watched.function(f, outputs=("sum", "max"))
    x = watched.data(np.ones((4096, 8)))
    for slices in (1, 4):
        for _ in range(2):
            total, arrived = f(x, num_slices=slices)
            assert total == x.size
            assert slices > 1 or not arrived


@pytest.mark.parametrize("columns", [1, 5000])
@pytest.mark.parametrize("op", ["sum", "gather", None])
def test_outputs_leave_through_pinned_memory(watched, op, columns):
    f = watched.function(lambda x: x + 1, outputs=op)
    x = watched.data(np.ones((64, columns)))
    for slices in (1, 4):
        grown = differences(watched, lambda slices=slices: f(x, num_slices=slices))
        assert grown["pageable"] == 0, grown
        assert grown["pinned"] > 0


def test_small_outputs_go_straight_to_where_the_main_process_reads_them(watched):
    """It keeps what it needs for that, and the workers keep it pinned."""
    f = watched.function(lambda x: x.sum(), outputs="sum")
    for number in range(3):
        assert f(watched.data(np.ones(1 << 16))) == 1 << 16, number
    missing = watched.function(lambda: here.rank.device._pins.missing(here.rank.outbox), outputs=None)
    assert missing() == [0]


def test_collectives_through_host_memory_use_pinned_memory(make_believe):
    make_believe.set(**SINGLE)

    def run():
        x = synk.xp().ones(1 << 18)
        for result in (synk.all_reduce(x, "sum"), synk.all_gather(x), synk.broadcast(x)):
            assert isinstance(result, synk.xp().ndarray)

    with make_believe.session(["cuda:0", "cuda:0"]) as session:
        grown = differences(session, session.function(run, outputs=[]))
    assert grown["pageable"] == 0, grown
    assert grown["pinned"] >= 6 << 21


WIDTHS = "1u1 3u1 33u1 1f2 7f2 1f4 5f4 16f4 33f4 1f8 9f8 512f8 1c16 3c16 1001? 4099i8"


@pytest.mark.parametrize("width", WIDTHS.split())
def test_rows_of_any_width_are_picked(session, width):
    columns, dtype = re.fullmatch(r"(\d+)(.*)", width).groups()
    columns = int(columns)
    rng = np.random.default_rng(columns)
    table = rng.integers(0, 100, (40_000 // columns + 70, columns)).astype(dtype)
    x, y = session.data(table), session.data(table[:, 0].copy())
    f = session.function(lambda x, y: (x, y), outputs="gather")
    for size in (1, 2, 31, len(table) // 2, len(table) + 9):
        rows = rng.integers(0, len(table), size)
        for slices in (1, 3):
            got, first = f(x, y, batch=rows, num_slices=slices)
            assert np.array_equal(got, table[rows])
            assert np.array_equal(first, table[rows, 0])


@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 8, 13])
@pytest.mark.parametrize("columns", [5, 16])
def test_rows_of_files_are_picked_wherever_they_begin(session, tmp_path, columns, start):
    table = np.random.default_rng(start).integers(0, 256, (9000, columns)).astype("u1")
    (tmp_path / "rows").write_bytes(b"x" * start + table.tobytes())
    x = session.data(np.memmap(tmp_path / "rows", "u1", "r", start, table.shape))
    f = session.function(lambda x: x, outputs="gather")
    rows = np.random.default_rng(0).integers(0, len(table), 5000)
    assert np.array_equal(f(x, batch=rows), table[rows])
    assert np.array_equal(f(x, batch=slice(None, None, 3), num_slices=2), table[::3])
    assert np.array_equal(f(x), table)


def test_the_gpu_fetches_rows_of_pinned_memory_and_of_files_by_itself(watched, tmp_path):
    table = np.arange(1 << 17, dtype="f4").reshape(-1, 4)
    np.save(tmp_path / "table.npy", table)
    rows = np.random.default_rng(0).permutation(len(table))[:20_000]
    f = watched.function(lambda x: x.sum(axis=0), outputs="sum")
    for given in (table, np.load(tmp_path / "table.npy", mmap_mode="r")):
        x = watched.data(given)
        grown = differences(watched, lambda x=x: f(x, batch=rows))
        assert grown["gathered"] == table[rows].nbytes
        assert grown["pageable"] == grown["registrations"] == 0
        grown = differences(watched, lambda x=x: f(x))
        assert grown["pinned"] >= table.nbytes
        assert grown["pageable"] == 0


def in_small_parts(part, files=None):
    """Have this worker pin memory in parts of so many bytes, and of files so much at a time."""
    from synkro.devices import pins

    pins.PART = pins.FILE_PART = part
    if files is not None:
        here.rank.device._pins._limit = files


@pytest.mark.parametrize("files", [None, 1 << 17])
def test_memory_that_is_pinned_in_parts(session, tmp_path, files):
    """Parts begin and end within rows; of files a few may be pinned at a time."""
    table = np.random.default_rng(0).normal(size=(70_001, 9))
    np.save(tmp_path / "table.npy", table)
    session.function(in_small_parts, outputs=[], bcast_inputs=["part", "files"])(1 << 16, files)
    f = session.function(
        lambda x, k: (x + 0, x[:9] * k[0, 0]), outputs=("gather", "sum"), bcast_inputs="k"
    )
    rows = np.random.default_rng(1).integers(0, len(table), 30_000)
    for given in (table, np.load(tmp_path / "table.npy", mmap_mode="r")):
        x = session.data(given)
        for batch in (None, rows, slice(None, None, 2), slice(5000, 60_000)):
            chosen = table if batch is None else table[batch]
            for slices in (1, 2, 5):
                got, total = f(x, x, batch=batch, num_slices=slices)
                assert np.array_equal(got, chosen)
                if slices == 1:
                    assert np.array_equal(total, chosen[:9] * table[0, 0])
    x = session.data(table)
    for number in (7, 8):  # what is written is copied again
        x[0, 0] = number
        assert f(x, x)[0][0, 0] == number


@pytest.mark.parametrize("what", ["nothing is pinned", "the second part is not", "it is not shown"])
def test_what_the_gpu_cannot_reach_passes_through_buffers(watched, what):
    def spoil(what):
        runtime = synk.xp().cuda.runtime
        register = runtime.hostRegister

        def refuse(address, nbytes, flags):
            counts["asked"] += 1
            if what == "nothing is pinned" or counts["asked"] == 2:
                raise runtime.CUDARuntimeError(1)
            register(address, nbytes, flags)

        if what == "it is not shown":
            here.rank.device._inputs._shows_host = False
        else:
            runtime.hostRegister = refuse

    counts = {"asked": 0}
    table = np.arange(300_000.0).reshape(-1, 3)
    watched.function(in_small_parts, outputs=[], bcast_inputs=["part", "files"])(1 << 18, None)
    watched.function(spoil, outputs=[], bcast_inputs=["what"])(what)
    x, rows = watched.data(table), np.random.default_rng(0).permutation(len(table))
    f = watched.function(lambda x: (x, x[0] * 2), outputs=("gather", None))
    for slices in (1, 3):
        assert np.array_equal(f(x, num_slices=slices)[0], table)
        assert np.array_equal(f(x, batch=rows, num_slices=slices)[0], table[rows])
    grown = differences(watched, lambda: f(x, batch=rows))
    assert grown["gathered"] == 0


def test_memory_is_unpinned_before_it_is_unmapped(watched):
    f = watched.function(lambda x: x.sum(), outputs="sum")
    x = watched.data(np.ones(1 << 16))
    pinned = differences(watched, lambda: f(watched.data(x[:])))["registrations"]
    assert pinned == 1
    x.free_memory()
    assert f(np.ones(5)) == 5


def test_copies_of_any_layout_come_back(session):
    """Into targets that are pinned, that are not, and that are larger than all buffers together."""

    def f(x):
        return x, x[:, ::-1], x[:1, 0].sum(), x.T

    x = np.arange(6 << 20, dtype="f8").reshape(3, -1)
    f = session.function(f, outputs=("gather", "gather", "sum", None))
    for slices in (1, 3):
        whole, turned, first, transposed = f(x, num_slices=slices)
        assert np.array_equal(whole, x)
        assert np.array_equal(turned, x[:, ::-1])
        assert first == (x[:1, 0].sum() if slices == 1 else x[:, 0].sum())
        assert np.array_equal(np.concatenate(transposed, axis=1), x.T)


def test_arrays_of_another_device(make_believe):
    """A function may have made them there, and left that device current."""

    def output():
        return late(1 + synk.rank(), keep, 1 - synk.rank())[::2]

    def assigned():
        synk.xp().cuda.Device(1 - synk.rank()).use()
        w.value = np.full(3, 5.0 + synk.rank())
        return 1

    def reduced():
        synk.xp().cuda.Device(1 - synk.rank()).use()
        synk.all_reduce(w, "sum")
        return w.value, w.value.device.id == synk.rank()

    with make_believe.session(["cuda:0", "cuda:1"]) as session:
        w, keep = session.shared(np.zeros(3)), []
        found = session.function(output, outputs=None)()
        assert [each.tolist() for each in found] == [[1] * 500, [2] * 500]
        assert session.function(assigned, outputs="sum")() == 2
        for value, here in session.function(reduced, outputs=None)():
            assert value.tolist() == [11] * 3
            assert here


@pytest.mark.libraries
def test_rows_that_run_backwards_for_other_libraries(machine):
    torch = pytest.importorskip("torch", reason="needs PyTorch (the extra torch)")

    def double(x: torch.Tensor):
        return x * 2

    rows = np.arange(32.0).reshape(16, 2)
    with machine.session() as session:
        kept = session.function(lambda x: x + 0, outputs="keep")(rows)
        f = session.function(double, outputs="gather")
        got = f(kept, batch_s=slice(None, None, -1))
        assert np.array_equal(got, 2 * np.concatenate([rows[7::-1], rows[:7:-1]]))
        assert np.array_equal(f(rows, batch=slice(None, None, -1)), 2 * rows[::-1])


@pytest.mark.parametrize("again", [False, True])
def test_ctrl_c_leaves_nobody_who_reads_the_inputs(watched, tmp_path, again):
    """Also if it comes again, as it does when the next call waits for the interrupted one: here, before
    the call has let go of its inputs."""
    begun = tmp_path / "begun"
    counts = {"begun": 0, "over": 0}

    def began():
        counts["begun"] += 1
        begun.touch()

    def ended():
        counts["over"] += 1

    def prepare():
        from synkro.devices import inputs

        def close(self):
            raise KeyboardInterrupt

        if again:
            inputs.Feeding.close = close
        slow_down(0.8, began, ended)

    def f(x):
        while True:
            time.sleep(0.01)

    def reading():
        before = counts["over"]
        time.sleep(0.1)  # whoever has still something to read begins with it
        return counts["begun"] != before

    x = watched.data(np.ones((600_000, 2)))
    rows = slice(None, None, -1)  # which pass through small buffers
    f = watched.function(f, outputs="sum")
    look = watched.function(reading, outputs="max")
    prepare = watched.function(prepare, outputs=[])
    watched.distribute()  # together, so that they share the counts
    prepare()

    def interrupt():
        assert wait_until(begun.exists, 20)
        os.kill(os.getpid(), signal.SIGINT)

    for _ in range(3):
        begun.unlink(missing_ok=True)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            f(x, batch=rows, num_slices=2)
        thread.join()
        assert not look()


def test_variables_are_whole_again_after_ctrl_c_while_inputs_are_let_go(watched):
    def fails(x):
        def interrupt():
            os.kill(os.getpid(), signal.SIGINT)

        threading.Timer(0.05, interrupt).start()
        raise ValueError("boom")  # while the next slice is on its way

    x = watched.data(np.ones((600_000, 2)))
    w = watched.shared(np.arange(600_000.0))
    rows = slice(None, None, -1)  # which pass through small buffers
    fails = watched.function(fails, sliceable_shareds=[w], outputs=[])
    look = watched.function(lambda: len(w.value), outputs="max")
    watched.function(lambda: slow_down(0.3), outputs=[])()
    watched.distribute()
    for _ in range(3):
        with pytest.raises(synk.WorkerError):
            fails(x, batch=rows, num_slices=3)
        assert look() == 600_000
