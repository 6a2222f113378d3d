"""What the tests share: one plugin of pytest's, and helpers to import.

::

    leftovers  every test is followed by a count of what it may have left behind
    sessions   workers that serve a test, or a whole file
    programs   Python programs in processes of their own
    hosts      machines on a network, made of namespaces of this one
    schedulers stand-ins for srun and pbs_tmrsh, which start processes on them
    homes      one rank in the test's own process
    waiting    waiting for what comes a moment later, but soon
    limits     as few descriptors as a test says
    failing    functions that die, hang or hear nothing; Ctrl-C at a moment that a test names
    inside     where workers are, as nobody outside can see
    together   several threads at once
    examples   random tests: what is drawn, and how often
    arrays     values that all dtypes hold, and what NumPy says of them
    collectives  every collective at once, and what NumPy says of it
    named      memory with a name, and programs in C beside it
    gpus       machines with GPUs, real and make-believe, and how ranks lie on them
    left_out   one line for the tests that need a GPU where there is none
    forked     workers are forks of a process that has loaded what they import
    logs       a logger, and a handler that keeps its records
    over_hosts hosts for a file of tests; the tests of one host, with workers on several
"""

import sys

import cloudpickle

pytest_plugins = [
    "support.examples",
    "support.leftovers",
    "support.forked",
    "support.sessions",
    "support.programs",
    "support.named",
    "support.gpus",
    "support.left_out",
    "support.over_hosts",
    "support.logs",
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not import what is here
