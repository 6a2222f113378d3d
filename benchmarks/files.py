"""How fast is a sum over compressed files, HDF5 and zarr?

Floor: one process that reads the file by its library, some chunks at a time, with the same function; two
workers take half of that.  zarr decompresses in threads of its own in that one process, too.

The files hold numbers of some digits, which compress to a half. What was read of them is dropped from
the page cache before each pass, as of files that are larger than what this has room for.

Peers: dask.array with two workers, over as many chunks at a time.  Its workers are threads, which are
faster here than two processes of dask.distributed, for both formats.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from zarr.codecs import BloscCodec

import synkro
from synkro.machine import readable_bytes

from .common import Report, Side, main, paired

COLUMNS, CHUNK = 1024, 256  # rows of a chunk: 1 MB
_TOGETHER = 8  # chunks that one process reads at a time


def total(x):
    return x.sum(dtype=np.float64)


def pieces(rows: int) -> Iterator[tuple[slice, np.ndarray]]:
    """The contents, a chunk at a time."""
    rng = np.random.default_rng(0)
    for start in range(0, rows, CHUNK):
        many = min(CHUNK, rows - start)
        yield slice(start, start + many), rng.integers(0, 1 << 12, (many, COLUMNS)).astype(np.float32)


def write_hdf5(path: Path, rows: int) -> None:
    with h5py.File(path, "w") as file:
        options: dict[str, Any] = {"compression": "gzip", "compression_opts": 1, "shuffle": True}
        made = file.create_dataset("x", (rows, COLUMNS), "f4", chunks=(CHUNK, COLUMNS), **options)
        for where, piece in pieces(rows):
            made[where] = piece


def write_zarr(path: Path, rows: int) -> None:
    made = zarr.create_array(
        path,
        shape=(rows, COLUMNS),
        chunks=(CHUNK, COLUMNS),
        dtype="f4",
        compressors=BloscCodec(cname="zstd", clevel=1),
    )
    for where, piece in pieces(rows):
        made[where] = piece


def one_process(array: Any) -> float:
    step = _TOGETHER * CHUNK
    return sum(total(array[start : start + step]) for start in range(0, array.shape[0], step))


def forget(path: Path) -> tuple[()]:
    """Drop the files from the page cache."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return ()


def ask(report: Report, runs: int, nbytes: int) -> None:
    rows = nbytes // (4 * COLUMNS)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        kinds = {"HDF5, gzip": (write_hdf5, "x.h5"), "zarr, zstd": (write_zarr, "x.zarr")}
        for kind, (write, name) in kinds.items():
            path = Path(folder, name)
            write(path, rows)
            array = h5py.File(path)["x"] if name == "x.h5" else zarr.open_array(path, mode="r")
            measure(report, kind, path, array, runs)
            if name == "x.h5":
                array.file.close()


def measure(report: Report, kind: str, path: Path, array: Any, runs: int) -> None:
    def cold() -> tuple[()]:
        return forget(path)

    with synkro.Session(2, verbose=False) as session:
        f = session.function(total, outputs="sum")
        data = session.data(array)
        sides = {
            "Synkro, two workers": lambda: f(data, num_slices="auto"),
            "one process": lambda: one_process(array),
        }
        try:
            import dask.array
        except ImportError as error:
            report.absent("dask.array", str(error))
        else:
            chunks = (_TOGETHER * CHUNK, COLUMNS)
            there = dask.array.from_array(array, chunks=chunks).sum(dtype=np.float64)
            sides["dask.array, two workers"] = lambda: there.compute(scheduler="threads", num_workers=2)
        assert len({float(call()) for call in sides.values()}) == 1
        samples = paired([Side(name, call, prepare=cold) for name, call in sides.items()], runs, False)
    report.table(f"a sum over {readable_bytes(array.nbytes)} of {kind}", samples)
    for peer in list(sides)[1:]:
        ours = samples["Synkro, two workers"]
        report.ratio(f"{kind}: {peer} ÷ Synkro", samples[peer], ours, at_least=1.0)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 5, "nbytes": 1 << 29},
        quick={"runs": 3, "nbytes": 1 << 26},
        smoke={"runs": 1, "nbytes": 1 << 23},
    )
