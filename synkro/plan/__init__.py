"""What a call will do, computed before anything is done: integers in, immutable records out.

Nothing in here knows a process, a device or a session.

::

    binding  the arguments of a call, bound to a function's parameters
    call     the records that describe one call
    extents  which bytes of memory a command reads and writes
    outputs  nested outputs as flat leaves, and the reduction of each
    batch    what a user's ``batch=`` selects
    split    rows over ranks, rows over slices
"""
