"""
Variables on the workers
========================

Each rank has its own replica of a variable, which stays there between calls. Parameters, statistics and
shards of a data set live in such variables. The main program moves values in (``broadcast``,
``scatter``, ``set_value``) and out (``gather``, ``get_value``), and lets the workers exchange them
(``all_reduce``, ``all_gather``). Functions read and write the replica of their rank.
"""

import numpy as np
from matplotlib import pyplot as plt
from pictures import save
from sklearn.datasets import load_iris

import synkro as synk

n = synk.fork()
ranks = np.arange(n)
last = n - 1

# %%
# A new variable has the same value on every rank. ``get_value()`` copies the master rank's replica, and
# ``gather()`` stacks the replicas of all of them.

w = synk.shared(np.array([1.0, 2.0, 3.0]), name="w")
assert np.array_equal(w.get_value(), [1, 2, 3])
assert np.array_equal(synk.gather(w), [[1, 2, 3]] * n)

# %%
# ``set_value()`` writes to all replicas, and so does ``broadcast()``, to several variables if need be.

b = synk.shared(0.0, name="b")
w.set_value([4, 5, 6])
synk.broadcast([w, b], [np.zeros(3), 7.0])
assert np.array_equal(synk.gather(w), np.zeros((n, 3)))
assert np.array_equal(synk.gather(b), [7.0] * n)

# %%
# A rank can be written to alone. From here on the replicas differ.

for rank in ranks:
    synk.set_value(rank, w, [rank, rank**2, 1])
assert np.array_equal(synk.get_value(last, w), [last, last**2, 1])
replicas = synk.gather(w)
print(f"w on {n} workers:", *replicas, sep="\n  ")
assert np.array_equal(replicas, np.stack([ranks, ranks**2, ranks**0], axis=1))

# %%
# ``reduce(in_place=False)`` brings one array here. ``all_reduce()`` makes it every rank's replica.

for op in ("mean", "sum", "prod", "max", "min"):
    assert np.allclose(synk.reduce(w, op, in_place=False), getattr(np, op)(replicas, axis=0))
synk.all_reduce(w, "sum")
print("the sum, now on every worker:", w.get_value())
assert np.array_equal(synk.gather(w), [replicas.sum(axis=0)] * n)

# %%
# ``broadcast()`` without values sends the master rank's replica, here rank 0's, to the others.

synk.set_value(last, w, [-1, -2, -3])
synk.set_value(0, w, [10, 20, 30])
synk.broadcast(w)
assert np.array_equal(synk.gather(w), [[10, 20, 30]] * n)

# %%
# ``scatter()`` splits rows over the ranks, as evenly as can be. ``nd_up=0`` gathers them end to end.

iris = load_iris()
flowers = synk.shared(iris.data[:0], name="flowers")  # no rows yet
species = synk.shared(iris.target[:0], name="species")
synk.scatter([flowers, species], [iris.data, iris.target])
shards = np.array_split(iris.data, n)
print(f"150 flowers, by worker: {synk.get_lengths(flowers)}")
assert synk.get_lengths(flowers) == [len(shard) for shard in shards]
assert synk.get_shapes(flowers) == [shard.shape for shard in shards]
assert np.array_equal(synk.get_value(last, flowers), shards[last])
assert np.array_equal(synk.gather(flowers, nd_up=0), iris.data)

# %%
# ``batch=`` selects some of the rows, as in a call. Ranks may well end up with none.

order = np.random.default_rng(0).permutation(150)
synk.scatter([flowers, species], [iris.data, iris.target], batch=order[:101])
assert np.array_equal(synk.gather(species, nd_up=0), iris.target[order[:101]])

# %%
# Lengths need not be even: a rank can be given whatever it should hold. ``all_gather()`` puts all rows
# together, on every rank.

synk.set_value(0, flowers, iris.data, batch=slice(0, 150, 2))
held = [synk.get_value(rank, flowers) for rank in ranks]
assert np.array_equal(held[0], iris.data[::2])
assert np.array_equal(synk.gather(flowers, nd_up=0), np.concatenate(held))
synk.all_gather(flowers)
assert synk.get_lengths(flowers) == [75 + sum(map(len, held[1:]))] * n
assert np.array_equal(synk.get_value(last, flowers), np.concatenate(held))

# %%
# A function uses the replica of its rank, as an array (``.value``, or in arithmetic) and by index. What
# it writes is there in the next call. Without scattered inputs it runs once on every rank.

synk.scatter(flowers, iris.data)
count = synk.shared(0, name="count")
total = synk.shared(np.zeros(4), name="total")


@synk.function(outputs=None)
def add_up():
    rows = flowers.value
    count.value = count + len(rows)
    total[...] += rows.sum(axis=0)
    return synk.rank(), synk.size(), rows.sum()


seen = add_up()  # outputs=None: the list of what each rank returned
assert [where for *where, _ in seen] == [[rank, n] for rank in ranks]
assert np.allclose([here for _, _, here in seen], [shard.sum() for shard in shards])
add_up()
assert np.array_equal(synk.gather(count), [2 * len(shard) for shard in shards])
assert np.allclose(synk.gather(total), [2 * shard.sum(axis=0) for shard in shards])

# %%
# Ranks also exchange arrays inside a function. There ``all_reduce()`` returns what it makes of them.

mean = synk.function(lambda: synk.all_reduce(total.value, "sum") / synk.all_reduce(int(count), "sum"))
print(f"the mean flower: {np.round(mean(), 3)}")
assert np.allclose(mean(), iris.data.mean(axis=0))
assert np.allclose(synk.gather(total).sum(axis=0), 2 * iris.data.sum(axis=0))  # total is unchanged

# %%
# The flowers that each worker holds, the means of what it added up, and the mean of all.

figure, axes = plt.subplots()
means = synk.gather(total) / synk.gather(count)[:, None]
for rank in ranks:
    axes.scatter(*shards[rank][:, [0, 2]].T, 14, color=f"C{rank}", alpha=0.5)
    axes.scatter(*means[rank, [0, 2]], 200, color=f"C{rank}", marker="*", edgecolor="black")
axes.scatter(*mean()[[0, 2]], 300, color="black", marker="*", label="mean of all, by all_reduce")
axes.set(title=f"Each of {n} workers holds its flowers, and their mean", xlabel="length of sepals")
axes.set_ylabel("length of petals")
axes.legend(loc="upper left")
save(figure)

print("All assertions passed.")
