"""HDF5 and zarr arrays as inputs: the workers read the rows that NumPy would, or an error says why."""

import contextlib
import io
import os
import shutil
import threading

import numpy as np
import pytest

from support.examples import given, st
from support.programs import ROOT
from support.sessions import lasting, running
from synkro.errors import InvalidType, InvalidValue, WorkerError
from synkro.storage import opened as opened_module

pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

ROWS, COLUMNS = 1013, 7
ARRAY = np.random.default_rng(0).standard_normal((ROWS, COLUMNS))
KINDS = ("hdf5", "hdf5 gzip", "hdf5 contiguous", "zarr 3", "zarr 2", "zarr sharded", "zarr gzip")

session = lasting(3)


@pytest.fixture(scope="module", autouse=True)
def libraries():
    """h5py and zarr, which are names of this module then; zarr's thread ends with the tests."""
    global h5py, zarr
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra files)")
    zarr = pytest.importorskip("zarr", reason="needs zarr (the extra files)")
    yield
    zarr.core.sync.cleanup_resources()


def write(folder, kind, array):
    """A file of that *kind* with *array*, whose chunks divide neither its rows nor its columns."""
    chunks = tuple(min(length, size) for length, size in zip(array.shape, (100, 3, 2), strict=False))
    path = str(folder / f"{kind}.file")
    if kind.startswith("hdf5"):
        more = {"compression": "gzip", "shuffle": True} if "gzip" in kind else {}
        chunked = None if "contiguous" in kind else chunks or None
        with h5py.File(path, "w") as file:
            file.create_dataset("group/x", data=array, chunks=chunked, **more)
        return path
    more = {"chunks": chunks}
    if "sharded" in kind:
        inner = [-(-size // 3) for size in chunks]
        more = {"chunks": inner, "shards": [3 * size for size in inner]}
    if "gzip" in kind:
        more["compressors"] = zarr.codecs.GzipCodec()
    group = zarr.open_group(path, mode="w", zarr_format=2 if "2" in kind else 3)
    made = group.create_array("group/x", shape=array.shape, dtype=array.dtype, **more)
    made[...] = array
    return path


def write_empty(folder, kind):
    """… with an array of no rows, which some may be added to."""
    path = str(folder / f"{kind}.file")
    if kind.startswith("hdf5"):
        more = {} if "contiguous" in kind else {"chunks": (100, 3), "maxshape": (None, 3)}
        with h5py.File(path, "w") as file:
            file.create_dataset("group/x", (0, 3), "f8", **more)
        return path
    group = zarr.open_group(path, mode="w", zarr_format=2 if "2" in kind else 3)
    group.create_array("group/x", shape=(0, 3), dtype="f8", chunks=(100, 3))
    return path


def source(path):
    """What is given to data()."""
    return (
        zarr.open_group(path, mode="r")["group/x"] if os.path.isdir(path) else h5py.File(path)["group/x"]
    )


def data(session, path, **options):
    """… and what it makes of that, after the file is closed here."""
    opened = source(path)
    made = session.data(opened, **options)
    close(opened)
    return made


def close(opened):
    if hasattr(opened, "file"):
        opened.file.close()


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return write(tmp_path_factory.mktemp("files"), request.param, ARRAY)


@pytest.fixture(params=["hdf5 gzip", "zarr 3"])
def fresh(request, tmp_path):
    """A file that a test may change."""
    return write(tmp_path, request.param, ARRAY)


BATCHES = [
    None,
    250,
    np.s_[90:],
    np.s_[::-1],
    np.s_[1000:3:-7],
    np.s_[5:900:250],
    [1012, 0, 99, 100, 99, -1, 500, 0, 7],
    ARRAY[:, 0] > 0.8,
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: str(batch)[:20])
@pytest.mark.parametrize("slices", [1, 4, "auto"])
def test_rows_are_those_of_numpy(session, path, batch, slices):
    want = ARRAY if batch is None else ARRAY[:batch] if isinstance(batch, int) else ARRAY[batch]
    rows = session.function(lambda x: x, outputs="gather")
    x = data(session, path)
    assert np.array_equal(rows(x, batch=batch, num_slices=slices), want)


def test_beside_arrays_as_a_minibatch_and_broadcast(session, path, tmp_path):
    x = data(session, path)
    y = session.data(np.arange(ROWS * 1.0))
    some = write(tmp_path, "zarr 3", ARRAY[:20])
    few = data(session, some, minibatch=True, name="few")
    batch = np.random.default_rng(1).permutation(ROWS)[:20]

    def f(x, y, few, all_of_it):
        assert np.array_equal(x, all_of_it[y.astype(int)])
        return (x * few).sum(axis=0) + y.sum() + all_of_it.sum()

    call = session.function(f, bcast_inputs=["all_of_it"], outputs="mean")
    want = session.function(f, bcast_inputs=["all_of_it"], outputs="mean")(
        ARRAY, y, session.data(ARRAY[:20], minibatch=True), ARRAY, batch=batch, num_slices=3
    )
    assert np.allclose(call(x, y, few, x, batch=batch, num_slices=3), want)


def test_check_and_as_serial_and_submit(session, path):
    x = data(session, path)
    total = session.function(lambda x: (x.sum(axis=0), x), outputs=("sum", "gather"))
    for found in (total.check(x, num_slices=3), total.as_serial(x), total.submit(x).result()):
        assert np.allclose(found[0], ARRAY.sum(axis=0))
        assert np.array_equal(found[1], ARRAY)


def test_inputs_are_read_only(session, path):
    def f(x, whole):
        return x.flags.writeable, whole.flags.writeable

    f = session.function(f, bcast_inputs="whole", outputs=None)
    x = data(session, path)
    assert f(x, x) == [(False, False)] * 3


def test_datasets_are_arguments_as_they_are(session, path):
    opened = source(path)
    rows = session.function(lambda x: x, outputs="gather")
    first = session.function(lambda a: a["x"][0], bcast_inputs="a", outputs=None)
    for _ in range(2):
        assert np.array_equal(rows(opened, num_slices=2), ARRAY)
        assert np.array_equal(first({"x": opened})[2], ARRAY[0])
    assert np.array_equal(rows.as_serial(opened), ARRAY)
    assert np.array_equal(session.map(lambda i, x: x[i], [3], common={"x": opened})[0], ARRAY[3])
    close(opened)


INDICES = [
    *(3, -1, np.int64(4), (3, 2), (-1, [1, 2]), ...),
    *(np.s_[:], np.s_[2:2], np.s_[990::-3], np.s_[5:9, 2], np.s_[:, [1, 1]], np.s_[None, :3]),
    *([3, -2, 3], ARRAY[:, 0] > 1, ([1, 2], [3, 4]), np.array([], int), np.array([[1, 2], [3, 3]])),
]


@pytest.mark.parametrize("index", INDICES, ids=lambda index: str(index)[:20])
def test_it_reads_like_an_array_here(session, path, index):
    x = data(session, path)
    assert np.array_equal(x[index], ARRAY[index])


@pytest.mark.parametrize("number", [7, np.int64(7), np.int32(-5)])
def test_of_one_row_no_other_is_read(session, path, number, monkeypatch):
    x, read = data(session, path), []
    monkeypatch.setattr(type(x), "_read", lambda self, rows: read.append(rows) or ARRAY[:1])
    x[number]
    assert [*map(len, read)] == [1]


@pytest.mark.parametrize("skipped", [0, 100, 1000])
@given(indices=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=60))
def test_picked_rows_by_blocks_of_any_size(path, skipped, indices):
    """Some blocks are read as a whole, and of some just the rows that are picked."""
    from synkro.storage.files import describe, opened

    dataset = source(path)
    file = opened(describe(dataset, 1))
    close(dataset)
    with pytest.MonkeyPatch.context() as patch, contextlib.closing(file):
        for name, value in {"_TOGETHER": 1, "_BLOCKS": 3, "_ROWS": 7}.items():
            patch.setattr(opened_module, name, value)
        patch.setattr(file, "gap", skipped // (8 * COLUMNS))
        found = file.take(np.array(indices), lambda: False)
    assert np.array_equal(found, ARRAY[indices])


def test_it_looks_like_an_array(session, path):
    x = data(session, path, name="x")
    assert (x.shape, x.dtype, x.ndim, x.size) == (ARRAY.shape, ARRAY.dtype, 2, ARRAY.size)
    assert (x.nbytes, len(x), x.path) == (ARRAY.nbytes, ROWS, path)
    assert np.array_equal(np.sum(x, axis=0), ARRAY.sum(axis=0))
    assert np.array_equal(np.stack(list(x)), ARRAY)
    assert path in repr(x)
    assert "'x'" in repr(x)
    with pytest.raises(IndexError, match="no row 1013"):
        x[ROWS]
    with pytest.raises(TypeError, match=r"read-only: write to .*data\(x\[:\]\)"):
        x[0] = 1
    with pytest.raises(AttributeError, match=r"x\[:\].mean"):
        x.mean()


def test_it_computes_like_an_array(session, path):
    x = data(session, path)
    y = session.data(ARRAY)
    assert np.array_equal(x + 1, ARRAY + 1)
    assert np.array_equal(2 * x - ARRAY, ARRAY)
    assert np.allclose(x @ ARRAY.T, ARRAY @ ARRAY.T)  # by two routines of BLAS's
    assert np.array_equal((x > 0) & (x != 1), (ARRAY > 0) & (ARRAY != 1))
    assert np.array_equal(x == x[5], np.equal(ARRAY, ARRAY[5]))
    assert np.array_equal(-x + y, np.zeros_like(ARRAY))
    assert np.array_equal(y - x, np.zeros_like(ARRAY))
    assert np.array_equal(np.hypot(x, 1, out=session.data(ARRAY)), np.hypot(ARRAY, 1))
    assert ARRAY[-1, 0] in x
    assert 17.0 not in x
    for write in (lambda: np.add(x, 1, out=x), lambda: np.add.at(x, 0, 1), lambda: x.__iadd__(1)):
        with pytest.raises(TypeError, match=r"read-only: write to .*data\(x\[:\]\)"):
            write()
    for convert in (bool, float, int, complex):
        with pytest.raises(ValueError, match=r"has 7091 elements, so it is no number.*x\.shape"):
            convert(x)


@pytest.mark.parametrize("kind", ["hdf5", "zarr 3"])
def test_one_element_is_a_number(session, tmp_path, kind):
    x = data(session, write(tmp_path, kind, np.array(3)))
    assert (int(x), float(x), complex(x), bool(x), [0, 1, 2, 5][x]) == (3, 3.0, 3 + 0j, True, 5)
    assert 3 in x


@pytest.mark.parametrize("kind", ["hdf5", "zarr 3", "zarr 2"])
@pytest.mark.parametrize("dtype", ["?", "i1", "<u4", ">i8", "f2", "f4", ">f8", "c8", "c16"])
def test_dtypes(session, tmp_path, kind, dtype):
    array = (np.arange(30).reshape(10, 3) % 5).astype(dtype)
    x = data(session, write(tmp_path, kind, array))
    assert x.dtype == array.dtype or kind == "zarr 3"  # whose arrays have the machine's byte order
    got = session.function(lambda x: x, outputs="gather")(x, batch=[9, 0, 0])
    assert np.array_equal(got, array[[9, 0, 0]])


@pytest.mark.parametrize("kind", ["hdf5", "zarr 3", "zarr 2"])
def test_one_element_is_broadcast(session, tmp_path, kind):
    x = data(session, write(tmp_path, kind, np.array(2.5)))
    assert x[()] == 2.5
    assert session.function(lambda x: x * 2, bcast_inputs="x", outputs=None)(x) == [5.0] * 3
    with pytest.raises(InvalidValue, match="no dimensions: name it in bcast_inputs"):
        session.function(lambda x: x, name="f")(x)


@pytest.mark.parametrize("kind", ["hdf5", "hdf5 contiguous", "zarr 3", "zarr 2"])
def test_no_rows_are_those_of_a_data_without_rows(session, tmp_path, kind):
    x = data(session, write_empty(tmp_path, kind))
    assert (len(x), x.shape, x[:].shape, list(x), np.sum(x)) == (0, (0, 3), (0, 3), [], 0)
    with pytest.raises(InvalidValue, match="no rows to compute on"):
        session.function(lambda x: x, outputs="gather")(x)
    lengths = session.function(lambda rows, x: rows + x.shape, bcast_inputs="x", outputs="gather")
    assert np.array_equal(lengths(np.zeros((4, 2)), x), [[0, 3]] * 4)


def test_three_dimensions_and_none_to_compute(session, tmp_path):
    array = np.arange(2 * 3 * 40.0).reshape(40, 2, 3)
    for kind in ("hdf5", "zarr 3", "zarr sharded"):
        x = data(session, write(tmp_path, kind, array))
        rows = session.function(lambda x: x, outputs="gather")
        assert np.array_equal(rows(x, batch=np.s_[::-3], num_slices=2), array[::-3])
    few = data(session, write(tmp_path, "hdf5", array[:2]))  # fewer rows than ranks
    assert np.array_equal(rows(few), array[:2])


def test_whole_arrays_are_read_once_a_rank(session, fresh):
    """Of what a rank has read, only whether it has changed is looked up again."""
    x = data(session, fresh)

    def address(x):
        return x.ctypes.data

    f = session.function(address, bcast_inputs="x", outputs=None)
    assert f(x) == f(x)
    g = session.function(lambda x: address(x), bcast_inputs="x", outputs=None)
    assert g(x) == f(x)


# ── files that others have changed ───────────────────────────────────────────────────────────────────


def written(path, rows):
    """Write to some rows."""
    if os.path.isdir(path):
        zarr.open_group(path, mode="r+")["group/x"][rows] = 0
    else:
        with h5py.File(path, "r+") as file:
            file["group/x"][rows] = 0


@pytest.mark.parametrize("whole", [False, True], ids=["by rows", "whole"])
def test_a_changed_file_is_an_error(session, fresh, whole):
    y = session.data(np.ones(5))
    two = session.function(lambda x, y: x.sum(), outputs="min", bcast_inputs="x" if whole else "y")
    x = data(session, fresh)
    for _ in range(2):
        two(x, y)
    written(fresh, slice(500, 510))
    with pytest.raises(WorkerError, match=r"has changed since it was opened, .* give it anew") as caught:
        two(x, y)
    assert fresh in str(caught.value)
    assert isinstance(caught.value, OSError)
    with pytest.raises(OSError, match="has changed"):
        x[500:]
    again = data(session, fresh)
    assert np.array_equal(again[500:510], np.zeros((10, COLUMNS)))
    two(again, y)


def test_a_chunk_that_goes_is_no_fill_value(session, tmp_path):
    path = write(tmp_path, "zarr 3", ARRAY)
    total = session.function(lambda x: x.sum(axis=0), outputs="sum")
    x = data(session, path)
    total(x)
    os.unlink(os.path.join(path, "group/x/c/3/1"))
    with pytest.raises(WorkerError, match="has changed"):
        total(x)
    assert np.allclose(total(x, batch=300), ARRAY[:300].sum(axis=0))  # which are as they were


def test_chunks_that_were_never_written_have_the_fill_value(session, tmp_path):
    made = zarr.create_array(
        str(tmp_path / "x"), shape=(1000,), chunks=(10,), dtype="f8", fill_value=2.0
    )
    made[500:510] = 0
    x = session.data(zarr.open_array(str(tmp_path / "x"), mode="r"))
    total = session.function(lambda x: x.sum(), outputs="sum")
    assert total(x, num_slices=3) == 2.0 * 990
    made[:10] = 1
    with pytest.raises(WorkerError, match="has changed"):
        total(x)


def test_a_file_that_is_gone(session, fresh):
    total = session.function(lambda x: x.sum(axis=0), outputs="sum")
    x = data(session, fresh)
    os.rename(fresh, f"{fresh}.old")
    with pytest.raises(WorkerError, match=r"not there any more.*give the array in the file where"):
        total(x)
    os.rename(f"{fresh}.old", fresh)
    assert np.allclose(total(x), ARRAY.sum(axis=0))


def test_a_damaged_file(session, fresh):
    """As it was when it was given to data(), its size and its time among it."""
    inner = os.path.join(fresh, "group/x/c/5/1") if os.path.isdir(fresh) else fresh
    with open(inner, "r+b") as file:
        middle = os.path.getsize(inner) // 2
        file.seek(middle)
        file.write(b"\xff" * (os.path.getsize(inner) - middle))
    x = data(session, fresh)
    with pytest.raises(WorkerError, match="cannot be read, so it is damaged, cut off") as caught:
        session.function(lambda x: x.sum(axis=0), outputs="sum")(x, num_slices=2)
    assert fresh in str(caught.value)


def test_damage_is_told_once(run_python, tmp_path):
    """All chunks of a shard are read together: those that are left behind say nothing."""
    folder = write(tmp_path, "zarr sharded", ARRAY)
    for name in ("5/1", "5/2", "6/0"):
        file = os.path.join(folder, "group/x/c", name)
        size = os.path.getsize(file)
        with open(file, "r+b") as opened:
            opened.seek(size // 2)
            opened.write(b"\xff" * (size - size // 2))
    code = f"""
import logging, warnings
import zarr
import synkro as synk
logging.basicConfig()
warnings.simplefilter("always")
with synk.Session(2, verbose=False) as session:
    x = session.data(zarr.open_group({folder!r}, mode="r")["group/x"])
    for read in (lambda: x[:], lambda: session.function(lambda x: x, outputs="gather")(x, num_slices=3)):
        try:
            read()
        except OSError as error:
            print("damaged" in str(error))
"""
    done = run_python("-c", code)
    assert (done.stdout, done.stderr) == ("True\nTrue\n", "")


def test_a_file_that_is_cut_off(session, fresh):
    inner = os.path.join(fresh, "group/x/c/5/1") if os.path.isdir(fresh) else fresh
    x = data(session, fresh)
    os.truncate(inner, os.path.getsize(inner) // 2)
    with pytest.raises(WorkerError, match=r"has changed|cut off"):  # by a clock that ticks every 4 ms
        session.function(lambda x: x.sum(axis=0), outputs="sum")(x)


# ── what is refused ──────────────────────────────────────────────────────────────────────────────────


def test_files_that_are_open_for_writing(session, tmp_path):
    path = write(tmp_path, "hdf5", ARRAY)
    rows = session.function(lambda x: x, outputs="gather")
    with h5py.File(path, "r+") as file:
        with pytest.raises(InvalidValue, match=rf"{path} is open for writing .*h5py.File\(path, 'r'\)"):
            session.data(file["group/x"])
        assert np.array_equal(rows(file["group/x"]), ARRAY)  # read here, and copied
    folder = write(tmp_path, "zarr 3", ARRAY)
    with pytest.raises(InvalidValue, match=r"is open for writing: .*mode='r'"):
        session.data(zarr.open_group(folder)["group/x"])
    assert np.array_equal(rows(zarr.open_group(folder)["group/x"]), ARRAY)


def test_what_is_in_memory_or_elsewhere(session, tmp_path):
    with pytest.raises(InvalidValue, match=r"in the memory of this process.*x\[:\]"):
        session.data(zarr.array(np.ones(3)))
    packed = zarr.storage.ZipStore(tmp_path / "x.zip", mode="w")
    zarr.create_array(packed, shape=(3,), dtype="f8")
    packed.close()
    packed = zarr.storage.ZipStore(tmp_path / "x.zip", mode="r")
    with pytest.raises(InvalidValue, match=r"in a ZipStore.*write it to a folder"):
        session.data(zarr.open_array(packed, mode="r"))
    packed.close()
    path = write(tmp_path, "hdf5", ARRAY)
    with open(path, "rb") as file:
        memory = io.BytesIO(file.read())
    for opened in (h5py.File(memory), h5py.File(path, "r", driver="core")):
        with opened, pytest.raises(InvalidValue, match=r"driver '\w+'.*h5py.File\(path, 'r'\)"):
            session.data(opened["group/x"])


def test_what_is_no_array(session, tmp_path):
    path = write(tmp_path, "hdf5", ARRAY)
    with h5py.File(path) as file:
        dataset = file["group/x"]
        with pytest.raises(InvalidType, match=r"group '/group'.*give one of its datasets.*'x'"):
            session.data(file["group"])
    with pytest.raises(InvalidType, match=r"closed.*open it again, with h5py.File\(path, 'r'\)"):
        session.data(dataset)
    with pytest.raises(InvalidType, match="closed"):
        session.function(lambda x: x)(dataset)
    with pytest.raises(InvalidType, match="give one of its arrays"):
        session.data(zarr.open_group(write(tmp_path, "zarr 3", ARRAY), mode="r"))


def test_datasets_that_others_cannot_read_right(session, tmp_path):
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["text"] = ["a", "b"]
        file["empty"] = h5py.Empty("f8")
        file.create_virtual_dataset("virtual", h5py.VirtualLayout((3,), "f8"))
        file.create_dataset("external", (3,), "f8", external=[(str(tmp_path / "raw"), 0, 24)])
        file.create_dataset("vectors", (4,), np.dtype(("f4", (3,))))
    (tmp_path / "raw").write_bytes(bytes(24))
    with h5py.File(tmp_path / "x.h5") as file:
        for name, message in {
            "text": "cannot have the dtype object",
            "empty": "no elements",
            "virtual": r"in other files: give datasets of these, or a copy, x\[:\]",
            "external": "in other files",
            "vectors": r"each element of .* is an array.*x\[:\]",
        }.items():
            with pytest.raises((InvalidValue, InvalidType), match=message):
                session.data(file[name])
        with pytest.raises(InvalidType, match="no elements"):
            session.function(lambda x: x, name="f")(file["empty"])


def test_links_of_hdf5(session, tmp_path):
    """Of what is linked from another file, h5py says the name in one file and the path of the other."""
    with h5py.File(tmp_path / "run.h5", "w") as file:
        file["x"], file["data"], file["group/y"] = np.ones(10), np.zeros(10), np.ones(3)
    with h5py.File(tmp_path / "index.h5", "w") as file:
        file["run"], file["data"] = h5py.ExternalLink("run.h5", "/x"), h5py.SoftLink("/run")
        file["there"], file["here"] = h5py.ExternalLink("run.h5", "/group"), h5py.SoftLink("/there")
        file["own"] = np.full(4, 2.0)
        file["hard"], file["soft"] = file["own"], h5py.SoftLink("/own")
    total = session.function(lambda x: x.sum(), outputs="sum")
    with h5py.File(tmp_path / "index.h5") as file:
        for name in ("run", "there/y", "own", "hard", "soft"):
            assert total(session.data(file[name])) == file[name][:].sum()
        assert session.data(file["run"]).path == str(tmp_path / "run.h5")
        for name in ("data", "here/y"):
            assert total(file[name]) == file[name][:].sum()
            with pytest.raises(
                InvalidValue, match=r"not there under this name.*open .*run\.h5, and give"
            ):
                session.data(file[name])


def test_a_file_that_nobody_may_read(tmp_path, monkeypatch):
    from synkro.storage import hdf5

    with h5py.File(write(tmp_path, "hdf5", ARRAY)) as file:
        stored = hdf5.describe(file["group/x"], 1)

    def refuse(self):
        raise PermissionError("unable to open file: Permission denied")

    monkeypatch.setattr(hdf5.OpenDataset, "_open", refuse)
    with pytest.raises(OSError, match=r"may not be read by this user.*Permission denied"):
        hdf5.OpenDataset(stored)


def test_a_codec_that_only_the_program_knows(session, tmp_path):
    import numcodecs

    class Negative(numcodecs.abc.Codec):
        codec_id = "negative"

        def encode(self, buf):
            return -np.asarray(buf)

        def decode(self, buf, out=None):
            return -np.asarray(buf).view("f8")

    numcodecs.register_codec(Negative)
    path = tmp_path / "x.zarr"
    filters = {"zarr_format": 2, "filters": [Negative()], "compressors": None}
    zarr.create_array(path, shape=(10,), chunks=(5,), dtype="f8", **filters)[:] = np.arange(10.0)
    total = session.function(lambda x: x.sum(), outputs="sum")
    twice = session.function(lambda x: 2 * x, outputs="gather")
    with pytest.raises(WorkerError, match=r"codec that the workers do not know: register it there"):
        total(zarr.open(path, mode="r"))
    with pytest.raises(OSError, match=r"codec that the workers do not know.*Written are no rows"):
        twice.options(out=zarr.open(path, mode="r+"))(np.arange(10.0))
    session.function(lambda: numcodecs.register_codec(Negative), outputs=[])()
    assert total(zarr.open(path, mode="r")) == 45
    twice.options(out=zarr.open(path, mode="r+"))(np.arange(10.0))
    assert np.array_equal(zarr.open(path, mode="r")[:], 2 * np.arange(10.0))


@pytest.mark.parametrize("kind", ["hdf5", "zarr 3"])
def test_lists_of_datasets(session, tmp_path, kind):
    opened = []
    for number in range(4):
        (tmp_path / str(number)).mkdir()
        opened.append(source(write(tmp_path / str(number), kind, ARRAY[: 3 + number // 3])))
    same = session.function(lambda x: x, outputs="gather")
    lengths = session.function(lambda x: [len(each) for each in x], outputs=None)
    assert np.array_equal(same(opened[:3]), [ARRAY[:3]] * 3)
    with pytest.raises(InvalidType, match=r"shapes \(3, 7\), \(4, 7\), .* as their lengths differ"):
        same(opened)
    assert lengths([x[:] for x in opened]) == [[3, 3], [3], [4]]
    for each in opened:
        close(each)


def test_an_argument_that_was_written_anew(session, tmp_path):
    path = write(tmp_path, "zarr 3", ARRAY)
    opened = source(path)
    f = session.function(lambda x: x, outputs="gather")
    assert np.array_equal(f(opened), ARRAY)
    zarr.open_array(path, path="group/x", mode="r+")[:] = ARRAY + 1
    with pytest.raises(WorkerError, match=r"has changed since it was opened, .* and give it anew"):
        f(opened)
    for _ in range(2):
        assert np.array_equal(f(source(path)), ARRAY + 1)


def test_a_file_that_was_replaced_while_it_was_open(session, tmp_path):
    opened = source(write(tmp_path, "hdf5", ARRAY))
    os.rename(write(tmp_path, "hdf5 gzip", -ARRAY), tmp_path / "hdf5.file")
    with pytest.raises(InvalidValue, match="moved, deleted or replaced while it was open"):
        session.data(opened)
    close(opened)


def test_an_array_that_was_replaced_while_it_was_open(session, tmp_path):
    folder = write(tmp_path, "zarr 3", ARRAY)
    opened = source(folder)
    shutil.rmtree(folder)
    write(tmp_path, "zarr 3", ARRAY[:500].astype("f4"))
    with pytest.raises(InvalidValue, match=r"was replaced while it was open: open it again, with zarr"):
        session.data(opened)
    assert np.array_equal(data(session, folder)[:], ARRAY[:500].astype("f4"))


def test_another_dtype_or_shape_than_it_has(session, path):
    opened = source(path)
    for wanted in ({"dtype": "f4"}, {"ndim": 1}, {"shape": (5, 7)}):
        with pytest.raises(InvalidValue, match=f"leave out {next(iter(wanted))}="):
            session.data(opened, **wanted)
    assert session.data(opened, dtype="f8", ndim=2, shape=ARRAY.shape).shape == ARRAY.shape
    close(opened)


def test_it_belongs_to_its_session_and_is_no_global(session, path):
    x = data(session, path)
    with pytest.raises(InvalidType, match="is a Data: give it to the function as an argument"):
        session.function(lambda: x[0])()
    with running(1) as other, pytest.raises(InvalidValue, match="belongs to another session"):
        other.function(lambda x: x)(x)


def test_what_is_of_h5py_is_no_global(session, tmp_path):
    with h5py.File(write(tmp_path, "hdf5", ARRAY)) as file:
        dataset = file["group/x"]
        for use in (lambda x: x + dataset[0], lambda x: x + file["group/x"][0]):
            with pytest.raises(InvalidType, match=r"synk.data\(dataset\).*open the file in the f"):
                session.function(use, outputs="gather")(ARRAY)


# ── threads, descriptors and memory of a worker ──────────────────────────────────────────────────────


def objects_of(session):
    """The threads and the descriptors of each worker."""
    count = session.function(
        lambda: (threading.active_count(), len(os.listdir("/proc/self/fd"))), outputs=None
    )
    return count()


@pytest.mark.parametrize("slices", [1, 5])
def test_no_thread_and_no_descriptor_stays(session, path, slices):
    x = data(session, path)

    def f(x, fail):
        if fail and (x == ARRAY[-1]).all(axis=1).any():
            raise ZeroDivisionError
        return x.sum()

    f = session.function(f, bcast_inputs="fail", outputs="sum")
    f(x, False, num_slices=slices)
    before = objects_of(session)
    f(x, False, num_slices=slices)
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        f(x, True, num_slices=slices)
    assert objects_of(session) == before


CTRL_C = """
import os, signal, threading, time
import numpy as np, h5py
import synkro as synk

def main():
    with h5py.File("x.h5", "w") as file:
        file.create_dataset("x", data=np.ones((1000, 10)), chunks=(10, 10), compression="gzip")
    synk.fork(2, verbose=False)
    x = synk.data(h5py.File("x.h5")["x"])

    def slow(x):
        while True:
            time.sleep(0.01)

    f = synk.function(slow)
    threading.Timer(1.0, signal.raise_signal, [signal.SIGINT]).start()
    try:
        f(x, num_slices=5)
    except KeyboardInterrupt:
        print("interrupted")
    print(synk.function(lambda x: x.sum(), outputs="sum")(x, num_slices=3))
    print(synk.function(lambda: threading.active_count(), outputs="sum")())

main()
"""


@pytest.mark.programs
def test_ctrl_c_leaves_no_thread(run_python, tmp_path):
    (tmp_path / "program.py").write_text(CTRL_C)
    done = run_python(str(tmp_path / "program.py"), cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.split("\n")[:3] == ["interrupted", "10000.0", "2"]


def peak_of(session, x, slices):
    """How many bytes each worker had more at the most, in a sum over *x*, than before it."""
    pids = session.pids
    f = session.function(lambda x: (x.sum(), __import__("time").sleep(0.02))[0], outputs="sum")
    f(x, batch=2 * slices, num_slices=slices)  # imports, and what is made once
    before = [pss(pid) for pid in pids]
    most, over = list(before), threading.Event()

    def watch():
        while not over.is_set():
            most[:] = [max(old, pss(pid)) for old, pid in zip(most, pids, strict=True)]

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        assert f(x, num_slices=slices) == x.size
    finally:
        over.set()
        thread.join()
    return [after - start for after, start in zip(most, before, strict=True)]


def pss(pid):
    """The memory of a process, without what it shares with others, in bytes."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))


@pytest.mark.parametrize("kind", ["hdf5 gzip", "zarr 3"])
def test_memory_is_that_of_two_pieces(session, tmp_path, kind):
    """A file of 96 MB, of which a rank may have 4 MB: two pieces, and a chunk on its way."""
    rows, slices = 12 << 10, 16
    if kind.startswith("hdf5"):
        with h5py.File(tmp_path / "x", "w") as file:
            options = {"chunks": (64, 1024), "compression": "gzip", "compression_opts": 1}
            made = file.create_dataset("x", (rows, 1024), "f8", **options)
            for start in range(0, rows, 1024):
                made[start : start + 1024] = 1
        x = session.data(h5py.File(tmp_path / "x")["x"])
    else:
        made = zarr.create_array(tmp_path / "x", shape=(rows, 1024), chunks=(64, 1024), dtype="f8")
        made[...] = 1
        x = session.data(zarr.open_array(tmp_path / "x", mode="r"))
    piece = x.nbytes / len(session.pids) / slices
    growth = peak_of(session, x, slices)
    assert max(growth) < 2 * piece + (6 << 20), (growth, piece)
    assert max(growth) < x.nbytes / len(session.pids) / 2


@pytest.mark.parametrize("kind", ["utf-8", "ascii", "dates"])
def test_strings_and_dates_of_hdf5(session, tmp_path, kind):
    """h5py gives UTF-8, and its type of dates, to its own arrays only."""
    if kind == "dates":
        values = np.arange(50).astype("M8[s]")
        dtype = h5py.opaque_dtype(values.dtype)
    else:
        values = np.array([f"{'é' if kind == 'utf-8' else 'e'}{n}".encode() for n in range(50)], "S8")
        dtype = h5py.string_dtype(kind, 8)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = values.astype(dtype)
    same = session.function(lambda x: x, outputs="gather")
    with h5py.File(tmp_path / "x.h5", "r") as file:
        x = session.data(file["x"])
        np.testing.assert_array_equal(same(file["x"]), values)
    np.testing.assert_array_equal(same(x, num_slices=2, batch=[49, 3, 3]), values[[49, 3, 3]])
    np.testing.assert_array_equal(x[10:12], values[10:12])


def test_fields_of_hdf5(session, tmp_path):
    records = np.zeros(20, [("m", "f4", (5,)), ("x", "f8")])
    records["m"], records["x"] = np.arange(100).reshape(20, 5), np.arange(20)
    same = session.function(lambda x: x, outputs="gather")
    whole = session.function(lambda a: a["x"], bcast_inputs="a", outputs=None)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file["x"] = records
        for names in ("m", "x", ["m"], ["x", "m"]):
            view = file["x"].fields(names)
            for got in (
                same(view, num_slices=2),
                same.as_serial(view),
                session.data(view)[:],
                session.map(lambda i, x: x, [0], common={"x": view})[0],
                whole({"x": view})[2],
            ):
                np.testing.assert_array_equal(got, records[names])
