"""Several hosts: one process of MPI's on each, and what travels between them.

::

    reached    which way the hosts of fork(hosts=…) are reached
    cluster    the processes of MPI's, as the main process sees them
    launch     starts them, from the main process
    mpiexec    how that is called, and what it calls to reach hosts
    joined     those that were there before: mpiexec or srun has started the program
    __main__   starts a program beside one of them
    process    is one of them
    crew       the workers of all hosts, as the main process sees them
    gateway    the process beside the main process
    dispatch   its part of a session: commands to the hosts, answers from them
    leader     the process of another host
    outpost    its part of a session: the workers there
    segments   the main process's, as the gateway sees them
    mirrors    its copies of the main process's segments
    stock      what a host has of them
    cargo      pieces of segments on their way
    porter     items of a map to a host, and results from there
    depot      where its workers take them
    merging    the parts of a result, from all hosts
    freight    pickled values on their way
    traffic    what a command reads and writes on the ranks of one host
    orders     what they tell each other while a session lives
    clocks     how far those of hosts are apart
    questions  what the main process asks them before
    hello      what a host says of itself, and where two differ
    wire       messages between them, by MPI
    janitor    removes what MPI leaves in /dev/shm
    sharing    what the ranks of a host show those of others, over the wire
    relay      the same, without the wire
"""
