"""The random generators of the ranks."""

from __future__ import annotations

import numpy as np


def generator(seed: int | None, stream: int) -> np.random.Generator:
    """Random generator number *stream* of *seed*; all are independent.

    Source: the spawning of ``numpy.random.SeedSequence`` (M. O'Neill's seed_seq_fe).
    """
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(stream,)))
