"""The workers as processes, and the one door to them.

::

    engine    starts the workers, sends them commands, waits for their replies, ends them
    failures  what failed in the workers, as errors of the user's process
    output    what the workers print, brought to the user
"""
