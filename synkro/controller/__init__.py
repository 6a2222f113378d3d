"""The user's process: everything here runs where the program of the user runs.

A call is planned in ``calls``, sent to the workers through ``engine``, and its outputs come together
in ``results``.

::

    session     a session: its engine, functions, variables and data
    calls/      functions: planned, sent to the workers, called
    tasks/      functions of one item at a time: maps
    objects/    the objects that functions bring along
    variables/  variables on the workers, and collectives over them
    results/    the replies of all ranks as the user's result
    data        arrays in shared memory, the inputs of functions
    stored      arrays in files, which the workers read by themselves
    foreign     inputs that other programs write: attached memory, and rings
    named       arrays in memory with a name
    outgoing    buffers in shared memory, by which arrays go to the workers
    placement/  which devices a session uses
    tracing/    where the time of calls goes
    engine/     the workers as processes, and the one door to them
    progress    lines of status, and bars of progress
"""
