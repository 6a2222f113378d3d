"""
A group-by
==========

The names become codes once, the workers add up by codes, and the result has the names again.
``np.bincount`` with ``minlength=`` gives every worker the same groups, in the same order, whichever of
them its rows have. So sums over rows add up, and extrema, too. Prices in whole cents add up exactly.
"""

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS = scaled(2_000_000)

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
fruits = np.array(["apple", "banana", "cherry", "damson", "elderberry", "fig", "grape"])
shops = np.array(["airport", "harbour", "market", "station"])
fruit = rng.choice(fruits, ROWS, p=rng.dirichlet(np.full(len(fruits), 3.0)))
shop = rng.choice(shops, ROWS, p=[0.4, 0.1, 0.3, 0.2])
cents = np.rint(np.exp(rng.normal(5, 1, ROWS))).astype("int64")

# %%
# The codes of both keys make one: a group is a pair of names.

fruit_names, fruit_codes = np.unique(fruit, return_inverse=True)
shop_names, shop_codes = np.unique(shop, return_inverse=True)
codes = fruit_codes * len(shop_names) + shop_codes
names = [(str(f), str(s)) for f in fruit_names for s in shop_names]


def by_group(codes, cents, groups):
    """Of each group the count, the sum, the sum of the logarithms, and the extrema."""
    lowest = np.full(groups, np.iinfo(cents.dtype).max)
    highest = np.full(groups, np.iinfo(cents.dtype).min)
    np.minimum.at(lowest, codes, cents)
    np.maximum.at(highest, codes, cents)
    return {
        "count": np.bincount(codes, minlength=groups),
        "sum": np.bincount(codes, cents, minlength=groups),
        "logs": np.bincount(codes, np.log(cents), minlength=groups),
        "lowest": lowest,
        "highest": highest,
    }


# %%
# Each output has an operation of its own, which merges what the workers have found.

OPERATIONS = {"count": "sum", "sum": "sum", "logs": "sum", "lowest": "min", "highest": "max"}


def by_joblib(in_two):
    halves = [np.array_split(codes, 2), np.array_split(cents, 2)]
    one, two = in_two(by_group, *halves, [len(names)] * 2)
    merge = {"sum": np.add, "min": np.minimum, "max": np.maximum}
    return {name: merge[op](one[name], two[name]) for name, op in OPERATIONS.items()}


# %%
# The codes and the prices are scattered, and all workers know how many groups there are.

everywhere = synk.function(by_group, bcast_inputs="groups", outputs=OPERATIONS)
synk.distribute()
all_codes, all_cents = synk.data(codes), synk.data(cents)

expected = timed("serial", by_group, codes, cents, len(names))
beside = timed_by_joblib(by_joblib, expected)
found = timed("Synkro (2 workers)", everywhere, all_codes, all_cents, len(names))

for name in expected:  # exactly, but for the sums of numbers that are not whole
    same = np.allclose if name == "logs" else np.array_equal
    assert same(beside[name], expected[name])
    assert same(found[name], expected[name])

# %%
# The table by names.

table = {name: {key: found[key][i] for key in found} for i, name in enumerate(names)}
cherries = cents[(fruit == "cherry") & (shop == "harbour")]
assert table["cherry", "harbour"]["count"] == len(cherries)
assert table["cherry", "harbour"]["sum"] == cherries.sum()
assert table["cherry", "harbour"]["highest"] == cherries.max()
for name in names[:3]:
    group = table[name]
    mean, typical = group["sum"] / group["count"], np.exp(group["logs"] / group["count"])
    print(*name, f"{group['count']} sold, mean price {mean:.1f}, geometric mean {typical:.1f} cents")

figure, axes = plt.subplots()
sales = found["sum"].reshape(len(fruit_names), len(shop_names)) / 1e8
for i, name in enumerate(shop_names):
    axes.bar(fruit_names, sales[:, i], bottom=sales[:, :i].sum(axis=1), label=name)
axes.set(title=f"{ROWS:,} sales in {len(names)} groups", ylabel="turnover (100 million cents)")
axes.legend(frameon=False)
save(figure)

print("All assertions passed.")
