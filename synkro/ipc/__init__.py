"""Commands, replies and processes: bytes and descriptors, without knowing what they mean.

::

    channel  commands and replies through one shared block
    waiting  poll for a while, then sleep; fences
    process  one worker process: start, watch, interrupt, stop
    queue    items for whichever worker is free, and results on their way back
"""
