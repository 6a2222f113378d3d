"""How fast is a sum over compressed files, HDF5 and zarr?

Floor: one process that reads the file by its library, some chunks at a time, with the same function; two
workers take half of that.

The files hold numbers of some digits, which compress to a half. What was read of them is dropped from
the page cache before each pass, as of files that are larger than what this has room for.

Peers: dask.array with two workers, processes of one thread each, over the same chunks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import zarr
from zarr.codecs import BloscCodec

import synkro
from synkro.machine import readable_bytes

from .common import Report, Side, main, paired, settled

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


class ByPath:
    """A dataset that travels, as h5py's cannot: it opens the file for each read."""

    ndim = 2

    def __init__(self, path: Path, array: Any) -> None:
        self.path = path
        self.shape, self.dtype = array.shape, array.dtype

    def __getitem__(self, key: Any) -> Any:
        with h5py.File(self.path) as file:
            return file["x"][key]


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
    return settled()


def dask_sum(report: Report, array: Any) -> tuple[Callable[[], float] | None, Callable[[], None]]:
    """A sum by dask.array, and what ends its workers; None where dask is not installed."""
    try:
        import dask.array
        from dask.distributed import Client, LocalCluster
    except ImportError as error:
        report.absent("dask.array", str(error))
        return None, lambda: None
    cluster = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None)
    client = Client(cluster)
    there = dask.array.from_array(array, chunks=(_TOGETHER * CHUNK, COLUMNS)).sum(dtype=np.float64)

    def close() -> None:
        client.close()
        cluster.close()

    return lambda: float(there.compute(scheduler=client)), close


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
    by_dask, close = dask_sum(report, array if path.is_dir() else ByPath(path, array))

    def cold() -> tuple[()]:
        return forget(path)

    with synkro.Session(2, verbose=False) as session:
        f = session.function(total, outputs="sum")
        data = session.data(array)
        assert f(data, num_slices="auto") == one_process(array)
        sides = [
            Side("Synkro, two workers", lambda: f(data, num_slices="auto"), prepare=cold),
            Side("one process", lambda: one_process(array), prepare=cold),
        ]
        if by_dask is not None:
            sides.append(Side("dask.array, two workers", by_dask, prepare=cold))
        samples = paired(sides, runs)
    close()
    report.table(f"a sum over {readable_bytes(array.nbytes)} of {kind}", samples)
    ours = samples["Synkro, two workers"]
    for peer in [side.name for side in sides[1:]]:
        report.ratio(f"{kind}: {peer} ÷ Synkro", samples[peer], ours, at_least=1.0)


if __name__ == "__main__":
    main(
        __file__,
        __doc__,
        ask,
        full={"runs": 5, "nbytes": 1 << 30},
        quick={"runs": 3, "nbytes": 1 << 28},
        smoke={"runs": 1, "nbytes": 1 << 23},
    )
