"""``f.options(out=array)``, an array of zarr's: the workers write its chunks."""

import contextlib
import errno
import os
import shutil
import signal
import threading
from itertools import pairwise

import numpy as np
import pytest

import synkro as synk
from support.sessions import current, in_turn
from support.targets import BIG, SMALL, doubled, numbers, small_disk
from support.waiting import wait_until
from synkro import InvalidType, InvalidValue, OutputError, WorkerError
from synkro.storage.targets import Chunked

zarr = pytest.importorskip("zarr")
pytestmark = [pytest.mark.libraries, pytest.mark.counted_once]

started = in_turn(1, 3)


@pytest.fixture(scope="module", autouse=True)
def loop():
    """zarr's, whose thread ends with the tests."""
    yield
    zarr.core.sync.cleanup_resources()


@pytest.fixture
def session(started):
    with current(started):
        yield started


LAYOUTS = {
    "rows": (20, 1, {}),
    "tiles": (50, 2, {}),
    "one chunk": (200, 1, {}),
    "shards": (5, 1, {"shards": 20}),
    "one shard": (20, 1, {"shards": 120, "fill_value": 3}),
    "format 2": (30, 2, {"zarr_format": 2, "order": "F"}),
    "not compressed": (27, 1, {"compressors": None}),
}


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_takes_what_numpy_says(session, tmp_path, columns, layout):
    x = numbers(columns)
    rows, parts, options = LAYOUTS[layout]
    width = -(-columns // parts)
    if "shards" in options:
        options = {**options, "shards": (options["shards"], width)}
    target = zarr.create_array(
        tmp_path / "x.zarr", shape=x.shape, dtype="f4", chunks=(rows, width), **options
    )
    f = synk.function(doubled, outputs="gather")
    assert f.options(out=target)(synk.data(x)) is target
    assert np.array_equal(target[:], 2 * x)
    for batch in (40, slice(90, None, -4), [5, 5, 0, 100], np.arange(101) % 3 == 1):
        expected = 2 * (x[:batch] if isinstance(batch, int) else x[batch])
        target.resize(expected.shape)
        f.options(out=target)(x, batch=batch, num_slices=3)
        assert np.array_equal(target[:], expected)


@pytest.mark.parametrize("columns", [SMALL, BIG], ids=["small", "large"])
@pytest.mark.parametrize("zarr_format", [2, 3])
def test_another_order_of_bytes(session, tmp_path, columns, zarr_format):
    x = numbers(columns)
    folder, chunks = tmp_path / "x.zarr", (20, columns)
    options = {"shape": x.shape, "chunks": chunks, "dtype": ">f4", "zarr_format": zarr_format}
    if zarr_format == 3:
        options["serializer"] = zarr.codecs.BytesCodec(endian="big")
    target = zarr.create_array(folder, **options)
    synk.function(doubled, outputs="gather").options(out=target)(x)
    assert np.array_equal(target[:], 2 * x)
    assert np.array_equal(zarr.open_array(folder, mode="r")[:], 2 * x)


def test_an_array_in_a_group_beside_other_outputs(session, tmp_path):
    x = numbers(BIG)
    group = zarr.open_group(tmp_path / "all.zarr", mode="w")
    target = group.create_array("deep/result", shape=x.shape, chunks=(10, BIG), dtype="f4")
    sums = np.zeros(101, "f4")
    f = synk.function(lambda x: (2 * x, x.sum(axis=1), x.max()), outputs=["gather", "gather", "max"])
    found = f.options(out=(target, sums, None)).submit(x).result()
    assert found[0] is target
    assert np.array_equal(target[:], 2 * x)
    assert np.array_equal(sums, x.sum(axis=1))
    assert found[2] == x.max()


def test_more_dimensions_and_rows_that_are_left_out(session, tmp_path):
    x = np.arange(101 * 6.0).reshape(101, 3, 2)
    target = zarr.create_array(tmp_path / "x.zarr", shape=x.shape, chunks=(8, 2, 2), dtype="f8")
    synk.function(doubled, outputs="gather").options(out=target)(x)
    assert np.array_equal(target[:], 2 * x)
    none = zarr.create_array(tmp_path / "none.zarr", shape=(0, 3, 2), chunks=(8, 2, 2), dtype="f8")
    synk.function(lambda x: x[:0], outputs="gather").options(out=none)(x)
    assert none.shape == (0, 3, 2)


@pytest.mark.parametrize("rows", [0, 1, 99, 100, 101, 1000])
@pytest.mark.parametrize("unit", [1, 7, 100, 5000])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_no_two_ranks_share_a_chunk(rows, unit, count):
    shares = Chunked("", "", (rows,), np.dtype("f4"), unit, "").shares(count)
    found = [row for share in shares for row in range(*share)]
    assert found == list(range(rows))
    for (_, edge), (first, last) in pairwise(shares):
        assert edge == first
        assert first % unit == 0 or first == last == rows


def test_what_the_workers_cannot_open(session, tmp_path):
    array = zarr.create_array(tmp_path / "x.zarr", shape=(101, 3), chunks=(10, 3), dtype="f4")
    f = synk.function(doubled, outputs="gather")
    x = numbers(SMALL)
    for target, error, says in (
        (zarr.open_array(tmp_path / "x.zarr", mode="r"), InvalidValue, r'mode="r\+"'),
        (zarr.create_array({}, shape=(101, 3), dtype="f4"), InvalidType, "in a MemoryStore: make it by"),
        (
            zarr.open_group(tmp_path / "g.zarr", mode="w"),
            InvalidType,
            "got .* a zarr Group: name an arr",
        ),
        ((array, zarr.open_array(tmp_path / "x.zarr", mode="r+")), InvalidValue, "in out= overlap"),
    ):
        with pytest.raises(error, match=says):
            synk.function(lambda x: (x, x), outputs="gather").options(out=target)(x)
    with pytest.raises(OutputError, match=r"the zarr array .* has shape .* they have to be equal"):
        f.options(out=array)(x[1:])
    into = f.options(out=array)
    shutil.rmtree(tmp_path / "x.zarr")
    with pytest.raises(InvalidValue, match="is not there any more"):
        into(x)


OTHERS = {
    "dtype": {"dtype": "i4"},
    "fewer rows": {"shape": (40, SMALL)},
    "more rows": {"shape": (500, SMALL)},
    "more columns": {"shape": (101, 2 * SMALL)},
    "chunks": {"chunks": (7, SMALL)},
    "compressors": {"compressors": None},
    "a group": None,
}


def replace(folder, other):
    if other is None:
        zarr.create_group(folder, overwrite=True)
    else:
        options = {"shape": (101, SMALL), "chunks": (10, SMALL), "dtype": "f4", **other}
        zarr.create_array(folder, overwrite=True, **options)


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_an_array_that_was_replaced_since_it_was_opened(session, tmp_path, other):
    folder, x = str(tmp_path / "x.zarr"), numbers(SMALL)
    replace(folder, {})
    target = zarr.open_array(folder, mode="r+")

    def replacing(x):
        if synk.rank() == 0:
            replace(folder, other)
        return 2 * x

    with pytest.raises(
        OSError, match=r"it was replaced, resized or deleted .* Written are no rows"
    ) as e:
        synk.function(replacing, outputs="gather").options(out=target)(x)
    assert e.value.errno == errno.ESTALE
    with pytest.raises(InvalidValue, match=r"x\.zarr was replaced, resized .*: open it again, by zarr"):
        synk.function(doubled, outputs="gather").options(out=target)(x)
    if other is not None:
        assert not zarr.open_array(folder)[:].any()


def test_an_array_that_was_resized_and_one_with_new_attributes(session, tmp_path):
    x = numbers(SMALL)
    target = zarr.create_array(tmp_path / "x.zarr", shape=x.shape, chunks=(10, 3), dtype="f4")
    f = synk.function(doubled, outputs="gather").options(out=target)
    other = zarr.open_array(tmp_path / "x.zarr")
    other.attrs["unit"] = "m"
    assert np.array_equal(f(x)[:], 2 * x)
    other.resize((200, 3))
    with pytest.raises(InvalidValue, match="was replaced, resized or deleted"):
        f(x)


def test_a_dataset_of_hdf5_has_one_writer(session, tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "x.h5", "w") as file:
        dataset = file.create_dataset("x", (101, 3), "f4")
        with pytest.raises(InvalidType, match=r"one writer at a time.* dataset\[\.\.\.\] = result"):
            synk.function(doubled, outputs="gather").options(out=dataset)


def test_an_array_that_is_read_is_none_that_is_written(session, tmp_path):
    zarr.create_array(tmp_path / "x.zarr", shape=(101, 3), dtype="f4")
    x = synk.data(zarr.open_array(tmp_path / "x.zarr", mode="r"))
    with pytest.raises(InvalidType, match=r"a StoredData: it is read-only\. Give the zarr array itself"):
        synk.function(doubled, outputs="gather").options(out=x)


@pytest.mark.one_host
def test_a_full_disk_says_which_rows_are_written(session, tmp_path):
    with small_disk(tmp_path, 4) as folder:
        x = np.random.default_rng(0).random((64, 1 << 18), dtype="f4")  # 64 MB that do not compress
        target = zarr.create_array(
            folder / "x.zarr", shape=x.shape, chunks=(1, 1 << 18), dtype="f4", compressors=None
        )
        with pytest.raises(
            OSError, match=r"No space left on device: the zarr array .* Written are"
        ) as e:
            synk.function(doubled, outputs="gather").options(out=target)(x)
        assert not isinstance(e.value, WorkerError)
        written, partly = (_rows(part) for part in str(e.value).split("; ")[:2])
        assert written | partly < set(range(64))
        for row in range(64):
            if row in written:
                assert np.array_equal(target[row], 2 * x[row])
            elif row not in partly:
                assert not target[row].any()


def many_chunks(folder):
    """A target of 2,000 chunks, each a file in *folder*."""
    key = zarr.core.chunk_key_encodings.V2ChunkKeyEncoding(separator=".")
    options = {"shape": (20, 100), "chunks": (1, 1), "dtype": "f8", "compressors": None}
    return zarr.create_array(folder, chunk_key_encoding=key, **options)


def threads():
    return sorted(thread.name for thread in threading.enumerate())


@pytest.mark.one_host
def test_nothing_is_written_after_an_error(session, tmp_path):
    """No thread of the worker goes on by itself."""
    target = many_chunks(tmp_path / "x.zarr")
    f = synk.function(lambda x: x, outputs="gather").options(out=target)
    running = synk.function(threads, outputs=None)
    before = running()
    (tmp_path / "x.zarr" / "0.30").mkdir()  # in the place of a chunk
    with pytest.raises(OSError, match="Is a directory: the zarr array"):
        f(np.ones((20, 100)))
    there = set(os.listdir(tmp_path / "x.zarr"))
    assert running() == before
    assert set(os.listdir(tmp_path / "x.zarr")) == there
    assert "0.99" not in there


@pytest.mark.one_host
def test_an_interrupt_comes_between_two_chunks(session, tmp_path):
    target = many_chunks(tmp_path / "x.zarr")
    f = synk.function(lambda x: x, outputs="gather").options(out=target)
    x = np.ones((20, 100))

    def interrupt():
        if wait_until(lambda: len(os.listdir(tmp_path / "x.zarr")) > 100):
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        f(x)
    thread.join()
    assert synk.function(lambda: 1, outputs=None)() == [1] * len(session.pids)
    there = os.listdir(tmp_path / "x.zarr")
    assert len(there) < 1900
    assert f(x) is target
    assert np.array_equal(target[:], x)
    assert set(os.listdir(tmp_path / "x.zarr")) >= set(there)  # none of them half-written


def _rows(text):
    """The rows that a part of a message names, such as "the rows 0 to 3, 8 to 9"."""
    found = set()
    with contextlib.suppress(ValueError):
        for span in text[text.index("the rows ") + len("the rows ") :].split(", "):
            first, last = span.split(" to ")
            found |= set(range(int(first), int(last) + 1))
    return found
