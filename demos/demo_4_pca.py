"""
Principal components
====================

The workers compute statistics over the rows of a real data set; the rest is done at home. One pass over
the rows gives the mean and the mean of the outer products. They reduce exactly, because they are means
over rows. The main process solves the small eigenproblem. The projection of each row is gathered in the
order of the rows. The answers are scikit-learn's.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import PCA

import synkro as synk

n_workers = synk.fork()
cancer = load_breast_cancer()
n_components = 3

# %%
# The data are 569 rows of 30 measurements, on very different scales.

x = synk.data(cancer.data, name="measurements")
n_rows, n_features = x.shape


@synk.function(bcast_inputs="origin", outputs="mean")
def moments(x, origin):
    """The mean row, and the mean of the outer products, counted from *origin*."""
    shifted = x - origin
    return shifted.mean(axis=0), shifted.T.dot(shifted) / len(shifted)


@synk.function(bcast_inputs=["origin", "axes"], outputs="gather")
def project(x, origin, axes):
    """Each row in the coordinates of *axes*."""
    return (x - origin).dot(axes)


# %%
# Both outputs of ``moments`` are means over rows, so they are averaged. An origin near the data (any
# row will do) keeps the difference of large squares from losing digits.

first = cancer.data[0]
shift, products = moments(x, first)
mean = first + shift
covariance = (products - np.outer(shift, shift)) * n_rows / (n_rows - 1)
assert np.allclose(covariance, np.cov(cancer.data, rowvar=False))

# %%
# All measurements are brought to one scale: divided by their standard deviations, in place, in shared
# memory.

scale = np.sqrt(np.diag(covariance))
x /= scale
mean /= scale
correlation = covariance / np.outer(scale, scale)

# %%
# The components are the eigenvectors of the largest eigenvalues, which ``eigh`` puts last.

values, vectors = np.linalg.eigh(correlation)
values, vectors = values[::-1][:n_components], vectors[:, ::-1][:, :n_components]
scores = project(x, mean, np.ascontiguousarray(vectors))
print(f"{n_rows} rows of {n_features} measurements on {n_workers} workers")
for i, value in enumerate(values):
    print(f"component {i + 1} explains {value / n_features:6.2%} of the variance")
assert scores.shape == (n_rows, n_components)

# %%
# scikit-learn agrees, up to the sign of each component.

reference = PCA(n_components, svd_solver="full").fit(x[:])
signs = np.sign(np.sum(reference.components_.T * vectors, axis=0))
assert np.allclose(reference.mean_, mean)
assert np.allclose(reference.explained_variance_, values)
assert np.allclose(reference.components_.T, vectors * signs)
assert np.allclose(reference.transform(x[:]), scores * signs)

# %%
# And the components mean something: the first alone tells most tumours apart.

benign = cancer.target == 1
threshold = (scores[benign, 0].mean() + scores[~benign, 0].mean()) / 2
side = scores[:, 0] > threshold
accuracy = max(np.mean(side == benign), np.mean(side != benign))
print(f"a threshold on the first component is right for {accuracy:.1%} of the tumours")
assert accuracy > 0.85

figure, axes = plt.subplots()
for kind, rows in {"benign": benign, "malignant": ~benign}.items():
    axes.scatter(*scores[rows, :2].T, 10, alpha=0.7, label=kind)
axes.axvline(threshold, color="black", linestyle="--", label="threshold")
axes.set(title=f"The first component tells {accuracy:.0%} of the tumours apart")
axes.set_xlabel(f"component 1 ({values[0] / n_features:.0%} of the variance)")
axes.set_ylabel(f"component 2 ({values[1] / n_features:.0%} of the variance)")
axes.legend()
save(figure)

print("All assertions passed.")
