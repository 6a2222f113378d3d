"""Even, contiguous splits: rows over ranks, a rank's rows over slices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import gcd

AUTO = "auto"
"""What ``num_slices=`` says for as many pieces as ``fitting_slices``."""

PIECE_ROWS = 1 << 14
PIECE_BYTES = 1 << 21
"""How much a piece has at least if Synkro chooses: what is computed of so many rows, a few numbers each,
fits the caches of all common cores.  With less the calls of NumPy's functions, and the starts of their
loops, begin to count.  ``benchmarks/mixture.py`` measures both; constants make equal bits everywhere."""

Span = tuple[int, int]
"""A half-open range of rows, ``(start, stop)``."""


def split(start: int, stop: int, parts: int) -> tuple[Span, ...]:
    """Cut ``start … stop`` into *parts* contiguous spans whose lengths differ by at most one.

    The first ones are the longer ones, as in ``numpy.array_split``; with fewer rows than parts the
    last spans are empty.
    """
    size, longer = divmod(stop - start, parts)
    edges = [start + part * size + min(part, longer) for part in range(parts + 1)]
    return tuple(pairwise(edges))


def split_over(count: int, ranks: Sequence[int], size: int) -> tuple[Span, ...]:
    """Split *count* rows over some *ranks* of *size*, in ascending order; the others get none."""
    spans = dict(zip(ranks, split(0, count, len(ranks)), strict=True))
    found: list[Span] = []
    for rank in range(size):
        stop = found[-1][1] if found else 0
        found.append(spans.get(rank, (stop, stop)))
    return tuple(found)


def slices_of(span: Span, slices: int) -> tuple[Span, ...]:
    """One rank's rows in *slices* pieces, or in fewer if there are fewer rows: none is empty."""
    start, stop = span
    return split(start, stop, min(slices, stop - start)) if stop > start else ()


def equal_slices(spans: tuple[Span, ...], slices: int) -> int:
    """The number of pieces, *slices* or fewer, that every rank with rows can make of them.

    All ranks compute equally many, so that their collectives match.
    """
    return min([slices, *(stop - start for start, stop in spans if stop > start)])


def fitting_slices(spans: tuple[Span, ...], row_bytes: int, chunk: int = 1) -> int:
    """Into how many pieces the longest span is cut so that what is computed of a piece fits a cache.

    *row_bytes* are those of a row of all inputs.  A piece has at least the rows of a *chunk* of a file.
    It depends on sizes alone.
    """
    longest = max(stop - start for start, stop in spans)
    return max(1, min(longest // PIECE_ROWS, longest * row_bytes // PIECE_BYTES, longest // chunk))


def weight_unit(spans: tuple[Span, ...], slices: int) -> int:
    """The greatest common divisor of the lengths of all pieces of all ranks (1 if there is none).

    Weights of a mean are rows in this unit: pieces of equal length weigh 1 and need no scaling.
    """
    unit = 0
    for start, stop in spans:
        if stop > start:
            size, longer = divmod(stop - start, min(slices, stop - start))
            unit = gcd(unit, size, size + 1 if longer else size)
    return unit or 1
