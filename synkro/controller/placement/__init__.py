"""Which devices a session uses, and what the workers and the user learn of it.

::

    machines   the hosts of a session, and the ranks of each
    placement  the device and the environment of each worker, and status lines; what NCCL needs
    choice     ``devices=``, ``SYNKRO_DEVICES`` and context-name maps
    targets    what ``target=`` names
"""
