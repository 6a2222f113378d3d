"""
An Asian option
===============

The price of an Asian option by Monte Carlo is the same, to the bit, for any number of workers. The
paths come in blocks, and each block makes its generator of a seed of its own. So the blocks are the
same wherever they run. They are gathered, and averaged at home in the order of the seeds.
"""

import math
import warnings
from statistics import NormalDist

import numpy as np
from cookbook import scaled, timed, timed_by_joblib
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

SPOT, STRIKE, RATE, VOLATILITY, YEARS, DATES = 100.0, 100.0, 0.03, 0.25, 1.0, 50
BLOCKS, PATHS = scaled(300), 2_000  # that many blocks of so many paths

# %%
# A block needs its seed, and nothing else.


def payoffs(seeds):
    """Discounted mean payoffs (blocks, 2) of the arithmetic and of the geometric average."""
    step = YEARS / DATES
    drift, spread = (RATE - VOLATILITY**2 / 2) * step, VOLATILITY * math.sqrt(step)
    found = np.empty((len(seeds), 2))
    for i, seed in enumerate(seeds):
        moves = np.random.default_rng(seed).standard_normal((PATHS, DATES))
        logs = np.cumsum(drift + spread * moves, axis=1)
        averages = SPOT * np.array([np.exp(logs).mean(axis=1), np.exp(logs.mean(axis=1))])
        found[i] = math.exp(-RATE * YEARS) * np.maximum(averages - STRIKE, 0).mean(axis=1)
    return found


# %%
# The option pays by the arithmetic average, which has no price in closed form. The geometric average
# has one. It checks the paths, and as a control variate it makes the price of the option much more
# exact.


def geometric_price():
    """Kemna and Vorst (1990): the logarithm of the geometric average is normal."""
    mean = math.log(SPOT) + (RATE - VOLATILITY**2 / 2) * YEARS * (DATES + 1) / (2 * DATES)
    variance = VOLATILITY**2 * YEARS * (DATES + 1) * (2 * DATES + 1) / (6 * DATES**2)
    above, cdf = (mean - math.log(STRIKE)) / math.sqrt(variance), NormalDist().cdf
    forward = math.exp(mean + variance / 2) * cdf(above + math.sqrt(variance)) - STRIKE * cdf(above)
    return math.exp(-RATE * YEARS) * forward


def price(blocks):
    """The price of the option, and its standard error."""
    arithmetic, geometric = blocks.T
    slope = np.cov(arithmetic, geometric)[0, 1] / geometric.var(ddof=1)
    better = arithmetic - slope * (geometric - geometric_price())
    return better.mean(), better.std(ddof=1) / math.sqrt(len(better))


def by_joblib(in_two):
    return np.concatenate(in_two(payoffs, np.array_split(seeds, 2)))


# %%
# One worker, two and three: each has a session of its own, and all find the same blocks.

seeds = np.random.SeedSequence(2026).generate_state(BLOCKS, np.uint64)
expected = timed("serial", payoffs, seeds)
assert np.array_equal(timed_by_joblib(by_joblib, expected), expected)
warnings.filterwarnings("ignore", "3 CPU workers")  # on two cores, three take turns
for workers in (1, 2, 3):
    with synk.Session(workers, devices="cpu", verbose=False) as session:
        everywhere = session.function(payoffs, outputs="gather")
        session.distribute()
        found = timed(f"Synkro ({workers} worker{'s' * (workers > 1)})", everywhere, seeds)
    assert np.array_equal(found, expected)

# %%
# Where the geometric average has the price that it must have, a line through the blocks reads the price
# of the option.

value, error = price(found)
geometric = found[:, 1]
assert abs(geometric.mean() - geometric_price()) < 4 * geometric.std() / math.sqrt(BLOCKS)
print(f"the option is worth {value:.4f}, with a standard error of {error:.4f}")

figure, axes = plt.subplots()
for worker, share in enumerate(np.array_split(found, 3)):
    axes.plot(share[:, 1], share[:, 0], ".", label=f"blocks of worker {worker}")
axes.axvline(geometric_price(), color="gray", linestyle="--", label="the exact price of the geometric")
axes.plot(geometric_price(), value, "ko", markersize=10, label=f"the option: {value:.2f}")
axes.set(title=f"{BLOCKS} blocks of paths, from three workers")
axes.set(xlabel="mean payoff by the geometric average", ylabel="mean payoff by the arithmetic average")
axes.legend(frameon=False)
save(figure)

print("All assertions passed.")
