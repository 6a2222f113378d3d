"""Several hosts: one process of MPI's on each, and what travels between them.

::

    names      which hosts the user has named
    launch     which way hosts are reached; starts a process of MPI's on each
    joined     hosts that mpiexec or srun has started, with the program
    __main__   starts a program beside one of them
    process    one of the processes
    cleanup    what is left of MPI's processes, and goes when they have ended
    pool       the hosts and the workers on them, as the main process sees them; where two hosts differ
    gateway    the process beside the main process: commands to the hosts, answers from them
    leader     the process of another host, and the workers there
    protocol   what these tell each other
    mirror     a host's copies of the main process's segments, and which bytes of them are current
    parcels    pieces of segments, and pickled values, on their way
    tasks      both ends of a map over hosts
    merging    the parts of a result, from all hosts
    relay      what the ranks of a host show those of others
    wire       messages between hosts, by MPI
    seals      digests of all of it
"""
