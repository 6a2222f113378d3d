"""
A search over settings
======================

Each setting of the hyper-parameters is a task, which runs on whichever worker is free. Settings differ
in how long they take, so they are tasks and no rows: ``synk.map`` hands out the next one when a worker
is done. The data are common to all tasks, and go to each worker once. The scores are the serial ones,
exactly.
"""

import itertools
import time

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import WORKERS, save
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from sklearn.svm import SVC

import synkro as synk

FOLDS = 3

synk.fork(2, devices="cpu")
digits = load_digits()  # 8 x 8 pixels from 0 to 16
rows = scaled(len(digits.data))  # where they are more than there are, some come again
x, y = np.resize(digits.data / 16, (rows, 64)), np.resize(digits.target, rows)
settings = [
    {"C": penalty, "gamma": gamma}
    for penalty, gamma in itertools.product([0.1, 1.0, 10.0], [0.01, 0.1, 1.0])
]

# %%
# The task: it knows nothing of workers.


def evaluate(setting, x, y):
    """The share of digits that are read right, each by a classifier that has not seen it."""
    right = 0
    for seen, unseen in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(x, y):
        classifier = SVC(**setting).fit(x[seen], y[seen])
        right += int((classifier.predict(x[unseen]) == y[unseen]).sum())
    return right / len(y)


def serial():
    return [evaluate(setting, x, y) for setting in settings]


def by_joblib(in_two):
    return in_two(evaluate, settings, [x] * len(settings), [y] * len(settings))


# %%
# On the workers, a task also says who has done it, and when.


def noted(setting, x, y):
    begin = time.perf_counter()
    return evaluate(setting, x, y), synk.rank(), begin, time.perf_counter()


def on_the_workers():
    return synk.map(noted, settings, common={"x": x, "y": y})


expected = timed("serial", serial)
beside = timed_by_joblib(by_joblib, expected, "sklearn.svm")
fits, ranks, begins, ends = zip(*timed("Synkro (2 workers)", on_the_workers), strict=True)

assert beside == expected
assert list(fits) == expected
best = max(range(len(settings)), key=fits.__getitem__)
assert fits[best] > 0.97
print(f"{settings[best]} reads {fits[best]:.2%} of {len(y)} digits right")

# %%
# Every task began when its worker had done the one before.

figure, axes = plt.subplots()
names = [f"C = {setting['C']:g}, gamma = {setting['gamma']:g}" for setting in settings]
durations, begins = np.subtract(ends, begins), np.subtract(begins, min(begins))
bars = axes.barh(names, durations, left=begins, color=[WORKERS[rank] for rank in ranks])
axes.bar_label(bars, [f"{fit:.1%}" for fit in fits], padding=3)
axes.set(title="Nine settings, a colour for each worker", xlabel="seconds")
axes.margins(x=0.1)
axes.invert_yaxis()
save(figure)

print("All assertions passed.")
