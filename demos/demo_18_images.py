"""
Many images
===========

Images go through ``scipy.ndimage``: each is smoothed, and its bright spots are counted and measured.
The images are the rows of one array, so a batch of them is what a worker gets. The function is a loop
over images, as for one process. The results are gathered in the order of the images, and are the serial
ones, exactly.
"""

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save
from scipy import ndimage

import synkro as synk

IMAGES, SIDE, SPOTS = scaled(400), 128, 40

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
pixels = np.zeros((IMAGES, SIDE, SIDE))
which = np.repeat(np.arange(IMAGES), SPOTS)
rows, columns = rng.integers(SIDE, size=(2, len(which)))
pixels[which, rows, columns] = 1
pixels = ndimage.gaussian_filter(pixels, 2, axes=(1, 2)) * 25 + rng.normal(0, 0.3, pixels.shape)
pixels = pixels.astype("float32")

# %%
# The function returns images, and two numbers for each.


def analysed(images):
    """The smoothed images, and of each the number of its spots and the area of the largest one."""
    smooth, spots, largest = np.empty_like(images), [], []
    for image, filtered in zip(images, smooth, strict=True):
        ndimage.median_filter(image, size=3, output=filtered)
        ndimage.gaussian_filter(filtered, 1, output=filtered)
        labels, count = ndimage.label(filtered > 0.5)
        spots.append(count)
        largest.append(np.bincount(labels.ravel())[1:].max(initial=0))
    return {"smooth": smooth, "spots": np.array(spots), "largest": np.array(largest)}


def by_joblib(in_two):
    parts = in_two(analysed, np.array_split(pixels, 2))
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


# %%
# Each worker gets a half of the images. What they return is in one dict, of whole arrays.

everywhere = synk.function(analysed, outputs="gather")
synk.distribute()
images = synk.data(pixels)

expected = timed("serial", analysed, pixels)
beside = timed_by_joblib(by_joblib, expected, "scipy.ndimage")
found = timed("Synkro (2 workers)", everywhere, images)

for name in expected:
    assert np.array_equal(beside[name], expected[name])
    assert np.array_equal(found[name], expected[name])
    assert found[name].dtype == expected[name].dtype
assert found["smooth"].shape == pixels.shape
assert 0 < found["spots"].min() <= found["spots"].max() <= SPOTS
print(f"{found['spots'].mean():.2f} spots an image, the largest of {found['largest'].max()} pixels")

# %%
# The first image before and after. The lines go around its spots.

figure, (before, after) = plt.subplots(1, 2, figsize=(5.6, 3.0))
before.imshow(pixels[0], cmap="gray", vmin=-1, vmax=2.5)
before.set_title("one of the images")
after.imshow(found["smooth"][0], cmap="gray", vmin=-1, vmax=2.5, interpolation="nearest")
after.contour(found["smooth"][0], [0.5], colors="C1", linewidths=1.2)
after.set_title(f"smoothed: {found['spots'][0]} spots")
before.axis("off"), after.axis("off")
save(figure)

print("All assertions passed.")
