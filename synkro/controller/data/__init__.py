"""Inputs: arrays in shared memory, in files, and in memory that other programs write.

::

    data      arrays in shared memory, the inputs of functions
    stored    arrays in files, which the workers read by themselves
    attached  memory that other programs write: attached arrays, and rings
    named     arrays in memory with a name
    handle    what all inputs have in common: how they read, like arrays
    outgoing  buffers in shared memory, by which arrays go to the workers
"""
