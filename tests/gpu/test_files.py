"""Rows that are read from files, on the device."""

import numpy as np
import pytest

import synkro as synk

pytestmark = pytest.mark.libraries

ARRAY = np.random.default_rng(0).standard_normal((101, 5))


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("dtype", ["<f8", ">f4"])
def test_rows_of_a_file_come_to_the_device(machine, tmp_path, slices, dtype):
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra files)")
    array = ARRAY.astype(dtype)
    with h5py.File(tmp_path / "x.h5", "w") as file:
        file.create_dataset("x", data=array, chunks=(10, 5), compression="gzip")

    def f(x, whole):
        assert isinstance(x, synk.xp().ndarray)
        assert isinstance(whole, synk.xp().ndarray)
        return x + whole.sum()

    with machine.session() as session:
        x = session.data(h5py.File(tmp_path / "x.h5")["x"])
        f = session.function(f, bcast_inputs="whole", outputs="gather")
        for batch in (None, [100, 3, 3, 50], np.s_[::-2]):
            want = array[slice(None) if batch is None else batch] + array.sum()
            for _ in range(2):
                assert np.allclose(f(x, x, batch=batch, num_slices=slices), want)
