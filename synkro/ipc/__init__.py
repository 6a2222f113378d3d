"""Commands, replies and processes: bytes and descriptors, without knowing what they mean.

::

    pool         the worker processes of one host: started together, ended together
    process      one worker process: start, watch, interrupt, stop
    output       what the workers print, brought to the user
    logs         what they log and warn of, brought to the loggers and filters of the main program
    channel      commands and replies through one shared block: the main process's end
    listener     a worker's end
    proxy        the end for workers on other hosts
    block        what lies where in the block
    descriptors  open files, on their way to another process
    waiting      poll for a while, then sleep; fences
    queue        items for whichever worker is free, and results on their way back
"""
