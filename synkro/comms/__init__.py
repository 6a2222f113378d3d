"""Collectives over arrays: they know arrays, ranks and operations, never functions or ``Data``.

::

    nccl       NCCL, under a watchdog
    gpu        the communicator of a rank on a GPU: which way arrays go
    direct     from GPU to GPU: agreed upon through shared memory, moved by NCCL, in dtypes that it has;
               and which ranks NCCL connects
    peers      through device memory that ranks open to each other
    shm        through shared memory, for workers on CPUs
    hosts      the same where the ranks are on several hosts
    journal    what a rank changes in shared memory, for the mirrors on other hosts
    agreement  how the ranks check that all are in the same collective
    records    what a rank shows the others when it enters a collective
    meeting    where the ranks of a call meet
    board      what each rank shows the others there
    members    the ranks that meet: all of a call, or those of one colour
    base       the interface of a communicator
    ops        the reduce operations: how values accumulate, and in which dtype
"""
