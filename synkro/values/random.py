"""The random generators of the ranks, those of the whole process, and random streams as arrays."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
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
