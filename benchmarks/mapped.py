"""How fast is a pass over a data set that is larger than memory?

Floor: the bytes over what the disk reads: one process that reads the file front to back, in pieces of
16 MB, with the same function.

The file is made as large as asked for, or as the disk allows (a note says so), and read with cold
caches: what was read is dropped from the page cache before each pass (``posix_fadvise``).

Peers: the same function in one process over ``numpy.memmap``.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

import synkro
from synkro.machine import available_memory, readable_bytes

from .common import Report, Side, main, paired

_PIECE = 1 << 24
_SPARE = 4 << 30  # bytes of disk to leave


def total(x):
    return x.sum(dtype=np.float64)


def write(path: Path, nbytes: int) -> None:
    piece = np.ones(_PIECE // 4, np.float32).tobytes()
    with path.open("wb") as file:
        for _ in range(nbytes // _PIECE):
            file.write(piece)
        os.fsync(file.fileno())


def forget(path: Path) -> tuple[()]:
    """Drop the file from the page cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ()


def ask(report: Report, runs: int, times_memory: float, at_most: int) -> None:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        path = Path(folder, "rows.f32")
        room = shutil.disk_usage(folder).free - _SPARE
        wanted = min(int(times_memory * available_memory()), at_most)
        nbytes = max(_PIECE, min(wanted, room) // _PIECE * _PIECE)
        if nbytes < wanted - _PIECE:
            report.note(f"the disk has room for {readable_bytes(nbytes)} only.")
        start = time.monotonic()
        write(path, nbytes)
        report.note(
            f"{readable_bytes(nbytes)} in the file, {readable_bytes(available_memory())} of memory; "
            f"written in {time.monotonic() - start:.0f} s."
        )
        rows = np.memmap(path, np.float32, "r", shape=(nbytes // 4096, 1024))
        slices = max(1, nbytes // (1 << 30))
        with synkro.Session(2, verbose=False) as session:
            f = session.function(total, outputs="sum")
            data = session.data(rows)
            assert f(data, num_slices=slices) == nbytes // 4
            samples = paired(
                [
                    Side("Synkro, two workers", lambda: f(data, num_slices=slices), prepare=cold(path)),
                    Side("one process, memmap", lambda: total(rows), prepare=cold(path)),
                    Side("one process, read()", lambda: read(path), prepare=cold(path)),
                ],
                runs,
                first=False,
            )
    report.table(f"a pass over {readable_bytes(nbytes)}", samples)
    for peer in ("one process, memmap", "one process, read()"):
        report.ratio(f"{peer} ÷ Synkro", samples[peer], samples["Synkro, two workers"])


def cold(path: Path):
    return lambda: forget(path)


def read(path: Path) -> float:
    found = 0.0
    with path.open("rb", buffering=0) as file:
        while piece := file.read(_PIECE):
            found += total(np.frombuffer(piece, np.float32))
    return found


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 2, "times_memory": 1.2, "at_most": 1 << 40},
        quick={"runs": 2, "at_most": 1 << 30},
        smoke={"runs": 1, "at_most": 1 << 24},
    )
