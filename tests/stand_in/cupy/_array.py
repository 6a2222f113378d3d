"""Arrays in make-believe device memory, and how NumPy's functions are made to work on them."""

from __future__ import annotations

import math

import numpy as np

from ._names import METHODS, UFUNCS, VIEWS
from .cuda import _machine, _queues, memory, runtime, stream
from .cuda.device import Device

_REFUSED = ("initial", "like", "subok", "where")  # keywords of NumPy that CuPy's functions do not have


def check_dtype(dtype):
    """The dtype, if a device has it; of a void type it knows the bytes."""
    dtype = np.dtype(dtype)
    if dtype.byteorder == ">":
        raise ValueError(f"Unsupported dtype {dtype} with big-endian byte-order")
    bytes_alone = dtype.kind == "V" and dtype.itemsize and not dtype.hasobject and not dtype.subdtype
    if dtype.char not in "?bhilqBHILQefdFD" and not bytes_alone and dtype.name != "bfloat16":
        raise ValueError(f"Unsupported dtype {dtype}")
    return dtype


def enter():
    """What comes before work that runs at once: all that is queued before it."""
    _machine.check()
    _queues.catch_up(stream.current_queue())


def unwrap(value):
    """The NumPy arrays inside `value`, where arrays of the host are not welcome.

    Kernels take numbers for native ones whatever their dtype says.
    """
    if isinstance(value, ndarray):
        value.data.mem._check()
        return value._a if value.dtype.isnative else value._a.view(value.dtype.newbyteorder("="))
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError(f"Unsupported type {type(value)}")
    if type(value) in {list, tuple}:
        return type(value)(unwrap(item) for item in value)
    return value


def wrap(value, base=None):
    """`value` with arrays of the device for arrays and scalars of NumPy."""
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        return _adopt(value, base)
    if isinstance(value, (tuple, list)):
        items = [wrap(item, base) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _adopt(source, base):
    """A view where `source` lies in device memory already, a new array with its contents otherwise."""
    address = source.__array_interface__["data"][0]
    owner = memory.find(address) if source.size else None
    if owner is None and base is not None and np.may_share_memory(source, base._a):
        owner = base.data.mem
    if owner is None:
        fortran = source.flags.f_contiguous and not source.flags.c_contiguous
        result = ndarray(source.shape, source.dtype, order="F" if fortran else "C")
        result._a[...] = source
        return result
    pointer = memory.MemoryPointer(owner, address - owner.ptr)
    result = ndarray(source.shape, source.dtype, pointer, source.strides)
    if base is not None and base.data.mem is owner:
        result.base = base if base.base is None else base.base
    return result


def call(function, args, kwargs, *, view=False):
    """Apply a function of NumPy, once what is queued before it has run unless it makes but a view."""
    for name in _REFUSED:
        if name in kwargs:
            raise TypeError(f"{function.__name__}() got an unexpected keyword argument '{name}'")
    if view:
        _machine.check()
    else:
        enter()
    out = kwargs.get("out")
    inner = {name: unwrap(value) for name, value in kwargs.items()}
    with np.errstate(all="ignore"):
        result = function(*unwrap(tuple(args)), **inner)
    if out is not None:
        return out[0] if isinstance(out, tuple) and len(out) == 1 else out
    base = next((arg for arg in args if isinstance(arg, ndarray)), None)
    return wrap(result, base)


class ufunc:
    """A universal function; unlike NumPy's it takes neither lists nor arrays of the host."""

    __slots__ = ("__name__", "_function", "name", "nargs", "nin", "nout")

    def __init__(self, function):
        self._function = function
        self.name = f"cupy_{function.__name__}"
        self.nin, self.nout, self.nargs = function.nin, function.nout, function.nargs
        self.__name__ = function.__name__

    def __repr__(self):
        return f"<ufunc '{self.name}'>"

    def __call__(self, *args, **kwargs):
        wrong = kwargs.keys() - {"out", "dtype", "casting"}
        if wrong:
            raise TypeError(f"Wrong arguments {wrong}")
        for arg in args:
            if isinstance(arg, (list, tuple)):
                raise TypeError(f"Unsupported type {type(arg)}")
        if len(args) > self.nin:
            out = args[self.nin :]
            args, kwargs = args[: self.nin], {**kwargs, "out": out[0] if len(out) == 1 else out}
        return call(self._function, args, kwargs)


class flags:
    """How an array lies in memory."""

    def __init__(self, inner, owndata):
        self.c_contiguous, self.f_contiguous = inner.c_contiguous, inner.f_contiguous
        self.owndata = owndata
        self.fnc, self.forc = inner.fnc, inner.forc

    def __getitem__(self, name):
        return getattr(
            self, {"C": "c_contiguous", "F": "f_contiguous", "O": "owndata"}.get(name, name.lower())
        )


class _Held(np.ndarray):
    """NumPy's array inside of one of the device, which it keeps alive."""


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device. NumPy does its work, on memory that only `get` brings to the host."""

    __slots__ = ("__weakref__", "_a", "base", "data")
    __array_priority__ = 100

    def __init__(self, shape, dtype=float, memptr=None, strides=None, order="C"):
        shape = tuple(shape) if hasattr(shape, "__iter__") else (int(shape),)
        dtype = np.dtype(dtype)
        if memptr is None:  # memory that is there already holds whatever it holds
            check_dtype(dtype)
        nbytes = math.prod(shape) * dtype.itemsize
        self.data = memory.alloc(nbytes) if memptr is None else memptr
        self.base = None
        mem = self.data.mem
        offset = {} if not nbytes else {"buffer": mem.buffer, "offset": self.data.ptr - mem.ptr}
        self._a = np.ndarray(shape, dtype, strides=strides, order=order, **offset)

    dtype = property(lambda self: self._a.dtype)
    ndim = property(lambda self: self._a.ndim)
    size = property(lambda self: self._a.size)
    nbytes = property(lambda self: self._a.nbytes)
    itemsize = property(lambda self: self._a.itemsize)
    strides = property(lambda self: self._a.strides)
    device = property(lambda self: Device(self.data.device_id))
    flags = property(lambda self: flags(self._a.flags, self.base is None))
    T = property(lambda self: wrap(self._a.T, self))

    @property
    def shape(self):
        """Its extents; it can be assigned as long as no copy is needed."""
        return self._a.shape

    @shape.setter
    def shape(self, shape):
        self._a = self._a.view()
        self._a.shape = shape

    @property
    def real(self):
        """A view of the real part."""
        return wrap(self._a.real, self)

    @real.setter
    def real(self, value):
        self.real[...] = value

    @property
    def imag(self):
        """A view of the imaginary part; zeros where there is none."""
        return wrap(self._a.imag, self)

    @imag.setter
    def imag(self, value):
        self.imag[...] = value

    @property
    def __cuda_array_interface__(self):
        current = stream.get_current_stream().ptr
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "stream": current or _queues.LEGACY,
            "version": 3,
            "strides": None if self._a.flags.c_contiguous else self.strides,
            "data": (self.data.ptr, False),
        }

    def __array__(self, dtype=None, copy=None):
        raise TypeError(
            "Implicit conversion to a NumPy array is not allowed. "
            "Please use `.get()` to construct a NumPy array explicitly."
        )

    def __dlpack_device__(self):
        """That of the host, where the make-believe memory lies."""
        return self._a.__dlpack_device__()

    def __dlpack__(self, **options):
        enter()
        stream.get_current_stream().synchronize()
        held = self._a.view(_Held)
        held.owner = self  # whose memory is there for as long as the other library needs it
        return held.__dlpack__(**{name: o for name, o in options.items() if name != "stream"})

    def __array_ufunc__(self, function, method, *inputs, **kwargs):
        if method != "__call__" or function.__name__ not in UFUNCS:
            return NotImplemented
        if len(kwargs.get("out", ())) == 1:
            kwargs["out"] = kwargs["out"][0]
        if function is np.matmul:
            return call(function, inputs, kwargs)
        return ufunc(function)(*inputs, **kwargs)

    def __array_function__(self, function, types, args, kwargs):
        import cupy

        module = cupy.linalg if function.__module__ == "numpy.linalg" else cupy
        ours = getattr(module, function.__name__, function)
        return NotImplemented if ours is function else ours(*args, **kwargs)

    def __getattr__(self, name):
        if name not in METHODS:
            raise AttributeError(f"'cupy.ndarray' object has no attribute '{name}'")

        def method(*args, **kwargs):
            inner = getattr(np, name) if name == "ptp" else getattr(np.ndarray, name)
            return call(inner, (self, *args), kwargs, view=name in VIEWS)

        return method

    def __len__(self):
        return len(self._a)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    @staticmethod
    def _index(index):
        """`index` so that a view or a copy, never a scalar, comes of it; whether it needs the device."""
        parts = index if isinstance(index, tuple) else (index,)
        arrays = any(
            not (p is None or p is Ellipsis or isinstance(p, slice) or np.isscalar(p)) for p in parts
        )
        parts = tuple(p._a if isinstance(p, ndarray) else p for p in parts)
        return parts if any(p is Ellipsis for p in parts) else (*parts, Ellipsis), arrays

    def __getitem__(self, index):
        inner, arrays = self._index(index)
        if arrays:
            enter()
        return wrap(self._a[inner], self)

    def __setitem__(self, index, value):
        inner, _ = self._index(index)
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        if isinstance(value, (list, tuple)):
            raise TypeError(f"Unsupported type {type(value)}")
        enter()
        self.data.mem._check()
        with np.errstate(all="ignore"):
            self._a[inner] = unwrap(value)

    def get(self, stream=None, order="C", out=None, blocking=True):
        """The array on the host: in a new array, or in `out`, where it comes in stream order."""
        if out is None:
            out = np.empty(self.shape, self.dtype, order="F" if self._order(order) == "F" else "C")
        elif not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained from cupy.ndarray")
        elif out.dtype != self.dtype:
            raise TypeError(f"{self.dtype} array cannot be obtained from {out.dtype} array")
        elif out.shape != self.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        if out.flags.c_contiguous:
            source = self if self._a.flags.c_contiguous else self.copy("C")
        elif out.flags.f_contiguous:
            source = self if self._a.flags.f_contiguous else self.copy("F")
        else:
            raise RuntimeError("`out` cannot be specified when copying to non-contiguous ndarray")
        used = _current(stream)
        runtime.memcpyAsync(
            out.__array_interface__["data"][0],
            source.data.ptr,
            self.nbytes,
            runtime.memcpyDeviceToHost,
            used.ptr,
        )
        if blocking:
            used.synchronize()
        return out

    def _order(self, order):
        """'C' or 'F' for an order that may depend on how the array lies."""
        if order in {"A", "K"}:
            return "F" if self._a.flags.fnc else "C"
        return order.upper()

    def set(self, arr, stream=None):
        """Fill the array from the host; in stream order unless the stream is the null stream."""
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if self._a.flags.c_contiguous:
            arr = np.ascontiguousarray(arr)
        elif self._a.flags.f_contiguous:
            arr = np.asfortranarray(arr)
        else:
            raise RuntimeError("Cannot set to non-contiguous array")
        address = arr.__array_interface__["data"][0]
        if stream is None and _current(None).ptr == 0:
            self.data.copy_from_host(address, self.nbytes)
        else:
            self.data.copy_from_host_async(address, self.nbytes, stream)

    def copy(self, order="C"):
        """A new array with the same contents, on the current device."""
        enter()
        if self.size and self.device != Device() and not self._a.flags.forc:
            raise NotImplementedError("CuPy cannot copy non-contiguous array between devices.")
        result = ndarray(self.shape, self.dtype, order=self._order(order))
        result._a[...] = self._a
        return result

    def astype(self, dtype, order="K", casting=None, subok=None, copy=True):
        """The array in another dtype; itself where that is allowed and nothing changes."""
        dtype = check_dtype(dtype)
        if not copy and dtype == self.dtype:
            return self
        if casting is not None and not np.can_cast(self.dtype, dtype, casting):
            rule = f"according to the rule '{casting}'"
            raise TypeError(f"Cannot cast array data from {self.dtype!r} to {dtype!r} {rule}")
        enter()
        result = ndarray(self.shape, dtype, order=self._order(order))
        with np.errstate(all="ignore"):
            result._a[...] = self._a.astype(dtype)
        return result

    def view(self, dtype=None, type=None):
        """The same memory, in another dtype if told."""
        return wrap(self._a.view() if dtype is None else self._a.view(dtype), self)

    def reshape(self, *shape, order="C", copy=None):
        """The array in another shape, as a view where that is possible."""
        if copy:
            return self.copy().reshape(*shape, order=order)
        return call(np.ndarray.reshape, (self, *shape), {"order": order}, view=self._a.flags.forc)

    def ravel(self, order="C"):
        """The array in one dimension, as a view where that is possible."""
        return call(np.ndarray.ravel, (self,), {"order": order}, view=self._a.flags.forc)

    def fill(self, value):
        """Set every element to a scalar."""
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        self[...] = value

    def take(self, indices, axis=None, out=None):
        """Elements along an axis; indices that are out of bounds wrap around, as on a device."""
        enter()
        inner = indices._a if isinstance(indices, ndarray) else np.asarray(indices, dtype=int)
        result = np.take(self._a, inner, axis=axis, mode="wrap")
        if out is None:
            return wrap(result)
        if out.dtype != self.dtype:
            raise TypeError("Output dtype mismatch")
        if out.shape != result.shape:
            raise ValueError("Output shape mismatch")
        out._a[...] = result
        return out

    def item(self):
        """The one element as a scalar of Python."""
        return self.get().item()

    def tolist(self):
        """The elements in lists."""
        return self.get().tolist()

    def tobytes(self, order="C"):
        """The elements as bytes."""
        return self.get().tobytes(order)

    def __bool__(self):
        return bool(self.get())

    def __int__(self):
        return int(self.get())

    def __float__(self):
        return float(self.get())

    def __complex__(self):
        return complex(self.get())

    def __str__(self):
        return str(self.get())

    def __repr__(self):
        return repr(self.get())

    def __format__(self, spec):
        return format(self.get(), spec)

    def __copy__(self):
        return self.copy()

    def __deepcopy__(self, memo):
        with self.device:
            return self.copy()

    def __reduce__(self):
        return (array, (self.get(),))


def _current(given):
    """A stream that was given, or the current one."""
    return stream.get_current_stream() if given is None else given


def array(obj, dtype=None, copy=True, order="K", subok=False, ndmin=0, *, blocking=False):
    """A new array on the current device, from the host (staged: `obj` may change at once) or from it."""
    if not isinstance(obj, ndarray) and hasattr(obj, "__cuda_array_interface__"):
        obj = _foreign(obj.__cuda_array_interface__)
    if isinstance(obj, ndarray):
        result = obj.astype(obj.dtype if dtype is None else dtype, order=order or "K", copy=bool(copy))
        return result[(None,) * (ndmin - result.ndim)] if result.ndim < ndmin else result
    source = obj if isinstance(obj, np.ndarray) else np.array(_from_lists(obj))
    source = np.array(source, dtype=dtype, copy=None, order=order or "K", ndmin=ndmin)
    source = source.astype(source.dtype.newbyteorder("="), copy=False)
    fortran = source.flags.fnc
    result = ndarray(source.shape, source.dtype, order="F" if fortran else "C")
    if source.size:
        source = source if source.flags.forc else np.ascontiguousarray(source)
        runtime._upload(result.data.ptr, source, stream.current_queue())
    if blocking:
        _current(None).synchronize()
    return result


def _foreign(interface):
    """A view of the memory that an object of another library describes; it must be the stand-in's."""
    if interface["typestr"].startswith(">"):
        raise ValueError("CuPy does not support the big-endian byte-order")
    if interface.get("stream") is not None:
        runtime.streamSynchronize(interface["stream"])
    if 0 in interface["shape"]:
        return ndarray(interface["shape"], interface["typestr"])
    address = interface["data"][0]
    owner = memory.find(address)
    if owner is None:
        raise runtime.CUDARuntimeError(_machine.INVALID_VALUE)
    pointer = memory.MemoryPointer(owner, address - owner.ptr)
    return ndarray(interface["shape"], interface["typestr"], pointer, interface.get("strides"))


def _from_lists(obj):
    """Nested lists with arrays of the device replaced by what they hold."""
    if isinstance(obj, ndarray):
        return obj.get()
    if isinstance(obj, (list, tuple)):
        return [_from_lists(item) for item in obj]
    return obj
