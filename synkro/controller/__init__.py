"""The user's process: everything here runs where the program of the user runs.

A call is planned in ``calls``, sent to the workers through ``engine``, and its outputs come together
in ``results``.

::

    8  executor/   futures, for libraries that take a pool
    7  session     a session: its parts, made and closed
    6  tasks/      functions of one item at a time: maps
    5  calls/      functions: planned, sent to the workers, called
    4  variables/  variables on the workers, and collectives over them
    3  results/    the replies of all ranks as the user's result
    2  data/       inputs: arrays in shared memory, in files, and of other programs
       objects/    the objects that functions bring along
    1  engine/     the workers as processes, and the one door to them
    0  placement/  which devices a session uses
       tracing/    where the time of calls goes
       progress    lines of status, and bars of progress

Imports go down, as between the rooms of the package.
"""
