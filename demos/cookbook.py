"""What the programs of the cookbook share: a stopwatch, and joblib beside them where it is installed."""

import importlib
import sys
import time

try:
    import joblib
except ImportError:
    joblib = None

_NUMBERS = [word for word in sys.argv[1:] if word.replace(".", "", 1).isdigit()]


def scaled(count):
    """*count* times the number on the command line, if there is one: 0.2 makes a program smaller."""
    return max(1, round(count * float(_NUMBERS[0]))) if _NUMBERS else count


def timed(who, run, *args):
    """What *run* returns; its seconds are printed."""
    begin = time.perf_counter()
    result = run(*args)
    print(f"{who:<18} {time.perf_counter() - begin:6.3f} s")
    return result


def timed_by_joblib(run, otherwise, imports="numpy"):
    """What ``run(in_two)`` returns, where ``in_two(fn, *iterables)`` is a list, as ``map`` makes it.

    Two processes of joblib's compute it; they are up, and have imported *imports*, before the time
    begins.  Without joblib it is *otherwise*.
    """
    if joblib is None:
        print("joblib is not installed: there is no time beside it")
        return otherwise
    with joblib.Parallel(n_jobs=2) as parallel:

        def in_two(fn, *iterables):
            return parallel(joblib.delayed(fn)(*each) for each in zip(*iterables, strict=True))

        in_two(importlib.import_module, [imports] * 2)
        return timed("joblib (n_jobs=2)", run, in_two)
