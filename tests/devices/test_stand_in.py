"""The stand-in for CuPy keeps the promises that the tests of the GPU's code rely on."""

import gc
import mmap
import os
import subprocess
import sys
import threading
import types

import numpy as np
import pytest

from stand_in import loading

POISON = np.frombuffer(bytes([0xAB] * 4), np.float32)[0]
DEVICES = 3


@pytest.fixture(scope="module")
def imported():
    """The stand-in, imported for this file alone."""
    with loading.loaded(FAKE_CUDA_DEVICES=str(DEVICES)) as cupy:
        yield cupy


@pytest.fixture
def cp(imported):
    """The stand-in; no memory and no registration stays behind."""
    yield imported
    gc.collect()  # tracebacks of expected errors hold arrays
    imported.cuda.runtime.fail(None)
    for device in range(DEVICES):
        imported.cuda.Device(device).synchronize()
    imported.cuda.runtime.check_registrations()
    assert imported.get_default_memory_pool().used_bytes() == 0
    imported.get_default_memory_pool().free_all_blocks()


@pytest.fixture
def stream(cp):
    """A stream that the null stream ignores."""
    return cp.cuda.Stream(non_blocking=True)


@pytest.fixture
def host(cp):
    """A pinned array of ones."""
    array = np.frombuffer(cp.cuda.alloc_pinned_memory(16), np.float32, 4)
    array[:] = 1
    return array


def upload(cp, source, target, stream):
    """Queue a copy to the device."""
    address = source.__array_interface__["data"][0]
    runtime = cp.cuda.runtime
    runtime.memcpyAsync(target.data.ptr, address, target.nbytes, runtime.memcpyHostToDevice, stream.ptr)


def run(code, **env):
    """Run a script that imports the stand-in."""
    environment = {**os.environ, "PYTHONPATH": str(loading.FOLDER), **env}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


class TestArrays:
    def test_results_are_arrays_of_the_device(self, cp):
        a = cp.arange(6, dtype=cp.float32).reshape(2, 3)
        views = [a[0, 0], a[a > 1], a.T]
        for result in (*views, a + 1, 2 * a, np.float32(2) * a, a.sum(), -a, a == a, np.exp(a)):
            assert type(result) is cp.ndarray
        assert np.add(a, a, out=a) is a
        assert a.get().tolist() == [[0, 2, 4], [6, 8, 10]]
        assert float(a.sum()) == 30
        assert np.concatenate([a, a]).shape == (4, 3)
        assert int(a.reshape(6).take(cp.array([7]))[0]) == 2

    def test_arrays_of_the_host_are_not_welcome(self, cp):
        a, b = cp.ones(3), np.ones(3)
        for operation in (lambda: a + b, lambda: b + a, lambda: cp.add(a, b), lambda: cp.stack([a, b])):
            with pytest.raises(TypeError, match=r"Unsupported type <class 'numpy.ndarray'>"):
                operation()
        with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
            np.asarray(a)
        with pytest.raises(ValueError, match="non-scalar"):
            a[:] = b
        a[:] = np.float64(3)
        assert cp.get_array_module(a) is cp
        assert cp.get_array_module(b) is np

    def test_an_array_of_another_library(self, cp):
        a = cp.ones((2, 3))
        other = types.SimpleNamespace(__cuda_array_interface__=a.T.__cuda_array_interface__)
        cp.asarray(other)[0] = 5
        assert a.tolist() == [[5, 1, 1]] * 2

    @pytest.mark.parametrize("name", ["ElementwiseKernel", "memmap", "nditer", "frompyfunc"])
    def test_what_is_not_there(self, cp, name):
        with pytest.raises(AttributeError):
            getattr(cp, name)

    def test_kernels_read_big_endian_memory_unswapped(self, cp):
        with pytest.raises(ValueError, match="Unsupported dtype >f8 with big-endian byte-order"):
            cp.empty(3, ">f8")
        assert cp.asarray(np.array([1.5, 2], ">f8")).tolist() == [1.5, 2]  # on the way in it swaps
        native = cp.asarray([1.5, 2])
        wrong = cp.ndarray((2,), ">f8", native.data)
        assert wrong.dtype == np.dtype(">f8")
        assert (wrong + 1).tolist() == [2.5, 3]  # not what its dtype says
        assert wrong.get().tolist() == np.array([1.5, 2]).view(">f8").tolist()

    def test_new_memory_is_poison(self, cp):
        assert cp.empty(3, np.float32).get().tolist() == [POISON] * 3


class TestStreams:
    def test_a_missing_wait_shows(self, cp, stream, host):
        target = cp.empty(4, np.float32)
        upload(cp, host, target, stream)
        assert (target + 0).get().tolist() == [POISON] * 4
        cp.cuda.Stream.null.wait_event(stream.record())
        assert (target + 0).get().tolist() == [1] * 4

    def test_the_null_stream_waits_for_blocking_streams(self, cp, host):
        target = cp.empty(4, np.float32)
        blocking = cp.cuda.Stream()
        upload(cp, host, target, blocking)
        assert (target + 0).get().tolist() == [1] * 4
        upload(cp, host, target, cp.cuda.Stream.null)
        host[:] = 2
        with blocking:
            assert (target + 0).get().tolist() == [2] * 4

    def test_the_source_is_read_late(self, cp, stream, host):
        target = cp.empty(4, np.float32)
        upload(cp, host, target, stream)
        host[:] = 7
        stream.synchronize()
        assert target.get().tolist() == [7] * 4

    def test_asking_makes_progress(self, cp, stream, host):
        target = cp.empty(4, np.float32)
        upload(cp, host, target, stream)
        event = stream.record()
        host[:] = 3
        assert event.done
        assert stream.done
        assert target.get().tolist() == [3] * 4

    def test_pageable_memory_is_copied_at_once(self, cp, stream):
        source, target = np.ones(4, np.float32), cp.empty(4, np.float32)
        before = dict(cp.cuda.runtime.statistics)
        upload(cp, source, target, stream)
        source[:] = 2
        stream.synchronize()
        assert target.get().tolist() == [1] * 4
        assert cp.cuda.runtime.statistics["pageable"] == before["pageable"] + 32
        assert cp.cuda.runtime.statistics["pinned"] == before["pinned"]

    def test_get_without_blocking(self, cp, stream, host):
        source = cp.full(4, 5, np.float32)
        source.get(out=host, stream=stream, blocking=False)
        assert host.tolist() == [1] * 4
        stream.synchronize()
        assert host.tolist() == [5] * 4

    def test_memory_freed_too_early_shows(self, cp, stream, host):
        source = cp.full(4, 5, np.float32)
        source.get(out=host, stream=stream, blocking=False)
        del source
        stream.synchronize()
        assert host.tolist() == [POISON] * 4

    def test_asarray_takes_the_source_at_once_but_arrives_late(self, cp, stream):
        source = np.ones(4, np.float32)
        with stream:
            target = cp.asarray(source)
        source[:] = 2
        assert (target + 0).get().tolist() == [POISON] * 4
        with stream:
            assert target.get().tolist() == [1] * 4

    def test_without_laziness(self, cp, stream, host, monkeypatch):
        monkeypatch.setenv("FAKE_CUDA_LAZY", "0")
        target = cp.empty(4, np.float32)
        upload(cp, host, target, stream)
        assert (target + 0).get().tolist() == [1] * 4

    def test_the_current_stream_and_device_belong_to_the_thread(self, cp, stream):
        seen = []

        def look():
            seen.extend([cp.cuda.get_current_stream(), cp.cuda.runtime.getDevice()])

        with cp.cuda.Device(1):
            with pytest.raises(RuntimeError, match="does not match with the current device"):
                stream.use()
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        assert seen == [cp.cuda.Stream.null, 0]

    def test_a_spoilt_context(self, cp):
        a = cp.ones(3)
        cp.cuda.runtime.fail("cudaErrorIllegalAddress")
        text = "cudaErrorIllegalAddress: an illegal memory access was encountered"
        null = cp.cuda.Stream.null
        for operation in (lambda: a + 1, null.synchronize, cp.cuda.runtime.getDevice, a.get):
            with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match=text) as caught:
                operation()
            assert caught.value.status == 700

    def test_questions_never_raise(self, cp, stream, host):
        runtime = cp.cuda.runtime
        upload(cp, host, cp.empty(4, np.float32), stream)
        event = stream.record()
        with stream:
            runtime.fault("cudaErrorIllegalAddress")
        late = stream.record()
        assert (runtime.eventQuery(event.ptr), event.done) == (0, True)
        assert (runtime.eventQuery(late.ptr), late.done, stream.done) == (700, False, False)
        assert runtime.streamQuery(stream.ptr) == 700
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            late.synchronize()

    def test_pinned_memory_is_not_staged(self, cp, stream, host):
        """asarray reads it where it is, as late as the stream comes to it."""
        with stream:
            target = cp.asarray(host)
        host[:] = 7
        with stream:
            assert target.get().tolist() == [7] * 4


class TestMemory:
    def registered(self, cp, buffer, size, flags=0):
        """The status with which a registration fails, 0 if it does not."""
        try:
            cp.cuda.runtime.hostRegister(buffer, size, flags)
        except cp.cuda.runtime.CUDARuntimeError as error:
            return error.status
        return 0

    def test_registration(self, cp, stream):
        area = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        view = np.frombuffer(area, np.float32)
        address = view.ctypes.data
        assert self.registered(cp, address, 0) == 1
        assert self.registered(cp, 4096, 4096) == 1
        assert self.registered(cp, address, 2 * mmap.PAGESIZE) == 0
        assert self.registered(cp, address + mmap.PAGESIZE, mmap.PAGESIZE) == 712
        target = cp.empty(4, np.float32)
        upload(cp, view, target, stream)
        view[:4] = 9
        stream.synchronize()
        assert target.get().tolist() == [9] * 4
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            upload(cp, view[2 * mmap.PAGESIZE // 4 - 2 :], target, stream)
        cp.cuda.runtime.hostUnregister(address)
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorHostMemoryNotRegistered"):
            cp.cuda.runtime.hostUnregister(address)

    def test_memory_that_may_only_be_read(self, cp, tmp_path):
        (tmp_path / "data").write_bytes(bytes(mmap.PAGESIZE))
        with open(tmp_path / "data", "rb") as file:
            area = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        address = np.frombuffer(area, np.uint8).ctypes.data
        assert self.registered(cp, address, mmap.PAGESIZE) == 1
        assert self.registered(cp, address, mmap.PAGESIZE, flags=8) == 0
        area.close()
        with pytest.raises(AssertionError, match="no longer mapped"):
            cp.cuda.runtime.check_registrations()
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            cp.cuda.runtime.hostUnregister(address)  # too late: the memory has gone

    def test_unpinned_before_the_copy_ran(self, cp, stream, capsys):
        view = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.float32)
        cp.cuda.runtime.hostRegister(view.ctypes.data, mmap.PAGESIZE, 0)
        upload(cp, view, cp.empty(4, np.float32), stream)
        cp.cuda.runtime.hostUnregister(view.ctypes.data)
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            stream.synchronize()
        assert "unpinned before" in capsys.readouterr().err

    def test_accounts(self, cp, monkeypatch):
        monkeypatch.setenv("FAKE_CUDA_MEMORY", str(1 << 20))
        pool = cp.get_default_memory_pool()
        a = cp.empty(1000, np.uint8)
        view = a[10:]
        del a
        assert pool.used_bytes() == pool.total_bytes() == 1024
        with pytest.raises(cp.cuda.memory.OutOfMemoryError) as caught:
            cp.empty(1 << 20, np.uint8)
        text = "Out of memory allocating 1,048,576 bytes (allocated so far: 1,024 bytes)."
        assert str(caught.value) == text
        pool.set_limit(size=4096)
        with pytest.raises(MemoryError, match=r"limit set to: 4,096 bytes"):
            cp.empty(4096, np.uint8)
        pool.set_limit()
        del view
        assert (pool.used_bytes(), pool.total_bytes()) == (0, 1024)
        assert cp.empty(1 << 20, np.uint8).size == 1 << 20
        pool.free_all_blocks()
        assert cp.cuda.runtime.memGetInfo() == (1 << 20, 1 << 20)


class TestIpc:
    """Memory of another process, which waits for a line before it frees the memory and ends."""

    OTHER = """if True:
        import sys, cupy
        memory = cupy.cuda.Memory(1 << 21)
        array = cupy.ndarray(4, "f4", cupy.cuda.MemoryPointer(memory, 0))
        array[...] = 7
        print(cupy.cuda.runtime.ipcGetMemHandle(memory.ptr).hex(), flush=True)
        sys.stdin.readline()
        print(array.sum(), flush=True)
        del array, memory
        print("freed", flush=True)
        sys.stdin.readline()
    """

    @pytest.fixture
    def other(self):
        env = {**os.environ, "PYTHONPATH": str(loading.FOLDER), "FAKE_CUDA_DEVICES": str(DEVICES)}
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen([sys.executable, "-c", self.OTHER], env=env, text=True, **ends) as process:
            yield process
            process.stdin.close()
            assert process.wait() == 0

    def opened(self, cp, other):
        handle = bytes.fromhex(other.stdout.readline())
        assert len(handle) == 64
        address = cp.cuda.runtime.ipcOpenMemHandle(handle, 1)
        memory = cp.cuda.UnownedMemory(address, 1 << 21, None, 0)
        return handle, address, cp.ndarray(4, "f4", cp.cuda.MemoryPointer(memory, 0))

    def test_it_is_opened_once_a_process_and_never_in_its_own(self, cp, other):
        handle, address, _ = self.opened(cp, other)
        runtime = cp.cuda.runtime
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorAlreadyMapped"):
            runtime.ipcOpenMemHandle(handle, 1)
        runtime.ipcCloseMemHandle(address)
        runtime.ipcCloseMemHandle(runtime.ipcOpenMemHandle(handle, 1))
        memory = cp.cuda.Memory(1 << 21)
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorDeviceUninitialized"):
            runtime.ipcOpenMemHandle(runtime.ipcGetMemHandle(memory.ptr), 1)
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            runtime.ipcCloseMemHandle(memory.ptr)
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
            runtime.ipcGetMemHandle(cp.empty(4).data.ptr)  # a piece of the pool

    def test_who_uses_it_after_closing_it_is_stopped(self, cp, other, stream):
        _, address, seen = self.opened(cp, other)
        mine = cp.empty(4, "f4")
        mine.data.copy_from_device_async(seen.data, 16, stream)
        cp.cuda.runtime.ipcCloseMemHandle(address)
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            stream.synchronize()
        cp.cuda.runtime.fail(None)
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            cp.add(seen, 1)

    def test_who_uses_it_after_it_was_freed_is_stopped(self, cp, other):
        _, address, seen = self.opened(cp, other)
        print(file=other.stdin, flush=True)
        assert [other.stdout.readline() for _ in range(2)] == ["28.0\n", "freed\n"]
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
            cp.add(seen, 1)
        cp.cuda.runtime.fail(None)
        cp.cuda.runtime.ipcCloseMemHandle(address)
        other.stdin.close()
        assert "memory was freed that 1 processes have open" in other.stderr.read()

    def test_what_has_gone_cannot_be_opened(self, cp, other):
        handle = bytes.fromhex(other.stdout.readline())
        print(file=other.stdin, flush=True)
        assert [other.stdout.readline() for _ in range(2)] == ["28.0\n", "freed\n"]
        for name in (handle, bytes(64)):
            with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="cudaErrorInvalidValue"):
                cp.cuda.runtime.ipcOpenMemHandle(name, 1)


class TestMachine:
    SHOW = """if True:
        import cupy
        from cupy.cuda import runtime
        try:
            there = [runtime.deviceGetPCIBusId(i) for i in range(runtime.getDeviceCount())]
            print(there, runtime.contexts())
        except runtime.CUDARuntimeError as error:
            print(error)
    """

    @pytest.mark.parametrize(
        ("env", "expected"),
        [
            ({}, "['0000:00:1B.0', '0000:00:1C.0'] []"),
            ({"CUDA_VISIBLE_DEVICES": "1,0"}, "['0000:00:1C.0', '0000:00:1B.0'] []"),
            ({"CUDA_VISIBLE_DEVICES": "1,7,0"}, "['0000:00:1C.0'] []"),
            ({"CUDA_VISIBLE_DEVICES": "-1"}, "cudaErrorNoDevice: no CUDA-capable device is detected"),
            (
                {"FAKE_CUDA_DRIVER": "old"},
                "cudaErrorInsufficientDriver: CUDA driver version is insufficient for CUDA "
                "runtime version",
            ),
        ],
    )
    def test_devices(self, env, expected):
        assert run(self.SHOW, FAKE_CUDA_DEVICES="2", **env).stdout.strip() == expected

    def test_a_registration_that_outlives_its_memory_is_reported(self):
        done = run("""if True:
            import mmap, cupy, numpy
            area = mmap.mmap(-1, 1 << 20)
            address = numpy.frombuffer(area, numpy.uint8).ctypes.data
            cupy.cuda.runtime.hostRegister(address, 1 << 20, 0)
            area.close()
        """)
        assert "registered but no longer mapped" in done.stderr

    def test_a_fork_cannot_use_the_driver(self):
        done = run("""if True:
            import os, cupy
            cupy.ones(3)
            if os.fork() == 0:
                try:
                    cupy.ones(3)
                except cupy.cuda.runtime.CUDARuntimeError as error:
                    print(error, flush=True)
                os._exit(0)
            os.wait()
        """)
        assert done.stdout.strip() == "cudaErrorInitializationError: initialization error"
