"""The workers as processes, and the one door to them.

::

    engine     the states of a session; sends commands, waits for replies
    crew       the worker processes: started together, ended together
    directory  what the workers know by number
    turns      which operations use which ranks, where some use a part of them
    nesting    who is in the middle of what, where signal handlers come in between
    post       how commands get to them
    answers    the replies of all ranks, unpickled
    failures   what failed in the workers, as errors of the user's process
    output     what the workers print, brought to the user
"""
