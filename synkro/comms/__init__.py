"""Arrays, ranks and operations; never functions or ``Data``.

ops        the reduce operations: how values accumulate, and in which dtype
base       the interface of a communicator
meeting    where the ranks of a call meet
records    what each of them says there
agreement  how they find out whether all are in the same collective
shm        through shared memory, for workers on CPUs
gpu        between GPUs: agreed upon through shared memory, moved by NCCL
links      which ranks NCCL connects
nccl       NCCL, under a watchdog
wire       what NCCL can carry, and how
"""
