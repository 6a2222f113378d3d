"""What the tests of ``f.options(out=…)`` share: inputs, a function, and disks that are soon full."""

import contextlib
import os
import subprocess

import numpy as np
import pytest

from .sessions import LARGE

SMALL, BIG = 3, LARGE // 64  # columns: of these, 101 rows fit the outboxes, or do not


def doubled(x):
    return 2 * x


def numbers(columns, rows=101):
    return np.arange(1.0 * rows * columns, dtype="f4").reshape(rows, columns)


@contextlib.contextmanager
def small_disk(folder, megabytes):
    """A folder in *folder* with a disk of its own, while the block lasts."""
    disk = folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", disk]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a small disk is mounted by root only")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", disk], check=True)
