"""Tasks: a function of one item at a time, on whichever worker is free.

::

    forms      the types of ``map`` and ``imap``, by what they return
    maps       ``map`` and ``imap``: what they take, and functions for them
    wishes     how a map is to go, as its arguments say
    map        one map: items to the workers, results in order
    deaths     what becomes of a map when a worker dies
    feed       items, read from iterables as they are needed, or as they come, and pickled
    outcomes   what becomes of tasks: failures, and results until the program takes them
"""
