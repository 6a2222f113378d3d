"""Print as JSON what a CuPy, the real one or the stand-in, does where there is no driver.

Run by a Python that finds one of them, with numbers of CUDA's errors as arguments: both must print the
same.
"""

import json
import pickle
import sys
import types
from ctypes import addressof, c_char

import cupy
import numpy as np
from cupy.cuda import memory, nccl, runtime

found = {}


def outcome(function):
    """What a function returns or raises, as text."""
    try:
        result = function()
    except Exception as error:
        return f"{type(error).__name__}: {error}".replace("cupy_backends.cuda.libs.nccl.", "")
    return f"{type(result).__name__}: {result!r}"


def note(name, function):
    """Write down what a function does under its name."""
    assert name not in found
    found[name] = outcome(function)


def errors():
    """The texts and numbers of errors, before and after they were pickled."""

    def both(make):
        error = make()
        copy = pickle.loads(pickle.dumps(error))
        return [(str(each), getattr(each, "status", None)) for each in (error, copy)]

    for status in range(-1, 11):
        note(f"NcclError({status})", lambda: both(lambda: nccl.NcclError(status)))
    for status in map(int, sys.argv[1:]):
        note(f"CUDARuntimeError({status})", lambda: both(lambda: runtime.CUDARuntimeError(status)))
    note("OutOfMemoryError", lambda: both(lambda: memory.OutOfMemoryError(1024, 2048)))
    note("OutOfMemoryError, limited", lambda: both(lambda: memory.OutOfMemoryError(1024, 2048, 4096)))


def calls_of_the_runtime():
    """What needs a driver fails, and what asks for a status does not."""
    calls = {
        "deviceCanAccessPeer": (0, 1),
        "deviceGetAttribute": (runtime.cudaDevAttrWarpSize, 0),
        "deviceGetPCIBusId": (0,),
        "deviceSynchronize": (),
        "driverGetVersion": (),
        "eventQuery": (0,),
        "getDevice": (),
        "getDeviceCount": (),
        "getDeviceProperties": (0,),
        "hostRegister": (4096, 4096, 0),
        "hostUnregister": (4096,),
        "ipcCloseMemHandle": (4096,),
        "ipcGetMemHandle": (4096,),
        "ipcOpenMemHandle": (bytes(64), runtime.cudaIpcMemLazyEnablePeerAccess),
        "memGetInfo": (),
        "memcpy": (4096, 8192, 16, runtime.memcpyHostToDevice),
        "memcpyAsync": (4096, 8192, 16, runtime.memcpyHostToDevice, 0),
        "memset": (4096, 0, 16),
        "memsetAsync": (4096, 0, 16, 0),
        "runtimeGetVersion": (),
        "setDevice": (0,),
        "streamQuery": (0,),
        "streamSynchronize": (0,),
    }
    for name, arguments in calls.items():
        note(f"runtime.{name}", lambda: getattr(runtime, name)(*arguments))
    note("memcpyAsync of nothing", lambda: runtime.memcpyAsync(0, 0, 0, 1, 0))
    note("cupy.is_available", cupy.is_available)
    note("cuda.is_available", cupy.cuda.is_available)
    note("get_device_id", cupy.cuda.get_device_id)


def devices():
    """A device is a number until it is used."""
    device = cupy.cuda.Device
    note("Device(0)", lambda: device(0))
    note("Device(9)", lambda: device(9))
    note("Device()", device)
    note("Device, compared", lambda: (device(0) == device(0), device(0) == device(1), device(0) == 0))
    note("Device, as a number", lambda: (int(device(1)), device(1).id))
    for name in ("attributes", "compute_capability", "mem_info", "pci_bus_id"):
        note(f"Device.{name}", lambda: getattr(device(0), name))
    for name in ("use", "synchronize", "__enter__"):
        note(f"Device.{name}", lambda: getattr(device(0), name)())


def streams():
    """The null stream is there always, others are not."""
    null = cupy.cuda.Stream.null
    note("Stream()", cupy.cuda.Stream)
    note("Stream(non_blocking)", lambda: cupy.cuda.Stream(non_blocking=True))
    note("Stream.null", lambda: (null, null.ptr, null.device_id, hash(null), null.__cuda_stream__()))
    note("Stream.ptds", lambda: (cupy.cuda.Stream.ptds, cupy.cuda.Stream.ptds.ptr))
    others = cupy.cuda.Stream(null=True), cupy.cuda.Stream.ptds
    note("Stream, compared", lambda: [null == other for other in others])
    note("get_current_stream", cupy.cuda.get_current_stream)
    note("Stream.done", lambda: null.done)
    note("Stream.is_non_blocking", lambda: null.is_non_blocking)
    for name in ("synchronize", "record", "use", "__enter__"):
        note(f"Stream.{name}", getattr(null, name))
    note("Event()", cupy.cuda.Event)
    note("Event(disable_timing)", lambda: cupy.cuda.Event(disable_timing=True))


def memories():
    """What pools and allocations do that need no driver, and those that do."""
    pool, pinned = cupy.get_default_memory_pool(), cupy.get_default_pinned_memory_pool()
    for name in ("used_bytes", "total_bytes", "free_bytes", "get_limit", "free_all_blocks"):
        note(f"MemoryPool.{name}", getattr(pool, name))
    note("MemoryPool.set_limit", lambda: pool.set_limit(size=4096))
    note("MemoryPool.malloc(0)", lambda: pool.malloc(0))
    note("MemoryPool.malloc(1)", lambda: pool.malloc(1))
    note("PinnedMemoryPool.n_free_blocks", pinned.n_free_blocks)
    note("PinnedMemoryPool.free_all_blocks", pinned.free_all_blocks)
    note("alloc(0)", lambda: cupy.cuda.alloc(0))
    note("Memory(16)", lambda: cupy.cuda.Memory(16))
    note("PinnedMemory(0)", lambda: cupy.cuda.PinnedMemory(0).ptr)
    note("PinnedMemory(16)", lambda: cupy.cuda.PinnedMemory(16))
    note("alloc_pinned_memory(16)", lambda: cupy.cuda.alloc_pinned_memory(16))

    area = (c_char * 16)()
    block = types.SimpleNamespace(ptr=addressof(area), size=16, _pages=area)
    pointer = cupy.cuda.PinnedMemoryPointer(block, 4)
    view = memoryview(pointer)
    note("PinnedMemoryPointer", lambda: (pointer.ptr - block.ptr, int(pointer) - pointer.ptr))
    note("its size", pointer.size)
    note("its buffer", lambda: (view.format, view.itemsize, view.shape, view.strides, view.readonly))
    note("an array over it", lambda: np.frombuffer(pointer, np.uint8, 12).ctypes.data - block.ptr)


def arrays():
    """New arrays take some dtypes only; arrays over memory that is there take all."""
    dtypes = [*"?bhiqBHIQefdFDgGO", ">f8", ">i4", ">i1", "<U3", "S3", "M8[s]", "m8[s]", "V4", "f4,i4"]
    for dtype in dtypes:
        note(f"empty {dtype}", lambda: cupy.empty(3, dtype))
    for dtype in (">f8", "M8[s]", "O"):
        note(f"array {dtype}", lambda: cupy.array(np.zeros(3, dtype)))
    for shape in (0, (0, 3)):
        note(f"empty{shape}", lambda: cupy.empty(shape))
    for name, function in {
        "asarray": lambda: cupy.asarray([1.0, 2.0]),
        "arange": lambda: cupy.arange(3),
        "rand": lambda: cupy.random.rand(3),
        "seed": lambda: cupy.random.seed(0),
        "asnumpy": lambda: cupy.asnumpy([1, 2]),
        "a name that is not there": lambda: cupy.nonesuch,
        "get_array_module": lambda: cupy.get_array_module(np.ones(3)).__name__,
    }.items():
        note(name, function)

    mem = cupy.cuda.UnownedMemory(1 << 20, 4096, None, 0)
    pointer = cupy.cuda.MemoryPointer(mem, 0)
    later = pointer + 512
    note("MemoryPointer", lambda: (pointer.ptr, int(later), (later - 12).ptr, later.mem is mem))
    note("its device", lambda: (pointer.device_id, pointer.device, mem.device, mem.size))
    for dtype in [each for each in dtypes if each != "O"]:
        array = cupy.ndarray((3, 2), dtype, pointer)
        note(f"over memory: {dtype}", lambda: described(array))
        note(f"its rows: {dtype}", lambda: described(array[1:]))
        note(f"transposed: {dtype}", lambda: described(array.T))
    array = cupy.ndarray((3, 2), "f8", later, order="F")
    note("in the order of Fortran", lambda: described(array))
    note("with strides", lambda: described(cupy.ndarray((3,), "f4", pointer, (8,))))
    note("seen as big-endian", lambda: described(array.view(">f8")))
    note("a new attribute", lambda: setattr(array, "extra", 1))
    note("NumPy's array of it", lambda: np.asarray(array))
    note("filled from the host", lambda: array.__setitem__(Ellipsis, np.ones((3, 2))))
    note("set from a list", lambda: array.set([1]))
    note("set from another dtype", lambda: array.set(np.ones((3, 2), "f4")))
    note("set from another shape", lambda: array.set(np.ones(3)))
    note("get", array.get)
    other = {"shape": (3,), "typestr": ">f8", "data": (1 << 20, False), "version": 3}
    theirs = types.SimpleNamespace(__cuda_array_interface__=other)
    note("another library's big-endian array", lambda: cupy.asarray(theirs))


def described(array):
    """How an array lies in memory."""
    flags = array.flags.c_contiguous, array.flags.f_contiguous, array.flags.owndata
    size = array.dtype.str, array.shape, array.strides, array.size, array.nbytes, array.ndim
    return (*size, array.data.ptr, array.data.mem.ptr, array.device, *flags)


def communicators():
    """NCCL looks for the driver before it looks at the ranks; its groups need none."""
    identity = nccl.get_unique_id()
    note("nccl.available", lambda: nccl.available)
    note("nccl.get_version", nccl.get_version)
    note("nccl.get_build_version", nccl.get_build_version)
    note("nccl.get_unique_id", lambda: (type(identity), len(identity), identity != nccl.get_unique_id()))

    comm = nccl.NcclCommunicator.__new__(nccl.NcclCommunicator)  # as one that was aborted
    one = {
        "allReduce": (4096, 4096, 1, nccl.NCCL_INT8, nccl.NCCL_SUM, 0),
        "reduce": (4096, 4096, 1, nccl.NCCL_INT8, nccl.NCCL_SUM, 0, 0),
        "broadcast": (4096, 4096, 1, nccl.NCCL_INT8, 0, 0),
        "reduceScatter": (4096, 4096, 1, nccl.NCCL_INT8, nccl.NCCL_SUM, 0),
        "allGather": (4096, 4096, 1, nccl.NCCL_INT8, 0),
        "send": (4096, 1, nccl.NCCL_INT8, 0, 0),
        "recv": (4096, 1, nccl.NCCL_INT8, 0, 0),
        "size": (),
        "rank_id": (),
        "device_id": (),
        "check_async_error": (),
        "abort": (),
        "destroy": (),
    }
    for name, arguments in one.items():
        note(f"aborted: {name}", lambda: getattr(comm, name)(*arguments))
    note("aborted: a new attribute", lambda: setattr(comm, "extra", 1))

    note("groupEnd without a group", nccl.groupEnd)
    for name in ("groupStart", "groupStart", "groupEnd", "groupEnd", "groupEnd"):
        note(f"{len(found)}: {name}", getattr(nccl, name))
    for name in ("allReduce", "send", "size"):  # the last is no operation of the group
        nccl.groupStart()
        nccl.groupStart()
        outcome(lambda: getattr(comm, name)(*one[name]))
        note(f"the inner end after {name}", nccl.groupEnd)
        note(f"the outer end after {name}", nccl.groupEnd)

    # the last of all: where NCCL fails to make a communicator, the thread stays in a group
    for name, arguments in {
        "one rank": (1, identity, 0),
        "no ranks": (0, identity, 0),
        "a rank too many": (1, identity, 1),
        "a rank too few": (1, identity, -1),
        "a short identity": (1, identity[:100], 0),
        "a long identity": (1, identity + b"x", 0),
        "an empty identity": (1, b"", 0),
        "an identity of ints": (1, tuple(identity), 0),
        "a bytearray": (1, bytearray(identity), 0),
        "a text": (1, "x" * 128, 0),
        "None": (1, None, 0),
    }.items():
        note(f"NcclCommunicator: {name}", lambda: nccl.NcclCommunicator(*arguments))


if __name__ == "__main__":
    for part in (errors, calls_of_the_runtime, devices, streams, memories, arrays, communicators):
        part()
    print(json.dumps(found))
