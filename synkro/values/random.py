"""The random generators of the ranks, those of the whole process, and random streams as arrays."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""A random stream as eight words: four of entropy, from which each rank makes a part of its own, or the
state of such a part."""

_HALF = (1 << 64) - 1

_GLOBAL = (1 << 32) - 1  # in the place of a rank's number: the seeds of global generators
_ITEMS = (1 << 32) - 2  # the generators of items


def generator(seed: int | list[int] | None, *stream: int) -> np.random.Generator:
    """Random generator number *stream* of *seed*, which may have several parts; all are independent.

    Source: the spawning of ``numpy.random.SeedSequence`` (M. O'Neill's seed_seq_fe).
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=stream))


def generator_of_item(seed: int, number: int, item: int) -> np.random.Generator:
    """The random generator of one *item* of map *number*; all are independent."""
    return generator(seed, _ITEMS, number, item)


def seed_globals(seed: int, *rank: int) -> None:
    """Seed this process's ``random`` and ``numpy.random`` as *rank*'s, independent of ``generator``.

    Behind the rank may stand which of its workers this is.
    """
    import random  # noqa: PLC0415  no other worker needs it

    words = _seeds(seed, *rank)
    random.seed(words[:4].tobytes())
    np.random.seed(words[4:8])


def seed_torch(seed: int, *rank: int) -> bool:
    """Seed PyTorch's global generators as *rank*'s; returns whether it is imported, as it has to be."""
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "manual_seed"):  # not imported, or not yet to the end
        return False
    torch.manual_seed(int.from_bytes(_seeds(seed, *rank)[8:].tobytes(), "little"))
    return True


def _seeds(seed: int, *rank: int) -> NDArray[Any]:
    """Ten words of 32 bits: four for ``random``, four for ``numpy.random``, two for PyTorch."""
    return np.random.SeedSequence(seed, spawn_key=(_GLOBAL, *rank)).generate_state(10)


def handed_out(stream: np.random.Generator) -> Words:
    """Entropy for the parts of all ranks, drawn from *stream*, which moves on by that."""
    words = np.zeros(8, np.uint64)
    words[:4] = stream.integers(1 << 64, size=4, dtype=np.uint64)
    return words


def to_words(part: np.random.Generator) -> Words:
    """The state of a rank's *part*."""
    full = part.bit_generator.state
    state, step = full["state"]["state"], full["state"]["inc"]
    halves = [state >> 64, state & _HALF, step >> 64, step & _HALF]
    return np.array([*halves, full["has_uint32"], full["uinteger"], 0, 1], np.uint64)


def from_words(words: Words, rank: int) -> np.random.Generator:
    """The part of *rank* whose state is *words*, or which begins by their entropy."""
    high, low, step_high, step_low, has_uint32, uinteger, _, begun = map(int, words)
    if not begun:
        return generator([high, low, step_high, step_low], rank)
    bits = np.random.PCG64(0)
    bits.state = {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": step_high << 64 | step_low},
        "has_uint32": has_uint32,
        "uinteger": uinteger,
    }
    return np.random.Generator(bits)


def state_of(generator: Any) -> Any:
    """The state of a random generator, NumPy's, Python's or PyTorch's; a copy."""
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        return generator.state
    return generator.get_state() if hasattr(generator, "get_state") else generator.getstate()


@contextlib.contextmanager
def with_states(states: Iterable[tuple[Any, Any]]) -> Iterator[None]:
    """A block in which generators begin in these *states*; after it they are as before."""
    before = [(generator, state_of(generator), state) for generator, state in states]
    try:
        for generator, _, state in before:
            put_state(generator, state)
        yield
    finally:
        for generator, state, _ in before:
            put_state(generator, state)


def put_state(generator: Any, state: Any) -> None:
    """Put a random generator into a *state*."""
    if isinstance(generator, np.random.Generator):
        generator = generator.bit_generator
    if isinstance(generator, np.random.BitGenerator):
        generator.state = state
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.setstate(state)


Reader = tuple[Callable[[], Any], Callable[[Any], Any]]
"""What reads the state of a generator, and what makes of that what ``put_state`` takes."""


def reader_of(generator: Any) -> Reader:
    """What reads the state of a generator, and what makes of that what ``state_of`` returns.

    Of those behind ``random.random`` and ``np.random.rand``, whose states Python makes in 10 to 40
    microseconds, it reads the bytes, in one; where they do not lie as expected, it does as others.
    """
    for quick in (_of_python, _of_numpy):
        with contextlib.suppress(Exception):
            read, made = quick(generator)
            if _equal(made(read()), state_of(generator)):
                return read, made
    return functools.partial(state_of, generator), lambda state: state


_MT_BYTES = 4 * 625  # of a Mersenne twister: its words, and the place among them


def _of_python(generator: Any) -> Reader:
    """Read a ``random.Random``, whose place and words lie behind what each object begins with."""
    address = id(generator) + object.__basicsize__
    read_bytes = ctypes.string_at

    def read() -> Any:
        return read_bytes(address, _MT_BYTES), generator.gauss_next

    def made(found: Any) -> Any:
        place, *words = struct.unpack("=i624I", found[0])
        return generator.VERSION, (*words, place), found[1]

    return read, made


def _of_numpy(generator: Any) -> Reader:
    """Read a ``RandomState``: NumPy tells where the words are; where it keeps the second normal number,
    of which there are two at a time, is found in another object of the class."""
    kind = type(generator)
    other = kind(1)
    other.standard_normal()
    kept = struct.pack("=d", other.get_state()[4])
    place = ctypes.string_at(id(other), kind.__basicsize__).index(kept) - 8
    address, beside = generator._bit_generator.ctypes.state_address, id(generator) + place
    read_bytes = ctypes.string_at

    def read() -> Any:
        return read_bytes(address, _MT_BYTES), read_bytes(beside, 16)

    def made(found: Any) -> Any:
        words = np.frombuffer(found[0], np.uint32)
        has, number = struct.unpack("=i4xd", found[1])
        return "MT19937", words[:-1].copy(), int(words[-1]), has, number

    return read, made


def _equal(one: Any, other: Any) -> bool:
    pairs = zip(one, other, strict=True)
    return all(bool(np.all(a == b)) and np.shape(a) == np.shape(b) for a, b in pairs if a is not None)
