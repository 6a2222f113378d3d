"""The one door to the workers, and what happens when one of them fails.

::

    engine     the states of a session; sends commands, waits for replies
    directory  what the workers know by number
    turns      which operations use which ranks, where some use a part of them
    nesting    who is in the middle of what, where signal handlers come in between
    prompt     the user answers what workers ask
    workers    how commands get to the workers; one at a time: buried, another begun in its place
    failures   what failed in the workers, as errors of the user's process
"""
