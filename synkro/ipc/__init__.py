"""Commands, replies and processes: bytes and descriptors, whatever they mean.

::

    channel  commands and replies through one shared block; spin, then sleep
    waiting   poll for a while, then sleep; fences
    process  one worker process: start, watch, interrupt, stop
"""
