"""Memory that processes share.

::

    segment     anonymous shared memory, reserved when it is created; from its number to its memory,
                and to its version, which tells what has changed
    arena       memory that the workers share with each other
    mapping     how memory is mapped, and its huge pages
    files       which file a memory-mapped array maps
    named       shared memory with a name, which other programs open
    keeper      a process that cleans up when another one has ended
    ring        slots in such memory, through which a program hands frames over
    interrupts  Ctrl-C, deferred while steps belong together; what is done when an object is gone
"""
