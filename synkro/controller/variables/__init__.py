"""Variables on the workers, as the user's process has them.

::

    saving    variables and random generators to a file, and back
    registry  the variables of a session, and the collectives over them
    mirror    PyTensor's shared variables, and the worker variables that stand for them
    shared    ``Shared``: the handle of a variable
"""
