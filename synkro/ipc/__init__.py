"""What the operating system gives: shared memory, wake-ups, processes, their output.

    segment   anonymous shared memory, reserved when it is created
    mapping   how it is mapped, and its huge pages
    arena     memory that workers share with each other
    departure  what happens when an object is gone
    interrupts  Ctrl-C, put off while a resource has no owner yet
    mapped    which file a memory-mapped array maps
    channel   commands and replies through a shared block; spin, then sleep
    process   one worker process: start, watch, interrupt, stop
    output    the workers' stdout and stderr, brought to the user's

Everything here carries bytes and descriptors and knows no command.
"""
