"""
Trades in a file
================

Trades are records in a file. Of each symbol the workers find the volume, and the first and the last
trade. A record has a string, a time and numbers; its dtype travels as it is. The workers map the file,
and each reads its rows. Numbers add up with ``"sum"``; times have a ``"min"`` and a ``"max"``.
"""

import tempfile
from pathlib import Path

import numpy as np
from matplotlib import dates
from matplotlib import pyplot as plt
from pictures import save

import synkro as synk

ROWS = 1_000_000
TRADE = np.dtype([("symbol", "U4"), ("time", "M8[us]"), ("price", "f8"), ("volume", "i8")])
SYMBOLS = np.array(["AMZ", "BRK", "GOOG", "IBM", "MSFT"])

synk.fork(2, devices="cpu")
folder = tempfile.TemporaryDirectory()
path = Path(folder.name, "trades.npy")

# %%
# A day of trades. The symbols have their times of the day.

rng = np.random.default_rng(0)
trades = np.zeros(ROWS, TRADE)
seconds = np.cumsum(rng.exponential(6.5 * 3600 / ROWS, ROWS))
trades["symbol"] = SYMBOLS[rng.normal(seconds / 6000, 0.2).clip(0, 4).round().astype(int)]
trades["time"] = np.datetime64("2024-03-01T09:30") + (seconds * 1e6).astype("m8[us]")
trades["price"] = np.exp(rng.normal(5, 0.1, ROWS)).round(2)
trades["volume"] = rng.integers(1, 1000, ROWS)
np.save(path, trades)

# %%
# A worker may see no trade of a symbol. Then its first time is the latest that there is, and its last
# time the earliest.


def by_symbol(trades, symbols):
    """Of each symbol the volume, the turnover, and when it was traded first and last."""
    codes = np.searchsorted(symbols, trades["symbol"])
    time = trades["time"]
    least, most = np.array([1 - 2**63, 2**63 - 1]).view(time.dtype)
    first, last = np.full(len(symbols), most), np.full(len(symbols), least)
    np.minimum.at(first, codes, time)
    np.maximum.at(last, codes, time)
    return {
        "volume": np.bincount(codes, trades["volume"], minlength=len(symbols)).astype(int),
        "turnover": np.bincount(codes, trades["price"] * trades["volume"], minlength=len(symbols)),
        "first": first,
        "last": last,
    }


# %%
# Records can be gathered, too: as many as a worker has found.


def large(trades):
    """The trades of more than 900 pieces, as records."""
    return trades[trades["volume"] > 900]


OPERATIONS = {"volume": "sum", "turnover": "sum", "first": "min", "last": "max"}
everywhere = synk.function(by_symbol, bcast_inputs="symbols", outputs=OPERATIONS)
chosen = synk.function(large, outputs="gather")
synk.distribute()

# %%
# The table is the file, which all workers map.

table = synk.data(np.load(path, mmap_mode="r"))
expected = by_symbol(trades, SYMBOLS)
found = everywhere(table, SYMBOLS)

for name, column in expected.items():
    same = np.allclose if name == "turnover" else np.array_equal
    assert same(found[name], column)
assert found["first"].dtype == "M8[us]"
for symbol, volume, first, last in zip(
    SYMBOLS, found["volume"], found["first"], found["last"], strict=True
):
    print(f"{symbol:4} {volume:>11,} pieces, from {first.astype('M8[s]')} to {last.astype('M8[s]')}")

blocks = chosen(table)
assert blocks.dtype == TRADE
assert np.array_equal(blocks, large(trades))
print(f"{len(blocks):,} trades of more than 900 pieces, the first at {blocks['time'].min()}")
folder.cleanup()

figure, axes = plt.subplots()
first, last = (dates.date2num(found[name]) for name in ("first", "last"))
bars = axes.barh(SYMBOLS, last - first, left=first)
labels = [f"{volume / 1e6:.0f} million" for volume in found["volume"]]
axes.bar_label(bars, labels, label_type="center", color="white")
axes.xaxis_date()
axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
axes.set(title="When each symbol was traded, and how many pieces", xlabel="time of the day")
axes.invert_yaxis()
save(figure)

print("All assertions passed.")
