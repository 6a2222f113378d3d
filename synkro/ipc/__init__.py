"""Commands, replies and processes: bytes and descriptors, whatever they mean.

::

    channel  commands and replies through one shared block; spin, then sleep
    process  one worker process: start, watch, interrupt, stop
"""
