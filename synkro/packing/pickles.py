"""Functions as bytes, and callables again: pickled by cloudpickle."""

from __future__ import annotations

import functools
import inspect
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle

from ..errors import InvalidType
from ..values.arrays import shortened
from ..values.foreign import is_movable, is_numba
from .refused import advice, is_open_file

OUT_OF_BAND = 1 << 15
"""Buffers from this many bytes on stay out of the pickle: they travel once, in shared memory."""

_ADVICE = "Create such an object inside the function, or pass what it is made of as an argument."


class Packer:
    """Makes functions ready to travel: lambdas, partials, bound methods, callable objects."""

    def pack(self, specs: Mapping[int, Any]) -> tuple[bytes, list[memoryview]]:
        """All *specs* (by number) in one stream of pickles, and their big buffers beside it.

        Objects that several specs share stay shared.  PyTorch's modules and optimizers that functions
        bring along come last in the stream.

        Raises: InvalidType, which names the function and the object that cannot be pickled.
        """
        buffers: list[memoryview] = []
        along: list[Any] = []

        def reduced(obj: Any) -> Any:
            if is_movable(obj):
                along.append(obj)
            return self._compilations.reduced(obj) if is_numba(obj) else NotImplemented

        def keep_in_band(buffer: pickle.PickleBuffer) -> bool:
            try:
                raw = buffer.raw()
            except BufferError:  # not contiguous
                return True
            if raw.nbytes < OUT_OF_BAND:
                return True
            buffers.append(raw)
            return False

        try:
            stream = _pickled([len(specs), *specs.items(), along], keep_in_band, reduced)
        except Exception as error:
            for spec in specs.values():
                _explain(spec, error)
            raise
        return stream, buffers

    @functools.cached_property
    def _compilations(self) -> Any:
        from .numba import Compilations  # noqa: PLC0415  whoever has such functions has imported it

        return Compilations()

    def close(self) -> None:
        """Close the file of numba's machine code, if there is one."""
        if "_compilations" in vars(self):
            vars(self).pop("_compilations").close()


def unpack(
    stream: bytes, buffers: Sequence[memoryview], loading: Callable[[int], None]
) -> tuple[dict[int, Any], list[Any]]:
    """The inverse of ``pack``, in a worker: the specs, and PyTorch's modules and optimizers.

    *loading* is called before each spec, with the number of those that are loaded.
    """
    pickles = pickle.Unpickler(io.BytesIO(stream), buffers=buffers)
    specs = {}
    for done in range(pickles.load()):
        loading(done)
        number, spec = pickles.load()
        specs[number] = spec
    return specs, pickles.load()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, reduced: Callable[[Any], Any], file: io.BytesIO, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self._reduced = reduced

    def reducer_override(self, obj: Any) -> Any:
        if is_open_file(obj):
            raise TypeError(f"cannot send the open file {obj!r}")
        reduced = self._reduced(obj)
        return super().reducer_override(obj) if reduced is NotImplemented else reduced


def _pickled(
    values: Iterable[Any],
    buffer_callback: Callable[[pickle.PickleBuffer], bool | None],
    reduced: Callable[[Any], Any] = lambda _: NotImplemented,
) -> bytes:
    """*values*, one pickle after the other, in which shared objects stay shared.

    *reduced* returns how an object is pickled, or NotImplemented: as cloudpickle does it.
    """
    stream = io.BytesIO()
    pickler = _Pickler(reduced, stream, buffer_callback=buffer_callback)
    for value in values:
        pickler.dump(value)
    return stream.getvalue()


def _explain(spec: Any, error: Exception) -> None:
    """Raise an InvalidType that names the function of *spec*, if that cannot be pickled."""
    if _pickles(spec.fn):
        return
    if isinstance(error, InvalidType):  # it says itself what to do
        raise InvalidType(
            f"the function {spec.name!r} cannot be sent to the workers: {error}"
        ) from error
    found = ((where, part) for where, part in _parts(spec.fn) if not _pickles(part))
    where, culprit = ("", spec.fn) if advice(spec.fn) else next(found, ("", spec.fn))
    instead = advice(culprit) or _ADVICE
    subject = f"{where}, {shortened(culprit)}," if where else "it"
    reason = str(error).strip().splitlines()[0]
    raise InvalidType(
        f"the function {spec.name!r} cannot be sent to the workers: {subject} cannot be pickled "
        f"({type(error).__name__}: {reason}). {instead}"
    ) from error


def _pickles(value: Any) -> bool:
    try:
        _pickled([value], lambda _: None)
    except Exception:
        return False
    return True


def _parts(fn: Any) -> Iterator[tuple[str, Any]]:
    """The objects that a callable carries along, each with its name in a sentence."""
    for name in ("__self__", "func"):  # a bound method's object, a partial's function
        if hasattr(fn, name):
            part = getattr(fn, name)
            yield f"its {name}", part
            yield from _parts(part)
    for index, value in enumerate(getattr(fn, "args", ())):
        yield f"its argument {index}", value
    for name, value in getattr(fn, "keywords", {}).items():
        yield f"its argument {name!r}", value
    if inspect.isfunction(fn) or inspect.ismethod(fn):
        used = inspect.getclosurevars(fn)
        for name, value in used.nonlocals.items():
            yield f"the variable {name!r} that it closes over", value
        for name, value in used.globals.items():
            yield f"the global variable {name!r} that it uses", value
    else:
        for name, value in getattr(fn, "__dict__", {}).items():
            yield f"its attribute {name!r}", value
    for index, value in enumerate(getattr(fn, "__defaults__", None) or ()):
        yield f"the default of its parameter {index}", value
