"""What the demos share for drawing: how pictures look, and where they go."""

import sys
from pathlib import Path

import matplotlib
from matplotlib import pyplot

WORKERS = ["#2b6cb0", "#dd6b20", "#2f855a", "#9f3a7c"]
"""The colour of each worker, where a picture shows which one did what."""

matplotlib.rcParams.update(
    {
        "figure.figsize": (6.4, 4.0),
        "figure.dpi": 100,
        "figure.constrained_layout.use": True,
        "axes.prop_cycle": pyplot.cycler(color=WORKERS),
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
)


def save(figure):
    """Write the picture of the running demo, under its name, to the folder that the command line names,
    or to ``demos/output``."""
    words = [word for word in sys.argv[1:] if not word.replace(".", "", 1).isdigit()]
    folder = Path(words[0]) if words else Path(__file__).parent / "output"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{Path(sys.argv[0]).stem}.png"
    figure.savefig(path)
    print(f"drawn: {path}")
