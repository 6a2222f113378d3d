"""A search for hyper-parameters: a task for each setting, on whichever worker is free.

Settings differ in how long they take, so they are tasks and no rows: synk.map hands out the next one
when a worker is done.  The data are common to all tasks, and go to each worker once.  The scores are
the serial ones, exactly.

    python demos/demo_21_search.py [times as large]
"""

import itertools

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
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


def on_the_workers():
    return synk.map(evaluate, settings, common={"x": x, "y": y})


expected = timed("serial", serial)
beside = timed_by_joblib(by_joblib, expected, "sklearn.svm")
fits = timed("Synkro (2 workers)", on_the_workers)

assert beside == expected
assert fits == expected
best = max(range(len(settings)), key=fits.__getitem__)
assert fits[best] > 0.97
print(f"{settings[best]} reads {fits[best]:.2%} of {len(y)} digits right")

print("All assertions passed.")
