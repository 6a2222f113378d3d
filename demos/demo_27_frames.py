"""Frames of another program: it writes pictures into a ring in shared memory, all workers look at each.

The other program stands for a camera.  It is in Python here, needs no workers, and could be in C.  No
frame is lost, and the results are the serial ones, exactly.

    python demos/demo_27_frames.py
"""

import subprocess
import sys

import numpy as np

import synkro as synk

FRAMES, SHAPE, NAME = 50, (240, 320), "/synkro-demo-27"

CAMERA = f"""
import numpy as np
import synkro as synk

rng = np.random.default_rng(0)
with synk.ring({NAME!r}, timeout=60) as ring:
    for number in range({FRAMES}):
        ring.write(rng.integers(256, size={SHAPE}, dtype="u1"))
"""

synk.fork(2, devices="cpu")
brightest = synk.function(lambda rows: rows.sum(axis=0, dtype="i8"), outputs="sum")
synk.distribute()

found = []
with synk.ring(NAME, slots=4, shape=SHAPE, dtype="u1", timeout=60) as ring:
    camera = subprocess.Popen([sys.executable, "-c", CAMERA])
    for frame in ring:
        found.append(int(brightest(frame).argmax()))
assert camera.wait() == 0

rng = np.random.default_rng(0)
for column in found:
    assert column == rng.integers(256, size=SHAPE, dtype="u1").sum(axis=0, dtype="i8").argmax()
assert len(found) == FRAMES
print(f"{len(found)} frames, of which the brightest columns are {found[:5]} …")

average = synk.data(np.zeros(SHAPE[1]), shm_name=NAME)  # and back: other programs may look at it
average[:] = brightest(np.ones(SHAPE, "u1")) / SHAPE[0]
assert np.array_equal(synk.attach(NAME), np.ones(SHAPE[1]))

print("All assertions passed.")
