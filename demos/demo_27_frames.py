"""
Frames of a camera
==================

Another program writes pictures into a ring in shared memory, and all workers look at each. The other
program stands for a camera. It is in Python here, needs no workers, and could be in C. No frame is
lost, and the results are the serial ones, exactly.
"""

import subprocess
import sys

import numpy as np
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

FRAMES, SHAPE, NAME = 50, (120, 160), "/synkro-demo-27"

# %%
# The camera sees noise, and a bright column that goes to and fro.

CAMERA = f"""
import numpy as np
import synkro as synk

rng = np.random.default_rng(0)
with synk.ring({NAME!r}, timeout=60) as ring:
    for number in range({FRAMES}):
        frame = rng.integers(200, size={SHAPE}, dtype="u1")
        frame[:, round(80 + 60 * np.sin(number / 6))] += 50
        ring.write(frame)
"""

# %%
# Each worker adds up the columns of its rows of a frame. The sums of all rows have their maximum where
# the frame is brightest.

synk.fork(2, devices="cpu")
of_columns = synk.function(lambda rows: rows.sum(axis=0, dtype="i8"), outputs="sum")
synk.distribute()

sums = []
with synk.ring(NAME, slots=4, shape=SHAPE, dtype="u1", timeout=60) as ring:
    camera = subprocess.Popen([sys.executable, "-c", CAMERA])
    for frame in ring:
        sums.append(of_columns(frame))
assert camera.wait() == 0

# %%
# This program can make the same frames, and add up their columns by itself.

rng = np.random.default_rng(0)
for number, row in enumerate(sums):
    frame = rng.integers(200, size=SHAPE, dtype="u1")
    frame[:, round(80 + 60 * np.sin(number / 6))] += 50
    assert np.array_equal(row, frame.sum(axis=0, dtype="i8"))
assert len(sums) == FRAMES
found = np.argmax(sums, axis=1)
print(f"{len(found)} frames, of which the brightest columns are {found[:5]} …")

# %%
# And back: an array with a name, which other programs may look at.

average = synk.data(np.zeros(SHAPE[1]), shm_name=NAME)
average[:] = of_columns(np.ones(SHAPE, "u1")) / SHAPE[0]
assert np.array_equal(synk.attach(NAME), np.ones(SHAPE[1]))

figure, axes = plt.subplots(figsize=(6.2, 3.4))
image = axes.imshow(
    np.array(sums) / SHAPE[0], cmap="gray", vmin=80, aspect="auto", interpolation="nearest"
)
axes.plot(found, range(FRAMES), "o", markerfacecolor="none", color="C1", label="the brightest column")
axes.set(title="All frames of the camera, one a line", xlabel="column", ylabel="frame")
figure.colorbar(image, label="brightness")
axes.legend(loc="upper left")
save(figure)

print("All assertions passed.")
