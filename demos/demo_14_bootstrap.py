"""
A bootstrap
===========

The seeds of the replicates are scattered, and all workers share the table. Each replicate makes its
generator of its own seed, so it draws the same rows on whichever worker it runs: the replicates are the
serial ones, exactly.
"""

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS, REPLICATES = 20_000, scaled(400)

synk.fork(2, devices="cpu")
rng = np.random.default_rng(0)
age = rng.uniform(20, 70, ROWS)
income = np.exp(rng.normal(3 + age / 100, 0.6))
table = np.column_stack([age, income])

# %%
# The statistic, of one table and of one that is drawn from it with a seed.


def gap(table):
    """The median income of the older half, as a multiple of that of the younger."""
    older = table[:, 0] > np.median(table[:, 0])
    return np.median(table[older, 1]) / np.median(table[~older, 1])


def replicates(seeds, table):
    """The statistic of a resampled table, for each of the seeds."""
    found = np.empty(len(seeds))
    for i, seed in enumerate(seeds):
        chosen = np.random.default_rng(seed).integers(len(table), size=len(table))
        found[i] = gap(table[chosen])
    return found


def by_joblib(in_two):
    return np.concatenate(in_two(replicates, np.array_split(seeds, 2), [table, table]))


# %%
# The plain function runs on all seeds here; everywhere, each worker runs it on its share of them. The
# table lies in shared memory, once.

seeds = np.random.SeedSequence(0).generate_state(REPLICATES, np.uint64)
everywhere = synk.function(replicates, bcast_inputs="table", outputs="gather")
synk.distribute()
shared = synk.data(table)  # once in memory, for all workers

expected = timed("serial", replicates, seeds, table)
beside = timed_by_joblib(by_joblib, expected)
found = timed("Synkro (2 workers)", everywhere, seeds, shared)

assert np.array_equal(beside, expected)
assert np.array_equal(found, expected)

# %%
# What the replicates say of the statistic.

low, high = np.quantile(found, [0.025, 0.975])
assert low < gap(table) < high
print(f"the older half earns {gap(table):.3f} times as much (95%: {low:.3f} to {high:.3f})")

figure, axes = plt.subplots()
axes.hist(found, 40, color="lightsteelblue")
axes.axvspan(low, high, alpha=0.15, label="95% of the replicates")
axes.axvline(gap(table), color="C1", label="the table itself")
axes.set(title=f"{REPLICATES} replicates", xlabel="income of the older half ÷ of the younger")
axes.legend(frameon=False)
save(figure)

print("All assertions passed.")
