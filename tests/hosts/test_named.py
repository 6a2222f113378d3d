"""Memory with a name is of the main program's host: its rows travel to the others, in each call."""

import pytest

pytest.importorskip("posix_ipc", reason="needs posix_ipc, which has no wheel for this Python")

pytestmark = [pytest.mark.hosts, pytest.mark.counted_once]

PROGRAM = """
import mmap, sys
import numpy as np
import synkro as synk

synk.fork(hosts=["h1:1", "h2:1"], devices="cpu", launcher=sys.argv[1])
seen = synk.function(lambda x: x, outputs="gather")
x = synk.data(np.arange(21.0).reshape(7, 3), shm_name="/frames")
y = synk.attach("/frames")
with open("/dev/shm/frames", "r+b") as file:
    other = np.frombuffer(mmap.mmap(file.fileno(), 0), "f8", offset=4096)
for number in range(5):  # as another program would write
    other[...] = number
    for data in (x, y):
        assert (seen(data) == number).all()
        assert (seen({"x": data})["x"] == number).all()

ring = synk.ring("/ring", slots=2, shape=(5, 3), timeout=30)
writer = synk.ring("/ring")
for number in range(5):
    writer.write(np.full((5, 3), number))
    assert (seen(next(ring)) == number).all()
writer.close()
assert list(ring) == []
print("done")
"""


def test_each_call_sees_what_lies_there(hosts, tmp_path, nothing_left_there):
    done = hosts.python(tmp_path, PROGRAM, hosts.launcher, timeout=100)
    assert done.stdout == "done\n", done.stderr
