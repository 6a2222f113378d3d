"""Several hosts: one process of MPI's on each, and what travels between them.

::

    __main__   is one of them
    launch     starts the processes, from the main process
    gateway    the one beside the main process
    leader     the one of another host
    questions  what the main process asks them
    hello      what a host says of itself, and where two differ
    wire       messages between them, by MPI
    janitor    removes what MPI leaves in /dev/shm
    relay      passes on what ranks change in shared memory
    traffic    what a command reads and writes on the ranks of one host
"""
