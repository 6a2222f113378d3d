"""Variables on the workers, as the user's process has them.

::

    saving       variables and random generators to a file, and back
    registry     the variables of a session: which there are, and checks of what users say of them
    collectives  the collectives over them, and how values get to replicas and back
    mirror       PyTensor's shared variables, and the worker variables that stand for them
    shared       ``Shared``: the handle of a variable
"""
