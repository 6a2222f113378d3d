"""Arrays in files over several hosts: each opens the file at its path."""

import numpy as np
import pytest

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]

PROGRAM = """
import sys
import numpy as np
import h5py
import synkro as synk

launcher, path = sys.argv[1:]
synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=launcher, verbose=False)
x = synk.data(h5py.File(path)["x"])
array = x[:]
rows = synk.function(lambda x: x, outputs="gather", name="rows")
whole = synk.function(lambda x: x.sum(), bcast_inputs="x", outputs=None, name="whole")
try:
    assert np.array_equal(rows(x, batch=[900, 5, 5, 901], num_slices=2), array[[900, 5, 5, 901]])
    assert np.array_equal(rows(x), array)
    assert whole(x) == [array.sum()] * 2
    print("the rows are right")
except OSError as error:
    print(error)
"""


def test_each_host_opens_the_file(hosts, tmp_path):
    h5py = pytest.importorskip("h5py", reason="needs h5py (the extra files)")
    (tmp_path / "data").mkdir()
    path = tmp_path / "data" / "x.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset(
            "x", data=np.arange(3e3).reshape(1000, 3), chunks=(70, 2), compression="gzip"
        )
    done = hosts.python(tmp_path, PROGRAM, hosts.launcher, path)
    assert done.stdout == "the rows are right\n", done.stderr
    with hosts.mounted("h2", "-t", "tmpfs", "none", path.parent):
        error = hosts.python(tmp_path, PROGRAM, hosts.launcher, path).stdout
    assert "rank 1 (h2) failed in the function 'rows'" in error
    assert f"{path} is not there any more" in error
