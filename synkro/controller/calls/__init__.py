"""Functions, from the user's callable to a call on all ranks.

::

    forms         the two forms of ``function()``: of a callable, and of a graph
    function      ``Function``: plan, run, collect
    planner       what one call is asked to do; from its arguments to its plan
    arguments     arguments on their way to the workers
    initializer   what each worker does before all else
    replacement   another worker in the place of one that has died, with all that it had
    distribution  the functions of a session, and how they get to the workers
    background    calls in the background
    check         a call beside the plain function on the same rows
    replay        a way into a failure: what has failed runs once more in this process
    serial        a function in this process by itself
"""
