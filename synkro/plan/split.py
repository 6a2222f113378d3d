"""Even, contiguous splits: rows over ranks, a rank's rows over slices."""

from __future__ import annotations

from itertools import pairwise
from math import gcd

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


def slices_of(span: Span, slices: int) -> tuple[Span, ...]:
    """One rank's rows in *slices* pieces, or in fewer if there are fewer rows: none is empty."""
    start, stop = span
    return split(start, stop, min(slices, stop - start)) if stop > start else ()


def equal_slices(spans: tuple[Span, ...], slices: int) -> int:
    """The number of pieces, *slices* or fewer, that every rank with rows can make of them.

    All ranks compute equally many, so that their collectives match.
    """
    return min([slices, *(stop - start for start, stop in spans if stop > start)])


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
