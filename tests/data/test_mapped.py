"""Data in memory-mapped files: not copied where they need not be."""

import os

import numpy as np
import pytest

from support.sessions import lasting
from synkro.errors import InvalidType, InvalidValue

pytestmark = pytest.mark.quick  # on every Python version

session = lasting(2)


def rows_seen(session, data):
    """What the workers see of *data*."""
    return session.function(lambda x: x, outputs="gather")(data)


@pytest.fixture
def numbers(tmp_path):
    """A file of numbers: its path, as .npy, and the array."""
    array = np.arange(3000.0).reshape(1000, 3)
    np.save(tmp_path / "x.npy", array)
    return tmp_path / "x.npy", array


def is_mapped(x):
    """Whether *x* lies in a file rather than in memory: as such it is read-only."""
    return not x.data.flags.writeable


def test_a_loaded_map_is_not_copied(session, numbers):
    path, array = numbers
    x = session.data(np.load(path, mmap_mode="r"))
    assert is_mapped(x)
    assert np.array_equal(x, array)
    assert np.array_equal(rows_seen(session, x), array)
    with path.open("r+b") as file:  # what is written to the file is seen, here and there
        file.seek(-8, os.SEEK_END)
        file.write(np.float64(-1).tobytes())
    assert x[-1, -1] == -1
    assert rows_seen(session, x)[-1, -1] == -1


@pytest.mark.parametrize("mode", ["r", "r+"])
@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
def test_raw_maps_at_any_offset(session, tmp_path, mode, offset):
    array = np.arange(999, dtype="i8")
    (tmp_path / "raw").write_bytes(b"#" * offset + array.tobytes())
    x = session.data(np.memmap(tmp_path / "raw", "i8", mode, offset))
    assert is_mapped(x)
    assert np.array_equal(x, array)
    assert np.array_equal(rows_seen(session, x), array)


SLICES = [np.s_[10:20], np.s_[::3], np.s_[5:, 1:], np.s_[:, 2], np.s_[999:], np.s_[3:900:7, ::2]]
OTHERS = [np.s_[::-1], np.s_[[4, 2]], np.s_[5:5]]


@pytest.mark.parametrize("part", [*SLICES, *OTHERS])
def test_slices_of_a_map_are_maps_and_other_parts_are_copied(session, numbers, part):
    path, array = numbers
    x = session.data(np.load(path, mmap_mode="r")[part])
    assert is_mapped(x) == (part in SLICES)
    assert np.array_equal(x, array[part])
    if len(x):
        assert np.array_equal(rows_seen(session, x), array[part])


def test_a_map_in_fortran_order(session, tmp_path):
    array = np.asfortranarray(np.arange(12.0).reshape(4, 3))
    np.save(tmp_path / "f.npy", array)
    x = session.data(np.load(tmp_path / "f.npy", mmap_mode="r"))
    assert is_mapped(x)
    assert x.data.flags.f_contiguous
    assert np.array_equal(x, array)
    assert np.array_equal(rows_seen(session, x), array)
    assert np.array_equal(
        session.function(lambda x: x, outputs="gather")(x, batch=[3, 0]), array[[3, 0]]
    )


def test_a_copy_on_write_map_is_copied_with_its_changes(session, numbers):
    path, array = numbers
    changed = np.load(path, mmap_mode="c")
    changed[0] = -1
    x = session.data(changed)
    assert not is_mapped(x)
    assert np.array_equal(x, changed)
    assert np.array_equal(rows_seen(session, x), changed)
    assert np.array_equal(np.load(path), array)


def test_a_replaced_file_is_not_used(session, numbers, tmp_path):
    path, array = numbers
    old = np.load(path, mmap_mode="r")
    np.save(tmp_path / "other.npy", -array)
    os.replace(tmp_path / "other.npy", path)
    x = session.data(old)
    assert np.array_equal(x, array)
    assert np.array_equal(rows_seen(session, x), array)


def test_a_deleted_file_is_not_missed(session, numbers):
    path, array = numbers
    old = np.load(path, mmap_mode="r")
    path.unlink()
    assert np.array_equal(rows_seen(session, session.data(old)), array)


def test_a_map_of_another_dtype_than_asked_is_copied(session, numbers):
    path, array = numbers
    x = session.data(np.load(path, mmap_mode="r"), dtype="c16")
    assert not is_mapped(x)
    assert np.array_equal(x, array)


def test_mapped_data_cannot_be_written_but_can_be_replaced(session, numbers):
    path, array = numbers
    x = session.data(np.load(path, mmap_mode="r"))
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 1
    x.set_length(1001)
    assert not is_mapped(x)
    assert np.array_equal(x[:1000], array)
    assert not x[1000:].any()
    x[0] = 1
    assert np.array_equal(np.load(path), array)


def test_mapped_data_takes_a_value_of_the_same_shape(session, numbers):
    path, array = numbers
    x = session.data(np.load(path, mmap_mode="r"))
    x.set_value(-array)
    assert np.array_equal(x, -array)
    assert np.array_equal(np.load(path), array)


def test_maps_are_arguments_without_a_copy(session, numbers):
    path, array = numbers
    f = session.function(lambda x: x.sum(axis=0), outputs="sum")
    mapped = np.load(path, mmap_mode="r")
    assert np.allclose(f(mapped), array.sum(axis=0))
    assert np.allclose(f(mapped, batch=slice(None, None, -2)), array[::-2].sum(axis=0))
    assert np.allclose(f(mapped[3:]), array[3:].sum(axis=0))


@pytest.mark.parametrize("kind", [str, lambda path: path], ids=["str", "Path"])
def test_a_path_is_mapped(session, numbers, kind):
    path, array = numbers
    x = session.data(kind(path), name="x", minibatch=True)
    assert is_mapped(x)
    assert (x.name, x.minibatch) == ("x", True)
    assert np.array_equal(rows_seen(session, x), array)
    assert session.data(kind(path), dtype="c16").dtype == "c16"


@pytest.mark.parametrize("array", [np.array(2.5), np.empty((0, 3)), np.asfortranarray(np.eye(3))])
def test_paths_of_small_arrays(session, tmp_path, array):
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(session.data(tmp_path / "x.npy"), array)


def test_paths_of_other_things(session, numbers, tmp_path):
    path, array = numbers
    np.savez(tmp_path / "x.npz", array)
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    (tmp_path / "x.zarr").mkdir()
    (tmp_path / "x.zarr" / "zarr.json").write_text("{}")
    (tmp_path / "raw").write_bytes(bytes(100))
    (tmp_path / "cut.npy").write_bytes(path.read_bytes()[:1000])
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    for name, message in {
        "x.npz": r"no .npy file.*np.load\(.*\['name'\]",
        "x.h5": r"no .npy file.*h5py.File\(.*\['name'\]",
        "x.zarr": r"give the array, zarr.open\(.*mode='r'\)",
        "raw": r"no .npy file.*np.memmap\(path",
        "cut.npy": "cannot be mapped: it is damaged or cut off",
        "objects.npy": "objects",
        "none.npy": r"as the path of a .npy file.*No such file",
        "": "is a folder",
    }.items():
        with pytest.raises((InvalidType, InvalidValue), match=message):
            session.data(tmp_path / name)
    with pytest.raises(InvalidType, match="fsdecode"):
        session.data(b"x.npy")
