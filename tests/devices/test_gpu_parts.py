"""What GPU workers need that can be checked without a GPU: tables, bookkeeping, arithmetic."""

import contextlib
import functools
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis.extra import numpy as hnp

from support.examples import examples, given, st
from support.leftovers import children
from synkro.comms.direct import NATIVE, REDUCTIONS, carrier, decode, encode
from synkro.comms.ops import OPERATIONS, Operation
from synkro.controller.placement.choice import Assignment, Room, choose
from synkro.controller.placement.placement import SOCKETS, Placement, nccl_environment, why_not_nccl
from synkro.devices import gpus, pins
from synkro.devices.base import Source
from synkro.devices.gpus import Gpu, Visible
from synkro.devices.pins import PINNED_FROM, Pins
from synkro.devices.portions import fill, portions
from synkro.errors import InvalidType, InvalidValue, NotAvailable
from synkro.hosts.pool import unlike_gpus

pytestmark = pytest.mark.quick

DTYPES = ["?", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16"]

VERSIONS = [(23_203, "14.2.0"), (23_203, "14.2.0"), (0, "13.6.0")]
H200 = tuple(Gpu(index, "NVIDIA H200", f"0000:8{index}:00.0", 141 << 30) for index in range(3))


class TestWire:
    """What a reduction over carried dtypes gives is what NumPy gives over the partials themselves."""

    @staticmethod
    def nccl(operation, one, other):
        """NCCL's own arithmetic on carried vectors: max and min of integers, sums, products."""
        if operation.name in ("max", "min"):
            assert one.dtype.kind in "iu", "NCCL's max and min of floats drop nan"
        return operation.ufunc(one, other)

    @pytest.mark.parametrize("op", OPERATIONS)
    @pytest.mark.parametrize("code", DTYPES)
    @examples(8)
    @given(data=st.data())
    def test_carries_every_dtype_as_numpy_would_reduce_it(self, op, code, data):
        operation = OPERATIONS[op]
        partial = operation.partial_dtype(np.dtype(code))
        elements = hnp.from_dtype(np.dtype(code))
        shape = data.draw(st.integers(0, 7))
        drawn = [data.draw(hnp.arrays(code, shape, elements=elements)) for _ in "ab"]
        with np.errstate(invalid="ignore"):  # there are NaNs that signal
            pair = [array.astype(partial) for array in drawn]
        if carrier(operation, partial) is None:
            assert op not in REDUCTIONS or (partial.kind == "c" and op in ("prod", "max", "min"))
            return
        with np.errstate(all="ignore"):
            want = operation.merge(pair[0].copy(), pair[1])
            carried = [encode(operation, vector.copy()) for vector in pair]
            assert all(vector.dtype.str[1:] in NATIVE for vector in carried)
            got = decode(operation, self.nccl(operation, *carried), partial)
            assert got.dtype == partial
            np.testing.assert_array_equal(got, want)

    @pytest.mark.parametrize("op", ["max", "min"])
    def test_carries_bfloat16_with_its_nan(self, op):
        bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
        one, other = (
            np.array(v, bfloat16) for v in ([1, -2, np.nan, -np.inf, 0], [-1, -3, 4, 5, np.nan])
        )
        carried = [encode(OPERATIONS[op], vector) for vector in (one, other)]
        got = decode(OPERATIONS[op], self.nccl(OPERATIONS[op], *carried), one.dtype)
        with np.errstate(invalid="ignore"):  # ml_dtypes warns of nan, NumPy does not
            want = OPERATIONS[op].merge(one, other)
        np.testing.assert_array_equal(got.astype("f4"), want.astype("f4"), strict=True)

    def test_what_has_no_way(self):
        assert carrier(OPERATIONS["prod"], np.dtype("c8")) is None
        assert carrier(OPERATIONS["sum"], np.dtype(np.longdouble)) is None
        assert carrier(OPERATIONS["max"], np.dtype("c16")) is None
        assert carrier(Operation("unknown to NCCL", np.fmax), np.dtype("f8")) is None

    def test_partials_that_travel_as_they_are_are_not_copied(self):
        for code in NATIVE:
            vector = np.ones(3, code)
            assert np.shares_memory(encode(OPERATIONS["sum"], vector), vector)


class TestPins:
    def make(self, refuses=(), limit=None):
        calls = []

        def register(address, nbytes, read_only):
            calls.append(("pin", address, nbytes, read_only))
            return address not in refuses

        made = Pins(
            register, lambda address: calls.append(("unpin", address)), lambda: calls.append(("wait",))
        )
        if limit is not None:
            made._limit = limit
        return made, calls

    @staticmethod
    def file(nbytes):
        memory = np.zeros(nbytes, np.uint8)
        memory.flags.writeable = False
        return memory

    def test_a_segment_is_pinned_when_it_is_first_copied_and_once(self):
        made, calls = self.make()
        memory = np.zeros(PINNED_FROM + 64, np.uint8)
        made.mapped(7, memory)
        assert calls == []
        assert made.missing(memory[:64]) == memory.nbytes
        assert made.pinned(memory[64:128])
        assert made.pinned(memory[:64])
        assert made.missing(memory) == 0
        assert calls == [("pin", memory.ctypes.data, memory.nbytes, False)]
        made.forget(7)
        assert calls[1:] == [("unpin", memory.ctypes.data)]
        assert not made.pinned(memory[:64])
        made.forget(7)
        assert len(calls) == 2

    def test_threads_that_ask_at_once_pin_once(self):
        both, asked = threading.Barrier(2), []

        def register(address, nbytes, read_only):
            asked.append(address)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.3)  # for the other thread, if it comes this far
            return True

        memory = np.zeros(PINNED_FROM, np.uint8)
        made = Pins(register, lambda address: None, lambda: None)
        made.mapped(1, memory)
        with ThreadPoolExecutor(2) as threads:
            assert all(threads.map(made.pinned, [memory[:8], memory[8:]]))
        assert asked == [memory.ctypes.data]

    def test_what_cannot_be_pinned_is_tried_once_and_never_undone(self):
        memory = np.zeros(PINNED_FROM, np.uint8)
        made, calls = self.make(refuses=[memory.ctypes.data])
        made.mapped(1, memory)
        assert not made.pinned(memory)
        assert not made.pinned(memory)
        assert list(made.blocks(memory)) == []
        assert made.missing(memory) is None
        made.forget(1)
        assert len(calls) == 1

    def test_small_segments_and_foreign_memory_are_not_pinned(self):
        made, calls = self.make()
        made.mapped(2, small := np.zeros(PINNED_FROM - 1, np.uint8))
        for array in (small, np.zeros(PINNED_FROM, np.uint8)):
            assert not made.pinned(array)
            assert made.missing(array) is None
            assert list(made.blocks(array)) == []
        assert calls == []

    def test_an_array_that_reaches_beyond_its_segment_is_not_in_it(self):
        made, _ = self.make()
        memory = np.zeros(4 * PINNED_FROM, np.uint8)
        made.mapped(1, memory[: 2 * PINNED_FROM])
        made.mapped(2, memory[2 * PINNED_FROM :])
        assert made.pinned(memory[2 * PINNED_FROM :])
        assert not made.pinned(memory[PINNED_FROM : 3 * PINNED_FROM])

    @pytest.mark.parametrize("is_file", [False, True])
    @examples(40)
    @given(data=st.data())
    def test_blocks_are_all_of_an_array_in_order_each_in_one_part(self, is_file, data):
        with mock.patch.multiple(pins, PART=1 << 17, FILE_PART=1 << 16):
            made, calls = self.make()
            memory = (self.file if is_file else functools.partial(np.zeros, dtype="u1"))(700_001)
            made.mapped(1, memory)
        begin = data.draw(st.integers(0, memory.nbytes))
        array = memory[begin : data.draw(st.integers(begin, memory.nbytes))]
        part, at = 1 << 16 if is_file else 1 << 17, array.ctypes.data
        for address, nbytes in made.blocks(array):
            assert address == at
            assert nbytes > 0
            inside = address - memory.ctypes.data
            assert inside // part == (inside + nbytes - 1) // part
            assert any(low <= address and at + nbytes <= low + size for _, low, size, _ in calls)
            at += nbytes
        assert at == array.ctypes.data + array.nbytes
        assert made.missing(array) == 0
        assert made.pinned(array)
        assert len(calls) == len({low for _, low, *_ in calls})
        assert {read_only for *_, read_only in calls} <= {is_file}
        before = len(calls)
        made.forget(1)
        assert sorted(calls[before:]) == sorted(("unpin", low) for _, low, *_ in calls[:before])

    def test_a_part_that_cannot_be_pinned_ends_the_blocks(self):
        memory = np.zeros(3 << 17, np.uint8)
        with mock.patch.object(pins, "PART", 1 << 17):
            made, calls = self.make(refuses=[memory.ctypes.data + (1 << 17)])
            made.mapped(1, memory)
        assert list(made.blocks(memory)) == [(memory.ctypes.data, 1 << 17)]
        assert not made.pinned(memory)
        assert made.missing(memory) is None
        assert made.pinned(memory[: 1 << 17])
        made.forget(1)
        assert calls[-1] == ("unpin", memory.ctypes.data)

    def test_files_take_turns_in_what_may_be_pinned_at_once(self):
        one, other = self.file(3 << 16), self.file(2 << 16)
        with mock.patch.object(pins, "FILE_PART", 1 << 16):
            made, calls = self.make(limit=2 << 16)
            made.mapped(1, one)
            made.mapped(2, other)
        first, second, third = (one.ctypes.data + (part << 16) for part in range(3))
        assert [address for address, _ in made.blocks(one)] == [first, second, third]
        assert calls[2:] == [("wait",), ("unpin", first), ("pin", third, 1 << 16, True)]
        assert not made.pinned(one)  # more than there may be at once
        assert made.pinned(one[1 << 16 :])
        calls.clear()
        assert made.pinned(one[1 << 16 : 2 << 16])  # which is used, so that the third gives way
        assert made.pinned(other[:9])
        assert calls == [("wait",), ("unpin", third), ("pin", other.ctypes.data, 1 << 16, True)]
        for number in (1, 2):
            made.forget(number)
        assert calls[3:] == [("unpin", second), ("unpin", other.ctypes.data)]


@st.composite
def sources(draw):
    """Arrays of all layouts, with and without indices."""
    dtype = draw(st.sampled_from(["?", "u1", "f4", "c16"]))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=9))
    array = np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)
    if array.ndim and draw(st.booleans()):
        array = array[:: draw(st.sampled_from([1, 2, -1, -3]))]
    if array.ndim > 1 and draw(st.booleans()):
        array = array.swapaxes(0, -1)
    indices = None
    if array.ndim and len(array) and draw(st.booleans()):
        indices = np.array(draw(st.lists(st.integers(0, len(array) - 1), max_size=12)), np.int64)
    return Source(array, indices)


class TestPortions:
    @examples(200)
    @given(source=sources(), limit=st.integers(16, 300))
    def test_together_they_are_the_rows_in_their_order(self, source, limit):
        rows = source.array if source.indices is None else source.array[source.indices]
        made = b""
        for portion in portions(source, limit):
            assert 0 < portion.nbytes <= limit
            buffer = np.zeros(limit, np.uint8)
            fill(buffer, portion)
            made += buffer[: portion.nbytes].tobytes()
        assert made == rows.tobytes()


@pytest.fixture
def three_gpus(monkeypatch):
    found = Visible(H200, 22_900, "")
    monkeypatch.setattr("synkro.controller.placement.choice.visible", lambda: found)
    monkeypatch.setattr("synkro.controller.placement.placement.visible", lambda: found)


class TestPlacement:
    @pytest.mark.parametrize(
        ("n", "devices", "want"),
        [
            (None, None, [0, 1, 2]),
            (2, None, [0, 1]),
            (None, "cuda", [0, 1, 2]),
            (1, "cuda", [0]),
            (None, "cuda:1", [1]),
            (None, "cuda2", [2]),
            (None, ["cuda:1", "cuda:1"], [1, 1]),
            (None, "cuda:2,cuda:0", [2, 0]),
            (None, "dev0->cuda0;dev1->cuda2", [0, 2]),
            (None, "a->cuda:2; b->cuda2", [2, 2]),
            (None, ["cuda:2", "cuda:0", "cuda2"], [2, 0, 2]),
        ],
    )
    def test_gpus_by_name(self, three_gpus, n, devices, want):
        def chosen(devices, by_environment):
            return [assignment.gpu.index for assignment in choose(n, devices, by_environment)]

        assert chosen(devices, None) == want
        if devices is not None:
            assert chosen(devices, "cuda:1") == want
        if isinstance(devices, str):
            assert chosen(None, devices) == want

    def test_cpus_are_there_for_the_asking(self, three_gpus):
        assert [assignment.gpu for assignment in choose(1, "cpu", None)] == [None]

    @pytest.mark.parametrize(
        ("n", "devices", "message"),
        [
            (4, None, r'4 workers .* 3 GPUs are visible: list a GPU more than once.*devices="cpu"'),
            (4, "cuda", "4 workers .* 3 GPUs are visible"),
            (None, "cuda:3", r"'cuda:3', but 3 GPUs are visible .*cuda:0, cuda:1, cuda:2.*CUDA_VIS"),
            (None, ["cuda", "cuda"], "names 'cuda' among others: say which GPU"),
            (None, ["cuda:"], "unknown device 'cuda:'"),
            (None, ["cuda:0", "cpu"], r"CPUs and GPUs \(cuda0, cpu\): .*one kind"),
            (None, "a->cuda0;b->cpu", "CPUs and GPUs"),
            (None, ["cuda:0", "cuda7"], "cuda7"),
            (None, "a->cuda0;a->cuda1", "twice"),
            (None, "cuda0->a", "cuda0"),
            (None, "gpu0", "gpu0"),
            (None, "cuda:-1", "cuda:-1"),
            (None, [], "no device"),
            (None, 3, "devices="),
        ],
    )
    def test_what_cannot_be(self, three_gpus, n, devices, message):
        with pytest.raises(InvalidType if devices == 3 else InvalidValue, match=message):
            choose(n, devices, None)

    def test_no_gpu(self, monkeypatch):
        monkeypatch.setattr(
            "synkro.controller.placement.choice.visible", lambda: Visible((), 0, "none is here")
        )
        with pytest.raises(NotAvailable, match="devices= asks for GPUs, but none is here"):
            choose(None, "cuda", None)

    @pytest.mark.parametrize(
        ("n", "devices", "message"),
        [
            (4, "cuda", "3 GPUs are visible on h2: list a GPU more than once"),
            (None, "cuda:3", r"but 3 GPUs are visible on h2 \(cuda:0"),
        ],
    )
    def test_what_another_host_does_not_have(self, n, devices, message):
        room = Room(4, lambda: Visible(H200, 22_900, ""), "h2")
        with pytest.raises(InvalidValue, match=message):
            choose(n, devices, None, room)

    def test_another_host_without_gpus(self):
        room = Room(4, lambda: Visible((), 0, "CUDA finds no GPU"), "h2")
        with pytest.raises(NotAvailable, match="but on h2 CUDA finds no GPU: leave it out, or use"):
            choose(None, "cuda", None, room)

    def test_the_same_libraries_on_all_hosts(self):
        none = Visible((), 0, "CUDA finds no GPU")
        seen = [none, *(Visible(H200, nccl, "", cupy=cupy) for nccl, cupy in VERSIONS)]
        assert unlike_gpus(["h1", "h2", "h3", "h4", "h5"], [*seen, none]) == [
            "h4 has CuPy 13.6.0 (h2 has 14.2.0), NCCL none (h2 has 2.32.3): install the same versions "
            "there."
        ]

    def test_status_lines(self, three_gpus):
        placement = Placement(choose(None, "dev0->cuda0;dev1->cuda1", None), 0.7)
        assert list(placement.before(2)) == [
            "Synkro attempting to use 2 of 3 detected GPUs...",
            "Preallocating 101068/144384 MB (0.700) on cuda0",
            "Preallocating 101068/144384 MB (0.700) on cuda1",
        ]
        assert list(placement.after(1, "", "")) == [
            "Mapped name dev0 to device cuda0: NVIDIA H200 (0000:80:00.0)",
            "Mapped name dev1 to device cuda1: NVIDIA H200 (0000:81:00.0)",
            "Synkro: 2 GPU workers initialized, master rank: 1",
        ]
        unnamed = Placement(choose(1, "cuda:2", None), None)
        assert next(unnamed.after(0, "", "")) == "Rank 0 is on device cuda2: NVIDIA H200 (0000:82:00.0)"

    @pytest.mark.parametrize(
        ("preallocate", "error"),
        [
            *((value, InvalidValue) for value in (1.5, -0.1, float("nan"))),
            *((value, InvalidType) for value in ("0.7", True, [0.5])),
        ],
    )
    def test_what_is_no_fraction(self, three_gpus, preallocate, error):
        with pytest.raises(error, match=r"preallocate must be a fraction .* from 0 to 1; got"):
            Placement(choose(1, "cuda", None), preallocate)

    def test_workers_that_share_a_gpu_share_its_memory(self, three_gpus):
        assert Placement(choose(None, ["cuda:0", "cuda:0", "cuda:1"], None), 0.5).preallocate == 0.5
        with pytest.raises(InvalidValue, match=r"2 workers share one: give at most 0\.5"):
            Placement(choose(None, ["cuda:0", "cuda:0", "cuda:1"], None), 0.7)

    def test_there_is_nothing_to_preallocate_on_cpus(self):
        with pytest.raises(InvalidValue, match="preallocate= is for GPUs"):
            Placement([Assignment("cpu")], 0.5)


class TestNcclEnvironment:
    def test_each_gpu_once(self):
        assert why_not_nccl(H200, 21_000, {}) == ""
        assert nccl_environment(H200, 21_000, 1) == {
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_COMM_BLOCKING": "1",  # or it may say that it is not ready yet
            "NCCL_RUNTIME_CONNECT": "0",  # or the first collective waits for all ranks in C
        }

    def test_several_machines(self):
        """The loopback interface ends on each, and equal addresses are those of different GPUs."""
        both = [replace(H200[0], machine=name) for name in ("h1", "h2")]
        assert why_not_nccl(both, 22_809, {}) == ""
        assert nccl_environment(both, 22_809, 1) == {
            "NCCL_COMM_BLOCKING": "1",
            "NCCL_RUNTIME_CONNECT": "0",
        }
        assert "takes one rank a GPU" in why_not_nccl([*both, both[1]], 22_809, {})

    def test_a_gpu_twice(self):
        twice = (H200[0], H200[0])
        assert "NCCL 2.28 takes one rank a GPU" in why_not_nccl(twice, 22_809, {})
        assert why_not_nccl(twice, 22_809, {SOCKETS: "1"}) == ""
        assert why_not_nccl(twice, 23_000, {}) == ""
        for crowd in (twice * 2, (*H200, *twice)):
            assert "NCCL may lock up with more than two ranks on one GPU" in why_not_nccl(
                crowd, 23_000, {SOCKETS: "1"}
            )
        assert nccl_environment(twice, 23_000, 0)["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
        hosts = {nccl_environment(twice, 22_809, rank)["NCCL_HOSTID"] for rank in range(2)}
        assert len(hosts) == 2

    def test_without_nccl(self):
        assert "CuPy finds no NCCL" in why_not_nccl(H200, 0, {})

    def test_what_the_user_has_set_stays(self, three_gpus):
        placement = Placement(choose(None, "cuda", None), None)
        environments = placement.environments({"NCCL_SOCKET_IFNAME": "eth0", "HOME": "/"})
        assert [each["NCCL_SOCKET_IFNAME"] for each in environments] == ["eth0"] * 3
        indices = [str(index) for index in placement.indices]
        assert [each["JAX_CUDA_VISIBLE_DEVICES"] for each in environments] == indices
        assert {each["XLA_PYTHON_CLIENT_PREALLOCATE"] for each in environments} == {"false"}


class TestLookingForGpus:
    @pytest.fixture
    def slow_cupy(self, tmp_path, monkeypatch):
        """A CuPy whose import takes longer than Synkro waits."""
        (tmp_path / "cupy.py").write_text("import time\ntime.sleep(60)\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(gpus, "PATIENCE", 0.2)
        monkeypatch.setattr(gpus, "_ENDING", 0.2)

    def test_a_driver_that_does_not_answer(self, slow_cupy):
        before = children()
        assert gpus.visible().reason == "CUDA did not come up within 0.2 s"
        assert children() <= before

    def test_a_driver_in_which_a_process_is_stuck(self, slow_cupy, monkeypatch):
        """As where it waits in the kernel: then it cannot even be killed."""
        stuck, kill = [], subprocess.Popen.kill
        monkeypatch.setattr(subprocess.Popen, "kill", lambda process: stuck.append(process))
        begun = time.monotonic()
        assert "did not come up" in gpus.visible().reason
        assert time.monotonic() - begun < 10
        kill(stuck[0])
        stuck[0].wait(10)
