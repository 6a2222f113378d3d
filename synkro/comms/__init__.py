"""Arrays, ranks and operations; never functions or ``Data``.

ops      the reduce operations: how values accumulate, and in which dtype
base     the interface of a communicator
meeting  where the ranks of a call meet
records  what each of them says there
shm      through shared memory, for workers on CPUs
"""
